"""Scores for the terminal and reports: in percent, with a 95 % interval."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from pipeline.benchmarks import is_measure, primary_metric
from pipeline.benchmarks.harness import NO_SHARES
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.stats.statistics import NormalTest, share_interval
from pipeline.text import align_columns

# Metrics that the harness scales to 100, and lengths. Plain ROUGE and metrics that count answers
# are shares.
OWN_SCALE = re.compile(
    r"(sp|smoothed_)?bleu(?!_acc).*|chrf.*|rouge\w+_(avg|diff|max)|eqbench|percent_parseable|average_len"
)


@lru_cache(maxsize=256)  # called for each row of results.csv
def percent_factor(metric: str) -> int:
    """Return the factor from a metric's value to the shown number: 100 for a share, or 1."""
    if OWN_SCALE.fullmatch(metric.lower()) or metric in NO_SHARES or is_measure(metric):
        return 1
    return 100


def primary_of(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Return the score that is shown for each task and language.

    It is the task's primary metric, otherwise the first metric in the file.
    """
    by_place: dict[tuple[str, str, int], ScoreRow] = {}
    for row in rows:
        if row.subject:
            continue
        task_key = row.task, row.where, row.num_fewshot
        if task_key not in by_place or (row.metric, row.filter) == primary_metric(row.task):
            by_place[task_key] = row
    return list(by_place.values())


def score_interval(row: ScoreRow) -> tuple[float, float] | None:
    """Return the 95 % interval of a score in its own unit, as in a table's cell.

    The interval of a share is Wilson's, over the effective number of questions that its variance
    implies. The interval of other scores is Student's t. The result is None if the harness reports
    no standard error, as for corpus scores, or if there is no variance.
    """
    value = row.value
    error = row.stderr
    if value is None:
        return None
    is_share = percent_factor(row.metric) == 100 and 0 <= value <= 1
    if is_share and row.n == 1:
        return share_interval(value, 1, 0.0)
    if error is None or not row.n:
        return None
    if is_share:
        variance = error**2 * (row.n - 1) / row.n
        return share_interval(value, row.n, variance)
    if error and row.n > 1:
        return NormalTest(value, error, row.n - 1, math.inf).interval()
    return None


def score_lines(folder: Path) -> list[str]:
    """Return lines with an evaluation's scores in percent, with 95 % intervals.

    A line has the primary score of a task and language, or why the task was skipped. Sampled
    answers also have lines for majority and pass@k.
    """
    path = folder / "scores.json"
    if not path.is_file():
        return []
    written, _ = read_scores(path)
    rows = [("  task", "language", "metric", "score", "n")]
    sampled = [row for row in written if row.metric == "majority" or row.metric.startswith("pass@")]
    for row in [*primary_of(written), *sampled]:
        scale = percent_factor(row.metric)
        text = row.reason or "no number"
        if row.value is not None:
            text = f"{scale * row.value:.1f}"
        interval = score_interval(row)
        if interval:
            low, high = (scale * end for end in interval)
            text += f" ({low:.1f} to {high:.1f})"
        task = f"  {row.task} {row.num_fewshot}-shot"
        rows.append((task, row.where, row.metric, text, str(row.n)))
    return ["scores:", *align_columns(rows, right={3, 4})]
