"""Reading the scores of a table's evaluations and matching them with its cells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.benchmarks import find_benchmark, is_measure, primary_metric
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.report.load.contents import CellResult, CellScore, Results
from pipeline.report.render.text import align_columns
from pipeline.report.stats.statistics import NormalTest, share_interval

METRICS = {"exact_match": "exact match", "acc": "accuracy", "chrf++": "chrF++", "pass_at_1": "pass@1"}
MOST_NOTES = 20  # tasks listed by name
OWN_SCALE = ("bleu", "spbleu", "chrf")  # corpus metrics, which are 0-100

# name of an evaluation -> its rows and its harness settings
Written = Mapping[str, tuple[list[ScoreRow], dict[str, Any]]]


@lru_cache(maxsize=256)  # requested for each row of results.csv
def percent_factor(metric: str) -> int:
    """The factor from a metric's value to the number shown: 100 for shares of 1, else 1."""
    return 1 if metric.lower().startswith(OWN_SCALE) or is_measure(metric) else 100


def read_evaluations(results: Results) -> dict[str, tuple[list[ScoreRow], dict[str, Any]]]:
    """Rows and settings in scores.json of each finished evaluation. Raises PipelineError if one is unreadable."""
    written: dict[str, tuple[list[ScoreRow], dict[str, Any]]] = {}
    for name, run in results.evaluations.items():
        if name in results.logged:
            written[name] = results.logged[name].rows, {}
            continue
        try:
            written[name] = read_scores(run.folder / "scores.json")
        except (OSError, ValueError, KeyError, TypeError):
            raise PipelineError(f"scores.json of {name} cannot be read: rerun it with redo=true") from None
    return written


def primary_rows(cell: CellResult, written: Written) -> Iterator[tuple[CellScore, ScoreRow]]:
    """The score rows behind a cell's number, from each of its finished evaluations."""
    first, filter_name = primary_metric(cell.task)
    metric = cell.metric or first
    for score in cell.scores:
        for row in written[score.run][0] if score.run in written else []:
            matches = row.task == cell.task and row.metric == metric and not row.subject
            if matches and cell.pair in (None, row.pair) and (row.filter == filter_name or metric != first):
                yield score, row


def refuse_unlike(results: Results, written: Written) -> None:
    """Raise PipelineError if the evaluations of a table differ in backend or dtype, or those of a cell in the use of a
    chat template."""
    settings: dict[tuple[str, ...], dict[tuple[str, Any], str]] = {}  # compared setting -> its value -> an evaluation
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
            remedy = "score all with the same setting, for example every.eval.dtype=float32"
            raise PipelineError(f"{text} were scored differently and cannot share a table: {remedy}")


def notes_of(results: Results, written: Written) -> list[str]:
    """Notes on the numbers: metric, filter, shots and questions of each task, and limits of the intervals."""
    counts: dict[str, set[int]] = {}
    for cell in results.cells:
        for _, row in primary_rows(cell, written):
            how = [METRICS.get(row.metric, row.metric), *([row.filter] if row.filter != "none" else [])]
            how += [f"{row.num_fewshot}-shot"] if row.num_fewshot is not None else []
            counts.setdefault(f"{title_of(row.task)}: {', '.join(how)}", set()).add(row.n)
    sizes = {how: " to ".join(map(str, dict.fromkeys((min(ns), max(ns))))) for how, ns in counts.items()}
    listed = [f"{how}, n = {size}" for how, size in sizes.items()]
    more = [f"and {len(listed) - MOST_NOTES} more, in results.csv"] if len(listed) > MOST_NOTES else []
    notes = ["; ".join([*listed[:MOST_NOTES], *more]) + "."] if sizes else []
    notes += ["In percent; BLEU, chrF++ and bits on their own scale."] if sizes else []
    if sizes and not results.sampled:
        notes.append("Seed variance is not included in intervals and p, which needs at least three seeds.")
    dtypes = sorted({how["dtype"] for _, how in written.values() if "dtype" in how})
    return notes + ([f"Scored in {' and '.join(dtypes)}."] if dtypes else [])


def finite_or_none(value: Any) -> float | None:
    """The number, or None where the harness writes "N/A" or nan."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def primary_of(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """The score shown for each task and language: the task's primary metric, else the first one written."""
    by_place: dict[tuple[str, str, int | None], ScoreRow] = {}
    for row in rows:
        if row.subject:
            continue
        place = row.task, row.where, row.num_fewshot
        if place not in by_place or (row.metric, row.filter) == primary_metric(row.task):
            by_place[place] = row
    return list(by_place.values())


def score_interval(row: ScoreRow) -> tuple[float, float] | None:
    """95 % interval of a score, in its own unit, as of a table's cell: of a share Wilson's, over as many questions as
    have its variance, else Student's t. None if the harness gives no error, as for corpus scores, or no variance."""
    value = finite_or_none(row.value)
    is_share = value is not None and percent_factor(row.metric) == 100 and 0 <= value <= 1
    return None if value is None else interval_of_mean(value, finite_or_none(row.stderr), row.n, is_share)


def interval_of_mean(value: float, error: float | None, n: int, is_share: bool) -> tuple[float, float] | None:
    """95 % interval of the mean of n numbers; None without a standard error, or if that shows no variance."""
    if is_share and n == 1:
        return share_interval(value, 1, 0.0)
    if error is None or not n:
        return None
    if is_share:
        return share_interval(value, n, error**2 * (n - 1) / n)
    return NormalTest(value, error, n - 1, math.inf).interval() if error and n > 1 else None


def title_of(task: str) -> str:
    """The title of a task, such as MGSM or MGSM en cot."""
    benchmark = find_benchmark(task)
    return benchmark.title + task.removeprefix(benchmark.name).replace("_", " ") if benchmark else task


def score_lines(folder: Path) -> list[str]:
    """The primary score of each task and language of an evaluation in percent, or why it was skipped; of sampled
    answers also their majority and pass@k."""
    path = folder / "scores.json"
    if not path.is_file():
        return []
    written, _ = read_scores(path)
    rows = [("  task", "language", "metric", "score", "n")]
    sampled = [row for row in written if row.metric == "majority" or row.metric.startswith("pass@")]
    rows += [score_line(row) for row in [*primary_of(written), *sampled]]
    return ["scores:", *align_columns(rows, right={3, 4})]


def score_line(row: ScoreRow) -> tuple[str, str, str, str, str]:
    """A score for the terminal: out of 100, with its 95 % interval."""
    text = row.reason or "no number"
    if row.value is not None:
        scale = percent_factor(row.metric)
        ends = score_interval(row)
        text = f"{scale * row.value:.1f}" + (f" ({scale * ends[0]:.1f} to {scale * ends[1]:.1f})" if ends else "")
    return f"  {row.task} {row.num_fewshot}-shot", row.where, row.metric, text, str(row.n)
