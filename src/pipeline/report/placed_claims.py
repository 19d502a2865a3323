"""Claims placed in a table: their rows, columns and axes are looked up before anything runs."""

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
from pipeline.tables.schema import TRAININGS

RANKED = (
    "friedman",
    "wilcoxon",
    "spearman",
)  # places are blocks, and axes group them into clusters
SEED = "seed"  # the axis whose trainings differ only by chance
ADD_SEEDS = "every.seed=[0,1,2] trains each three times, and stage=plan prints their GPU-hours"


def claims_of(table: str) -> list[Claim]:
    """Return the claims about a table, by its name.

    The shipped claims come first, then those from --config-dir.

    Raises:
        PipelineError: If an id is repeated.
    """
    claims: list[Claim] = []
    ids = set()
    for folder in conf.folders():
        for path in sorted((folder / conf.CLAIMS).glob("*.yaml")):
            text = refuse_special(path, MOST_BYTES).read_text(encoding="utf-8")
            for claim in read_claims(text, path.name):
                if claim.table != table:
                    continue
                if claim.id in ids:
                    raise claim.refuse("a claim with this id exists already. Choose another id.")
                ids.add(claim.id)
                claims.append(claim)
    return claims


@dataclass
class Grid:
    """The names of a table, as a claim uses them.

    Attributes:
        in_columns: True if the claim's sides are columns, and its places rows.
    """

    claim: Claim
    plan: TablePlan
    in_columns: bool

    @classmethod
    def of(cls, claim: Claim, plan: TablePlan) -> Grid:
        """Return the grid in the direction that has more of the claim's names."""
        names = claim.left + claim.right
        columns = sum(name in plan.columns for name in names)
        rows = sum(name in plan.rows for name in names)
        return cls(claim, plan, columns >= rows)

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
            raise claim.refuse(f"metric {claim.metric!r} is no column or row here: {known}")

    def find_places(self) -> tuple[list[str], list[str], str]:
        """Return the places and the axes that `over` names, and why the claim cannot be tested."""
        claim, table = self.claim, self.plan.table
        kind, sides = "column", table.columns
        if self.in_columns:
            kind, sides = "row", table.rows
        written = [side.name for side in sides]
        places: list[str] = []
        axes: list[str] = []
        untestable = ""
        for name in claim.over:
            if name in self.across:
                places.append(name)
            elif name in written:
                expanded = [side for side in self.across if side not in written]
                places += matching_sides(name, expanded, self.plan)
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
            raise claim.refuse(f"over names no {kind} of {claim.table}")
        return places, axes, untestable

    def cells_of(self, name: str, places: Sequence[str]) -> list[Cell]:
        """Return the cell of a side at each place."""
        cells = []
        for place in places:
            row, column = name, place
            if self.in_columns:
                row, column = place, name
            if (row, column) not in self.plan.cells:
                raise self.claim.refuse(
                    f"{self.claim.table} has no cell in row {row!r}, column {column!r}"
                )
            cells.append(self.plan.cells[row, column])
        return cells


