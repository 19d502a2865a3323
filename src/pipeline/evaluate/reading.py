"""What a question's text adds to its numbers: differences of the `bits` of mgsm_steps between its three tasks.

The likelihood of an answer given the question against that without it is PMI_DC (Holtzman et al. 2021, Surface Form
Competition), here of worked calculations. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.benchmarks import benchmark_of
from pipeline.data.rows import read_jsonl
from pipeline.evaluate.metrics import mean, mean_stderr, value_per_question
from pipeline.evaluate.records import ScoreRow

TASK = "mgsm_steps"


def bits_by_question(samples: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Question -> log2 of the probability of its gold calculations, from the stored records of its steps."""
    return value_per_question((sample["scores"]["bits"] for sample in samples), is_sum=True)


def reading(
    samples: Iterable[Mapping[str, Any]], controls: Iterable[Mapping[str, Any]]
) -> tuple[float, float | None, int]:
    """Mean over questions of bits given the question minus bits given the control, its standard error over questions
    (the steps of one are a cluster), and the number of questions that both have."""
    with_text, without = bits_by_question(samples), bits_by_question(controls)
    differences = [with_text[question] - without[question] for question in sorted(with_text.keys() & without.keys())]
    return mean(differences), mean_stderr(differences), len(differences)


def reading_rows(files: Iterable[Path], rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Both differences in each language that has the tasks, from the files below samples/ (task.language.jsonl)."""
    stored = {path.stem: path for path in files if path.name.startswith(TASK)}
    further_rows = []
    for row in rows:
        if (row.task, row.metric) == (TASK, "bits"):
            for metric, task in benchmark_of(TASK).differences.items():
                pair = [stored.get(f"{name}.{row.language}") for name in (TASK, task)]
                if pair[0] and pair[1]:
                    value, stderr, count = reading(*(read_jsonl(path) for path in pair if path))
                    further_rows.append(replace(row, metric=metric, value=value, stderr=stderr, n=count))
    return further_rows
