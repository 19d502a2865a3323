"""Merges written to disk: the kernel copies unchanged tensors, the others are computed in pieces.

Files are laid out as in the first source. Each tensor is a task with its own place in its file, so
threads never wait for each other. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from pipeline.errors import PipelineError
from pipeline.hub.lock import hub_cache
from pipeline.merge.adapters import Source
from pipeline.models.arrays import in_threads
from pipeline.models.checkpoint import (
    NO_LATER_HEADS,
    TensorInfo,
    digest_tensor,
    header_bytes,
    read_json,
    with_values,
)
from pipeline.models.files import BESIDE_WEIGHTS
from pipeline.progress import Bar

Merging = Any  # merge/merge.py, which imports this module
Known = Mapping[str, Mapping[str, str]]  # source -> tensor -> digest on record
# Errors that mean that the system cannot copy ranges of files
_NO_RANGES = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
)


class Task(NamedTuple):
    """A tensor to write, and its place in its file."""

    size: int
    name: str
    target: BinaryIO
    place: int


def write_weights(
    merge: Merging, folder: Path, recorded: Known, threads: int | None = None
) -> dict[str, str]:
    """Write the weight files of a merge into an existing folder, and return {tensor: digest}.

    A copied tensor inherits its recorded digest, which also proves that it is finite. A tensor
    without a record is read, hashed and checked.

    `recorded` has the digests on record: source -> tensor -> digest.

    Raises:
        PipelineError: values are not finite.
    """
    with contextlib.ExitStack() as streams:
        tasks: list[Task] = []
        for file, names in merge.layout.files.items():
            target = streams.enter_context(open(folder / file.name, "wb", buffering=0))
            tasks += _lay_out(merge, names, target)
        tasks.sort(key=lambda task: -task.size)
        with Bar("merge", sum(task.size for task in tasks), "byte") as bar:

            def write_tensor(task: Task) -> tuple[str, str]:
                digest = _put_tensor(merge, recorded, task)
                bar.update(task.size)
                return task.name, digest

            return dict(sorted(in_threads(write_tensor, tasks, threads)))


def _lay_out(merge: Merging, names: list[str], target: BinaryIO) -> list[Task]:
    """Write a file's header, reserve its size, and return its tensors as tasks."""
    stored = {}
    for name in names:
        stored[merge.layout.written_name(name)] = (merge.stored_dtype(name), merge.shape(name))
    target.write(header_bytes(stored))
    place = target.tell()
    tasks = []
    for name in names:
        task = Task(merge.bytes_of(name), name, target, place)
        tasks.append(task)
        place += task.size
    target.truncate(place)
    return tasks


def _put_tensor(merge: Merging, recorded: Known, task: Task) -> str:
    """Write a tensor to its place, and return its digest."""
    name = task.name
    label = name
    copied = merge.copied_from(name)
    if copied:
        role, info = copied
        digest = recorded.get(role, {}).get(name)
        if digest is not None and _copy_in_kernel(info, task.target, task.place):
            return digest
        label = f"{info.file}: {name}"

    def written() -> Iterator[memoryview]:
        place = task.place
        for part in merge.pieces(name):
            piece = part.reshape(-1).view(np.uint8).data
            _write_at(task.target, piece, place)
            place += len(piece)
            yield piece

    return digest_tensor(merge.stored_dtype(name), merge.shape(name), written(), label)


def _copy_in_kernel(info: TensorInfo, target: BinaryIO, place: int) -> bool:
    """Copy a tensor's bytes with copy_file_range, and return False if the system cannot.

    File systems that can share blocks between files copy by reference.
    """
    if not hasattr(os, "copy_file_range"):
        return False
    source_file, target_file = info.stream.fileno(), target.fileno()
    done = 0
    try:
        while done < info.nbytes:
            rest = info.nbytes - done
            start, target_start = info.offset + done, place + done
            count = os.copy_file_range(source_file, target_file, rest, start, target_start)
            if not count:
                raise PipelineError(f"{info.file} became shorter while it was read. Copy it again.")
            done += count
    except OSError as error:
        if error.errno in _NO_RANGES:
            return False
        raise OSError(error.errno, error.strerror, str(target.name)) from error
    return True


def _write_at(target: BinaryIO, data: memoryview, place: int) -> None:
    try:
        while data:
            count = os.pwrite(target.fileno(), data, place)
            data, place = data[count:], place + count
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target.name)) from error


def write_index(merge: Merging, folder: Path) -> None:
    """Write the index of a sharded checkpoint as transformers reads it."""
    layout = merge.layout
    if [file.name for file in layout.files] == ["model.safetensors"]:
        return
    total_size = sum(map(merge.bytes_of, merge.names))
    weight_map = {layout.written_name(name): layout.info(name).file.name for name in merge.names}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_files(source: Source, folder: Path, dtype: str | None, adapter: bool) -> None:
    """Copy config, generation config, tokenizer and chat template of a source.

    The config is written anew if the merge changes it or has another dtype. It is also written anew
    if it declares a head of later tokens, which no merge has. transformers loads in the dtype of
    config.json, so an old value would round the merge again.

    Args:
        source: the source of the files.
        folder: where to write.
        dtype: torch's name of the merge's dtype, or None if it has several.
        adapter: the merge is an adapter, which has no config.json.
    """
    for name in BESIDE_WEIGHTS:
        if adapter and name == "config.json":
            continue
        for own in (source.folder / name, source.model.folder / name):
            if own.is_file():
                refuse_link_outside(own)
                shutil.copyfile(own, folder / name)
                break
    if adapter:
        return
    config = with_values(source.config, NO_LATER_HEADS)
    stated = config.get("dtype") or config.get("torch_dtype")
    if source.model is not source or (dtype and stated != dtype):
        config.pop("torch_dtype", None)
        if dtype:
            config["dtype"] = dtype
    if config != read_json(source.model.folder / "config.json"):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def refuse_link_outside(file: Path) -> None:
    """Raise PipelineError if a file links outside its model and the Hub's cache."""
    folder = file.parent.resolve()
    allowed = [folder, hub_cache().resolve()]
    if folder.parent.name == "snapshots":  # another cache of the Hub
        allowed.append(folder.parents[1] / "blobs")
    target = file.resolve()
    if not any(place in target.parents for place in allowed):
        raise PipelineError(
            f"{file} is a link to {target}, outside of its model. Copy the intended file there."
        )


def make_readable(folder: Path) -> None:
    """Make files readable by the group that shares the runs.

    safetensors and umasks restrict them to their owner.
    """
    folder.chmod(folder.stat().st_mode | 0o055)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)
