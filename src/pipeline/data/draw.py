"""The draw: which rows of the sources train and validate, by shares and the seed."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import TypeVar

from pipeline.config.stages import DataStage
from pipeline.errors import PipelineError
from pipeline.progress import say

Row = TypeVar("Row", bound=Hashable)  # each row is given once


def draw_rows(config: DataStage, usable: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Draw the rows of train and of validation, by the seed.

    They come from one pool if no source has a share. Without data.shuffle both keep the order of
    the sources.

    Raises: PipelineError: too few rows.
    """
    has_quotas = any(source.share for source in config.expert.sources.values())
    drawn = (draw_by_quotas if has_quotas else draw_from_one_pool)(config, usable)
    if config.data.shuffle:
        return drawn
    places = {
        row: place for place, row in enumerate(row for rows in usable.values() for row in rows)
    }
    return {name: sorted(rows, key=places.__getitem__) for name, rows in drawn.items()}


def draw_from_one_pool(config: DataStage, usable: dict[str, list[Row]]) -> dict[str, list[Row]]:
    data, size = config.data, config.data.size or config.expert.size
    pool = []
    for rows in usable.values():
        for row in rows:
            pool.append(row)
    needed_rows = (size or 1) + data.validation
    if len(pool) < needed_rows and not data.allow_fewer:
        raise PipelineError(
            f"data.size={size} and data.validation={data.validation} ask for {needed_rows} rows,"
            f" expert={config.expert.name} has {len(pool)}: ask for fewer, or take those with"
            " data.allow_fewer=true"
        )
    random.Random(config.seed).shuffle(pool)
    return {"train": pool[data.validation :][:size], "validation": pool[: data.validation]}


def draw_by_quotas(config: DataStage, usable: dict[str, list[Row]]) -> dict[str, list[Row]]:
    data, seed = config.data, config.seed
    parts = source_quotas(config, {name: len(rows) for name, rows in usable.items()})
    drawn: list[Row] = []
    for name, rows in usable.items():
        drawn += random.Random(f"{seed} {name}").sample(rows, parts[name])
    random.Random(f"{seed} 0").shuffle(drawn)
    train = drawn[data.validation :]
    random.Random(seed).shuffle(train)
    return {"train": train, "validation": drawn[: data.validation]}


def source_quotas(config: DataStage, available: dict[str, int]) -> dict[str, int]:
    """Rows to take of each source, training and validation together: a source without a share gives
    all it has, and the shares divide what is left of the size.

    Raises:
        PipelineError: shares without a size, a size that is reached before the shares, or a source
            with too few rows.
    """
    sources, data = config.expert.sources, config.data
    size = data.size or config.expert.size
    quota = {}
    for name, source in sources.items():
        if source.share is None:
            quota[name] = available[name]
    shares = {}
    for name, source in sources.items():
        if source.share is not None:
            shares[name] = source.share
    if size is None:
        raise PipelineError(
            f"expert={config.expert.name} has shares ({', '.join(shares)}) of no size: give"
            " data.size, or mixture=layer_swapping"
        )
    total, fixed = size + data.validation, sum(quota.values())
    if total < fixed:
        raise PipelineError(
            f"data.size={size}: the sources without a share ({', '.join(quota)}) give {fixed} rows,"
            f" more than {total}; raise the size or give expert.sources.{next(iter(quota))}.share"
        )
    quota |= apportion(total - fixed, shares)
    short = []
    for name, want in quota.items():
        if want > available[name]:
            short.append(f"{name} has {available[name]} rows of {want} asked")
    if short and not data.allow_fewer:
        raise PipelineError(
            f"expert={config.expert.name}: {'; '.join(short)}: ask for fewer, or take those with"
            " data.allow_fewer=true"
        )
    for message in short:
        say(f"expert={config.expert.name}: {message}; taken as they are (data.allow_fewer)")
    return {name: min(want, available[name]) for name, want in quota.items()}


def apportion(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Whole rows by shares; the largest remainders get what rounding down leaves."""
    exact = {name: total * share / sum(shares.values()) for name, share in shares.items()}
    rows = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: rows[name] - exact[name])[
        : total - sum(rows.values())
    ]:
        rows[name] += 1
    return rows
