"""Contents of conf/: its groups, their options, and the groups that each stage reads.

`STAGES` and `METHODS` are filled by `compose.register`, so that the configuration imports neither.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline import languages
from pipeline.config.extensions import MERGE_METHODS, extensions, merge_method
from pipeline.config.merging import Merge
from pipeline.config.stages import Stage
from pipeline.errors import PipelineError, suggest
from pipeline.files import add_conf, added_conf, check_yaml_size, shipped_conf

TABLES = "tables"  # a folder of conf/ but not a group: Hydra would take a folder `table` for the options of table=
TABLE_SUFFIXES = (".yaml", ".yml", ".zip")
CLAIMS = "claims"  # another: claims of papers, by table
INTERPOLATION = re.compile(r"(?<!\\)\$\{")  # of OmegaConf
FILES = (TABLES, CLAIMS, languages.GROUP)  # folders of conf/ that are read as files, not Hydra groups
STAGES: dict[str, type[Stage]] = {}
METHODS: dict[str, type[Merge]] = {}


@cache
def folder() -> Path:
    return shipped_conf()


def folders() -> list[Path]:
    return [folder(), *added_conf()]


def add_folder(name: str) -> None:
    """Add a folder of options to conf/, with the same layout: recipe/mine.yaml, tables/mine.yaml.

    Raises:
        PipelineError: not a folder, an unknown group in it, or an option that exists already.
    """
    directory = Path(name).resolve()
    if not directory.is_dir():
        problem = "is a file and not a folder" if directory.exists() else "does not exist"
        raise PipelineError(
            f"--config-dir={name} {problem}: give a folder with options of yours, such as recipe/mine.yaml or "
            "tables/mine.yaml in it"
        )
    names = [group for group in (*groups(), *FILES) if group != "stage"]
    for path in sorted(directory.iterdir()):
        if not path.is_dir() or path.name.startswith("."):
            continue
        if path.name not in names:
            hint = suggest(f"{path.name}/", [f"{group}/" for group in names])
            raise PipelineError(f"--config-dir={name}: {path.name}/ is not a group of options: {hint}")
        for option in path.glob("*.yaml"):
            text = option.read_text(encoding="utf-8", errors="replace")
            check_yaml_size(text, option)
            if path.name not in FILES:
                refuse_interpolation(str(option), text)
        if duplicates := {option.stem for option in path.glob("*.yaml")} & set(options(path.name)):
            raise PipelineError(
                f"--config-dir={name}: {path.name}={min(duplicates)} exists already: choose another name"
            )
    add_conf(directory)


def refuse_interpolation(place: str, text: str) -> None:
    """Raise PipelineError for an interpolation outside of shipped files: resolved, it could carry a token of the
    environment into manifests and W&B."""
    if INTERPOLATION.search(text):
        raise PipelineError(f"{place} holds an interpolation, ${{...}}: write the value itself")


def searchpath_override() -> list[str]:
    """Hydra's override for the added folders; empty without any."""
    quoted = ",".join("'file://" + str(path).replace("'", r"\'") + "'" for path in added_conf())
    return [f"hydra.searchpath=[{quoted}]"] if quoted else []


def option_file(group: str, option: str) -> Path | None:
    return next((path for root in folders() if (path := root / group / f"{option}.yaml").is_file()), None)


def options(group: str) -> list[str]:
    """Names of the options; of merge= also the methods of other installed packages."""
    files = {path.stem for root in folders() for path in (root / group).glob("*.yaml")}
    return sorted(files.union(extensions(MERGE_METHODS) if group == "merge" else ()))


def groups() -> list[str]:
    return list(_group_names(folder(), folder().stat().st_mtime_ns))


@lru_cache(maxsize=8)
def _group_names(root: Path, _: int) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in root.iterdir() if path.is_dir() and path.name not in FILES))


def table_file(name: str) -> Path:
    """The file of table=NAME: in tables/ of conf/ or of an added folder, or NAME itself where it has a /, begins with a
    dot or ends in .yaml, .yml or .zip.

    Raises:
        PipelineError: there is none.
    """
    if "/" in name or name.startswith(".") or Path(name).suffix in TABLE_SUFFIXES:
        if not Path(name).is_file():
            raise PipelineError(f"table={name} is not a file: give one, or one of {', '.join(options(TABLES))}")
        if Path(name).suffix not in TABLE_SUFFIXES:
            raise PipelineError(
                f"table={name} is not a table: expected a .yaml file, or the .zip written by stage=export"
            )
        return Path(name)
    if name not in options(TABLES):
        hint = suggest(name, options(TABLES))
        raise PipelineError(f"table={name} is not a table: {hint} (a file of your own: table=./{name}.yaml)")
    path = option_file(TABLES, name)
    assert path is not None
    return path


