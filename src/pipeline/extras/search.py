"""Stage search: the configuration of a merge that scores best on development questions, and its score on test ones."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from pipeline.benchmarks import benchmark_of
from pipeline.commands.sweep import evaluation_at, refuse_unfinished
from pipeline.config.evaluation import Measure, is_flores
from pipeline.config.knob import Knobs, identity, knob, part
from pipeline.config.stages import PointsStage
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import finite_or_none
from pipeline.evaluate.selection import label
from pipeline.extras.optuna_study import (
    Invalid,
    Point,
    Scores,
    Space,
    Trial,
    front,
    mean_score,
    paired_difference,
    paired_interval,
    read_space,
    run_study,
    sampler_of,
)
from pipeline.files import write_atomically
from pipeline.merge.methods import NOT_SWEPT
from pipeline.report.render.sheets import comma_separated
from pipeline.report.sweep import SENTENCES, point_name, point_scores, scores_in, split_half_summary
from pipeline.report.templates import render
from pipeline.runs.run import Run
from pipeline.stages.evaluation import refuse_lower
from pipeline.stages.rows import build
from pipeline.stats.statistics import largest
from pipeline.text import align_columns


@dataclass
class Search(Knobs):
    """The best configuration of a merge by its development questions."""

    # knob of the merge -> its values, [2,3,4], or its range, {low: 0.2, high: 1.5} (log: true for its logarithm)
    space: Any = None
    objectives: list[Measure] | None = None  # scores to maximise, one or two; null: the mean over tasks and languages
    trials: int = knob(20, ge=1)  # configurations, repeated ones counted; more continue an earlier search
    sampler: str | None = knob(None, options=("tpe", "nsga2", "random"))  # null: tpe, with two objectives nsga2
    population: int = knob(10, ge=2)  # of a generation of nsga2
    # questions that choose; test: of benchmarks without development questions, and the split-half score is what counts
    split: str = knob("dev", options=("dev", "test"))
    # these questions per task: a trial that is worse on the first so many ends there; null: eval.limit
    questions: list[PositiveInt] | None = knob(None)
    stop_at: float = knob(2.0, gt=0)  # standard errors of the paired difference from the best that count as worse


@dataclass
class SearchStage(PointsStage):
    """A merge's configuration that scores best on development questions, looked for by Optuna; its test score."""

    search: Search = part(Search)

    def answer(self) -> Path:
        """Run the search up to search.trials trials, score what it found on test questions. Returns the page.

        Raises:
            PipelineError: settings that contradict each other, or leave nothing to find, before anything is scored.
        """
        from pipeline.merge.resident import keep_models_resident

        space, search = check_settings(self), self.search
        start = self.run_at({}, "test", self.eval.limit)
        refuse_unfinished(start)
        knobs = identity(search)
        rule = {key: knobs[key] for key in sorted(knobs) if key != "trials"} | {"seed": self.seed}
        name = hashlib.sha256(json.dumps([start.hash, rule], sort_keys=True).encode()).hexdigest()[:8]
        sets: Sequence[int | None] = search.questions or [self.eval.limit]
        objectives = len(search.objectives or [""])
        sampler = search.sampler or ("tpe" if objectives == 1 else "nsga2")
        with keep_models_resident():
            given = self.on_development({}, sets[-1])
            if all(mean_score(scores) >= 100 for scores in given):
                raise PipelineError(
                    "the given configuration answers all questions that choose: search with harder ones"
                )
            trials = run_study(
                space, self.on_development, search.trials, sampler_of(sampler, self.seed, search.population),
                objectives, sets, search.stop_at,
            )  # fmt: skip
            outcome = Outcome(self, space, trials, sets[-1], given)
            return outcome.write(
                Path(self.runs_dir) / "reports" / f"search-{self.merge.method}-{self.eval.label}-{name}"
            )

    def run_at(self, point: Point, split: str, questions: int | None) -> Run:
        """The evaluation of one configuration. Raises Invalid where it is no valid merge."""
        from pipeline.merge.stage import merge_of

        settings = replace(self.eval, split=split, limit=questions)
        try:
            run = build(evaluation_at(replace(self, eval=settings), point, "search.space."))
            merge_of(run)  # by headers
        except PipelineError as error:
            raise Invalid(str(error)) from error
        return run

    def scores_of(self, run: Run) -> list[Scores]:
        """The scores of a run's questions by objective; it is computed unless it is finished."""
        from pipeline.launch.local import execute_here

        for name, reason in execute_here([run]).items():
            hint = "" if self.search.split == "test" else "; without development questions: search.split=test"
            raise PipelineError(f"{name} failed ({reason}){hint}")
        if self.search.objectives is None:
            return [point_scores(run) or []]
        return [measure_scores(run.folder, measure, self.languages) for measure in self.search.objectives]

    def on_development(self, point: Point, questions: int | None) -> list[Scores]:
        return self.scores_of(self.run_at(point, self.search.split, questions))

    def on_test(self, point: Point) -> list[Scores]:
        return self.scores_of(self.run_at(point, "test", self.eval.limit))


