"""A search as a loop over Optuna's trials. Its sampler is seeded and its evaluations are runs, which are made once: the
same search, begun again after it was interrupted or for more trials, repeats its trials from finished runs and goes on.
"""

from __future__ import annotations

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
Space = Mapping[str, Any]  # knob -> the distribution of Optuna that its values are drawn from, lists as JSON texts
Evaluate = Callable[[Point, int | None], list[Scores]]  # (configuration, questions per task) -> scores by objective


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
    from optuna.distributions import CategoricalDistribution

    found: dict[str, Any] = {}
    if not isinstance(space, dict) or not space:
        raise PipelineError(f"search.space={space}: give search.space={{knob: [values] or {{low: 0, high: 1}}}}")
    for name, entry in space.items():
        if name not in knobs:
            raise PipelineError(f"search.space.{name}: merge={method} has no such knob; it has {', '.join(knobs)}")
        if isinstance(entry, dict):
            found[name] = read_range(name, entry)
        elif isinstance(entry, list) and entry and len({json.dumps(value) for value in entry}) == len(entry):
            found[name] = CategoricalDistribution([json.dumps(value) for value in entry])
        else:
            raise PipelineError(f"search.space.{name}={entry}: give different values, [1,2,3], or {{low: 0, high: 1}}")
    if all(values.single() for values in found.values()):
        raise PipelineError(f"search.space={dict(space)} holds one configuration: give a knob two values")
    return found


def read_range(name: str, entry: Mapping[str, Any]) -> Any:
    """Numbers from low to high; whole ones where both ends are, by their logarithm if `log`."""
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high, log = entry.get("low"), entry.get("high"), entry.get("log", False)
    numbers = all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high))
    if not numbers or set(entry) - {"low", "high", "log"} or type(log) is not bool:
        raise PipelineError(f"search.space.{name}={dict(entry)}: a range is {{low: 0, high: 1}}, or with log: true")
    assert low is not None and high is not None
    if not low < high or (log and low <= 0):
        rule = "low above 0 for log" if low < high else "low below high"
        raise PipelineError(f"search.space.{name}={dict(entry)} is an empty range: give {rule}")
    whole = isinstance(low, int) and isinstance(high, int)
    return (IntDistribution if whole else FloatDistribution)(low, high, log=log)


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
        trial = study.ask(dict(space))
        point = {name: json.loads(value) if isinstance(value, str) else value for name, value in trial.params.items()}
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


def differences(left: Scores, right: Scores) -> Scores:
    """Left minus right of each question."""
    return [[a - b for a, b in zip(*answers, strict=True)] for answers in zip(left, right, strict=True)]


def paired_difference(left: Scores, right: Scores) -> tuple[float, float]:
    """(left minus right, its standard error), as means over tasks of the means over the same questions; the error is
    infinite where a task has a single question."""
    pairs = differences(left, right)
    if min(map(len, pairs)) < 2:
        return mean_score(pairs), math.inf
    return mean_score(pairs), math.sqrt(sum(statistics.variance(pair) / len(pair) for pair in pairs)) / len(pairs)


def paired_interval(left: Scores, right: Scores) -> tuple[float, float] | None:
    """The 95 % interval of left minus right in percent, as in a report: Tango's, never of width zero; of several
    tasks the normal one with its variance. None for a single question a task."""
    from pipeline.stats.contrast import contrast
    from pipeline.stats.statistics import NormalTest

    shares = [[value / 100 for value in task] for task in differences(left, right)]
    if min(map(len, shares)) < 2:
        return None
    reach = max(1.0, *(abs(value) for task in shares for value in task))
    contrasts = [contrast(task, reach=reach) for task in shares]
    low, high = contrasts[0].interval
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
    """The trials that none exceeds in one objective without being below it in another."""

    def dominated(trial: Trial) -> bool:
        return any(
            other.values != trial.values and all(map(float.__ge__, other.values, trial.values)) for other in trials
        )

    return [trial for trial in trials if not dominated(trial)]
