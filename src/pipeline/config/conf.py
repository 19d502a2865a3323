"""What conf/ offers: its groups, their options, and the groups that each stage reads.

`STAGES` and `METHODS` are handed in by those who have them (`compose.register`), so that configuration knows neither.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline import languages
from pipeline.config.merging import Merge
from pipeline.config.stages import Stage
from pipeline.errors import PipelineError
from pipeline.files import add_conf, added_conf, check_yaml_size, shipped_conf

TABLES = "tables"  # a folder of conf/ that is no group: Hydra would take a folder `table` for what table= chooses of
TABLE_SUFFIXES = (".yaml", ".yml", ".zip")
CLAIMS = "claims"  # another: what papers claim, by table
FILES = (TABLES, CLAIMS, languages.GROUP)  # folders of conf/ that are read as files: no group of Hydra's
STAGES: dict[str, type[Stage]] = {}
METHODS: dict[str, type[Merge]] = {}


@cache
def folder() -> Path:
    return shipped_conf()


def folders() -> list[Path]:
    return [folder(), *added_conf()]


def add(name: str) -> None:
    """A folder of options beside conf/, laid out as it is: recipe/mine.yaml, tables/mine.yaml.

    Raises:
        PipelineError: no folder, one of no group, or an option that is there already.
    """
    there = Path(name).resolve()
    if not there.is_dir():
        problem = "is a file and no folder" if there.exists() else "is not there"
        raise PipelineError(
            f"--config-dir={name} {problem}: give a folder with options of yours, such as recipe/mine.yaml or "
            "tables/mine.yaml in it"
        )
    known = [group for group in (*groups(), *FILES) if group != "stage"]
    for path in sorted(one for one in there.iterdir() if one.is_dir() and not one.name.startswith(".")):
        if path.name not in known:
            close = get_close_matches(path.name, known, n=1, cutoff=0.6)
            meant = f"did you mean {close[0]}/?" if close else f"there are {', '.join(known)}"
            raise PipelineError(f"--config-dir={name}: {path.name}/ is no group of options: {meant}")
        for option in path.glob("*.yaml"):
            check_yaml_size(option.read_text(encoding="utf-8", errors="replace"), option)
        if twice := {option.stem for option in path.glob("*.yaml")} & set(options(path.name)):
            raise PipelineError(f"--config-dir={name}: {path.name}={min(twice)} is there already: call yours otherwise")
    add_conf(there)


def searchpath() -> list[str]:
    """Hydra's word for the folders that were added."""
    quoted = ",".join("'file://" + str(one).replace("'", r"\'") + "'" for one in added_conf())
    return [f"hydra.searchpath=[{quoted}]"] if quoted else []


def file(group: str, option: str) -> Path | None:
    return next((path for one in folders() if (path := one / group / f"{option}.yaml").is_file()), None)


def options(group: str) -> list[str]:
    return sorted(path.stem for one in folders() for path in (one / group).glob("*.yaml"))


def groups() -> list[str]:
    return list(_groups(folder(), folder().stat().st_mtime_ns))


@lru_cache(maxsize=8)
def _groups(there: Path, _: int) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in there.iterdir() if path.is_dir() and path.name not in FILES))


def table(name: str) -> Path:
    """The file of table=NAME: of tables/ in conf/ or an added folder, or as it is named where it has a /, begins with a
    dot or ends in .yaml, .yml or .zip.

    Raises:
        PipelineError: there is none.
    """
    if "/" in name or name.startswith(".") or Path(name).suffix in TABLE_SUFFIXES:
        if not Path(name).is_file():
            raise PipelineError(f"table={name} is no file: give one, or one of {', '.join(options(TABLES))}")
        if Path(name).suffix not in TABLE_SUFFIXES:
            raise PipelineError(f"table={name} is no table: one is a .yaml file, or the .zip that stage=export wrote")
        return Path(name)
    if name not in options(TABLES):
        close = get_close_matches(name, options(TABLES), n=3, cutoff=0.6)
        meant = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(options(TABLES))}"
        raise PipelineError(f"table={name} is no table: {meant} A file of your own is table=./{name}.yaml")
    path = file(TABLES, name)
    assert path is not None
    return path


def is_checkpoint(model: str) -> bool:
    """Whether a value of model= is a checkpoint and no option: a RUN with a /, a : or a leading dot."""
    return "/" in model or ":" in model or model.startswith(".")


def presets(method: str) -> list[str]:
    """The options of merge= that are a method with other settings: ties_mergekit of ties."""
    return [option for option in options("merge") if option.startswith(f"{method}_") and option not in METHODS]


def reads(stage: str) -> list[str]:
    """The groups that a stage brings."""
    named = [group for group, _ in defaults(stage)]
    return [*named, "tracking", "launcher"] if (folder() / "stage" / f"{stage}.yaml").is_file() else []


def values_of(stage: str, group: str, option: str) -> dict[str, Any] | None:
    """The knobs that an option sets, where that is all it does, as of recipes and mixtures: composing without an option
    and setting these is the same, and many times faster. None where only composing tells.
    """
    path = file(group, option)
    if dict(defaults(stage)).get(group) is None or path is None:
        return None
    return _values_of(path, path.stat().st_mtime_ns)


def alone(group: str, option: str) -> bool:
    """Whether an option brings one part of its stage and nothing else: the part of its group's name."""
    path = file(group, option)
    return path is not None and group != "stage" and not _header(path, path.stat().st_mtime_ns)


def plain(stage: str, group: str, option: str) -> Path | None:
    """The file of an option that is `alone`, starts from no other and stays as it is in this stage; else None."""
    path, whole = file(group, option), file("stage", stage)
    if path is None or whole is None or not alone(group, option):
        return None
    own, shared = _keys(path, path.stat().st_mtime_ns), _keys(whole, whole.stat().st_mtime_ns)
    return None if "defaults" in own or group in shared else path


@lru_cache(maxsize=256)
def _keys(path: Path, _: int) -> tuple[str, ...]:
    return tuple(map(str, OmegaConf.load(path)))


@lru_cache(maxsize=256)
def _header(path: Path, _: int) -> bool:
    return path.read_text(encoding="utf-8").startswith("# @package")


@lru_cache(maxsize=256)
def _values_of(path: Path, _: int) -> dict[str, Any] | None:
    package = re.match(r"# @package (\w+)\n", path.read_text(encoding="utf-8"))
    found = OmegaConf.load(path)
    if package is None or package[1] == "_global_" or not isinstance(found, DictConfig) or "defaults" in found:
        return None
    values = {f"{package[1]}.{key!s}": found[key] for key in found}
    return None if any(OmegaConf.is_config(value) for value in values.values()) else values


@lru_cache(maxsize=64)
def _defaults(path: Path, _: int) -> list[tuple[str, str | None]]:
    defaults = OmegaConf.to_container(OmegaConf.load(path))["defaults"]  # type: ignore[index,call-overload]
    named = [next(iter(item.items())) for item in defaults if isinstance(item, dict)]
    return [(name.removeprefix("/").partition("@")[0], option) for name, option in named]


def defaults(stage: str) -> list[tuple[str, str | None]]:
    """The groups that a stage brings, each with its option; None: brought only when asked for."""
    path = folder() / "stage" / f"{stage}.yaml"
    if not path.is_file():
        return []
    return _defaults(path, path.stat().st_mtime_ns)
