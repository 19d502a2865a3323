"""results.csv: one tidy row per run, task, language and metric, with its table cells and run settings."""

from __future__ import annotations

import math
from typing import Any

from pipeline.evaluate.records import ScoreRow
from pipeline.report.load.contents import Results
from pipeline.report.load.scores import Written, percent_factor, score_interval
from pipeline.report.render.sheets import comma_separated

COLUMNS = (
    "table run row column role seed task language pair subject metric filter num_fewshot split dtype value stderr "
    "low high n reason model knobs weights_root device threads torch transformers lm_eval attempt started seconds "
    "stale unlike"
).split()
NOT_KNOBS = ("eval.", "languages", "seed", "stage")  # have their own columns, or are the same for all rows


def tidy_rows(results: Results, written: Written) -> str:
    """Text of results.csv, sorted by run, task and language. Values in percent; BLEU, chrF++ and
    bits on their own scale.
    low and high: `score_interval`.

    A run that is used in several rows, columns or seeds of the table lists them all.
    """
    places: dict[str, dict[str, dict[Any, None]]] = {}
    for cell in results.cells:
        for cell_score in cell.scores:
            of = places.setdefault(cell_score.run, {"row": {}, "column": {}, "role": {}, "seed": {}})
            of["row"][cell.row], of["column"][f"{cell.row} | {cell.column}"], of["role"][cell.role] = None, None, None
            of["seed"] |= {cell_score.at["seed"]: None} if "seed" in cell_score.at else {}
    lines: list[list[Any]] = []
    for name, run in sorted(results.evaluations.items()):
        places_text = {key: "; ".join(map(str, values)) for key, values in places.get(name, {}).items()}
        knobs = {key: value for key, value in run.config.items() if not key.startswith(NOT_KNOBS)}
        about_run = places_text | {
            "table": results.table, "run": name, "model": run.model, "split": run.config.get("eval.split", "test"),
            "dtype": written[name][1].get("dtype"),
            "knobs": "; ".join(f"{key}={value}" for key, value in knobs.items()), "weights_root": run.weights_root,
            "device": run.machine.get("device"), "threads": run.machine.get("threads"),
            "torch": run.versions.get("torch"), "transformers": run.versions.get("transformers"),
            "lm_eval": run.versions.get("lm-eval"), "attempt": run.attempt, "started": run.started,
            "seconds": run.seconds, "stale": run.stale, "unlike": "; ".join(run.unlike),
        }  # fmt: skip
        fixed = {column: about_run.get(column) for column in COLUMNS}
        for score in sorted(written[name][0], key=sort_key):
            scale = percent_factor(score.metric)
            row = fixed | {key: value for key, value in vars(score).items() if key in fixed}
            row["low"], row["high"] = score_interval(score) or (None, None)
            for key in ("value", "stderr", "low", "high"):
                row[key] = scale_number(row[key], scale)
            lines.append(list(row.values()))
    return comma_separated([list(COLUMNS), *lines])


def sort_key(score: ScoreRow) -> tuple[str, ...]:
    return score.task, score.where, score.subject or "", score.metric, score.filter


def scale_number(number: Any, scale: int) -> float | None:
    """The scaled number rounded to ten digits, so that 100 * 0.07 is 7; None if it is not finite."""
    is_number = isinstance(number, int | float) and math.isfinite(number)
    return float(f"{scale * number:.10g}") if is_number else None
