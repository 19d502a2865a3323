"""The weights that a run scores: a checkpoint, or a merge in memory or written for scoring."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.evaluate.store import Key, base_key, merge_key, model_key
from pipeline.hub.models import local_folder
from pipeline.merge.live import merge_of_one
from pipeline.merge.resident import keeps_models
from pipeline.merge.stage import measure_merge, merge_of, write_elsewhere
from pipeline.models.checkpoint import is_adapter

if TYPE_CHECKING:
    from pipeline.config.stages import EvalStage
    from pipeline.merge.merge import Merging
    from pipeline.runs.run import Run


@dataclass
class Weights:
    """The weights that a run scores: a folder or a merge in memory, such as an adapter's.

    Attributes:
        of: The folder or merge.
        key: Identifies the weights among stored answers.
        merge: Describes the merge.
        measure: Returns the numbers that the run of the written merge also records.
    """

    of: Merging | Path
    key: Key
    merge: str = ""
    measure: Callable[[], dict[str, float]] = dict


def weights_of(run: Run[EvalStage], scratch: Path) -> Weights:
    """Return the weights that a run scores. A model on the Hub is read from its cache.

    A merge that another program computes is written into the folder `scratch`.
    """
    config = run.config
    if "checkpoint" in run.parents:
        checkpoint = run.parents["checkpoint"]
        return Weights(in_memory(local_folder(checkpoint.folder), run), model_key(checkpoint))
    assert config.merge is not None
    if config.merge.writes_folder:
        described = write_elsewhere(run, scratch)["merge"]
        return Weights(in_memory(scratch, run), base_key(scratch) | {"base": None}, described)
    merge = merge_of(run)
    key = merge_key(merge, run.runs_dir)
    measure = partial(measure_merge, merge, key["root"], config.threads)
    return Weights(merge, key, merge.described(config.partition), measure)


def in_memory(folder: Path, run: Run[EvalStage]) -> Merging | Path:
    """Return a checkpoint as a merge of one if it is an adapter or its model may stay in memory."""
    stays = keeps_models() and run.config.eval.backend == "hf"
    if is_adapter(folder) or stays:
        return merge_of_one(folder)
    return folder


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Create an empty folder and delete it at the end.

    Files that an interrupted attempt left in it are deleted first.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
