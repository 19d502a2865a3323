"""Drawn axes: subsets of a pool of runs.

They are for studies of merge methods over many combinations of experts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.errors import PipelineError, suggest
from pipeline.tables.words import as_list

KEYS = ("of", "size", "draws", "seed")
FEW = 10_000  # up to this number, all subsets are listed before some are drawn
Refuse = Callable[[str], PipelineError]


def is_drawn(values: Any) -> bool:
    """Return True if an axis is written as a draw.

    A draw is {of: [...], size: ..., draws: ..., seed: ...}.
    """
    return isinstance(values, Mapping) and isinstance(values.get("of"), list)


def draw_subsets(draw: Mapping[str, Any], refuse: Refuse) -> dict[str, list[str]]:
    """Return label -> members of drawn subsets. A label joins the names of the members with `+`.

    `draws` different subsets of each size are drawn. Without it, all subsets of each size are used.

    Raises:
        PipelineError: For an unknown key, a repeated member, or a size or a number of draws that
            the pool does not have.
    """
    for key in draw:
        if key not in KEYS:
            raise refuse(f"unknown word {key}: {suggest(key, KEYS)}")
    pool = list(map(str, draw["of"]))
    for member in pool:
        if pool.count(member) > 1:
            raise refuse(f"of names {member} twice. Name each member once.")
    sizes = as_list(draw.get("size", len(pool)))
    for size in sizes:
        if type(size) is not int or not 1 <= size <= len(pool):
            raise refuse(
                f"size={size} cannot be drawn from {len(pool)} members. Give 1 to {len(pool)}."
            )
    subsets: dict[str, list[str]] = {}
    for size in sizes:
        for members in draw_of_size(pool, size, draw, refuse):
            subsets["+".join(members)] = members
    return subsets


def draw_of_size(
    pool: list[str], size: int, draw: Mapping[str, Any], refuse: Refuse
) -> list[list[str]]:
    """Return different subsets of one size, each in the order of the pool."""
    possible = math.comb(len(pool), size)
    draws = draw.get("draws")
    if draws is None:
        draws = possible
    if type(draws) is not int or not 1 <= draws <= possible:
        raise refuse(
            f"draws={draws}: {len(pool)} members have {possible:,} subsets of size {size}. Give 1"
            f" to {possible:,} draws."
        )
    generator = random.Random(f"{draw.get('seed', 0)} {size}")
    if possible <= FEW:
        every = [list(members) for members in itertools.combinations(pool, size)]
        if draws == possible:
            return every
        return generator.sample(every, draws)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < draws:
        drawn[tuple(sorted(generator.sample(range(len(pool)), size)))] = None
    return [[pool[place] for place in places] for places in drawn]
