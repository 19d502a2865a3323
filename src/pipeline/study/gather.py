"""From a table's runs to what its report is made of: each run as its manifest has it, and the cells they fill."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.stages import EvalStage, TrainStage
from pipeline.hub.addresses import without_credentials
from pipeline.report.archive import shared
from pipeline.report.contents import CellResult, FailedRun, Link, Results, RunResult
from pipeline.report.sweep import sweeps_of
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.provenance import git_state
from pipeline.runs.run import Run, flat, runs_behind
from pipeline.runs.unchanged import changed
from pipeline.study.answers import StoredAnswers, chooses
from pipeline.study.cells import Candidate, Cell, Item, ScoreRef
from pipeline.study.contrasts import MEASURED, measured, sampled
from pipeline.study.graph import ordered, unfinished
from pipeline.study.numbers import choices_of, table_cell
from pipeline.study.outcome import Outcome
from pipeline.study.planning import Planning
from pipeline.study.rows import Table
from pipeline.study.verdicts import judged

SMALL_BYTES = 2**26  # a touched file up to this size is hashed again: copying a folder changes its times alone


def gather(planning: Planning, failed: Mapping[str, str], reasons: Mapping[str, str] | None = None) -> Results:
    """The runs of a table as the report reads them. failed: of runs that were tried, name -> reason; reasons: what
    `unfinished` says of its runs, where that is known.

    A row of the report is a model: the table's rows where these name runs, else its columns. What a cell is reduced
    over, besides languages, stands as seeds there.
    """
    table, plan = planning.plan.table, planning.plan
    runs = ordered(planning.targets())
    names = {run.hash: run.name for run in runs}
    winners = {key: planning.chosen(key) for key in plan.choices}
    models, met, repeats = scored(planning, winners)
    roles: dict[str, str] = {}
    cells: dict[CellResult, None] = {}
    rows: dict[str, dict[str, None]] = {model: {} for model in models}
    selected: dict[str, None] = {}
    for row, one in zip(told_apart(met), met, strict=True):
        selected |= {row: None} if one.chosen else {}
        rows[one.model][row] = None
        roles.setdefault(row, role(planning, one.score))
        for language in one.languages:
            cells[CellResult(row, language, one.seed, names[one.run.hash], one.run.folder)] = None
    outcome, answers = Outcome.of(planning, failed), StoredAnswers(planning)
    found, missing = described(runs, names, failed, unfinished(runs) if reasons is None else reasons)
    done = [run for run in found if run.finished]
    versions, machine = usual(done).get("eval", ({}, {}))
    asked = {**planning.config.every, **({"data_root": planning.config.data_root} if planning.config.data_root else {})}
    return Results(
        table=table.name, title=table.title, note=table.note,
        command=without_credentials(" ".join([
            f"python -m pipeline stage=table table={planning.config.table}",
            *(f"{'' if key == 'data_root' else 'every.'}{key}={value}" for key, value in asked.items())])),
        languages=list(dict.fromkeys(cell.language for cell in cells)),
        seeds=sorted({cell.seed for cell in cells}),
        over=list(dict.fromkeys(axis for axes in repeats for axis in axes)), sampled=sampled(plan),
        selected=list(selected),
        rows=list(dict.fromkeys(row for name, longer in rows.items() for row in longer or [name])),
        cells=list(cells), runs=found, failed=[FailedRun(name, shared(why)) for name, why in failed.items()],
        missing=missing, seconds=sum(run.seconds or 0.0 for run in done), versions=versions, machine=machine,
        git=git_state(), roles=roles, table_rows=plan.rows, table_columns=plan.columns,
        table_cells=[table_cell(outcome, place, answers) for place in outcome.cells],
        contrasts=[{key: line.get(key) for key in MEASURED} for line in measured(plan, answers)],
        verdicts=judged(plan, answers),
        choices=choices_of(planning, outcome), links=[Link(*one) for one in sweeps_of(
            Path(planning.config.runs_dir) / "reports", {run.hash for run in runs})],
    )  # fmt: skip


def shown(cell: Cell, winners: Mapping[str, Candidate | None]) -> Iterator[tuple[Item, ScoreRef]]:
    """The scores that a cell shows: of what is chosen, the winner's; none while a choice is open."""
    for item in cell.items:
        winner = winners[item.choice] if item.choice else ()
        for reading in item.readings:
            score = reading.get(()) or (reading.get(winner) if winner is not None else None)
            if score is not None:
                yield item, score


Repeats = dict[tuple[str, ...], dict[tuple[str, ...], int]]  # axes -> their values, in the order met


