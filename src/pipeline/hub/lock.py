"""The lock file: which revision of each model, dataset and file a table's runs use.

stage=prefetch writes runs_dir/hub.lock.json. Its content affects the hashes of runs, and the files
are read from the Hub's cache only, so that compute nodes need no network. Imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
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
    """Return the Hub's cache folder, by the rules of huggingface_hub."""
    home = os.environ.get(
        "HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    )
    folder = (
        os.environ.get("HF_HUB_CACHE")
        or os.environ.get("HUGGINGFACE_HUB_CACHE")
        or os.path.join(home, "hub")
    )
    return Path(os.path.expandvars(os.path.expanduser(folder)))


def unusable_cache() -> str:
    """Return why the Hub's cache, to which libraries also write what they read of local files,
    cannot be used: no file can be written or locked there.
    """
    folder = hub_cache().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if "HF_HOME" in os.environ:
            name = "HF_HOME"
        else:
            name = f"HOME={os.environ.get('HOME', '')}, and so HF_HOME"
        reason = error.strerror or "unusable"
        return (
            f"{name}={folder} cannot be written ({reason}): set HF_HOME to a folder on a disk that"
            " can be written"
        )
    return ""


def cached_snapshot(kind: str, name: str, revision: str) -> Path:
    """Where the cache keeps a revision of a model or a dataset."""
    return hub_cache() / f"{kind}s--{name.replace('/', '--')}" / "snapshots" / revision


def part_of(source: Source) -> str:
    """Return the part of a repository that a source reads: its files, or its configuration and
    split.
    """
    return source.files or f"{source.hub_config or 'default'}/{source.split}"


@dataclass
class Lock:
    """models: id -> revision, files.

    datasets: id or id@requested -> revision, parts. urls: address -> sha256, path.
    """

    models: dict[str, Any] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)
    urls: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()  # of the lock file; fetched files of `urls` are below it

    def entry(self, source: Source) -> dict[str, Any] | None:
        """Return the lock entry of a source, by the configured or the locked revision;

        None if it is not locked.
        """
        if source.url is not None:
            return self.urls.get(url_key(source.url))
        for name, locked in self.datasets.items():
            requested = (
                name == pinned_as(source.hub, source.revision)
                or locked["revision"] == source.revision
            )
            if (
                requested
                and name.partition("@")[0] == source.hub
                and part_of(source) in locked["parts"]
            ):
                return locked
        return None

    def pinned(self, source: Source) -> Source:
        """Return the source at its locked revision; for a file from a URL, with the digest of its
        content.
        """
        entry = self.entry(source)
        if entry:
            return replace(source, revision=entry.get("revision") or f"sha256:{entry['sha256']}")
        return source

    def source(self, source: Source) -> tuple[Source, list[Path] | None]:
        """Return a locked source and its complete files; (the source, None) if it is not locked."""
        entry = self.entry(source)
        if entry is None:
            return source, None
        if source.url is not None:
            address = without_credentials(source.url)
            return self.pinned(source), [
                check_size(self.folder / entry["path"], entry["bytes"], address)
            ]
        assert source.hub is not None
        root, part = (
            cached_snapshot("dataset", source.hub, entry["revision"]),
            entry["parts"][part_of(source)],
        )
        paths = [check_size(root / name, size, source.hub) for name, size in part["files"].items()]
        return replace(self.pinned(source), format=source.format or part["format"]), paths

    def model(self, name: str) -> tuple[str, Path] | None:
        """Return the locked revision of a model (id or id@requested) and its folder in the cache;

        None if it is not locked.
        """
        entry = self.models.get(name)
        if entry is None:
            return None
        return entry["revision"], cached_snapshot(
            "model", name.partition("@")[0], entry["revision"]
        )

    def check_model(self, name: str) -> None:
        """Raise a PipelineError unless the cache holds each file of a locked model completely."""
        locked = self.model(name)
        if locked:
            for file, size in self.models[name]["files"].items():
                check_size(locked[1] / file, size, name)


def pinned_as(name: str | None, revision: str | None) -> str:
    if revision:
        return f"{name}@{revision}"
    return str(name)


def url_key(url: str) -> str:
    """Return an address as the lock file stores it: without credentials, with a digest in their
    place.
    """
    plain = without_credentials(url)
    if plain == url:
        return url
    return f"{plain} {digest_of([url])[:8]}"


def check_size(path: Path, size: int, label: str) -> Path:
    bytes_there = None
    if path.is_file():
        bytes_there = path.stat().st_size
    if bytes_there != size:
        if bytes_there is None:
            state = "is not there"
        else:
            state = f"has {bytes_there} of {size} bytes"
        raise PipelineError(
            f"{label} is locked, but {path.name} {state} in {path.parent}: run stage=prefetch where"
            " the Hub can be reached, or set HF_HOME to the cache it filled"
        )
    return path


def read_lock(runs_dir: Path) -> Lock:
    """Return the lock of a runs_dir; an empty one if none was written."""
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
            f"{path} is not a lock file of this program: remove it and run stage=prefetch"
        ) from error


def digest_of(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
