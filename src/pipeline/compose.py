"""From words on the command line to a checked dataclass, through Hydra; and refusals that name the key and the remedy."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import MERGES, STAGES, PipelineError, Stage, check


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


def compose(words: list[str]) -> Stage:
    """The stage that these overrides ask for, every knob checked.

    Raises:
        PipelineError: a wrong key, option, type or range, or a missing value.
    """
    register()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return to_stage(hydra_compose("config", overrides=words))
    except (HydraException, OmegaConfBaseException) as error:
        raise PipelineError(explain(error, words)) from error


def to_stage(config: DictConfig) -> Stage:
    """A composed config as its dataclass, checked."""
    refuse_strays(config)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise PipelineError(f"stage={config.stage} needs {missing[0]}: give {missing[0]}=...")
    try:
        stage = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise PipelineError(explain(error, [])) from error
    assert isinstance(stage, Stage)
    check(stage)
    return stage


def refuse_strays(node: Any, prefix: str = "") -> None:
    """Keys that `+key=value` put beside the fields of a dataclass: Hydra takes them, we do not."""
    if not isinstance(node, DictConfig) or node._is_none():
        return
    kind = OmegaConf.get_type(node)
    known = getattr(kind, "__dataclass_fields__", None)
    for key in node:
        if known is not None and key not in known:
            raise PipelineError(_unknown(f"{prefix}{key}", sorted(known)))
        if not OmegaConf.is_missing(node, key):
            refuse_strays(node[key], f"{prefix}{key}.")


def _unknown(key: str, known: list[str]) -> str:
    last = key.rpartition(".")[2]
    close = get_close_matches(last, known, n=3, cutoff=0.5)
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
        if key in groups() or key in STAGES:
            return f"stage={stage} does not read {key}={asked.get(key, '')}: leave it out; it reads {', '.join(reads(stage))}"
        return _explain_key(key, stage, asked.get("merge"))
    if match := re.search(r"You must specify '(\w+)'", text):
        group = match.group(1)
        return f"stage={stage} needs {group}=...: one of {', '.join(options(group))}"
    if match := re.search(r"(?:Key|key) '(\w+)' (?:is )?not in '(\w+)'", text):
        full = re.search(r"full_key: (\S+)", text)
        return _explain_key(full.group(1) if full else match.group(1), stage, asked.get("merge"))
    if match := re.search(r"full_key: (\S+)", text):
        key = match.group(1)
        if "not in struct" in text:
            return _explain_key(key, stage, asked.get("merge"))
        reason = next((line for line in text.splitlines() if re.match(r"\s*(Value|Invalid|Cannot|Non optional)", line)), text)
        return f"{key}={asked.get(key, '...')}: {' '.join(reason.split())}"
    return " ".join(text.split())


def _explain_key(key: str, stage: str, merge: str | None) -> str:
    if key.partition(".")[0] in groups() and key.partition(".")[0] not in reads(stage):
        return f"stage={stage} does not read {key}: leave it out; it reads {', '.join(reads(stage))}"
    kind: Any = STAGES.get(stage)
    for name in key.split(".")[:-1]:
        kind = MERGES[merge] if name == "merge" and merge in MERGES else _field_type(kind, name)
    known = sorted(getattr(kind, "__dataclass_fields__", {}))
    return _unknown(key, known) if known else f"unknown key {key}: stage={stage} reads {', '.join(reads(stage))}"


def _field_type(kind: Any, name: str) -> Any:
    from typing import get_type_hints

    return get_type_hints(kind).get(name) if hasattr(kind, "__dataclass_fields__") else None


def reads(stage: str) -> list[str]:
    """The groups that a stage brings."""
    path = conf_dir() / "stage" / f"{stage}.yaml"
    if not path.is_file():
        return []
    defaults = OmegaConf.to_container(OmegaConf.load(path))["defaults"]  # type: ignore[index,call-overload]
    named = [next(iter(item)) for item in defaults if isinstance(item, dict)]
    return [name.removeprefix("/").partition("@")[0] for name in named] + ["tracking", "launcher"]


def parse(words: list[str]) -> None:
    """Refuse what is no `key=value` before anything is composed."""
    for word in words:
        try:
            OverridesParser.create().parse_override(word)
        except (HydraException, ConfigCompositionException) as error:
            raise PipelineError(f"{word!r} is no override: write key=value, for example stage=sft expert=math") from error
