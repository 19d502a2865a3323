"""Words set on a composed stage: the same stage that composing each line gives, for the rows of every shipped table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from planned import TABLES as TABLE_FILES
from planned import plan_of

from pipeline.config.compose import compose, parse_override
from pipeline.config.words import format_word, stage_of, with_values
from pipeline.errors import PipelineError
from pipeline.tables.planned_runs import refs_as_names, thaw_value

TABLES = sorted(path.stem for path in TABLE_FILES.glob("*.yaml"))


def rows(table: str) -> Iterator[dict[str, Any]]:
    """The words of a table's runs: of those with the same keys, the first and the last."""
    alike: dict[Any, list[dict[str, Any]]] = {}
    for spec in plan_of(table).specs.values():
        if spec.kind == "stage":
            words = {key: refs_as_names(thaw_value(value)) for key, value in spec.words.items()}
            alike.setdefault((words["stage"], tuple(words)), []).append(words)
    for same in alike.values():
        yield from same[:: max(1, len(same) - 1)]


def typed(line: dict[str, Any]) -> list[str]:
    """As one types it: what is put into a mapping takes a plus."""
    return [f"{'+' if isinstance(value, dict) else ''}{name}={format_word(value)}" for name, value in line.items()]


@pytest.fixture(autouse=True)
def nothing_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.config.words._composed", {})
    monkeypatch.setattr("pipeline.config.words._converted", {})


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_every_table_is_what_composing_it_gives(table: str) -> None:
    """Each line twice: the first of its options is composed, later ones have their values set."""
    lines = list(rows(table))
    composed: dict[str, Any] = {}
    for line in lines:
        key = repr(line)
        if key not in composed:
            composed[key] = compose(typed(line))
        assert stage_of(line) == composed[key], line
    for line in reversed(lines):
        assert stage_of(line) == composed[repr(line)], line


CHANGED = {  # key -> values, of one training
    "seed": [0, 3, 4294967295],
    "sft.learning_rate": [1e-5, "2e-5", 1],  # an integer becomes a float
    "sft.steps": [5, None, "7"],
    "sft.schedule": ["constant", "wsd"],
    "sft.shuffle": [True, False, "false"],
    "sft.lora_targets": [["q_proj"], ["q_proj", "v_proj"]],
    "data.size": [100, None],
    "model.path": ["./a b", "hub:org/name", "it's"],
    "expert.sources.orca_math.share": [0.5, 0.25],  # below a dict: composed anew
}


@pytest.mark.parametrize("key", CHANGED)
def test_a_changed_value_is_what_composing_it_gives(key: str) -> None:
    for value in CHANGED[key]:
        line = {"stage": "sft", "expert": "math", "sft": "lora" if "lora" in key else "full", key: value}
        words = [f"{name}={format_word(one)}" for name, one in line.items()]
        assert stage_of(line) == compose(words), value


def test_a_stage_that_was_given_out_is_not_changed_by_the_next() -> None:
    line = {"stage": "sft", "expert": "math", "seed": 1, "sft.steps": 3}
    one = stage_of(line)
    two = stage_of({**line, "seed": 2, "sft.steps": 4})
    assert (one.seed, one.sft.steps, two.seed, two.sft.steps) == (1, 3, 2, 4)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("seed", "x", "seed must be a whole number, got 'x'"),
        ("sft.steps", 1.5, r"sft\.steps must be a whole number, got 1\.5"),
        ("sft.learning_rate", [1], r"sft\.learning_rate must be a number, got \[1\]"),
        ("sft.lora_targets", "q_proj", r"sft\.lora_targets: "),
        ("sft.learning_rate", -1.0, r"sft\.learning_rate must be above 0, got -1\.0"),
        ("sft.schedule", "none", r"sft\.schedule must be one of "),
        ("sft.no_such", 1, r"sft\.no_such is not a knob|unknown key sft\.no_such"),
    ],
)
def test_a_value_of_another_type_or_out_of_its_bounds_is_refused_by_its_key(key: str, value: Any, told: str) -> None:
    stage = compose(["stage=sft", "expert=math"])
    with pytest.raises(PipelineError, match=f"^{told}"):
        with_values(stage, {key: value})


def test_a_wrong_value_after_a_right_one_is_refused_too() -> None:
    """Where the options were composed before, the value alone is checked."""
    line = {"stage": "sft", "expert": "math", "sft.steps": 3}
    stage_of(line)
    with pytest.raises(PipelineError, match=r"^sft\.steps"):
        stage_of({**line, "sft.steps": "many"})
    with pytest.raises(PipelineError, match=r"^sft\.steps must be at least 1, got 0"):
        stage_of({**line, "sft.steps": 0})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "True"),
        ([1, "a b"], "[1,'a b']"),
        ({"a": [None], "b": "x'y"}, "{a:[null],b:'x\\'y'}"),
        ("hub:a/b-1.0", "hub:a/b-1.0"),
    ],
)
def test_a_value_of_a_row_is_written_in_the_grammar_of_the_command_line(value: Any, expected: str) -> None:
    assert format_word(value) == expected
    assert parse_override(f"key={expected}").value() == value or isinstance(value, dict)
