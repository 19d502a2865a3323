"""Claims placed in a table: every row, column and axis that they name is looked up before anything
is run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeline.config import conf
from pipeline.errors import suggest
from pipeline.files import MOST_BYTES, refuse_special
from pipeline.report.claims import FACT, Claim, read_claims
from pipeline.report.expression import is_open_choice, is_plain_mean, leaf_cells
from pipeline.report.metrics import metrics_of, tasks_of
from pipeline.tables.plan import Cell, Item, TablePlan
from pipeline.tables.planned_runs import Planning
from pipeline.tables.schema import PLACEHOLDER, TRAININGS

RANKED = ("friedman", "wilcoxon", "spearman")  # places are blocks, which axes group into clusters
# the axis of a table, or of every.seed=[0,1,2], whose values are trainings that differ by chance
# alone
SEED = "seed"
ADD_SEEDS = "every.seed=[0,1,2] trains each three times, and stage=plan prints their GPU-hours"


def claims_of(table: str) -> list[Claim]:
    """Return the claims about a table, by its name: those shipped, then those of --config-dir.

    Raises: PipelineError: an id is repeated.
    """
    files = []
    for folder in conf.folders():
        for path in sorted((folder / conf.CLAIMS).glob("*.yaml")):
            files.append(path)
    claims = []
    for path in files:
        for item in read_claims(
            refuse_special(path, MOST_BYTES).read_text(encoding="utf-8"), path.name
        ):
            if item.table == table:
                claims.append(item)
    names = [claim.id for claim in claims]
    repeated = next(
        (claim for index, claim in enumerate(claims) if claim.id in names[:index]), None
    )
    if repeated:
        raise repeated.refuse("a claim with this id exists already: choose another id")
    return claims


@dataclass
class Grid:
    """The names of a table as a claim uses them.

    in_columns: whether its sides are columns, and its places rows.
    """

    claim: Claim
    plan: TablePlan
    in_columns: bool

    @property
    def sides(self) -> list[str]:
        if self.in_columns:
            return self.plan.columns
        return self.plan.rows

    @property
    def across(self) -> list[str]:
        if self.in_columns:
            return self.plan.rows
        return self.plan.columns

    def check_sides(self) -> None:
        """Raise PipelineError unless the claim's sides are columns (or rows) of the table."""
        claim = self.claim
        for name in claim.left + claim.right:
            if name not in self.sides:
                known = suggest(name, [*self.plan.columns, *self.plan.rows])
                raise claim.refuse(f"{name!r} is no column or row of {claim.table}: {known}")
        if claim.test == "spearman" and claim.metric not in self.sides:
            known = suggest(claim.metric, self.sides)
            raise claim.refuse(f"metric {claim.metric!r} is no column to go with: {known}")

    def find_places(self) -> tuple[list[str], list[str], str]:
        """Return the places and the axes that `over` names, and why the claim cannot be tested, or
        "".
        """
        claim, table = self.claim, self.plan.table
        written = [side.name for side in (table.rows if self.in_columns else table.columns)]
        places: list[str] = []
        axes: list[str] = []
        untestable = ""
        for name in claim.over:
            if name in self.across:
                places.append(name)
            elif name in written:
                places += matching_sides(name, self.across, self.plan, written)
            elif name in table.axes:
                axes.append(name)
            elif name == SEED:
                untestable = (
                    "one training of each model does not show how much trainings differ:"
                    f" {ADD_SEEDS}"
                )
            else:
                known = suggest(name, [*self.across, *written, *table.axes])
                raise claim.refuse(
                    f"over names {name!r}, no row, column or axis of {claim.table}: {known}"
                )
        if not places:
            raise claim.refuse(
                f"over names no {'row' if self.in_columns else 'column'} of {claim.table}"
            )
        return places, axes, untestable

    def cells_of(self, name: str, places: Sequence[str]) -> list[Cell]:
        """Return the cell of a side at each place."""
        cells = []
        for place in places:
            if self.in_columns:
                row, column = (place, name)
            else:
                row, column = (name, place)
            if (row, column) not in self.plan.cells:
                raise self.claim.refuse(
                    f"{self.claim.table} has nothing in row {row!r}, column {column!r}"
                )
            cells.append(self.plan.cells[row, column])
        return cells


