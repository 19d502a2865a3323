"""Stage prefetch: fetches every model and data set that a table needs, and locks revisions.

The lock file, runs_dir/hub.lock.json, then affects the hashes of runs, and compute nodes run with
HF_HUB_OFFLINE=1. A locked revision is kept when the Hub has a newer one, unless
prefetch.update=true.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from fsspec.utils import glob_translate

from pipeline.commands.plan import not_planned
from pipeline.config.data import Source
from pipeline.config.stages import PrefetchStage
from pipeline.data.load import readable_errors
from pipeline.errors import PipelineError, first_few
from pipeline.files import replacing, sha256, write_atomically
from pipeline.hub.addresses import plain_addresses, without_credentials
from pipeline.hub.lock import (
    LOCK,
    Lock,
    cached_snapshot,
    digest_of,
    part_of,
    pinned_as,
    read_lock,
    url_key,
)
from pipeline.models.files import HUB_COPIES, HUB_PATTERNS
from pipeline.progress import say
from pipeline.runs.dtypes import dtypes_in
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.stages.hub_inputs import collect_hub_inputs
from pipeline.stages.rows import build_single
from pipeline.tables.planned_runs import Planning


def prefetch(config: PrefetchStage) -> Path:
    """Fetch and lock the inputs of a table or of a single command. Return the lock file.

    Evaluations of models that are still to be chosen need the same inputs for each candidate.

    Raises:
        PipelineError: parts of the table cannot be planned, so that their inputs are unknown. The
            other inputs are locked.
    """
    if config.command is not None:
        return fetch_and_lock(order_runs([build_single(config.command)]), config)
    planning = Planning.of(config)
    path = fetch_and_lock(
        order_runs([*planning.targets(), *planning.waiting_evaluations()]), config
    )
    if planning.problems:
        planning = Planning.of(config)  # again, because some plans need fetched files
        planning.targets()
    causes = not_planned(planning)
    if causes:
        raise PipelineError(*causes)
    return path


def fetch_and_lock(runs: list[Run], config: PrefetchStage) -> Path:
    """Fetch the inputs of the runs and lock them. Return the lock file.

    The lock file is written after each input, so that an interrupted prefetch resumes.

    Raises:
        PipelineError: some inputs could not be fetched. The others are locked.
    """
    runs_dir, inputs = config.runs_path, collect_hub_inputs(runs)
    runs_dir.mkdir(parents=True, exist_ok=True)
    lock = read_lock(runs_dir)
    path = runs_dir / LOCK
    update = config.prefetch.update
    steps: list[tuple[str, Callable[[], None]]] = []
    for model in inputs.models:
        steps.append((f"model: {model}", partial(fetch_model, lock, model, update)))
    for label, source in inputs.sources.items():
        fetch = fetch_url if source.url else fetch_dataset
        steps.append((label, partial(fetch, lock, source, update)))
    for hub, part in inputs.scored:
        label = f"harness: {hub} {part or ''}"
        steps.append((label, partial(fetch_for_harness, lock, hub, part)))
    failed = list(inputs.problems)
    for number, (label, step) in enumerate(steps, start=1):
        plain = without_credentials(label)
        say(f"[{number}/{len(steps)}] {plain}")
        name, _, address = label.partition(": ")
        about = inputs.sources.get(label) or Source(hub=address, rows="", file="")
        try:
            with readable_errors(name, about):
                step()
        except PipelineError as error:
            failed.append(f"{plain} could not be fetched: {error}")
        else:
            write_lock(path, lock)
    if failed:
        raise PipelineError(*failed)
    write_lock(path, lock)
    return path


def write_lock(path: Path, lock: Lock) -> None:
    record = {"models": lock.models, "datasets": lock.datasets, "urls": lock.urls}
    write_atomically(path, json.dumps(record, indent=1, sort_keys=True) + "\n")


def _hub_client() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def revision_to_fetch(info: Callable[..., Any], name: str, locked: str | None, update: bool) -> str:
    """Return the locked revision. Without a lock, or with `update`, return the newest."""
    if locked is not None and not update:
        return locked
    repository, _, revision = name.partition("@")
    return str(info(repository, revision=revision or None).sha)


def fetch_model(lock: Lock, name: str, update: bool) -> None:
    """Fetch a model into the Hub's cache and lock its revision.

    Weights are read from safetensors only.
    """
    hub, entry = _hub_client(), lock.models.get(name, {})
    revision = revision_to_fetch(hub.model_info, name, entry.get("revision"), update)
    repository = name.partition("@")[0]
    hub.snapshot_download(
        repository, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_COPIES
    )
    folder = cached_snapshot("model", repository, revision)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    if not any(file.endswith(".safetensors") for file in files):
        raise PipelineError(
            f"hub:{name} has no safetensors. Convert it: weights in pickles are not read."
        )
    lock.models[name] = {"revision": revision, "files": files, "dtypes": dtypes_in(folder)}


def fetch_dataset(lock: Lock, source: Source, update: bool) -> None:
    """Fetch the files of one data set part into the Hub's cache and lock their revision.

    A part is a configuration and split, or a pattern of files.
    """
    hub = _hub_client()
    assert source.hub is not None
    if Path(source.hub).is_dir():
        return  # a local copy, as in the tests
    locked = (name for name in lock.datasets if name.partition("@")[0] == source.hub)
    same = (name for name in locked if lock.datasets[name]["revision"] == source.revision)
    name = next(same, pinned_as(source.hub, source.revision))
    entry = lock.datasets.get(name, {"revision": None, "parts": {}})
    revision = revision_to_fetch(hub.dataset_info, name, entry["revision"], update)
    kind, paths = data_files(hub, source, revision)
    folder = Path(
        hub.snapshot_download(
            source.hub,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(map(escape, paths)),
        )
    )
    sizes = {path: (folder / path).stat().st_size for path in paths}
    parts = {}
    if entry["revision"] == revision:  # other parts are fetched again by the tables that read them
        parts = dict(entry["parts"])
    parts[part_of(source)] = {"format": kind, "files": sizes}
    lock.datasets[name] = {"revision": revision, "parts": parts}


def fetch_for_harness(lock: Lock, hub: str, name: str | None) -> None:
    """Load a data set into the cache of `datasets`, where the harness finds it offline."""
    from datasets import load_dataset

    if hub not in lock.datasets:
        raise PipelineError(
            f"{hub} is not locked, because it could not be fetched. Fix that first, then rerun"
            " stage=prefetch."
        )
    for read in load_dataset(hub, name, revision=lock.datasets[hub]["revision"]).values():
        for file in read.cache_files:
            with suppress(OSError):  # the cache may belong to another user
                os.utime(Path(file["filename"]).parent)  # offline, `datasets` reads the newest


def data_files(hub: Any, source: Source, revision: str) -> tuple[str | None, list[str]]:
    """Return (format, files) of a part of a repository, resolved by `datasets`."""
    assert source.hub is not None
    if source.files is not None:
        names = hub.list_repo_files(source.hub, repo_type="dataset", revision=revision)
        pattern = re.compile(glob_translate(source.files))  # as `datasets` reads it
        files_found = sorted(filter(pattern.match, names))
        if not files_found:
            raise PipelineError(
                f"{source.hub} has no file like {source.files}. Look at its files and set another"
                " pattern."
            )
        return source.format, files_found
    from datasets import load_dataset_builder

    builder = load_dataset_builder(source.hub, source.hub_config, revision=revision)
    files = builder.config.data_files or {}
    if source.split not in files:
        raise PipelineError(
            f"{source.hub} has no split {source.split}. Its splits: {first_few(list(files), 5)}."
        )
    form = type(builder).__module__.rpartition(".")[2]
    paths = [str(file).split(f"@{revision}/", 1)[1] for file in files[source.split]]
    return form, paths


def fetch_url(lock: Lock, source: Source, update: bool) -> None:
    """Fetch a file by its URL into runs_dir/.hub.

    The file is identified by the digest of its content.

    Raises:
        PipelineError: the content differs from the locked one, and `update` is false.
    """
    from huggingface_hub.file_download import http_get

    assert source.url is not None
    locked_as = url_key(source.url)
    if update:
        locked = {}
    else:
        locked = lock.urls.get(locked_as, {})
    file_name = plain_addresses(source.url).rpartition("/")[2]
    path = Path(".hub") / f"{digest_of([source.url])[:8]}-{file_name}"
    target = lock.folder / path
    if locked and target.is_file() and target.stat().st_size == locked["bytes"]:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        with open(temporary, "wb") as file:
            http_get(source.url, file)  # resumes a download that breaks off
        digest, size = sha256(temporary), temporary.stat().st_size
        if locked and locked["sha256"] != digest:
            raise PipelineError(
                f"{without_credentials(source.url)} has changed since it was locked. Put the locked"
                f" file at {target}, or set prefetch.update=true, which changes hashes of runs."
            )
    lock.urls[locked_as] = {"sha256": digest, "bytes": size, "path": path.as_posix()}
