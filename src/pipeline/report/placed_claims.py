"""Claims placed in a table: their rows, columns and axes are looked up before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pipeline.config import conf
from pipeline.errors import suggest
from pipeline.files import MOST_BYTES, refuse_special
from pipeline.report.claims import FACT, Claim, read_claims
from pipeline.report.expression import is_open_choice, is_plain_mean
from pipeline.report.metrics import metrics_of, tasks_of
from pipeline.tables.plan import Cell, Item, TablePlan
from pipeline.tables.planned_runs import Planning
from pipeline.tables.schema import TRAININGS

RANKED = (
    "friedman",
    "wilcoxon",
    "spearman",
)  # places are blocks, and axes group them into clusters
Trainings = frozenset[str]  # keys of the specs of trainings
SEED = "seed"  # the axis whose trainings differ only by chance
ADD_SEEDS = "every.seed=[0,1,2] trains each three times, and stage=plan prints their GPU-hours"


def claims_of(table: str) -> list[Claim]:
    """Return the claims about a table, by its name.

    The shipped claims come first, then those from --config-dir.
    """
    claims: list[Claim] = []
    for folder in conf.folders():
        for path in sorted((folder / conf.CLAIMS).glob("*.yaml")):
            text = refuse_special(path, MOST_BYTES).read_text(encoding="utf-8")
            claims += [claim for claim in read_claims(text, path.name) if claim.table == table]
    return claims


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
    places: list[str]
    axes: list[str]
    untestable: str
    left: list[list[Cell]] = field(default_factory=list)
    right: list[list[Cell]] = field(default_factory=list)
    outcome: list[Cell] = field(default_factory=list)
    than: PlacedClaim | None = None

    @classmethod
    def of(cls, claim: Claim, plan: TablePlan) -> PlacedClaim:
        """Place a claim in a table.

        Raises:
            PipelineError: For names that the table lacks.
        """
        placed = cls(claim, plan, [], [], "")
        placed.find_places()
        if placed.axes and claim.test not in RANKED:
            placed.plan = mean_of_trainings(plan)
        placed.left = [placed.cells_of(name) for name in claim.left]
        placed.right = [placed.cells_of(name) for name in claim.right]
        if claim.test == "spearman":
            placed.outcome = placed.cells_of(claim.metric)
        else:
            placed.check_metric()
        placed.untestable = placed.untestable or placed.choice_of_trainings()
        placed.check_axes()
        if claim.than:
            subtracted = replace(claim, over=(*claim.than, *placed.axes), than=())
            placed.than = cls.of(subtracted, placed.plan)
            if not all(is_plain_mean(cell) for cell in placed.all_cells):
                raise claim.refuse("than needs means, not a best configuration or a maximum")
        return placed

    @property
    def in_columns(self) -> bool:
        """True if the claim's sides are columns of the table, and its places rows."""
        return self.claim.left[0] in self.plan.columns

    def find_places(self) -> None:
        """Read the places and the axes from `over`, and why the claim cannot be tested."""
        claim, plan = self.claim, self.plan
        across, sides = plan.columns, plan.table.columns
        if self.in_columns:
            across, sides = plan.rows, plan.table.rows
        written = {side.name for side in sides}
        expanded = [side for side in across if side not in written]
        for name in claim.over:
            if name in across:
                self.places.append(name)
            elif name in plan.table.axes:
                self.axes.append(name)
            elif name in written:
                self.places += matching_sides(name, expanded, plan)
            elif name == SEED:
                self.untestable = (
                    "one training of each model does not show how much trainings differ:"
                    f" {ADD_SEEDS}"
                )
            else:
                known = suggest(name, [*across, *written, *plan.table.axes])
                raise claim.refuse(
                    f"over names {name!r}, no row, column or axis of {claim.table}: {known}"
                )
        if not self.places:
            raise claim.refuse(f"over names no row or column of {claim.table}")

    def cells_of(self, name: str) -> list[Cell]:
        """Return the cell of a side at each place."""
        cells = []
        for place in self.places:
            key = (place, name) if self.in_columns else (name, place)
            if key not in self.plan.cells:
                known = suggest(name, [*self.plan.columns, *self.plan.rows])
                raise self.claim.refuse(
                    f"{name!r} is no column or row of {self.claim.table} with a cell in {place!r}:"
                    f" {known}"
                )
            cells.append(self.plan.cells[key])
        return cells

    @property
    def all_cells(self) -> list[Cell]:
        """The cells of both sides, of the outcome, and of `than`."""
        cells = list(chain(*self.left, *self.right, self.outcome))
        if self.than:
            cells += self.than.all_cells
        return cells

    def choice_of_trainings(self) -> str:
        """Return why a claim cannot be tested if it compares the best of different trainings.

        The best of several trainings is above a single training by chance, which questions do not
        show. The result is "" if both sides are the best of the same trainings.
        """
        left, right = (
            trainings_chosen_of(self.plan, chain(*side)) for side in (self.left, self.right)
        )
        if left == right or self.claim.test in RANKED:
            return ""
        return (
            "it compares bests of different trainings, which chance between trainings raises:"
            f" means over a sampled axis can be tested, such as {SEED}: {ADD_SEEDS}"
        )

    def check_metric(self) -> None:
        """Raise PipelineError unless all cells store the claim's metric for the same problems."""
        claim = self.claim
        if claim.metric == FACT:
            if not all(cell.fact for cell in self.all_cells):
                raise claim.refuse("metric fact, but a cell shows no fact")
            return
        task, *others = tasks_of(self.plan, self.all_cells)
        if task is None or others:
            raise claim.refuse("over mixes facts or tasks, which have different problems")
        metrics = metrics_of(task)
        if claim.metric not in metrics:
            known = suggest(claim.metric, metrics)
            raise claim.refuse(f"metric {claim.metric!r} is not stored per answer here: {known}")

    def check_axes(self) -> None:
        """Check that sampled axes have three values or more, and are reduced by the mean.

        Two values are enough for blocks of ranks, and fewer trainings for facts, whose verdict
        says so.

        Raises:
            PipelineError: If the cells have one value of an axis, or a row takes the best over it.
        """
        claim = self.claim
        for axis in self.axes:
            count = len(self.plan.table.axes[axis])
            if count < 3 and claim.test not in RANKED and (axis == SEED or claim.metric != FACT):
                self.untestable = f"{count} of three or more values of {axis}: {ADD_SEEDS}"
            values = set()
            for cell in self.all_cells:
                values |= {str(item.at.get(axis)) for item in cell.items}
                for how, axes in cell.reduce:
                    if axis in axes and how != "mean":
                        raise claim.refuse(
                            f"over names {axis}, but row {cell.row!r} takes the {how} over it."
                            f" Remove {axis}."
                        )
            if len(values) == 1 and count > 1:
                raise claim.refuse(
                    f"over names {axis}, but its cells have one value. Remove {axis}."
                )


