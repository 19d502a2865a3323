"""The scores of a table's evaluations, read and matched with its cells: nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.benchmarks import find_benchmark, primary_metric
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.report.load.contents import CellResult, CellScore, Results
from pipeline.report.render.text import align_columns
from pipeline.report.stats.statistics import wilson_interval

METRICS = {"exact_match": "exact match", "acc": "accuracy", "chrf++": "chrF++", "pass_at_1": "pass@1"}
OUT_OF_100 = ("bleu", "spbleu", "chrf")  # metrics that come on the scale 0-100

# name of an evaluation -> its rows, and how they were scored
Written = Mapping[str, tuple[list[ScoreRow], dict[str, Any]]]


def percent_factor(metric: str) -> int:
    """What makes percent of a metric's value: 100 of parts of one, 1 of what comes on the scale 0-100."""
    return 1 if metric.lower().startswith(OUT_OF_100) else 100


def read_evaluations(results: Results) -> dict[str, tuple[list[ScoreRow], dict[str, Any]]]:
    """The scores.json of each finished evaluation, read once."""
    written = {}
    for name, run in results.evaluations.items():
        try:
            written[name] = read_scores(run.folder / "scores.json")
        except (OSError, ValueError, KeyError, TypeError):
            raise PipelineError(f"scores.json of {name} cannot be read: make it again with redo=true") from None
    return written


def primary_rows(cell: CellResult, written: Written) -> Iterator[tuple[CellScore, ScoreRow]]:
    """The rows that a cell's number is computed from, of each of its finished evaluations."""
    first, filter_name = primary_metric(cell.task)
    metric = cell.metric or first
    for score in cell.scores:
        for row in written[score.run][0] if score.run in written else []:
            matches = row.task == cell.task and row.metric == metric and not row.subject
            if matches and cell.pair in (None, row.pair) and (row.filter == filter_name or metric != first):
                yield score, row


def refuse_unlike(results: Results, written: Written) -> None:
    """Raise PipelineError where a table's evaluations were scored in different ways: by one backend in one dtype; those
    of a cell with a chat template or without."""
    settings: dict[
        tuple[str, ...], dict[tuple[str, Any], str]
    ] = {}  # what is compared -> how it was scored -> by which
    for cell in results.cells:
        for name in (score.run for score in cell.scores if score.run in written):
            how = written[name][1]
            template = ("eval.chat_template", how.get("chat_template", False))
            settings.setdefault(("backend",), {}).setdefault(("eval.backend", how.get("backend", "hf")), name)
            settings.setdefault(("dtype",), {}).setdefault(("eval.dtype", how.get("dtype", "auto")), name)
            settings.setdefault((cell.row, cell.column), {}).setdefault(template, name)
    for by_setting in settings.values():
        if len(by_setting) > 1:
            text = ", ".join(f"{name} ({key}={value})" for (key, value), name in by_setting.items())
            remedy = "score all one way, every.eval.dtype=float32 for instance"
            raise PipelineError(f"{text} were not scored alike, so that no table compares them: {remedy}")


def notes_of(results: Results, written: Written) -> list[str]:
    """How to read the numbers: metric, filter, shots and questions of each task, and what intervals do not include."""
    counts: dict[str, set[int]] = {}
    for cell in results.cells:
        for _, row in primary_rows(cell, written):
            how = [METRICS.get(row.metric, row.metric), *([row.filter] if row.filter != "none" else [])]
            counts.setdefault(f"{title_of(row.task)}: {', '.join(how)}, {row.num_fewshot}-shot", set()).add(row.n)
    sizes = {how: " to ".join(map(str, dict.fromkeys((min(ns), max(ns))))) for how, ns in counts.items()}
    notes = ["; ".join(f"{how}, n = {size}" for how, size in sizes.items()) + "."] if sizes else []
    notes += ["In percent; BLEU and chrF++ as they are."] if sizes else []
    if sizes and not results.sampled:
        notes.append("Seed variance is not included in intervals and p: that takes at least three seeds.")
    dtypes = sorted({how["dtype"] for _, how in written.values() if "dtype" in how})
    return notes + ([f"Scored in {' and '.join(dtypes)}."] if dtypes else [])


def finite_or_none(value: Any) -> float | None:
    """The harness writes "N/A" or nan where it has no number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def primary_of(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """The score of each task and language that is shown: the task's primary metric, else the first one written."""
    by_place: dict[tuple[str, str, int], ScoreRow] = {}
    for row in rows:
        if row.subject:
            continue
        place = row.task, row.where, row.num_fewshot
        if place not in by_place or (row.metric, row.filter) == primary_metric(row.task):
            by_place[place] = row
    return list(by_place.values())


def score_interval(row: ScoreRow) -> tuple[float, float] | None:
    """95 % of a score, in its own unit: Wilson's interval of a share of right answers, else 1.96 standard errors;
    None where the harness gives no error, as of corpus scores."""
    value, error = finite_or_none(row.value), finite_or_none(row.stderr)
    if value is None or error is None or not row.n:
        return None
    return wilson_interval(value, row.n) if 0 <= value <= 1 else (value - 1.96 * error, value + 1.96 * error)


def title_of(task: str) -> str:
    """MGSM, MGSM en cot."""
    benchmark = find_benchmark(task)
    return benchmark.title + task.removeprefix(benchmark.name).replace("_", " ") if benchmark else task


def score_lines(folder: Path) -> list[str]:
    """The scores of an evaluation: of each task and language the main one, as percentages, and what was left out."""
    path = folder / "scores.json"
    if not path.is_file():
        return []
    written, _ = read_scores(path)
    rows = [("  task", "language", "metric", "score", "n")]
    rows += [score_line(row) for row in primary_of(written)]
    return ["scores:", *align_columns(rows, right={3, 4})]


def score_line(row: ScoreRow) -> tuple[str, str, str, str, str]:
    """A score as one reads it: out of 100, with its standard error."""
    text = row.reason or "no number"
    if row.value is not None:
        scale = percent_factor(row.metric)
        error = f" ± {scale * row.stderr:.1f}" if row.stderr is not None else ""
        text = f"{scale * row.value:.1f}{error}"
    return f"  {row.task} {row.num_fewshot}-shot", row.where, row.metric, text, str(row.n)
