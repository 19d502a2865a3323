"""The lock file: the revision of each model, dataset and file that a table's runs use.

stage=prefetch writes runs_dir/hub.lock.json. Its content affects the hashes of runs. Files are only
read from the Hub's cache, so compute nodes need no network. This module imports no heavy library.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.hub.addresses import without_credentials

LOCK = "hub.lock.json"


def hub_cache() -> Path:
    """Return the Hub's cache folder."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def unusable_cache() -> str:
    """Return why no file can be written or locked in the Hub's cache, or an empty text.

    Libraries also write there what they read from local files.
    """
    folder = hub_cache().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        return (
            f"The Hub's cache {folder} cannot be written ({error.strerror}). Set HF_HOME to a"
            " folder that can be written."
        )
    return ""


def cached_snapshot(kind: str, name: str, revision: str) -> Path:
    """Return the folder of a model's or a dataset's revision in the cache."""
    repository = f"{kind}s--{name.replace('/', '--')}"
    return hub_cache() / repository / "snapshots" / revision


def part_of(source: Source) -> str:
    """Return the part of a repository that a source reads: files, or configuration and split."""
    return source.files or f"{source.hub_config or 'default'}/{source.split}"


@dataclass
class Lock:
    """The content of the lock file.

    Args:
        models: id -> revision, files.
        datasets: id or id@requested -> revision, parts.
        urls: address -> sha256, path.
        folder: the folder of the lock file. Fetched files of `urls` are below it.
    """

    models: dict[str, Any] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)
    urls: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    def entry(self, source: Source) -> dict[str, Any] | None:
        """Return the entry of a source at the configured or locked revision, or None."""
        if source.url is not None:
            return self.urls.get(url_key(source.url))
        requested = pinned_as(source.hub, source.revision)
        part = part_of(source)
        for name, locked in self.datasets.items():
            if name.partition("@")[0] != source.hub or part not in locked["parts"]:
                continue
            if name == requested or locked["revision"] == source.revision:
                return locked
        return None

    def pinned(self, source: Source) -> Source:
        """Return the source at its locked revision; for a file from a URL, with its digest."""
        entry = self.entry(source)
        if entry:
            return replace(source, revision=entry.get("revision") or f"sha256:{entry['sha256']}")
        return source

    def source(self, source: Source) -> tuple[Source, list[Path] | None]:
        """Return a locked source and its complete files; (the source, None) if it is not locked."""
        entry = self.entry(source)
        if entry is None:
            return source, None
        pinned = self.pinned(source)
        if source.url is not None:
            address = without_credentials(source.url)
            return pinned, [check_size(self.folder / entry["path"], entry["bytes"], address)]
        assert source.hub is not None
        root = cached_snapshot("dataset", source.hub, entry["revision"])
        part = entry["parts"][part_of(source)]
        paths = [check_size(root / name, size, source.hub) for name, size in part["files"].items()]
        return replace(pinned, format=source.format or part["format"]), paths

    def model(self, name: str) -> tuple[str, Path] | None:
        """Return a locked model's revision and its folder in the cache, or None.

        `name` is id or id@requested.
        """
        entry = self.models.get(name)
        if entry is None:
            return None
        revision = entry["revision"]
        return revision, cached_snapshot("model", name.partition("@")[0], revision)

    def check_model(self, name: str) -> None:
        """Raise PipelineError unless the cache holds all files of a locked model completely."""
        locked = self.model(name)
        if locked is None:
            return
        _, folder = locked
        for file, size in self.models[name]["files"].items():
            check_size(folder / file, size, name)


def pinned_as(name: str | None, revision: str | None) -> str:
    if revision:
        return f"{name}@{revision}"
    return str(name)


def url_key(url: str) -> str:
    """Return an address as the lock file stores it, with a digest instead of its credentials."""
    plain = without_credentials(url)
    if plain == url:
        return url
    return f"{plain} {digest_of([url])[:8]}"


def check_size(path: Path, size: int, label: str) -> Path:
    """Return a locked file, or raise PipelineError unless it is complete."""
    bytes_there = None
    if path.is_file():
        bytes_there = path.stat().st_size
    if bytes_there != size:
        state = "is not there"
        if bytes_there is not None:
            state = f"has {bytes_there} of {size} bytes"
        raise PipelineError(
            f"{label} is locked, but {path.name} {state} in {path.parent}. Run stage=prefetch where"
            " the Hub can be reached, or set HF_HOME to the cache it filled."
        )
    return path


def read_lock(runs_dir: Path) -> Lock:
    """Return the lock of a runs_dir, or an empty one if none was written."""
    path = runs_dir / LOCK
    if not path.is_file():
        return Lock(folder=runs_dir)
    return _read_lock_file(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read_lock_file(path: Path, _: int) -> Lock:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Lock(content["models"], content["datasets"], content["urls"], path.parent)
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{path} is not a lock file of this program. Remove it and run stage=prefetch."
        ) from error


def digest_of(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
