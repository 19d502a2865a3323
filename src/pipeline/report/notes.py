"""What a reader needs to read a table of scores: n, shots, metric, filter, seeds, the meaning of ±."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.report.contents import Results, Score
from pipeline.report.grid import Column, Entry
from pipeline.report.scores import AVERAGE, label

METRICS = {"exact_match": "exact match", "acc": "accuracy", "chrf++": "chrF++", "pass_at_1": "pass@1"}


def notes_of(
    results: Results,
    columns: Sequence[Column],
    by_place: Mapping[tuple[str, Column], dict[int, Score]],
    filled: Mapping[tuple[str, Column], Entry],
) -> list[str]:
    """What a reader needs to read the numbers: n, shots, metric, filter, seeds, the meaning of ±."""
    notes = ["; ".join(_counts(columns, by_place)) + "."] if columns else []
    seeds = list(results.seeds)
    if len(seeds) == 1:
        notes.append(
            f"Seed {seeds[0]}. Percent; chrF++ as it is. "
            "± is one standard error over the questions, where the harness gives it."
        )
    else:
        listed = f"Over {', '.join(results.over)}" if results.over else f"Seeds {', '.join(map(str, seeds))}"
        over = "them" if results.over else "seeds"
        notes.append(f"{listed}. Percent; chrF++ as it is. Mean ± standard deviation over {over}.")
        if any("†" in entry.mark for entry in filled.values()):
            notes.append("† one evaluation, not one a seed: ± is its standard error over the questions.")
        if any("/" in entry.mark for entry in filled.values()):
            notes.append("(k/n): of n numbers only k are there.")
    if results.selected:
        rows = ", ".join(results.selected[:6]) + (" ..." if len(results.selected) > 6 else "")
        notes.append(
            f"{rows}: chosen by these scores, which are too high, and never bold. Split-half estimates are in the "
            "table's own cells and contrasts."
        )
    if not results.sampled:
        notes.append("Seed variance is not included in intervals and p: that takes at least three seeds.")
    elif results.over:
        notes.append(f"Bold is over questions alone; what the table compares is over {', '.join(results.sampled)} too.")
    if any(column.target == AVERAGE for column in columns):
        notes.append(
            "Averages are over the target languages within a seed; "
            "a single evaluation's average has no ±, as languages share questions."
        )
    return notes


def _counts(columns: Sequence[Column], by_place: Mapping[tuple[str, Column], dict[int, Score]]) -> list[str]:
    """For each task its metric, filter and shots, and how many questions stand behind its numbers."""
    spans_of: dict[str, dict[str, str]] = {}
    for column in columns:
        if column.target == AVERAGE:
            continue
        counts = sorted({s.n for (_, c), seeds in by_place.items() if c == column for s in seeds.values() if s.n})
        how = [METRICS.get(column.metric, column.metric)]
        how += [column.filter] if column.filter != "none" else []
        title = label(column.task, "", "", False).strip()
        span = (
            "unknown"
            if not counts
            else str(counts[0])
            if len(counts) == 1
            else f"{counts[0]} to {counts[-1]} (rows differ)"
        )
        spans_of.setdefault(f"{title}: {', '.join(how)}, {column.num_fewshot}-shot", {})[column.where] = span
    sentences = []
    for title, spans in spans_of.items():
        alike = len(set(spans.values())) == 1
        each = " each" if len(spans) > 1 else ""
        n = (
            f"n = {next(iter(spans.values()))}{each}"
            if alike
            else ", ".join(f"n = {span} ({where})" for where, span in spans.items())
        )
        sentences.append(f"{title}, {n}")
    return sentences
