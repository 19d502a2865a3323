"""Stage prefetch: fetch every model and data set that a table needs, and lock the revision of each.

The lock file, runs_dir/hub.lock.json, then affects the hashes of runs, and compute nodes run with
HF_HUB_OFFLINE=1. Locked revisions are kept when the Hub has newer ones, unless
prefetch.update=true.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from fsspec.utils import glob_translate
from tqdm import tqdm

from pipeline.commands.plan import not_planned
from pipeline.config.data import Source
from pipeline.config.stages import PrefetchStage
from pipeline.data.load import readable_errors
from pipeline.errors import PipelineError
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
from pipeline.text import pluralize

TIMEOUT = 60.0  # seconds without an answer, or without a byte of it, after which a download fails


def prefetch(config: PrefetchStage) -> Path:
    """Fetch and lock the inputs of a table, or of a single command. Returns the lock file.

    Evaluations of models that are still to be selected need the same inputs for each candidate.

    Raises:
        PipelineError: parts of the table cannot be planned, so that their inputs are not known; the
            others are locked.
    """
    if config.command is not None:
        return fetch_and_lock(order_runs([build_single(config.command)]), config)
    planning = Planning.of(config)
    path = fetch_and_lock(
        order_runs([*planning.targets(), *planning.waiting_evaluations()]), config
    )
    if planning.problems:
        planning = Planning.of(config)  # again, as some plans need what was fetched
        planning.targets()
    causes = not_planned(planning)
    if causes:
        raise PipelineError(*causes)
    return path


def fetch_and_lock(runs: list[Run], config: PrefetchStage) -> Path:
    """Fetch the inputs of the runs and lock them.

    Returns the lock file, which is written after each input, so that an interrupted prefetch
    resumes.

    Raises:
        PipelineError: some inputs could not be fetched; the others are locked.
    """
    runs_dir, inputs = config.runs_path, collect_hub_inputs(runs)
    runs_dir.mkdir(parents=True, exist_ok=True)
    lock = read_lock(runs_dir)
    path = runs_dir / LOCK
    update = config.prefetch.update
    steps: list[tuple[str, Callable[[], None]]] = [
        *((f"model: {name}", partial(fetch_model, lock, name, update)) for name in inputs.models),
        *(
            (label, partial(fetch_url if source.url else fetch_dataset, lock, source, update))
            for label, source in inputs.sources.items()
        ),
        *(
            (f"harness: {hub} {part or ''}", partial(fetch_for_harness, lock, hub, part))
            for hub, part in inputs.scored
        ),
    ]
    failed = list(inputs.problems)
    for number, (label, step) in enumerate(steps, start=1):
        plain = without_credentials(label)
        say(f"[{number}/{len(steps)}] {plain}")
        try:
            name, _, address = label.partition(": ")
            with readable_errors(
                name, inputs.sources.get(label) or Source(hub=address, rows="", file="")
            ):
                step()
        except PipelineError as error:
            say(f"{plain} failed: {error}")
            failed.append(str(error))
            continue
        write_lock(path, lock)
    if failed:
        count = len(steps) + len(inputs.problems)
        remedy = ""
        if len(failed) < count:
            remedy = f", the others are locked in {path}"
        raise PipelineError(
            f"{len(failed)} of {count} could not be fetched{remedy}; rerun the command for these;"
            f" first: {failed[0]}"
        )
    write_lock(path, lock)
    return path


def write_lock(path: Path, lock: Lock) -> None:
    record = {"models": lock.models, "datasets": lock.datasets, "urls": lock.urls}
    write_atomically(path, json.dumps(record, indent=1, sort_keys=True) + "\n")


def _hub_client() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def revision_to_fetch(info: Callable[..., Any], name: str, locked: str | None, update: bool) -> str:
    """Return the revision to fetch: the locked one, or the newest if there is none or `update`."""
    repository, _, revision = name.partition("@")
    newest = info(repository, revision=revision or None).sha
    if locked is None or update:
        return newest
    if locked != newest:
        say(
            f"{name} has moved on the Hub since it was locked ({locked[:8]} -> {newest[:8]}): using"
            " the locked one; prefetch.update=true takes the new one, which changes hashes of runs"
        )
    return locked


def fetch_model(lock: Lock, name: str, update: bool) -> None:
    """Fetch weights (safetensors only), tokenizer and configuration of a model into the Hub's cache
    and lock them.
    """
    hub, entry = _hub_client(), lock.models.get(name, {})
    revision = revision_to_fetch(hub.model_info, name, entry.get("revision"), update)
    repository = name.partition("@")[0]
    fetch_files(hub, "model", repository, revision, HUB_PATTERNS, HUB_COPIES)
    folder = cached_snapshot("model", repository, revision)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    if not any(file.endswith(".safetensors") for file in files):
        raise PipelineError(
            f"hub:{name} has no safetensors: convert it, weights in pickles are not read"
        )
    lock.models[name] = {"revision": revision, "files": files, "dtypes": dtypes_in(folder)}


def fetch_files(
    hub: Any,
    kind: str,
    repository: str,
    revision: str,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
) -> Path:
    """Print how many bytes of a repository are not in the Hub's cache yet, and fetch them.

    Returns their folder.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    of_repository: dict[str, Any] = {"repo_type": kind, "revision": revision}
    wanted: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ignored}
    files = hub.repo_info(
        repository, **of_repository, files_metadata=True
    ).siblings  # one request, not one a file
    missing = [
        file.size or 0
        for file in filter_repo_objects(files, **wanted, key=lambda file: file.rfilename)
        if not try_to_load_from_cache(repository, file.rfilename, **of_repository)
    ]
    if missing:
        size = tqdm.format_sizeof(sum(missing), "B")
        say(f"  fetches {size} in {pluralize(len(missing), 'file')}")
    return Path(hub.snapshot_download(repository, **of_repository, **wanted))


