"""The rows of a training before it: their lengths, by a sample, and how many of them sft.seq_length cuts."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import NamedTuple

from pipeline.config.stages import DataStage, TrainStage
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.estimate.flops import ROW
from pipeline.estimate.gpu_budget import positions
from pipeline.estimate.models import tokenizer_of
from pipeline.models.load import load_tokenizer
from pipeline.runs.run import Run, parent_runs
from pipeline.stages.lengths import BYTES, READABLE, SAMPLE, padded_length, sampled_lengths
from pipeline.train.examples import cut_rows, cut_words
from pipeline.train.memory import micro_batches

ROWS = "train.jsonl"  # of a data run
COUNTED = 10_000  # rows of a file, of which a plan counts those that will be cut
WORLD_ROW = 200  # bytes of a row of the small world
_counted: dict[Hashable, Cut] = {}  # by what decides it: a plan, and each round of a table, ask again


def row_lengths(run: Run[TrainStage], rows: int = SAMPLE) -> tuple[float, ...]:
    """Tokens of a sample of a training's rows: of its data run's file, or of the files that this will read; () where
    neither is here."""
    data = run.parents["data"]
    if (data_file := data.folder / ROWS).is_file():
        return sampled_lengths(data_file, (), tokenizer_of(run), rows)
    root = data.parents.get("data_root") if isinstance(data, Run) else None
    if not isinstance(data, Run) or root is None or not root.folder.is_dir():
        return ()
    tokenizer = tokenizer_of(run)
    files = [root.folder / source.file for source in data.config.expert.sources.values()]
    readable = [file for file in files if file.suffix in READABLE]
    return tuple(sorted(length for file in readable for length in sampled_lengths(file, (), tokenizer, rows)))


class Cut(NamedTuple):
    """Rows that sft.seq_length cuts, those of which it leaves no loss, and rows looked at; whether these are all."""

    cut: int
    lost: int
    rows: int
    all_rows: bool = True


def cut_sets(runs: Sequence[Run]) -> list[tuple[Run[TrainStage], Cut]]:
    """The first training of each set of rows of which sft.seq_length cuts some."""
    first: dict[Hashable, Run[TrainStage]] = {}
    for run in runs:
        if isinstance(run.config, TrainStage) and not run.config.sft.packing:
            sft, data = run.config.sft, run.parents["data"]
            kind = (data.hash, (data.folder / ROWS).is_file(), tokenizer_of(run), sft.seq_length, sft.template,
                    sft.loss_on, sft.separator)  # fmt: skip
            first.setdefault(kind, run)
    for key, run in first.items():
        if key not in _counted:
            _counted[key] = count_cut(run)
    return [(run, _counted[key]) for key, run in first.items() if _counted[key].cut]


def cut_lines(runs: Sequence[Run]) -> list[str]:
    """One line for each set of rows of which sft.seq_length cuts some."""
    lines = []
    for run, found in cut_sets(runs):
        rows = f"{'' if found.all_rows else 'the first '}{found.rows:,} rows of {run.parents['data'].name}"
        lines.append(f"{cut_words(run.config.sft, found.cut, found.lost, rows)} ({run.name})")
    return lines


def count_cut(run: Run[TrainStage]) -> Cut:
    """What sft.seq_length cuts: of all rows of a finished data run, as they will be tokenized; of files that it will
    read, and without the model's tokenizer, of the first rows by their text."""
    sft, file, tokenizer = run.config.sft, run.parents["data"].folder / ROWS, tokenizer_of(run)
    if not (file.is_file() and tokenizer):
        lengths = row_lengths(run, COUNTED)
        return Cut(sum(length > sft.seq_length for length in lengths), 0, len(lengths), all_rows=False)
    if sft.template == "plain" and max(map(len, file.read_bytes().splitlines())) <= sft.seq_length:
        return Cut(0, 0, 0)  # as a token has a byte or more; without importing transformers
    rows = read_jsonl(file)
    with suppress(PipelineError, OSError, ValueError):  # what is wrong with the tokenizer the training says at once
        cut, lost = cut_rows(rows, load_tokenizer(tokenizer.parent), sft)
        return Cut(cut, len(lost), len(rows))
    return Cut(0, 0, 0)


def mean_row(run: Run[TrainStage], otherwise: float) -> float:
    lengths = row_lengths(run)
    return statistics.fmean(lengths) if lengths else otherwise


def padded_row(run: Run[TrainStage]) -> float | None:
    """Positions that a row takes in a step, padding included; of a set on the Hub as assumed; None where nothing
    tells."""
    sft, name = run.config.sft, run.config.expert.name
    if sft.packing:
        return sft.seq_length
    if lengths := row_lengths(run):
        if sft.padding_free:
            return statistics.fmean(min(length, sft.seq_length) for length in lengths)
        return padded_length(lengths, sft.batch_size, micro_batches(sft)[0], sft.seq_length)
    if any(isinstance(source.config, DataStage) and source.config.expert.world for source in behind_data(run)):
        return min(WORLD_ROW / BYTES, sft.seq_length)
    names = [name] if name in ROW else name.split("_")
    if not set(names) <= ROW.keys():
        return None
    return positions(min(statistics.fmean(ROW[source] for source in names), sft.seq_length), sft)


def behind_data(run: Run) -> list[Run]:
    """The data runs that a training's rows come from."""
    data = run.parents["data"]
    return [ancestor for parent in parent_runs({"data": data}) for ancestor in [parent, *parent_runs(parent.parents)]]