@dataclass
class PlacedClaim:
    """A claim placed in a table.

    Attributes:
        left: For each candidate of the side, its cells, one per place.
        right: The same for the other side.
        axes: The sampled axes.
        outcome: The cells of the outcome, for spearman.
        than: The same claim at the places with the difference that is subtracted.
        untestable: Why no answers could decide the claim, or "".
    """

    claim: Claim
    plan: TablePlan
    places: tuple[str, ...]
    axes: tuple[str, ...]
    left: list[list[Cell]]
    right: list[list[Cell]]
    outcome: list[Cell] = field(default_factory=list)
    than: PlacedClaim | None = None
    untestable: str = ""

    @classmethod
    def of(cls, claim: Claim, plan: TablePlan) -> PlacedClaim:
        """Place a claim in a table.

        Raises:
            PipelineError: For names that the table lacks.
        """
        grid = Grid.of(claim, plan)
        grid.check_sides()
        places, axes, untestable = grid.find_places()
        if axes and claim.test not in RANKED:
            grid = replace(grid, plan=mean_of_trainings(plan))
        left = [grid.cells_of(name, places) for name in claim.left]
        right = [grid.cells_of(name, places) for name in claim.right]
        placed = cls(claim, grid.plan, tuple(places), tuple(axes), left, right)
        if claim.test == "spearman":
            placed.outcome = grid.cells_of(claim.metric, places)
        else:
            placed.check_metric()
        placed.untestable = untestable or placed.choice_of_trainings()
        placed.check_axes()
        if claim.than:
            subtracted = replace(claim, over=(*claim.than, *axes), than=())
            placed.than = cls.of(subtracted, grid.plan)
            if not all(is_plain_mean(grid.plan, cell) for cell in placed.all_cells):
                raise claim.refuse("than needs means, not a best configuration or a maximum")
        return placed

    @property
    def all_cells(self) -> list[Cell]:
        """The cells of both sides, of the outcome, and of `than`."""
        cells: list[Cell] = []
        for side in (*self.left, *self.right, self.outcome):
            cells += side
        if self.than:
            cells += self.than.all_cells
        return cells

    def choice_of_trainings(self) -> str:
        """Return why a claim cannot be tested if it compares the best of different trainings.

        The best of several trainings is above a single training by chance, which questions do not
        show. The result is "" if both sides are the best of the same trainings.
        """
        left, right = self.chosen_trainings(self.left), self.chosen_trainings(self.right)
        if left == right or self.claim.test in RANKED:
            return ""
        most_left = max(map(len, left), default=1)
        most_right = max(map(len, right), default=1)
        return (
            f"it compares bests of different trainings ({most_left} against {most_right}), which"
            f" chance between trainings raises: means over a sampled axis can be tested, such as"
            f" {SEED}: {ADD_SEEDS}"
        )

    def chosen_trainings(self, side: Sequence[Sequence[Cell]]) -> set[frozenset[frozenset[str]]]:
        chosen: set[frozenset[frozenset[str]]] = set()
        for cells in side:
            for cell in cells:
                chosen |= trainings_chosen_of(self.plan, cell)
        return chosen

    def check_metric(self) -> None:
        """Raise PipelineError unless all cells store the claim's metric for the same problems."""
        claim = self.claim
        if claim.metric == FACT:
            if not all(cell.fact for cell in self.all_cells):
                raise claim.refuse("metric fact, but a cell shows no fact")
            return
        tasks = tasks_of(self.plan, self.all_cells)
        if None in tasks:
            raise claim.refuse("a cell has no answers: it shows a fact or a figure")
        if len(tasks) > 1:
            names = " and ".join(sorted(map(str, tasks)))
            raise claim.refuse(f"over mixes {names}, which have different problems")
        metrics = metrics_of(str(next(iter(tasks))))
        if claim.metric not in metrics:
            known = suggest(claim.metric, metrics)
            raise claim.refuse(f"metric {claim.metric!r} is not stored per answer here: {known}")

    def check_axes(self) -> None:
        """Raise PipelineError if a sampled axis has too few values, or is not reduced by the mean.

        Three values are enough, and two for blocks of ranks. Fewer trainings of a fact, or fewer
        seeds, are accepted: the claim cannot be tested then.
        """
        claim = self.claim
        for axis in self.axes:
            values = list(map(str, self.plan.table.axes[axis]))
            if axis == SEED and len(values) < 3:
                self.untestable = (
                    f"{len(values)} of three or more trainings of each model: {ADD_SEEDS}"
                )
                continue
            needed = 2 if claim.test in RANKED else 3
            if len(values) < needed and claim.metric != FACT:
                raise claim.refuse(
                    f"an interval over {axis} needs a variance of three values or more, and"
                    f" {claim.table} only has {axis}={','.join(values)}"
                )
            leaves: list[Cell] = []
            for cell in self.all_cells:
                leaves += leaf_cells(self.plan, cell)
            if not self.has_several(axis, leaves):
                raise claim.refuse(
                    f"over names {axis}, but its cells have one value. Remove {axis}."
                )
            for leaf in leaves:
                for how, axes in leaf.reduce:
                    if axis in axes and how != "mean":
                        raise claim.refuse(
                            f"over names {axis}, but row {leaf.row!r} takes the {how} over it."
                            f" Remove {axis}."
                        )

    def has_several(self, axis: str, leaves: Sequence[Cell]) -> bool:
        """Return True if cells have several values of an axis.

        For blocks of ranks, each cell needs a value. A fact may have a single one.
        """
        counts = []
        for leaf in leaves:
            values = {str(item.at[axis]) for item in leaf.items if axis in item.at}
            counts.append(len(values))
        if self.claim.test in RANKED:
            return min(counts) > 0
        if self.claim.metric == FACT:
            return max(counts) > 0
        return max(counts) > 1


