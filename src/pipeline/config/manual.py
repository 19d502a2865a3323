"""The manual of a command: `stage=sft --help`.

Meanings are the comments next to the fields, as Sphinx reads them.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, asdict, fields, is_dataclass
from functools import lru_cache, reduce
from typing import Any

import yaml
from omegaconf import MISSING
from pydantic_core import to_jsonable_python

from pipeline.config import conf
from pipeline.config.compose import partial_stage
from pipeline.config.defaults import left_open
from pipeline.config.explain import type_inside, unknown_option
from pipeline.config.knob import BOUNDS, Words, default_of, format_value
from pipeline.config.overrides import chosen_options, split_command, values_of
from pipeline.config.stages import Stage, TrainStage
from pipeline.errors import PipelineError

WIDTH = 118
TOP_LEVEL = "this command"


def manual_text(command_words: list[str]) -> str:
    """Return the groups and keys that a stage reads, with values, bounds and meanings.

    Raises:
        PipelineError: the stage is unknown.
    """
    chosen = chosen_options(command_words)
    stage = chosen.get("stage", "table")
    stage_class = conf.stage_class(stage)
    if stage_class is None:
        raise PipelineError(unknown_option("stage", stage))
    lines = [f"stage={stage} reads", ""]
    for group, option in stage_class.groups.items():
        if option == MISSING:
            default = "needed"
        else:
            if option is None:
                default = "none"
            else:
                default = f"{option} unless given"
        if group in chosen:
            default = f"here {chosen[group]}"
        lines += format_entry(f"{group}=", f"{', '.join(conf.options(group))} ({default})")
    lines += [
        "",
        (
            "Knobs and their values in this command. For groups that must be chosen and are not,"
            " defaults are shown."
        ),
    ]
    config, unnamed = values_in_effect(command_words, stage_class)
    parts = dict(stage_parts(stage_class, chosen.get("merge")))
    for title, kind in {TOP_LEVEL: stage_class, **parts}.items():
        lines += ["", *textwrap.wrap(f"{title}: {class_summary(kind)}".removesuffix(": "), WIDTH)]
        top = title == TOP_LEVEL
        if top:
            holder = config
        else:
            if title in unnamed:
                holder = None
            else:
                holder = getattr(config, title)
        for item in fields(kind):
            if item.name == "name" or (top and item.name in ("stage", *parts)):
                continue
            value = getattr(holder, item.name, MISSING)
            is_open = value == MISSING or is_dataclass(value)
            if is_open:
                value = default_of(item)
            shown = "..."
            if not (value in (NO_DEFAULT, MISSING) or is_dataclass(value)):
                shown = format_value(to_jsonable_python(value))
            entry = f"{'' if top else f'{title}.'}{item.name}={shown}"
            meaning = filter(None, (knob_comment(kind, item), bounds_text(item)))
            lines += format_entry(entry, " ".join(meaning))
    return "\n".join(lines)


def usage_text() -> str:
    """Return the text of --help: stages with their groups, and groups with their options."""
    kinds = {stage: conf.stage_class(stage) or Stage for stage in conf.options("stage")}
    stage_groups = {f"stage={stage}": " ".join(kind.groups) for stage, kind in kinds.items()}
    options = {}
    for group in conf.groups():
        if group not in ("stage", "data"):
            options[f"{group}="] = ", ".join(conf.options(group))
    options["table="] = ", ".join(conf.options(conf.TABLES))
    lines = []
    for name, text in [*stage_groups.items(), ("", ""), *options.items()]:
        entry = f"{name:15} {text}"
        lines.append(textwrap.fill(entry, WIDTH, initial_indent="  ", subsequent_indent=" " * 18))
    first = (
        "python -m pipeline stage=STAGE [group=option ...] [key=value ...]      (nothing:"
        " stage=table table=sandbox)"
    )
    last = (
        "A command's knobs and their meaning: append --help; their values: --cfg job. One run for"
        " each of several\nvalues: -m seed=0,1,2. What would run, and why: stage=plan table=... ."
        " Options and tables of your own:\n--config-dir=DIR, laid out like conf/. README.md and"
        " docs/ have examples."
    )
    return "\n".join([first, "", *lines, "", last])


def command_text(command_words: list[str], resolved: Stage | None = None) -> str:
    """Return a command's values as YAML, for --cfg job. Missing values are ???.

    `resolved` is the stage that the command builds, if it is known.
    """
    own_words, command = split_command(command_words)
    config, missing = settled_stage(values_of(command or own_words))
    tree = asdict(resolved or config)
    for key in missing:
        *path, last = key.split(".")
        holder = reduce(
            lambda part, name: part[int(name) if isinstance(part, list) else name], path, tree
        )
        holder[last] = MISSING
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).rstrip()


def values_in_effect(command_words: list[str], kind: type[Stage]) -> tuple[Stage, list[str]]:
    """Return what a command composes to, and the required groups that it does not name.

    Such a group gets any of its options.

    Raises:
        PipelineError: a wrong key or option.
    """
    typed = values_of(split_command(command_words)[0])
    settings = {**kind.groups, **left_open(typed), **typed}
    unnamed = []
    for group in kind.groups:
        if settings[group] == MISSING:
            unnamed.append(group)
    chosen = {group: conf.options(group)[0] for group in unnamed}
    return settled_stage({**settings, **chosen})[0], unnamed


def settled_stage(settings: Words) -> tuple[Stage, list[str]]:
    """Return the result of `partial_stage`, with the defaults that depend on other values."""
    config, missing = partial_stage(settings)
    return config.settled() if isinstance(config, TrainStage) else config, missing


def class_summary(kind: type) -> str:
    """Return a class's docstring as one line, or an empty string without a docstring."""
    text = " ".join((kind.__doc__ or "").split())
    if text.startswith(f"{kind.__name__}("):
        return ""
    return text


