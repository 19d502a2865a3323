"""What a merge's sources and the merge itself are known by: digests on record, else computed once and cached."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.merge.adapters import Adapted, Source, adapter_root, recorded_key
from pipeline.models.checkpoint import KIND, weights_root
from pipeline.models.identity import file_digests
from pipeline.runs.manifest import read_manifest

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging


class SourceDigests:
    """Digests of a merge's sources. `known`: source -> tensor -> digest; of an adapter its base's, for what it leaves
    alone. Tensors that are not finite have none."""

    def __init__(self, merge: Merging, runs_dir: Path) -> None:
        self.merge, self.runs_dir = merge, runs_dir
        self.sources = merge.sources | (merge.vocabulary.whole if merge.vocabulary else {})
        self.known = {role: self._digests(source) for role, source in self.sources.items()}
        self.root = cache(self._root)

    def _digests(self, source: Source) -> dict[str, str]:
        """Those that a run recorded; of other files all tensors are read once."""
        manifest = read_manifest(source.model.folder)
        recorded = manifest.weights.get("digests", {}) if manifest else {}
        known = {name: digest for name, digest in recorded.items() if digest.startswith(KIND)}
        for file, names in source.files.items():
            if not known.keys() >= set(names):
                known |= file_digests(file, self.runs_dir)["tensors"]
        return known

    def _root(self, role: str) -> str:
        """The root over a source's tensors, of an adapter over its base's and its own."""
        source = self.sources[role]
        root = weights_root({name: self._digest(role, name) for name in source.names})
        return f"{root} {adapter_root(source)}" if isinstance(source, Adapted) else root

    def _digest(self, role: str, name: str) -> str:
        """Raises PipelineError, naming it, for a tensor that is not finite."""
        return self.known[role].get(name) or self.sources[role].model.info(name).digest()

    def identity(self, role: str, name: str | None) -> Any:
        """The digest of a source's tensor, with an adapter's own root where it is one; without a name its root."""
        if name is None:
            return self.root(role)
        source, digest = self.sources[role], self._digest(role, name)
        return [digest, adapter_root(source)] if isinstance(source, Adapted) else digest

    def key(self) -> str:
        """What the merge's weights are known by before and after they are computed: `merge:...`, over what each tensor
        is made of; where all are one source's unchanged, the key of that source.

        Of a linear merge that is {tensor: ([(digest of the source's tensor, share)], dtype)}, else knobs and roots.
        """
        if role := self.merge.sole_source():
            source = self.sources[role]
            own = adapter_root(source) if isinstance(source, Adapted) else self.root(role)
            return recorded_key(source.folder) or own
        tensors = {name: self.merge.decided_by(name, self.identity) for name in self.merge.names}
        text = json.dumps([tensors, "adapter" if self.merge.adapter else "dense"], sort_keys=True, default=str)
        return f"merge:{hashlib.sha256(text.encode()).hexdigest()}"
