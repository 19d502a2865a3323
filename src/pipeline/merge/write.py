"""A merge to disk: what is one source's is copied by the kernel, the rest computed a piece at a
time.

Files are laid out as the first source's. Each tensor is a task of its own, written to its own place
in its file, so that threads wait for nothing but the end. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.errors import PipelineError
from pipeline.hub.lock import hub_cache
from pipeline.merge.adapters import Source
from pipeline.models.arrays import in_threads
from pipeline.models.checkpoint import (
    TensorInfo,
    digest_tensor,
    header_bytes,
    read_json,
    without_later_heads,
)
from pipeline.models.files import BESIDE_WEIGHTS
from pipeline.progress import Bar

Merging = Any  # merge/merge.py, which imports this module
Known = Mapping[str, Mapping[str, str]]  # source -> tensor -> digest on record
_NO_RANGES = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
)  # the system cannot; others fail


def write_weights(
    merge: Merging, folder: Path, recorded: Known, threads: int | None = None
) -> dict[str, str]:
    """Write the weight files of a merge into an existing folder, and return {tensor: digest}.

    A copied tensor inherits the digest on record, which also says that it is finite. One without a
    record passes through memory, and is hashed and checked on its way.

    Raises: PipelineError: values are not finite.
    """
    with contextlib.ExitStack() as streams:
        tasks = []
        for file, names in merge.layout.files.items():
            target = streams.enter_context(open(folder / file.name, "wb", buffering=0))
            stored = {
                merge.layout.written_name(name): (merge.stored_dtype(name), merge.shape(name))
                for name in names
            }
            target.write(header_bytes(stored))
            place = target.tell()
            for name in names:
                tasks.append((merge.bytes_of(name), name, target, place))
                place += merge.bytes_of(name)
            target.truncate(place)
        tasks.sort(key=lambda task: -task[0])  # largest first
        with Bar("merge", sum(size for size, *_ in tasks), "byte") as bar:

            def write_tensor(task: tuple[int, str, BinaryIO, int]) -> tuple[str, str]:
                size, name, target, place = task
                digest = _put_tensor(merge, recorded, name, target, place)
                bar.update(size)
                return name, digest

            return dict(sorted(in_threads(write_tensor, tasks, threads)))


def _put_tensor(merge: Merging, recorded: Known, name: str, target: BinaryIO, place: int) -> str:
    """One tensor to its place; its digest, on record or taken while a piece is in the cache."""
    role, info = merge.copied_from(name) or ("", None)
    if info and name in recorded.get(role, {}) and _copy_in_kernel(info, target, place):
        return recorded[role][name]

    def written() -> Iterator[memoryview]:
        begin = place
        for part in merge.pieces(name):
            piece = part.reshape(-1).view(np.uint8).data
            _write_at(target, piece, begin)
            begin += len(piece)
            yield piece

    label = f"{info.file}: {name}" if info else name
    return digest_tensor(merge.stored_dtype(name), merge.shape(name), written(), label)


def _copy_in_kernel(info: TensorInfo, target: BinaryIO, place: int) -> bool:
    """Copy a tensor's bytes by copy_file_range (by reference where supported); False where the
    system cannot.
    """
    if not hasattr(os, "copy_file_range"):
        return False
    done = 0
    try:
        while done < info.nbytes:
            start, rest = info.offset + done, info.nbytes - done
            count = os.copy_file_range(
                info.stream.fileno(), target.fileno(), rest, start, place + done
            )
            if not count:
                raise PipelineError(f"{info.file} became shorter while it was read: copy it again")
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
    """Write the index of a checkpoint in shards, one or more, as transformers reads it."""
    if [file.name for file in merge.layout.files] == ["model.safetensors"]:
        return
    index = {
        "metadata": {"total_size": sum(map(merge.bytes_of, merge.names))},
        "weight_map": {
            merge.layout.written_name(name): merge.layout.info(name).file.name
            for name in merge.names
        },
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_files(source: Source, folder: Path, dtype: str | None, adapter: bool) -> None:
    """Copy config, generation config, tokenizer and chat template of one source; an adapter has no
    config.json.

    The config is written anew if the merge has settled a value of it, if it declares a head of
    later tokens, which no merge has, or if it names another dtype than `dtype` (torch's name of the
    merge's): transformers loads in the dtype that config.json names, so that a stale one would
    round the merge again.
    """
    for name in BESIDE_WEIGHTS:
        files = (one.folder / name for one in (source, source.model))
        file = next(filter(Path.is_file, files), None)
        if file and not (adapter and name == "config.json"):
            refuse_link_outside(file)
            shutil.copyfile(file, folder / name)
    if adapter:
        return
    config = without_later_heads(source.config)
    stated = config.get("dtype") or config.get("torch_dtype")
    if source.model is not source or (dtype and stated != dtype):
        config.pop("torch_dtype", None)
        if dtype:
            config |= {"dtype": dtype}
    if config != read_json(source.model.folder / "config.json"):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def refuse_link_outside(file: Path) -> None:
    """Raise PipelineError for a file of a model that is a link to one elsewhere, unless a cache of
    the Hub has it.
    """
    folder = file.parent.resolve()
    # of a cache elsewhere
    if folder.parent.name == "snapshots":
        blobs = folder.parents[1] / "blobs"
    else:
        blobs = folder
    target, allowed = file.resolve(), [folder, blobs, hub_cache().resolve()]
    if not any(place in target.parents for place in allowed):
        raise PipelineError(
            f"{file} is a link to {target}, outside of its model: copy the file that is meant there"
        )


def make_readable(folder: Path) -> None:
    """Make files readable by the group that shares the runs: safetensors and umasks restrict them
    to their owner.
    """
    folder.chmod(folder.stat().st_mode | 0o055)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)
