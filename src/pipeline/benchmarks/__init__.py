"""The benchmarks, found by listing this folder: modules with a BENCHMARK, and YAML (described.py).

conf/eval/ has an option for each number of few-shot examples. A benchmark's record
(benchmark.py) holds everything that depends on the benchmark. The command line imports all files at
its start, so functions import NumPy, torch and the harness themselves.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

from pipeline.benchmarks.benchmark import Benchmark, Kind
from pipeline.benchmarks.described import read_benchmark
from pipeline.benchmarks.harness import harness_benchmark
from pipeline.config.harness_tasks import harness_index, included_folder
from pipeline.errors import PipelineError, close_matches

_MODULES = [import_module(f"{__name__}.{item.name}") for item in pkgutil.iter_modules(__path__)]
_RECORDS = [
    *(module.BENCHMARK for module in _MODULES if hasattr(module, "BENCHMARK")),
    *map(read_benchmark, Path(__file__).parent.glob("*.yaml")),
]
_RECORDS.sort(key=lambda record: record.name)
BENCHMARKS: dict[str, Benchmark] = {record.name: record for record in _RECORDS}
BY_TASK: dict[str, Benchmark] = {task: record for record in _RECORDS for task in record.tasks}


def find_benchmark(task: str) -> Benchmark | None:
    """Return the benchmark of a task, or None for an unknown task."""
    return BY_TASK.get(task) or harness_benchmark(task)


def benchmark_of(task: str) -> Benchmark:
    """Return the benchmark of a task.

    Raises:
        PipelineError: the task is unknown, and the error names a similar task. Or a task file of
            eval.include_path has the name of a benchmark.
    """
    folder = included_folder(task)
    if folder and task in BY_TASK:
        raise PipelineError(
            f"{task} of eval.include_path={folder} has the name of a benchmark. Rename the task."
        )
    benchmark = find_benchmark(task)
    if benchmark:
        return benchmark
    near = close_matches(task, [*BY_TASK, *harness_index()])
    remedy = f"Give a task of the harness, or one such as {', '.join([*BY_TASK][:4])}."
    if near:
        remedy = f"Did you mean {near[0]}?"
    raise PipelineError(f"The task {task!r} is unknown. {remedy}")


def kind_of(task: str) -> Kind | None:
    """Return the kind of a task's answers, or None for an unknown task."""
    benchmark = find_benchmark(task)
    return benchmark.kind if benchmark else None


def lower_is_better(task: str) -> bool:
    """Return True if a lower primary metric is better."""
    benchmark = find_benchmark(task)
    return benchmark is not None and benchmark.lower_is_better


def primary_metric(task: str) -> tuple[str, str]:
    """Return the metric and filter of a task's main number; empty for an unknown task."""
    benchmark = find_benchmark(task)
    return (benchmark.metric, benchmark.filter) if benchmark else ("", "")


def measures_of(task: str) -> tuple[str, ...]:
    """Return a task's metrics that are not shares: measures, and differences from other tasks."""
    benchmark = find_benchmark(task)
    if benchmark is None:
        return ()
    if task != benchmark.name:
        return benchmark.measures
    return (*benchmark.measures, *benchmark.differences)


def is_measure(metric: str | None) -> bool:
    """Return True if a metric is a measure of a benchmark, or a difference of measures."""
    return any(metric in measures_of(name) for name in BENCHMARKS)


def difference_parts(task: str, metric: str | None) -> tuple[str, str] | None:
    """Return the measure and the subtracted task of a difference, or None for other metrics."""
    benchmark = find_benchmark(task)
    if benchmark is None or task != benchmark.name:
        return None
    subtracted = benchmark.differences.get(metric or "")
    if subtracted:
        return (benchmark.measures[0], subtracted)
    return None


def scored_files(data_root: Path) -> dict[str, list[Path]]:
    """Return the files of each benchmark below data_root that training rows are compared with.

    Few-shot examples are left out. A benchmark that is built from other benchmarks' files only has
    its own files.
    """
    files_of = {}
    for name, benchmark in BENCHMARKS.items():
        if benchmark.built_from:
            files = list(filter(Path.is_file, map(data_root.joinpath, benchmark.compared)))
        else:
            files = benchmark.files(data_root)
        files_of[name] = [path for path in files if path.name != benchmark.exemplar_file]
    return files_of
