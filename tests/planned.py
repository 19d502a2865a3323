"""Tables expanded without the rest of the program: what each stage reads is written out here."""

from __future__ import annotations

from pathlib import Path

from pipeline.study.cells import TablePlan
from pipeline.study.expand import expand
from pipeline.study.rows import read

CONF = Path(__file__).parents[1] / "conf"
TABLES = CONF / "tables"

ALL = {"seed", "threads", "deterministic"}
TRAINING = ALL | {"model", "expert", "sft", "partition", "recipe", "mixture", "data", "data_root"}
READS = {
    "data": ALL | {"expert", "mixture", "data", "data_root"},
    "sft": TRAINING,
    "cpt": TRAINING,
    "merge": ALL | {"merge", "partition"},
    "eval": ALL | {"checkpoint", "merge", "partition", "eval", "languages", "data_root"},
    "select": ALL | {"select", "checkpoints", "languages", "data_root"},
    "analyze": ALL | {"analyze", "checkpoint", "base"},
}


def shipped(name: str) -> tuple[str, str]:
    return (TABLES / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml"


def plan(text: str, **every: object) -> TablePlan:
    """The plan of a table's text, which may start from shipped ones."""
    return expand(read(text, "mine.yaml", shipped, every), READS.__getitem__)


def plan_of(name: str) -> TablePlan:
    return expand(read(*shipped(name), shipped), READS.__getitem__)
