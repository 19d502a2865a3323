"""Studies on rows of the user's own.

What stands between prompt and completion, and what rows are compared with.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from fixture_types import Call, Patch
from tiny_words import FEW

from pipeline.config.harness_tasks import forget_files
from pipeline.stages.rows import build_single

TASK = {
    "task": "mine_en",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{q}}\nA:",
    "doc_to_choice": ["yes", "no"],
    "doc_to_target": "gold",
    "dataset_kwargs": {"data_files": {"test": "tasks/rows.jsonl"}},
    "metric_list": [{"metric": "acc"}],
}
QUIET = ("runs_dir=runs", "tracking.mode=disabled")
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


@pytest.fixture
def folder(base: Path, language_expert: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """Return a base, a language expert, rows and a task file, without shipped benchmarks or Hub."""
    monkeypatch.chdir(tmp_path)
    forget_files()  # of the tests before, in the same process
    for name, model in (("base", base), ("lang", language_expert)):
        shutil.copytree(model, tmp_path / name)
        for record in ("manifest.json", "world.json"):
            (tmp_path / name / record).unlink(missing_ok=True)
    (tmp_path / "tasks").mkdir()
    rows = [{"q": f"What is {number} and {LONG}?", "gold": number % 2} for number in range(4)]
    (tmp_path / "tasks/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks/mine.yaml").write_text(yaml.safe_dump(TASK))
    lines = [f"What is {number} + 1?,{number + 1}" for number in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["q,a", *lines, f"{LONG},2", ""]))
    return tmp_path


def study(prompt: str, completion: str, **changes: object) -> None:
    words = {
        "title": "Own rows",
        "base": "./base",
        "experts": {
            "math": {
                "train": "rows.csv",
                "prompt": prompt,
                "completion": completion,
                "language": "en",
            },
            "lang": {"run": "./lang", "side": "language"},
        },
        "methods": ["soup"],
        "languages": ["en"],
        "benchmarks": ["mine_en"],
        "every": {
            "eval.include_path": "./tasks",
            "threads": 1,
            **dict(word.split("=") for word in FEW),
            **changes,
        },
    }
    Path("study.yaml").write_text(yaml.safe_dump(words))


@pytest.mark.parametrize(
    ("rows", "knobs", "separator"),
    [
        (["expert.sources.own.prompt='{q}:'", "expert.sources.own.completion=' {a}'"], [], ""),
        (["expert.sources.own.rows=pairs"], [], ""),
        (
            ["expert.sources.own.prompt='{q}:'", "expert.sources.own.completion=' {a}'"],
            ["sft.separator=' '"],
            " ",
        ),
        (
            [
                "expert.sources.own.rows=bitext",
                "expert.sources.own.language=sw",
                "expert.sources.own.prompt='{q}'",
                "expert.sources.own.completion='{a}'",
            ],
            [],
            "\n",
        ),
        (["expert.sources.own.rows=aya"], [], "\n"),
    ],
)
def test_own_prompts_have_no_separator_unless_it_is_given(
    folder: Path, rows: list[str], knobs: list[str], separator: str
) -> None:
    words = [
        "stage=sft",
        "expert=own",
        "model=trained",
        "model.path=./base",
        "expert.sources.own.url=./rows.csv",
    ]
    assert build_single([*words, *rows, *knobs]).config.sft.separator == separator  # type: ignore[attr-defined]


def test_the_tokens_of_own_rows_are_those_of_the_joined_texts(folder: Path, call: Call) -> None:
    from transformers import AutoTokenizer

    words = [
        "stage=sft",
        "expert=own",
        "model=trained",
        "model.path=./base",
        "expert.sources.own.url=./rows.csv",
    ]
    words += [
        "expert.sources.own.prompt='Q: {q}\\nA:'",
        "expert.sources.own.completion=' {a}'",
        *FEW,
        *QUIET,
    ]
    trained = Path(call(*words, status=0).out.strip())
    tokenizer = AutoTokenizer.from_pretrained(trained)
    texts = [f"Q: What is {number} + 1?\nA: {number + 1}</s>" for number in range(20)] + [
        f"Q: {LONG}\nA: 2</s>"
    ]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    found = [
        json.loads(line)["input_ids"] for line in (trained / "rows.jsonl").read_text().splitlines()
    ]
    assert sorted(found) == sorted(expected)


def test_a_set_of_own_and_shipped_prompts_needs_a_separator(folder: Path, call: Call) -> None:
    words = [
        "stage=sft",
        "expert=math",
        "model=trained",
        "model.path=./base",
        "data_root=.",
        *QUIET,
    ]
    (folder / "orca_math").mkdir()
    (folder / "orca_math/train.jsonl").write_text(
        json.dumps({"question": "a", "answer": "b"}) + "\n"
    )
    own = "+expert.sources.two={file: rows.csv, rows: template, prompt: '{q}', completion: '{a}'}"
    told = call(*words, own, status=1).err
    assert (
        "expert=math: some prompts are your own, but the prompts of orca_math are not. Set"
        " sft.separator=''" in told
    )
    assert build_single([*words, own, r"sft.separator='\n'"]).config.sft.separator == "\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompt", "completion", "told"),
    [
        ("Q: {q}\nA:", " {a}", ""),
        (
            "Q: {q}\nA:",
            "{a}",
            r"end with '\nA:' before the answer, and mine_en asks prompts that end with '\nA: '",
        ),
        (
            "Q: {q}\nA:",
            "\n{a}",
            r"end with '\nA:\n' before the answer, and mine_en asks prompts that end with '\nA: '",
        ),
        ("{q}", " {a}", ""),  # other words, as of a chat, are the user's choice
    ],
)
def test_the_plan_compares_the_ends_of_prompts(
    folder: Path, call: Call, prompt: str, completion: str, told: str
) -> None:
    study(prompt, completion)
    text = call("stage=plan", "table=./study.yaml", "plan.lines=1", *QUIET, status=0).out
    assert told in text and ("trained on prompts that end with" in text) is bool(told)


@pytest.mark.parametrize("benchmarks", [None, "none"])
def test_own_rows_are_compared_with_what_the_study_scores(
    folder: Path, call: Call, benchmarks: str | None
) -> None:
    """The last row has the fourteen words of a question.

    Nothing of a shipped benchmark is asked for.
    """
    study("{q}", "{a}", **({"data.benchmarks": benchmarks} if benchmarks else {}))
    call("stage=table", "table=./study.yaml", *QUIET, status=0)
    (data,) = Path("runs").glob("data-*")
    card = (data / "data_card.md").read_text()
    if benchmarks:
        assert "none, by data.benchmarks=none" in card
        assert len((data / "train.jsonl").read_text().splitlines()) == 21
    else:
        assert "Benchmark texts: mine_en 4" in card
        assert len((data / "train.jsonl").read_text().splitlines()) == 20
        assert LONG not in (data / "train.jsonl").read_text()


def test_without_a_study_and_the_hub_the_card_names_what_was_not_compared(
    folder: Path, call: Call
) -> None:
    words = [
        "stage=data",
        "expert=own",
        "expert.sources.own.url=./rows.csv",
        "expert.sources.own.prompt='{q}'",
    ]
    data = Path(call(*words, "expert.sources.own.completion='{a}'", *QUIET, status=0).out.strip())
    assert (
        "not compared, as they could not be read: facebook/belebele"
        in (data / "data_card.md").read_text()
    )
    without = call(
        *words, "expert.sources.own.completion='{a}'", "data.benchmarks=none", *QUIET, status=0
    )
    assert Path(without.out.strip()).name != data.name  # another choice, another hash


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ("data.size=100", "need 100 rows, but expert=own has 21"),
        ("data.size=15 data.validation=10", "need 25 rows, but expert=own has 21"),
        ("expert.sources.own.share=1", "has shares (own), but no size. Set data.size"),
        ("data.size=100 data.allow_fewer=true", ""),
    ],
)
def test_what_a_data_run_fails_of_is_one_sentence(
    folder: Path, call: Call, knobs: str, why: str
) -> None:
    own = [
        "expert.sources.own.url=./rows.csv",
        "expert.sources.own.prompt='{q}'",
        "expert.sources.own.completion='{a}'",
    ]
    words = [
        "expert=own",
        "model=trained",
        "model.path=./base",
        *own,
        *FEW,
        "data.benchmarks=none",
        *knobs.split(),
    ]
    trained = call("stage=sft", *words, *QUIET)
    assert trained.status == (1 if why else 0)
    assert why in trained.err
