"""95 % intervals of a table's cells: problems drawn anew, and what was made of their scores made again in each draw.

A draw of problem ids serves all languages, seeds and models that were asked the same problems, and a choice (`best`) is
made again in each draw; what a cell is reduced over besides (seeds, experts) is taken as it is.

A formula is plain data: {items: [{at, readings: [{candidate: leaf}], choice}], reduce: [[how, axes]]}, or {of: [rows],
reduce}. A candidate is a string, "" where nothing is chosen; a leaf is a list of [evaluation, task, language or pair],
of which the mean counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.report.answers import Answers, Place
from pipeline.report.contents import Results, TableCell
from pipeline.report.statistics import LEVEL, resampled_means

if TYPE_CHECKING:
    import numpy as np

DRAWS = 1_000
Leaf = Sequence[Sequence[str]]
Drawn = Mapping[Place, "np.ndarray"]  # (DRAWS,) means, in percent


def leaves(results: Results) -> set[Place]:
    """All answers that the formulas read."""
    found = {place for one in results.table_cells for item in one.formula.get("items", ()) for place in places(item)}
    return found | {
        (run, task, where)
        for choice in results.choices.values()
        for candidate in choice["candidates"]
        for leaf in candidate.get("leaves", ())
        for run, task, where in leaf
    }


def places(item: Mapping[str, Any]) -> list[Place]:
    return [tuple(one) for reading in item["readings"] for leaf in reading.values() for one in leaf]


def with_intervals(results: Results, answers: Mapping[Place, Answers]) -> list[TableCell]:
    """The table's cells, with an interval where every answer that they are made of is there."""
    if not any(one.formula for one in results.table_cells):
        return list(results.table_cells)
    drawn = draw(answers)
    cells = {(one.row, one.column): one for one in results.table_cells}
    chosen = {key: best(choice, drawn) for key, choice in results.choices.items()}
    return [bounded(one, cells, drawn, chosen) for one in results.table_cells]


def draw(answers: Mapping[Place, Answers]) -> dict[Place, np.ndarray]:
    import numpy as np

    by_size: dict[int, list[Place]] = {}
    for place, one in answers.items():
        if len(one.scores) == one.n and one.n > 1 and place[1] != "flores":  # chrF++ of a set is no mean
            by_size.setdefault(one.n, []).append(place)
    found: dict[Place, np.ndarray] = {}
    for same in by_size.values():
        scores = np.array([list(answers[place].scores.values()) for place in same])
        found |= dict(zip(same, 100 * resampled_means(scores, DRAWS).T, strict=True))
    return found


def best(choice: Mapping[str, Any], drawn: Drawn) -> tuple[list[str], np.ndarray] | None:
    """The candidates of a choice, and which one wins in each draw; None where answers are missing."""
    import numpy as np

    candidates = choice["candidates"]
    try:
        means = [np.mean([leaf_of(leaf, drawn) for leaf in one["leaves"]], axis=0) for one in candidates]
    except KeyError:
        return None
    return [one["key"] for one in candidates], np.argmax(means, axis=0)


def leaf_of(leaf: Leaf, drawn: Drawn) -> np.ndarray:
    import numpy as np

    return np.mean([drawn[run, task, where] for run, task, where in leaf], axis=0)


def bounded(
    one: TableCell, cells: Mapping[tuple[str, str], TableCell], drawn: Drawn, chosen: Mapping[str, Any]
) -> TableCell:
    import numpy as np

    if one.value is None or not one.formula:
        return one
    try:
        values = evaluated(one, cells, drawn, chosen)
    except (KeyError, TypeError):  # an answer, or a choice, that is not there
        return one
    low, high = np.quantile(values, [LEVEL / 2, 1 - LEVEL / 2])
    return replace(one, low=float(low), high=float(high))


def evaluated(
    one: TableCell, cells: Mapping[tuple[str, str], TableCell], drawn: Drawn, chosen: Mapping[str, Any]
) -> np.ndarray:
    """(DRAWS,) of a cell. Raises KeyError where an answer that it is made of is missing."""
    import numpy as np

    reducers: dict[str, Any] = {"mean": np.mean, "max": np.max, "min": np.min}
    if of := one.formula.get("of"):
        parts = [evaluated(cells[row, one.column], cells, drawn, chosen) for row in of]
        return reducers[one.formula["reduce"][0][0]](parts, axis=0)
    left = [(item["at"], item_of(item, drawn, chosen)) for item in one.formula["items"]]
    for how, axes in one.formula["reduce"]:
        groups: dict[str, tuple[dict[str, Any], list[np.ndarray]]] = {}
        for at, values in left:
            rest = {axis: value for axis, value in at.items() if axis not in axes}
            groups.setdefault(json.dumps(rest, sort_keys=True), (rest, []))[1].append(values)
        left = [(rest, reducers[how](values, axis=0)) for rest, values in groups.values()]
    ((_, values),) = left
    return values


def item_of(item: Mapping[str, Any], drawn: Drawn, chosen: Mapping[str, Any]) -> np.ndarray:
    """The mean over the readings of what is chosen in each draw."""
    import numpy as np

    found = []
    for reading in item["readings"]:
        if "" in reading:
            found.append(leaf_of(reading[""], drawn))
            continue
        keys, winners = chosen[item["choice"]]
        candidates = np.array([leaf_of(reading[key], drawn) for key in keys])
        found.append(candidates[winners, np.arange(len(winners))])
    return np.mean(found, axis=0)
