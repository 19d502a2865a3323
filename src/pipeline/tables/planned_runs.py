"""The runs of a table's specs and scores, built with their parents.

A training, a selection or an analysis is a run. Each score is an evaluation of one model on one
task in one language. A merge is scored in memory, and written only if another run is made from it.
Equal runs are one run, by their hashes. If a run cannot be built, the reason is stored as a problem
of the run and of the runs that need it. Each configuration is composed once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.config import conf
from pipeline.config.compose import stage_of, with_hardware
from pipeline.config.evaluation import EvalTask
from pipeline.config.stages import EvalStage, RunStage, TableStage, TrainStage
from pipeline.errors import PipelineError, suggest
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.manifest import read_manifest, snapshot_hash
from pipeline.runs.run import Parent, Run
from pipeline.stages.data import tell_scored
from pipeline.stages.evaluation import one_dtype_for
from pipeline.stages.resolver import Resolver
from pipeline.stages.rows import RUN_STAGES, build
from pipeline.stats.statistics import largest
from pipeline.tables.expand import expand_table
from pipeline.tables.plan import Candidate, Choice, ScoreRef, TablePlan
from pipeline.tables.run_specs import Ref, Spec, refs_in
from pipeline.tables.table_files import load_table
from pipeline.tables.words import Words

# settings that a row may not change
SHARED = (
    "stage",
    "runs_dir",
    "tracking",
    "launcher",
    "redo",
    "group",
    "chosen_by",
    "as_stored",
)


def keys_read(stage: str) -> set[str]:
    """Return the groups, and the keys outside of groups, that a stage reads."""
    if stage not in RUN_STAGES:
        raise PipelineError(f"stage={stage} makes no run: {suggest(stage, RUN_STAGES)}")
    keys = {item.name for item in fields(RUN_STAGES[stage].config)}
    keys.update(conf.groups_read(stage))
    return keys.difference(SHARED)


class Refused(PipelineError):
    """An error in the words of a row: the table is wrong, and no run of it is planned."""


@dataclass
class Planning:
    """A table's plan, and its runs, built when needed.

    Attributes:
        dtype: The dtype that replaces eval.dtype=auto, if the models have several.
        problems: A spec's key, or a score -> why it cannot be built.
        models: The run or model of each spec that was built.
    """

    config: TableStage
    plan: TablePlan
    dtype: str = "auto"
    problems: dict[str | ScoreRef, str] = field(default_factory=dict)
    models: dict[str, Parent] = field(default_factory=dict)
    _scored: dict[tuple[ScoreRef, str], Run[EvalStage]] = field(default_factory=dict)
    _composed: dict[Any, tuple[EvalStage, dict[str, Parent]]] = field(default_factory=dict)
    _winners: dict[str, Candidate] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TableStage) -> Planning:
        table = load_table(config)
        return cls(with_hardware(config, table.every), expand_table(table, keys_read))

    # --- what there is to make ---

    def targets(self) -> list[Run]:
        """Return the runs that cells need, as far as choices are known.

        These are the runs behind facts and figures, and evaluations, grouped by model. A later call
        adds the runs that new choices need.
        """
        self._winners.clear()
        facts: dict[str, None] = {}
        for cell in self.plan.cells.values():
            for item in cell.items:
                if item.model is not None:
                    facts[item.model] = None
        runs = {}
        for key in facts:
            run = self.run_of(key)
            if run:
                runs[run.hash] = run
        scoring = self.scoring()
        dtype = one_dtype_for([*scoring, *self.waiting_evaluations()])
        if dtype:
            self.dtype = dtype
            self._scored.clear()
            self._winners.clear()
            scoring = self.scoring()
        for run in scoring:
            runs.setdefault(run.hash, run)
        targets = list(runs.values())
        tell_scored([*order_runs(targets), *self.waiting_evaluations()])
        return targets

    def scoring(self) -> list[Run[EvalStage]]:
        """Return the evaluations of models that are known, grouped by model."""
        by_model: dict[str, list[ScoreRef]] = {}
        for score in self.plan.scores:
            model = self.model_of(score)
            if model:
                by_model.setdefault(model, []).append(score)
        evaluations = []
        for score in chain.from_iterable(by_model.values()):
            run = self.evaluation_of(score)
            if run:
                evaluations.append(run)
        return evaluations

    def waiting_scores(self) -> list[ScoreRef]:
        """Return the scores of models whose choice is still open."""
        return [score for score in self.plan.scores if self.model_of(score) is None]

    def try_building(self, key: str | ScoreRef, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, or None if it raised a PipelineError, now or before.

        `problems` records the error.
        """
        if key in self.problems:
            return None
        try:
            return make()
        except Refused:
            raise
        except PipelineError as error:
            self.problems.setdefault(key, str(error))
            return None

    def graph(self) -> tuple[list[Run], list[Run], dict[str, str]]:
        """Return the targets, all runs that they need, and run hash -> why a run is unfinished.

        In the second list, parents come first.
        """
        targets = self.targets()
        runs = order_runs(targets)
        return targets, runs, reasons_unfinished(runs, targets)

    def waiting_evaluations(self) -> list[Run[EvalStage]]:
        """Return an evaluation like each of the evaluations that wait for a choice."""
        return list(filter(None, map(self.representative_evaluation, self.waiting_scores())))

    def run_of(self, key: ScoreRef | str) -> Run | None:
        """Return the run of a score, or of a spec.

        None if it cannot be built, is still to be chosen, or is no run.
        """
        if isinstance(key, ScoreRef):
            return self.evaluation_of(key)
        model = self.try_building(key, lambda: self.model_of_spec(key))
        if isinstance(model, Run):
            return model
        return None

    # --- choices ---

    def model_of(self, score: ScoreRef) -> str | None:
        """Return the spec of a score's model.

        For a Chosen model it is the winner's spec, or None while the choice is open.
        """
        if score.model in self.plan.specs:
            return score.model
        chosen = self.plan.chosen.get(score.model)
        if chosen is None:
            return None
        candidate = self.chosen_candidate(chosen.choice)
        if candidate is None:
            return None
        return chosen.models[candidate]

    def chosen_candidate(self, choice: str) -> Candidate | None:
        """Return the candidate with the best mean score, or None until all are known.

        Cached until `targets`.
        """
        if choice not in self._winners:
            values = self.candidate_values(self.plan.choices[choice])
            if values is None:
                return None
            sign = self.plan.choices[choice].sign
            best = largest([sign * value for value in values.values()])
            self._winners[choice] = list(values)[best]
        return self._winners[choice]

    def candidate_values(self, choice: Choice) -> dict[Candidate, float] | None:
        """Return the mean score of each candidate, as shares, or None until all are known."""
        means = {}
        is_complete = True
        for candidate, scores in choice.candidates.items():
            numbers = []
            for score in scores:
                number = self.primary_number(score)
                if number is None:
                    is_complete = False
                numbers.append(number or 0.0)
            means[candidate] = statistics.fmean(numbers)
        if is_complete:
            return means
        return None

    def primary_number(self, score: ScoreRef) -> float | None:
        """Return the primary number of a finished score, or None."""
        run = self.evaluation_of(score)
        if run:
            return primary_value(run)
        return None

    def representative_evaluation(self, score: ScoreRef) -> Run[EvalStage] | None:
        """Return the evaluation that a score would be if the first candidate were chosen.

        It has the same questions and another model. None for a score that waits for no choice.
        """
        if score.model not in self.plan.chosen:
            return None
        first = next(iter(self.plan.chosen[score.model].models.values()))
        return self.evaluation_on(score, first)

    def expected_evaluation(self, score: ScoreRef) -> Run[EvalStage] | None:
        """Return the run of a score, or one like it while its model is still to be chosen."""
        return self.evaluation_of(score) or self.representative_evaluation(score)

    # --- specs ---

    def evaluation_of(self, score: ScoreRef) -> Run[EvalStage] | None:
        """Return the run that computes a score.

        None if its model is still to be chosen or cannot be built.
        """
        model = self.model_of(score)
        if model is None:
            return None
        return self.evaluation_on(score, model)

    def evaluation_on(self, score: ScoreRef, model: str) -> Run[EvalStage] | None:
        """Return the run that computes a score of a spec's model, or None if it cannot be built.

        The evaluations of a model in several languages are composed once.
        """
        key = (score, model)
        if key not in self._scored:
            run = self.try_building(score, lambda: self.build_evaluation(score, model))
            if run:
                self._scored[key] = run
        return self._scored.get(key)

    def build_evaluation(self, score: ScoreRef, model: str) -> Run[EvalStage]:
        key = (model, score.words)
        if key not in self._composed:
            self._composed[key] = self.compose_evaluation(score, self.plan.specs[model])
        config, parents = self._composed[key]
        choice = score.model if score.model in self.plan.chosen else None
        settings = config.eval
        if settings.dtype == "auto":
            settings = replace(settings, dtype=self.dtype)
        config = replace(config, eval=settings, languages=[score.language], chosen_by=choice)
        return build(config, parents)

    def compose_evaluation(
        self, score: ScoreRef, spec: Spec
    ) -> tuple[EvalStage, dict[str, Parent]]:
        """Return the configuration of a score and its parents.

        Only the task that `task` names is scored from the option's bundle. A merge is scored in
        memory.
        """
        words: Words = {"stage": "eval"}
        if spec.kind == "merge":
            words |= spec.words
        else:
            if "eval.base" in spec.words:
                words["eval.base"] = spec.words["eval.base"]
            words["checkpoint"] = Ref(spec.key)
        words |= score.words
        words["languages"] = [score.language]
        knobs, parents = self.replace_refs(words)
        name, where_possible = knobs.pop("task", None), knobs.pop("where_possible", False)
        config = self.compose_stage(f"run {spec.run!r}", knobs)
        assert isinstance(config, EvalStage)
        task = self.task_to_score(config, name)
        if where_possible:
            task = replace(task, where_possible=True)
        settings = replace(config.eval, name=task.label, tasks=[task])
        return replace(config, eval=settings), parents

    def task_to_score(self, config: EvalStage, name: str | None) -> EvalTask:
        """Return the task of a bundle with this name.

        If there are several, it is the task that the evaluation is named after.

        Raises:
            Refused: If the task is ambiguous or unknown.
        """
        tasks = [task for task in config.eval.tasks if name in (None, task.task)]
        if len(tasks) > 1:
            tasks = [task for task in tasks if config.eval.name == task.label]
        if len(tasks) != 1:
            names = ", ".join(task.task for task in config.eval.tasks)
            raise self.refuse_place(
                "score",
                f"eval={config.eval.name} holds {names}. Say which of them is scored, task: ...",
            )
        return tasks[0]

    def model_of_spec(self, key: str) -> Parent:
        """Return the run of a spec, finished or not, or the model it names.

        Raises:
            PipelineError: If it cannot be built.
        """
        if key not in self.models:
            model = self.try_building(key, lambda: self.build_spec(self.plan.specs[key]))
            if model is None:
                raise PipelineError(f"{key} is missing")
            self.models[key] = model
        return self.models[key]

    def build_spec(self, spec: Spec) -> Parent:
        if spec.kind == "base":
            return self.base_model(spec)
        knobs, parents = self.replace_refs(spec.words)
        if spec.kind == "checkpoint":
            return self.make_resolver(parents).model(knobs["checkpoint"], "checkpoint")
        config = self.compose_stage(f"run {spec.run!r}", {"stage": "merge", **knobs})
        return build(config, parents)

    def base_model(self, spec: Spec) -> Parent:
        """Return the unmodified model of `every`.

        An sft run with the same words would start from it.
        """
        where = f"run {spec.run!r}"
        config = self.compose_stage(where, {"stage": "sft", "expert": "math", **spec.words})
        assert isinstance(config, TrainStage)
        model = config.model
        if model.path is None:
            raise self.refuse_place(
                where, f"model={model.name} has no path. Make it in a separate run."
            )
        return self.make_resolver({}).model(model.path, "model.path", model.revision)

    def named_snapshots(self) -> set[str]:
        """Return the hashes of the snapshots that the table names as RUN@STEP."""
        snapshots = set()
        for spec in self.plan.specs.values():
            for ref in spec.parent_refs():
                if ref.step is not None and ref.spec not in self.problems:
                    model = self.model_of_spec(ref.spec)
                    snapshots.add(snapshot_hash(model.hash, ref.step))
        return snapshots

    def make_resolver(self, parents: Mapping[str, Parent]) -> Resolver:
        return Resolver(Path(self.config.runs_dir), build, parents)

    def replace_refs(self, knobs: Words) -> tuple[Words, dict[str, Parent]]:
        """Return the words with keys of specs instead of Refs, and the parents by these keys."""
        parents = {}
        for value in knobs.values():
            for ref in refs_in(value):
                parents[ref.spec] = self.model_of_spec(ref.spec)
        return {key: refs_as_names(value) for key, value in knobs.items()}, parents

    def refuse_place(self, where: str, problem: str) -> Refused:
        return Refused(str(self.plan.table.refuse(where, problem)))

    def compose_stage(self, where: str, knobs: Words) -> RunStage:
        """Compose the stage of these words, with the settings that all runs of a table share.

        Raises:
            Refused: For unknown words.
        """
        try:
            config = stage_of(knobs)
        except PipelineError as error:
            raise self.refuse_place(where, str(error)) from error
        assert isinstance(config, RunStage)
        return replace(
            config,
            runs_dir=self.config.runs_dir,
            tracking=self.config.tracking,
            group=self.plan.table.name,
        )


