"""Digests that identify a merge and its sources, recorded by runs or computed once and cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.files import FileState
from pipeline.merge.adapters import Adapted, Source, recorded_key, root_of
from pipeline.merge.compatibility import experts_of
from pipeline.models.arrays import in_threads
from pipeline.models.checkpoint import KIND, TensorInfo, read_header, weights_root
from pipeline.models.files import ADAPTER_WEIGHTS
from pipeline.models.identity import file_digests
from pipeline.runs.manifest import read_manifest

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging


Known = dict[str, dict[str, str]]  # source -> tensor -> digest


def known_digests(merge: Merging, runs_dir: Path) -> Known:
    """Return the digests of the tensors of a merge's sources.

    They are the digests that a run recorded. Files without recorded digests are read once. For an
    adapter they are its base's digests. Tensors that are not finite have no digest.
    """
    return {role: _digests(source, runs_dir) for role, source in _sources(merge).items()}


def _digests(source: Source, runs_dir: Path) -> dict[str, str]:
    known = _recorded_digests(source.model.folder)
    for file, names in source.files.items():
        if known.keys() >= set(names):
            continue
        of_file = file_digests(file, runs_dir)["tensors"]
        for name in names:
            key = source.model.info(name).key
            if key in of_file:
                known[name] = of_file[key]
    return known


def _recorded_digests(folder: Path) -> dict[str, str]:
    """Return the digests that a run recorded, except those of the first versions."""
    manifest = read_manifest(folder)
    if manifest is None:
        return {}
    digests = manifest.weights.get("digests", {})
    return {name: digest for name, digest in digests.items() if digest.startswith(KIND)}


def equal_to_base(merge: Merging, known: Known) -> list[str]:
    """Return the roles of experts whose tensors all equal the base's tensors."""
    if "base" not in merge.sources:
        return []
    of_base = known["base"]
    equal = []
    for role, source in experts_of(merge.sources).items():
        if isinstance(source, Adapted):
            continue
        if all(known[role].get(name) == of_base.get(name) for name in merge.names):
            equal.append(role)
    return equal


_verified: set[tuple[FileState, str]] = set()  # tensors that this process has verified


def verify_sources(merge: Merging, threads: int | None = None) -> None:
    """Raise PipelineError if a tensor that a merge reads has changed since its run wrote it."""
    for role, source in _sources(merge).items():
        needed = [name for name in source.model.infos if merge.reads(role, name)]
        verify_source(source, needed, threads)


def verify_source(source: Source, names: Sequence[str], threads: int | None = None) -> None:
    """Raise PipelineError if these tensors or an adapter's have changed since their run wrote them.

    Tensors without a recorded digest, such as those of downloaded models, are not verified.
    """
    model = source.model
    _verify(model.folder, {name: model.infos[name] for name in names}, threads)
    if isinstance(source, Adapted):
        _verify(source.folder, read_header(source.folder / ADAPTER_WEIGHTS), threads)


def _verify(folder: Path, infos: Mapping[str, TensorInfo], threads: int | None) -> None:
    recorded = _recorded_digests(folder)

    def verify(name: str) -> None:
        info = infos[name]
        seen = FileState.now(info.file), name
        if seen not in _verified and info.digest() != recorded[name]:
            raise PipelineError(
                f"{info.file}: {name} is not the tensor that the run wrote. Restore the file, or"
                f" rerun {folder.name} with redo=true."
            )
        _verified.add(seen)

    in_threads(verify, infos.keys() & recorded.keys(), threads)


def _sources(merge: Merging) -> dict[str, Source]:
    if merge.padding:
        return merge.sources | merge.padding.whole
    return merge.sources


def weights_key(merge: Merging, known: Known) -> str:
    """Return the key of a merge's weights, which is known before they are computed.

    It is `merge:...`, a hash over what each tensor is computed from. For a linear merge that is
    {tensor: ([(digest of the source's tensor, share)], dtype)}; for other merges, the settings and
    the roots of the sources. If the merge equals one source, it is the key of that source.

    Raises:
        PipelineError: a tensor is not finite.
    """
    sources = _sources(merge)

    def digest_of(role: str, name: str) -> str:
        return known[role].get(name) or sources[role].model.info(name).digest()

    @cache
    def model_root(role: str) -> str:
        return weights_root({name: digest_of(role, name) for name in sources[role].names})

    @cache
    def adapter_root(role: str) -> str:
        """Return the root over an adapter's own tensors, or an empty text for a whole model."""
        source = sources[role]
        return root_of(source.folder) if isinstance(source, Adapted) else ""

    def identity(role: str, name: str | None) -> Any:
        """Return the digest of a tensor or the root of a source, and an adapter's own root."""
        if name is None:
            return f"{model_root(role)} {adapter_root(role)}".rstrip()
        digest = digest_of(role, name)
        return [digest, adapter_root(role)] if adapter_root(role) else digest

    role = merge.sole_source()
    if role:
        return recorded_key(sources[role].folder) or adapter_root(role) or model_root(role)
    tensors = {name: merge.decided_by(name, identity) for name in merge.names}
    form = "dense"
    if merge.adapter:
        form = "adapter"
    text = json.dumps([tensors, form], sort_keys=True, default=str)
    return f"merge:{hashlib.sha256(text.encode()).hexdigest()}"
