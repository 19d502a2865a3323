"""Every source, read from a local repository through the call that reads the Hub."""

import gzip
import json
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import repositories
from fixture_types import Call
from omegaconf import OmegaConf
from reading import read_source

from pipeline.config import conf
from pipeline.config.compose import compose
from pipeline.config.data import Source
from pipeline.config.stages import DataStage, TrainStage
from pipeline.data.load import open_source
from pipeline.data.mixture import examples_of
from pipeline.data.sources import Example, Unusable, gsm8k_calculations, messages_of, whole_turns
from pipeline.errors import PipelineError
from pipeline.stages.lengths import rows_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(
        datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0
    )  # 5 s after each stream of parquet


def source(name: str, **more: Any) -> Source:
    """Return a source as conf/data has it."""
    shipped = OmegaConf.load(conf.folder() / f"data/{name}.yaml")
    found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Source), shipped, more))
    assert isinstance(found, Source)
    return found


def rows(name: str, folder: Path, **more: Any) -> list[Example | Unusable]:
    """Return the rows of a source whose repository is made below `folder`."""
    found = source(name, **more)
    assert found.hub is not None
    here = folder / found.hub.partition("/")[2]
    repositories.MADE[name](here)
    return list(read_source(name, replace(found, hub=str(here), revision=None), None))


def pair(prompt: str, completion: str) -> Example:
    return {"prompt": prompt, "completion": completion}


NAIROBI, DODOMA = (
    pair("Mji mkuu wa Kenya ni upi?", "Nairobi."),
    pair("Mji mkuu wa Tanzania ni upi?", "Dodoma."),
)
TELUGU = [pair("ఒక పండు పేరు చెప్పండి.", "మామిడి"), pair("అనువదించండి.\nనీరు", "జలం"), "empty"]
WATER, NAME, THIS = (
    pair("জল কোথা থেকে আসে?", "মেঘ থেকে।"),
    pair("নাম কী?", "আমি সহায়ক।"),
    pair("কী?", "এটা।"),
)
HOME = pair("নাম কী?\n\nআমি সহায়ক।\n\nবাড়ি কোথায়?", "ঢাকায়।")
RICE = pair("নিচের বাক্যটি ইংরেজিতে অনুবাদ করো\nআমি ভাত খাই।", "I eat rice.")
CLIPS = pair("Natalia sold 48 and 24 clips. How many?", "48+24=<<48+24=72>>72\n#### 72")
EXPECTED: list[tuple[str, dict[str, Any], list[Example | Unusable]]] = [
    ("aya", {"language": "sw"}, [NAIROBI, DODOMA]),
    ("aya", {"language": "te"}, [pair("తెలంగాణ రాజధాని ఏది?", "హైదరాబాద్.")]),
    ("telugu_alpaca", {}, TELUGU),
    ("telugu_gpteacher", {}, TELUGU),
    ("indic_sharellama", {"language": "bn"}, [WATER, NAME, "empty", "empty", THIS]),
    ("indic_sharellama", {"language": "bn", "turns": None}, [WATER, HOME, "empty", "empty", THIS]),
    ("bongchat", {}, [RICE, pair("একটি ফলের নাম বলো", "আম")]),
    ("inkuba", {}, [pair("Tafsiri kwa Kiingereza.\n\nHabari yako?", "How are you?")]),
    ("xp3mt", {"language": "sw"}, [pair("Andika muhtasari (sw): rais", "Rais alisema.")]),
    ("ichikara", {}, [pair("日本で一番高い山は？20231221-002", "富士山です。")]),
    ("dolly_ja", {}, [pair("いつですか？\n航空は", "8月31日")]),
    ("bn_wikisource", {}, [{"text": "আমার সোনার বাংলা"}]),
    ("gsm8k", {}, [CLIPS]),
    (
        "gsm8k_calculations",
        {},
        [pair("Question: Natalia sold 48 and 24 clips. How many?\nAnswer:", "48+24=72\n#### 72")],
    ),
]


@pytest.mark.parametrize(("name", "more", "expected"), EXPECTED)
def test_a_repository_gives_its_pairs(
    name: str, more: dict[str, Any], expected: list[Example | Unusable], tmp_path: Path
) -> None:
    found = rows(name, tmp_path, **more)
    assert [
        {k: v for k, v in row.items() if k != "messages"} if isinstance(row, dict) else row
        for row in found
    ] == expected


