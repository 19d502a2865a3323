"""The rows of a training before it: their lengths, by a sample, and how many of them sft.seq_length
cuts.
"""

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

ROWS = "train.jsonl"  # of a data run
COUNTED = 10_000  # rows of a file, of which a plan counts those that will be cut
WORLD_ROW = 50  # tokens of a row of the small world
# assumed: the standard deviation of the logarithm of a row's length; OrcaMath's is 0.5, GSM8K's 0.4
SPREAD = 0.5
_counted: dict[
    Hashable, Cut
] = {}  # by what decides it: a plan, and each round of a table, ask again


def row_lengths(run: Training, rows: int = SAMPLE) -> tuple[float, ...]:
    """Tokens of a sample of a training's rows: of its data run's file, or of the files that this
    will read; () where neither is here.
    """
    data, tokenizer = run.parents["data"], tokenizer_of(run)
    own = data.folder / ROWS
    if own.is_file():
        files = [own]
    else:
        files = []
        for _, _, file in source_files(data):
            if file.is_file():
                files.append(file)
    return tuple(
        sorted(length for file in files for length in sampled_lengths(file, (), tokenizer, rows))
    )


class Cut(NamedTuple):
    """How many rows of a set sft.seq_length cuts, as a sentence; or why they cannot be trained on,
    and whether the training is certain to have them.
    """

    sentence: str = ""
    problem: str = ""
    certain: bool = False


def cut_sets(runs: Sequence[Run]) -> list[tuple[Training, Cut]]:
    """Return the first training of each set of rows that is not packed, with the rows that it
    cuts.
    """
    first: dict[Hashable, Training] = {}
    for run in runs:
        if isinstance(run.config, TrainStage) and not run.config.sft.packing:
            sft, data = run.config.sft, run.parents["data"]
            kind = (
                data.hash,
                (data.folder / ROWS).is_file(),
                tokenizer_of(run),
                sft.seq_length,
                sft.template,
                sft.loss_on,
                sft.separator,
                sft.eos_token,
            )
            first.setdefault(kind, run)
            if kind not in _counted:
                _counted[kind] = count_cut(run)
    return [(run, _counted[kind]) for kind, run in first.items()]


def cut_lines(runs: Sequence[Run]) -> list[str]:
    """One line for each set of rows of which sft.seq_length cuts some, or which perhaps cannot be
    trained on.
    """
    found = []
    for run, cut in cut_sets(runs):
        if not cut.certain:
            text = cut.sentence or cut.problem
            if text:
                found.append(f"{run.name}: {text}")
    return found


def row_problems(runs: Sequence[Run]) -> list[str]:
    """Why trainings cannot be trained on the rows that they are certain to have, a sentence for
    each set, or have fewer, at most, than their steps need.
    """
    problems = []
    for run, cut in cut_sets(runs):
        if cut.certain:
            problems.append(f"{run.name}: {cut.problem}")
    for run in runs:
        if (
            isinstance(run.config, TrainStage)
            and isinstance(run.parents["data"], Run)
            and not run.config.sft.packing
        ):
            try:
                counts = rows_of_sets(run.config.sft, run.parents["data"], expected=True)
                if counts:
                    steps_of(run.config.sft, counts)
            except PipelineError as error:
                problems.append(f"{run.name}: {error}")
    return problems


def count_cut(run: Training) -> Cut:
    """Count the rows that sft.seq_length cuts, as they will be tokenized; without the model's
    tokenizer, estimate the count from the text of the first rows.
    """
    sft, data, tokenizer, (rows, all_rows) = (
        run.config.sft,
        run.parents["data"],
        tokenizer_of(run),
        known_rows(run),
    )
    if not tokenizer:
        lengths = row_lengths(run, COUNTED)
        cut = sum(length > sft.seq_length for length in lengths)
        return Cut(cut_words(sft, cut, 0, f"the first {len(lengths):,} rows of {data.name}"))
    is_short = (
        sft.template == "plain"
        and max((len(json.dumps(row)) for row in rows), default=0) <= sft.seq_length
    )
    if not rows or (is_short and not any("messages" in row for row in rows)):
        return Cut()  # as a token has a byte or more; without importing transformers
    try:
        loaded = with_end_token(load_tokenizer(tokenizer.parent), sft.eos_token)
    except PipelineError as error:
        return Cut("", str(error), True)
    if sft.template == "chat":
        loaded = with_template_variables(loaded, sft.template_date, sft.chat_template_args)
    here = (data.folder / ROWS).is_file()
    base = None
    if "model" in run.parents:
        base = run.parents["model"].folder
    try:
        with recorded_warnings() as told:
            cut, lost = check_rows(
                rows, loaded, sft, base, ROWS if here else f"the files of {data.name}"
            )
    except PipelineError as error:
        takes_some = not here and (run.config.data.size or run.config.expert.size)
        return Cut("", str(error), all_rows and not takes_some)
    problem = side_without_loss(rows, lost, sft)
    if problem:
        return Cut("", problem, all_rows)
    sentence = cut_words(
        sft, cut, len(lost), f"{'' if here else 'the first '}{len(rows):,} rows of {data.name}"
    )
    return Cut("; ".join(filter(None, [*told, sentence])))


