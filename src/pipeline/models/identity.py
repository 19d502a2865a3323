"""BLAKE3 digests that identify a model's folder that is not a run.

One read of a file gives its digest and the digests of its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from pipeline.files import FileState, cache_digests, cached_digests
from pipeline.models.checkpoint import KIND, TensorInfo, hash_tensor, read_header


def folder_digest(folder: Path, files: Sequence[Path], runs_dir: Path | None = None) -> str:
    """Return `blake3:...` over the names and digests of a folder's files.

    Raises:
        PipelineError: a safetensors file is broken, or a file changed while it was read.
    """
    whole = blake3()
    for path in sorted(files):
        digest = file_digests(path, runs_dir)[KIND]
        whole.update(f"{path.relative_to(folder)} {digest}\n".encode())
    return f"{KIND}:{whole.hexdigest()}"


def file_digests(path: Path, runs_dir: Path | None) -> dict[str, Any]:
    """Return the digest of a file, as `blake3`, and of its finite `tensors`.

    They are cached. Otherwise each byte is read once, in threads. The digest of a safetensors file
    is over its header and its tensors' digests in the order of their bytes. So one read also gives
    a merge the digests of copied tensors. The digest of other files is over their bytes.
    """
    from pipeline.models.arrays import in_threads

    state, begun = FileState.now(path), time.time_ns()
    if KIND in cached_digests(state, runs_dir):
        return cached_digests(state)
    infos: list[TensorInfo] = []
    if path.suffix == ".safetensors":
        infos = sorted(read_header(path).values(), key=lambda info: (info.offset, info.nbytes))
    hashed = in_threads(lambda info: hash_tensor(info.dtype, info.shape, info.pieces()), infos)
    with open(path, "rb") as file:
        whole = blake3(file.read(infos[0].offset if infos else -1))
    tensors = {}
    for info, (digest, finite) in zip(infos, hashed, strict=True):
        whole.update(digest.encode())
        if finite:
            tensors[info.key] = digest
    cache_digests(
        state, begun, runs_dir, **{KIND: f"{KIND}:{whole.hexdigest()}", "tensors": tensors}
    )
    return cached_digests(state)
