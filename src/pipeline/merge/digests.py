"""What a merge's sources and the merge itself are known by: digests on record, else computed once and cached."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import FileState, cache_digests, cached_digests
from pipeline.merge.adapters import Adapted, Source, adapter_root, recorded_key
from pipeline.models.arrays import in_threads
from pipeline.models.checkpoint import KIND, weights_root
from pipeline.runs.manifest import read_manifest

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging


class SourceDigests:
    """Digests of a merge's sources, read before it is written and cached afterwards.

    `known`: source -> tensor -> digest; of an adapter its base's, for what it leaves alone.
    """

    def __init__(self, merge: Merging, runs_dir: Path) -> None:
        self.merge, self.runs_dir, self.begun = merge, runs_dir, time.time_ns()
        self.sources = merge.sources | (merge.vocabulary.whole if merge.vocabulary else {})
        self.seen = {file: FileState.now(file) for source in self.sources.values() for file in source.files}
        self.known = {role: self._recorded_digests(source) for role, source in self.sources.items()}
        self.root = cache(self._root)

    def _recorded_digests(self, source: Source) -> dict[str, str]:
        manifest = read_manifest(source.base.folder if isinstance(source, Adapted) else source.folder)
        recorded = [manifest.weights.get("digests", {})] if manifest else []
        recorded += [cached_digests(self.seen[file], self.runs_dir).get("tensors", {}) for file in source.files]
        return {name: digest for digests in recorded for name, digest in digests.items() if digest.startswith(KIND)}

    def cache_digests(self, digests: Mapping[str, str]) -> None:
        """Cache the digests of copied tensors, {tensor: digest}, for the next merge of the same sources."""
        by_file: dict[Path, dict[str, str]] = {}
        for name in digests:
            copied = self.merge.copied_from(name)
            if copied and name not in self.known[copied[0]]:
                by_file.setdefault(copied[1].file, {})[name] = digests[name]
        for file, tensors in by_file.items():
            cache_digests(self.seen[file], self.begun, self.runs_dir, tensors=tensors)

    # ------------------------------------------------------------------------------------------------ the merge's key

    def of_base(self, role: str) -> Mapping[str, str]:
        """The digest of each tensor of a source, of an adapter's base. Hashes what no record has."""
        source, known = self.sources[role], self.known[role]
        checkpoint = source.base if isinstance(source, Adapted) else source
        for file, names in checkpoint.files.items():
            unknown = [name for name in names if name not in known]
            tensors = dict(zip(unknown, in_threads(lambda name: checkpoint.infos[name].digest(), unknown), strict=True))
            known.update(tensors)
            if tensors:
                cache_digests(self.seen[file], self.begun, self.runs_dir, tensors=tensors)
        return known

    def _root(self, role: str) -> str:
        """The root over a source's tensors, of an adapter over its base's and its own."""
        source, digests = self.sources[role], self.of_base(role)
        root = weights_root({name: digests[name] for name in source.names})
        return f"{root} {adapter_root(source)}" if isinstance(source, Adapted) else root

    def identity(self, role: str, name: str | None) -> Any:
        """Of a source's tensor its digest, of an adapter's with the adapter's own; of the whole source its root."""
        if name is None:
            return self.root(role)
        source, digest = self.sources[role], self.of_base(role)[name]
        return [digest, adapter_root(source)] if isinstance(source, Adapted) else digest

    def key(self) -> str:
        """What the merge's weights are known by before and after they are computed: `merge:...`, over what each tensor
        is made of; where all are one source's unchanged, the key of that source.

        Of a linear merge that is {tensor: ([(digest of the source's tensor, share)], dtype)}, else knobs and roots.
        """
        if role := self.merge.sole_source():
            source = self.sources[role]
            return recorded_key(source.folder) or (
                adapter_root(source) if isinstance(source, Adapted) else self.root(role)
            )
        tensors = {name: self.merge.decided_by(name, self.identity) for name in self.merge.names}
        text = json.dumps([tensors, "adapter" if self.merge.adapter else "dense"], sort_keys=True, default=str)
        return f"merge:{hashlib.sha256(text.encode()).hexdigest()}"
