"""A search as a loop over Optuna's trials. Its sampler is seeded and its evaluations are runs, which are made once: the
same search, begun again after it was interrupted or for more trials, repeats its trials from finished runs and goes on.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import PipelineError
from pipeline.progress import say
from pipeline.report.sweep import point_name

Point = dict[str, Any]  # knob -> value
Scores = list[list[float]]  # of one objective: tasks x questions
Evaluate = Callable[[Point, int | None], list[Scores]]  # (configuration, questions per task) -> scores by objective


@dataclass(frozen=True)
class Range:
    """Numbers from low to high; whole ones where both ends are, by their logarithm if `log`."""

    low: float
    high: float
    log: bool = False

    def suggest(self, trial: Any, name: str) -> Any:
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return (trial.suggest_int if whole else trial.suggest_float)(name, self.low, self.high, log=self.log)

    def levels(self, count: int) -> list[Any]:
        """At most `count` values, evenly spaced from low to high; the middle where it is one."""
        ends = [math.log(end) if self.log else end for end in (self.low, self.high)]
        shares = [index / (count - 1) for index in range(count)] if count > 1 else [0.5]
        values = [ends[0] + share * (ends[1] - ends[0]) for share in shares]
        values = [math.exp(value) if self.log else value for value in values]
        if isinstance(self.low, int) and isinstance(self.high, int):
            return list(dict.fromkeys(round(value) for value in values))
        return values


@dataclass(frozen=True)
class Choices:
    """Values without an order."""

    values: tuple[Any, ...]

    def suggest(self, trial: Any, name: str) -> Any:
        return json.loads(trial.suggest_categorical(name, [json.dumps(value) for value in self.values]))

    def levels(self, count: int) -> list[Any]:
        """At most `count` of them, evenly spread over the list."""
        places = range(count) if count < 2 else [index * (len(self.values) - 1) / (count - 1) for index in range(count)]
        return [self.values[place] for place in dict.fromkeys(map(round, places))]


Space = Mapping[str, Range | Choices]


@dataclass(frozen=True)
class Trial:
    """An ended trial. values: of the objectives on the last set of questions it was scored on; none where the
    configuration is no valid merge. questions: the size of that set; stopped: whether it ended before the last."""

    point: Point
    values: tuple[float, ...]
    questions: int | None
    stopped: bool
    reason: str = ""


def read_space(space: Any, knobs: Sequence[str], method: str) -> Space:
    """The space that search.space says. Raises PipelineError for an unknown knob, and a range or list without room."""
    ranges: dict[str, Range | Choices] = {}
    if not isinstance(space, dict) or not space:
        raise PipelineError(f"search.space={space}: give search.space={{knob: [values] or {{low: 0, high: 1}}}}")
    for name, entry in space.items():
        if name not in knobs:
            raise PipelineError(f"search.space.{name}: merge={method} has no such knob; it has {', '.join(knobs)}")
        if isinstance(entry, dict):
            ranges[name] = read_range(name, entry)
        elif isinstance(entry, list) and entry and len({json.dumps(value) for value in entry}) == len(entry):
            ranges[name] = Choices(tuple(entry))
        else:
            raise PipelineError(f"search.space.{name}={entry}: give different values, [1,2,3], or {{low: 0, high: 1}}")
    if all(isinstance(values, Choices) and len(values.values) == 1 for values in ranges.values()):
        raise PipelineError(f"search.space={dict(space)} holds one configuration: give a knob two values")
    return ranges


def read_range(name: str, entry: Mapping[str, Any]) -> Range:
    low, high, log = entry.get("low"), entry.get("high"), entry.get("log", False)
    numbers = all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high))
    if not numbers or set(entry) - {"low", "high", "log"} or type(log) is not bool:
        raise PipelineError(f"search.space.{name}={dict(entry)}: a range is {{low: 0, high: 1}}, or with log: true")
    assert low is not None and high is not None
    if not low < high or (log and low <= 0):
        rule = "low above 0 for log" if low < high else "low below high"
        raise PipelineError(f"search.space.{name}={dict(entry)} is an empty range: give {rule}")
    return Range(low, high, log)


def grid_of(space: Space, budget: int) -> list[Point]:
    """A grid of at most `budget` configurations: the knobs get one more value each in turn, as long as all fit."""
    counts = dict.fromkeys(space, 1)

    def levels(of: Mapping[str, int]) -> list[list[Any]]:
        return [space[name].levels(count) for name, count in of.items()]

    growing = True
    while growing:
        growing = False
        for name, values in space.items():
            larger = {**counts, name: counts[name] + 1}
            adds = len(values.levels(larger[name])) > len(values.levels(counts[name]))
            if adds and math.prod(map(len, levels(larger))) <= budget:
                counts, growing = larger, True
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*levels(counts))]


# ---------------------------------------------------------------------------------------------------- the study


def sampler_of(name: str, seed: int, population: int) -> Any:
    import optuna

    if name == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=population)
    return {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}[name](seed=seed)


def run_study(
    space: Space,
    evaluate: Evaluate,
    trials: int,
    sampler: Any,
    objectives: int = 1,
    sets: Sequence[int | None] = (None,),
    stop_at: float = 2.0,
) -> list[Trial]:
    """So many trials, each proposed after the one before has ended. sets: questions per task, growing.

    With several sets a trial ends where it is worse than the best so far on the same questions by more than `stop_at`
    standard errors of the paired difference. A configuration that is no valid merge ends without values.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=["maximize"] * objectives, sampler=sampler)
    ended: list[Trial] = []
    while len(ended) < trials:
        complete = [trial for trial in ended if trial.values and not trial.stopped]
        best = max(complete, key=lambda trial: trial.values, default=None)
        trial = study.ask()
        point = {name: values.suggest(trial, name) for name, values in space.items()}
        before = f", best so far {best.values[0]:.1f}" if best and len(best.values) == 1 else ""
        say(f"trial {len(ended) + 1} of {trials}: {point_name(point)}{before}")
        result = score_trial(trial, point, evaluate, best, sets, stop_at)
        if result.stopped:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, list(result.values))
        ended.append(result)
    return ended


