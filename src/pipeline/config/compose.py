"""From overrides on the command line to a checked dataclass, through Hydra; errors name the key and the remedy."""

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
from pipeline.config.defaults import HARDWARE, left_open
from pipeline.config.explain import explain_error, options_in, unknown_key
from pipeline.config.harness_tasks import INCLUDED, TASKS, include, spell_out_tasks
from pipeline.config.knob import check, field_of_key, refuse_number, unread_knobs
from pipeline.config.merging import Merge
from pipeline.config.stages import (
    CheckStage,
    EvalStage,
    ExportStage,
    PlanStage,
    PrefetchStage,
    RunStage,
    Stage,
    TableStage,
)
from pipeline.errors import PipelineError

LONGEST_NAME = 255  # of a file, as an option is


class Incomplete(PipelineError):
    """A command without a required value; --cfg shows it nevertheless."""


def register(stages: Mapping[str, type[Stage]], methods: Mapping[str, type[Merge]]) -> None:
    """Register the stages and merge methods: a stage's dataclass is a schema at the root, a method's at `merge`."""
    conf.STAGES.update(stages)
    conf.METHODS.update(methods)
    store = ConfigStore.instance()
    store.__deepcopy__ = lambda memo: store  # type: ignore[attr-defined]  # Hydra would copy all of it to compose one
    for name, stage in stages.items():
        store.store(group="stage", name=f"{name}_schema", node=stage, package="_global_")
    for name, method in methods.items():
        store.store(group="merge", name=f"{name}_schema", node=method)


def register_installed(option: str | None) -> None:
    """Register the merge method of another package, where the option is one."""
    method = conf.method_of(option)
    if method and method.package and option:
        try:
            ConfigStore.instance().store(group="merge", name=option, node=method)
        except OmegaConfBaseException as error:
            raise PipelineError(f"merge={option} of package {method.package}: {str(error).splitlines()[0]}") from error


@contextmanager
def hydra_on_conf() -> Iterator[None]:
    """Initialise Hydra on our conf/, also inside a job of `-m`, where Hydra is initialised already."""
    instance = GlobalHydra.instance()
    outer, instance.hydra = instance.hydra, None
    try:
        with initialize_config_dir(str(conf.folder()), version_base="1.3"):
            yield
    finally:
        instance.hydra = outer


def compose(words: list[str]) -> Stage:
    """The stage that a command's overrides describe.

    Raises:
        PipelineError: a wrong key, option, type or range, a missing value, or a knob that this stage does not read.
    """
    own, command = split_command(words)
    stage = compose_words(completed(own))
    refuse_unread(stage, {override.key_or_group: override.value() for override in map(parse_override, own)})
    return replace(stage, command=command) if isinstance(stage, PlanStage | PrefetchStage | CheckStage) else stage


SINGLE = {"eval": "eval", "select": "select", "merge": "merge", "expert": "sft", "checkpoint": "analyze"}


def split_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """The words of stage=plan and stage=prefetch, and of the single command that they are about, if it is not a table:
    `stage=plan expert=math` is about `stage=sft expert=math`, and plan.stage names another stage. Those of stage=check
    are keys of its trainings."""
    options = options_in(words)
    study = options.get("stage", "table")
    if study == "check":
        own = [word for word in words if re.match(r"\+?(stage|check|launcher|hardware|runs_dir|tracking)[.=]", word)]
        rest = [word for word in words if word not in own or word.startswith(f"{HARDWARE}=")]
        return own, ["stage=sft", "expert=math", *rest]
    of = options.get(f"{study}.stage", next((kind for key, kind in SINGLE.items() if key in options), None))
    if study not in ("plan", "prefetch") or of is None or "table" in options:
        return words, None
    groups = {word: re.split(r"[.=]", word.lstrip("+"), maxsplit=1)[0] for word in words}
    own = [word for word in words if groups[word] in ("stage", study, "launcher", HARDWARE, "runs_dir", "tracking")]
    return own, [f"stage={of}", *(word for word in words if groups[word] not in ("stage", study, "launcher"))]


