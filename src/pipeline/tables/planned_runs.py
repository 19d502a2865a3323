"""A table's plan as runs: its specs and scores composed once for their options, and built with one another as parents.

A training, a selection, an analysis is a run; a merge is what an evaluation scores in memory, and is written only
where another run is made of it; each score is an evaluation of one model on one task in one language. Equal ones are
one run, by their hashes. What cannot be built is kept as a problem, of those that need it too.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.config import conf
from pipeline.config.stages import EvalStage, RunStage, TableStage, TrainStage
from pipeline.config.words import stage_of
from pipeline.errors import PipelineError, suggest
from pipeline.runs.manifest import read_manifest, snapshot_hash
from pipeline.runs.run import Parent, Run
from pipeline.stages.evaluation import refuse_dtypes
from pipeline.stages.resolver import Resolver
from pipeline.stages.rows import RUN_STAGES, build
from pipeline.tables.bound import BoundTable
from pipeline.tables.expand import expand
from pipeline.tables.plan import Candidate, Pairs, ScoreRef, TablePlan, winner
from pipeline.tables.run_specs import Ref, Spec
from pipeline.tables.schema import Table, read

SHARED = ("stage", "runs_dir", "tracking", "launcher", "redo", "group", "chosen_by", "as_stored")  # not a row's to say


def load(config: TableStage) -> Table:
    """The table that is asked for, with the words of the command line over its `every`."""

    def find(name: str) -> tuple[str, str]:
        path = conf.table_file(name)
        try:
            return path.read_text(encoding="utf-8"), name if "/" in name or name.startswith(".") else path.name
        except UnicodeDecodeError as error:
            raise PipelineError(f"table={name} is not UTF-8 ({error}): write it again in UTF-8") from error

    overrides = dict(config.every)
    if config.threads is not None:
        overrides["threads"] = config.threads
    if config.data_root is not None:
        plain = Path(config.data_root).is_dir() and "/" not in config.data_root
        overrides["data_root"] = f"./{config.data_root}" if plain else config.data_root
    table = read(*find(config.table), find, overrides)
    return table if config.free_snapshots is None else replace(table, free_snapshots=config.free_snapshots)


def reads(stage: str) -> set[str]:
    """The groups, and the keys outside of groups, that a stage reads."""
    if stage not in RUN_STAGES:
        raise PipelineError(f"stage={stage} makes no run: {suggest(stage, RUN_STAGES)}")
    keys = {item.name for item in fields(RUN_STAGES[stage].config)} | set(conf.groups_read(stage))
    return keys.difference(SHARED)


class Refused(PipelineError):
    """A word of a row that means nothing: the table is wrong, and nothing of it is planned."""


@dataclass
class Planning:
    """A table's plan, and its runs, built when they are asked for. problems: a spec's key, or a score -> why not."""

    config: TableStage
    plan: TablePlan
    problems: dict[str | ScoreRef, str] = field(default_factory=dict)
    _models: dict[str, Parent] = field(default_factory=dict)
    _scored: dict[tuple[ScoreRef, str], Run[EvalStage]] = field(default_factory=dict)
    _winners: dict[str, Candidate] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TableStage) -> Planning:
        return cls(config, expand(load(config), reads))

    # ------------------------------------------------------------------------------------------ what there is to make

    def targets(self) -> list[Run]:
        """The runs that cells need as far as choices are known: evaluations, those of one model together, and what
        facts and figures are read from. Asked again after choices were made, it gives what these ask for too."""
        self._winners.clear()
        runs: dict[str, Run] = {}
        facts = [item.model for cell in self.plan.cells.values() for item in cell.items if item.model is not None]
        for key in dict.fromkeys(facts):
            model = self.attempt(key, partial(self.model, key))
            if isinstance(model, Run):
                runs[model.hash] = model
        by_model: dict[str, list[ScoreRef]] = {}
        for score in self.plan.scores:
            if model := self.model_of(score):
                by_model.setdefault(model, []).append(score)
        scoring = list(filter(None, (self.evaluation(score) for scores in by_model.values() for score in scores)))
        try:
            refuse_dtypes(scoring, "every.eval.dtype")
        except PipelineError as error:
            raise self.refused("", str(error)) from error
        for run in scoring:
            runs.setdefault(run.hash, run)
        return list(runs.values())

    def waiting(self) -> list[ScoreRef]:
        """The scores of models that a choice is still to name."""
        return [score for score in self.plan.scores if self.model_of(score) is None]

    def attempt(self, key: str | ScoreRef, make: Callable[[], Any]) -> Any:
        """What `make` gives, or None where a problem stands in the way."""
        if key in self.problems:
            return None
        try:
            return make()
        except Refused:
            raise
        except PipelineError as error:
            self.problems[key] = str(error)
            return None

    def bind(self) -> BoundTable:
        """The plan with its runs, as they are known now: bound again after a choice is made."""
        plan = self.plan
        for key in {item.model for cell in plan.cells.values() for item in cell.items if item.model is not None}:
            self.attempt(key, partial(self.model, key))
        evaluations = {score: run for score in plan.scores if (run := self.evaluation(score))}
        winners = {key: self.chosen(key) for key in plan.choices}
        return BoundTable(plan, evaluations, dict(self._models), winners, dict(self.problems))

    # ------------------------------------------------------------------------------------------ choices

    def model_of(self, score: ScoreRef) -> str | None:
        """The spec that a score is of; of what a choice names, once it is made, else None."""
        if score.model in self.plan.specs:
            return score.model
        chosen_model = self.plan.chosen[score.model]
        candidate = self.chosen(chosen_model.choice)
        return None if candidate is None else chosen_model.models[candidate]

    def chosen(self, choice: str) -> Candidate | None:
        """The candidate of the largest mean; None until each has its scores. Cached until `targets`."""
        if choice not in self._winners:
            values = {}
            for score in chain.from_iterable(self.plan.choices[choice].candidates.values()):
                if (value := self.number(score)) is None:
                    return None
                values[score] = value
            self._winners[choice] = winner(self.plan.choices[choice], values.__getitem__)
        return self._winners[choice]

    def like(self, score: ScoreRef) -> Run[EvalStage] | None:
        """The evaluation that a score would be if the first candidate were chosen: same questions, another model. None
        for a score that waits for no choice."""
        if score.model not in self.plan.chosen:
            return None
        model = next(iter(self.plan.chosen[score.model].models.values()))
        return self.attempt(score, lambda: self.scoring(score, self.plan.specs[model]))

    def number(self, score: ScoreRef) -> float | None:
        """The primary number of a finished score; None where there is none."""
        run = self.evaluation(score)
        return primary(run) if run else None

    # ------------------------------------------------------------------------------------------ specs

    def evaluation(self, score: ScoreRef) -> Run[EvalStage] | None:
        """The run that makes a score; None where its model is still to be chosen, or cannot be planned."""
        model = self.model_of(score)
        if model is None:
            return None
        if (score, model) not in self._scored:
            run = self.attempt(score, lambda: self.scoring(score, self.plan.specs[model]))
            if run is None:
                return None
            self._scored[score, model] = run
        return self._scored[score, model]

    def scoring(self, score: ScoreRef, spec: Spec) -> Run[EvalStage]:
        """One task in one language: of the option's bundle, what `task` names. A merge is scored without being made."""
        words: dict[str, Any] = {"stage": "eval"}
        parents: dict[str, Parent] = {}
        if spec.kind == "merge":
            live, parents = self.named(spec.words)
            words |= live
        else:
            words["checkpoint"], parents[spec.key] = spec.key, self.model(spec.key)
        settings = {key: thawed(value) for key, value in score.words}
        task, where_possible = settings.pop("task", None), settings.pop("where_possible", False)
        further_words, further_parents = self.named(settings)
        config = self.composed(f"run {spec.run!r}", {**words, **further_words, "languages": [score.language]})
        assert isinstance(config, EvalStage)
        tasks = [eval_task for eval_task in config.eval.tasks if task in (None, eval_task.task)]
        if len(tasks) != 1:
            names = ", ".join(eval_task.task for eval_task in config.eval.tasks)
            problem = f"eval={config.eval.name} holds {names}: say which of them is scored, task: ..."
            raise self.refused("score", problem)
        eval_task = replace(tasks[0], where_possible=tasks[0].where_possible or bool(where_possible))
        eval_config = replace(config.eval, name=f"{eval_task.task}_{eval_task.num_fewshot}shot", tasks=[eval_task])
        choice = score.model if score.model in self.plan.chosen else None
        return build(replace(config, eval=eval_config, chosen_by=choice), {**parents, **further_parents})

    def model(self, key: str) -> Parent:
        """The run of a spec, made or not, or the model that it names. PipelineError where it cannot be built."""
        if key in self.problems:
            raise PipelineError(f"{key} is missing")
        if key not in self._models:
            self._models[key] = self.built(self.plan.specs[key])
        return self._models[key]

    def built(self, spec: Spec) -> Parent:
        try:
            if spec.kind == "base":
                return self.base(spec)
            words, parents = self.named(spec.words)
            if spec.kind == "checkpoint":
                return self.resolver(parents).model(words["checkpoint"], "checkpoint")
            return build(self.composed(f"run {spec.run!r}", {"stage": "merge", **words}), parents)
        except Refused:
            raise
        except PipelineError as error:
            self.problems[spec.key] = str(error)
            raise PipelineError(f"{spec.key} is missing") from error

    def base(self, spec: Spec) -> Parent:
        """The model of `every`, as it is: what an sft run of the same words would start from."""
        config = self.composed(f"run {spec.run!r}", {"stage": "sft", "expert": "math", **spec.words})
        assert isinstance(config, TrainStage)
        if config.model.path is None:
            problem = f"model={config.model.name} has no path: make it in a run of its own"
            raise self.refused(f"run {spec.run!r}", problem)
        return self.resolver({}).model(config.model.path, "model.path", config.model.revision)

    def snapshots(self) -> set[str]:
        """The hashes of the snapshots that the table names itself, RUN@STEP."""
        references = {ref for spec in self.plan.specs.values() for ref in spec.refs() if ref.step is not None}
        models = [(self.model(ref.spec), ref.step or 0) for ref in references if ref.spec not in self.problems]
        return {snapshot_hash(model.hash, step) for model, step in models}

    def resolver(self, known: Mapping[str, Parent]) -> Resolver:
        return Resolver(Path(self.config.runs_dir), build, known)

    def named(self, words: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Parent]]:
        """Words with the specs that they name by their keys, and what these are."""
        parents = {ref.spec: self.model(ref.spec) for value in words.values() for ref in refs(value)}
        return {key: as_names(value) for key, value in words.items()}, parents

    def refused(self, place: str, problem: str) -> Refused:
        return Refused(str(self.plan.table.refuse(place, problem)))

    def composed(self, place: str, words: dict[str, Any]) -> RunStage:
        """The stage of these words, with what all runs of a table share. A word that means nothing is refused."""
        try:
            config = stage_of(words)
        except PipelineError as error:
            raise self.refused(place, str(error)) from error
        assert isinstance(config, RunStage)
        shared_values: dict[str, Any] = {
            "runs_dir": self.config.runs_dir,
            "tracking": self.config.tracking,
            "group": self.plan.table.name,
        }
        if "threads" not in words:
            shared_values["threads"] = self.config.threads
        return replace(config, **shared_values)


