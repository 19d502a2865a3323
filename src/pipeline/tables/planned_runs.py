"""Turns the specs and scores of a table into runs that are each other's parents.

Each configuration is composed once.

A training, a selection, an analysis is a run; a merge is what an evaluation scores in memory, and
is written only where another run is made of it; each score is an evaluation of one model on one
task in one language. Equal ones are one run, by their hashes. What cannot be built is kept as a
problem, of those that need it too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.benchmarks import primary_metric
from pipeline.config import conf
from pipeline.config.compose import stage_of, with_hardware
from pipeline.config.stages import EvalStage, RunStage, TableStage, TrainStage
from pipeline.errors import PipelineError, suggest
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.files import MOST_BYTES, refuse_special
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
from pipeline.tables.schema import Table, read_table
from pipeline.tables.table_yaml import merge_inherited
from pipeline.tables.words import Words

SHARED = (  # not a row's to say
    "stage",
    "runs_dir",
    "tracking",
    "launcher",
    "redo",
    "group",
    "chosen_by",
    "as_stored",
)


def find_table(name: str) -> tuple[str, str]:
    """(text, name for errors) of the file of table=NAME."""
    path = conf.table_file(name)
    if path.suffix == ".zip":
        raise PipelineError(
            f"table={name} is a report in one file: unzip it, and open its index.html"
        )
    try:
        text = refuse_special(path, MOST_BYTES).read_text(encoding="utf-8")
        return text, name if "/" in name or name.startswith(".") else path.name
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"table={name} is not UTF-8 ({error}): write it again in UTF-8"
        ) from error


def expanded_text(name: str) -> str:
    """Return a table with what it inherits, or a study in the table language, as YAML."""
    return yaml.safe_dump(
        merge_inherited(*find_table(name), find_table, ()), sort_keys=False, allow_unicode=True
    )


def load_table(config: TableStage) -> Table:
    """Load the requested table, with its `every` overridden by the command line."""
    overrides = dict(config.every)
    if config.threads is not None:
        overrides["threads"] = config.threads
    if config.data_root is not None:
        plain = Path(config.data_root).is_dir() and "/" not in config.data_root
        if plain:
            overrides["data_root"] = f"./{config.data_root}"
        else:
            overrides["data_root"] = config.data_root
    table = read_table(*find_table(config.table), find_table, overrides)
    if config.free_snapshots is None:
        return table
    return replace(table, free_snapshots=config.free_snapshots)


def keys_read(stage: str) -> set[str]:
    """Return the groups, and the keys outside of groups, that a stage reads."""
    if stage not in RUN_STAGES:
        raise PipelineError(f"stage={stage} makes no run: {suggest(stage, RUN_STAGES)}")
    keys = {item.name for item in fields(RUN_STAGES[stage].config)} | set(conf.groups_read(stage))
    return keys.difference(SHARED)


class Refused(PipelineError):
    """An unknown word in a row: the table is wrong, and nothing of it is planned."""


@dataclass
class Planning:
    """A table's plan, and its runs, built when needed.

    problems: a spec's key, or a score -> why it cannot be built. models: the run or model of each
    spec that was built.
    """

    config: TableStage
    plan: TablePlan
    dtype: str = "auto"  # that replaces eval.dtype=auto where the models' own would be several
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
        """Return the runs that cells need as far as choices are known.

        These are evaluations, those of one model together, and what facts and figures are read
        from. A later call adds what new choices ask for.
        """
        self._winners.clear()
        facts = []
        for cell in self.plan.cells.values():
            for item in cell.items:
                if item.model is not None:
                    facts.append(item.model)
        runs = {}
        for key in dict.fromkeys(facts):
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
        """Return the evaluations of models that are known, those of one model together."""
        by_model: dict[str, list[ScoreRef]] = {}
        for score in self.plan.scores:
            model = self.model_of(score)
            if model:
                by_model.setdefault(model, []).append(score)
        return list(
            filter(
                None,
                (self.evaluation_of(score) for scores in by_model.values() for score in scores),
            )
        )

    def waiting_scores(self) -> list[ScoreRef]:
        """Return the scores of models whose choice is still open."""
        found = []
        for score in self.plan.scores:
            if self.model_of(score) is None:
                found.append(score)
        return found

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
        """(targets, these and what they need with parents first, run hash -> why it is to
        compute).
        """
        targets = self.targets()
        runs = order_runs(targets)
        return targets, runs, reasons_unfinished(runs, targets)

    def waiting_evaluations(self) -> list[Run[EvalStage]]:
        """Return an evaluation like each of those that wait for a choice."""
        return list(filter(None, map(self.representative_evaluation, self.waiting_scores())))

    def run_of(self, key: ScoreRef | str) -> Run | None:
        """Return the run of a score, or of a spec.

        None where it cannot be built, is still to be chosen, or is no run.
        """
        if isinstance(key, ScoreRef):
            return self.evaluation_of(key)
        model = self.try_building(key, lambda: self.model_of_spec(key))
        if isinstance(model, Run):
            return model
        return None

    # --- choices ---

    def model_of(self, score: ScoreRef) -> str | None:
        """Return the spec of a score's model; for a Chosen model that of the winner, or None while
        the choice is open.
        """
        if score.model in self.plan.specs:
            return score.model
        chosen = self.plan.chosen.get(score.model)
        candidate = None
        if chosen:
            candidate = self.chosen_candidate(chosen.choice)
        if chosen and candidate is not None:
            return chosen.models[candidate]
        return None

    def chosen_candidate(self, choice: str) -> Candidate | None:
        """Return the candidate with the best mean score, or None until all are known.

        Cached until `targets`.
        """
        if choice not in self._winners:
            values = self.candidate_values(self.plan.choices[choice])
            if values is None:
                return None
            sign = self.plan.choices[choice].sign
            self._winners[choice] = [*values][largest([sign * value for value in values.values()])]
        return self._winners[choice]

    def candidate_values(self, choice: Choice) -> dict[Candidate, float] | None:
        """Return the mean score of each candidate, as shares, or None until all are known."""
        numbers = {}
        for scores in choice.candidates.values():
            for score in scores:
                numbers[score] = self.primary_number(score)
        if None in numbers.values():
            return None
        return {
            candidate: statistics.fmean(numbers[score] or 0.0 for score in scores)
            for candidate, scores in choice.candidates.items()
        }

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
        return self.evaluation_on(score, next(iter(self.plan.chosen[score.model].models.values())))

    def expected_evaluation(self, score: ScoreRef) -> Run[EvalStage] | None:
        """Return the run of a score, or one like it while its model is still to be chosen."""
        return self.evaluation_of(score) or self.representative_evaluation(score)

    # --- specs ---

    def evaluation_of(self, score: ScoreRef) -> Run[EvalStage] | None:
        """Return the run that computes a score, or None where its model is open or cannot be
        built.
        """
        model = self.model_of(score)
        if model is None:
            return None
        return self.evaluation_on(score, model)

    def evaluation_on(self, score: ScoreRef, model: str) -> Run[EvalStage] | None:
        """Return the run that computes a score of a spec's model, or None where it cannot be built.

        The evaluations of a model in several languages are composed once.
        """

        def make() -> Run[EvalStage]:
            if (model, score.words) not in self._composed:
                self._composed[model, score.words] = self.compose_evaluation(
                    score, self.plan.specs[model]
                )
            config, parents = self._composed[model, score.words]
            choice = None
            if score.model in self.plan.chosen:
                choice = score.model
            if config.eval.dtype == "auto":
                settings = replace(config.eval, dtype=self.dtype)
            else:
                settings = config.eval
            return build(
                replace(config, eval=settings, languages=[score.language], chosen_by=choice),
                parents,
            )

        if (score, model) not in self._scored:
            run = self.try_building(score, make)
            if run:
                self._scored[score, model] = run
        return self._scored.get((score, model))

    def compose_evaluation(
        self, score: ScoreRef, spec: Spec
    ) -> tuple[EvalStage, dict[str, Parent]]:
        """Return the configuration of a score and its parents.

        Of the option's bundle only what `task` names is scored. A merge is scored without being
        made.
        """
        live = spec.kind == "merge"
        own = {}
        for key, value in spec.words.items():
            if live or key == "eval.base":
                own[key] = value
        if live:
            own |= {}
        else:
            own |= {"checkpoint": Ref(spec.key)}
        knobs, parents = self.replace_refs(
            {"stage": "eval", **own, **score.words, "languages": [score.language]}
        )
        task, where_possible = knobs.pop("task", None), knobs.pop("where_possible", False)
        config = self.compose_stage(f"run {spec.run!r}", knobs)
        assert isinstance(config, EvalStage)
        tasks = [eval_task for eval_task in config.eval.tasks if task in (None, eval_task.task)]
        if len(tasks) > 1:  # the task that the evaluation is named by, if there is one
            tasks = [eval_task for eval_task in tasks if config.eval.name == eval_task.label]
        if len(tasks) != 1:
            names = ", ".join(eval_task.task for eval_task in config.eval.tasks)
            problem = (
                f"eval={config.eval.name} holds {names}: say which of them is scored, task: ..."
            )
            raise self.refuse_place("score", problem)
        eval_task = replace(
            tasks[0], where_possible=tasks[0].where_possible or bool(where_possible)
        )
        return (
            replace(config, eval=replace(config.eval, name=eval_task.label, tasks=[eval_task])),
            parents,
        )

    def model_of_spec(self, key: str) -> Parent:
        """Return the run of a spec, finished or not, or the model it names.

        Raises: PipelineError: it cannot be built.
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
        return build(self.compose_stage(f"run {spec.run!r}", {"stage": "merge", **knobs}), parents)

    def base_model(self, spec: Spec) -> Parent:
        """Return the unmodified model of `every`: the one that an sft run of the same words would
        start from.
        """
        config = self.compose_stage(
            f"run {spec.run!r}", {"stage": "sft", "expert": "math", **spec.words}
        )
        assert isinstance(config, TrainStage)
        if config.model.path is None:
            problem = f"model={config.model.name} has no path: make it in a run of its own"
            raise self.refuse_place(f"run {spec.run!r}", problem)
        return self.make_resolver({}).model(config.model.path, "model.path", config.model.revision)

    def named_snapshots(self) -> set[str]:
        """Return the hashes of the snapshots that the table names itself, RUN@STEP."""
        references = set()
        for spec in self.plan.specs.values():
            for ref in spec.parent_refs():
                if ref.step is not None:
                    references.add(ref)
        models = []
        for ref in references:
            if ref.spec not in self.problems:
                models.append((self.model_of_spec(ref.spec), ref.step or 0))
        return {snapshot_hash(model.hash, step) for model, step in models}

    def make_resolver(self, parents: Mapping[str, Parent]) -> Resolver:
        return Resolver(Path(self.config.runs_dir), build, parents)

    def replace_refs(self, knobs: Words) -> tuple[Words, dict[str, Parent]]:
        """(words with Refs replaced by the keys of their specs, the parents by these keys)."""
        parents = {}
        for value in knobs.values():
            for ref in refs_in(value):
                parents[ref.spec] = self.model_of_spec(ref.spec)
        return {key: refs_as_names(value) for key, value in knobs.items()}, parents

    def refuse_place(self, where: str, problem: str) -> Refused:
        return Refused(str(self.plan.table.refuse(where, problem)))

    def compose_stage(self, where: str, knobs: Words) -> RunStage:
        """Compose the stage of these words, with settings shared by all runs of a table.

        Raises: Refused: unknown words.
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
    """Return the number of a finished evaluation of one task; for FLORES the mean of both
    directions.

    None if it is unfinished, or not finite.
    """
    rows = score_rows(run)
    values = [row.value for row in rows if row.value is not None]
    if rows and len(values) == len(rows) and read_manifest(run.folder):
        return statistics.fmean(values)
    return None


def score_rows(
    run: Run[EvalStage], metric: str | None = None, pair: str | None = None
) -> list[ScoreRow]:
    """Return the scores of a run in a metric, also those without a value.

    Args: metric: None for the task's primary one. pair: the direction of a translation.

    They are of the task's primary filter, or of another where a further metric has none of that.
    """
    primary, primary_filter = primary_metric(run.config.eval.tasks[0].task)
    rows = []
    for row in stored_scores(run)[0]:
        if row.metric == (metric or primary) and not row.subject and pair in (None, row.pair):
            rows.append(row)
    own_rows = [row for row in rows if row.filter == primary_filter]
    if own_rows or metric in (None, primary):
        return own_rows
    return rows


def reason_left_out(run: Run[EvalStage]) -> str | None:
    """Why a finished evaluation has no number, where its task was wanted where_possible and was
    not.
    """
    return next((row.reason for row in stored_scores(run)[0] if row.reason), None)


def stored_scores(run: Run[EvalStage]) -> tuple[list[ScoreRow], dict[str, Any]]:
    """(scores, how they were scored) of an evaluation; none where it is not finished.

    Raises as `read_scores`.
    """
    path = run.folder / "scores.json"
    if path.is_file():
        return _read_scores(path, path.stat().st_mtime_ns)
    return ([], {})


@lru_cache(maxsize=65536)
def _read_scores(path: Path, _: int) -> tuple[list[ScoreRow], dict[str, Any]]:
    return read_scores(path)
