"""What conf/ offers: its groups, their options, and the groups that each stage reads.

`STAGES` and `METHODS` are handed in by those who have them (`compose.register`), so that configuration knows neither.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.config.merging import Merge
from pipeline.config.stages import Stage
from pipeline.errors import PipelineError

TABLES = "tables"  # a folder of conf/ that is no group: Hydra would take a folder `table` for what table= chooses of
CLAIMS = "claims"  # another: what papers claim, by table
STAGES: dict[str, type[Stage]] = {}
METHODS: dict[str, type[Merge]] = {}


def folder() -> Path:
    """conf/ as shipped in the wheel, else that of the checkout."""
    package = Path(__file__).parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parents[1] / "conf"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (folder() / group).glob("*.yaml"))


def groups() -> list[str]:
    return list(_groups(folder(), folder().stat().st_mtime_ns))


@lru_cache(maxsize=8)
def _groups(there: Path, _: int) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in there.iterdir() if path.is_dir() and path.name not in (TABLES, CLAIMS)))


def table(name: str) -> Path:
    """The file of table=NAME: of conf/tables, or as it is named where it has a /, begins with a dot or ends in .zip.

    Raises:
        PipelineError: there is none.
    """
    if "/" in name or name.startswith(".") or name.endswith(".zip"):
        if not Path(name).is_file():
            raise PipelineError(f"table={name} is no file: give one, or one of {', '.join(options(TABLES))}")
        return Path(name)
    if name not in options(TABLES):
        close = get_close_matches(name, options(TABLES), n=3, cutoff=0.6)
        meant = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(options(TABLES))}"
        raise PipelineError(f"table={name} is no table: {meant} A file of your own is table=./{name}.yaml")
    return folder() / TABLES / f"{name}.yaml"


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
    path = folder() / group / f"{option}.yaml"
    if dict(defaults(stage)).get(group) is None or not path.is_file():
        return None
    return _values_of(path, path.stat().st_mtime_ns)


def alone(group: str, option: str) -> bool:
    """Whether an option brings one part of its stage and nothing else: the part of its group's name."""
    path = folder() / group / f"{option}.yaml"
    return path.is_file() and group != "stage" and not _header(path, path.stat().st_mtime_ns)


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
