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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.models.checkpoint import PIECE_BYTES, TensorInfo, digest_tensor, header_bytes, read_header
from pipeline.models.files import BESIDE_WEIGHTS
from pipeline.models.floats import in_threads
from pipeline.progress import Bar

Known = Mapping[str, Mapping[str, str]]  # source -> tensor -> digest on record
_NO_RANGES = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
)  # this system cannot; others mean it


class Writable(Protocol):
    """What a merge is to those that write it: its tensors as they will be stored."""

    sources: dict[str, Source]

    @property
    def layout(self) -> Source: ...  # whose tensor names and files the result takes over

    @property
    def names(self) -> list[str]: ...

    def stored_dtype(self, name: str) -> str: ...  # as safetensors names it

    def stored_info(self, name: str) -> TensorInfo: ...

    def copied_from(self, name: str) -> str | None: ...  # the one source whose tensor this is, unchanged

    def pieces(self, name: str) -> Iterator[np.ndarray]: ...  # of a tensor that has to be computed


@dataclass
class _Range:
    """Bytes that go from one file to another as they are."""

    source: Path
    start: int
    target: BinaryIO
    place: int
    count: int


def write_weights(merge: Writable, folder: Path, recorded: Known, threads: int | None = None) -> dict[str, str]:
    """The weight files of a merge into an existing folder; {tensor: digest}.

    A copied tensor inherits the digest on record, which also says that it is finite; one without a record passes
    through memory, and is hashed and checked on its way. Raises PipelineError for values that are not finite.
    """
    tasks: list[tuple[int, Callable[[], tuple[str, str] | None]]] = []  # size, what is to be done
    ranges: list[_Range] = []
    digests: dict[str, str] = {}
    with contextlib.ExitStack() as streams:
        for file, names in merge.layout.files.items():
            stored = {name: (merge.stored_dtype(name), merge.layout.info(name).shape) for name in names}
            target = streams.enter_context(open(folder / file.name, "wb", buffering=0))
            target.write(header_bytes(stored))
            place = target.tell()
            for name in names:
                size, role = merge.stored_info(name).nbytes, merge.copied_from(name)
                info = merge.sources[role].stored(name) if role is not None else None
                if role is None or info is None:
                    tasks.append((size, partial(_compute_tensor, merge, name, target, place)))
                elif name in recorded.get(role, {}):
                    _add_range(ranges, _Range(info.file, info.offset, target, place, size))
                    digests[name] = recorded[role][name]
                else:
                    tasks.append((size, partial(_carry_tensor, name, info, target, place)))
                place += size
            target.truncate(place)
        ordered = sorted(tasks, key=lambda task: -task[0])  # largest first
        for into in dict.fromkeys(copy.target for copy in ranges):  # threads that copy into one file wait at its lock
            together = [copy for copy in ranges if copy.target == into]
            ordered.append((sum(copy.count for copy in together), partial(_copy_all, together)))
        with Bar("merge", sum(size for size, _ in ordered), "byte") as bar:
            counting_tasks = [bar.count_when_done(task, size) for size, task in ordered]
            digests |= dict(item for item in in_threads(counting_tasks, threads) if item is not None)
    return dict(sorted(digests.items()))


def _add_range(ranges: list[_Range], new: _Range) -> None:
    """Append a range, joined to the last one where they adjoin in both files."""
    last = ranges[-1] if ranges else None
    if (
        last
        and (last.source, last.target) == (new.source, new.target)
        and (last.start + last.count, last.place + last.count) == (new.start, new.place)
    ):
        last.count += new.count
    elif new.count:
        ranges.append(new)


def _carry_tensor(name: str, info: TensorInfo, target: BinaryIO, place: int) -> tuple[str, str]:
    """One tensor as it is to its place; its digest."""
    return name, digest_tensor(
        info.dtype, info.shape, _write_pieces(info.pieces(), target, place), f"{info.file}: {name}"
    )


def _write_pieces(pieces: Iterable[memoryview], target: BinaryIO, place: int) -> Iterator[memoryview]:
    """Pieces to their place, then to who hashes them, while they are in the cache."""
    for piece in pieces:
        _write_at(target, piece, place)
        place += len(piece)
        yield piece


def _copy_all(ranges: list[_Range]) -> None:
    for copy in ranges:
        _copy_range(copy)


def _copy_range(copy: _Range) -> None:
    """Copy one range by copy_file_range, in the kernel (by reference where supported); by reading where unavailable."""
    with open(copy.source, "rb", buffering=0) as source:
        copied = 0
        while copied < copy.count:
            try:
                count = os.copy_file_range(
                    source.fileno(), copy.target.fileno(), copy.count - copied, copy.start + copied, copy.place + copied
                )
            except (OSError, AttributeError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_RANGES:
                    raise OSError(error.errno, error.strerror, str(copy.target.name)) from error
                return _copy_by_reading(copy, source, copied)
            if not count:
                raise PipelineError(f"{copy.source} became shorter while it was read: copy it again")
            copied += count
    return None


def _copy_by_reading(copy: _Range, source: BinaryIO, copied: int) -> None:
    buffer = memoryview(bytearray(PIECE_BYTES))
    while copied < copy.count:
        count = os.preadv(source.fileno(), [buffer[: copy.count - copied]], copy.start + copied)
        if not count:
            raise PipelineError(f"{copy.source} became shorter while it was read: copy it again")
        _write_at(copy.target, buffer[:count], copy.place + copied)
        copied += count


def _compute_tensor(merge: Writable, name: str, target: BinaryIO, place: int) -> tuple[str, str]:
    """One computed tensor to its place; its digest."""
    pieces = (part.reshape(-1).view(np.uint8).data for part in merge.pieces(name))
    dtype, shape = merge.stored_dtype(name), merge.layout.info(name).shape
    return name, digest_tensor(dtype, shape, _write_pieces(pieces, target, place), name)


def _write_at(target: BinaryIO, data: memoryview, place: int) -> None:
    try:
        while data:
            count = os.pwrite(target.fileno(), data, place)
            data, place = data[count:], place + count
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target.name)) from error


def write_index(merge: Writable, folder: Path) -> None:
    """The index of a checkpoint in shards, one or more, as transformers reads it."""
    if [file.name for file in merge.layout.files] == ["model.safetensors"]:
        return
    headers = [read_header(folder / file.name) for file in merge.layout.files]
    index = {
        "metadata": {"total_size": sum(info.nbytes for header in headers for info in header.values())},
        "weight_map": {name: merge.layout.info(name).file.name for name in merge.names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_files(source: Source, folder: Path, dtype: str | None, adapter: bool) -> None:
    """Config, generation config, tokenizer and chat template of one source; an adapter has no config.json.

    `dtype`: torch's name of the merge's. transformers loads in the dtype that config.json names: a stale one would
    round the merge again.
    """
    folders = [source.folder, *([source.base.folder] if hasattr(source, "base") else [])]
    for name in BESIDE_WEIGHTS:
        file = next((candidate / name for candidate in folders if (candidate / name).is_file()), None)
        if file and not (adapter and name == "config.json"):
            shutil.copyfile(file, folder / name)
    if dtype and not adapter and (source.config.get("dtype") or source.config.get("torch_dtype")) != dtype:
        config = {key: value for key, value in source.config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not adapter and hasattr(source, "base"):
        (folder / "config.json").write_text(
            json.dumps(source.config | ({"dtype": dtype} if dtype else {}), indent=2) + "\n"
        )


def make_readable(folder: Path) -> None:
    """Make files readable by the group that shares the runs: safetensors and umasks restrict them to their owner."""
    folder.chmod(folder.stat().st_mode | 0o055)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)