def languages_of(table: Table, item: Item, score: ScoreRef) -> list[str]:
    """The languages whose models a score is of: English of the base, which none of them is, stands for all."""
    targets = [str(language) for language in table.axes.get("language", {})]
    if "language" in item.at:
        return [str(item.at["language"])]
    return [score.language] if score.language in targets or not targets else targets


def seed_of(cell: Cell, at: Mapping[str, Any], repeats: Repeats) -> int:
    """Which of the numbers that a cell is reduced over this is: the seed, or where other axes repeat a number, the
    place of their values among those met."""
    axes = tuple(axis for axis in at if axis in cell.reduced and axis != "language")
    if set(axes) <= {"seed"}:
        return int(at.get("seed", 0))
    known = repeats.setdefault(axes, {})
    return known.setdefault(tuple(str(at[axis]) for axis in axes), len(known))


# ---------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Met:
    """A score in a cell: the row or column that is a model, the other one, and the axes that the cell itself fixes.

    chosen: this score decided that the model is shown."""

    model: str
    other: str
    at: dict[str, Any]
    run: Run
    score: ScoreRef
    languages: list[str]
    seed: int
    chosen: bool

    @property
    def place(self) -> tuple[Any, ...]:
        """Where the report shows it, besides its row: one evaluation has room there."""
        (task,) = self.run.config.eval.tasks
        return *self.languages, self.seed, task.task, task.num_fewshot, self.score.language


def scored(planning: Planning, winners: Mapping[str, Candidate | None]) -> tuple[list[str], list[Met], Repeats]:
    """The models of a table in its order, every score that its cells show, and what is repeated in them."""
    plan, labels = planning.plan, Labels(planning, winners)
    by_row = any(side.words.get("run") for side in plan.table.rows)
    met: list[Met] = []
    repeats: Repeats = {}
    for cell in plan.cells.values():
        model, other = (cell.row, cell.column) if by_row else (cell.column, cell.row)
        for item, score in shown(cell, winners):
            if run := planning.evaluation(score):
                seed, languages = seed_of(cell, item.at, repeats), languages_of(plan.table, item, score)
                met.append(Met(labels.of(model), other, fixed(cell, item), run, score, languages, seed, chooses(item)))
    return list(map(labels.of, plan.rows if by_row else plan.columns)), met, repeats


def fixed(cell: Cell, item: Item) -> dict[str, Any]:
    """The axes of an item besides its language, less those that the cell is reduced over."""
    return {axis: value for axis, value in item.at.items() if axis not in cell.reduced and axis != "language"}


def told_apart(met: Sequence[Met]) -> list[str]:
    """The report's row of each: its model; where that stands for several, with the axes that tell them apart, and where
    these do not either, with the other side's name."""
    names = [one.model for one in met]
    for way in ("axes", "other"):
        held: dict[tuple[Any, ...], set[str]] = {}
        values: dict[tuple[str, str], set[str]] = {}
        for name, one in zip(names, met, strict=True):
            held.setdefault((name, *one.place), set()).add(one.run.hash)
            for axis, value in one.at.items():
                values.setdefault((name, axis), set()).add(str(value))
        several = {place[0] for place, runs in held.items() if len(runs) > 1}
        for at, (name, one) in enumerate(zip(names, met, strict=True)):
            if name in several:
                apart = [str(value) for axis, value in one.at.items() if len(values[name, axis]) > 1]
                names[at] = " ".join([name, *apart]) if way == "axes" else f"{name}, {one.other}"
    return names


class Labels:
    """Rows and columns by the knobs that their models have: layer swap -> layer swap 4+0."""

    def __init__(self, planning: Planning, winners: Mapping[str, Candidate | None]) -> None:
        self.names: dict[str, str] = {}
        knobs: dict[str, dict[str, None]] = {}
        for cell in planning.plan.cells.values():
            for item, score in shown(cell, winners):
                won = winners[item.choice] if item.choice else None
                told = " ".join(map(str, won)) if won else knobs_of(planning, score)
                for side in (cell.row, cell.column):
                    knobs.setdefault(side, {})[told] = None
        for side, found in knobs.items():
            if len(found) <= 3 and all(told and not numbers(told) <= numbers(side) for told in found):
                self.names[side] = f"{side} {', '.join(found)}"

    def of(self, side: str) -> str:
        return self.names.get(side, side)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d.]*", text))


def knobs_of(planning: Planning, score: ScoreRef) -> str:
    """The knobs that tell one merge of a method from another: 5+2 layers (and 1+1 of transition), a density."""
    run = planning.evaluation(score)
    merge: Any = run.config.merge if run else None
    if hasattr(merge, "bottom_layers") and run is not None and run.config.partition is None:
        zones = f"{merge.bottom_transition}+{merge.top_transition}"
        told = f"{merge.bottom_layers}+{merge.top_layers}" + (f" ({zones})" if zones != "0+0" else "")
        return f"{told} of 32" if merge.scale_to_depth else told
    return f"{merge.density:g}" if hasattr(merge, "density") else ""


