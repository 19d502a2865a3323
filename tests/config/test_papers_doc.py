"""docs/explanation/papers.md.

Each knob that it names exists and has the default that the page says.
"""

import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from planned import TABLES, shipped

from pipeline.config import conf
from pipeline.config.compose import compose
from pipeline.tables.reader import read_table

PAGE = Path(__file__).parents[2] / "docs/explanation/papers.md"
WORD = re.compile(r"`([a-z][\w.]*)=([^`]+)`")
NEEDED = {  # what a stage is asked for, where a row names nothing of it
    "sft": {"expert": "math"},
    "eval": {"eval": "mgsm_8shot", "checkpoint": "x"},
    "select": {"select": "unreasonable", "checkpoints": "[x]"},
    "analyze": {"checkpoint": "x"},
    "merge": {"merge": "layer_swap"},
}
MERGED = {
    "layer_swap": ["merge.math=x", "merge.language=y"],
    "reset": ["merge.expert=x"],
    "soup": ["merge.experts=[x,y]"],
    "ties": ["merge.experts=[x,y]"],
}
STAGES = {
    "eval": "eval",
    "select": "select",
    "analyze": "analyze",
    "merge": "merge",
}  # of a key's group; else sft


def knobs() -> list[tuple[str, str, Any, dict[str, str]]]:
    """Yield (row, key, value, options) of each knob in the last column.

    Options without a knob count as a knob.
    """
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = (
            [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        )
        words = WORD.findall(cells[-1]) if cells else []
        options = {key: value for key, value in words if key in conf.groups()}
        values = [(key, yaml.safe_load(value)) for key, value in words if key not in options]
        found += [(cells[0], key, value, options) for key, value in values]
        found += [(cells[0], "", None, options)] if options and not values else []
    return found


def test_the_page_names_many_knobs() -> None:
    named = {key for _, key, _, _ in knobs()}
    assert len(named) > 45
    for group in ("data", "sft", "partition", "merge", "eval", "select", "analyze", "every"):
        assert any(key.startswith(f"{group}.") for key in named), group


@pytest.mark.parametrize(
    ("row", "key", "value", "options"), [one for one in knobs() if "every." not in one[1]]
)
def test_a_knob_has_the_default_that_the_page_says(
    row: str, key: str, value: Any, options: dict[str, str]
) -> None:
    stage = STAGES.get(key.partition(".")[0], "sft")
    allowed = set(conf.groups_read(stage)) | {"checkpoint", "checkpoints"}
    asked = {name: of for name, of in {**NEEDED[stage], **options}.items() if name in allowed}
    if asked.get("expert", "").startswith("math_") and "sft" not in options:
        asked["sft"] = "mixed"
    words = [f"{name}={of}" for name, of in asked.items()] + MERGED.get(asked.get("merge", ""), [])
    config: Any = compose([f"stage={stage}", *words])
    if stage == "merge":
        config.merge = config.merge.settled(config.partition)
    if not key:
        return
    found = reduce(
        lambda at, name: at[int(name)] if name.isdigit() else getattr(at, name),
        key.split("."),
        config,
    )
    assert found == value and type(found) is type(value), (row, words)


@pytest.mark.parametrize(
    ("key", "value"), [one[1:3] for one in knobs() if one[1].startswith("every.")]
)
def test_what_the_papers_tables_say_of_all_their_runs(key: str, value: Any) -> None:
    names = [
        path.stem
        for path in TABLES.glob("*.yaml")
        if path.stem.startswith(("layer_swapping", "unreasonable"))
    ]
    assert len(names) > 15
    for name in names:
        table = read_table(*shipped(name), shipped, {})
        assert table.every[key.removeprefix("every.")] == value, name
