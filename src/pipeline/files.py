"""Files: written atomically, and identified by their digests, which are cached."""

from __future__ import annotations

import errno
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

UNHASHED_FILES = ("wandb/",)  # tracking writes there; results are elsewhere
# a part of what a parser of YAML says -> the remedy; of some, what is wrong begins where the
# parser's context does
YAML_REMEDIES = {
    "duplicate key": "give it once",
    "mapping values": "put a text with a colon in quotes",
    "block end": "indent the keys of a mapping alike",
    "expected key": "indent the keys of a mapping alike",
    "cannot start any token": (
        "indent with spaces instead of tabs, and put a text that begins so in quotes"
    ),
    "undefined alias": "put a text that begins with * in quotes",
}
YAML_OPENED = {
    "',' or": "close the bracket",
    "stream": "close the quote",
    "expected ':'": "write KEY: VALUE",
}
VALUE_ERRORS = (
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
)  # a value such as a number of 5,000 digits
MOST_BYTES = 20_000_000  # of a YAML file
MOST_ENTRIES = 1_000_000  # of a YAML file, its aliases resolved
DIGESTS_FOLDER = ".digests"  # folder in runs_dir
ADDED_CONF = "PIPELINE_CONFIG_DIRS"  # environment variable, inherited by workers and array tasks
SETTLED_NS = 2 * 10**9  # FAT has the coarsest clock of all file systems: two seconds


def shipped_conf() -> Path:
    """conf/ as shipped in the wheel, else that of the checkout."""
    package = Path(__file__).parent
    if (package / "conf").is_dir():
        return package / "conf"
    return package.parents[1] / "conf"


def added_conf() -> tuple[Path, ...]:
    """The folders of --config-dir."""
    return _paths(os.environ.get(ADDED_CONF, ""))


@cache
def _paths(lines: str) -> tuple[Path, ...]:
    return tuple(map(Path, lines.splitlines()))


def config_dir_flags() -> list[str]:
    """The flags that give another command the same folders."""
    return [f"--config-dir={folder}" for folder in added_conf()]


def add_conf(folder: Path) -> None:
    os.environ[ADDED_CONF] = "\n".join(map(str, [*added_conf(), folder]))


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path next to `path`, unique to this writer, which replaces `path` by one rename
    at the end.

    A reader sees the old or the new file, with several writers the last one's. Nothing remains
    after an error.
    durable: flush to disk before the rename.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
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


