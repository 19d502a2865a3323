"""From the settings of a command to a checked dataclass.

The command line, tables and the Python interface share this module. The options of a stage's groups
are merged in their order, then the values of single keys are set. Everything is checked once
against the dataclasses. Errors name the key and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, TypeVar, get_origin

from omegaconf import MISSING, OmegaConf

from pipeline.config import conf
from pipeline.config.defaults import left_open, of_hardware
from pipeline.config.explain import (
    REMOVED,
    Extra,
    explain_key,
    not_read,
    type_inside,
    unknown_option,
    validated,
)
from pipeline.config.harness_tasks import spell_out_tasks, split_shots
from pipeline.config.knob import Tree, Words, knobs_of, names_of, refuse_empty_lists, unread_knobs
from pipeline.config.overrides import split_command, values_of
from pipeline.config.stages import (
    HARDWARE,
    OF_ALL_STAGES,
    RunStage,
    Stage,
    TableStage,
)
from pipeline.errors import PipelineError, first_few

T = TypeVar("T")
OF_RUNS = f"every.{HARDWARE}"
# Stages that read one of two sources: key -> how to write it
SOURCES = {
    "eval": {"checkpoint": "checkpoint=RUN", "merge": "merge=METHOD"},
    "export": {"table": "table=T", "checkpoint": "checkpoint=RUN"},
}


class Incomplete(PipelineError):
    """The error of a command without a required value. --cfg shows such a command nevertheless."""


def compose(settings: Sequence[str]) -> Stage:
    """Return the stage that a command's overrides describe.

    Raises:
        PipelineError: a key, option, type or range is wrong, a value is missing, or this stage does
            not read a key.
    """
    own_words, command = split_command(settings)
    stage: Any = compose_given(values_of(own_words))
    if hasattr(stage, "command"):
        return replace(stage, command=command)
    return stage


def compose_given(settings: Words) -> Stage:
    """Return the stage of a command.

    Raises:
        PipelineError: as compose does, or a key has no effect.
    """
    stage = stage_of(settings)
    values = {key.lstrip("+"): value for key, value in settings.items()}
    for key, remedy in unread_knobs(stage, values).items():
        raise PipelineError(
            f"{key}={values[key]} has an effect with {remedy} only. Set {remedy}, or remove it."
        )
    if isinstance(stage, TableStage):
        return replace(stage, given=dict(settings))
    return stage


def stage_of(settings: Words) -> Stage:
    """Build the stage from these settings.

    Keys without an effect are allowed, because a table's `every` sets them for all runs.

    Raises:
        PipelineError: as compose does.
    """
    stage, missing = partial_stage(settings)
    if missing:
        runs = ("run", "checkpoint", "merge.math", "merge.language", "merge.expert", "model.path")
        example = {
            **dict.fromkeys(runs, "RUN"),
            **dict.fromkeys(("merge.experts", "checkpoints"), "[RUN,RUN]"),
        }
        examples = " ".join(f"{key}={example.get(key, '...')}" for key in missing)
        raise Incomplete(f"stage={stage.stage} needs {' and '.join(missing)}. Write {examples}.")
    refuse_empty_lists(stage)
    sources = SOURCES.get(stage.stage, {})
    given = [word for key, word in sources.items() if getattr(stage, key)]
    if sources and len(given) != 1:
        both = ", not both" if given else ""
        raise PipelineError(f"stage={stage.stage} needs {' or '.join(sources.values())}{both}.")
    if isinstance(stage, RunStage) and "=" in (stage.group or ""):
        raise PipelineError(
            "A group must not contain =, because it could be a secret. It is not shown here. Set a"
            " name, group=NAME."
        )
    if isinstance(stage, TableStage) and stage.table:
        conf.table_file(stage.table)
    return stage


def partial_stage(settings: Words) -> tuple[Stage, list[str]]:
    """Build the stage from these settings. Return it and the missing keys, sorted."""
    evaluation = str(settings.get("eval"))
    options = conf.options("eval")
    # the harness has groups of these names, for all languages
    is_removed = f"eval={split_shots(evaluation)[0]}" in REMOVED
    if is_removed and evaluation not in options:
        raise PipelineError(unknown_option("eval", evaluation))
    settings = spell_out_tasks({**left_open(settings), **settings}, options)
    name = str(settings.pop("stage", "table"))
    kind = conf.stage_class(name)
    if kind is None:
        raise PipelineError(unknown_option("stage", name))
    model = str(settings.get("model"))
    is_checkpoint = "/" in model or ":" in model or model.startswith(".")  # and not an option
    if is_checkpoint and "model" in kind.groups:
        settings |= {"model": "trained", "model.path": settings["model"]}
    if issubclass(kind, TableStage):
        hardware = settings.get(HARDWARE) or settings.get(OF_RUNS)
        if hardware:
            settings |= {HARDWARE: hardware, OF_RUNS: settings.get(OF_RUNS, hardware)}
    tree: Tree = {"stage": name}
    if name == "cpt":
        tree["sft"] = {"packing": True}  # the default, which a recipe may change
    groups = {**OF_ALL_STAGES, **kind.groups}
    refuse_unread(settings, kind, name, groups)
    values = merge_options(tree, name, settings, groups)
    for key, value in values.items():
        plain = key.lstrip("+")
        conf.refuse_interpolation(plain, str(value))
        if plain.startswith("every."):
            tree.setdefault("every", {})[plain.removeprefix("every.")] = value
        else:
            if plain == "merge.method" and "merge" in tree:
                raise PipelineError(
                    f"merge.method={value}: merge={settings['merge']} already sets the method."
                    " Remove merge.method."
                )
            plain = {"table.free_snapshots": "free_snapshots"}.get(plain, plain)
            put(tree, kind, plain, plain.split("."), value, key.startswith("+"), name)
    if "${" in str(tree):
        tree = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[assignment]
    left_out = drop_missing(tree)
    stage = read_stage(kind, tree)
    missing = [key for key, value, _ in knobs_of(stage) if value == MISSING]
    return stage, sorted({*left_out, *missing})


def with_hardware(config: T, every: Words) -> T:
    """Apply the hardware of a table's `every` to its plans and jobs, and return the stage.

    It has no effect if the command sets hardware=, or if the command or its launcher= sets the key.
    """
    if not isinstance(config, TableStage) or HARDWARE not in every or HARDWARE in config.every:
        return config
    of_site = conf.option("launcher", config.given.get("launcher", "local"))["launcher"]
    of_site = {f"launcher.{knob}": value for knob, value in of_site.items()}
    own = stage_of({**of_site, **config.given, HARDWARE: every[HARDWARE]})
    parts = filter(partial(hasattr, config), ("launcher", "plan"))
    return replace(config, **{part: getattr(own, part) for part in parts})


def refuse_unread(
    settings: Words, kind: type[Stage], stage: str, groups: Mapping[str, str | None]
) -> None:
    """Raise PipelineError for a key that a stage does not read, or whose group is not chosen."""
    read = {*groups, *names_of(kind)}
    for key, value in settings.items():
        plain = key.lstrip("+")
        name, dot, _ = plain.partition(".")
        if name not in read:
            if plain in (*conf.groups(), "table"):
                raise PipelineError(not_read(f"{plain}={value}", stage))
            raise PipelineError(explain_key(plain, kind, stage))
        if dot and name in groups and settings.get(name, groups[name]) is None:
            raise PipelineError(f"{plain} needs {name}=... {conf.choices(name)}")


def merge_options(
    tree: Tree, stage: str, settings: Words, groups: Mapping[str, str | None]
) -> Tree:
    """Merge the options that a command or its stage chooses into the tree.

    Returns the settings that choose no option.

    Raises:
        PipelineError: an option is unknown, or a required option is missing.
    """
    read = names_of(conf.stage_class(stage))
    for group, default in groups.items():
        option = settings.get(group, default)
        if option == MISSING:
            raise PipelineError(f"stage={stage} needs {group}=... {conf.choices(group)}")
        if option is None and default is None:
            continue
        if str(option) not in conf.options(group):
            raise PipelineError(unknown_option(group, str(option)))
        if group == HARDWARE:
            parts = of_hardware(str(option), tree, settings.get("sft.adapter"))
            conf.merge(tree, {part: parts[part] for part in parts if part in read})
        else:
            conf.merge(tree, conf.option(group, str(option)))
    return {key: value for key, value in settings.items() if key not in groups}


def put(
    tree: Any, kind: Any, key: str, path: Sequence[str], value: Any, new: bool, stage: str
) -> None:
    """Put a value into a tree of dataclass fields. A mapping is merged into the existing one.

    Args:
        tree: the tree, which is changed.
        kind: the dataclass of the tree.
        key: the whole key, for errors.
        path: the part of the key that is left.
        value: the value.
        new: whether a mapping may get a new key.
        stage: the stage, for errors.

    Raises:
        PipelineError: the dataclasses do not have the key, or it is new in a mapping.
    """
    name, *further = path
    if isinstance(tree, list) and name.isdigit() and int(name) < len(tree):
        position: Any = int(name)
    elif not isinstance(tree, dict) or (is_dataclass(kind) and name not in names_of(kind)):
        raise PipelineError(explain_key(key, kind, stage))
    elif get_origin(kind) is dict and tree and name not in tree and not new:
        raise PipelineError(f"{key} is new. Add it with a plus: +{key}=...")
    else:
        position = name
    inside = type_inside(kind, name)
    if isinstance(tree, list):
        current = tree[position]
    else:
        current = tree.get(position)
    if name == "merge" and isinstance(current, dict):
        inside = method_class(current)
    if further and current is None:
        if is_dataclass(kind) and kind.__dataclass_fields__[name].default is None:
            raise PipelineError(
                f"{key}: this option has no {name}. Remove it, or choose an option with {name}."
            )
        current = tree[position] = {}
    if further:
        put(current, inside, key, further, value, new, stage)
    elif isinstance(value, dict) and isinstance(current, dict) and current:
        for subkey, part in value.items():
            put(current, inside, f"{key}.{subkey}", [str(subkey)], part, new, stage)
    else:
        tree[position] = deepcopy(value)


def method_class(knobs: Words) -> type[Any]:
    """Return the dataclass of a merge's settings, by its method."""
    method = conf.method_of_knobs(knobs)
    if method:
        return method
    raise PipelineError(
        f"merge.method={knobs.get('method')} is not installed here. Choose from"
        f" {first_few(sorted(conf.METHODS), 5)}."
    )


# --- checked ---


def read_stage(kind: type[T], tree: Mapping[str, Any], extra: Extra = "forbid") -> T:
    """Read the stage that a tree of plain values describes.

    The tree comes from a command or from `asdict`.

    Raises:
        PipelineError: a value has the wrong type, or a key is unknown and `extra` is not ignore.
    """
    knobs = tree.get("merge")
    if isinstance(knobs, dict):
        tree = {**tree, "merge": validated(method_class(knobs), knobs, "merge.", extra)}
    return validated(kind, tree, extra=extra)


def drop_missing(tree: Any, prefix: str = "") -> list[str]:
    """Remove the values that an option leaves open, ???, and return their keys."""
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    missing = []
    for key, value in items:
        if value == MISSING:
            missing.append(f"{prefix}{key}")
            del tree[key]
        elif isinstance(value, dict | list):
            missing += drop_missing(value, f"{prefix}{key}.")
    return missing
