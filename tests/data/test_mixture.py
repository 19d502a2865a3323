"""Training sets: what is taken, dropped and counted, and what is refused."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from reading import read_source
from repositories import jsonl

from pipeline.benchmarks import scored_files
from pipeline.benchmarks.flores import read_sentences
from pipeline.config.compose import compose
from pipeline.config.data import Data, Expert, Source
from pipeline.config.stages import DataStage
from pipeline.data.rows import read_jsonl
from pipeline.data.stage import make_training_set
from pipeline.data.word_problems import is_word_problem
from pipeline.errors import PipelineError
from pipeline.languages import language
from pipeline.runs.run import Run
from pipeline.stages.rows import build

MATH = Source(file="orca_math/train.jsonl", rows="orca_math")


def stage(data: Data, seed: int = 0, **sources: Source) -> DataStage:
    return DataStage(
        stage="data", seed=seed, expert=Expert(name="e", side="math", sources=sources), data=data
    )


def problems(count: int) -> list[dict[str, object]]:
    return [{"question": f"q{n}", "answer": f"a{n}"} for n in range(count)]


def test_duplicates_and_empty_rows_are_dropped_and_counted(tmp_path: Path):
    jsonl(
        tmp_path / "orca_math/train.jsonl",
        [*problems(5), *problems(2), {"question": "q", "answer": " "}],
    )
    jsonl(tmp_path / "more.jsonl", [*problems(6)])
    more = Source(file="more.jsonl", rows="gsm8k")
    counts = make_training_set(stage(Data(), first=MATH, second=more), tmp_path, tmp_path)
    none = {
        "contaminated": 0,
        "number_variants": 0,
        "word_problems": 0,
        "shared": {},
    }
    assert counts == {
        "first": {"rows": 8, "empty": 1, "duplicates": 2, "left": 5, "taken": 5, **none},
        "second": {"rows": 6, "empty": 0, "duplicates": 5, "left": 1, "taken": 1, **none},
        "train": 6,
        "validation": 0,
    }
    assert sorted(row["prompt"] for row in read_jsonl(tmp_path / "train.jsonl")) == [
        f"q{n}" for n in range(6)
    ]
    assert "| first | local | not pinned |" in (tmp_path / "data_card.md").read_text()


def test_rows_that_cannot_be_used_are_counted_by_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bitext = [
        "1.2\tWater\tMaji",
        "1.3\tBread\tMkate",
        "1.0\tNo\tHapana",
        "a\tb\tc",
        "half a line",
        "1.2\tFire\t",
    ]
    (tmp_path / "pairs.txt").write_text("\n".join(bitext))
    jsonl(
        tmp_path / "own.jsonl",
        [{"question": "q", "answer": answer} for answer in (["a", "b"], {"a": 1}, "a", " ")],
    )
    talk = [
        [{"role": "user", "content": ["q"]}, {"role": "assistant", "content": "a"}],
        [["q", "r"]],
    ]
    jsonl(tmp_path / "talk.jsonl", [{"talk": one} for one in talk])
    sources = {
        "pairs": Source(file="pairs.txt", rows="nllb", language="sw", min_score=1.1),
        "own": of("own"),
        "talk": Source(file="talk.jsonl", rows="conversation", column="talk"),
    }
    counts = make_training_set(stage(Data(), **sources), tmp_path, tmp_path)
    told = {
        name: {key: found for key, found in counts[name].items() if isinstance(found, int)}
        for name in sources
    }
    zero = {
        "duplicates": 0,
        "contaminated": 0,
        "number_variants": 0,
        "word_problems": 0,
    }
    assert told == {
        "pairs": {
            "rows": 6,
            "broken": 2,
            "low_score": 1,
            "empty": 1,
            "left": 2,
            "taken": 2,
            **zero,
        },
        "own": {"rows": 4, "not_text": 2, "empty": 1, "left": 1, "taken": 1, **zero},
        "talk": {"rows": 2, "not_turns": 1, "empty": 0, "left": 1, "taken": 1, **zero},
    }
    card = (tmp_path / "data_card.md").read_text()
    head = (
        "rows | empty | not text | not turns | broken | low score | duplicates | contaminated | "
        "number variants | word problems | left"
    )
    assert f"| {head} | taken | shared with |" in card
    assert (
        "| pairs | local | not pinned |  |  | 6 | 1 | 0 | 0 | 2 | 1 | 0 | 0 | 0 | 0 | 2 | 2 |  |"
        in card
    )
    assert (
        "Unusable rows, low score: below min_score" in card
        and "not text: neither text nor a number: a list" in card
    )
    assert (
        "of 12 rows, 2 empty, 2 not text, 1 not turns, 2 broken, 1 low score, 0 dup"
        in capsys.readouterr().err
    )


def test_a_file_outside_data_root_is_refused_with_the_way_round(tmp_path: Path):
    root = tmp_path / "root"
    jsonl(tmp_path / "mine.csv", [])
    jsonl(root / "in/mine.jsonl", problems(2))
    for file in (tmp_path / "mine.csv", "../mine.csv"):
        words = ["stage=data", "expert=own", f"expert.sources.own.file={file}", f"data_root={root}"]
        with pytest.raises(PipelineError) as caught:
            build(
                compose(
                    [
                        *words,
                        "expert.sources.own.prompt='{question}'",
                        "expert.sources.own.completion='{answer}'",
                    ]
                )
            )  # type: ignore[arg-type]
        remedy = f"is not below data_root={root}. Set file=mine.csv and data_root={tmp_path}"
        assert str(caught.value) == f"file={file} of a source {remedy}."
    inside = Source(file=str(root / "in/mine.jsonl"), rows="gsm8k")
    assert make_training_set(stage(Data(), a=inside), root, tmp_path)["train"] == 2


def test_size_validation_and_order_follow_the_seed(tmp_path: Path):
    jsonl(tmp_path / "orca_math/train.jsonl", problems(50))

    def taken(seed: int, data: Data) -> tuple[list[str], list[str]]:
        make_training_set(stage(data, seed, a=MATH), tmp_path, tmp_path)
        train, validation = (
            read_jsonl(tmp_path / f"{name}.jsonl") for name in ("train", "validation")
        )
        return [row["prompt"] for row in train], [row["prompt"] for row in validation]

    train, validation = taken(0, Data(size=30, validation=10))
    assert len(train) == 30 and len(validation) == 10 and not set(train) & set(validation)
    assert taken(0, Data(size=30, validation=10)) == (train, validation)
    assert taken(1, Data(size=30, validation=10)) != (train, validation)
    assert taken(0, Data(shuffle=False))[0] == [f"q{n}" for n in range(50)]
    with pytest.raises(
        PipelineError,
        match=r"data.size=45 and data.validation=10 need 55 rows, but expert=e has 50",
    ):
        taken(0, Data(size=45, validation=10))


@pytest.mark.parametrize("share", [None, 1.0])
def test_rows_in_their_order_are_drawn_from_all_of_them(tmp_path: Path, share: float | None):
    """A curriculum keeps its easy rows, and is validated on its hard ones too."""
    numbered(tmp_path, {"easy": 50, "hard": 50})
    sources = {name: of(name, share=share) for name in ("easy", "hard")}

    def drawn(seed: int) -> list[list[tuple[str, int]]]:
        make_training_set(
            stage(Data(size=60, validation=20, shuffle=False), seed, **sources), tmp_path, tmp_path
        )
        parts = [read_jsonl(tmp_path / f"{name}.jsonl") for name in ("train", "validation")]
        return [
            [(row["prompt"].split()[0], int(row["prompt"].split()[1])) for row in part]
            for part in parts
        ]

    train, validation = drawn(0)
    assert (len(train), len(validation)) == (60, 20) and not {*train} & {*validation}
    for part in (train, validation):
        assert part == sorted(part) and {name for name, _ in part} == {"easy", "hard"}
    assert drawn(1) != [train, validation]


def test_the_order_of_sources_is_hashed_where_it_is_that_of_the_rows(tmp_path: Path):
    """A curriculum, easy before hard, is another set than hard before easy."""
    sources = {name: Source(file=f"{name}.jsonl", rows="gsm8k") for name in ("easy", "hard")}
    for name in sources:
        jsonl(
            tmp_path / f"{name}.jsonl",
            [{"question": f"{name} {n}", "answer": "a"} for n in range(2)],
        )
    hashes: dict[bool, list[str]] = {True: [], False: []}
    for names in (["easy", "hard"], ["hard", "easy"]):
        for shuffle in (True, False):
            config = stage(Data(shuffle=shuffle), **{name: sources[name] for name in names})
            hashes[shuffle].append(Run(config, "x", version=1).hash)
        make_training_set(config, tmp_path, tmp_path)
        rows = [row["prompt"].partition(" ")[0] for row in read_jsonl(tmp_path / "train.jsonl")]
        assert rows == [names[0]] * 2 + [names[1]] * 2
    assert len({*hashes[False]}) == 2 and len({*hashes[True]}) == 1


def test_of_scripts_that_share_a_code_only_the_one_that_is_asked_for(tmp_path: Path):
    names = {
        "Simplified Chinese": "zho",
        "Traditional Chinese": "zho",
        "Standard Arabic": "arb",
        "Hindi": "hin",
    }
    rows = [
        {"inputs": name, "targets": "x", "language": name, "language_code": code}
        for name, code in names.items()
    ]
    jsonl(tmp_path / "aya/train.jsonl", rows)  # type: ignore[arg-type]
    for code, expected in {
        "zh": "Simplified Chinese",
        "zh_hant": "Traditional Chinese",
        "ar": "Standard Arabic",
        "hi": "Hindi",
    }.items():
        source = Source(file="aya/train.jsonl", rows="aya", language=code)
        assert [one["prompt"] for one in read_source("aya", source, tmp_path)] == [expected]  # type: ignore[index]
    for code in ("ar_latn", "hi_latn"):
        with pytest.raises(PipelineError, match=f"has no rows in language {code}"):
            source = Source(file="aya/train.jsonl", rows="aya", language=code)
            list(read_source("aya", source, tmp_path))


@pytest.mark.parametrize("columns", [3, 9])
def test_english_is_where_the_order_of_codes_puts_it(columns: int, tmp_path: Path):
    """als_Latn-eng_Latn in AllenAI's files, and en-sq in CCMatrix'; eng_Latn-swh_Latn and en-sw."""
    for code, own, first in (
        ("sq", "Ujë", columns == 3),
        ("sw", "Maji", True),
        ("bn", "জল", False),
    ):
        texts = ["Water", own] if first else [own, "Water"]
        (tmp_path / "a.txt").write_text(
            "\t".join([*texts, "1.2", *"......"] if columns == 9 else ["1.2", *texts]) + "\n"
        )
        (one,) = read_source("nllb", Source(file="a.txt", rows="nllb", language=code), tmp_path)
        assert isinstance(one, dict)
        to_english = one["completion"] == "Water"
        assert to_english or one["completion"] == own
        words = (
            f"from {language(code).name} to English"
            if to_english
            else f"from English to {language(code).name}"
        )
        named = [name for name in ("English", language(code).name) if name in one["prompt"]]
        assert named and (words in one["prompt"] or "Translate from" not in one["prompt"])
        assert (own if to_english else "Water") in one["prompt"]


ENGLISH = {"instruction": "Name a fruit.", "input": "", "output": "Mango", "te": "మామిడి"}
ROW = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("rows", "source", "data", "told"),
    [
        (
            [{**ROW, "answer": ["one"]}] * 2,
            {"rows": "gsm8k"},
            Data(),
            "source a: all 2 rows are unusable",
        ),
        ([{"text": "plain"}], {"rows": "text"}, Data(), "mixes plain text with prompts"),
        (
            [{**ROW, "answer": "\ud83d"}],
            {"rows": "gsm8k"},
            Data(),
            r"a row holds half a character \(.*ud83d",
        ),
        (
            [ROW],
            {"rows": "gsm8k"},
            Data(validation=9, allow_fewer=True),
            "leaves no row for training",
        ),
        (
            [ROW],
            {"rows": "gsm8k", "without": ["squad"]},
            Data(),
            "without=squad: there is no such benchmark",
        ),
    ],
)
def test_what_is_no_training_set(
    rows: list[Any], source: dict[str, Any], data: Data, told: str, tmp_path: Path
):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )  # half a character, too
    jsonl(tmp_path / "orca_math/train.jsonl", problems(2))
    sources = {"a": Source(file="a.jsonl", **source), "math": MATH}
    with pytest.raises(PipelineError, match=told):
        make_training_set(stage(data, **sources), tmp_path, tmp_path)


# --- shares ---


def numbered(root: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        jsonl(
            root / f"{name}.jsonl",
            [{"question": f"{name} {n}", "answer": "a"} for n in range(size)],
        )


def of(name: str, **more: Any) -> Source:
    return Source(file=f"{name}.jsonl", rows="gsm8k", **more)


def taken(folder: Path, split: str = "train") -> Counter[str]:
    return Counter(row["prompt"].split()[0] for row in read_jsonl(folder / f"{split}.jsonl"))


def test_the_whole_ones_first_then_shares(tmp_path: Path):
    numbered(tmp_path, {"whole": 27, "one": 100, "three": 100})
    sources = {"whole": of("whole"), "one": of("one", share=1), "three": of("three", share=3)}
    make_training_set(stage(Data(size=90, validation=17), **sources), tmp_path, tmp_path)
    both = taken(tmp_path) + taken(tmp_path, "validation")
    assert both == {"whole": 27, "one": 20, "three": 60}
    assert taken(tmp_path, "validation").total() == 17
    first = read_jsonl(tmp_path / "train.jsonl")
    make_training_set(stage(Data(size=90, validation=17), **sources), tmp_path, tmp_path)
    assert read_jsonl(tmp_path / "train.jsonl") == first
    make_training_set(stage(Data(size=90, validation=17), 1, **sources), tmp_path, tmp_path)
    assert read_jsonl(tmp_path / "train.jsonl") != first and taken(tmp_path).total() == 90


@pytest.mark.parametrize(
    ("size", "sources", "expected"),
    [
        (
            None,
            {"a": {"share": 1}},
            "has shares (a), but no size. Set data.size, or mixture=layer_swapping",
        ),
        (
            20,
            {"a": {}, "b": {"share": 1}},
            "data.size=20: the sources without a share (a) give 30 rows, more than 20",
        ),
        (
            99,
            {"a": {"share": 1}},
            "expert=e: source a has 30 of 99 rows. Lower data.size, or set data.allow",
        ),
        (
            99,
            {"a": {"share": 2}, "b": {"share": 1}},
            "source a has 30 of 66 rows; source b has 30 of 33 rows",
        ),
        (50, {"a": {"share": 2}, "b": {}}, None),
    ],
)
def test_what_sources_cannot_give(
    size: int | None, sources: dict[str, Any], expected: str | None, tmp_path: Path
):
    numbered(tmp_path, {"a": 30, "b": 30})
    asked = {name: of(name, **more) for name, more in sources.items()}
    if expected is None:
        assert (
            make_training_set(stage(Data(size=size), **asked), tmp_path, tmp_path)["train"] == size
        )
        return
    with pytest.raises(PipelineError) as caught:
        make_training_set(stage(Data(size=size), **asked), tmp_path, tmp_path)
    assert expected in str(caught.value) and not list(tmp_path.glob("candidates*"))


def test_fewer_rows_are_taken_where_that_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    numbered(tmp_path, {"a": 30, "b": 30})
    asked = {"a": of("a", share=2), "b": of("b", share=1)}
    counts = make_training_set(stage(Data(size=60, allow_fewer=True), **asked), tmp_path, tmp_path)
    assert counts["train"] == 50 and taken(tmp_path) == {"a": 30, "b": 20}
    assert "a has 30 of 40 rows; all of them are used" in capsys.readouterr().err
    few = stage(Data(size=99, validation=5, allow_fewer=True), a=of("a"))
    assert make_training_set(few, tmp_path, tmp_path)["train"] == 25


# --- what is dropped ---

PROBLEM = (
    "Janet's ducks lay 16 eggs per day and she eats three for breakfast every single morning of the"
    " week"
)


def with_benchmark(root: Path) -> None:
    jsonl(
        root / "mgsm/en/test.jsonl",
        [{"question": PROBLEM + " . How many?", "answer": None, "answer_number": 18}],
    )
    flores = (
        "The quick brown fox of the old village jumps over the lazy dog near the river bank today"
    )
    jsonl(root / "flores/en/devtest.jsonl", [{"id": 1, "sentence": flores}])
    leaked = [
        {"question": f"Solve: {PROBLEM}!", "answer": "9"},
        {"question": f"Say: {flores}", "answer": "x"},
    ]
    jsonl(root / "a.jsonl", [*leaked, *problems(4)])


def test_rows_of_benchmarks_are_dropped_or_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with_benchmark(tmp_path)
    counts = make_training_set(stage(Data(), a=of("a")), tmp_path, tmp_path)
    assert (
        counts["train"] == 4
        and counts["a"]["contaminated"] == 2
        and counts["a"]["shared"] == {"mgsm": 1, "flores": 1}
    )
    card = (tmp_path / "data_card.md").read_text()
    assert (
        "They are dropped." in card
        and "| flores 1, mgsm 1 |" in card
        and "Benchmark texts: flores 1, mgsm 1" in card
    )
    assert "2 contaminated" in capsys.readouterr().err
    counts = make_training_set(stage(Data(decontaminate="count"), a=of("a")), tmp_path, tmp_path)
    assert counts["train"] == 6 and counts["a"]["contaminated"] == 2
    assert "They are counted and kept." in (tmp_path / "data_card.md").read_text()
    counts = make_training_set(
        stage(Data(decontaminate="count"), a=of("a", without=["flores"])), tmp_path, tmp_path
    )
    assert counts["train"] == 5  # as the papers do with xP3mt
    assert make_training_set(stage(Data(ngram=40), a=of("a")), tmp_path, tmp_path)["train"] == 6


def test_flores_as_plain_text_is_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place = "flores/sw/devtest.txt"
    sentence = (
        "Siku ya Jumatatu wanasayansi kutoka chuo kikuu walitangaza uvumbuzi wa chombo kipya cha"
        " uchunguzi wa seli"
    )
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(f"{sentence}\n\nHii ni sentensi fupi.\n")
    pairs = {
        "Tafsiri.": sentence,
        "Sema:\nSwali: Hii ni SENTENSI fupi": "x",
        "Hii ni sentensi fupi sana.": "Hii ni",
    }
    jsonl(
        tmp_path / "a.jsonl",
        [{"question": key, "answer": value} for key, value in pairs.items()] + problems(1),
    )
    counts = make_training_set(stage(Data(), a=of("a")), tmp_path, tmp_path)
    assert (counts["train"], counts["a"]["contaminated"], counts["a"]["shared"]) == (
        3,
        1,
        {"flores": 1},
    )
    assert (
        "Benchmark texts: flores 2; too short to compare: 1"
        in (tmp_path / "data_card.md").read_text()
    )
    assert scored_files(tmp_path)["flores"] == [tmp_path / place]
    assert read_sentences(tmp_path, language("sw"), "devtest")[1] == sentence


def test_benchmarks_may_be_in_a_folder_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with_benchmark(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "here/a.jsonl")
    make_training_set(stage(Data(), a=of("a")), tmp_path / "here", tmp_path)
    assert "no benchmark files were found to compare with" in capsys.readouterr().err
    counts = make_training_set(
        stage(Data(benchmarks=str(tmp_path)), a=of("a")), tmp_path / "here", tmp_path
    )
    assert counts["a"]["contaminated"] == 2


WORD_PROBLEMS = [
    (
        "Roger ana mipira 5. Ananunua makopo 2 ya mipira 3. Ana mipira mingapi?",
        "5 + 6 = 11. Jibu ni 11.",
    ),
    (
        "রজারের 5টি বল আছে। তিনি 2 ক্যান কিনলেন, প্রতিটিতে 3টি। তার কাছে কতগুলি বল আছে?",
        "তাঁর 11টি বল আছে।",
    ),
    ("రోజర్ వద్ద 5 బంతులు ఉన్నాయి. 2 క్యాన్‌లు కొన్నాడు. ఎన్ని బంతులు ఉన్నాయి?", "సమాధానం 11."),
    (
        "ロジャーは5個のボールがあります。3個入りの缶を2つ買いました。ボールはいくつですか？",
        "答えは11です。",
    ),
    ("১৫টি আম থেকে ৬টি খেলে কতটি থাকে?", "৯টি"),
    ("Leah had 32 chocolates and ate 7. How many are left?", "Leah had 32-7 = 25 left."),
]
OTHERS = [
    ("Mji mkuu wa Kenya ni upi?", "Nairobi."),
    ("Translate: There were 12 people and 3 cars.", "Kulikuwa na watu 12 na magari 3."),
    ("The war began in 1939 and ended in 1945. When did it begin?", "In 1939."),
    (
        "Kenya ilipata uhuru 12 Desemba 1963. Ilikuwa na majimbo 8. Ilikuwa na majimbo mangapi?",
        "Majimbo 8.",
    ),
    ("Write 3 tips in 2 lines.", "Sleep well.\nEat well."),
    ("東京タワーは何年にできましたか。高さは333メートルで、1958年に完成しました。", "1958年です。"),
]


@pytest.mark.parametrize(("prompt", "completion"), WORD_PROBLEMS)
def test_word_problems_are_seen(prompt: str, completion: str):
    assert is_word_problem({"prompt": prompt, "completion": completion})


@pytest.mark.parametrize(("prompt", "completion"), OTHERS)
def test_other_rows_with_numbers_are_not_taken_for_word_problems(prompt: str, completion: str):
    assert not is_word_problem({"prompt": prompt, "completion": completion})
    assert not is_word_problem({"text": f"{prompt} {completion}"})


def test_word_problems_are_dropped_from_language_sets_alone(tmp_path: Path):
    jsonl(
        tmp_path / "a.jsonl", [{"question": q, "answer": a} for q, a in [WORD_PROBLEMS[0], *OTHERS]]
    )
    swahili, math = of("a", language="sw"), of("a")
    counts = make_training_set(stage(Data(), a=swahili), tmp_path, tmp_path)
    assert counts["train"] == len(OTHERS) and counts["a"]["word_problems"] == 1
    assert (
        make_training_set(stage(Data(word_problems="count"), a=swahili), tmp_path, tmp_path)[
            "train"
        ]
        == len(OTHERS) + 1
    )
    assert make_training_set(stage(Data(), a=math), tmp_path, tmp_path)["a"]["word_problems"] == 0


@pytest.mark.parametrize(("expert", "text"), [("bn", "bn_text"), ("math", "math_text")])
def test_continual_pretraining_reads_the_plain_text_of_an_expert(expert: str, text: str):
    by_expert = build(compose(["stage=cpt", f"expert={expert}"])).parents["data"]  # type: ignore[arg-type]
    assert by_expert.hash == build(compose(["stage=data", f"expert={text}"])).hash  # type: ignore[arg-type]
    assert f"data-{text}" in by_expert.name
    both = build(compose(["stage=cpt", "expert=math_bn", "sft=mixed"])).parents["data"]  # type: ignore[arg-type]
    assert by_expert.hash in {one.hash for one in both.parents.values()}  # type: ignore[attr-defined]


@pytest.mark.real_data
def test_the_problems_that_mgsm_took_from_gsm8k_are_found_all_and_alone(tmp_path: Path):
    """MGSM's 250 are translations of 250 of GSM8K's 1,319 test problems.

    None is of its training problems, of which two share 13 words with a solution that mgsm_steps
    scores, and six 13 words without their numbers.
    """
    data = Path(os.environ["PIPELINE_TEST_DATA"])
    test, train = (Source(file=f"gsm8k/{split}.jsonl", rows="gsm8k") for split in ("test", "train"))
    counts = make_training_set(stage(Data(), tested=test, taught=train), data, tmp_path)
    assert (counts["tested"]["contaminated"], counts["taught"]["contaminated"]) == (250, 2)
    assert (
        counts["taught"]["shared"] == {"mgsm_steps": 2} and counts["taught"]["left"] == 7473 - 2 - 6
    )


def test_number_variants_are_dropped_from_math_sets_and_counted_in_language_sets(
    tmp_path: Path,
) -> None:
    """Expected by hand: the variant shares no 13 words with the item, and 14 without numbers."""
    item = (
        "Ana buys 16 red pens for 3 coins each and sells them all to nine friends for 1,250 coins"
        " on Monday"
    )
    variant = item.replace("16", "170").replace("3", "4").replace("1,250", "99.5")
    jsonl(
        tmp_path / "mgsm/en/test.jsonl", [{"question": item, "answer": None, "answer_number": 18}]
    )
    jsonl(
        tmp_path / "rows.jsonl",
        [{"question": text, "answer": "so"} for text in (item, variant, "Ana buys 16 pens")],
    )
    math, text = (
        Source(file="rows.jsonl", rows="gsm8k"),
        Source(file="rows.jsonl", rows="gsm8k", language="sw"),
    )

    def left(source: Source, **knobs: str) -> tuple[int, int, int]:
        counts = make_training_set(
            stage(Data(word_problems="count", **knobs), a=source), tmp_path, tmp_path
        )["a"]
        return counts["contaminated"], counts["number_variants"], counts["left"]

    assert left(math) == (1, 1, 1) and left(text) == (1, 1, 2)
    assert left(math, number_variants="count") == (1, 1, 2) and left(
        text, number_variants="drop"
    ) == (1, 1, 1)
    assert left(math, decontaminate="count") == (1, 1, 3)
    assert left(math, decontaminate="count", number_variants="drop") == (1, 1, 2)
    card = (tmp_path / "data_card.md").read_text()
    assert "1 number variants" in card or "| number variants |" in card
    assert "Paraphrases and translations are not detected" in card


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["en", "sw", "bn", "te", "ja"])
def test_mgsm_with_each_number_changed_by_one_is_found(code: str, tmp_path: Path) -> None:
    data = Path(os.environ["PIPELINE_TEST_DATA"]) / f"mgsm/{code}/test.jsonl"
    questions = [row["question"] for row in read_jsonl(data)]
    changed = [re.sub(r"\d+", lambda found: str(int(found[0]) + 1), text) for text in questions]
    jsonl(tmp_path / f"mgsm/{code}/test.jsonl", read_jsonl(data))
    jsonl(tmp_path / "rows.jsonl", [{"question": text, "answer": "so"} for text in changed])
    counts = make_training_set(
        stage(Data(decontaminate="count"), a=Source(file="rows.jsonl", rows="gsm8k")),
        tmp_path,
        tmp_path,
    )
    found = counts["a"]["contaminated"] + counts["a"]["number_variants"]
    assert found == (249 if code == "te" else 250)  # one has 12 words besides its numbers


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["en", "sw", "bn", "te", "ja"])
def test_most_of_mgsm_is_seen_by_its_questions_and_bare_answers(code: str):
    """The hardest form, without a worked solution; with one, nine of ten GSM8K problems are."""
    rows = read_jsonl(Path(os.environ["PIPELINE_TEST_DATA"]) / f"mgsm/{code}/test.jsonl")
    seen = [
        is_word_problem({"prompt": row["question"], "completion": str(row["answer_number"])})
        for row in rows
    ]
    assert sum(seen) > 0.75 * len(seen)