def is_checkpoint(model: str) -> bool:
    """Whether a value of model= is a checkpoint and not an option: a RUN with a /, a : or a leading dot."""
    return "/" in model or ":" in model or model.startswith(".")


def method_of(option: str | None) -> type[Merge] | None:
    """The method of an option of merge=: of its name, of another package, or the one whose settings the option changes,
    as ties_mergekit changes those of ties. None where there is none."""
    if option is None or option in METHODS:
        return METHODS.get(option or "")
    path = option_file("merge", option)
    if path is None:
        return merge_method(option)
    starts_from = _option_defaults(path, path.stat().st_mtime_ns)
    return next((kind for name in starts_from if name != option and (kind := method_of(name))), None)


def groups_read(stage: str) -> list[str]:
    """The groups that a stage reads."""
    names = [group for group, _ in stage_defaults(stage)]
    names += ["hardware"] if "sft" in names else []
    return [*names, "tracking", "launcher"] if (folder() / "stage" / f"{stage}.yaml").is_file() else []


def values_of(stage: str, group: str, option: str) -> dict[str, Any] | None:
    """The knobs that an option sets, if it does nothing else, as recipes and mixtures do; else None.

    Composing without the option and setting these knobs is the same, and many times faster.
    """
    path = option_file(group, option)
    if dict(stage_defaults(stage)).get(group) is None or path is None:
        return None
    return _values_of(path, path.stat().st_mtime_ns)


def sets_one_part(group: str, option: str) -> bool:
    """Whether an option defines only the part of the stage named like its group."""
    path = option_file(group, option)
    return path is not None and group != "stage" and not _has_package_header(path, path.stat().st_mtime_ns)


def standalone_file(stage: str, group: str, option: str) -> Path | None:
    """The option's file if it can be loaded without Hydra (sets one group, no defaults, not overridden by the
    stage)."""
    path, stage_file = option_file(group, option), option_file("stage", stage)
    if path is None or stage_file is None or not sets_one_part(group, option):
        return None
    keys, stage_keys = _top_keys(path, path.stat().st_mtime_ns), _top_keys(stage_file, stage_file.stat().st_mtime_ns)
    return None if "defaults" in keys or group in stage_keys else path


@lru_cache(maxsize=256)
def _top_keys(path: Path, _: int) -> tuple[str, ...]:
    return tuple(map(str, OmegaConf.load(path)))


@lru_cache(maxsize=256)
def _has_package_header(path: Path, _: int) -> bool:
    return path.read_text(encoding="utf-8").startswith("# @package")


@lru_cache(maxsize=256)
def _values_of(path: Path, _: int) -> dict[str, Any] | None:
    package = re.match(r"# @package (\w+)\n", path.read_text(encoding="utf-8"))
    node = OmegaConf.load(path)
    if package is None or package[1] == "_global_" or not isinstance(node, DictConfig) or "defaults" in node:
        return None
    values = {f"{package[1]}.{key!s}": node[key] for key in node}
    return None if any(OmegaConf.is_config(value) for value in values.values()) else values


@lru_cache(maxsize=256)
def _option_defaults(path: Path, _: int) -> tuple[str, ...]:
    """The options of the same group that an option starts from, or whose schema it names."""
    node = OmegaConf.load(path)
    entries = node.get("defaults", ()) if isinstance(node, DictConfig) else ()
    return tuple(
        str(entry).removesuffix("_schema") for entry in entries if isinstance(entry, str) and entry != "_self_"
    )


@lru_cache(maxsize=64)
def _stage_defaults(path: Path, _: int) -> list[tuple[str, str | None]]:
    defaults = OmegaConf.to_container(OmegaConf.load(path))["defaults"]  # type: ignore[index,call-overload]
    entries = [next(iter(item.items())) for item in defaults if isinstance(item, dict)]
    return [(name.removeprefix("/").partition("@")[0], option) for name, option in entries]


def stage_defaults(stage: str) -> list[tuple[str, str | None]]:
    """(group, option) of each group of a stage; option None: the group is read only when chosen."""
    path = folder() / "stage" / f"{stage}.yaml"
    if not path.is_file():
        return []
    return _stage_defaults(path, path.stat().st_mtime_ns)