@dataclass
class PlacedClaim:
    """A claim placed in a table.

    left, right: for each candidate of a side its cells, one per place; axes: those that are a
    sample; than: the same claim at the places whose difference is subtracted; untestable: why no
    answers could decide it.
    """

    claim: Claim
    plan: TablePlan
    places: tuple[str, ...]
    axes: tuple[str, ...]
    left: list[list[Cell]]
    right: list[list[Cell]]
    outcome: list[Cell] = field(default_factory=list)  # for spearman
    than: PlacedClaim | None = None
    untestable: str = ""

    @classmethod
    def of(cls, claim: Claim, plan: TablePlan) -> PlacedClaim:
        """Place a claim in a table.

        Raises PipelineError, in one sentence, for names that the table lacks.
        """
        names = claim.left + claim.right
        in_columns = sum(name in plan.columns for name in names) >= sum(
            name in plan.rows for name in names
        )
        grid = Grid(claim, plan, in_columns)
        grid.check_sides()
        places, axes, untestable = grid.find_places()
        if axes and claim.test not in RANKED:
            grid = replace(grid, plan=mean_of_trainings(plan))
        left, right = (
            [grid.cells_of(name, places) for name in side] for side in (claim.left, claim.right)
        )
        placed = cls(
            claim, grid.plan, tuple(places), tuple(axes), left, right, untestable=untestable
        )
        if claim.test == "spearman":
            placed.outcome = grid.cells_of(claim.metric, places)
        else:
            placed.check_metric()
        placed.untestable = untestable or placed.choice_of_trainings()
        placed.check_axes()
        if claim.than:
            placed.than = cls.of(replace(claim, over=(*claim.than, *axes), than=()), grid.plan)
            if not all(is_plain_mean(grid.plan, cell) for cell in placed.all_cells):
                raise claim.refuse("than is of means: a best configuration or a maximum is named")
        return placed

    @property
    def all_cells(self) -> list[Cell]:
        """The cells of both sides, of the outcome, and of `than`."""
        cells = []
        for side in (*self.left, *self.right, self.outcome):
            for cell in side:
                cells.append(cell)
        if self.than:
            return [*cells, *self.than.all_cells]
        return cells

    def choice_of_trainings(self) -> str:
        """Why a claim cannot be tested that compares the best of several trainings with fewer:
        their best is above one of them by chance, which questions do not show. "" if both sides are
        the best of the same trainings.
        """
        sides = [
            set().union(*(trainings_chosen_of(self.plan, cell) for cells in side for cell in cells))
            for side in (self.left, self.right)
        ]
        if sides[0] == sides[1] or self.claim.test in RANKED:
            return ""
        counts = " against ".join(str(max(map(len, side), default=1)) for side in sides)
        return (
            f"it compares bests of different trainings ({counts}), which chance between trainings"
            f" raises: means over a sampled axis can be tested, such as {SEED}: {ADD_SEEDS}"
        )

    def check_metric(self) -> None:
        """Raise PipelineError unless all cells store the claim's metric for the same problems."""
        claim, facts = self.claim, [cell.fact for cell in self.all_cells]
        if claim.metric == FACT:
            if not all(facts):
                raise claim.refuse("metric fact, but it names a cell that shows none")
            return
        tasks = tasks_of(self.plan, self.all_cells)
        if None in tasks:
            raise claim.refuse("it names a cell without answers, of a fact or a figure")
        if len(tasks) > 1:
            raise claim.refuse(
                f"over mixes {' and '.join(sorted(map(str, tasks)))}, which have different problems"
            )
        metrics = metrics_of(str(next(iter(tasks))))
        if claim.metric not in metrics:
            raise claim.refuse(
                f"metric {claim.metric!r} is not stored per answer here:"
                f" {suggest(claim.metric, metrics)}"
            )

    def check_axes(self) -> None:
        """Raise PipelineError unless each sampled axis has at least three values (for blocks of
        ranks two) and is reduced by the mean. A fact of fewer trainings, or fewer seeds, is
        allowed: it cannot be tested.
        """
        claim, plan = self.claim, self.plan
        for axis in self.axes:
            axis_values = list(map(str, plan.table.axes[axis]))
            if axis == SEED and len(axis_values) < 3:
                self.untestable = (
                    f"{len(axis_values)} of three or more trainings of each model: {ADD_SEEDS}"
                )
                continue
            if len(axis_values) < (2 if claim.test in RANKED else 3) and claim.metric != FACT:
                text = f"{claim.table} has {axis}={','.join(axis_values)} alone"
                raise claim.refuse(
                    f"an interval over {axis} needs a variance of three values or more, and {text}"
                )
            claim_leaves = []
            for cell in self.all_cells:
                for leaf in leaf_cells(plan, cell):
                    claim_leaves.append(leaf)
            leaf_values = [
                {str(item.at.get(axis)) for item in leaf.items if axis in item.at}
                for leaf in claim_leaves
            ]
            least = 0 if claim.metric == FACT else 1
            if not (
                all(leaf_values)
                if claim.test in RANKED
                else any(len(values) > least for values in leaf_values)
            ):
                raise claim.refuse(
                    f"over names {axis}, which none of its cells has several of: leave it out"
                )
            for leaf in claim_leaves:
                for how, axes in leaf.reduce:
                    if axis in axes and how != "mean":
                        raise claim.refuse(
                            f"over names {axis}, of which row {leaf.row!r} takes the {how}: leave"
                            " it out"
                        )


