"""What a command's knobs are: `stage=sft --help`. Meanings are the comments beside the fields, as Sphinx reads them."""

from __future__ import annotations

import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from functools import lru_cache
from typing import Any

from omegaconf import MISSING

from pipeline.config import conf
from pipeline.config.explain import options_in, type_inside
from pipeline.config.knob import shown
from pipeline.errors import PipelineError

WIDTH = 118
OWN = "this command"


def manual(words: list[str]) -> str:
    """The groups and knobs that a stage reads: each with its default, what it may be, and what it means.

    Raises:
        PipelineError: words without a stage, or of one that is none.
    """
    asked = options_in(words)
    stage = asked.get("stage", "table")
    if stage not in conf.STAGES:
        raise PipelineError(f"stage={stage} is no option: there are {', '.join(sorted(conf.STAGES))}")
    lines = [f"stage={stage} reads", ""]
    for group, option in conf.defaults(stage):
        if conf.options(group):
            chosen = "needed" if option == MISSING else "none" if option is None else f"{option} unless given"
            lines += entry(f"{group}=", f"{', '.join(conf.options(group))} ({chosen})")
    lines += ["", "knobs, with their defaults; the options above set some of them otherwise"]
    for title, kind in parts(stage, asked.get("merge")):
        lines += ["", *textwrap.wrap(f"{title}: {about(kind)}".removesuffix(": "), WIDTH)]
        named = {name for name, _ in parts(stage, None)}
        for item in fields(kind):
            if item.name in ("stage", "name") or (title == OWN and item.name in named):
                continue
            key = item.name if title == OWN else f"{title}.{item.name}"
            lines += entry(f"{key}={default_of(item)}", " ".join(filter(None, (meaning(kind, item), bounds(item)))))
    return "\n".join(lines)


def about(kind: type) -> str:
    """A class's docstring as one line; empty where it has none but the signature that dataclass makes."""
    text = " ".join((kind.__doc__ or "").split())
    return "" if text.startswith(f"{kind.__name__}(") else text


def parts(stage: str, merge: str | None) -> Iterator[tuple[str, type]]:
    """The dataclasses of a stage whose fields are knobs: its own, and those that it brings."""
    own = conf.STAGES[stage]
    yield OWN, own
    for item in fields(own):
        kind: Any = type_inside(own, item.name)
        if item.name == "merge" and merge is not None:
            method = next((name for name in conf.METHODS if merge in (name, *conf.presets(name))), None)
            kind = conf.METHODS[method] if method else kind
        if is_dataclass(kind) and isinstance(kind, type):
            yield item.name, kind


def default_of(item: Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not NO_DEFAULT else item.default
    if value is NO_DEFAULT or value == MISSING:
        return "..."
    if is_dataclass(value):
        return "..."
    return shown(value)


def bounds(item: Field[Any]) -> str:
    """What a knob may be, where that is bounded."""
    meta = item.metadata
    if meta.get("options"):
        return f"[{', '.join(meta['options'])}]"
    marks = (("low", ">="), ("above", ">"), ("high", "<="), ("below", "<"))
    told = " and ".join(f"{mark} {meta[key]:.10g}" for key, mark in marks if meta.get(key) is not None)
    return f"[{told}]" if told else "[RUN]" if meta.get("run") else ""


def meaning(kind: type, item: Field[Any]) -> str:
    owner = next(one for one in kind.__mro__ if item.name in getattr(one, "__annotations__", {}))
    return comments(owner).get(item.name, "")


@lru_cache(maxsize=64)
def comments(kind: type) -> dict[str, str]:
    """Field -> the comment behind it, or on lines of its own before it; none of a class that is made at run time."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:
        return {}
    found: dict[str, str] = {}
    name, before, depth, at_start = "", [], 0, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if at_start:
                before.append(text)
            else:
                found[name] = " ".join(filter(None, (found.get(name, ""), text)))
        elif token.type == tokenize.NEWLINE:
            at_start, name = True, ""
        elif token.type == tokenize.NAME and at_start and not depth:
            name, at_start = token.string, False
            if before:
                found[name] = " ".join(before)
            before = []
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            at_start = False
    return found


def entry(key: str, text: str) -> list[str]:
    """Indented; the text begins at one column, below the key where that is long."""
    head = f"  {key:<34} "
    if len(head) > 38:
        return [head.rstrip(), *textwrap.wrap(text, WIDTH, initial_indent=" " * 37, subsequent_indent=" " * 37)]
    return textwrap.wrap(text or " ", WIDTH, initial_indent=head, subsequent_indent=" " * 37) or [head.rstrip()]
