"""The contents of conf/: its groups, their options, and the groups that each stage reads.

`register` fills `OWN_STAGES` and `METHODS`, so that this module imports neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, reduce
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline import languages
from pipeline.config.extensions import (
    MERGE_METHODS,
    STAGES,
    extensions,
    outside_core,
    package_of,
)
from pipeline.config.knob import Tree, Words
from pipeline.config.merging import Merge
from pipeline.config.stages import OF_ALL_STAGES, Stage
from pipeline.errors import PipelineError, first_few, suggest
from pipeline.files import (
    MOST_BYTES,
    add_conf,
    added_conf,
    check_aliases,
    readable_yaml,
    refuse_special,
    shipped_conf,
)

# A folder of conf/ that is not a group. Hydra would take a folder `table` for the options of
# table=.
TABLES = "tables"
TABLE_SUFFIXES = (".yaml", ".yml", ".zip")
CLAIMS = "claims"  # another one: claims of papers, by table
PACKAGE = re.compile(r"\A(?:\s*#.*\n)*?\s*# *@package +(\S+)")  # among the first comments of a file
INTERPOLATION = re.compile(r"(?<!\\)\$\{")  # the beginning of OmegaConf's ${...}
FILES = (
    TABLES,
    CLAIMS,
    languages.GROUP,
)  # folders of options that are read as files and not as Hydra groups
OWN_STAGES: dict[str, type[Stage]] = {}
METHODS: dict[str, type[Merge]] = {}


def register(stages: Mapping[str, type[Stage]], methods: Mapping[str, type[Merge]]) -> None:
    """Register the stages and the merge methods, by name."""
    OWN_STAGES.update(stages)
    METHODS.update(methods)


@cache
def folder() -> Path:
    return shipped_conf()


def folders() -> tuple[Path, ...]:
    return folder(), *added_conf()


def add_folder(name: str) -> None:
    """Add a folder of options with the layout of conf/, such as recipe/mine.yaml.

    Raises:
        PipelineError: it is not a folder, has an unknown group, or an option that exists already.
    """
    directory = Path(name).resolve()
    if not directory.is_dir():
        problem = "does not exist"
        if directory.exists():
            problem = "is a file and not a folder"
        raise PipelineError(
            f"--config-dir={name} {problem}. Name a folder with options such as recipe/mine.yaml or"
            " tables/mine.yaml."
        )
    names = sorted({*groups(), *FILES} - {"stage"})
    for path in sorted(directory.iterdir()):
        if not path.is_dir() or path.name.startswith("."):
            continue
        if path.name not in names:
            hint = suggest(f"{path.name}/", [f"{group}/" for group in names])
            raise PipelineError(
                f"--config-dir={name}: {path.name}/ is not a group of options: {hint}"
            )
        if path.name not in FILES:
            for option in path.glob("*.yaml"):
                text = refuse_special(option, MOST_BYTES).read_text(
                    encoding="utf-8", errors="replace"
                )
                refuse_interpolation(str(option), text)
        duplicates = {option.stem for option in path.glob("*.yaml")} & set(options(path.name))
        if duplicates:
            raise PipelineError(
                f"--config-dir={name}: {path.name}={min(duplicates)} exists already. Choose another"
                " name."
            )
    add_conf(directory)
    forget_options()  # the folder may have been added before, with other files


def refuse_interpolation(key_name: str, text: str) -> None:
    """Refuse an interpolation outside of shipped files.

    Its value could carry a token of the environment into manifests and W&B.

    Raises:
        PipelineError: the text has an interpolation.
    """
    if INTERPOLATION.search(text):
        raise PipelineError(f"{key_name} holds an interpolation, ${{...}}. Write the value.")


def option_file(group: str, option: str) -> Path | None:
    return _files(folders()).get(group, {}).get(option)


@cache
def _files(searched: tuple[Path, ...]) -> dict[str, dict[str, Path]]:
    """Return group -> option -> file. Shipped options have priority over added ones."""
    files: dict[str, dict[str, Path]] = {}
    for path in chain.from_iterable(root.glob("*/*.yaml") for root in reversed(searched)):
        files.setdefault(path.parent.name, {})[path.stem] = path
    return files


def options(group: str) -> list[str]:
    """Return the names of a group's options.

    For merge= these include methods of other installed packages.
    """
    if group == "stage":
        return sorted({*OWN_STAGES, *extensions(STAGES)})
    if group == languages.GROUP:
        return sorted({*languages.shipped_languages(), *languages.own_files()})
    installed = extensions(MERGE_METHODS) if group == "merge" else ()
    return sorted({*_files(folders()).get(group, ()), *installed})


def choices(group: str) -> str:
    return f"Choose from {first_few(options(group), 5)}."


def groups() -> list[str]:
    return sorted({"stage", *_files((folder(),))} - {*FILES})


def table_file(name: str) -> Path:
    """Return the file of table=NAME.

    It is in tables/ of conf/ or of an added folder. NAME is the file if it has a /, begins with a
    dot, or ends in .yaml, .yml or .zip.

    Raises:
        PipelineError: the file does not exist.
    """
    if "/" in name or name.startswith(".") or Path(name).suffix in TABLE_SUFFIXES:
        if not Path(name).is_file():
            raise PipelineError(
                f"table={name} is not a file. Name a file, or an option. {choices(TABLES)}"
            )
        if Path(name).suffix not in TABLE_SUFFIXES:
            raise PipelineError(
                f"table={name} is not a table. Name a .yaml file, or a .zip that stage=export"
                " wrote."
            )
        return Path(name)
    path = option_file(TABLES, name)
    if path is None:
        hint = suggest(name, options(TABLES))
        raise PipelineError(
            f"table={name} is not a table: {hint} (for a local file write table=./{name}.yaml)"
        )
    return path


def option(group: str, name: str) -> Tree:
    """Return what an option sets: keys of a command, with its list of defaults and its package.

    Raises:
        PipelineError: its file, or a file that it starts from, cannot be read.
    """
    if group == "merge" and option_file(group, name) is None:
        return {group: {"method": name}}  # an option of another installed package
    return _option(group, name, folders())


def forget_options() -> None:
    """Read the files of options again.

    In a Python session they may have changed.
    """
    _option.cache_clear()
    _files.cache_clear()


@cache
def _option(group: str, name: str, searched: tuple[Path, ...]) -> Tree:
    return read_option(group, name)


def read_option(
    group: str, name: str, package: str | None = None, above: tuple[Path, ...] = ()
) -> Tree:
    """Return what the file of an option sets.

    Its own keys come below its package, after the options in its list of defaults. Such an entry
    names an option of its group, or `/GROUP@PLACE: OPTION`, which is put at PLACE of the package.

    Args:
        group: the group.
        name: the option.
        package: replaces the package in the file's first comment, or the group.
        above: the files whose defaults lead to this one.

    Raises:
        PipelineError: the file cannot be read, starts from itself, or starts from an unknown
            option.
    """
    path = option_file(group, name)
    if path is None:
        raise PipelineError(
            f"{above[-1]} starts from {group}={name}, which is not an option. {choices(group)}"
        )
    if path in above:
        raise PipelineError(f"{path} starts from itself. Remove {name} from its defaults.")
    try:
        with readable_yaml(path):
            check_aliases(refuse_special(path, MOST_BYTES).read_text(encoding="utf-8"))
            content: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, OSError) as error:
        raise PipelineError(
            f"{path} cannot be read ({' '.join(str(error).split())}). Correct it."
        ) from error
    if not isinstance(content, dict):
        raise PipelineError(f"{path} is a list. Write KEY: VALUE.")
    header = PACKAGE.search(path.read_text(encoding="utf-8"))
    package = package or (header[1] if header else group)
    keys = [] if package == "_global_" else package.split(".")
    tree: Tree = {}
    listed = content.pop("defaults", [])
    if not isinstance(listed, list):
        raise PipelineError(f"{path}: defaults={listed} is not a list. Write defaults: [{listed}].")
    for entry in listed if "_self_" in listed else [*listed, "_self_"]:
        if entry == "_self_":
            merge(tree, reduce(lambda nested, key: {key: nested}, reversed(keys), content))
            continue
        if isinstance(entry, dict) and len(entry) == 1:
            ((key, option),) = entry.items()
        else:
            ((key, option),) = [(f"/{group}", entry)]
        option_path, _, key_name = str(key).removeprefix("/").partition("@")
        inside = None
        if key_name:
            inside = ".".join([*keys, key_name])
        merge(tree, read_option(option_path, str(option), inside, (*above, path)))
    return tree


def merge(tree: Tree, part: Mapping[str, Any]) -> None:
    """Put `part` into the tree. Mappings are merged, other values are replaced."""
    for key, value in part.items():
        if isinstance(value, dict):
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            merge(tree[key], value)
        else:
            tree[key] = deepcopy(value)


def stage_class(name: str) -> type[Stage] | None:
    """Return the configuration of a stage of any package, or None."""
    if name in extensions(STAGES):
        kind: type[Stage] = outside_core(STAGES, name)
        return kind
    return OWN_STAGES.get(name)


def merge_method(name: str) -> type[Merge] | None:
    """Return the dataclass of a merge method of any package, or None."""
    if name not in extensions(MERGE_METHODS):
        return METHODS.get(name)
    kind: type[Merge] = outside_core(MERGE_METHODS, name)
    kind.package = package_of(MERGE_METHODS, name)
    return kind


def method_of(name: str | None) -> type[Merge] | None:
    """Return the method of an option of merge=, or None.

    The method is named in the option's file, or comes from another package.
    """
    if name is None:
        return None
    return method_of_knobs(option("merge", name)["merge"])


def method_of_knobs(knobs: Words) -> type[Merge] | None:
    """Return the dataclass of a merge's settings, by its method, or None."""
    return merge_method(str(knobs.get("method")))


def groups_read(stage: str) -> list[str]:
    """Return the groups that a stage reads."""
    kind = stage_class(stage)
    if kind:
        return [*kind.groups, *OF_ALL_STAGES]
    return []