def refuse_unread(stage: Stage, given: Mapping[str, Any]) -> None:
    """Raise PipelineError for a knob, key -> value, that this stage does not read."""
    for key, remedy in unread_knobs(stage, given).items():
        raise PipelineError(f"{key}={given[key]} is read with {remedy} alone: give that, or leave it out")


def refuse_repeated(words: Sequence[str]) -> None:
    """Raise PipelineError for a key that is given twice, of which Hydra would take the last."""
    given: dict[str, str] = {}
    for key, equals, value in (word.lstrip("+").partition("=") for word in words):
        if equals and key in given:
            raise PipelineError(f"{key} is given twice, {given[key]} and {value}: give it once")
        given[key] = value


def compose_words(words: list[str], omitted: tuple[str, ...] = ()) -> Stage:
    """As compose, for the words of a run of a table, which has keys of `every` that this run may not read; no option is
    chosen for groups in `omitted`."""
    words, run_overrides = split_every(spelled_out(words))
    given = {override.key_or_group: override for override in map(parse_override, words)}
    stage = to_stage(compose_config(words, omitted))
    for key, override in given.items():
        if place := field_of_key(stage, key):
            refuse_number(key, place[1].type, override.value())
    return with_every(stage, run_overrides)


def compose_config(words: list[str], omitted: tuple[str, ...] = ()) -> DictConfig:
    """What Hydra composes of these overrides, with the dataclasses as schemas; values may be missing."""
    register_installed(options_in(words).get("merge"))
    overrides = [*words, *(f"~{group}" for group in omitted), *conf.searchpath_override()]
    try:
        with hydra_on_conf():
            check_optional_groups(words)
            return hydra_compose("config", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise PipelineError(explain_error(error, words)) from error
    except YAMLError as error:  # names the file and the line
        raise PipelineError(f"a file of the configuration is not valid YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"a file below {' or '.join(map(str, conf.folders()))} is not UTF-8 ({error}): save it as UTF-8"
        ) from error


def split_folders(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without --config-dir=DIR (or --config-dir DIR, as in Hydra), and the folders."""
    overrides, folders, remaining = [], [], list(words)
    while remaining:
        word = remaining.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in ("--config-dir", "-cd"):
            overrides.append(word)
        elif equals or remaining:
            folders.append(value if equals else remaining.pop(0))
        else:
            raise PipelineError("--config-dir needs a folder: give --config-dir=DIR")
    return overrides, folders


def completed(words: Sequence[str]) -> list[str]:
    """The words with what they leave open, of hardware= in place of itself."""
    added = left_open(options_in(list(words)))
    rest = [word for word in words if not word.startswith(f"{HARDWARE}=")]
    return [*rest, *(f"{key}={format_word(value)}" for key, value in added.items())]


def chosen_options(words: Sequence[str]) -> dict[str, str]:
    """Group -> option, and key -> value, of a command, what it leaves open included."""
    return options_in([*words, *completed(words)])


def spelled_out(words: Sequence[str]) -> list[str]:
    """The words with model=CHECKPOINT as model=trained model.path=CHECKPOINT, and tasks of the harness as records."""
    expanded: list[str] = []
    keys = [word.partition("=")[0] for word in words]
    for word in words:
        key, _, value = word.partition("=")
        if key.removeprefix("every.") == INCLUDED and value not in ("null", ""):
            include(str(parse_override(word).value()))
    if TASKS in keys and "eval" not in keys:
        expanded += ["eval=mgsm_0shot", "eval.name=tasks"]
    for word in words:
        key, _, value = word.partition("=")
        if key in ("eval", TASKS) and not parse_override(word, sweep=True).is_sweep_override():  # -m: each job's, later
            parsed = parse_override(word).value()
            spelled = spell_out_tasks({key: parsed}, conf.options("eval"))
            expanded += (
                [word]
                if spelled == {key: parsed}
                else [f"{name}={format_word(inner)}" for name, inner in spelled.items()]
            )
            continue
        is_model_path = key == "model" and all(map(conf.is_checkpoint, value.split(",")))
        expanded += ["model=trained", f"model.path={value}"] if is_model_path else [word]
    return expanded


def format_word(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if isinstance(value, list):
        return "[" + ",".join(map(format_word, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{format_word(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]*", value):
        return "'" + value.replace("'", r"\'") + "'"
    return "null" if value is None else str(value)


def split_every(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words without every.KEY=VALUE, and KEY -> value: a key of the table's runs, unknown to Hydra."""
    overrides, run_overrides = [], {}
    for word in words:
        if word.lstrip("+").startswith("every."):
            override = parse_override(word)
            run_overrides[override.key_or_group.removeprefix("every.")] = override.value()
        else:
            overrides.append(word.removeprefix("table.") if word.startswith("table.free_snapshots=") else word)
    return overrides, run_overrides


def with_every(stage: Stage, run_overrides: Mapping[str, Any]) -> Stage:
    """A table's stage with these overrides for all its runs."""
    if not run_overrides:
        return stage
    if not isinstance(stage, TableStage):
        raise PipelineError(
            f"stage={stage.stage} has no table of runs for every.{next(iter(run_overrides))}: leave it out"
        )
    return replace(stage, every={**stage.every, **run_overrides})


def check_optional_groups(words: list[str]) -> None:
    """Raise PipelineError for a key of an optional group that is not chosen: OmegaConf's error would be unclear."""
    options = options_in(words)
    optional_groups = [group for group, option in conf.stage_defaults(options.get("stage", "table")) if option is None]
    for key in options:
        group = key.partition(".")[0]
        if group in optional_groups and group != key and group not in options:
            raise PipelineError(f"{key} needs {group}=... next to it: one of {', '.join(conf.options(group))}")


def to_stage(config: DictConfig) -> Stage:
    """A composed config as its dataclass, checked."""
    check_known_keys(config)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        runs = ("run", "checkpoint", "merge.math", "merge.language", "merge.expert", "model.path")
        example = {**dict.fromkeys(runs, "RUN"), **dict.fromkeys(("merge.experts", "checkpoints"), "[RUN,RUN]")}
        examples = " ".join(
            re.sub(r"\[\d+\]\.(\w+)$", r"=[{\1: ...}, ...]", key) if "[" in key else f"{key}={example.get(key, '...')}"
            for key in missing
        )
        raise Incomplete(f"stage={config.stage} needs {' and '.join(missing)}: give {examples}")
    try:
        stage: Any = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise PipelineError(explain_error(error, [])) from error
    check(stage)
    if isinstance(stage, RunStage) and "=" in (stage.group or ""):
        raise PipelineError(
            "group holds an =, as KEY=VALUE does (not shown here): it is a name that manifests and W&B show, group=NAME"
        )
    if isinstance(stage, ExportStage) and bool(stage.table) == (stage.checkpoint is not None):
        suffix = ", not both" if stage.table else ""
        raise PipelineError(f"stage=export needs table or checkpoint: give table=T, or checkpoint=RUN{suffix}")
    if isinstance(stage, TableStage) and stage.table:
        conf.table_file(stage.table)
    if isinstance(stage, EvalStage) and (stage.checkpoint is None) == (stage.merge is None):
        suffix = "" if stage.checkpoint is None else ", not both"
        raise PipelineError(f"stage=eval needs checkpoint: give checkpoint=RUN, or merge=...{suffix}")
    return stage


def check_known_keys(node: Any, prefix: str = "") -> None:
    """Raise PipelineError for keys that `+key=value` added to a dataclass: Hydra accepts them, we do not."""
    if isinstance(node, ListConfig) and not node._is_none() and not node._is_missing():
        for index, inner in enumerate(node):
            check_known_keys(inner, f"{prefix}{index}.")
    if not isinstance(node, DictConfig) or node._is_none():
        return
    kind = OmegaConf.get_type(node)
    field_names = getattr(kind, "__dataclass_fields__", None)
    for key in node:
        if field_names is not None and key not in field_names:
            raise PipelineError(unknown_key(f"{prefix}{key!s}", sorted(field_names)))
        if not OmegaConf.is_missing(node, key):
            check_known_keys(node[key], f"{prefix}{key!s}.")


def usage_text() -> str:
    """Text of --help: the stages with the groups that they read, the groups with their options."""
    stage_groups = {
        f"stage={stage}": " ".join(group for group, _ in conf.stage_defaults(stage)) for stage in conf.STAGES
    }
    options = {f"{group}=": ", ".join(conf.options(group)) for group in conf.groups() if group not in ("stage", "data")}
    options["table="] = ", ".join(conf.options(conf.TABLES))
    lines = [
        fill(f"{name:15} {text}", 118, initial_indent="  ", subsequent_indent=" " * 18)
        for name, text in [*stage_groups.items(), ("", ""), *options.items()]
    ]
    first = (
        "python -m pipeline stage=STAGE [group=option ...] [key=value ...]      (nothing: stage=table table=sandbox)"
    )
    last = (
        "A command's knobs and their meaning: append --help; their values: --cfg job. One run for each of several\n"
        "values: -m seed=0,1,2. What would run, and why: stage=plan table=... . Options and tables of your own:\n"
        "--config-dir=DIR, laid out like conf/. README.md and docs/ have examples."
    )
    return "\n".join([first, "", *lines, "", last])


def parse_override(word: str, sweep: bool = False) -> Override:
    """A `key=value`. sweep: allow `key=a,b`, as for `-m`.

    Raises:
        PipelineError: not an override, one of Hydra's that has no meaning here, or an interpolation.
    """
    conf.refuse_interpolation(word.partition("=")[0], word)
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        key, _, value = word.partition("=")
        quoted = re.sub(r"""[^][{},:\s"']*=[^][{},\s"']*""", r'"\g<0>"', value)
        if value[:1] in ("[", "{") and quoted != value and is_override(f"{key}={quoted}"):
            raise PipelineError(f"{word!r} is not an override: quote an = inside brackets, '{key}={quoted}'") from error
        if value == "~":
            raise PipelineError(f"{word!r} is not an override: null is written out, {key}=null") from error
        if value[:1] not in ("[", "{", "") and is_override(f'{key}="{value}"'):
            raise PipelineError(f"""{word!r} is not an override: quote the value too, '{key}="{value}"'""") from error
        raise PipelineError(
            f"{word!r} is not an override: write key=value, for example stage=sft expert=math; quote a value with "
            "brackets or spaces, 'languages=[en,sw]'"
        ) from error
    key = override.key_or_group
    if word.startswith("+") and key in conf.groups():
        raise PipelineError(f"{word}: an option is chosen without a plus, {word.lstrip('+')}")
    if not key:
        raise PipelineError(f"{word!r} has no key: write key=value, for example stage=sft expert=math")
    if key in conf.FILES:
        raise PipelineError(unknown_key(key, [*conf.groups(), "table", "languages"]))
    if override.is_delete():
        raise PipelineError(f"{word!r} removes a key that is needed: give {key}=value")
    if override.is_sweep_override():
        if not sweep:
            raise PipelineError(f"{word} gives several values: -m starts a run for each; a list is {key}=[...]")
    elif key in conf.groups() and (not isinstance(override.value(), str) or len(word) > LONGEST_NAME):
        raise PipelineError(f"{word} is not an option: give one of {', '.join(conf.options(key))}")
    if key.partition(".")[0] == "hydra" and not sweep:
        raise PipelineError(f"{word}: hydra's own settings are read with -m only")
    return override


def is_override(word: str) -> bool:
    """Whether Hydra's grammar accepts a word."""
    try:
        return bool(OverridesParser.create().parse_override(word))
    except HydraException:
        return False


def sweep_jobs(words: list[str]) -> list[list[str]]:
    """The overrides of each job of `-m`, as made by Hydra's sweeper, without Hydra's own settings."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parsed = [parse_override(word, sweep=True) for word in words]
    overrides = [override for override in parsed if override.key_or_group.partition(".")[0] != "hydra"]
    return [job for batch in BasicSweeper.split_arguments(overrides, max_batch_size=None) for job in batch]
