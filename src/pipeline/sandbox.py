"""Jinja's sandbox with limits of time and memory, for templates of tasks and models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.sandbox import SandboxedEnvironment

from pipeline.limits import time_limit

SECONDS = 5  # processor time for one text; a usual template takes less than a millisecond
LONGEST = 10_000_000  # maximum characters of one repetition
# maximum bits of an integer; Python prints up to 4,300 digits, which are 14,284 bits
MOST_BITS = 13_000
WIDE = re.compile(  # a width in a format of `%` or str.format that may exceed LONGEST
    r"%(\([^)]{0,99}\))?[-+ #0.\d]{0,9}?(\d{8}|\*)|\{[^{}\s\"']{0,99}:[^{}\s\"']{0,9}?(\d{8}|\{)"
)
PADS = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch")


class Limited(Template):
    """A template that may render for SECONDS."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        with time_limit(SECONDS, f"it takes more than {SECONDS} seconds"):
            return super().render(*args, **kwargs)


def from_string(*args: Any, **kwargs: Any) -> Any:
    """Compile a template within SECONDS.

    Jinja computes constant expressions while it compiles.
    """
    with time_limit(SECONDS, f"it takes more than {SECONDS} seconds"):
        return _from_string(*args, **kwargs)


def refuse_long(name: str, text: Any, values: Iterable[Any] = ()) -> None:
    """Raise SecurityError if an operator, filter or method could fill the memory with text."""
    is_wide = name in ("%", "format", "format_map") and isinstance(text, str) and WIDE.search(text)
    has_long = any(isinstance(value, int) and value > LONGEST for value in values)
    if is_wide or (name in PADS and has_long):
        raise SecurityError("it repeats a text too often")


def compute(environment: Any, context: Any, operator: str, left: Any, right: Any) -> Any:
    """Compute `*`, `**` or `%`, unless the result could be too large or too slow."""
    refuse_long(operator, left)
    if operator != "%" and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if (bits * right if operator == "**" else bits + right.bit_length()) > MOST_BITS:
            raise SecurityError("it computes a number of too many digits")
    for part, count in ((left, right), (right, left)) if operator == "*" else ():
        is_repeated = isinstance(part, str | list | tuple) and isinstance(count, int)
        if is_repeated and len(part) * count > LONGEST:
            raise SecurityError("it repeats a text too often")
    return environment.binop_table[operator](left, right)


def call(environment: Any, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, unless it is a method that pads a text too much."""
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    text = getattr(method, "__self__", None)
    if isinstance(text, str):
        refuse_long(method.__name__, text, args)
    return _call(environment, context, function, *args, **kwargs)


def bounded(name: str) -> Any:
    """Return a filter of Jinja with limited widths."""
    function = FILTERS[name]

    def limited(text: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_long(name, text, (*args, *kwargs.values()))
        return function(text, *args, **kwargs)

    return limited


# This also limits the chat templates that transformers renders.
_from_string, _call = SandboxedEnvironment.from_string, SandboxedEnvironment.call
FILTERS.update({name: bounded(name) for name in ("center", "indent", "format", "batch")})
SandboxedEnvironment.template_class = Limited
SandboxedEnvironment.intercepted_binops = frozenset(("*", "**", "%"))
SandboxedEnvironment.from_string = from_string  # type: ignore[method-assign]
SandboxedEnvironment.call = call  # type: ignore[method-assign]
SandboxedEnvironment.call_binop = compute  # type: ignore[method-assign, assignment]
