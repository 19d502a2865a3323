"""The languages and benchmarks of a study, and their columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.benchmarks import find_benchmark
from pipeline.config import conf
from pipeline.config.harness_tasks import include, tasks_of_option
from pipeline.tables.words import Refuse, Words, as_list

EXAMPLES = {
    "languages": "sw, te",
    "benchmarks": (
        "mgsm_8shot, {eval: gsm8k_5shot, data_root: null}, {mine: {sw: mine_sw, te: mine_te}}"
    ),
}
OWN_ITEMS = {"eval", "data_root"}  # the keys of a benchmark with another data_root than every


def names_in(study: Words, key: str, refuse: Refuse) -> list[Any]:
    """Return the list of a study's languages or benchmarks.

    A benchmark may be a mapping, which is not checked.
    """
    items = as_list(study.get(key) or [])
    if not items:
        raise refuse(key, "a study names at least one")
    for item in items:
        is_mapping = key == "benchmarks" and isinstance(item, dict)
        if not isinstance(item, str) and not is_mapping:
            problem = f"{item!r} is no name. Write {key}: [{EXAMPLES[key]}]."
            if isinstance(item, bool):  # YAML reads these words as truth values
                problem += " Quote no, yes and on."
            raise refuse(key, problem)
    return items


@dataclass(frozen=True)
class Benchmark:
    """One benchmark of a study.

    Attributes:
        tasks: language -> the value of eval=.
        words: Further words of its columns.
        by_language: True if the names of its columns have the language.
    """

    name: str
    tasks: dict[str, str]
    words: Words
    by_language: bool = True


def benchmarks_of(study: Words, languages: list[str], refuse: Refuse) -> list[Benchmark]:
    """Return the benchmarks of a study.

    A benchmark is a name, {eval: NAME, data_root: ROOT}, or {NAME: {LANGUAGE: TASK}}.
    """
    benchmarks = []
    for item in names_in(study, "benchmarks", refuse):
        if isinstance(item, str):
            benchmarks.append(benchmark_of_name(item, languages, {}))
        elif {*item} == OWN_ITEMS:
            words = dict(item)
            benchmarks.append(benchmark_of_name(str(words.pop("eval")), languages, words))
        else:
            benchmarks.append(benchmark_by_language(item, languages, refuse))
    scored: set[str] = set()
    for benchmark in benchmarks:
        scored.update(benchmark.tasks)
    unscored = [code for code in languages if code not in scored]
    if unscored and all(benchmark.by_language for benchmark in benchmarks):
        raise refuse(
            "languages",
            f"no benchmark has a task for {unscored[0]}. Leave it out, or name a task for it.",
        )
    return benchmarks


def benchmark_by_language(item: Words, languages: list[str], refuse: Refuse) -> Benchmark:
    """Return a benchmark that is written as {NAME: {LANGUAGE: TASK}}."""
    name, tasks = next(iter(item.items()), ("", None))
    if len(item) != 1 or not isinstance(tasks, dict):
        example = f"benchmarks: [{EXAMPLES['benchmarks']}]"
        raise refuse("benchmarks", f"{item!r} is no name. Write {example}.")
    for code in tasks:
        if code not in languages:
            raise refuse(
                "benchmarks",
                f"{name} has a task for {code}, which is not in languages. Add it there.",
            )
    return Benchmark(str(name), {str(code): str(task) for code, task in tasks.items()}, {})


def benchmark_of_name(name: str, languages: list[str], words: Words) -> Benchmark:
    """Return a benchmark in all languages, or in a single one for a task with one test set.

    The language of a task with one test set is the end of its name. If there is no language at its
    end, its column has no language in its name.
    """
    if not has_one_set(name):
        return Benchmark(name, dict.fromkeys(languages, name), words)
    task = re.sub(r"_\d+shot$", "", name)
    for code in languages:
        if len(languages) == 1 or task.endswith(f"_{code}"):
            return Benchmark(name, {code: name}, words)
    code = "en" if "en" in languages else languages[0]
    return Benchmark(name, {code: name}, words, by_language=False)


def include_tasks(every: Words) -> None:
    """Make the tasks of eval.include_path known."""
    nested = every.get("eval")
    folder = every.get("eval.include_path")
    if not folder and isinstance(nested, dict):
        folder = nested.get("include_path")
    if isinstance(folder, str):
        include(folder)


def has_one_set(name: str) -> bool:
    """Return True if eval=NAME is a task of the harness with one test set, in any language."""
    tasks = [re.sub(r"_\d+shot$", "", name)]
    if conf.option_file("eval", name):
        tasks = [str(task["task"]) for task in tasks_of_option(name)]
    benchmarks = [find_benchmark(task) for task in tasks]
    return all(benchmark is not None and benchmark.of_harness for benchmark in benchmarks)


def columns_of(benchmarks: list[Benchmark]) -> Iterator[tuple[str, Words]]:
    """Yield a column for each benchmark and language; for translations two, from and to English."""
    stems = [re.sub(r"_\d+shot$", "", benchmark.name) for benchmark in benchmarks]
    counts = Counter(stems)
    for benchmark, stem in zip(benchmarks, stems, strict=True):
        title = stem if counts[stem] == 1 else benchmark.name
        for language, task in benchmark.tasks.items():
            words = {"eval": task, **benchmark.words, "in": language}
            if stem != "flores":
                yield f"{title} {language}" if benchmark.by_language else title, words
            elif language != "en":
                for pair in (f"en-{language}", f"{language}-en"):
                    yield f"{title} {pair}", {**words, "pair": pair}