def move_folder(folder: Path, target: Path) -> None:
    """Rename a folder.

    Where the file system cannot, such as an overlay for its lower layer, copy it next to the
    target, rename the copy, and delete the source.
    """
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        try:
            shutil.copytree(folder, temporary, symlinks=True)
            os.rename(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprints(folder: Path, unhashed: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Size, time and sha256 of each file that counts as a result, by name; without sha256 for those
    in `unhashed`.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(UNHASHED_FILES):
            stat = path.stat()
            entries[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            if name in unhashed:
                entries[name] |= {}
            else:
                entries[name] |= {"sha256": sha256(path)}
    return entries


# --- cached digests ---


@dataclass(frozen=True)
class FileState:
    """State of a file at one time, which shows whether it changed since."""

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int  # cannot be set by programs
    inode: int

    @classmethod
    def now(cls, path: Path) -> FileState:
        path = path.resolve()
        stat = path.stat()
        return cls(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


_digests_of: dict[FileState, dict[str, Any]] = {}  # in this process


def cached_digests(state: FileState, runs_dir: Path | None = None) -> dict[str, Any]:
    """Cached digests of a file: its `sha256`, and the digests of its `tensors`.

    Empty where nothing is cached.

    Stored in one small file for each in runs_dir/.digests, replaced atomically: processes may write
    concurrently, and a digest that is lost in between is computed again.
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

    Beyond this process only if it had not been touched for a while by then: a file can change once
    more within the same tick of its clock, and look as before (what git calls racily clean).

    Raises:
        PipelineError: the file changed meanwhile.
    """
    if FileState.now(state.path) != state:
        raise PipelineError(f"{state.path} changed while it was read: wait until it is complete")
    earlier = _digests_of.get(state, {})
    _digests_of[state] = (
        earlier | digests | {"tensors": earlier.get("tensors", {}) | digests.get("tensors", {})}
    )
    if runs_dir is None or max(state.mtime_ns, state.ctime_ns) > begun_ns - SETTLED_NS:
        return
    with suppress(OSError):  # runs_dir is not writable: hashed again next time
        path = _cache_file(state, runs_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"seen": _state_fields(state), "known": _digests_of[state]})
        write_atomically(path, text, durable=False)


def _cache_file(state: FileState, runs_dir: Path) -> Path:
    return (
        runs_dir
        / DIGESTS_FOLDER
        / f"{hashlib.sha256(os.fsencode(state.path)).hexdigest()[:32]}.json"
    )


def _state_fields(state: FileState) -> list[Any]:
    return [os.fsdecode(state.path), state.size, state.mtime_ns, state.ctime_ns, state.inode]


def cores() -> int:
    """Number of cores that this process, as a job has them, may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sha256_of(paths: Iterable[Path]) -> dict[Path, str]:
    """Path -> sha256: cached in this process, else computed in threads."""
    states = {path: FileState.now(path) for path in paths}
    unknown = {state for state in states.values() if not cached_digests(state).get("sha256")}

    def hash_file(state: FileState) -> None:
        cache_digests(state, time.time_ns(), sha256=sha256(state.path))

    with ThreadPoolExecutor(min(8, cores())) as pool:
        list(pool.map(hash_file, sorted(unknown, key=lambda state: (-state.size, state.path))))
    return {path: cached_digests(state)["sha256"] for path, state in states.items()}


def content_hash(paths: list[Path], root: Path) -> str:
    """One digest over the names and contents of files: the identity of inputs that no run
    produced.
    """
    digest, digests = hashlib.sha256(), sha256_of(paths)
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)} {digests[path]}\n".encode())
    return digest.hexdigest()


@contextmanager
def readable_yaml(file: str | Path) -> Iterator[None]:
    """Context in which YAML is parsed.

    Raises PipelineError with the line, what is wrong there, and the remedy.
    """
    import yaml

    try:
        yield
    except UnicodeDecodeError as error:
        raise PipelineError(f"{file} is not UTF-8 ({error}): save it as UTF-8") from error
    except (ValueError, LookupError, AttributeError) as error:
        if type(error) not in VALUE_ERRORS:
            raise
        raise PipelineError(f"{file}: invalid YAML ({error}): put the value in quotes") from error
    except RecursionError as error:
        raise PipelineError(
            f"{file}: invalid YAML (brackets in brackets in brackets): correct it"
        ) from error
    except yaml.YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        opened = next((remedy for part, remedy in YAML_OPENED.items() if part in problem), "")
        remedy = opened or next(
            (remedy for part, remedy in YAML_REMEDIES.items() if part in problem), "correct it"
        )
        mark = getattr(error, "context_mark" if opened else "problem_mark", None)
        if mark is None:
            place = file
        else:
            place = f"{mark.name if Path(mark.name).is_file() else file}, line {mark.line + 1}"
        raise PipelineError(f"{place}: invalid YAML ({problem}): {remedy}") from error


def check_aliases(text: str) -> str:
    """Return a YAML text whose aliases, as *x, neither contain themselves nor multiply its content.

    Raises:
        YAMLError: the content has more than MOST_ENTRIES entries, or no end.
    """
    import yaml

    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # if the node is a part of itself
            parts = []
            if isinstance(node.value, list):
                parts = node.value
            sizes[id(node)] = 1 + sum(
                map(size, chain(*parts) if parts and isinstance(parts[0], tuple) else parts)
            )
        return sizes[id(node)]

    if "*" in text:
        root = yaml.compose(text, yaml.SafeLoader)
        if root and size(root) > MOST_ENTRIES:
            raise yaml.YAMLError("aliases repeat its content too often")
    return text


def refuse_special(file: Path, most_bytes: float = math.inf) -> Path:
    """Return the file.

    Raise PipelineError for a pipe or a device, which may have no end, and for more bytes.
    """
    state = file.stat()
    kind = state.st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        raise PipelineError(
            f"{file} is {'a named pipe' if stat.S_ISFIFO(kind) else 'a device'}: give a file"
        )
    if state.st_size > most_bytes:
        raise PipelineError(
            f"{file} has {state.st_size:,} bytes, more than {most_bytes:,}: give a smaller file"
        )
    return file


def read_yaml(file: Path, named: str = "", loader: Any = None, most_bytes: int = MOST_BYTES) -> Any:
    """The content of a YAML file, which errors name as `named`."""
    import yaml

    with readable_yaml(named or file):
        text = refuse_special(file, most_bytes).read_text(encoding="utf-8")
        return yaml.load(check_aliases(text), loader or yaml.SafeLoader)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link, which takes no space, or a copy where links are not supported."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
