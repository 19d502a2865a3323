"""From words on the command line to a checked dataclass, through Hydra; refusals name the key and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from textwrap import fill
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipeline.config import conf
from pipeline.config.explain import explain, options_in, unknown_key
from pipeline.config.knob import check
from pipeline.config.merging import Merge
from pipeline.config.stages import EvalStage, ExportStage, RunStage, Stage, TableStage
from pipeline.errors import PipelineError


class Incomplete(PipelineError):
    """A command without a value that it needs; --cfg shows it all the same."""


def register(stages: Mapping[str, type[Stage]], methods: Mapping[str, type[Merge]]) -> None:
    """Hand in the stages and merge methods: a stage's dataclass is a schema at the root, a method's one at `merge`."""
    conf.STAGES.update(stages)
    conf.METHODS.update(methods)
    store = ConfigStore.instance()
    for name, stage in stages.items():
        store.store(group="stage", name=f"{name}_schema", node=stage, package="_global_")
    for name, method in methods.items():
        store.store(group="merge", name=f"{name}_schema", node=method)


@contextmanager
def hydra() -> Iterator[None]:
    """Hydra on our conf/, also inside a job of `-m`, where one is at work already."""
    there = GlobalHydra.instance()
    outer, there.hydra = there.hydra, None
    try:
        with initialize_config_dir(str(conf.folder()), version_base="1.3"):
            yield
    finally:
        there.hydra = outer


def compose(words: list[str], without: tuple[str, ...] = ()) -> Stage:
    """The stage that these overrides ask for, every knob checked; of the groups in `without`, no option at all.

    Raises:
        PipelineError: a wrong key, option, type or range, or a missing value.
    """
    words, every = split_every(spelled_out(words))
    for word in words:
        parse(word)
    asked = [*words, *(f"~{group}" for group in without), *conf.searchpath()]
    try:
        with hydra():
            refuse_unasked(words)
            return with_every(to_stage(hydra_compose("config", overrides=asked)), every)
    except (HydraException, OmegaConfBaseException) as error:
        raise PipelineError(explain(error, words)) from error
    except YAMLError as error:  # says the file and the line
        raise PipelineError(f"a file of the configuration is no YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"a file below {' or '.join(map(str, conf.folders()))} is not UTF-8 ({error}): write it again in UTF-8"
        ) from error


def split_folders(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without --config-dir=DIR (or --config-dir DIR, as Hydra has it), and the folders."""
    rest, folders, left = [], [], list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in ("--config-dir", "-cd"):
            rest.append(word)
        elif equals or left:
            folders.append(value if equals else left.pop(0))
        else:
            raise PipelineError("--config-dir needs a folder: give --config-dir=DIR")
    return rest, folders


def spelled_out(words: Sequence[str]) -> list[str]:
    """The words with model=CHECKPOINT as what it stands for: model=trained model.path=CHECKPOINT."""
    found: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        whole = key == "model" and all(map(conf.is_checkpoint, value.split(",")))
        found += ["model=trained", f"model.path={value}"] if whole else [word]
    return found


