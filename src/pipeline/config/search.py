"""Settings of stage=search: what is varied, what is maximised, and with how many trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.evaluation import Measure
from pipeline.config.knob import Knobs, knob


@dataclass
class Search(Knobs):
    """The best configuration of a merge by its development questions."""

    # knob of the merge -> its values, [2,3,4], or its range, {low: 0.2, high: 1.5} (log: true for its logarithm)
    space: Any = None
    objectives: list[Measure] | None = None  # scores to maximise, one or two; null: the mean over tasks and languages
    trials: int = knob(20, low=1)  # configurations, repeated ones counted; more continue an earlier search
    sampler: str | None = knob(None, options=("tpe", "nsga2", "random"))  # null: tpe, with two objectives nsga2
    population: int = knob(10, low=2)  # of a generation of nsga2
    # questions that choose; test: of benchmarks without development questions, and the split-half score is what counts
    split: str = knob("dev", options=("dev", "test"))
    # these questions per task: a trial that is worse on the first so many ends there; null: eval.limit
    questions: list[int] | None = knob(None, low=1)
    stop_at: float = knob(2.0, above=0)  # standard errors of the paired difference from the best that count as worse
    grid: bool = False  # also score a grid of at most as many configurations, and its best one