def stage_parts(stage_class: type[Stage], merge: str | None) -> Iterator[tuple[str, type]]:
    """Yield (title, dataclass) of the parts of a stage's settings."""
    for item in fields(stage_class):
        kind: Any = type_inside(stage_class, item.name)
        if item.name == "merge":
            kind = conf.method_of(merge) or kind
        if is_dataclass(kind) and isinstance(kind, type):
            yield item.name, kind


def bounds_text(item: Field[Any]) -> str:
    """Return the options or bounds of a field in brackets, or an empty string."""
    meta = item.metadata
    if meta.get("options"):
        return f"[{', '.join(meta['options'])}]"
    signs = {}
    for bound, (_, sign) in BOUNDS.items():
        if bound in meta:
            signs[bound] = sign
    limits = " and ".join(f"{sign} {meta[bound]:.10g}" for bound, sign in signs.items())
    if limits:
        return f"[{limits}]"
    if meta.get("run"):
        return "[RUN]"
    return ""


def knob_comment(kind: type, item: Field[Any]) -> str:
    owner = next(base for base in kind.__mro__ if item.name in getattr(base, "__annotations__", {}))
    return field_comments(owner).get(item.name, "")


@lru_cache(maxsize=64)
def field_comments(kind: type) -> dict[str, str]:
    """Return field -> the comment behind it, or on the lines before it.

    Empty for a class that was created at run time.
    """
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:
        return {}
    texts: dict[str, list[str]] = {}
    name, pending = "", list[str]()
    for line in source.splitlines():
        code, _, text = line.partition("# ")
        if re.match(r" {4}[\w@]", line):  # a field, or another statement
            name = line.partition(":")[0].strip()
            texts[name], pending = pending, []
        if text and not text.startswith("type: "):
            (texts.get(name, []) if code.strip() else pending).append(text)
    return {name: " ".join(lines) for name, lines in texts.items()}


def format_entry(key: str, text: str) -> list[str]:
    """Return indented lines. The text begins at one column, below a long key."""
    head = f"  {key:<34} "
    if len(head) > 38:
        return [
            head.rstrip(),
            *textwrap.wrap(text, WIDTH, initial_indent=" " * 37, subsequent_indent=" " * 37),
        ]
    return textwrap.wrap(text or " ", WIDTH, initial_indent=head, subsequent_indent=" " * 37) or [
        head.rstrip()
    ]