def split_every(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words without every.KEY=VALUE, and these: KEY is one of the table's runs, which Hydra knows nothing of."""
    rest, every = [], {}
    for word in words:
        if word.lstrip("+").startswith("every."):
            override = parse(word)
            every[override.key_or_group.removeprefix("every.")] = override.value()
        else:
            rest.append(word.removeprefix("table.") if word.startswith("table.free_snapshots=") else word)
    return rest, every


def with_every(stage: Stage, every: Mapping[str, Any]) -> Stage:
    """A stage with a table given these words for its runs."""
    if not every:
        return stage
    if not isinstance(stage, TableStage):
        raise PipelineError(f"stage={stage.stage} has no table, whose runs every.{next(iter(every))} would be given to")
    return replace(stage, every={**stage.every, **every})


def refuse_unasked(words: list[str]) -> None:
    """A key of a group that its stage brings only when asked, without the group: OmegaConf has no sentence for it."""
    asked = options_in(words)
    named = [group for group, option in conf.defaults(asked.get("stage", "table")) if option is None]
    for key in asked:
        group = key.partition(".")[0]
        if group in named and group != key and group not in asked:
            raise PipelineError(f"{key} needs {group}=... beside it: one of {', '.join(conf.options(group))}")


def to_stage(config: DictConfig) -> Stage:
    """A composed config as its dataclass, checked."""
    refuse_strays(config)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        runs = ("run", "checkpoint", "merge.math", "merge.language", "merge.expert", "model.path")
        example = {**dict.fromkeys(runs, "RUN"), **dict.fromkeys(("merge.experts", "checkpoints"), "[RUN,RUN]")}
        given = " ".join(f"{key}={example.get(key, '...')}" for key in missing)
        raise Incomplete(f"stage={config.stage} needs {' and '.join(missing)}: give {given}")
    try:
        stage: Any = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise PipelineError(explain(error, [])) from error
    check(stage)
    if isinstance(stage, RunStage) and "=" in (stage.group or ""):
        raise PipelineError(
            "group holds an =, as KEY=VALUE does (not shown here): it is a name that manifests and W&B show, group=NAME"
        )
    if isinstance(stage, ExportStage) and bool(stage.table) == (stage.checkpoint is not None):
        both = ", not both" if stage.table else ""
        raise PipelineError(f"stage=export needs table or checkpoint: give table=T, or checkpoint=RUN{both}")
    if isinstance(stage, TableStage) and stage.table:
        conf.table(stage.table)
    if isinstance(stage, EvalStage) and (stage.checkpoint is None) == (stage.merge is None):
        both = "" if stage.checkpoint is None else ", not both"
        raise PipelineError(f"stage=eval needs checkpoint: give checkpoint=RUN, or merge=...{both}")
    return stage


def refuse_strays(node: Any, prefix: str = "") -> None:
    """Keys that `+key=value` put beside the fields of a dataclass: Hydra takes them, we do not."""
    if isinstance(node, ListConfig) and not node._is_none() and not node._is_missing():
        for index, inner in enumerate(node):
            refuse_strays(inner, f"{prefix}{index}.")
    if not isinstance(node, DictConfig) or node._is_none():
        return
    kind = OmegaConf.get_type(node)
    known = getattr(kind, "__dataclass_fields__", None)
    for key in node:
        if known is not None and key not in known:
            raise PipelineError(unknown_key(f"{prefix}{key!s}", sorted(known)))
        if not OmegaConf.is_missing(node, key):
            refuse_strays(node[key], f"{prefix}{key!s}.")


def usage() -> str:
    """What can be typed: the stages with the groups that they read, the groups with their options."""
    read = {f"stage={stage}": " ".join(group for group, _ in conf.defaults(stage)) for stage in conf.STAGES}
    offered = {f"{group}=": ", ".join(conf.options(group)) for group in conf.groups() if group not in ("stage", "data")}
    lines = [
        fill(f"{name:15} {text}", 118, initial_indent="  ", subsequent_indent=" " * 18)
        for name, text in [*read.items(), ("", ""), *offered.items(), ("table=", ", ".join(conf.options(conf.TABLES)))]
    ]
    first = (
        "python -m pipeline stage=STAGE [group=option ...] [key=value ...]      (nothing: stage=table table=sandbox)"
    )
    last = (
        "A command's knobs and what they mean: --help behind it; their values: --cfg job. One run for each of several\n"
        "values: -m seed=0,1,2. What would run, and why: stage=plan table=... . Options and tables of your own:\n"
        "--config-dir=DIR, laid out like conf/. README.md and docs/ have examples."
    )
    return "\n".join([first, "", *lines, "", last])


def parse(word: str, several: bool = False) -> Override:
    """One `key=value`, refused where Hydra's grammar allows what has no meaning here. several: `key=a,b`, for `-m`."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        key, _, value = word.partition("=")
        quoted = re.sub(r"""[^][{},:\s"']*=[^][{},\s"']*""", r'"\g<0>"', value)
        if value[:1] in ("[", "{") and quoted != value and is_override(f"{key}={quoted}"):
            raise PipelineError(
                f"{word!r} is no override: an = inside brackets stands in quotes of its own, '{key}={quoted}'"
            ) from error
        raise PipelineError(
            f"{word!r} is no override: write key=value, for example stage=sft expert=math; a value with brackets or "
            "spaces stands in quotes, 'languages=[en,sw]'"
        ) from error
    key = override.key_or_group
    if not key:
        raise PipelineError(f"{word!r} names no key: write key=value, for example stage=sft expert=math")
    if key in conf.FILES:
        raise PipelineError(unknown_key(key, [*conf.groups(), "table", "languages"]))
    if override.is_delete():
        raise PipelineError(f"{word!r} takes a key away, and each has a meaning: give {key}=value")
    if override.is_sweep_override():
        if not several:
            raise PipelineError(f"{word} names several values: -m makes a run of each; a list is {key}=[...]")
    elif key in conf.groups() and not isinstance(override.value(), str):
        raise PipelineError(f"{word} is no option: give one of {', '.join(conf.options(key))}")
    if key.partition(".")[0] == "hydra" and not several:
        raise PipelineError(f"{word}: hydra's own settings are read with -m only")
    return override


def is_override(word: str) -> bool:
    """Whether Hydra's grammar reads a word."""
    try:
        return bool(OverridesParser.create().parse_override(word))
    except HydraException:
        return False


def jobs(words: list[str]) -> list[list[str]]:
    """The words of each job of a `-m`, as Hydra's sweeper will make them; Hydra's own settings left out."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parsed = [parse(word, several=True) for word in words]
    overrides = [override for override in parsed if override.key_or_group.partition(".")[0] != "hydra"]
    return [job for batch in BasicSweeper.split_arguments(overrides, max_batch_size=None) for job in batch]
