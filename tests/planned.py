"""Tables expanded without the rest of the program: what each stage reads is written out here."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.tables.expand import expand_table
from pipeline.tables.plan import ScoreRef, TablePlan
from pipeline.tables.reader import read_table
from pipeline.tables.run_specs import Ref

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
    """Return the plan of a table's text, which may start from shipped tables."""
    return expand_table(read_table(text, "mine.yaml", shipped, every), READS.__getitem__)


def plan_of(name: str) -> TablePlan:
    return expand_table(read_table(*shipped(name), shipped, {}), READS.__getitem__)


def canonical(plan: TablePlan) -> dict[str, str]:
    """Return the key of a spec or choice -> digest of its filled words.

    Words that it names count by their digests. Equal words have equal digests, in any table and
    under any name. A knob at its default differs from an omitted knob, because only the run hash
    knows defaults.
    """
    found: dict[str, str] = {}

    def told(value: Any) -> Any:
        if isinstance(value, Ref):
            return {"run": found[value.spec], "step": value.step}
        if isinstance(value, ScoreRef):
            return [
                found[value.model],
                [(key, told(inner)) for key, inner in value.words.items()],
                value.language,
            ]
        return [told(one) for one in value] if isinstance(value, list | tuple) else value

    def digest(*parts: Any) -> str:
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    for key, spec in plan.specs.items():
        found[key] = digest(spec.kind, {name: told(value) for name, value in spec.words.items()})
    for key, one in plan.chosen.items():
        candidates = [told(scores) for scores in plan.choices[one.choice].candidates.values()]
        found[key] = digest("chosen", [found[model] for model in one.models.values()], candidates)
    return found