def refs(value: Any) -> Iterator[Ref]:
    yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Ref))


def thawed(value: Any) -> Any:
    return dict(value) if isinstance(value, Pairs) else list(value) if isinstance(value, tuple) else value


def as_names(value: Any) -> Any:
    if isinstance(value, list):
        return [as_names(item) for item in value]
    return str(value) if isinstance(value, Ref) else value


# ---------------------------------------------------------------------------------------------------- numbers


def primary(run: Run[EvalStage]) -> float | None:
    """The number that stands for a finished evaluation of one task, of FLORES the mean of both directions."""
    values = [row["value"] for row in readings(run)]
    return statistics.fmean(values) if values and read_manifest(run.folder) else None


def readings(run: Run[EvalStage], metric: str | None = None, pair: str | None = None) -> list[dict[str, Any]]:
    """The rows of scores.json in a metric (null: the task's primary one), of a pair where one is asked for."""
    first, chief = primary_metric(run.config.eval.tasks[0].task)
    path = run.folder / "scores.json"
    if not path.is_file():
        return []
    return [
        row
        for row in _rows(path, path.stat().st_mtime_ns)
        if row["metric"] == (metric or first)
        and (row["filter"] == chief or (metric or first) != first)
        and not row["subject"]
        and pair in (None, row["pair"])
        and row["value"] is not None
    ]


@lru_cache(maxsize=65536)
def _rows(path: Path, _: int) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return [*content["rows"], *content.get("beside", [])]