def role(planning: Planning, score: ScoreRef) -> str:
    """Of a scored model: base, expert, or merge; a training on several sets stands with the merges."""
    key = planning.model_of(score)
    spec = planning.plan.specs[key] if key else None
    if spec is None or spec.kind != "stage":
        return spec.kind if spec and spec.kind in ("base", "merge") else "expert"
    training: Any = planning.model(spec.key)
    while isinstance(training, Run) and not isinstance(training.config, TrainStage):
        training = next(iter(runs_behind(training.parents)), None)  # of a selection, a reset: what it was made of
    joint = isinstance(training, Run) and training.config.sft.method in ("mixed", "simultaneous")
    return "merge" if joint or spec.words.get("stage") == "merge" else "expert"


# ---------------------------------------------------------------------------------------------------- runs


def described(
    runs: Sequence[Run], names: Mapping[str, str], failed: Mapping[str, str], reasons: Mapping[str, str]
) -> tuple[list[RunResult], list[FailedRun]]:
    """Every run as its manifest has it, and those that nobody has tried yet."""
    found, missing = [], []
    for run in runs:
        manifest = read_manifest(run.folder)
        if manifest is None:
            why = shared(failed.get(names[run.hash], f"not made ({reasons.get(run.hash, 'never made')})"))
            found.append(RunResult(names[run.hash], run.config.stage, run.folder, run.label, False, why))
            missing += [FailedRun(names[run.hash], why)] if names[run.hash] not in failed else []
            continue
        stale = reasons.get(run.hash, "") or changed(run.folder, manifest, SMALL_BYTES)
        found.append(recorded(run, names[run.hash], manifest, shared(stale)))
    return marked(found), missing


def recorded(run: Run, name: str, manifest: Manifest, stale: str) -> RunResult:
    parents = {role: one.name for role, one in manifest.parents.items()}
    root = manifest.facts.get("weights_root") or manifest.weights_root
    if root is None and "checkpoint" in manifest.parents:
        root = manifest.parents["checkpoint"].content
    merge = (run.config.merge.method if run.config.merge else "") if isinstance(run.config, EvalStage) else ""
    config = {key: told(value) for key, value in flat(manifest.decided_by.get("config", {})).items() if key != "stage"}
    return RunResult(
        name=name, stage=run.config.stage, folder=run.folder, label=run.label, stale=stale,
        model=parents.get("checkpoint") or merge or parents.get("model", ""), card=parents.get("data", ""),
        parents=parents, config=config, seconds=manifest.seconds, attempt=manifest.attempt, started=manifest.started,
        weights_root=root, versions=manifest.versions, machine=manifest.machine,
        warnings=[shared(one) for one in manifest.facts.get("warnings", [])],
    )  # fmt: skip


def told(value: Any) -> Any:
    """A knob's value as one reads it; text without a letter, as a separator is, in quotes."""
    if isinstance(value, int | float | bool) or value is None:
        return value
    return shared(value if isinstance(value, str) and value.strip() else json.dumps(value, ensure_ascii=False))


def made_on(run: RunResult) -> tuple[str, str]:
    """Versions and machine, as text that is compared."""
    return json.dumps(run.versions, sort_keys=True), json.dumps(run.machine, sort_keys=True)


def usual(runs: Iterable[RunResult]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Stage -> the versions and the machine that made most of its runs."""
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for run in runs:
        counts.setdefault(run.stage, Counter())[made_on(run)] += 1
    most = {stage: found.most_common(1)[0][0] for stage, found in counts.items()}
    return {stage: (json.loads(versions), json.loads(machine)) for stage, (versions, machine) in most.items()}


def marked(runs: Sequence[RunResult]) -> list[RunResult]:
    """Each run with how its making differs from that of most runs of its stage: device, threads, versions."""
    most = usual(run for run in runs if run.finished)
    known: dict[Any, list[str]] = {}  # compared once for each way of making

    def unlike(run: RunResult) -> list[str]:
        key = run.stage, made_on(run)
        if key not in known:
            versions, machine = most[run.stage]
            mine, theirs = {**run.versions, **run.machine}, {**versions, **machine}
            known[key] = [
                f"{name} {mine.get(name, 'unknown')}, most {theirs.get(name, 'unknown')}"
                for name in sorted({*mine, *theirs})
                if mine.get(name) != theirs.get(name)
            ]
        return known[key]

    return [replace(run, unlike=unlike(run)) if run.finished else run for run in runs]