def trainings_of(plan: TablePlan, model: str) -> frozenset[str]:
    """Return the trainings that a model is made of, by the keys of their specs."""
    if model not in plan.trainings:
        models = plan.chosen[model].models.values() if model in plan.chosen else [model]
        specs = [plan.specs[key] for key in models if key in plan.specs]
        own_trainings = set()
        for spec in specs:
            if spec.words.get("stage") in TRAININGS:
                own_trainings.add(spec.key)
        above = (trainings_of(plan, ref.spec) for spec in specs for ref in spec.parent_refs())
        plan.trainings[model] = frozenset(own_trainings.union(*above))
    return plan.trainings[model]


def candidate_trainings(plan: TablePlan, item: Item) -> set[frozenset[str]]:
    """Return the trainings of each candidate that an item is chosen of."""
    models = [score.model for reading in item.readings for score in reading.values()]
    candidates = [
        plan.chosen[model].models.values() if model in plan.chosen else [model] for model in models
    ]
    found = set()
    for of_choice in candidates:
        for model in of_choice:
            found.add(trainings_of(plan, model))
    return found


def trainings_chosen_of(plan: TablePlan, cell: Cell) -> set[frozenset[frozenset[str]]]:
    """Return the trainings of each candidate, if a cell takes the best of different trainings."""
    groups: set[frozenset[frozenset[str]]] = set()
    for leaf in leaf_cells(plan, cell):
        of_items = [frozenset(candidate_trainings(plan, item)) for item in leaf.items]
        for of_item, item in zip(of_items, leaf.items, strict=True):
            if item.choice:
                groups.add(of_item)
        if any(how != "mean" for how, _ in leaf.reduce):
            groups.add(frozenset().union(*of_items))
    return {group for group in groups if len(group) > 1}


def mean_of_trainings(plan: TablePlan) -> TablePlan:
    """Return the plan with the mean of all candidates wherever the best of different trainings is
    shown.

    With seeds their mean has no advantage over a single configuration, while the best of several
    keeps one by chance.
    """

    def averaged(item: Item) -> Item:
        if not is_open_choice(item) or len(candidate_trainings(plan, item)) < 2:
            return item
        scores = []
        for reading in item.readings:
            for score in reading.values():
                scores.append(score)
        return replace(item, readings=tuple({(): score} for score in scores), choice=None)

    cells = {
        key: replace(cell, items=list(map(averaged, cell.items)))
        for key, cell in plan.cells.items()
    }
    return replace(plan, cells=cells)


def matching_sides(
    name: str, across: Sequence[str], plan: TablePlan, written: Sequence[str]
) -> list[str]:
    """Return the rows (or columns) that a name with {axis} in it expands to."""
    pattern, end = "", 0
    for hole in PLACEHOLDER.finditer(name):
        if hole[2]:
            values = ".+"
        else:
            values = "|".join(re.escape(str(value)) for value in plan.table.axes.get(hole[1], ()))
        pattern += re.escape(name[end : hole.start()]) + f"(?:{values})"
        end = hole.end()
    expression = re.compile(pattern + re.escape(name[end:]))
    found = []
    for side in across:
        if side not in written and expression.fullmatch(side):
            found.append(side)
    return found


def check_claims(planning: Planning) -> None:
    """Raise PipelineError, before anything is run, for claims that name what their table does not
    have; not for a file that has the name of a shipped table and fewer rows.
    """
    name = planning.plan.table.name
    if planning.config.table == name or name not in conf.options(conf.TABLES):
        for claim in claims_of(name):
            PlacedClaim.of(claim, planning.plan)
