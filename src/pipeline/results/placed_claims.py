"""Claims in a table's words: every name that they say is looked up before anything is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeline.benchmarks import kind_of, primary_metric
from pipeline.config import conf
from pipeline.errors import suggest
from pipeline.report.stats.claims import FACT, Claim, read_claims
from pipeline.report.stats.translations import CORPUS_METRICS
from pipeline.results.questions import leaves, linear
from pipeline.tables.plan import Cell, TablePlan
from pipeline.tables.planned_runs import Planning
from pipeline.tables.schema import PLACEHOLDER

RANKED = ("friedman", "wilcoxon", "spearman")  # places are blocks, and axes say which of them belong together


def claims_of(table: str) -> list[Claim]:
    """The claims about a table, by its name: those shipped, then those of --config-dir.

    Raises PipelineError for an id that two of them have.
    """
    files = [path for folder in conf.folders() for path in sorted((folder / conf.CLAIMS).glob("*.yaml"))]
    claims = [
        item
        for path in files
        for item in read_claims(path.read_text(encoding="utf-8"), path.name)
        if item.table == table
    ]
    names = [claim.id for claim in claims]
    if repeated := next((claim for at, claim in enumerate(claims) if claim.id in names[:at]), None):
        raise repeated.refuse("a claim with this id is there already: call yours otherwise")
    return claims


@dataclass
class PlacedClaim:
    """A claim in a table's words: the cells of each candidate of a side, one a place; axes that are a sample; than:
    the same at the places whose difference is taken away."""

    claim: Claim
    plan: TablePlan
    places: tuple[str, ...]
    axes: tuple[str, ...]
    left: list[list[Cell]]
    right: list[list[Cell]]
    outcome: list[Cell] = field(default_factory=list)  # of spearman
    than: PlacedClaim | None = None  # of gain

    @classmethod
    def of(cls, claim: Claim, plan: TablePlan) -> PlacedClaim:
        """Raises PipelineError, in one sentence, for what the table does not have."""
        names = claim.left + claim.right
        columns = sum(name in plan.columns for name in names) >= sum(name in plan.rows for name in names)
        sides, across = (plan.columns, plan.rows) if columns else (plan.rows, plan.columns)
        for name in names:
            if name not in sides:
                names_there = [*plan.columns, *plan.rows]
                raise claim.refuse(f"{name!r} is no column or row of {claim.table}: {suggest(name, names_there)}")
        written = [side.name for side in (plan.table.rows if columns else plan.table.columns)]
        places: list[str] = []
        axes: list[str] = []
        for name in claim.over:
            if name in across:
                places.append(name)
            elif name in written:
                places += instances(name, across, plan, written)
            elif name in plan.table.axes:
                axes.append(name)
            else:
                names_there = [*across, *written, *plan.table.axes]
                raise claim.refuse(
                    f"over names {name!r}, no row, column or axis of {claim.table}: {suggest(name, names_there)}"
                )
        if not places:
            raise claim.refuse(f"over names no {'row' if columns else 'column'} of {claim.table}")

        def cells(name: str) -> list[Cell]:
            keys = [(place, name) if columns else (name, place) for place in places]
            for key in keys:
                if key not in plan.cells:
                    raise claim.refuse(f"{claim.table} has nothing in row {key[0]!r}, column {key[1]!r}")
            return [plan.cells[key] for key in keys]

        placed = cls(
            claim, plan, tuple(places), tuple(axes), list(map(cells, claim.left)), list(map(cells, claim.right))
        )
        if claim.test == "spearman":
            if claim.metric not in sides:
                raise claim.refuse(f"metric {claim.metric!r} is no column to go with: {suggest(claim.metric, sides)}")
            placed.outcome = cells(claim.metric)
        else:
            placed.check_metric()
        placed.check_axes()
        if claim.than:
            placed.than = cls.of(replace(claim, over=(*claim.than, *axes), than=()), plan)
            if not all(linear(plan, cell) for cell in placed.cells):
                raise claim.refuse("gain is of means: a best configuration or a maximum is named")
        return placed

    @property
    def cells(self) -> list[Cell]:
        found = [cell for side in (*self.left, *self.right, self.outcome) for cell in side]
        return [*found, *self.than.cells] if self.than else found

    def at(self, place: int) -> PlacedClaim:
        """The same claim at one place."""
        left, right = ([[cells[place]] for cells in side] for side in (self.left, self.right))
        return PlacedClaim(self.claim, self.plan, (self.places[place],), self.axes, left, right)

    def check_metric(self) -> None:
        claim, facts = self.claim, [cell.fact for cell in self.cells]
        if claim.metric == FACT:
            if not all(facts):
                raise claim.refuse("metric fact, and it names a cell that shows none")
            return
        tasks = dict.fromkeys(task for cell in self.cells for task in tasks_of(self.plan, cell))
        if None in tasks or any(facts):
            raise claim.refuse("it names a cell that no answers stand under, of a fact or a figure")
        if len(tasks) > 1:
            raise claim.refuse(f"over mixes {' and '.join(map(str, tasks))}, which do not ask the same problems")
        metrics = metrics_of(str(next(iter(tasks))))
        if claim.metric not in metrics:
            raise claim.refuse(
                f"metric {claim.metric!r} is not kept answer by answer here: {suggest(claim.metric, metrics)}"
            )

    def check_axes(self) -> None:
        """An axis that is a sample has three values (blocks of ranks: two) or more, and is not reduced to a maximum. A
        fact of fewer trainings cannot be tested, and its verdict says so."""
        claim, plan = self.claim, self.plan
        for axis in self.axes:
            has = list(map(str, plan.table.axes[axis]))
            if len(has) < (2 if claim.test in RANKED else 3) and claim.metric != FACT:
                text = f"{claim.table} has {axis}={','.join(has)} alone"
                raise claim.refuse(
                    f"an interval over {axis} is asked, and {text}: three values or more show a variance"
                )
            leaf_cells = [leaf for cell in self.cells for leaf in leaves(plan, cell)]
            values = [{str(item.at.get(axis)) for item in leaf.items if axis in item.at} for leaf in leaf_cells]
            least = 0 if claim.metric == FACT else 1
            if not (all(values) if claim.test in RANKED else any(len(of) > least for of in values)):
                raise claim.refuse(f"over names {axis}, which none of its cells has several of: leave it out")
            for leaf in leaf_cells:
                for how, axes in leaf.reduce:
                    if axis in axes and how != "mean":
                        raise claim.refuse(
                            f"over names {axis}, of which row {leaf.row!r} takes the {how}: leave it out"
                        )


def instances(name: str, across: Sequence[str], plan: TablePlan, written: Sequence[str]) -> list[str]:
    """The rows (or columns) that one written with {axis} in its name stands for."""
    pattern, at = "", 0
    for hole in PLACEHOLDER.finditer(name):
        values = "|".join(re.escape(str(value)) for value in plan.table.axes.get(hole[1], ()))
        pattern, at = f"{pattern}{re.escape(name[at : hole.start()])}(?:{'.+' if hole[2] else values})", hole.end()
    expression = re.compile(pattern + re.escape(name[at:]))
    return [side for side in across if side not in written and expression.fullmatch(side)]


def tasks_of(plan: TablePlan, cell: Cell) -> set[str | None]:
    """The tasks whose answers a cell is made of; None: of a fact or a figure."""
    tasks: set[str | None] = set()
    for leaf in leaves(plan, cell):
        for item in leaf.items:
            words = [dict(score.words) for reading in item.readings for score in reading.values()]
            tasks |= {settings.get("task") or str(settings["eval"]).rpartition("_")[0] for settings in words} or {None}
    return tasks


def metrics_of(task: str) -> list[str]:
    """What is kept for each answer of a task."""
    kind = kind_of(task)
    if kind is None or kind == "translation":
        return list(CORPUS_METRICS) if kind else []
    return [primary_metric(task)[0], *(["numeric_match"] if kind == "number" else [])]


def check_claims(planning: Planning) -> None:
    """Refuse, before anything is made, claims that name what their table does not have; not those about a shipped
    table of which a file has the name and fewer rows."""
    name = planning.plan.table.name
    if planning.config.table == name or name not in conf.options(conf.TABLES):
        for claim in claims_of(name):
            PlacedClaim.of(claim, planning.plan)
