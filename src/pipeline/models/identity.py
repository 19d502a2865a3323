"""Identity of a model's folder that is not a run: a BLAKE3 digest per file, in the same read one
per tensor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from pipeline.files import FileState, cache_digests, cached_digests
from pipeline.models.checkpoint import KIND, hash_tensor, read_header


def folder_digest(folder: Path, files: Sequence[Path], runs_dir: Path | None = None) -> str:
    """`blake3:...` over the names and digests of a folder's files.

    Raises:
        PipelineError: a safetensors file is broken, or a file changed while it was read.
    """
    of_each = {
        path.relative_to(folder): file_digests(path, runs_dir)[KIND] for path in sorted(files)
    }
    lines = "".join(f"{name} {digest}\n" for name, digest in of_each.items())
    return f"{KIND}:{blake3(lines.encode()).hexdigest()}"


def file_digests(path: Path, runs_dir: Path | None) -> dict[str, Any]:
    """The digest of a file, as `blake3`, and of its finite `tensors`: cached, else each byte is
    read once, in threads.

    A safetensors file has the digest of its header followed by its tensors' digests in the order of
    their bytes, so that one read gives a merge the digests of what it copies; any other file has
    that of its bytes.
    """
    from pipeline.models.arrays import in_threads

    state, begun = FileState.now(path), time.time_ns()
    if KIND not in cached_digests(state, runs_dir):
        infos = []
        if path.suffix == ".safetensors":
            infos = list(read_header(path).values())
        infos.sort(key=lambda info: (info.offset, info.nbytes))
        hashed = in_threads(lambda info: hash_tensor(info.dtype, info.shape, info.pieces()), infos)
        with open(path, "rb") as file:
            head = file.read(infos[0].offset if infos else -1)
        whole = blake3(head + "".join(digest for digest, _ in hashed).encode()).hexdigest()
        tensors = {
            info.key: digest for info, (digest, finite) in zip(infos, hashed, strict=True) if finite
        }
        cache_digests(state, begun, runs_dir, **{KIND: f"{KIND}:{whole}", "tensors": tensors})
    return cached_digests(state)
