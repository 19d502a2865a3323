"""A merge to disk: what is one source's is copied by the kernel, the rest computed a piece at a time.

Files are laid out as the first source's. Each tensor is a task of its own, written to its own place in its file, so
that threads wait for nothing but the end. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.models.arrays import in_threads
from pipeline.models.checkpoint import TensorInfo, digest_tensor, header_bytes
from pipeline.models.files import BESIDE_WEIGHTS
from pipeline.progress import Bar

Merging = Any  # merge/merge.py, which imports this module
Known = Mapping[str, Mapping[str, str]]  # source -> tensor -> digest on record
Digest = tuple[str, str]  # tensor, digest
_NO_RANGES = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)  # the system cannot; others fail


def write_weights(merge: Merging, folder: Path, recorded: Known, threads: int | None = None) -> dict[str, str]:
    """The weight files of a merge into an existing folder; {tensor: digest}.

    A copied tensor inherits the digest on record, which also says that it is finite; one without a record passes
    through memory, and is hashed and checked on its way. Raises PipelineError for values that are not finite.
    """
    tasks: list[tuple[int, Callable[[], list[Digest]]]] = []  # size, what is to be done
    with contextlib.ExitStack() as streams:
        for file, names in merge.layout.files.items():
            target = streams.enter_context(open(folder / file.name, "wb", buffering=0))
            target.write(header_bytes({name: (merge.stored_dtype(name), merge.shape(name)) for name in names}))
            place, copies = target.tell(), list[tuple[str, int]]()
            for name in names:
                size, copied = merge.bytes_of(name), merge.copied_from(name)
                if copied and name in recorded.get(copied[0], {}):
                    copies.append((name, place))
                else:
                    tasks.append((size, partial(_put_tensor, merge, name, target, place)))
                place += size
            target.truncate(place)
            copied_bytes = sum(merge.bytes_of(name) for name, _ in copies)
            # one task: threads that write one file wait at its lock
            tasks.append((copied_bytes, partial(_copy_tensors, merge, recorded, target, copies)))
        tasks.sort(key=lambda task: -task[0])  # largest first
        with Bar("merge", sum(size for size, _ in tasks), "byte") as bar:
            counting = [bar.count_when_done(task, size) for size, task in tasks]
            digests = in_threads(lambda task: task(), counting, threads)
    return dict(sorted(digest for each in digests for digest in each))


def _put_tensor(merge: Merging, name: str, target: BinaryIO, place: int) -> list[Digest]:
    """One tensor to its place, read as it is or computed; its digest, taken while a piece is in the cache."""

    def written() -> Iterator[memoryview]:
        begin = place
        for part in merge.pieces(name):
            piece = part.reshape(-1).view(np.uint8).data
            _write_at(target, piece, begin)
            begin += len(piece)
            yield piece

    copied = merge.copied_from(name)
    label = f"{copied[1].file}: {name}" if copied else name
    return [(name, digest_tensor(merge.stored_dtype(name), merge.shape(name), written(), label))]


def _copy_tensors(merge: Merging, recorded: Known, target: BinaryIO, copies: list[tuple[str, int]]) -> list[Digest]:
    """Tensors to their places as their sources store them; their digests on record."""
    digests = []
    for name, place in copies:
        role, info = merge.copied_from(name)
        if not _copy_in_kernel(info, target, place):
            _put_tensor(merge, name, target, place)
        digests.append((name, recorded[role][name]))
    return digests


def _copy_in_kernel(info: TensorInfo, target: BinaryIO, place: int) -> bool:
    """Copy a tensor's bytes by copy_file_range (by reference where supported); False where the system cannot."""
    if not hasattr(os, "copy_file_range"):
        return False
    done = 0
    try:
        while done < info.nbytes:
            start, rest = info.offset + done, info.nbytes - done
            count = os.copy_file_range(info.stream.fileno(), target.fileno(), rest, start, place + done)
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
    """The index of a checkpoint in shards, one or more, as transformers reads it."""
    if [file.name for file in merge.layout.files] == ["model.safetensors"]:
        return
    index = {
        "metadata": {"total_size": sum(map(merge.bytes_of, merge.names))},
        "weight_map": {name: merge.layout.info(name).file.name for name in merge.names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_files(source: Source, folder: Path, dtype: str | None, adapter: bool) -> None:
    """Config, generation config, tokenizer and chat template of one source; an adapter has no config.json.

    `dtype`: torch's name of the merge's. transformers loads in the dtype that config.json names: a stale one would
    round the merge again.
    """
    for name in BESIDE_WEIGHTS:
        files = (one.folder / name for one in (source, source.model))
        file = next(filter(Path.is_file, files), None)
        if file and not (adapter and name == "config.json"):
            shutil.copyfile(file, folder / name)
    stated = source.config.get("dtype") or source.config.get("torch_dtype")
    if not adapter and (source.model is not source or (dtype and stated != dtype)):
        config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
        config |= {"dtype": dtype} if dtype else {}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_readable(folder: Path) -> None:
    """Make files readable by the group that shares the runs: safetensors and umasks restrict them to their owner."""
    folder.chmod(folder.stat().st_mode | 0o055)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)
