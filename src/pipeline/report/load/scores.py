"""Notes on how the scores of a table were computed."""

from __future__ import annotations

from pipeline.errors import first_few
from pipeline.report.load.contents import Results, score_rows_of

MOST_NOTES = 20  # tasks listed by name


def notes_of(results: Results) -> list[str]:
    """Return notes on the numbers: how each task was scored, and limits of the intervals."""
    notes = []
    tasks = task_notes(results)
    if tasks:
        notes.append(first_few(tasks, MOST_NOTES, "; ") + ".")
        notes.append("In percent; BLEU, chrF++, perplexities and bits on their own scale.")
        if not results.sampled:
            notes.append(
                "Seed variance is not included in intervals and p, which needs at least three"
                " seeds."
            )
    for name, verb in (("dtype", "in"), ("backend", "by")):
        settings = [evaluation.settings for evaluation in results.evaluations.values()]
        values = {str(how[name]) for how in settings if name in how}
        if values:
            notes.append(f"Scored {verb} {' and '.join(sorted(values))}.")
    return notes


def task_notes(results: Results) -> list[str]:
    """Return the metric, filter, shots and number of questions of each task."""
    counts: dict[str, set[int]] = {}
    for _, _, row in score_rows_of(results.cells):
        how = f"{row.task}: {row.metric}, {row.filter}, {row.num_fewshot}-shot"
        counts.setdefault(how.replace(", none,", ","), set()).add(row.n)
    notes = []
    for how, sizes in counts.items():
        ends = map(str, sorted({min(sizes), max(sizes)}))
        notes.append(f"{how}, n = {' to '.join(ends)}")
    return notes
