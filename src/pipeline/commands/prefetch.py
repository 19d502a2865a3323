"""Stage prefetch: fetch every model and data set that a table needs, and lock the revision of each.

The lock file, runs_dir/hub.lock.json, then enters the hashes of runs, and compute nodes run with HF_HUB_OFFLINE=1. What
is locked stays so when the Hub moves on: prefetch.update=true takes what is new.
"""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.data import Source
from pipeline.config.stages import PrefetchStage
from pipeline.data.load import readable_errors
from pipeline.errors import PipelineError
from pipeline.files import replacing, sha256, write_atomically
from pipeline.hub.addresses import plain_addresses, without_credentials
from pipeline.hub.lock import LOCK, Lock, cached_snapshot, digest_of, part_of, pinned_as, read_lock, url_key
from pipeline.models.files import HUB_PATTERNS
from pipeline.runs.dtypes import dtypes_in
from pipeline.runs.graph import ordered
from pipeline.runs.run import Run
from pipeline.stages.hub_inputs import needs
from pipeline.tables.planned_runs import Planning


def prefetch(config: PrefetchStage) -> Path:
    """Of models that choices are still to name, what scores them is known: it is the same for each candidate."""
    planning = Planning.of(config)
    likely = [run for score in planning.waiting() if (run := planning.like(score))]
    return fetch(ordered([*planning.targets(), *likely]), config)


def fetch(runs: list[Run], config: PrefetchStage) -> Path:
    """Fetch what the runs need and lock it. Gives the lock file; it is written after each set, so that a prefetch that
    was stopped goes on where it was.
    """
    runs_dir, wanted = Path(config.runs_dir), needs(runs)
    runs_dir.mkdir(parents=True, exist_ok=True)
    lock = read_lock(runs_dir)
    path = runs_dir / LOCK
    steps: list[tuple[str, Callable[[], None]]] = []
    for name in wanted.models:
        steps.append((f"model: {name}", partial(fetch_model, lock, name, config.prefetch.update)))
    for label, source in wanted.sources.items():
        fetch_source = fetch_url if source.url else fetch_dataset
        steps.append((label, partial(fetch_source, lock, source, config.prefetch.update)))
    for hub, part in wanted.scored:
        steps.append((f"harness: {hub} {part or ''}", partial(prepare, lock, hub, part)))
    failed = list(wanted.problems)
    for number, (label, step) in enumerate(steps, start=1):
        plain = without_credentials(label)
        print(f"[{number}/{len(steps)}] {plain}", file=sys.stderr)
        try:
            name, _, where = label.partition(": ")
            with readable_errors(name, wanted.sources.get(label) or Source(hub=where, rows="", file="")):
                step()
        except PipelineError as error:
            print(f"{plain} failed: {error}", file=sys.stderr)
            failed.append(str(error))
            continue
        write_lock(path, lock)
    if failed:
        raise PipelineError(
            f"{len(failed)} of {len(steps) + len(wanted.problems)} could not be fetched, the others are locked in "
            f"{path}; first: {failed[0]}"
        )
    write_lock(path, lock)
    return path