def check_settings(config: SearchStage) -> Space:
    """The space. Raises PipelineError for settings that cannot be searched with."""
    if importlib.util.find_spec("optuna") is None:
        raise PipelineError("stage=search needs Optuna, which is not installed: pip install optuna (extra `search`)")
    if config.eval.split != "test":
        raise PipelineError(f"eval.split={config.eval.split}: leave it out, search.split says which questions choose")
    search = config.search
    knobs = [item.name for item in fields(config.merge) if not item.metadata.get("run") and item.name not in NOT_SWEPT]
    space = read_space(search.space, sorted(knobs), config.merge.method)
    scored = [task.task for task in config.eval.tasks]
    measures = search.objectives or []
    if search.objectives is not None and not 1 <= len(measures) <= 2:
        raise PipelineError(f"search.objectives names {len(measures)} scores: give one or two")
    if search.questions and search.questions != sorted(set(search.questions)):
        raise PipelineError(f"search.questions={search.questions}: give growing numbers, [25,100]")
    if len(search.questions or []) > 1 and len(measures) > 1:
        raise PipelineError("search.questions stops trials by one score: name one set of questions, or one objective")
    for measure in measures:
        if measure.task not in scored:
            names = ", ".join(scored)
            raise PipelineError(f"search.objectives: eval={config.eval.name} scores {names}, not {measure.task}")
        if measure.language and measure.language not in config.languages:
            raise PipelineError(f"search.objectives: {measure.language} is not in languages={config.languages}: add it")
    for task in [measure.task for measure in measures] or scored:
        if benchmark_of(task).kind == "text":
            raise PipelineError(f"search.objectives: {task} measures bits, which are no score of answers: name another")
        refuse_lower(task, "a search looks for")
    return space


def measure_scores(folder: Path, measure: Measure, languages: Sequence[str]) -> Scores:
    """The scores of a measure's questions in percent, a list per language or pair."""
    wanted = {measure.language} if measure.language else set(languages)
    return [scores for (_, task, where), scores in scores_in(folder).items()
            if task == measure.task and wanted & set(where.split("-"))]  # fmt: skip


