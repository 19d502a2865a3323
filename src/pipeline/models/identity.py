"""Identity of a model's folder that is not a run: a BLAKE3 digest per file, in the same read one per tensor."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from pipeline.files import FileState, cache_digests, cached_digests
from pipeline.models.checkpoint import KIND, TensorInfo, hash_tensor, read_header


def folder_digest(folder: Path, files: Sequence[Path], runs_dir: Path | None = None) -> str:
    """`blake3:...` over the names and digests of a folder's files: cached, else each byte is read once, in threads.

    A safetensors file has the digest of its header followed by its tensors' digests in the order of their bytes, so
    that one read gives a merge the digests of what it copies; any other file has that of its bytes.

    Raises:
        PipelineError: a safetensors file is broken, or a file changed while it was read.
    """
    from pipeline.models.arrays import in_threads

    stats, begun = {path: FileState.now(path) for path in sorted(files)}, time.time_ns()
    unknown = {
        path: read_header(path) if path.suffix == ".safetensors" else {}
        for path, stat in stats.items()
        if not cached_digests(stat, runs_dir).get(KIND)
    }
    infos = sorted((info for tensors in unknown.values() for info in tensors.values()), key=lambda info: -info.nbytes)
    of_each = in_threads(lambda info: hash_tensor(info.dtype, info.shape, info.pieces()), infos)
    hashed = dict(zip(infos, of_each, strict=True))
    for path, tensors in unknown.items():
        finite = {name: hashed[info][0] for name, info in tensors.items() if hashed[info][1]}
        cache_digests(stats[path], begun, runs_dir, **{KIND: _of_file(path, tensors, hashed), "tensors": finite})
    lines = "".join(f"{path.relative_to(folder)} {cached_digests(stat)[KIND]}\n" for path, stat in stats.items())
    return f"{KIND}:{blake3(lines.encode()).hexdigest()}"


def _of_file(path: Path, tensors: Mapping[str, TensorInfo], hashed: Mapping[TensorInfo, tuple[str, bool]]) -> str:
    with open(path, "rb") as file:
        head = file.read(min((info.offset for info in tensors.values()), default=-1))  # of no tensors: all
    in_order = sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes))
    return f"{KIND}:{blake3(head + ''.join(hashed[info][0] for info in in_order).encode()).hexdigest()}"