def trainings_of(plan: TablePlan, model: str) -> frozenset[str]:
    """Return the trainings behind a model, by the keys of their specs."""
    if model not in plan.trainings:
        trainings: set[str] = set()
        for key in candidate_models(plan, model):
            if key not in plan.specs:
                continue
            spec = plan.specs[key]
            if spec.words.get("stage") in TRAININGS:
                trainings.add(spec.key)
            for ref in spec.parent_refs():
                trainings |= trainings_of(plan, ref.spec)
        plan.trainings[model] = frozenset(trainings)
    return plan.trainings[model]


def candidate_models(plan: TablePlan, model: str) -> list[str]:
    """Return the models that a model is chosen from, or the model if it is no choice."""
    if model in plan.chosen:
        return list(plan.chosen[model].models.values())
    return [model]


def candidate_trainings(plan: TablePlan, item: Item) -> set[frozenset[str]]:
    """Return the trainings of each candidate that an item is chosen from."""
    trainings = set()
    for reading in item.readings:
        for score in reading.values():
            for model in candidate_models(plan, score.model):
                trainings.add(trainings_of(plan, model))
    return trainings


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
    """Return the plan with the mean over trainings in place of the best of them.

    By chance, the best of several trainings has an advantage over a single training. The mean has
    none.
    """

    cells = {}
    for key, cell in plan.cells.items():
        items = [average_candidates(plan, item) for item in cell.items]
        cells[key] = replace(cell, items=items)
    return replace(plan, cells=cells)


def average_candidates(plan: TablePlan, item: Item) -> Item:
    if not is_open_choice(item) or len(candidate_trainings(plan, item)) < 2:
        return item
    readings = []
    for reading in item.readings:
        for score in reading.values():
            readings.append({(): score})
    return replace(item, readings=tuple(readings), choice=None)


def matching_sides(name: str, across: Sequence[str], plan: TablePlan) -> list[str]:
    """Return the rows (or columns) that a name with {axis} in it expands to."""
    parts = []
    for index, part in enumerate(re.split(r"\{(.*?)\}", name)):
        if index % 2:
            values = [re.escape(str(value)) for value in plan.table.axes.get(part, ())]
            parts.append(f"(?:{'|'.join(values) or '.+'})")
        else:
            parts.append(re.escape(part))
    return [side for side in across if re.fullmatch("".join(parts), side)]


def check_claims(planning: Planning) -> None:
    """Raise PipelineError for claims with names that their table does not have.

    This happens before anything runs. A file that has the name of a shipped table and fewer rows is
    not checked.
    """
    name = planning.plan.table.name
    if planning.config.table == name or name not in conf.options(conf.TABLES):
        for claim in claims_of(name):
            PlacedClaim.of(claim, planning.plan)