def fetch_dataset(lock: Lock, source: Source, update: bool) -> None:
    """Fetch the files of one configuration and split, or of a pattern, into the Hub's cache and
    lock them.
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
    moved, parts = entry["revision"] != revision, dict(entry["parts"])
    other_sources = []
    for part, record in parts.items():
        if moved and part != part_of(source):
            other_sources.append(source_of(source, part, record))
    for part_source in [
        source,
        *other_sources,
    ]:  # at a new revision also the parts that only other tables read
        kind, paths = data_files(hub, part_source, revision)
        folder = fetch_files(hub, "dataset", source.hub, revision, list(map(escape, paths)))
        sizes = {path: (folder / path).stat().st_size for path in paths}
        parts[part_of(part_source)] = {"format": kind, "files": sizes}
    lock.datasets[name] = {"revision": revision, "parts": parts}


def source_of(source: Source, part: str, record: dict[str, Any]) -> Source:
    """Return the source of another locked part of the same repository.

    A part is a pattern of its files, or configuration and split.
    """
    pattern = re.compile(glob_translate(part))
    if all(map(pattern.match, record["files"])):
        return replace(source, files=part, format=record["format"])
    hub_config, _, split = part.rpartition("/")
    return replace(
        source, files=None, hub_config=None if hub_config == "default" else hub_config, split=split
    )


def fetch_for_harness(lock: Lock, hub: str, name: str | None) -> None:
    """Load a data set into the cache of `datasets`, where the harness finds it offline."""
    from datasets import load_dataset

    if hub not in lock.datasets:
        raise PipelineError(
            f"{hub} is not locked, as it could not be fetched: fix that first, then rerun"
            " stage=prefetch"
        )
    for read in load_dataset(hub, name, revision=lock.datasets[hub]["revision"]).values():
        for file in read.cache_files:
            with suppress(OSError):  # of a cache that belongs to somebody else
                os.utime(
                    Path(file["filename"]).parent
                )  # the newest is what `datasets` reads offline


def data_files(hub: Any, source: Source, revision: str) -> tuple[str | None, list[str]]:
    """(format, files) of a part of a repository, as `datasets` itself resolves them."""
    assert source.hub is not None
    if source.files is not None:
        names = hub.list_repo_files(source.hub, repo_type="dataset", revision=revision)
        files_found = sorted(
            filter(re.compile(glob_translate(source.files)).match, names)
        )  # as `datasets` reads it
        if not files_found:
            raise PipelineError(
                f"{source.hub} has no file like {source.files}: look at its files and give another"
                " pattern"
            )
        return source.format, files_found
    from datasets import load_dataset_builder

    builder = load_dataset_builder(source.hub, source.hub_config, revision=revision)
    files = builder.config.data_files or {}
    if source.split not in files:
        raise PipelineError(
            f"{source.hub} has no split {source.split}: there are {', '.join(files)}"
        )
    return type(builder).__module__.rpartition(".")[2], [
        str(file).split(f"@{revision}/", 1)[1] for file in files[source.split]
    ]


def fetch_url(lock: Lock, source: Source, update: bool) -> None:
    """Fetch a file by its URL to runs_dir/.hub; it is identified by the digest of its content.

    Raises PipelineError for another content than is locked, unless `update`.
    """
    assert source.url is not None
    locked_as = url_key(source.url)
    if update:
        locked = {}
    else:
        locked = lock.urls.get(locked_as, {})
    path = (
        Path(".hub")
        / f"{digest_of([source.url])[:8]}-{plain_addresses(source.url).rpartition('/')[2]}"
    )
    target = lock.folder / path
    if locked and target.is_file() and target.stat().st_size == locked["bytes"]:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        with (
            urllib.request.urlopen(source.url, timeout=TIMEOUT) as response,
            open(temporary, "wb") as file,
        ):
            shutil.copyfileobj(response, file)
            length = int(response.headers.get("Content-Length") or file.tell())
            if file.tell() != length:  # which urllib does not notice
                address = without_credentials(source.url)
                raise PipelineError(
                    f"{address} broke off after {file.tell()} of {length} bytes: rerun the command"
                )
        digest = sha256(temporary)
        if locked and locked["sha256"] != digest:
            raise PipelineError(
                f"{without_credentials(source.url)} has changed since it was locked: put the file"
                f" of then at {target}, or give prefetch.update=true, which changes hashes of runs"
            )
    lock.urls[locked_as] = {"sha256": digest, "bytes": length, "path": path.as_posix()}
