"""Files: written at once or not at all, and known by their digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

UNHASHED_FILES = ("wandb/",)  # tracking writes there; results are elsewhere
MOST_NODES = 100_000  # of a YAML file, its aliases written out; the largest under conf/ has 742
KEPT = ".digests"  # in runs_dir
ADDED_CONF = "PIPELINE_CONFIG_DIRS"  # in the environment, where workers and the tasks of an array find them too
SETTLED_NS = 2 * 10**9  # the coarsest clock of a file system, FAT's, ticks every two seconds


def shipped_conf() -> Path:
    """conf/ as shipped in the wheel, else that of the checkout."""
    package = Path(__file__).parent
    return package / "conf" if (package / "conf").is_dir() else package.parents[1] / "conf"


def added_conf() -> list[Path]:
    """The folders of --config-dir."""
    return list(map(Path, os.environ.get(ADDED_CONF, "").splitlines()))


def add_conf(folder: Path) -> None:
    os.environ[ADDED_CONF] = "\n".join(map(str, [*added_conf(), folder]))


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside `path`, this writer's own; what is written to it replaces `path` in one rename.

    A reader sees the old file or the new one, and of several writers the last one's. Nothing is left after an error.
    durable: flush to disk before the rename.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield beside
        if durable:
            with open(beside, "rb") as file:
                os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    with replacing(path, durable) as beside:
        beside.write_text(text, encoding="utf-8")


def move(folder: Path, target: Path) -> None:
    """Rename a folder. Where the file system cannot, as an overlay of what is in its lower layer, copy it beside the
    target, rename the copy, and delete the source."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        try:
            shutil.copytree(folder, beside, symlinks=True)
            os.rename(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprints(folder: Path, without: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Size, time and sha256 of each file that counts as a result; no sha256 of those that are known `without` it."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(UNHASHED_FILES):
            stat = path.stat()
            found[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            found[name] |= {} if name in without else {"sha256": sha256(path)}
    return found


# ---------------------------------------------------------------------------------------------------- digests, kept


@dataclass(frozen=True)
class Seen:
    """A file as it was at a time: what tells that it did not change since."""

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int  # no program can set this one
    inode: int

    @classmethod
    def now(cls, path: Path) -> Seen:
        path = path.resolve()
        stat = path.stat()
        return cls(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


_known: dict[Seen, dict[str, Any]] = {}  # in this process


def kept(seen: Seen, runs_dir: Path | None = None) -> dict[str, Any]:
    """What is known of a file: its `sha256`, and the digests of its `tensors`. Empty where nothing is.

    One small file for each in runs_dir/.digests, replaced whole: processes may write at once, and what one of them
    loses is computed again.
    """
    if seen not in _known and runs_dir is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            entry = json.loads(_place(seen, runs_dir).read_bytes())
            if entry["seen"] == _told(seen):
                _known[seen] = dict(entry["known"])
    return _known.get(seen, {})


def keep(seen: Seen, begun_ns: int, runs_dir: Path | None = None, **known: Any) -> None:
    """Keep what was found in a file that was read since `begun_ns`.

    Beyond this process only where it had not been touched for a while by then: a file can change once more within the
    same tick of its clock, and look as before (what git calls racily clean).

    Raises:
        PipelineError: it changed meanwhile.
    """
    if Seen.now(seen.path) != seen:
        raise PipelineError(f"{seen.path} changed while it was read: wait until it is complete")
    before = _known.get(seen, {})
    _known[seen] = before | known | {"tensors": before.get("tensors", {}) | known.get("tensors", {})}
    if runs_dir is None or max(seen.mtime_ns, seen.ctime_ns) > begun_ns - SETTLED_NS:
        return
    with suppress(OSError):  # a runs_dir that cannot be written to: hashed again next time
        place = _place(seen, runs_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"seen": _told(seen), "known": _known[seen]})
        write_atomically(place, text, durable=False)


def _place(seen: Seen, runs_dir: Path) -> Path:
    return runs_dir / KEPT / f"{hashlib.sha256(os.fsencode(seen.path)).hexdigest()[:32]}.json"


def _told(seen: Seen) -> list[Any]:
    return [os.fsdecode(seen.path), seen.size, seen.mtime_ns, seen.ctime_ns, seen.inode]


def sha256_of(paths: Iterable[Path], runs_dir: Path | None = None) -> dict[Path, str]:
    """The sha256 of each file: as kept, else read, in threads, as hashing is what takes the time."""
    seen = {path: Seen.now(path) for path in paths}
    unknown = {one for one in seen.values() if not kept(one, runs_dir).get("sha256")}

    def find(one: Seen) -> None:
        begun = time.time_ns()
        keep(one, begun, runs_dir, sha256=sha256(one.path))

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(8, cores)) as pool:
        list(pool.map(find, sorted(unknown, key=lambda one: (-one.size, one.path))))
    return {path: kept(one)["sha256"] for path, one in seen.items()}


def content_hash(paths: list[Path], root: Path, runs_dir: Path | None = None) -> str:
    """One digest over named files: the identity of what no run of ours made."""
    digest, found = hashlib.sha256(), sha256_of(paths, runs_dir)
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)} {found[path]}\n".encode())
    return digest.hexdigest()


def check_yaml_size(text: str, file: str | Path) -> None:
    """Refuse YAML whose aliases, written out, make more than MOST_NODES nodes: a few lines can stand for millions.

    Raises:
        PipelineError: too many nodes, or one that holds itself. What is no YAML is left to whoever reads it.
    """
    if "&" not in text:
        return
    import yaml

    sizes: dict[yaml.Node, int] = {}

    def size(node: yaml.Node | None) -> int:
        if node is None or not isinstance(node.value, list):
            return 1
        if node not in sizes:
            sizes[node] = MOST_NODES  # of one that holds itself
            parts = (part for one in node.value for part in (one if isinstance(one, tuple) else (one,)))
            sizes[node] = 1 + sum(map(size, parts))
        return sizes[node]

    try:
        nodes = size(yaml.compose(text, yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        return
    if nodes > MOST_NODES:
        raise PipelineError(
            f"{file}: its aliases (*NAME) stand for more than {MOST_NODES} nodes: write fewer of them inside each other"
        )


def link(source: Path, target: Path) -> None:
    """A hard link, which takes no room; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
