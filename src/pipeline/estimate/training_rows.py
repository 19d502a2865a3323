"""The rows of a training before it starts: their lengths in a sample, and the truncated rows."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.data import Source
from pipeline.config.stages import TrainStage
from pipeline.config.training import Sft
from pipeline.data.load import example_of
from pipeline.data.rows import read_jsonl
from pipeline.data.sources import Example, is_wanted, source_columns
from pipeline.errors import PipelineError
from pipeline.estimate.flops import token_counts
from pipeline.estimate.models import Training, tokenizer_of
from pipeline.models.load import load_tokenizer, with_end_token, with_template_variables
from pipeline.progress import recorded_warnings
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Parent, Run, parent_runs
from pipeline.stages.lengths import (
    READABLE,
    SAMPLE,
    is_here,
    padded_length,
    read_rows,
    sampled_lengths,
)
from pipeline.stages.steps import rows_of_sets, training_steps
from pipeline.train.examples import check_rows, cut_words, side_without_loss
from pipeline.train.memory import micro_batches
from pipeline.train.steps import steps_of

ROWS = "train.jsonl"  # the training rows of a data run
COUNTED = 10_000  # the most rows of a file that a plan checks for truncation
WORLD_ROW = 50  # tokens of a row of the small world
# assumed: the standard deviation of the logarithm of a row's length; OrcaMath's is 0.5, GSM8K's 0.4
SPREAD = 0.5
# by the facts that decide it, because a plan and each round of a table count again
_counted: dict[Hashable, Cut] = {}


def row_lengths(run: Training, rows: int = SAMPLE) -> tuple[float, ...]:
    """Return the sorted tokens of a sample of a training's rows, or () if no file is on this disk.

    The rows are in the data run's file, or in the files that it will read.
    """
    data = run.parents["data"]
    tokenizer = tokenizer_of(run)
    files = [data.folder / ROWS]
    if not files[0].is_file():
        files = list(filter(Path.is_file, (file for _, _, file in source_files(data))))
    lengths: list[float] = []
    for file in files:
        lengths += sampled_lengths(file, (), tokenizer, rows)
    return tuple(sorted(lengths))


class Cut(NamedTuple):
    """How many rows of a set sft.seq_length truncates, or why the set cannot be trained on.

    Attributes:
        sentence: The truncated rows, as a sentence.
        problem: Why the rows cannot be trained on.
        certain: Whether the training is certain to have these rows.
    """

    sentence: str = ""
    problem: str = ""
    certain: bool = False


def cut_sets(runs: Sequence[Run]) -> list[tuple[Training, Cut]]:
    """Return the first training of each set of rows that is not packed, with its truncated rows."""
    first: dict[Hashable, Training] = {}
    for run in runs:
        if not isinstance(run.config, TrainStage) or run.config.sft.packing:
            continue
        sft = run.config.sft
        data = run.parents["data"]
        is_here = (data.folder / ROWS).is_file()
        how = (sft.seq_length, sft.template, sft.loss_on, sft.separator, sft.eos_token)
        kind = (data.hash, is_here, tokenizer_of(run), *how)
        first.setdefault(kind, run)
        if kind not in _counted:
            _counted[kind] = count_cut(run)
    return [(run, _counted[kind]) for kind, run in first.items()]


def cut_lines(runs: Sequence[Run]) -> list[str]:
    """Return a line for each set of rows that has truncated rows or may not be trainable."""
    lines = []
    for run, cut in cut_sets(runs):
        text = cut.sentence or cut.problem
        if text and not cut.certain:
            lines.append(f"{run.name}: {text}")
    return lines


def row_problems(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each set of rows that cannot be trained on, or is too small."""
    problems = []
    for run, cut in cut_sets(runs):
        if cut.certain:
            problems.append(f"{run.name}: {cut.problem}")
    for run in runs:
        if not isinstance(run.config, TrainStage) or run.config.sft.packing:
            continue
        data = run.parents["data"]
        if not isinstance(data, Run):
            continue
        try:
            counts = rows_of_sets(run.config.sft, data, expected=True)
            if counts:
                steps_of(run.config.sft, counts)
        except PipelineError as error:
            problems.append(f"{run.name}: {error}")
    return problems


