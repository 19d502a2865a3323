"""The benchmarks, a file each, found by listing this folder: a module that holds a BENCHMARK, or
YAML (described.py). conf/eval/ has an option for each number of exemplars.

Everything that depends on which benchmark it is stands in its record (benchmark.py). The command
line imports all files at its start, so NumPy, torch and the harness are imported inside functions.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

from pipeline.benchmarks.benchmark import Benchmark, Kind
from pipeline.benchmarks.described import read_benchmark
from pipeline.benchmarks.harness import harness_benchmark
from pipeline.config.extensions import BENCHMARKS as ENTRY_POINTS
from pipeline.config.extensions import extensions
from pipeline.config.harness_tasks import explain_tag, harness_index
from pipeline.errors import PipelineError, close_matches

_MODULES = [import_module(f"{__name__}.{item.name}") for item in pkgutil.iter_modules(__path__)]
_RECORDS = [
    *(module.BENCHMARK for module in _MODULES if hasattr(module, "BENCHMARK")),
    *map(read_benchmark, Path(__file__).parent.glob("*.yaml")),
]
BENCHMARKS: dict[str, Benchmark] = {
    record.name: record for record in sorted(_RECORDS, key=lambda one: one.name)
}


def find_benchmark(task: str) -> Benchmark | None:
    """Return the benchmark of a task, or None for a task that is not known here.

    A table of another version may show such a task, and stage=compare has columns with a space in
    their names.
    """
    if " " in task:
        return None
    benchmark = BENCHMARKS.get(task) or next(
        (item for item in BENCHMARKS.values() if task in item.variants), None
    )
    return benchmark or _of_package(task) or harness_benchmark(task)


@cache
def _of_package(task: str) -> Benchmark | None:
    """Return the benchmark of another installed package that has the task: one of the task's name,
    or its beginning up to _.

    Raises: PipelineError: the package cannot be imported, or what it declares is not a benchmark of
    that name.
    """
    names = []
    for name in extensions(ENTRY_POINTS):
        if f"{task}_".startswith(f"{name}_"):
            names.append(name)
    if not names:
        return None
    extension = extensions(ENTRY_POINTS)[max(names, key=len)]
    origin, record = f"benchmark {extension.name} of package {extension.package}", extension.load()
    if not isinstance(record, Benchmark) or record.name != extension.name:
        raise PipelineError(
            f"{origin}: {extension.entry.value} is not a Benchmark with name={extension.name!r}"
        )
    if task not in record.tasks:
        return None
    return replace(record, package=extension.package)


def benchmark_of(task: str) -> Benchmark:
    """Return the benchmark of a task.

    Raises: PipelineError: the task is unknown; names a near one.
    """
    benchmark = find_benchmark(task)
    if benchmark:
        return benchmark
    tag = explain_tag(task)
    if tag:
        raise PipelineError(tag)
    tasks = [name for item in BENCHMARKS.values() for name in item.tasks] + list(
        extensions(ENTRY_POINTS)
    )
    index = harness_index()
    near = close_matches(task, [*tasks, *index.tasks, *index.groups])
    hint = f"did you mean {near[0]}? " if near else ""
    raise PipelineError(
        f"unknown task {task!r}: {hint}Known are {', '.join(tasks)}, and those of the harness"
    )


def kind_of(task: str) -> Kind | None:
    """Return what an answer to the task is, or None for an unknown task."""
    benchmark = find_benchmark(task)
    if benchmark:
        return benchmark.kind
    return None


def answer_language(task: str, code: str) -> str:
    """The language that answers are to be in; `where` is the question's, or a pair of which it is
    the second.
    """
    benchmark = find_benchmark(task)
    if benchmark and task in benchmark.in_english:
        return "en"
    return code.split("-")[-1]


def chance_of(task: str) -> float | None:
    """Return the share of right answers by guessing, or None if nothing can be guessed or the task
    is unknown.
    """
    benchmark = find_benchmark(task)
    if benchmark:
        return benchmark.chance
    return None


def lower_is_better(task: str) -> bool:
    """Whether less of a task's primary metric is better."""
    benchmark = find_benchmark(task)
    return benchmark is not None and benchmark.lower_is_better


def primary_metric(task: str) -> tuple[str, str]:
    """Return the metric and filter that stand for a task where one number is wanted; empty for an
    unknown task.
    """
    benchmark = find_benchmark(task)
    if benchmark:
        return (benchmark.metric, benchmark.filter)
    return ("", "")


def measures_of(task: str) -> tuple[str, ...]:
    """Return the metrics of a task that are not shares: its measures, and their differences from
    other tasks'.
    """
    benchmark = find_benchmark(task)
    if benchmark is None:
        return ()
    return (*benchmark.measures, *(benchmark.differences if task == benchmark.name else ()))


def is_measure(metric: str | None) -> bool:
    """Whether a metric is a measure of some benchmark, or a difference of measures."""
    return any(metric in measures_of(name) for name in BENCHMARKS)


def difference_parts(task: str, metric: str | None) -> tuple[str, str] | None:
    """(measure, the task whose measure is subtracted) of a metric that is a difference; None for
    any other.
    """
    benchmark = find_benchmark(task)
    subtracted = None
    if benchmark and task == benchmark.name:
        subtracted = benchmark.differences.get(metric or "")
    if benchmark and subtracted:
        return (benchmark.measures[0], subtracted)
    return None


def scored_files(data_root: Path) -> dict[str, list[Path]]:
    """Return the files of each benchmark below data_root that training rows are compared with.

    These are all but exemplars. A benchmark that is built from others' files has only its own.
    """
    return {
        name: (
            [path for path in map(data_root.joinpath, item.compared) if path.is_file()]
            if item.built_from
            else [path for path in item.files(data_root) if path.name != item.exemplar_file]
        )
        for name, item in BENCHMARKS.items()
    }
