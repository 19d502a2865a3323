"""Notes on how the scores of a table were computed, and a check that they can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.benchmarks import find_benchmark
from pipeline.errors import PipelineError
from pipeline.report.load.contents import Results, score_rows_of
from pipeline.text import first_few

METRICS = {
    "exact_match": "exact match",
    "acc": "accuracy",
    "chrf++": "chrF++",
    "pass_at_1": "pass@1",
}
MOST_NOTES = 20  # tasks listed by name


def refuse_unlike(results: Results) -> None:
    """Raise PipelineError if evaluations that share a table were scored differently.

    All need the same backend and dtype. The evaluations of a cell also need the same use of a chat
    template.
    """
    backends, dtypes = {}, {}
    for cell in results.cells:
        chat_templates = {}
        for score in cell.scores:
            if score.run in results.evaluations:
                settings = results.evaluations[score.run].settings
                backends[score.run] = settings.get("backend", "hf")
                dtypes[score.run] = settings.get("dtype", "auto")
                chat_templates[score.run] = settings.get("chat_template", False)
        refuse_several("eval.chat_template", chat_templates)
    refuse_several("eval.backend", backends)
    refuse_several("eval.dtype", dtypes)


def refuse_several(key: str, values: Mapping[str, Any]) -> None:
    """Raise PipelineError unless all runs have the same value of a key.

    `values` has the value of each run.
    """
    first: dict[Any, str] = {}  # value -> a run that has it
    for name, value in values.items():
        first.setdefault(value, name)
    if len(first) > 1:
        runs = ", ".join(f"{name} ({key}={value})" for value, name in first.items())
        raise PipelineError(
            f"{runs} were scored differently and cannot share a table. Score all with the same"
            " setting, for example every.eval.dtype=float32."
        )


def notes_of(results: Results) -> list[str]:
    """Return notes on the numbers: how each task was scored, and limits of the intervals."""
    notes = []
    tasks = task_notes(results)
    if tasks:
        notes.append("; ".join(first_few(tasks, MOST_NOTES, ", in results.csv")) + ".")
        notes.append("In percent; BLEU, chrF++, perplexities and bits on their own scale.")
        if not results.sampled:
            notes.append(
                "Seed variance is not included in intervals and p, which needs at least three"
                " seeds."
            )
    dtypes: set[str] = set()
    batches: set[int] = set()
    for evaluation in results.evaluations.values():
        dtype = evaluation.settings.get("dtype")
        sizes = evaluation.settings.get("batch_size", [])
        if dtype:
            dtypes.add(dtype)
        if not isinstance(sizes, list):
            sizes = [sizes]
        if dtype != "float32":
            batches.update(sizes)
    if len(batches) > 1:
        mixed = " and ".join(map(str, sorted(batches)))
        notes.append(
            f"Batch sizes of {mixed} were mixed (eval.batch_size); below float32 this changes some"
            " answers."
        )
    if dtypes:
        notes.append(f"Scored in {' and '.join(sorted(dtypes))}.")
    return notes


def task_notes(results: Results) -> list[str]:
    """Return the metric, filter, shots and number of questions of each task."""
    counts: dict[str, set[int]] = {}
    for _, _, row in score_rows_of(results.cells):
        words = [METRICS.get(row.metric, row.metric)]
        if row.filter != "none":
            words.append(row.filter)
        if row.num_fewshot is not None:
            words.append(f"{row.num_fewshot}-shot")
        how = f"{title_of(row.task)}: {', '.join(words)}"
        counts.setdefault(how, set()).add(row.n)
    notes = []
    for how, sizes in counts.items():
        ends = map(str, sorted({min(sizes), max(sizes)}))
        notes.append(f"{how}, n = {' to '.join(ends)}")
    return notes


def title_of(task: str) -> str:
    """Return the title of a task, such as MGSM or MGSM en cot."""
    benchmark = find_benchmark(task)
    if benchmark:
        return benchmark.title + task.removeprefix(benchmark.name).replace("_", " ")
    return task