def trainings_of(plan: TablePlan, model: str) -> Trainings:
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


def candidate_trainings(plan: TablePlan, item: Item) -> set[Trainings]:
    """Return the trainings of each candidate that an item is chosen from."""
    trainings = set()
    for reading in item.readings:
        for score in reading.values():
            for model in candidate_models(plan, score.model):
                trainings.add(trainings_of(plan, model))
    return trainings


def trainings_chosen_of(plan: TablePlan, cells: Iterable[Cell]) -> set[frozenset[Trainings]]:
    """Return the trainings of each candidate where cells take the best of different trainings."""
    groups: set[frozenset[Trainings]] = set()
    for cell in cells:
        of_items = [frozenset(candidate_trainings(plan, item)) for item in cell.items]
        for of_item, item in zip(of_items, cell.items, strict=True):
            if item.choice:
                groups.add(of_item)
        if any(how != "mean" for how, _ in cell.reduce):
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

    def values_of(axis: re.Match[str]) -> str:
        values = [re.escape(str(value)) for value in plan.table.axes.get(axis[1], ())]
        return f"(?:{'|'.join(values) or '.+'})"

    pattern = re.sub(r"\\{(\w+)\\}", values_of, re.escape(name))
    return [side for side in across if re.fullmatch(pattern, side)]


def check_claims(planning: Planning) -> None:
    """Raise PipelineError for claims with names that their table does not have.

    This happens before anything runs. A file that has the name of a shipped table and fewer rows is
    not checked.
    """
    name = planning.plan.table.name
    if planning.config.table == name or name not in conf.options(conf.TABLES):
        for claim in claims_of(name):
            PlacedClaim.of(claim, planning.plan)
