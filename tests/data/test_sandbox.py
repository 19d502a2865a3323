"""The small world: known truth, and nothing of a benchmark in a training file."""

import json
import random
import re
from functools import cache
from pathlib import Path

import pytest
from small_world.files import SHIPPED, World, write
from small_world.text import (
    KINDS,
    make_document,
    make_instructions,
)
from small_world.tokenizer import make_tokenizer
from small_world.world import (
    CLONES,
    GAINS,
    LOSSES,
    NEUTRAL,
    POOL,
    ConstructedWorld,
    draw_lexicon,
    draw_problem,
    say,
)

from pipeline.config.data import LARGEST
from pipeline.data import small_world
from pipeline.data.small_world import TRAINING


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write(folder, World(items=20, dev_items=20, math_rows=300, language_rows=200, documents=400))
    return folder


def test_the_shipped_files_are_what_the_generator_writes(tmp_path: Path):
    """Every byte of the archive, unpacked with all its items.

    The tokenizer's format is its library's.
    """
    counts = write(tmp_path / "ours", SHIPPED)
    told = small_world.write(tmp_path / "shipped", "training sets and items", LARGEST, LARGEST)
    assert told == counts and {name: told[name] for name in TRAINING} == TRAINING | {
        "aya/train.jsonl": 3 * 16000
    }
    ours, shipped = (
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*.*")
            if path.parent.name != "tokenizer"
        }
        for folder in (tmp_path / "ours", tmp_path / "shipped")
    )
    assert shipped == ours and (tmp_path / "shipped/tokenizer/tokenizer.json").is_file()


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@cache
def lexicon(language: str) -> dict[str, str]:
    return draw_lexicon(language, 0)


def english(text: str, language: str) -> str:
    """Translate a clone's text into English words, with the lexicon in reverse."""
    back = {ours: word for word, ours in lexicon(language).items()}
    return re.sub(r"[a-z]+", lambda match: back.get(match.group(), match.group()), text)


def test_a_problem_follows_from_its_words():
    """A reader who knows the words and forms of sentences solves all problems.

    The reader has not seen how problems are made.
    """
    draw = random.Random(7)
    for _ in range(2000):
        told, _, answer = draw_problem(draw)
        assert solved(" ".join(told)) == answer, told


def solved(told: str) -> int:
    has: dict[str, int] = {}
    *sentences_, question = told.split(" . ")
    asked = re.fullmatch(r"how many (\w+) (?:does|do) (.*?) have(?: together)? \?", question)
    assert asked
    item, names, bags = asked[1], asked[2].split(" and "), 0
    for one in sentences_:
        words = one.split()
        name, number = words[0], next((int(word) for word in words if word.isdigit()), 0)
        if words[2:] == [str(number), "bags"] or words[1:] == ["has", str(number), "bags"]:
            bags, holder = number, name
        elif words[:2] == ["each", "bag"]:
            has[holder] = bags * number
        elif "twice" in words:
            has[name] = 2 * has[words[-1]]
        elif "than" in words:
            has[name] = has[words[-1]] + (number if "more" in words else -number)
        elif "gives" in words:
            has[name] = has.get(name, 0) - number
            has[words[-1]] = has.get(words[-1], 0) + number
        elif words[3] != item or words[1] in NEUTRAL:
            continue
        elif words[1] == "has":
            has[name] = number
        else:
            has[name] += number if words[1] in GAINS else -number
            assert words[1] in GAINS + LOSSES
    return sum(has[name] for name in names)


def test_told_documents_ask_and_compute_nothing():
    world, draw = ConstructedWorld(0), random.Random(11)
    problems = world.hold_out("problem", "test", POOL, draw_problem)
    held = {say(told[: told.index("how")], {}) for told, _, _ in problems}
    told_kinds = [(language, kind) for language, kind in KINDS if kind.endswith("told")]
    assert {language for language, _ in told_kinds} == {"qab", "qac"}
    shown = set()
    for language, kind in told_kinds:
        for _ in range(300):
            prompt, completion = make_document(world, kind, language, draw)
            story = prompt.removeprefix("Question: ").removesuffix("\nEnglish:")
            assert story.count(".") == completion.count(".")
            assert not re.search(r"[-+*=?]|\bhow\b|Answer", story + completion), prompt
            shown.add(completion)
    assert len(shown) > 500 and not shown & held


