"""Reading the scores of a table's evaluations and matching them with its cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.benchmarks import find_benchmark, primary_metric
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.report.load.contents import CellResult, CellScore, Results

METRICS = {"exact_match": "exact match", "acc": "accuracy", "chrf++": "chrF++", "pass_at_1": "pass@1"}
MOST_NOTES = 20  # tasks listed by name

# name of an evaluation -> its rows and its harness settings
Written = Mapping[str, tuple[list[ScoreRow], dict[str, Any]]]


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


def title_of(task: str) -> str:
    """The title of a task, such as MGSM or MGSM en cot."""
    benchmark = find_benchmark(task)
    return benchmark.title + task.removeprefix(benchmark.name).replace("_", " ") if benchmark else task
