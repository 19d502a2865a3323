"""The gates of docs/explanation/small_world.md for the shipped base and its experts.

The base is measured anew. The experts' record is on 500 development items
(scripts/small_world/gates.py).
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_types import Make
from small_world import gates

from pipeline.config.compose import compose
from pipeline.evaluate.selection import guarded, scores
from pipeline.runs.manifest import read_manifest

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "src/pipeline/data/sandbox_base"
RECORD = ROOT / "results/bench/small_world_gates.json"
ITEMS = 100  # development questions


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def answers(make_run: Make) -> dict[str, list[dict[str, Any]]]:
    """ "mgsm.en" -> the base's records of the development problems."""
    world = make_run(
        "stage=data",
        "expert=sandbox_items",
        f"data_root={make_run('stage=data', 'expert=sandbox')}",
    )
    asked = [
        "checkpoint=package:data/sandbox_base",
        f"data_root={world}",
        "eval.split=dev",
        f"eval.limit={ITEMS}",
    ]
    math = make_run(
        "stage=eval", *asked, "eval=mgsm_0shot", "eval.max_gen_toks=40", "languages=[en,qaa,qac]"
    )
    files = sorted((math / "samples").glob("*.jsonl"))
    return {
        file.stem: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in files
    }


def test_the_shipped_base_answers_at_once(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Nearly all of its answers are a sentence without a computation, in each language."""
    for name, rows in answers.items():
        at_once = sum("=" not in row["response"] for row in rows)
        assert at_once >= 0.9 * ITEMS, name


def test_the_record_is_of_the_shipped_base(
    record: dict[str, Any], answers: dict[str, list[dict[str, Any]]]
) -> None:
    """By its weights, and by what it answers.

    On its first items the record's base has the same right.
    """
    manifest = read_manifest(SHIPPED)
    assert manifest is not None and record["base"] == manifest.weights["root"]
    for name, rows in answers.items():
        kept = record["right"]["base"][name][:ITEMS]
        same = sum(row["correct"] == (digit == "1") for row, digit in zip(rows, kept, strict=True))
        assert same >= 0.97 * ITEMS, name


def test_what_is_said_of_the_gates_is_what_was_measured(record: dict[str, Any]) -> None:
    """The page's table has each gate with its value, and says "missed" of those that are."""
    page = (ROOT / "docs/explanation/small_world.md").read_text(encoding="utf-8")
    lines = {
        line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")
    }
    for gate in record["gates"]:
        assert (
            gate["value"] in lines[gate["gate"]]
            and ("missed" in lines[gate["gate"]]) is not gate["met"]
        )


def test_gates_are_computed_by_hand() -> None:
    scores = {
        "base": {"mgsm.en": 10, "mgsm.qaa": 10, "mgsm.qac": 5, **of_language(20)},
        "math": {"mgsm.en": 50, "mgsm.qaa": 18, "mgsm.qac": 8},
        "language": {"mgsm.en": 7, **of_language(60)},
        "control": {"mgsm.qac": 40},
    }
    samples = {
        name: {task: rows(hits) for task, hits in found.items()} for name, found in scores.items()
    }
    gates_found = gates.find_gates(samples)
    assert [gate.met for gate in gates_found] == [
        True,
        True,
        False,
        True,
        True,
        True,
        True,
        True,
        True,
    ]
    assert gates_found[2].value == "8.0 (+3.0)" and gates_found[7].value == "7.0 (-3.0)"
    assert gates.better([True] * 9 + [False], [False] * 8 + [True, False])[0] == pytest.approx(80)
    assert gates.better([True] * 9 + [False], [False] * 8 + [True, False])[1] == pytest.approx(
        2 / 2**8
    )


def of_language(hits: int) -> dict[str, int]:
    return dict.fromkeys(
        ("belebele.qac", "global_mmlu.qac", "flores.en-qac", "flores.qac-en"), hits
    )


def rows(hits: int) -> list[dict[str, Any]]:
    """Return a hundred records, of which the first `hits` are right."""
    return [
        {"correct": n < hits, "response": "", "extracted": "", "target": ""} for n in range(100)
    ]


def test_the_guards_of_selecting_a_language_expert_pass_it(
    record: dict[str, Any], tmp_path: Path
) -> None:
    """Layer swapping's own.

    Not below the base in MGSM and Global MMLU of its language, by more than a point.
    """
    words = [
        "stage=select",
        "select=layer_swapping_language",
        "checkpoints=[hub:org/one]",
        "languages=[qac]",
    ]
    config: Any = compose(words)
    found = {}
    for name in ("base", "language"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(json.dumps({"rows": record["rows"][name]}))
        found[name] = scores(SimpleNamespace(folder=tmp_path / name), config)  # type: ignore[arg-type]
    floor = guarded(found["base"], config)
    assert set(floor) == {"mgsm mean", "global_mmlu mean"} and config.select.guard_slack == 0.01
    assert {
        name: found["language"][name] >= least for name, least in floor.items()
    } == dict.fromkeys(floor, True)
