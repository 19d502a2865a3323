"""Overrides of the command line: key=value in Hydra's grammar, and commands inside commands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from pipeline.config import conf
from pipeline.config.defaults import left_open
from pipeline.config.explain import unknown_key
from pipeline.config.knob import Tree
from pipeline.config.stages import HARDWARE
from pipeline.errors import PipelineError

SINGLE = {
    "eval": "eval",
    "select": "select",
    "merge": "merge",
    "expert": "sft",
    "checkpoint": "analyze",
}


def values_of(typed_words: Sequence[str]) -> Tree:
    """Return key, with its plus, -> value of each override. A typed \n is a line feed."""
    overrides = zip(typed_words, map(parse_override, typed_words), strict=True)
    values = {}
    for text, override in overrides:
        key = override.key_or_group
        if text.startswith("+"):
            key = f"+{key}"
        values[key] = with_line_feeds(override.value())
    return values


def with_line_feeds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_line_feeds(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(with_line_feeds, value))
    if isinstance(value, str):
        return value.replace("\\n", "\n")
    return value


def override_of(key: str, value: Any) -> str:
    """Return the override that sets a key, with its plus, to this value."""
    return f"{key}={written(value)}"


def written(value: Any) -> str:
    """Write a value in Hydra's grammar."""
    if isinstance(value, dict):
        items = [f"{key}:{written(inner)}" for key, inner in value.items()]
        return f"{{{','.join(items)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    with suppress(PipelineError):
        if values_of([f"x={value}"]) == {"x": value}:
            return value
    return QuotedString(value, Quote.single).with_quotes()


def typed_in(typed_words: Sequence[str]) -> dict[str, str]:
    """Return key -> value of each override, as typed."""
    typed = {}
    for text in typed_words:
        key, _, value = text.partition("=")
        typed[key.lstrip("+~")] = value
    return typed


def chosen_options(typed_words: Sequence[str]) -> Tree:
    """Return key -> value of a command, with the defaults that it leaves open."""
    typed = typed_in(typed_words)
    return {**typed, **left_open(typed)}


def split_command(typed_words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split the words of stage=plan and stage=prefetch from the single command inside them.

    `stage=plan expert=math` is about `stage=sft expert=math`; plan.stage names another stage. For a
    table there is no such command.
    """
    options = typed_in(typed_words)
    study = options.get("stage", "table")
    guessed = next((kind for key, kind in SINGLE.items() if key in options), None)
    kind = options.get(f"{study}.stage", guessed)
    if study not in ("plan", "prefetch") or kind is None or "table" in options:
        return list(typed_words), None
    of_program, of_run = [], [f"stage={kind}"]
    for text in typed_words:
        group = re.split(r"[.=]", text.lstrip("+"), maxsplit=1)[0]
        if group in ("stage", study, "launcher", HARDWARE, "runs_dir", "tracking"):
            of_program.append(text)
        if group not in ("stage", study, "launcher"):
            of_run.append(text)
    return of_program, of_run


def refuse_repeated(typed_words: Sequence[str]) -> None:
    """Raise PipelineError for a key that is set twice."""
    values: dict[str, str] = {}
    for key, equals, value in (text.lstrip("+").partition("=") for text in typed_words):
        if equals and key in values:
            of_plan = ""
            if key == "stage":
                of_plan = ", or plan.stage=STAGE to plan one command"
            raise PipelineError(
                f"{key} is set twice, to {values[key]} and {value}. Set it once{of_plan}."
            )
        values[key] = value


@lru_cache(maxsize=4096)
def parse_override(text: str, sweep: bool = False) -> Override:
    """Parse a `key=value`.

    With `sweep`, `key=a,b` is allowed, as for `-m`.

    Raises:
        PipelineError: it is not an override, has no meaning here, or has an interpolation.
    """
    conf.refuse_interpolation(text.partition("=")[0], text)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise PipelineError(
            f"{text!r} is not an override. Write key=value, for example stage=sft expert=math."
            " Quote a value with brackets, braces, spaces or =, for example 'languages=[en,sw]' or"
            " 'launcher.options=[\"--a=b\"]'"
        ) from error
    key = override.key_or_group
    if text.startswith("+") and key in conf.groups():
        raise PipelineError(f"{text}: choose an option without a plus: {text.lstrip('+')}")
    if not key:
        raise PipelineError(
            f"{text!r} has no key. Write key=value, for example stage=sft expert=math."
        )
    if key in conf.FILES:
        raise PipelineError(unknown_key(key, [*conf.groups(), "table", "languages"]))
    if override.is_delete():
        raise PipelineError(f"{text!r} removes a required key. Write {key}=value.")
    if override.is_sweep_override():
        if not sweep:
            raise PipelineError(
                f"{text} has several values. -m starts a run for each; a list is {key}=[...]"
            )
    elif key in conf.groups() and not isinstance(override.value(), str):
        raise PipelineError(f"{text} is not an option. {conf.choices(key)}")
    if key.partition(".")[0] == "hydra" and not sweep:
        raise PipelineError(f"{text}: Hydra's own settings are read with -m only.")
    return override


def sweep_jobs(typed_words: list[str]) -> list[list[str]]:
    """Return the overrides of each job of `-m`, as Hydra's sweeper makes them.

    Hydra's own settings are left out.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parsed = [parse_override(text, sweep=True) for text in typed_words]
    overrides = []
    for override in parsed:
        if override.key_or_group.partition(".")[0] != "hydra":
            overrides.append(override)
    found = []
    for batch in BasicSweeper.split_arguments(overrides, max_batch_size=None):
        for job in batch:
            found.append(job)
    return found
