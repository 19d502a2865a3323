"""The draw of the rows for training and validation, by shares and the seed."""

from __future__ import annotations

import random
from collections.abc import Hashable
from itertools import chain
from typing import TypeVar

from pipeline.config.stages import DataStage
from pipeline.errors import PipelineError
from pipeline.progress import say

Row = TypeVar("Row", bound=Hashable)  # rows are distinct


def draw_rows(config: DataStage, usable: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Draw the rows for training and validation by the seed.

    If no source has a share, they come from one pool. Without data.shuffle both keep the order of
    the sources.

    Raises:
        PipelineError: There are too few rows.
    """
    has_quotas = any(source.share for source in config.expert.sources.values())
    draw = draw_by_quotas if has_quotas else draw_from_one_pool
    drawn = draw(config, usable)
    if config.data.shuffle:
        return drawn
    in_order = chain.from_iterable(usable.values())
    places = {row: place for place, row in enumerate(in_order)}
    return {name: sorted(rows, key=places.__getitem__) for name, rows in drawn.items()}


def draw_from_one_pool(config: DataStage, usable: dict[str, list[Row]]) -> dict[str, list[Row]]:
    data, size = config.data, config.data.size or config.expert.size
    pool = list(chain.from_iterable(usable.values()))
    available, needed = len(pool), (size or 1) + data.validation
    if available < needed and not data.allow_fewer:
        raise PipelineError(
            f"data.size={size} and data.validation={data.validation} need {needed} rows, but"
            f" expert={config.expert.name} has {available}. Lower them, or set"
            " data.allow_fewer=true."
        )
    random.Random(config.seed).shuffle(pool)
    validation, train = pool[: data.validation], pool[data.validation :]
    return {"train": train[:size], "validation": validation}


def draw_by_quotas(config: DataStage, usable: dict[str, list[Row]]) -> dict[str, list[Row]]:
    data, seed = config.data, config.seed
    parts = source_quotas(config, {name: len(rows) for name, rows in usable.items()})
    drawn: list[Row] = []
    for name, rows in usable.items():
        generator = random.Random(f"{seed} {name}")
        drawn += generator.sample(rows, parts[name])
    random.Random(f"{seed} 0").shuffle(drawn)
    train = drawn[data.validation :]
    random.Random(seed).shuffle(train)
    return {"train": train, "validation": drawn[: data.validation]}


def source_quotas(config: DataStage, available: dict[str, int]) -> dict[str, int]:
    """Return how many rows to take from each source, for training and validation together.

    A source without a share gives all its rows. The shares divide the remaining size.

    Raises:
        PipelineError: There are shares without a size, the sources without a share exceed the size,
            or a source has too few rows.
    """
    sources, data, expert = config.expert.sources, config.data, config.expert.name
    size = data.size or config.expert.size
    quota, shares = {}, {}
    for name, source in sources.items():
        if source.share is None:
            quota[name] = available[name]
        else:
            shares[name] = source.share
    if size is None:
        raise PipelineError(
            f"expert={expert} has shares ({', '.join(shares)}), but no size. Set data.size, or"
            " mixture=layer_swapping."
        )
    total, fixed = size + data.validation, sum(quota.values())
    if total < fixed:
        raise PipelineError(
            f"data.size={size}: the sources without a share ({', '.join(quota)}) give {fixed} rows,"
            f" more than {total}. Raise data.size, or set expert.sources.{next(iter(quota))}.share."
        )
    quota |= apportion(total - fixed, shares)
    short = []
    for name, want in quota.items():
        has = available[name]
        if want > has:
            short.append(f"source {name} has {has} of {want} rows")
    if short and not data.allow_fewer:
        raise PipelineError(
            f"expert={expert}: {'; '.join(short)}. Lower data.size, or set data.allow_fewer=true."
        )
    for message in short:
        say(f"expert={expert}: {message}; all of them are used (data.allow_fewer)")
    return {name: min(want, available[name]) for name, want in quota.items()}


def apportion(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Divide rows by shares; the largest remainders get the rows that rounding down leaves."""
    whole = sum(shares.values())
    rows, remainders = {}, {}
    for name, share in shares.items():
        exact = total * share / whole
        rows[name] = int(exact)
        remainders[name] = exact - rows[name]
    left = total - sum(rows.values())
    for name in sorted(remainders, key=lambda name: -remainders[name])[:left]:
        rows[name] += 1
    return rows
