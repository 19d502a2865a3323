"""What a merge's sources and the merge itself are known by: digests on record, else computed once
and cached.
"""

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
from pipeline.models.arrays import in_threads
from pipeline.models.checkpoint import KIND, TensorInfo, read_header, weights_root
from pipeline.models.files import ADAPTER_WEIGHTS
from pipeline.models.identity import file_digests
from pipeline.runs.manifest import read_manifest

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging


Known = dict[str, dict[str, str]]  # source -> tensor -> digest


def known_digests(merge: Merging, runs_dir: Path) -> Known:
    """Digests of a merge's sources, of an adapter its base's, for what it leaves alone: those that
    a run recorded, of other files all tensors are read once. Tensors that are not finite have none.
    """
    return {role: _digests(source, runs_dir) for role, source in _sources(merge).items()}


def _digests(source: Source, runs_dir: Path) -> dict[str, str]:
    manifest = read_manifest(source.model.folder)
    recorded = {}
    if manifest:
        recorded = manifest.weights.get("digests", {})
    known = {}
    for name, digest in recorded.items():
        if digest.startswith(KIND):
            known[name] = digest
    for file, names in source.files.items():
        if not known.keys() >= set(names):
            of_file = file_digests(file, runs_dir)["tensors"]
            for name in names:
                key = source.model.info(name).key
                if key in of_file:
                    known[name] = of_file[key]
    return known


def equal_to_base(merge: Merging, known: Known) -> list[str]:
    """Return the roles of experts whose tensors are all equal to those of the base that the merge
    reads.
    """
    if "base" not in merge.sources:
        return []
    experts = {}
    for role, source in merge.sources.items():
        if role != "base":
            experts[role] = source
    names = merge.names
    equal = []
    for role, source in experts.items():
        pairs = [(known[role].get(name), known["base"].get(name)) for name in names]
        if not isinstance(source, Adapted) and all(
            one is not None and one == other for one, other in pairs
        ):
            equal.append(role)
    return equal


_verified: set[tuple[FileState, str]] = set()  # tensors of files that this process has read


def verify_sources(merge: Merging, threads: int | None = None) -> None:
    """Raise PipelineError if a tensor that a merge reads is not the one that its run wrote."""
    for role, source in _sources(merge).items():
        verify_source(
            source, [name for name in source.model.infos if merge.reads(role, name)], threads
        )


def verify_source(source: Source, names: Sequence[str], threads: int | None = None) -> None:
    """Raise PipelineError if one of these tensors of a model, or one of its adapter, is not the one
    that its run wrote.

    Tensors without a digest on record, such as those of models from elsewhere, are not verified.
    """
    model = source.model
    _verify(model.folder, {name: model.infos[name] for name in names}, threads)
    if isinstance(source, Adapted):
        _verify(source.folder, read_header(source.folder / ADAPTER_WEIGHTS), threads)


def _verify(folder: Path, infos: Mapping[str, TensorInfo], threads: int | None) -> None:
    manifest = read_manifest(folder)
    recorded = {}
    if manifest:
        recorded = manifest.weights.get("digests", {})

    def verify(name: str) -> None:
        info = infos[name]
        seen = FileState.now(info.file), name
        if seen not in _verified and info.digest() != recorded[name]:
            problem = f"{name} is not the tensor that the run wrote"
            raise PipelineError(
                f"{info.file}: {problem}: restore the file, or rerun {folder.name} with redo=true"
            )
        _verified.add(seen)

    in_threads(verify, [name for name in infos if recorded.get(name, "").startswith(KIND)], threads)


def _sources(merge: Merging) -> dict[str, Source]:
    return merge.sources | (merge.padding.whole if merge.padding else {})


def weights_key(merge: Merging, known: Known) -> str:
    """What a merge's weights are known by before and after they are computed: `merge:...`, over
    what each tensor is made of; where all are one source's unchanged, the key of that source.

    Of a linear merge that is {tensor: ([(digest of the source's tensor, share)], dtype)}, else
    knobs and roots. Raises PipelineError, naming it, for a tensor that is not finite.
    """
    sources = _sources(merge)

    def digest_of(role: str, name: str) -> str:
        return known[role].get(name) or sources[role].model.info(name).digest()

    @cache
    def own_root(role: str) -> list[str]:
        """Return the root over an adapter's own tensors; empty for a whole model."""
        source = sources[role]
        if isinstance(source, Adapted):
            return [root_of(source.folder)]
        return []

    @cache
    def identity(role: str, name: str | None) -> Any:
        """Return the digest of a source's tensor, or the root over all, and an adapter's own
        root.
        """
        if name is None:
            return " ".join(
                [
                    weights_root({each: digest_of(role, each) for each in sources[role].names}),
                    *own_root(role),
                ]
            )
        found = [digest_of(role, name), *own_root(role)]
        if found[1:]:
            return found
        return found[0]

    role = merge.sole_source()
    if role:
        return recorded_key(sources[role].folder) or (own_root(role) or [identity(role, None)])[0]
    tensors = {name: merge.decided_by(name, identity) for name in merge.names}
    text = json.dumps(
        [tensors, "adapter" if merge.adapter else "dense"], sort_keys=True, default=str
    )
    return f"merge:{hashlib.sha256(text.encode()).hexdigest()}"
