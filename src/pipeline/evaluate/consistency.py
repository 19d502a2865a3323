"""How much the answers of neighbouring configurations agree: a choice among them that needs no right answers.

AdaMMS (Du et al. 2025, arXiv 2503.23733) merges with several coefficients and takes the one whose answers to unlabelled
questions differ least from those of the coefficients next to it. Nothing here reads targets or scores.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import is_unparsed

Point = tuple[Any, ...]  # a value of each axis of a grid
Answers = Mapping[tuple[str, Any], str]  # (task and language, question) -> answer as extracted from the response


def read_answers(folder: Path) -> Answers:
    """The answers of a finished evaluation. Raises PipelineError where its tasks have none (bits of given texts)."""
    paths = sorted((folder / "samples").glob("*.jsonl"))
    answers: dict[tuple[str, Any], str] = {}
    for path in paths:
        answers |= _answers_in(path, path.stat().st_mtime_ns)
    if not any(answers.values()):
        raise PipelineError(f"{folder.name} has no answers: choose=consistency needs a task that is answered")
    return answers


@lru_cache(maxsize=1024)
def _answers_in(path: Path, _: int) -> Answers:
    return {(path.stem, sample["doc_id"]): str(sample["extracted"]) for sample in read_jsonl(path)}


def agreement(left: Answers, right: Answers) -> float:
    """The share of shared questions with the same answer; answers from which nothing was extracted agree with none."""
    shared = left.keys() & right.keys()
    if not shared:
        raise PipelineError("the answers of two configurations share no question: choose=consistency compares them")
    return sum(left[key] == right[key] and not is_unparsed(left[key]) for key in shared) / len(shared)


def neighbours(points: Collection[Point]) -> dict[Point, list[Point]]:
    """Of each point of a grid, those next to it along one axis, all other values being equal; values are in the order
    in which they first occur."""
    axes = [list(dict.fromkeys(values)) for values in zip(*points, strict=True)]
    places = {tuple(axis.index(value) for axis, value in zip(axes, point, strict=True)): point for point in points}
    return {
        point: [
            places[near]
            for axis in range(len(axes))
            for step in (-1, 1)
            if (near := (*place[:axis], place[axis] + step, *place[axis + 1 :])) in places
        ]
        for place, point in places.items()
    }


def consistencies(answers: Mapping[Point, Sequence[Answers]]) -> dict[Point, float]:
    """The mean agreement of each point with its neighbours, and over its evaluations, which correspond in order.

    At the end of an axis there is one neighbour less: means, not sums, so that ends are not at a disadvantage.
    """
    near = neighbours(answers)
    if lonely := next((point for point, others in near.items() if not others), None):
        raise PipelineError(f"choose=consistency: {lonely} has no neighbour: give the axis two values or more")
    return {
        point: statistics.fmean(
            agreement(left, right)
            for other in others
            for left, right in zip(answers[point], answers[other], strict=True)
        )
        for point, others in near.items()
    }
