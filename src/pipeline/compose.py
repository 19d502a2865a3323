"""From words on the command line to a checked dataclass, through Hydra; refusals name the key and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from textwrap import fill
from types import UnionType
from typing import Any, get_args, get_type_hints

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

from pipeline.config import MERGES, STAGES, EvalStage, Stage
from pipeline.knobs import PipelineError, check


class Unreadable(PipelineError):
    """A file of the configuration that is no YAML."""


def conf_dir() -> Path:
    """conf/ as shipped in the wheel, else that of the checkout."""
    package = Path(__file__).parent
    return package / "conf" if (package / "conf").is_dir() else package.parents[1] / "conf"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def groups() -> list[str]:
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


@lru_cache(maxsize=1)
def register() -> None:
    """The dataclasses as schemas: a stage's at the root, a merge method's at `merge`."""
    store = ConfigStore.instance()
    for name, stage in STAGES.items():
        store.store(group="stage", name=f"{name}_schema", node=stage, package="_global_")
    for name, merge in MERGES.items():
        store.store(group="merge", name=f"{name}_schema", node=merge)


@contextmanager
def hydra() -> Iterator[None]:
    """Hydra on our conf/, also inside a job of `-m`, where one is at work already."""
    there = GlobalHydra.instance()
    outer, there.hydra = there.hydra, None
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            yield
    finally:
        there.hydra = outer


def compose(words: list[str]) -> Stage:
    """The stage that these overrides ask for, every knob checked.

    Raises:
        PipelineError: a wrong key, option, type or range, or a missing value.
    """
    register()
    for word in words:
        parse(word)
    try:
        with hydra():
            refuse_unasked(words)
            return to_stage(hydra_compose("config", overrides=words))
    except (HydraException, OmegaConfBaseException) as error:
        raise PipelineError(explain(error, words)) from error
    except YAMLError as error:  # says the file and the line
        raise Unreadable(f"a file of the configuration is no YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"a file below {conf_dir()} is not UTF-8 ({error}): write it again in UTF-8") from error


def refuse_unasked(words: list[str]) -> None:
    """A key of a group that its stage brings only when asked, without the group: OmegaConf has no sentence for it."""
    asked = _asked(words)
    named = [group for group, option in _defaults(asked.get("stage", "table")) if option is None]
    for key in asked:
        group = key.partition(".")[0]
        if group in named and group != key and group not in asked:
            raise PipelineError(f"{key} needs {group}=... beside it: one of {', '.join(options(group))}")


def to_stage(config: DictConfig) -> Stage:
    """A composed config as its dataclass, checked."""
    refuse_strays(config)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        runs = missing[0] in ("checkpoint", "merge.math", "merge.language", "merge.expert", "model.path")
        value = "RUN" if runs else "[RUN,RUN]" if missing[0] in ("merge.experts", "checkpoints") else "..."
        raise PipelineError(f"stage={config.stage} needs {missing[0]}: give {missing[0]}={value}")
    try:
        stage: Any = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise PipelineError(explain(error, [])) from error
    check(stage)
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
            raise PipelineError(_unknown(f"{prefix}{key!s}", sorted(known)))
        if not OmegaConf.is_missing(node, key):
            refuse_strays(node[key], f"{prefix}{key!s}.")


def _unknown(key: str, known: list[str]) -> str:
    parent, dot, last = key.rpartition(".")
    close = [parent + dot + word for word in get_close_matches(last, known, n=3, cutoff=0.6)]
    return f"unknown key {key}: " + (f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}")


def _asked(words: list[str]) -> dict[str, str]:
    """key -> value of each override, as typed."""
    return {word.lstrip("+~").partition("=")[0]: word.partition("=")[2] for word in words}


def explain(error: Exception, words: list[str]) -> str:
    """Hydra's and OmegaConf's errors as one sentence in this program's words."""
    text, asked = str(error), _asked(words)
    if isinstance(error.__cause__, OmegaConfBaseException):
        text = f"{text}\n{error.__cause__}"
    stage = asked.get("stage", "table")
    if match := re.search(r"In '[^']*': Could not find '(\w+)/([^']*)'", text):
        group, option = match.groups()
        if group in groups():
            return f"{group}={option} is no option: there are {', '.join(options(group))}"
    if match := re.search(r"Could not override '([\w/@.]+)'", text):
        key = match.group(1)
        inner = re.search(r"Key '(\w+)' not in '\w+'\s+full_key: \1\s", text)
        if inner and inner.group(1) not in key.split("."):  # key=[{wrong: 1}]
            return _explain_key(f"{key}.{inner.group(1)}", stage, asked.get("merge"))
        if new := re.search(rf"full_key: ({re.escape(key)}\.\S+)", text):  # key={new: ...}
            return f"{new.group(1)} is new: add it with a plus, +{new.group(1)}=..."
        if key in groups() or key in STAGES:
            key = f"{key}={asked.get(key, '')}"
            return f"stage={stage} does not read {key}: leave it out; it reads {', '.join(reads(stage))}"
        return _explain_key(key, stage, asked.get("merge"))
    if match := re.search(r"You must specify '(\w+)'", text):
        group = match.group(1)
        return f"stage={stage} needs {group}=...: one of {', '.join(options(group))}"
    if match := re.search(r"(?:Key|key) '(\w+)' (?:is )?not in '(\w+)'", text):
        full = re.search(r"full_key: (\S+)", text)
        key = full.group(1) if full else match.group(1)
        inside = "" if key.endswith(match.group(1)) else f".{match.group(1)}"  # key={wrong: 1}
        return _explain_key(key + inside, stage, asked.get("merge"))
    if match := re.search(r"full_key: (\S+)", text):
        key = match.group(1)
        if "not in struct" in text:
            return _explain_key(key, stage, asked.get("merge"))
        if "is not Optional" in text:
            return f"{key}={asked.get(key, 'null')}: give a value, there is no meaning to null here"
        if "is not a subclass of" in text:
            return f"{key}={asked.get(key, '...')}: it holds keys of its own, give {key}.KEY=..."
        if "not a ListConfig" in text:
            return f"{key}={asked.get(key, '...')}: write a list, {key}=[{asked.get(key, '...')}]"
        lines = [line for line in text.splitlines() if re.match(r"\s*(Value|Invalid|Cannot|Non optional)", line)]
        return f"{key}={asked.get(key, '...')}: {' '.join((lines or text.splitlines())[0].split())}"
    return " ".join(text.split())


