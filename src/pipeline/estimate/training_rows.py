"""The rows of a training before it starts: their lengths in a sample, and the truncated rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.estimate.flops import token_counts
from pipeline.estimate.models import Training, tokenizer_of
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Parent, Run, parent_runs
from pipeline.stages.lengths import (
    READABLE,
    is_here,
    padded_length,
    sampled_lengths,
)
from pipeline.stages.steps import training_steps
from pipeline.train.memory import micro_batches

ROWS = "train.jsonl"  # the training rows of a data run
WORLD_ROW = 50  # tokens of a row of the small world
# assumed: the standard deviation of the logarithm of a row's length; OrcaMath's is 0.5, GSM8K's 0.4
SPREAD = 0.5


def row_lengths(run: Training) -> tuple[float, ...]:
    """Return the sorted tokens of a sample of a training's rows, or () if no file is on this disk.

    The rows are in the data run's file, or in the files that it will read.
    """
    data = run.parents["data"]
    tokenizer = tokenizer_of(run)
    files = [data.folder / ROWS]
    if not files[0].is_file():
        files = list(filter(Path.is_file, source_files(data).values()))
    lengths: list[float] = []
    for file in files:
        lengths += sampled_lengths(file, tokenizer)
    return tuple(sorted(lengths))


def source_files(data: Parent) -> dict[str, Path]:
    """Return the file of each source of a data run, if all are local or below data_root.

    Only files whose rows a plan can read are returned.
    """
    if not isinstance(data, Run):
        return {}
    files = {}
    root = data.parents.get("data_root")
    for name, source in data.config.expert.sources.items():
        if is_here(source):
            file = Path(source.url or "")
        elif root is not None and root.folder.is_dir():
            file = root.folder / source.file
        else:
            return {}
        if file.suffix in READABLE:
            files[name] = file
    return files


def expected_steps(run: Training) -> int | None:
    """Return the optimizer steps of a training, or None if its rows are unknown.

    With packing, the steps follow from the tokens of the documents on this disk. Without documents,
    each of them is assumed to fill a row.
    """
    sft = run.config.sft
    steps = training_steps(run, expected=True)
    if steps is None or not sft.packing or sft.steps is not None:
        return steps
    documents = row_lengths(run)
    if not documents:
        return steps
    return max(1, round(steps * statistics.fmean(documents) / sft.seq_length))


def expected_size(run: Training) -> tuple[int | None, int | None, float | None]:
    """Return the rows, optimizer steps and tokens of a training, with None for unknown numbers."""
    steps = expected_steps(run)
    if steps is None:
        return None, None, None
    rows = steps * run.config.sft.batch_size
    with suppress(PipelineError):
        return rows, steps, rows * row_tokens(run)
    return rows, steps, None


def row_tokens(run: Training, side: str | None = None) -> float:
    """Return the mean tokens of a training's rows, truncated to sft.seq_length.

    They come from the rows on this disk, otherwise they are assumed. Packed rows are full.

    Args:
        run: The training.
        side: The side of a joint set. None: both.

    Raises:
        PipelineError: The rows are neither on this disk nor known.
    """
    sft = run.config.sft
    if sft.packing:
        return sft.seq_length
    lengths = row_lengths(run) or assumed_tokens(run, side)
    return statistics.fmean(min(length, sft.seq_length) for length in lengths)


def assumed_tokens(run: Training, side: str | None) -> Sequence[float]:
    """Return the mean tokens of each set that a training's rows come from.

    Raises:
        PipelineError: A set is unknown.
    """
    expert = run.config.expert
    data_runs = order_runs(parent_runs({"data": run.parents["data"]}))
    if any(source.config.expert.world for source in data_runs):
        return [WORLD_ROW]
    names = []
    for name, joined in expert.union.items():
        if side in (None, "both", joined.side):
            names.append(name)
    known = token_counts()["rows"]
    tokens = []
    for name in names or [expert.name]:
        if name not in known:
            raise PipelineError(
                f"The rows of expert={name} are not on this disk. Set data_root, or finish its data"
                " run first."
            )
        tokens.append(known[name])
    return tokens


def padded_row(run: Training, side: str | None = None) -> float:
    """Return the positions that a row takes in a step, with padding.

    Raises:
        PipelineError: The rows are neither on this disk nor known.
    """
    sft = run.config.sft
    mean = row_tokens(run, side)
    if sft.packing:
        return mean
    lengths = row_lengths(run) or assumed_lengths(mean)
    return padded_length(lengths, sft.batch_size, micro_batches(sft)[0], sft.seq_length)


@lru_cache(maxsize=64)
def assumed_lengths(mean: float) -> list[float]:
    """Return two hundred sorted lengths of rows with a lognormal distribution."""
    logarithm = statistics.NormalDist(-(SPREAD**2) / 2, SPREAD)
    shares = [(number + 0.5) / 200 for number in range(200)]
    return [mean * math.exp(logarithm.inv_cdf(share)) for share in shares]
