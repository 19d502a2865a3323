"""The scores of a table's evaluations, read and named: nothing is computed here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

Record = dict[str, Any]

# task -> (primary metric, filter or None for any), in the order of the columns; mgsm_en_cot and its like follow mgsm
PRIMARY = {
    "mgsm": ("exact_match", "flexible-extract"),
    "belebele": ("acc", None),
    "global_mmlu": ("acc", None),
    "flores": ("chrf++", None),
    "mbpp": ("pass_at_1", None),
}
TITLES = {
    "mgsm": "MGSM",
    "belebele": "Belebele",
    "global_mmlu": "Global MMLU",
    "flores": "FLORES",
    "mbpp": "MBPP",
}
AVERAGE = "average"


def load(results: Mapping[str, Any]) -> tuple[list[Record], dict[tuple[str, str], list[str]]]:
    """All scores of the table's evaluations, sorted, and (row, language) -> reasons where an evaluation has none.

    A record is a row of scores.json plus row, target (the language the model was made for), seed, eval (run name),
    where (pair or language), label (its column's title) and primary (whether the table shows it). An evaluation of
    several target languages gives each target its own scores, and English to all. Raises PipelineError where the
    evaluations were not scored alike: by one backend, all with a chat template or all without.
    """
    records: list[Record] = []
    problems: dict[tuple[str, str], list[str]] = {}
    several = len(results["languages"]) > 1
    ways: dict[tuple[str, bool], str] = {}
    failed = {run["name"]: f": {run['reason']}" for run in results.get("failed") or []}
    for cell in results["cells"]:
        path = Path(cell["eval"]) / "scores.json"
        if not path.is_file():
            reason = cell["name"] + failed.get(cell["name"], " has no scores.json")
            problems.setdefault((cell["row"], cell["language"]), []).append(reason)
            continue
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            written = [*told["rows"], *told.get("beside", [])]
        except (json.JSONDecodeError, KeyError):
            raise PipelineError(f"scores.json of {cell['name']} cannot be read: make it again with redo=true") from None
        how = told.get("harness", {})
        ways.setdefault((how.get("backend", "hf"), how.get("chat_template", False)), cell["name"])
        others = set(results["languages"]) - {cell["language"]}
        written = [row for row in written if not others & set(_where(row).split("-"))]
        for row in written:
            record = {
                **row,
                "row": cell["row"],
                "target": cell["language"],
                "seed": cell["seed"],
                "eval": cell["name"],
                "where": _where(row),
                "value": _finite(row["value"]),
                "stderr": _finite(row.get("stderr")),
                "primary": _is_primary(row, written),
            }
            record["label"] = label(record["task"], record["where"], cell["language"], several)
            records.append(record)
    if len(ways) > 1:
        told = ", ".join(f"{name} (eval.backend={way[0]}, eval.chat_template={way[1]})" for way, name in ways.items())
        raise PipelineError(f"{told} were not scored alike, so that no table compares them: score all of them one way")
    keys = ("row", "language", "target", "seed", "task", "where", "subject", "num_fewshot", "metric", "filter", "eval")
    records.sort(key=lambda record: [str(record.get(key) or "") for key in keys])
    return records, problems


def _where(row: Mapping[str, Any]) -> str:
    return str(row.get("pair") or row["language"])


def _finite(value: Any) -> float | None:
    """The harness writes "N/A" or nan where it has no number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _is_primary(row: Mapping[str, Any], written: Sequence[Mapping[str, Any]]) -> bool:
    """Whether this is the score that the table shows: the task's primary metric, else the first one written."""
    if row.get("subject"):
        return False
    same = [r for r in written if not r.get("subject") and _place(r) == _place(row)]
    metric, filter_name = PRIMARY.get(family(row["task"]), (None, None))
    wanted = [r for r in same if r["metric"] == metric and filter_name in (None, r.get("filter"))]
    return (wanted or same)[0] is row


def _place(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["task"], _where(row), row["num_fewshot"]


def family(task: str) -> str:
    """mgsm of mgsm_en_cot; an unknown task is its own."""
    return next((known for known in PRIMARY if task == known or task.startswith(known + "_")), task)


def label(task: str, where: str, target: str, several: bool) -> str:
    """A column's title: MGSM qac; with several target languages, MGSM en (qac) for English of qac's models."""
    known = family(task)
    title = TITLES.get(known, task) + task.removeprefix(known).replace("_", " ")
    if target == AVERAGE:
        return f"{title} {AVERAGE}" if where == AVERAGE else f"{title} {where.replace(AVERAGE, 'xx')} {AVERAGE}"
    return f"{title} {where}" + (f" ({target})" if several and target not in where.split("-") else "")
