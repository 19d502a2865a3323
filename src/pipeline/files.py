"""Files: written atomically, and identified by cached digests."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

UNHASHED_FILES = ("wandb/",)  # tracking writes there; it holds no results
# for example a number of 5,000 digits, or too many nested brackets
VALUE_ERRORS = (ValueError, KeyError, IndexError, AttributeError, RecursionError)
MOST_BYTES = 20_000_000  # maximum size of a YAML file
MOST_ENTRIES = 1_000_000  # maximum entries of a YAML file with resolved aliases
DIGESTS_FOLDER = ".digests"  # folder in runs_dir
ADDED_CONF = "PIPELINE_CONFIG_DIRS"  # environment variable that workers and array tasks inherit
SETTLED_NS = 2 * 10**9  # FAT has the coarsest clock of all file systems: two seconds


def shipped_conf() -> Path:
    """Return conf/ of the wheel, or of the checkout."""
    package = Path(__file__).parent
    if (package / "conf").is_dir():
        return package / "conf"
    return package.parents[1] / "conf"


def added_conf() -> tuple[Path, ...]:
    """Return the folders of --config-dir."""
    return _paths(os.environ.get(ADDED_CONF, ""))


@cache
def _paths(lines: str) -> tuple[Path, ...]:
    return tuple(map(Path, lines.splitlines()))


def config_dir_flags() -> list[str]:
    """Return the flags that give another command the same folders."""
    return [f"--config-dir={folder}" for folder in added_conf()]


def add_conf(folder: Path) -> None:
    os.environ[ADDED_CONF] = "\n".join(map(str, [*added_conf(), folder]))


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` by one rename at the end.

    A reader sees the old or the new file; with several writers, the last one's. After an error the
    temporary file is deleted.

    Args:
        path: the file to replace.
        durable: flush to disk before the rename.
    """
    writer = f"{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.with_name(f"{path.name}.{writer}.part")
    try:
        yield temporary
        if durable:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    with replacing(path, durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprints(folder: Path, unhashed: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return size, time and sha256 of each result file, by name.

    Files in `unhashed` get no sha256.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(UNHASHED_FILES):
            stat = path.stat()
            entries[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            if name not in unhashed:
                entries[name]["sha256"] = sha256(path)
    return entries


# --- cached digests ---


@dataclass(frozen=True)
class FileState:
    """The state of a file at one time, which reveals later changes."""

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int  # programs cannot set it
    inode: int

    @classmethod
    def now(cls, path: Path) -> FileState:
        path = path.resolve()
        stat = path.stat()
        return cls(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


_digests_of: dict[FileState, dict[str, Any]] = {}  # in this process


def cached_digests(state: FileState, runs_dir: Path | None = None) -> dict[str, Any]:
    """Return the cached digests of a file: its `sha256` and the digests of its `tensors`.

    The result is empty without a cache entry. Each entry is a small file in runs_dir/.digests that
    is replaced atomically. Processes may write concurrently; a lost digest is computed again.
    """
    if state not in _digests_of and runs_dir is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            entry = json.loads(_cache_file(state, runs_dir).read_bytes())
            if entry["seen"] == _state_fields(state):
                _digests_of[state] = dict(entry["known"])
    return _digests_of.get(state, {})


def cache_digests(
    state: FileState, begun_ns: int, runs_dir: Path | None = None, **digests: Any
) -> None:
    """Cache the digests of a file that was read since `begun_ns`.

    The cache outlives this process only if the file had not changed for a while before. A file can
    change once more within one tick of its clock and look unchanged (git calls this racily clean).

    Raises:
        PipelineError: the file changed while it was read.
    """
    if FileState.now(state.path) != state:
        raise PipelineError(f"{state.path} changed while it was read. Wait until it is complete.")
    earlier = _digests_of.get(state, {})
    tensors = earlier.get("tensors", {}) | digests.get("tensors", {})
    _digests_of[state] = {**earlier, **digests, "tensors": tensors}
    if runs_dir is None or max(state.mtime_ns, state.ctime_ns) > begun_ns - SETTLED_NS:
        return
    with suppress(OSError):  # runs_dir is read-only: the file is hashed again next time
        path = _cache_file(state, runs_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"seen": _state_fields(state), "known": _digests_of[state]})
        write_atomically(path, text, durable=False)


def _cache_file(state: FileState, runs_dir: Path) -> Path:
    name = hashlib.sha256(os.fsencode(state.path)).hexdigest()[:32]
    return runs_dir / DIGESTS_FOLDER / f"{name}.json"


def _state_fields(state: FileState) -> list[Any]:
    return [os.fsdecode(state.path), state.size, state.mtime_ns, state.ctime_ns, state.inode]


def cores() -> int:
    """Return the number of cores that this process may use in its job."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sha256_of(paths: Iterable[Path]) -> dict[Path, str]:
    """Return path -> sha256, from this process's cache or computed in threads."""
    states = {path: FileState.now(path) for path in paths}
    unknown = {state for state in states.values() if not cached_digests(state).get("sha256")}

    def hash_file(state: FileState) -> None:
        cache_digests(state, time.time_ns(), sha256=sha256(state.path))

    with ThreadPoolExecutor(min(8, cores())) as pool:
        largest_first = sorted(unknown, key=lambda state: (-state.size, state.path))
        list(pool.map(hash_file, largest_first))
    return {path: cached_digests(state)["sha256"] for path, state in states.items()}


def content_hash(paths: list[Path], root: Path) -> str:
    """Return one digest over the names and contents of files.

    It identifies inputs that no run produced.
    """
    digest, digests = hashlib.sha256(), sha256_of(paths)
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)} {digests[path]}\n".encode())
    return digest.hexdigest()


@contextmanager
def readable_yaml(file: str | Path) -> Iterator[None]:
    """Turn errors of the enclosed YAML parsing into a PipelineError that names the line."""
    import yaml

    remedy = "Indent with spaces, write each key once, and put a text with : * [ { or # in quotes."
    place = str(file)
    try:
        yield
    except UnicodeDecodeError as error:
        raise PipelineError(f"{file} is not UTF-8 ({error}). Save it as UTF-8.") from error
    except yaml.YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        if "expected ',' or" in problem:
            mark = getattr(error, "context_mark", mark)  # where the bracket was opened
        if mark:
            place += f", line {mark.line + 1}"
        raise PipelineError(f"{place}: invalid YAML ({problem}). {remedy}") from error
    except VALUE_ERRORS as error:
        if type(error) not in VALUE_ERRORS:
            raise
        raise PipelineError(f"{place}: invalid YAML ({error}). {remedy}") from error


def check_aliases(text: str) -> str:
    """Return a YAML text after a check of its aliases (*x).

    Raises:
        YAMLError: an alias contains itself, or the aliases expand to more than MOST_ENTRIES
            entries.
    """
    import yaml

    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # True if the node contains itself
            parts = []
            if isinstance(node.value, list):
                parts = node.value
            if parts and isinstance(parts[0], tuple):
                parts = list(chain(*parts))
            sizes[id(node)] = 1 + sum(map(size, parts))
        return sizes[id(node)]

    if "*" in text:
        root = yaml.compose(text, yaml.SafeLoader)
        if root and size(root) > MOST_ENTRIES:
            raise yaml.YAMLError("aliases repeat its content too often")
    return text


def refuse_special(file: Path, most_bytes: float = math.inf) -> Path:
    """Return the file if it is a regular file of limited size.

    Raises:
        PipelineError: the file is a pipe or a device, which may have no end, or has too many bytes.
    """
    state = file.stat()
    kind = state.st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        raise PipelineError(
            f"{file} is {'a named pipe' if stat.S_ISFIFO(kind) else 'a device'}. Name a regular"
            " file."
        )
    if state.st_size > most_bytes:
        raise PipelineError(
            f"{file} has {state.st_size:,} bytes, more than {most_bytes:,}. Use a smaller file."
        )
    return file


def read_yaml(file: Path, named: str = "", loader: Any = None, most_bytes: int = MOST_BYTES) -> Any:
    """Return the content of a YAML file. Errors name it as `named`."""
    import yaml

    with readable_yaml(named or file):
        text = refuse_special(file, most_bytes).read_text(encoding="utf-8")
        return yaml.load(check_aliases(text), loader or yaml.SafeLoader)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link, which takes no space, or a copy if links are not supported."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
