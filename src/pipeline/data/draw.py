"""The draw: which rows of the sources train and validate, by counts, shares and the seed."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping

from pipeline.config.stages import DataStage
from pipeline.errors import PipelineError


def check_halves(config: DataStage) -> None:
    """Raise a PipelineError for validation rows of a joint set that cannot be halved."""
    validation = config.data.validation
    if joint(config) and validation % 2:
        raise PipelineError(
            f"data.validation={validation} must be even: half of each side of expert={config.expert.name}; "
            f"give {validation + 1}"
        )


def joint(config: DataStage) -> bool:
    """Whether the sources are of both sides."""
    return {source.side for source in config.expert.sources.values()} == {"math", "language"}


# ---------------------------------------------------------------------------------------------------- the draw


def draw(config: DataStage, kept: dict[str, list[int]]) -> dict[str, list[int]]:
    """The rows of train and of validation, drawn by the seed.

    Without counts and shares all rows are one pool; with them and a size each side of a joint set gives half of the
    rows. Validation rows of a joint set are half of each side in any case.

    Raises:
        PipelineError: too few rows, of all or of a side.
    """
    counted = any(source.count or source.share for source in config.expert.sources.values())
    return draw_by_quotas(config, kept) if counted else draw_from_one_pool(config, kept)


def draw_from_one_pool(config: DataStage, kept: dict[str, list[int]]) -> dict[str, list[int]]:
    data, sources = config.data, config.expert.sources
    size = data.size or config.expert.size
    pool = [row for rows in kept.values() for row in rows]
    wanted = (size or 1) + data.validation
    if len(pool) < wanted and not data.allow_fewer:
        raise PipelineError(
            f"data.size={size} and data.validation={data.validation} ask for {wanted} rows, "
            f"expert={config.expert.name} has {len(pool)}: ask for fewer, or take those with data.allow_fewer=true"
        )
    if data.shuffle:
        random.Random(config.seed).shuffle(pool)
    if not (data.validation and joint(config)):
        return {"train": pool[data.validation :][:size], "validation": pool[: data.validation]}
    side_of = {row: sources[name].side for name, rows in kept.items() for row in rows}
    names = dict.fromkeys(source.side for source in sources.values())
    both = {side: [row for row in pool if side_of[row] == side] for side in names}
    refuse_short_sides(config, both)
    apart = {row for rows in both.values() for row in rows[: data.validation // 2]}
    train = [row for row in pool if row not in apart]
    return {"train": train[:size], "validation": [row for row in pool if row in apart]}


def draw_by_quotas(config: DataStage, kept: dict[str, list[int]]) -> dict[str, list[int]]:
    data, sources, seed = config.data, config.expert.sources, config.seed
    parts = quotas(config, {name: len(rows) for name, rows in kept.items()})
    sides: dict[str | None, list[int]] = {}
    for name, rows in kept.items():
        drawn = random.Random(f"{seed} {name}").sample(rows, parts[name])
        sides.setdefault(sources[name].side, []).extend(drawn if data.shuffle else sorted(drawn))
    if joint(config):
        refuse_short_sides(config, sides)
    train, validation = [], []
    for index, rows in enumerate(sides.values()):
        if data.shuffle:
            random.Random(f"{seed} {index}").shuffle(rows)
        share = halves(data.validation, len(sides))[index]
        validation += rows[:share]
        train += rows[share:]
    if data.shuffle:
        random.Random(seed).shuffle(train)
    return {"train": train, "validation": validation}


def refuse_short_sides(config: DataStage, sides: Mapping[str | None, list[int]]) -> None:
    validation = config.data.validation
    for side, rows in sides.items():
        if validation and len(rows) <= validation // 2:  # nothing would be left to train on
            raise PipelineError(
                f"data.validation={validation} takes {validation // 2} rows of each side, and side {side} of "
                f"expert={config.expert.name} has {len(rows)}: ask for fewer"
            )


def halves(total: int, parts: int) -> list[int]:
    """`total` in as equal parts as whole numbers allow."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def quotas(config: DataStage, there: dict[str, int]) -> dict[str, int]:
    """Rows to take of each source, training and validation together.

    `count` is taken as it is, a source with neither count nor share gives all it has, and the shares divide what is
    left of the size, which in a joint set is halved between the sides first.

    Raises:
        PipelineError: shares without a size, a size that is reached before the shares, or a source with too few rows.
    """
    sources, data = config.expert.sources, config.data
    size = data.size or config.expert.size
    sides = list(dict.fromkeys(source.side for source in sources.values()))
    budgets = halves(size + data.validation, len(sides)) if size else [None] * len(sides)
    asked: dict[str, int] = {}
    for side, budget in zip(sides, budgets, strict=True):
        names = [name for name, source in sources.items() if source.side == side]
        fixed = {name: sources[name].count or there[name] for name in names if sources[name].share is None}
        shares = {name: sources[name].share or 0.0 for name in names if name not in fixed}
        asked |= fixed
        left = (budget or 0) - sum(fixed.values())
        if shares and budget is None:
            raise PipelineError(
                f"expert={config.expert.name} has shares ({', '.join(shares)}) of no size: give data.size, "
                "or mixture=layer_swapping"
            )
        if budget is not None and left < 0:
            raise PipelineError(
                f"data.size={size}: the sources without a share ({', '.join(fixed)}) give {sum(fixed.values())} rows, "
                f"more than {budget}; raise the size or give expert.sources.{next(iter(fixed))}.share"
            )
        if budget is not None and not shares and left > 0 and not data.allow_fewer:
            raise PipelineError(
                f"data.size={size} and data.validation={data.validation} ask for {budget} rows of "
                f"{', '.join(names)}, which give {budget - left}: ask for fewer, or take those with "
                "data.allow_fewer=true"
            )
        asked |= apportioned(left, shares)
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
