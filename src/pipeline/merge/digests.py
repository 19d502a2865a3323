"""The digests of a merge's sources: on record where a run wrote them, else cached when they were last read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.files import FileState, cache_digests, cached_digests
from pipeline.merge.adapters import Adapted, Source
from pipeline.models.checkpoint import KIND
from pipeline.runs.manifest import read_manifest

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging


class SourceDigests:
    """Digests of a merge's sources, read before it is written and cached afterwards.

    `known`: source -> tensor -> digest; of an adapter its base's, for what it leaves alone.
    """

    def __init__(self, merge: Merging, runs_dir: Path) -> None:
        self.merge, self.runs_dir, self.begun = merge, runs_dir, time.time_ns()
        self.seen = {file: FileState.now(file) for source in merge.sources.values() for file in source.files}
        self.known = {role: self._recorded_digests(source) for role, source in merge.sources.items()}

    def _recorded_digests(self, source: Source) -> dict[str, str]:
        manifest = read_manifest(source.base.folder if isinstance(source, Adapted) else source.folder)
        recorded = [manifest.weights.get("digests", {})] if manifest else []
        recorded += [cached_digests(self.seen[file], self.runs_dir).get("tensors", {}) for file in source.files]
        return {name: digest for digests in recorded for name, digest in digests.items() if digest.startswith(KIND)}

    def cache_digests(self, digests: Mapping[str, str]) -> None:
        """Cache the digests of copied tensors, {tensor: digest}, for the next merge of the same sources."""
        by_file: dict[Path, dict[str, str]] = {}
        for name in digests:
            role = self.merge.copied_from(name) if name in self.merge.weights else None
            info = self.merge.sources[role].stored(name) if role is not None else None
            if role is not None and info is not None and name not in self.known[role]:
                by_file.setdefault(info.file, {})[name] = digests[name]
        for file, tensors in by_file.items():
            cache_digests(self.seen[file], self.begun, self.runs_dir, tensors=tensors)