def write_lock(path: Path, lock: Lock) -> None:
    kept = {"models": lock.models, "datasets": lock.datasets, "urls": lock.urls}
    write_atomically(path, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def revision_to_fetch(info: Callable[..., Any], name: str, was: str | None, update: bool) -> str:
    """The revision to fetch: what is locked, unless there is none or the new one is asked for."""
    repository, _, asked = name.partition("@")
    now = info(repository, revision=asked or None).sha
    if was is None or update:
        return now
    if was != now:
        print(
            f"{name} has moved on the Hub since it was locked ({was[:8]} -> {now[:8]}): the locked one is kept; "
            "prefetch.update=true takes the new one, and other hashes with it",
            file=sys.stderr,
        )
    return was


def fetch_model(lock: Lock, name: str, update: bool) -> None:
    """Weights, tokenizer and configuration of a model into the Hub's cache, safetensors only."""
    hub, entry = _hub(), lock.models.get(name, {})
    revision = revision_to_fetch(hub.model_info, name, entry.get("revision"), update)
    repository = name.partition("@")[0]
    hub.snapshot_download(repository, revision=revision, allow_patterns=HUB_PATTERNS)
    folder = cached_snapshot("model", repository, revision)
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    if not any(file.endswith(".safetensors") for file in files):
        raise PipelineError(f"hub:{name} has no safetensors: convert it, weights in pickles are not read")
    lock.models[name] = {"revision": revision, "files": files, "dtypes": dtypes_in(folder)}


def fetch_dataset(lock: Lock, source: Source, update: bool) -> None:
    """The files of one configuration and split, or of a pattern, into the Hub's cache."""
    hub = _hub()
    assert source.hub is not None
    if Path(source.hub).is_dir():
        return  # a copy that is here already, as the tests have
    name = next((name for name in _names(lock, source) if lock.datasets[name]["revision"] == source.revision), None)
    name = name or pinned_as(source.hub, source.revision)
    entry = lock.datasets.get(name, {"revision": None, "parts": {}})
    revision = revision_to_fetch(hub.dataset_info, name, entry["revision"], update)
    kind, paths = data_files(hub, source, revision)
    sizes = {}
    for path in paths:
        there = hub.hf_hub_download(source.hub, path, repo_type="dataset", revision=revision)
        sizes[path] = Path(there).stat().st_size
    parts = entry["parts"] if entry["revision"] == revision else {}
    lock.datasets[name] = {
        "revision": revision,
        "parts": {**parts, part_of(source): {"format": kind, "files": sizes}},
    }


def prepare(lock: Lock, hub: str, name: str | None) -> None:
    """A set as `datasets` keeps it, which is where the harness finds it when the Hub is off."""
    from datasets import load_dataset

    if hub not in lock.datasets:
        raise PipelineError(f"{hub} is not locked, as it could not be fetched: fix that first, then prefetch again")
    load_dataset(hub, name, revision=lock.datasets[hub]["revision"])


def _names(lock: Lock, source: Source) -> Iterator[str]:
    return (name for name in lock.datasets if name.partition("@")[0] == source.hub)


def data_files(hub: Any, source: Source, revision: str) -> tuple[str | None, list[str]]:
    """The format and the files of a part of a repository, as `datasets` itself resolves them."""
    assert source.hub is not None
    if source.files is not None:
        names = hub.list_repo_files(source.hub, repo_type="dataset", revision=revision)
        found = sorted(name for name in names if fnmatch(name, source.files))
        if not found:
            raise PipelineError(
                f"{source.hub} has no file like {source.files}: look at its files and give another pattern"
            )
        return source.format, found
    from datasets import load_dataset_builder

    builder = load_dataset_builder(source.hub, source.hub_config, revision=revision)
    files = builder.config.data_files or {}
    if source.split not in files:
        raise PipelineError(f"{source.hub} has no split {source.split}: there are {', '.join(files)}")
    return type(builder).__module__.rpartition(".")[2], [
        str(file).split(f"@{revision}/", 1)[1] for file in files[source.split]
    ]


def fetch_url(lock: Lock, source: Source, update: bool) -> None:
    """One file that is on no hub, below runs_dir/.hub; what identifies it is the digest of its content."""
    assert source.url is not None
    locked_as = url_key(source.url)
    path = Path(".hub") / f"{digest_of([source.url])[:8]}-{plain_addresses(source.url).rpartition('/')[2]}"
    target = lock.folder / path
    if locked_as in lock.urls and target.is_file() and not update:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as beside:
        with urllib.request.urlopen(source.url) as response, open(beside, "wb") as file:
            shutil.copyfileobj(response, file)
    lock.urls[locked_as] = {"sha256": sha256(target), "bytes": target.stat().st_size, "path": path.as_posix()}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
