"""The words of a table's rows.

The same stage that typing them gives, for the rows of every shipped table.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from planned import TABLES as TABLE_FILES
from planned import plan_of

from pipeline.config.compose import compose, stage_of
from pipeline.config.overrides import override_of, values_of, written
from pipeline.tables.planned_runs import refs_as_names

TABLES = sorted(path.stem for path in TABLE_FILES.glob("*.yaml"))


def rows(table: str) -> Iterator[dict[str, Any]]:
    """Return the settings of a table's runs.

    Of runs with the same keys, the first and the last are returned.
    """
    alike: dict[Any, list[dict[str, Any]]] = {}
    for spec in plan_of(table).specs.values():
        if spec.kind == "stage":
            words = {key: refs_as_names(value) for key, value in spec.words.items()}
            alike.setdefault((words["stage"], tuple(words)), []).append(words)
    for same in alike.values():
        yield from same[:: max(1, len(same) - 1)]


def typed(line: dict[str, Any]) -> list[str]:
    """As one types it: what is put into a mapping takes a plus."""
    return [
        f"{'+' if isinstance(value, dict) else ''}{name}={written(value)}"
        for name, value in line.items()
    ]


ODD = [
    "",
    " x",
    "1e-5",
    "null",
    "a, b 'c'",
    'say "x"',
    "a\\",
    "\\'",
    "[x]",
    "{a:1}",
    "a=b",
    "x:y",
    "~",
    "é\n",
    "x@10",
]


def test_a_value_written_as_an_override_is_read_as_it_was() -> None:
    for value in (
        *ODD,
        1,
        1.5,
        True,
        None,
        [1, "a b", ["x"]],
        {"te": 1024, "bn": "x y"},
        [{"task": "mgsm"}],
    ):
        assert values_of([override_of("+a.b", value)]) == {"+a.b": value}
    assert override_of("table", "sandbox") == "table=sandbox"  # quoted only where it needs to be


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_every_table_is_what_typing_it_gives(table: str) -> None:
    for line in rows(table):
        assert stage_of(line) == compose(typed(line)), line


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
def test_a_changed_value_is_what_typing_it_gives(key: str) -> None:
    for value in CHANGED[key]:
        line = {
            "stage": "sft",
            "expert": "math",
            "sft": "lora" if "lora" in key else "full",
            key: value,
        }
        words = [f"{name}={written(one)}" for name, one in line.items()]
        assert stage_of(line) == compose(words), value


def test_a_stage_that_was_given_out_is_not_changed_by_the_next() -> None:
    line = {"stage": "sft", "expert": "math", "seed": 1, "sft.steps": 3}
    one = stage_of(line)
    two = stage_of({**line, "seed": 2, "sft.steps": 4})
    assert (one.seed, one.sft.steps, two.seed, two.sft.steps) == (1, 3, 2, 4)  # type: ignore[attr-defined]