def test_streams_give_every_row_in_an_order_of_the_seed(tmp_path: Path) -> None:
    found = rows("llm_japanese", tmp_path)
    assert sorted(row["prompt"] for row in found if isinstance(row, dict)) == [
        "次の日本語を英語に翻訳してください。\n猫が好きです。",
        "首都は？",
    ]
    pages = rows("open_web_math", tmp_path / "two")
    assert sorted(row["text"] for row in pages if isinstance(row, dict)) == [
        "# Proof 0",
        "# Proof 1",
        "# Proof 2",
    ]
    some = rows("open_web_math", tmp_path / "three", candidates=2)
    assert len(some) == 2


@pytest.mark.parametrize("columns", [9, 3])
@pytest.mark.parametrize("code", ["sw", "bn", "te", "ja"])
def test_both_layouts_of_raw_bitext(code: str, columns: int, tmp_path: Path) -> None:
    """Pairs of enough score, one direction each, a lone quote kept; the others by their reasons."""
    path = tmp_path / "pairs.gz"
    repositories.raw_bitext(path, code, columns)
    found = list(read_source("nllb", source(f"nllb_{code}", url=str(path)), None))
    pairs = [row for row in found if isinstance(row, dict)]
    assert len(pairs) == 2 and sorted(row for row in found if isinstance(row, str)) == [
        "broken",
        "low_score",
    ]
    for row in pairs:
        english, other = next(
            one for one in repositories.PAIRS[code] if one[0] in "".join(row.values())
        )
        into_english = row["completion"] == english
        assert into_english or row["completion"] == other
        assert (other if into_english else english) in row["prompt"] and "English" in row["prompt"]


def turns(cell: Any) -> list[tuple[str, str]] | str:
    """Questions and answers, as they are kept."""
    found = messages_of(cell)
    if isinstance(found, str):
        return found
    texts = [one["content"] for one in whole_turns(found, None) if one["role"] != "system"]
    return list(zip(texts[::2], texts[1::2], strict=True))


def test_a_conversation_keeps_its_turns(tmp_path: Path) -> None:
    system, tool = (
        {"role": "system", "content": "Be kind."},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    )
    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "add"}}],
    }
    ask, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}
    more, last = {"role": "user", "content": "And 3?"}, {"role": "assistant", "content": "7."}
    talks = [
        [ask, answer],
        [system, ask, answer, more, last, more],
        [answer, ask, answer],
        [ask, calls, tool, answer],
        [system, more],
        [["2 + 2?", "4."], ["And 3?", "7."]],
    ]
    (tmp_path / "a.json").write_text(json.dumps([{"talk": talk} for talk in talks]))
    flat = {"prompt": "2 + 2?\n\n4.\n\nAnd 3?", "completion": "7."}
    asked = {"prompt": "2 + 2?", "completion": "4."}

    def of(**knobs: Any) -> list[Any]:
        own = source("own", file="a.json", rows="conversation", column="talk", **knobs)
        return list(read_source("own", own, tmp_path))

    whole = {**flat, "messages": [system, ask, answer, more, last]}
    untold = {**flat, "messages": [ask, answer, more, last]}
    assert of() == [asked, whole, asked, "tool_turns", "empty", untold]
    first = {**asked, "messages": [system, ask, answer]}
    assert of(turns=1) == [asked, first, asked, "tool_turns", "empty", asked]
    (tmp_path / "a.json").write_text(json.dumps([{"talk": [{"from": "bing", "value": "4."}]}]))
    with pytest.raises(
        PipelineError, match="A conversation has a turn of 'bing'. Name its speakers user"
    ):
        of()