def count_cut(run: Training) -> Cut:
    """Count the rows that sft.seq_length truncates.

    The rows are tokenized as in training. Without the model's tokenizer, the count is estimated
    from the text of the first rows.
    """
    sft = run.config.sft
    data = run.parents["data"]
    tokenizer = tokenizer_of(run)
    rows, all_rows = known_rows(run)
    if not tokenizer:
        lengths = row_lengths(run, COUNTED)
        cut = sum(length > sft.seq_length for length in lengths)
        return Cut(cut_words(sft, cut, 0, f"the first {len(lengths):,} rows of {data.name}"))
    if not rows or _are_short(rows, sft):
        return Cut()  # without importing transformers
    try:
        loaded = with_end_token(load_tokenizer(tokenizer.parent), sft.eos_token)
    except PipelineError as error:
        return Cut("", str(error), True)
    if sft.template == "chat":
        loaded = with_template_variables(loaded, sft.template_date, sft.chat_template_args)
    base = run.parents["model"].folder if "model" in run.parents else None
    file = f"the files of {data.name}"
    counted = f"the first {len(rows):,} rows of {data.name}"
    is_here = (data.folder / ROWS).is_file()
    if is_here:
        file = ROWS
        counted = f"{len(rows):,} rows of {data.name}"
    try:
        with recorded_warnings() as told:
            cut, lost = check_rows(rows, loaded, sft, base, file)
    except PipelineError as error:
        takes_some = not is_here and (run.config.data.size or run.config.expert.size)
        return Cut("", str(error), all_rows and not takes_some)
    problem = side_without_loss(rows, lost, sft)
    if problem:
        return Cut("", problem, all_rows)
    sentence = cut_words(sft, cut, len(lost), counted)
    return Cut("; ".join(filter(None, [*told, sentence])))


def _are_short(rows: Sequence[Example], sft: Sft) -> bool:
    """Return True if no row can exceed sft.seq_length, because a token has at least one byte."""
    if sft.template != "plain" or any("messages" in row for row in rows):
        return False
    return all(len(json.dumps(row)) <= sft.seq_length for row in rows)


def known_rows(run: Training) -> tuple[list[Example], bool]:
    """Return the known rows of a training, and whether they are all.

    They are the rows of its finished data run, otherwise the first rows of each file that the data
    run will read.
    """
    data = run.parents["data"]
    if (data.folder / ROWS).is_file():
        return read_jsonl(data.folder / ROWS), True
    rows: list[Example] = []
    all_read = True
    for name, source, file in chain.from_iterable(map(source_files, behind_data(run))):
        # the data run reports the problems of a file
        with suppress(PipelineError, KeyError, OSError):
            columns = source_columns(name, source)
            first = first_rows(file, file.stat().st_mtime_ns)
            all_read &= len(first) < COUNTED
            examples = []
            for row in first:
                if is_wanted(row, source):
                    examples.append(example_of(row, source, columns))
            rows += [example for example in examples if isinstance(example, dict)]
    return rows, all_read


@lru_cache(maxsize=16)
def first_rows(file: Path, changed: int) -> list[dict[str, Any]]:
    """Return the rows of a file that a plan reads.

    The result is cached until the file changes. Raises PipelineError like the data run.
    """
    return list(islice(read_rows(file), COUNTED))


def source_files(data: Parent, readable: bool = True) -> list[tuple[str, Source, Path]]:
    """Return (name, source, file) of a data run, if all its files are local or below data_root.

    Args:
        data: The data run.
        readable: Return only files whose rows a plan can read.
    """
    if not isinstance(data, Run):
        return []
    files = []
    root = data.parents.get("data_root")
    for name, source in data.config.expert.sources.items():
        if is_here(source):
            file = Path(source.url or "")
        elif root is not None and root.folder.is_dir():
            file = root.folder / source.file
        else:
            return []
        if not readable or file.suffix in READABLE:
            files.append((name, source, file))
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
    if any(source.config.expert.world for source in behind_data(run)):
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


def behind_data(run: Run) -> list[Run]:
    """Return the data runs that a training's rows come from."""
    return order_runs(parent_runs({"data": run.parents["data"]}))