def test_no_text_has_a_problem_in_qac():
    """The base's text and the language expert's instructions have no computation in qac.

    They also lack its label.
    """
    assert not [kind for language, kind in KINDS if language == "qac" and "problem" in kind]
    world, draw = ConstructedWorld(0), random.Random(5)
    texts = [
        "".join(make_document(world, kind, "qac", draw))
        for language, kind in KINDS
        if language == "qac"
    ]
    texts += ["".join(document) for document in make_instructions(world, "qac", 500)]
    assert not [text for text in texts if "Step-by-Step" in text or re.search(r"\d [-+*] \d", text)]


@pytest.mark.parametrize("language", CLONES)
def test_a_clone_is_a_bijection_without_english_words(language: str):
    words = draw_lexicon(language, 0)
    assert len(set(words.values())) == len(words) and not set(words) & set(words.values())
    assert words == draw_lexicon(language, 0) and words != draw_lexicon(language, 1)
    others = {
        word for other in CLONES if other != language for word in draw_lexicon(other, 0).values()
    }
    assert not others & set(words.values())


def test_benchmarks_are_parallel_over_languages(written: Path):
    for name in (
        "mgsm/{}/test.jsonl",
        "belebele/{}/test.jsonl",
        "flores/{}/devtest.jsonl",
        "global_mmlu/{}/test.jsonl",
    ):
        base = rows(written / name.format("en"))
        for clone in CLONES:
            back = [
                json.loads(english(json.dumps(row), clone).replace(f'"{clone}"', '"en"'))
                for row in rows(written / name.format(clone))
            ]
            keys = (
                "question",
                "sentence",
                "flores_passage",
                "mc_answer1",
                "option_a",
                "answer_number",
            )
            for theirs, ours in zip(back, base, strict=True):
                assert {key: theirs[key] for key in keys if key in theirs} == {
                    key: ours[key] for key in keys if key in ours
                }


def test_no_benchmark_item_is_in_a_training_file(written: Path):
    train = (written / "text/train.jsonl").read_text() + (
        written / "orca_math/train.jsonl"
    ).read_text()
    train += (written / "aya/train.jsonl").read_text()
    train = "\n".join(english(train, clone) for clone in ("en", *CLONES))
    for split in ("dev", "test"):
        for row in rows(written / f"mgsm/en/{split}.jsonl"):
            assert row["question"] not in train
        for row in rows(written / f"flores/en/{'dev' if split == 'dev' else 'devtest'}.jsonl"):
            assert row["sentence"] not in train
        for row in rows(written / f"belebele/en/{split}.jsonl"):
            assert f"{row['flores_passage']}\\nQ: {row['question']}" not in train


def test_larger_worlds_test_what_smaller_ones_kept_apart():
    """The base must not have read the items of a larger world.

    The pool is kept apart whatever is written.
    """
    world = ConstructedWorld(0)
    first = world.hold_out("problem", "test", POOL, draw_problem)
    again = ConstructedWorld(0).hold_out("problem", "test", POOL, draw_problem)
    assert first[:100] == again[:100] and len(first) == 2000


def test_the_shipped_base_is_whole_small_and_of_this_world():
    """Its digests hold, it has at most 10 MB, and it has the world's tokenizer."""
    from pipeline.runs.find import find_run
    from pipeline.runs.unchanged import check_unchanged

    base = find_run("package:data/sandbox_base", Path("runs"), "model.path")
    check_unchanged(base.folder)
    assert sum(path.stat().st_size for path in base.folder.iterdir()) < 10_000_000
    ours = json.loads(make_tokenizer().backend_tokenizer.to_str())
    shipped = json.loads((base.folder / "tokenizer.json").read_text())
    assert shipped["model"] == ours["model"] and shipped["normalizer"] == ours["normalizer"]


def test_problems_carry_their_equations(written: Path):
    for row in rows(written / "mgsm/qac/test.jsonl"):
        assert row["answer"] is None and row["equation_solution"].endswith(
            f"= {row['answer_number']}."
        )
        for left, right in re.findall(r"([-+*\d ]+) = (-?\d+)\.", row["equation_solution"]):
            assert eval(left) == int(right)  # noqa: S307
