"""How the scores of a table were computed, in notes; and the refusal of those that cannot be compared."""

from __future__ import annotations

from typing import Any

from pipeline.benchmarks import find_benchmark
from pipeline.errors import PipelineError
from pipeline.report.compare import interval_text
from pipeline.report.load.contents import Results, score_rows_of
from pipeline.text import first_few

METRICS = {"exact_match": "exact match", "acc": "accuracy", "chrf++": "chrF++", "pass_at_1": "pass@1"}
MOST_NOTES = 20  # tasks listed by name


def refuse_unlike(results: Results) -> None:
    """Raise PipelineError if the evaluations of a table differ in backend or dtype, or those of a cell in the use of a
    chat template."""
    settings: dict[tuple[str, ...], dict[tuple[str, Any], str]] = {}  # compared setting -> its value -> an evaluation
    for cell in results.cells:
        compared = ("backend", "hf", ()), ("dtype", "auto", ()), ("chat_template", False, (cell.row, cell.column))
        for name in (score.run for score in cell.scores if score.run in results.evaluations):
            for key, default, where in compared:
                value = results.evaluations[name].settings.get(key, default)
                settings.setdefault((key, *where), {}).setdefault((f"eval.{key}", value), name)
    for by_setting in settings.values():
        if len(by_setting) > 1:
            text = ", ".join(f"{name} ({key}={value})" for (key, value), name in by_setting.items())
            remedy = "score all with the same setting, for example every.eval.dtype=float32"
            raise PipelineError(f"{text} were scored differently and cannot share a table: {remedy}")


def notes_of(results: Results) -> list[str]:
    """Notes on the numbers: metric, filter, shots and questions of each task, and limits of the intervals."""
    counts: dict[str, set[int]] = {}
    for _, _, row in score_rows_of(results.cells):
        how = [METRICS.get(row.metric, row.metric), *([row.filter] if row.filter != "none" else [])]
        how += [f"{row.num_fewshot}-shot"] if row.num_fewshot is not None else []
        counts.setdefault(f"{title_of(row.task)}: {', '.join(how)}", set()).add(row.n)
    listed = [f"{how}, n = {interval_text(sizes)}" for how, sizes in counts.items()]
    notes = [*results.other_bases]
    if listed:
        notes.append("; ".join(first_few(listed, MOST_NOTES, ", in results.csv")) + ".")
        notes.append("In percent; BLEU, chrF++, perplexities and bits on their own scale.")
        if not results.sampled:
            notes.append("Seed variance is not included in intervals and p, which needs at least three seeds.")
    settings = [evaluation.settings for evaluation in results.evaluations.values()]
    dtypes = sorted({used["dtype"] for used in settings if "dtype" in used})
    numbers = [used["batch_size"] for used in settings if used.get("dtype") != "float32" and "batch_size" in used]
    rows = sorted({size for number in numbers for size in (number if isinstance(number, list) else [number])})
    if len(rows) > 1:
        notes.append(
            f"Answers were computed {' or '.join(map(str, rows))} at once (eval.batch_size), which rounds them."
        )
    return notes + ([f"Scored in {' and '.join(dtypes)}."] if dtypes else [])


def title_of(task: str) -> str:
    """The title of a task, such as MGSM or MGSM en cot."""
    benchmark = find_benchmark(task)
    return benchmark.title + task.removeprefix(benchmark.name).replace("_", " ") if benchmark else task