@dataclass
class Outcome:
    """What a search found: chosen on development questions, reported on test questions."""

    config: SearchStage
    space: Space
    trials: Sequence[Trial]
    questions: int | None  # the largest set, per task
    given: list[Scores]  # of the configuration as given, on development questions

    @property
    def finished(self) -> list[Trial]:
        """The trials that were scored on all questions, each configuration once."""
        ended = {json.dumps(trial.point): trial for trial in self.trials if trial.values and not trial.stopped}
        return list(ended.values())

    @property
    def names(self) -> list[str]:
        return [label(measure) for measure in self.config.search.objectives or []] or ["score"]

    def best(self) -> list[Trial]:
        """The best trial, the first of equal ones; of two objectives the front."""
        if not self.finished:
            reason = next((trial.reason for trial in self.trials if trial.reason), "")
            raise PipelineError(f"search.space holds no valid configuration among {len(self.trials)} trials: {reason}")
        if len(self.names) > 1:
            return front(self.finished)
        return [self.finished[largest([trial.values[0] for trial in self.finished])]]

    def write(self, folder: Path) -> Path:
        """Write index.html, trials.csv and search.json; returns index.html."""
        best, sentences, given = self.best(), self.describe_search(), self.config.on_test({})
        rows = [self.test_row("given", {}, tuple(map(mean_score, self.given)), given)]
        rows += [self.test_row("search", trial.point, trial.values, given) for trial in best]
        folder.mkdir(parents=True, exist_ok=True)
        content = {"trials": len(self.trials), "sentences": sentences, "results": rows}
        write_atomically(folder / "search.json", json.dumps(content, indent=1) + "\n")
        header, *lines = trial_rows = self.trial_rows()
        write_atomically(folder / "trials.csv", comma_separated(trial_rows))
        kinds = ("choosing", "test", "test, beyond given")
        titles = ["", "configuration", *(f"{name}, {kind}" for kind in kinds for name in self.names)]
        chosen = "What was chosen, on the questions that chose it and on test questions"
        tables = [
            (chosen, titles, (0, 1), list(map(result_line, rows))),
            ("All trials", header, (0,), [[str(value) for value in line] for line in lines]),
        ]
        title = f"Search: {folder.name.removeprefix('search-').rpartition('-')[0]}"
        html = render("plain.html.j2", title=title, note="", picture="", sentences=sentences, tables=tables)
        write_atomically(folder / "index.html", html)
        print("\n".join([*sentences, *align_columns([titles, *map(result_line, rows)])]), file=sys.stderr)
        return folder / "index.html"

    def test_row(self, way: str, point: Point, choosing: tuple[float, ...], given: Sequence[Scores]) -> dict[str, Any]:
        """A configuration on test questions: the means, and paired differences from the configuration as given with
        their standard errors and 95 % intervals. choosing: its values on the questions that chose."""
        test, beyond = self.config.on_test(point), []
        for pair in zip(test, given, strict=True):
            difference, error = paired_difference(*pair)
            beyond.append(
                {"difference": difference, "error": finite_or_none(error), "interval": paired_interval(*pair)}
            )
        means = list(map(mean_score, test))
        return {"way": way, "point": point, "choosing": choosing, "test": means, "beyond_given": beyond}

    def trial_rows(self) -> list[list[Any]]:
        header = ["trial", *self.space, *self.names, "questions", "ended"]
        lines: list[list[Any]] = [header]
        for number, trial in enumerate(self.trials):
            ended = trial.reason or ("worse than the best so far" if trial.stopped else "scored on all")
            values = [*map(one_decimal, trial.values)] or [""] * len(self.names)
            lines.append([number, *map(str, trial.point.values()), *values, trial.questions or "all", ended])
        return lines

    def describe_search(self) -> list[str]:
        """How many configurations were tried, how far ended early, and what choosing among them adds."""
        distinct = len({json.dumps(trial.point) for trial in self.trials})
        reasons = [trial.reason for trial in self.trials if trial.reason]
        stopped = sum(trial.stopped and not trial.reason for trial in self.trials)
        lines = [f"{len(self.trials)} trials of {distinct} configurations, {stopped} of them ended early."]
        if reasons:
            lines.append(f"{len(reasons)} of them were no valid merge: {reasons[0]}")
        if self.config.search.split == "test":
            lines.append("The test questions chose: the split-half score alone is free of the choice.")
        if is_flores(self.config.eval):
            lines.append(SENTENCES)
        values = {trial.values for trial in self.finished}
        if len(values) == 1 and len(self.finished) > 1:
            lines.append("All configurations score alike on these questions: there was nothing to choose.")
        if len(self.names) == 1:
            points = [trial.point for trial in self.finished]
            found = [self.config.on_development(point, self.questions)[0] for point in points]
            means = [trial.values[0] for trial in self.finished]
            lines += split_half_summary(points, dict(enumerate(found)), dict(enumerate(means)), largest(means))
        return lines


def result_line(row: Mapping[str, Any]) -> list[str]:
    """One `Outcome.test_row` as the page shows it."""
    beyond = [
        f"{round(entry['difference'], 1) + 0.0:+.1f}"
        + ("" if entry["interval"] is None else " ({:+.1f} to {:+.1f})".format(*entry["interval"]))
        for entry in row["beyond_given"]
    ]
    numbers = map(one_decimal, [*row["choosing"], *row["test"]])
    return [row["way"], point_name(row["point"]) or "as given", *numbers, *beyond]


def one_decimal(value: float) -> str:
    return f"{value:.1f}"
