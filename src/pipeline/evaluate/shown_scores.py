"""Scores as they are shown: in percent, with a 95 % interval."""

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

# metrics that the harness gives out of 100, and lengths; ROUGE as such is a share, as are those
# that count answers
OWN_SCALE = re.compile(
    r"(sp|smoothed_)?bleu(?!_acc).*|chrf.*|rouge\w+_(avg|diff|max)|eqbench|percent_parseable|average_len"
)


@lru_cache(maxsize=256)  # requested for each row of results.csv
def percent_factor(metric: str) -> int:
    """Return the factor from a metric's value to the number shown: 100 for shares of 1, else 1."""
    if OWN_SCALE.fullmatch(metric.lower()) or metric in NO_SHARES or is_measure(metric):
        return 1
    return 100


def primary_of(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Return the score shown for each task and language: the task's primary metric, else the first
    one written.
    """
    by_place: dict[tuple[str, str, int | None], ScoreRow] = {}
    for row in rows:
        if row.subject:
            continue
        task_key = row.task, row.where, row.num_fewshot
        if task_key not in by_place or (row.metric, row.filter) == primary_metric(row.task):
            by_place[task_key] = row
    return list(by_place.values())


def score_interval(row: ScoreRow) -> tuple[float, float] | None:
    """95 % interval of a score, in its own unit, as of a table's cell: of a share Wilson's, over as
    many questions as have its variance, else Student's t. None if the harness gives no error, as
    for corpus scores, or no variance.
    """
    value, error = row.value, row.stderr
    if value is None:
        return None
    is_share = percent_factor(row.metric) == 100 and 0 <= value <= 1
    if is_share and row.n == 1:
        return share_interval(value, 1, 0.0)
    if error is None or not row.n:
        return None
    if is_share:
        return share_interval(value, row.n, error**2 * (row.n - 1) / row.n)
    if error and row.n > 1:
        return NormalTest(value, error, row.n - 1, math.inf).interval()
    return None


def score_lines(folder: Path) -> list[str]:
    """Return the primary score of each task and language of an evaluation in percent, or why it was
    skipped.

    Sampled answers also have their majority and pass@k.
    """
    path = folder / "scores.json"
    if not path.is_file():
        return []
    written, _ = read_scores(path)
    rows = [("  task", "language", "metric", "score", "n")]
    sampled = []
    for row in written:
        if row.metric == "majority" or row.metric.startswith("pass@"):
            sampled.append(row)
    rows += [score_line(row) for row in [*primary_of(written), *sampled]]
    return ["scores:", *align_columns(rows, right={3, 4})]


def score_line(row: ScoreRow) -> tuple[str, str, str, str, str]:
    """Write a score for the terminal: out of 100, with its 95 % interval."""
    text = row.reason or "no number"
    if row.value is not None:
        scale = percent_factor(row.metric)
        ends = score_interval(row)
        text = f"{scale * row.value:.1f}" + (
            f" ({scale * ends[0]:.1f} to {scale * ends[1]:.1f})" if ends else ""
        )
    return f"  {row.task} {row.num_fewshot}-shot", row.where, row.metric, text, str(row.n)