def score_trial(
    trial: Any, point: Point, evaluate: Evaluate, best: Trial | None, sets: Sequence[int | None], stop_at: float
) -> Trial:
    """One configuration on growing sets of questions, as far as it is worth it."""
    values: tuple[float, ...] = ()
    for used in sets:
        try:
            scores = evaluate(point, used)
        except Invalid as error:
            return Trial(point, (), used, stopped=True, reason=str(error))
        values = tuple(map(mean_score, scores))
        if used == sets[-1]:
            break
        trial.report(values[0], used)
        if best and is_worse(scores[0], evaluate(best.point, used)[0], stop_at):
            return Trial(point, values, used, stopped=True)
    return Trial(point, values, sets[-1], stopped=False)


class Invalid(PipelineError):
    """A configuration that is no valid merge, such as more bottom and top layers than there are."""


def mean_score(scores: Scores) -> float:
    return statistics.fmean(statistics.fmean(questions) for questions in scores)


def paired_difference(left: Scores, right: Scores) -> tuple[float, float]:
    """(left minus right, its standard error), as means over tasks of the means over the same questions; the error is
    infinite where a task has a single question."""
    pairs = [[a - b for a, b in zip(*answers, strict=True)] for answers in zip(left, right, strict=True)]
    if min(map(len, pairs)) < 2:
        return mean_score(pairs), math.inf
    return mean_score(pairs), math.sqrt(sum(statistics.variance(pair) / len(pair) for pair in pairs)) / len(pairs)


def paired_interval(left: Scores, right: Scores) -> tuple[float, float] | None:
    """The 95 % interval of left minus right in percent, as in a report: Tango's, never of width zero; of several
    tasks the normal one with its variance. None for a single question a task."""
    from pipeline.stats.contrast import contrast
    from pipeline.stats.statistics import NormalTest

    differences = [[(a - b) / 100 for a, b in zip(*answers, strict=True)] for answers in zip(left, right, strict=True)]
    if min(map(len, differences)) < 2:
        return None
    reach = max(1.0, *(abs(value) for task in differences for value in task))
    contrasts = [contrast(task, reach=reach) for task in differences]
    low, high = contrasts[0].low, contrasts[0].high
    if len(contrasts) > 1:
        error = math.sqrt(sum(of_task.error**2 for of_task in contrasts)) / len(contrasts)
        difference = statistics.fmean(of_task.difference for of_task in contrasts)
        low, high = NormalTest(difference, error, reach=reach).interval()
    return 100 * low, 100 * high


def is_worse(scores: Scores, best: Scores, errors: float) -> bool:
    """Whether scores are below the best's on the same questions, by more than so many standard errors."""
    difference, error = paired_difference(best, scores)
    return difference > 0 and difference > errors * error


def front(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that none exceeds in one objective without being below it in another; each configuration once."""
    ended = {json.dumps(trial.point): trial for trial in trials if trial.values and not trial.stopped}

    def dominated(trial: Trial) -> bool:
        return any(
            other.values != trial.values and all(map(float.__ge__, other.values, trial.values))
            for other in ended.values()
        )

    return [trial for trial in ended.values() if not dominated(trial)]