def known_rows(run: Training) -> tuple[list[Example], bool]:
    """(rows, whether there are no more) of a training: those of its finished data run, else the
    first of each file that this will read.
    """
    data = run.parents["data"]
    if (data.folder / ROWS).is_file():
        return read_jsonl(data.folder / ROWS), True
    rows: list[Example] = []
    all_read = True
    for name, source, file in chain.from_iterable(map(source_files, behind_data(run))):
        with suppress(
            PipelineError, KeyError, OSError
        ):  # what is wrong with a file the data run says
            columns = source_columns(name, source)
            first = first_rows(file, file.stat().st_mtime_ns)
            all_read &= len(first) < COUNTED
            readings = []
            for row in first:
                if is_wanted(row, source):
                    readings.append(example_of(row, source, columns))
            for reading in readings:
                if isinstance(reading, dict):
                    rows.append(reading)
    return rows, all_read


@lru_cache(maxsize=16)
def first_rows(file: Path, changed: int) -> list[dict[str, Any]]:
    """Return the rows of a file that a plan looks at.

    Reads the file once until it changes. Raises PipelineError as the data run does.
    """
    return list(islice(read_rows(file), COUNTED))


def source_files(data: Parent, readable: bool = True) -> list[tuple[str, Source, Path]]:
    """Return the files that a data run will read, if all are on this disk or below data_root.

    Args:
        readable: only files whose rows a plan can read.
    """
    if not isinstance(data, Run):
        return []
    files, root = [], data.parents.get("data_root")
    for name, source in data.config.expert.sources.items():
        if is_here(source):
            files.append((name, source, Path(source.url or "")))
        elif root is not None and root.folder.is_dir():
            files.append((name, source, root.folder / source.file))
        else:
            return []
    found = []
    for name, source, file in files:
        if not readable or file.suffix in READABLE:
            found.append((name, source, file))
    return found


def expected_steps(run: Training) -> int | None:
    """Optimizer steps of a training; None where its rows are not known.

    Packed, by the tokens of the documents that are here; others are taken to fill a row each.
    """
    sft, steps = run.config.sft, training_steps(run, expected=True)
    documents = row_lengths(run) if sft.packing and sft.steps is None else ()
    if steps is None or not documents:
        return steps
    return max(1, round(steps * statistics.fmean(documents) / sft.seq_length))


def expected_size(run: Training) -> tuple[int | None, int | None, float | None]:
    """Rows, optimizer steps and tokens of a training; None for what is not known."""
    steps = expected_steps(run)
    if steps is None:
        return None, None, None
    rows = steps * run.config.sft.batch_size
    with suppress(PipelineError):
        return rows, steps, rows * row_tokens(run)
    return rows, steps, None


def row_tokens(run: Training, side: str | None = None) -> float:
    """Mean tokens of the rows that the steps of a training take, of one side of a joint set: by the
    rows that are here, else as assumed, cut by sft.seq_length; packed rows are full.

    Raises:
        PipelineError: neither is known.
    """
    sft = run.config.sft
    if sft.packing:
        return sft.seq_length
    lengths = row_lengths(run) or assumed_tokens(run, side)
    return statistics.fmean(min(length, sft.seq_length) for length in lengths)


def assumed_tokens(run: Training, side: str | None) -> Sequence[float]:
    """Mean tokens of the sets that a training's rows come from.

    Raises PipelineError for one that is unknown.
    """
    expert = run.config.expert
    if any(source.config.expert.world for source in behind_data(run)):
        return [WORLD_ROW]
    names = [
        name for name, of_side in expert.union.items() if side in (None, "both", of_side.side)
    ] or [expert.name]
    known = token_counts()["rows"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PipelineError(
            f"the rows of expert={unknown[0]} are not here: give data_root, or make its data run"
            " first"
        )
    return [known[name] for name in names]


def padded_row(run: Training, side: str | None = None) -> float:
    """Positions that a row takes in a step, padding included.

    Raises PipelineError as `row_tokens`.
    """
    sft, mean = run.config.sft, row_tokens(run, side)
    if sft.packing or sft.padding_free:
        return mean
    lengths = row_lengths(run) or assumed_lengths(mean)
    return padded_length(lengths, sft.batch_size, micro_batches(sft)[0], sft.seq_length)


@lru_cache(maxsize=64)
def assumed_lengths(mean: float) -> list[float]:
    """Sorted lengths of rows, two hundred of a lognormal distribution."""
    shares = ((number + 0.5) / 200 for number in range(200))
    return [
        mean * math.exp(statistics.NormalDist(-(SPREAD**2) / 2, SPREAD).inv_cdf(share))
        for share in shares
    ]


def behind_data(run: Run) -> list[Run]:
    """Return the data runs that a training's rows come from."""
    return order_runs(parent_runs({"data": run.parents["data"]}))