def refs_as_names(value: Any) -> Any:
    if isinstance(value, list):
        return [refs_as_names(item) for item in value]
    if isinstance(value, Ref):
        return str(value)
    return value


# --- numbers ---


def primary_value(run: Run[EvalStage]) -> float | None:
    """Return the number of a finished evaluation of one task.

    For FLORES it is the mean of both directions. None if it is unfinished, or not finite.
    """
    rows = score_rows(run)
    values = []
    for row in rows:
        if row.value is None:
            return None
        values.append(row.value)
    if values and read_manifest(run.folder):
        return statistics.fmean(values)
    return None


def score_rows(
    run: Run[EvalStage], metric: str | None = None, pair: str | None = None
) -> list[ScoreRow]:
    """Return the scores of a run in a metric, including rows without a value.

    The rows have the task's primary filter. A further metric without this filter has all its rows.

    Args:
        run: The evaluation.
        metric: The metric; None for the task's primary one.
        pair: The direction of a translation; None for both.
    """
    primary, primary_filter = primary_metric(run.config.eval.tasks[0].task)
    wanted = metric or primary
    rows = []
    for row in stored_scores(run)[0]:
        if row.metric == wanted and not row.subject and pair in (None, row.pair):
            rows.append(row)
    filtered = [row for row in rows if row.filter == primary_filter]
    if filtered or metric in (None, primary):
        return filtered
    return rows


def reason_left_out(run: Run[EvalStage]) -> str | None:
    """Return why a finished evaluation has no number.

    The task was requested with where_possible, and its data was missing.
    """
    for row in stored_scores(run)[0]:
        if row.reason:
            return row.reason
    return None


def stored_scores(run: Run[EvalStage]) -> tuple[list[ScoreRow], dict[str, Any]]:
    """Return the scores of an evaluation, and their settings; empty if it is not finished.

    Raises as `read_scores` does.
    """
    path = run.folder / "scores.json"
    if path.is_file():
        return _read_scores(path, path.stat().st_mtime_ns)
    return [], {}


@lru_cache(maxsize=65536)
def _read_scores(path: Path, _: int) -> tuple[list[ScoreRow], dict[str, Any]]:
    return read_scores(path)
