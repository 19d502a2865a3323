"""The draw: which rows of the sources train and validate, by counts, shares and the seed."""

from __future__ import annotations

import random
import sys

from pipeline.config.stages import DataStage
from pipeline.errors import PipelineError


def draw(config: DataStage, kept: dict[str, list[int]]) -> dict[str, list[int]]:
    """The rows of train and of validation, drawn by the seed: from one pool where no source has a count or a share.

    Raises:
        PipelineError: too few rows.
    """
    counted = any(source.count or source.share for source in config.expert.sources.values())
    return draw_by_quotas(config, kept) if counted else draw_from_one_pool(config, kept)


def draw_from_one_pool(config: DataStage, kept: dict[str, list[int]]) -> dict[str, list[int]]:
    data, size = config.data, config.data.size or config.expert.size
    pool = [row for rows in kept.values() for row in rows]
    wanted = (size or 1) + data.validation
    if len(pool) < wanted and not data.allow_fewer:
        raise PipelineError(
            f"data.size={size} and data.validation={data.validation} ask for {wanted} rows, "
            f"expert={config.expert.name} has {len(pool)}: ask for fewer, or take those with data.allow_fewer=true"
        )
    if data.shuffle:
        random.Random(config.seed).shuffle(pool)
    return {"train": pool[data.validation :][:size], "validation": pool[: data.validation]}


def draw_by_quotas(config: DataStage, kept: dict[str, list[int]]) -> dict[str, list[int]]:
    data, seed = config.data, config.seed
    parts = quotas(config, {name: len(rows) for name, rows in kept.items()})
    drawn: list[int] = []
    for name, rows in kept.items():
        sample = random.Random(f"{seed} {name}").sample(rows, parts[name])
        drawn += sample if data.shuffle else sorted(sample)
    if data.shuffle:
        random.Random(f"{seed} 0").shuffle(drawn)
    train = drawn[data.validation :]
    if data.shuffle:
        random.Random(seed).shuffle(train)
    return {"train": train, "validation": drawn[: data.validation]}


def quotas(config: DataStage, there: dict[str, int]) -> dict[str, int]:
    """Rows to take of each source, training and validation together.

    `count` is taken as it is, a source with neither count nor share gives all it has, and the shares divide what is
    left of the size.

    Raises:
        PipelineError: shares without a size, a size that is reached before the shares, or a source with too few rows.
    """
    sources, data = config.expert.sources, config.data
    size = data.size or config.expert.size
    asked = {name: source.count or there[name] for name, source in sources.items() if source.share is None}
    shares = {name: source.share for name, source in sources.items() if source.share is not None}
    if shares and size is None:
        raise PipelineError(
            f"expert={config.expert.name} has shares ({', '.join(shares)}) of no size: give data.size, "
            "or mixture=layer_swapping"
        )
    wanted, fixed = (size or 0) + data.validation, sum(asked.values())
    if size is not None and wanted < fixed:
        raise PipelineError(
            f"data.size={size}: the sources without a share ({', '.join(asked)}) give {fixed} rows, "
            f"more than {wanted}; raise the size or give expert.sources.{next(iter(asked))}.share"
        )
    if size is not None and not shares and wanted > fixed and not data.allow_fewer:
        raise PipelineError(
            f"data.size={size} and data.validation={data.validation} ask for {wanted} rows of "
            f"{', '.join(sources)}, which give {fixed}: ask for fewer, or take those with data.allow_fewer=true"
        )
    asked |= apportioned(wanted - fixed, shares)
    short = [f"{name} has {there[name]} rows of {want} asked" for name, want in asked.items() if want > there[name]]
    if short and not data.allow_fewer:
        raise PipelineError(
            f"expert={config.expert.name}: {'; '.join(short)}: ask for fewer, or take those with data.allow_fewer=true"
        )
    for told in short:
        print(f"expert={config.expert.name}: {told}; taken as they are (data.allow_fewer)", file=sys.stderr)
    return {name: min(want, there[name]) for name, want in asked.items()}


def apportioned(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Whole rows by shares; the largest remainders get what rounding down leaves."""
    exact = {name: total * share / sum(shares.values()) for name, share in shares.items()}
    whole = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[: total - sum(whole.values())]:
        whole[name] += 1
    return whole