def _explain_key(key: str, stage: str, merge: str | None) -> str:
    if key.partition(".")[0] in groups() and key.partition(".")[0] not in reads(stage):
        return f"stage={stage} does not read {key}: leave it out; it reads {', '.join(reads(stage))}"
    kind: Any = STAGES.get(stage)
    method = next((name for name in MERGES if merge in (name, *presets(name))), None)
    for name in key.split(".")[:-1]:
        kind = MERGES[method] if name == "merge" and method else _inside(kind, name)
    if not is_dataclass(kind) and get_args(kind):
        kind = get_args(kind)[-1]
    known = sorted(getattr(kind, "__dataclass_fields__", {}))
    return _unknown(key, known) if known else f"unknown key {key}: stage={stage} reads {', '.join(reads(stage))}"


def presets(method: str) -> list[str]:
    """The options of merge= that are a method with other settings: ties_mergekit of ties."""
    return [option for option in options("merge") if option.startswith(f"{method}_") and option not in MERGES]


def _inside(kind: Any, name: str) -> Any:
    """The dataclass behind a name: that of a field (of its items, where it is a dict or a list of some), else None."""
    hint = get_type_hints(kind).get(name) if is_dataclass(kind) else next(iter(get_args(kind)[-1:]), None)
    if not isinstance(hint, UnionType):
        return hint
    inner = [one for one in get_args(hint) if one is not type(None)]
    return next((one for one in inner if is_dataclass(one)), inner[0])


def usage() -> str:
    """What can be typed: the stages with the groups that they read, the groups with their options."""
    read = {f"stage={stage}": " ".join(group for group, _ in _defaults(stage)) for stage in STAGES}
    offered = {f"{group}=": ", ".join(options(group)) for group in groups() if group not in ("stage", "data")}
    lines = [
        fill(f"{name:15} {text}", 118, initial_indent="  ", subsequent_indent=" " * 18)
        for name, text in [*read.items(), ("", ""), *offered.items()]
    ]
    first = (
        "python -m pipeline stage=STAGE [group=option ...] [key=value ...]      (nothing: stage=table table=sandbox)"
    )
    last = (
        "Every knob of a command, with its value: the command and --cfg job. One run for each of several values: -m\n"
        "seed=0,1,2. What would run, and why: stage=plan table=... . README.md has examples of all."
    )
    return "\n".join([first, "", *lines, "", last])


def reads(stage: str) -> list[str]:
    """The groups that a stage brings."""
    named = [group for group, _ in _defaults(stage)]
    return [*named, "tracking", "launcher"] if (conf_dir() / "stage" / f"{stage}.yaml").is_file() else []


def _defaults(stage: str) -> list[tuple[str, str | None]]:
    """The groups that a stage brings, each with its option; None: brought only when asked for."""
    path = conf_dir() / "stage" / f"{stage}.yaml"
    if not path.is_file():
        return []
    defaults = OmegaConf.to_container(OmegaConf.load(path))["defaults"]  # type: ignore[index,call-overload]
    named = [next(iter(item.items())) for item in defaults if isinstance(item, dict)]
    return [(name.removeprefix("/").partition("@")[0], option) for name, option in named]


def parse(word: str, several: bool = False) -> Override:
    """One `key=value`, refused where Hydra's grammar allows what has no meaning here. several: `key=a,b`, for `-m`."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise PipelineError(f"{word!r} is no override: write key=value, for example stage=sft expert=math") from error
    key = override.key_or_group
    if override.is_delete():
        raise PipelineError(f"{word!r} takes a key away, and each has a meaning: give {key}=value")
    if override.is_sweep_override():
        if not several:
            raise PipelineError(f"{word} names several values: -m makes a run of each; a list is {key}=[...]")
    elif key in groups() and not isinstance(override.value(), str):
        raise PipelineError(f"{word} is no option: give one of {', '.join(options(key))}")
    if key.partition(".")[0] == "hydra" and not several:
        raise PipelineError(f"{word}: hydra's own settings are read with -m only")
    return override


def jobs(words: list[str]) -> list[list[str]]:
    """The words of each job of a `-m`, as Hydra's sweeper will make them; Hydra's own settings left out."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    overrides = [parse(word, several=True) for word in words]
    ours = [override for override in overrides if override.key_or_group.partition(".")[0] != "hydra"]
    return [job for batch in BasicSweeper.split_arguments(ours, max_batch_size=None) for job in batch]