def test_turns_in_each_form() -> None:
    whole = [("a", "b"), ("c", "d")]
    assert turns([["a", "b"], ["c", "d"]]) == whole == turns(["a", "b", "c", "d", "e"])
    said = [
        ("system", "be kind"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ]
    assert turns([{"role": role, "content": text} for role, text in said]) == whole
    assert turns([{"from": role, "value": text} for role, text in said]) == whole
    assert turns([["a", "b"], ["c"], ["e", "f"]]) == [("a", "b")]
    assert turns(None) == turns([]) == turns([[]]) == turns([["a", None]]) == []
    assert turns("a text") == turns([[{"role": "user", "content": "a"}]]) == "not_turns"


def said(
    *messages: tuple[str, Any], names: tuple[str, str] = ("role", "content")
) -> list[dict[str, Any]]:
    return [dict(zip(names, message, strict=True)) for message in messages]


def test_completions_come_from_the_assistant_alone() -> None:
    """By who speaks, in both spellings: a greeting before the first question is nobody's answer."""
    hello, ask, answer = ("assistant", "How can I help?"), ("user", "2 + 2?"), ("assistant", "4.")
    assert turns(said(hello, ask, answer)) == [("2 + 2?", "4.")]
    assert turns(said(("system", "be kind"), hello, ask, answer, ("user", "So?"))) == [
        ("2 + 2?", "4.")
    ]
    human = said(("gpt", "Hello"), ("human", "2 + 2?"), ("gpt", "4."), names=("from", "value"))
    assert turns(human) == [("2 + 2?", "4.")]
    assert turns(said(("user", "A."), ask, answer, ("assistant", "Four."))) == [
        ("A.\n\n2 + 2?", "4.\n\nFour.")
    ]
    assert (
        turns(said(hello))
        == turns(said(("system", "be kind")))
        == turns(said(ask, ("assistant", None)))
        == []
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_carriage_return_inside_a_line_ends_none(stream: bool, tmp_path: Path) -> None:
    """Nor do Unicode's other separators.

    Half of the first line is a pair of its own in CCMatrix' three columns.
    """
    lines = ["1.2\tWater\tMaji\rya kunywa", "1.3\tBread\u2028and\x85milk\tMkate\r"]
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        file.write("".join(line + "\n" for line in lines).encode())
    bitext = source(
        "nllb_sw", url=str(tmp_path / "a.gz"), stream=stream, candidates=9 if stream else None
    )
    found = [row for row in read_source("nllb", bitext, None) if isinstance(row, dict)]
    assert len(found) == 2
    whole = {"Water": "Maji\rya kunywa", "Bread\u2028and\x85milk": "Mkate"}
    for row in found:
        english, other = next(both for both in whole.items() if both[0] in "".join(row.values()))
        assert (
            row["completion"] in (english, other)
            and (other if row["completion"] == english else english) in row["prompt"]
        )


# --- the experts ---

SETS = {  # expert -> rows of each source in a set that takes all it can
    "math": {"orca_math": 30},
    "sw": {"aya": 2, "nllb": 2, "inkuba": 1, "xp3mt": 1},
    "bn": {"aya": 1, "nllb": 2, "indic_sharellama": 3, "bongchat": 2},
    "te": {
        "aya": 1,
        "nllb": 2,
        "telugu_alpaca": 2,
        "telugu_gpteacher": 0,
    },  # its fixture repeats the other's rows
    "ja": {
        "aya": 1,
        "nllb": 2,
        "llm_japanese": 2,
        "dolly_ja": 1,
        **{f"ichikara_{n}": 1 for n in range(1, 6)},
    },
    "math_text": {"open_web_math": 3},
    "bn_text": {"wikisource": 1},
}


@pytest.mark.parametrize("expert", SETS)
def test_every_expert_is_built_from_its_repositories(
    expert: str, call: Call, tmp_path: Path
) -> None:
    """stage=data expert=... as it is shipped, only that its sources are on this machine."""
    config = compose(["stage=data", f"expert={expert}"])
    assert isinstance(config, DataStage)
    words = ["data.size=60", "data.allow_fewer=true", f"data.benchmarks={tmp_path}/b"]
    repositories.jsonl(tmp_path / "b/mgsm/en/test.jsonl", [{"question": "of no row " * 9}])
    for name, one in config.expert.sources.items():
        if one.url is not None:
            repositories.raw_bitext(
                tmp_path / f"{name}.gz", one.language or "", 3 if one.language == "ja" else 9
            )
            words.append(f"expert.sources.{name}.url={tmp_path}/{name}.gz")
            continue
        here = tmp_path / str(one.hub).partition("/")[2]
        made = {"wikisource": "bn_wikisource"} | {f"ichikara_{n}": "ichikara" for n in range(1, 6)}
        if not here.is_dir():
            repositories.MADE[made.get(name, name)](here)
        words += [f"expert.sources.{name}.hub={here}", f"expert.sources.{name}.revision=null"]
    told = call(
        "stage=data",
        f"expert={expert}",
        *words,
        f"runs_dir={tmp_path}/runs",
        "tracking.mode=disabled",
    )
    assert told.status == 0, told.err
    manifest = json.loads((Path(told.out.strip()) / "manifest.json").read_text())
    counts = manifest["facts"]["counts"]
    assert {name: counts[name]["taken"] for name in config.expert.sources} == SETS[expert]
    rows = [
        json.loads(line)
        for line in (Path(told.out.strip()) / "train.jsonl").read_text().splitlines()
    ]
    assert all(("text" in row) == expert.endswith("_text") for row in rows)


# --- anyone's own rows ---


def test_own_bitext(tmp_path: Path) -> None:
    repositories.jsonl(tmp_path / "b.jsonl", [{"en": "Water", "sw": "Maji"}])
    bitext = source(
        "own", file="b.jsonl", rows="bitext", language="sw", prompt="{en}", completion="{sw}"
    )
    (row,) = read_source("own", bitext, tmp_path)
    assert (
        isinstance(row, dict)
        and {"Water", "Maji"} >= {row["completion"]}
        and "Swahili" in row["prompt"]
    )


# --- what goes wrong ---


def test_other_repositories_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        PipelineError, match=r"source a \(no/such\) cannot be reached .* Run the same keys with"
    ):
        list(read_source("a", source("aya", hub="no/such"), None))
    with pytest.raises(PipelineError, match="could not be loaded .FileNotFoundError"):
        list(read_source("x", source("xp3mt", hub=str(tmp_path), language="sw"), None))
    with pytest.raises(PipelineError, match="is not on the Hub. Set data_root"):
        list(read_source("x", source("pairs"), None))
    with pytest.raises(PipelineError, match="does not tell its format"):
        (tmp_path / "a.bin").write_text("a")
        list(
            read_source("x", source("own", file="a.bin", prompt="{q}", completion="{a}"), tmp_path)
        )


@pytest.mark.parametrize("form", ["csv", "jsonl", "txt"])
def test_broken_utf8(form: str, tmp_path: Path) -> None:
    (tmp_path / f"a.{form}").write_bytes(b'{"q": "a"}\nq,a\n\xff\xfe,b\n')
    words = (
        {"rows": "text", "column": "text"}
        if form == "txt"
        else {"prompt": "{q}", "completion": "{q}"}
    )
    with pytest.raises(PipelineError, match="UTF-8 text"):
        list(read_source("own", source("own", file=f"a.{form}", **words), tmp_path))


def test_a_file_that_was_only_half_written(tmp_path: Path) -> None:
    repositories.bongchat(tmp_path / "whole")
    path = tmp_path / "half.parquet"
    path.write_bytes((tmp_path / "whole/data/train-00000-of-00001.parquet").read_bytes()[:900])
    with pytest.raises(PipelineError, match="could not be loaded"):
        list(read_source("b", source("bongchat", file="half.parquet"), tmp_path))
    repositories.raw_bitext(tmp_path / "a.gz", "sw", 9)
    (tmp_path / "half.gz").write_bytes((tmp_path / "a.gz").read_bytes()[:80])
    with pytest.raises(PipelineError, match="could not be loaded"):
        list(read_source("nllb", source("nllb_sw", url=str(tmp_path / "half.gz")), None))


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"rows": "poems"}, "rows must be one of orca_math,"),
        (
            {"rows": "bitext", "prompt": "{a}", "completion": "{b}"},
            "rows=bitext needs expert.sources.own.language",
        ),
        ({"rows": "conversation"}, "needs expert.sources.own.column"),
        (
            {"prompt": "{q}"},
            "completion=None names no columns. Set expert.sources.own.completion=",
        ),
        ({"prompt": "{q}", "completion": "plain"}, "completion='plain' names no columns"),
        ({"language": "Klingon"}, "unknown language"),
        (
            {"prompt": "{q}", "completion": "{a}", "candidates": 9},
            "candidates is only for streams. Set",
        ),
        ({"prompt": "{q", "completion": "{a}"}, "prompt='{q' names no columns"),
        (
            {"prompt": "{q.__class__}", "completion": "{a}"},
            r"has no column q.__class__. Its columns are q, a",
        ),
        ({"prompt": "{q[0]}", "completion": "{a}"}, r"has no column q\[0\]. Its columns are q, a"),
        ({"prompt": "{}", "completion": "{a}"}, "has no column . Its columns are q, a"),
        (
            {"prompt": "{q}", "completion": "{a?}"},
            r"completion='{a\?}' names no columns. Set .* {column\?} for a column",
        ),
        (
            {"prompt": "{q}", "completion": "{a}", "language_column": "l"},
            "language_column needs expert.sources.own.lan",
        ),
        (
            {"prompt": "{q}", "completion": "{a}", "language_column": "l", "language": "sw"},
            "has no column l. Its columns are q",
        ),
        (
            {"prompt": "{q}", "completion": "{b}"},
            r"source own \(.*a.jsonl\) has no column b. Its columns are q, a",
        ),
    ],
)
def test_knobs_of_own_rows_are_checked(
    knobs: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    repositories.jsonl(tmp_path / "a.jsonl", [{"q": "1", "a": "2"}])
    with pytest.raises(PipelineError, match=expected):
        list(read_source("own", source("own", file="a.jsonl", **knobs), tmp_path))


def test_calculations_that_are_missing_or_long() -> None:
    """The annotated calculations alone.

    A solution without any, or with more than 64 characters, is counted as such.
    """
    source_of = source("gsm8k_calculations")
    long = "".join(f"<<{number}00*{number}00={number * number}0000>>" for number in range(1, 9))
    texts = ["<<$1,000*2=2,000>>\n#### 2,000", "So 7.\n#### 7", long]
    answers = [
        gsm8k_calculations({"question": " Q? ", "answer": text}, source_of) for text in texts
    ]
    assert answers == [
        pair("Question: Q?\nAnswer:", "1000*2=2000\n#### 2000"),
        "no_calculation",
        "too_long",
    ]


ASKS, TELLS = (
    {"role": "user", "content": "Two plus two?"},
    {"role": "assistant", "content": "It is four."},
)


@pytest.mark.parametrize(
    ("row", "more"),
    [
        (
            {"prompt": [ASKS], "completion": [TELLS]},
            {"column": "prompt", "completion": "{completion}"},
        ),
        (
            {"prompt": json.dumps([ASKS]), "completion": [TELLS]},
            {"column": "prompt", "completion": "{completion}"},
        ),
        (
            {"turns": json.dumps([{"from": "human", "value": "Two plus two?"}, TELLS])},
            {"column": "turns"},
        ),
        (
            {
                "turns": [
                    {**turn, "content": [{"type": "text", "text": turn["content"]}]}
                    for turn in (ASKS, TELLS)
                ]
            },
            {"column": "turns"},
        ),
    ],
)
def test_a_conversation_in_the_forms_of_other_tools(
    row: dict[str, Any], more: dict[str, str], tmp_path: Path
) -> None:
    """TRL's prompt and completion, JSON text in a cell, and content as parts."""
    (tmp_path / "talk.jsonl").write_text(json.dumps(row) + "\n")
    found = list(
        read_source("own", Source(file="talk.jsonl", rows="conversation", **more), tmp_path)
    )
    assert found == [pair("Two plus two?", "It is four.")]


def of_own(folder: Path, **knobs: Any) -> list[Example | Unusable]:
    return list(read_source("own", source("own", **knobs), folder))


def test_a_column_that_may_be_blank_goes_with_the_text_before_it(tmp_path: Path) -> None:
    """Alpaca's input under any name: the row stays, as with rows=alpaca."""
    inputs = ["five", "", "  ", None]
    rows = [{"instruction": "Add.", "input": text, "output": "It is 7."} for text in inputs]
    repositories.jsonl(tmp_path / "a.jsonl", rows)
    own = {"file": "a.jsonl", "completion": "{output}"}
    expected = [pair("Add.\nfive", "It is 7."), *[pair("Add.", "It is 7.")] * 3]
    assert of_own(tmp_path, **own, prompt="{instruction}\n{input?}") == expected
    assert of_own(tmp_path, **own, rows="alpaca") == expected
    sections = "### Instruction:\n{instruction}\n\n### Input:\n{input?}\n\n### Response:"
    with_input, without, *_ = of_own(tmp_path, **own, prompt=sections)
    assert with_input == pair(
        "### Instruction:\nAdd.\n\n### Input:\nfive\n\n### Response:", "It is 7."
    )
    assert without == pair("### Instruction:\nAdd.\n\n### Response:", "It is 7.")
    assert of_own(tmp_path, **own, prompt="{instruction} {input}") == [
        pair("Add. five", "It is 7."),
        *["empty"] * 3,
    ]
    assert (
        of_own(tmp_path, **own, prompt="{input?}{instruction} {{{input}}}")[1:] == ["empty"] * 3
    )  # needed once


def test_columns_with_dots_brackets_and_colons(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Answer.text,Answer [sw],Question: en,Q (en)\na,b,c,d\n")
    prompt, completion = "{Question: en} {Q (en)}", "{Answer.text} {Answer [sw]} {{x}}"
    assert of_own(tmp_path, file="a.csv", prompt=prompt, completion=completion) == [
        pair("c d", "a b {x}")
    ]


def test_numbers_of_every_type_are_text_and_other_cells_are_named_truly(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    day = date(2024, 5, 1)
    columns = {
        "decimal": pa.array([Decimal("1.50"), None], pa.decimal128(5, 2)),
        "float": [4.0, 2.5],
        "whole": pa.array([4, None], pa.int64()),
        "true": [True, False],
        "day": [day, day],
        "time": [datetime(2024, 5, 1), None],
        "bytes": [b"a", b"b"],
        "list": [["a"], ["b"]],
        "words": pa.array(["x", "y"], pa.large_string()).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    expected = {
        "decimal": ["1.50", "empty"],
        "float": ["4.0", "2.5"],
        "whole": ["4", "empty"],
        "true": ["True", "False"],
    }
    for name in columns:
        found = of_own(tmp_path, file="a.parquet", prompt="{words}", completion=f"{{{name}}}")
        texts = [row if isinstance(row, str) else row["completion"] for row in found]
        assert texts == (expected | {"words": ["x", "y"], "time": ["not_text", "empty"]}).get(
            name, ["not_text"] * 2
        )


@pytest.mark.parametrize(
    ("cells", "rows", "why"),
    [
        (
            ["a text", "{}"],
            "conversation",
            "2 text or an object where turns belong, or turns with more",
        ),
        (
            [[{"role": "user", "content": [{"type": "image"}]}]],
            "conversation",
            "or turns with more than text, such as",
        ),
        (
            [[1], {"a": 1}, float("nan")],
            "text",
            "3 neither text nor a number: a list, an object, a date or NaN",
        ),
    ],
)
def test_the_reason_is_true_of_the_cells(
    cells: list[Any], rows: str, why: str, tmp_path: Path
) -> None:
    repositories.jsonl(tmp_path / "a.jsonl", [{"cell": cell} for cell in cells])
    own = source("own", file="a.jsonl", rows=rows, column="cell")
    with pytest.raises(PipelineError, match=f"all {len(cells)} rows are unusable .*{why}"):
        list(examples_of("own", own, open_source("own", own, tmp_path), {"rows": 0, "empty": 0}))


def test_a_column_that_names_the_language_of_each_row(tmp_path: Path) -> None:
    """One file, a source for each language; names as other sets have them (MASSIVE's sw-KE)."""
    names = ["sw", "Swahili", "swh_Latn", "swh", "sw-KE", "en", "te", "", None, "swe"]
    repositories.jsonl(
        tmp_path / "a.jsonl",
        [{"q": f"{n}", "a": "a", "lang": name} for n, name in enumerate(names)],
    )
    own = {"file": "a.jsonl", "prompt": "{q}", "completion": "{a}", "language_column": "lang"}
    for code, expected in (("sw", "01234"), ("en", "5"), ("te", "6")):
        found = of_own(tmp_path, **own, language=code)
        assert found == [pair(number, "a") for number in expected]
        assert rows_of(tmp_path / "a.jsonl", source("own", **own, language=code)) == len(found)
    with pytest.raises(
        PipelineError, match="source own has no rows in language ja. Choose another file"
    ):
        of_own(tmp_path, **own, language="ja")


def test_a_typed_backslash_n_is_a_line_feed() -> None:
    words = ["stage=data", "expert=own", "data_root=.", "expert.sources.own.file=a.csv"]
    pairs = [r"expert.sources.own.prompt='{q}\nAnswer:'", r"expert.sources.own.completion='{a}'"]
    inside = [
        r"+expert.sources.two={file: b.csv, rows: template, prompt: '{q}\nAnswer:', completion:"
        r" '{a}'}"
    ]
    config = compose([*words, *pairs, *inside])
    assert isinstance(config, DataStage)
    assert {one.prompt for one in config.expert.sources.values()} == {"{q}\nAnswer:"}
    recipe = compose(["stage=sft", "expert=math", "model=sandbox", r"sft.separator='\n\n'"])
    assert isinstance(recipe, TrainStage) and recipe.sft.separator == "\n\n"
