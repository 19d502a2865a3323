"""Jinja's sandbox with bounds, for templates from outside: those of task files and chat templates."""

from __future__ import annotations

from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from pipeline.limits import time_limit

SECONDS = 10  # of processor time for one text; a usual template takes less than a millisecond
LONGEST = 10_000_000  # characters or items that one repetition may give


class Limited(Template):
    """A template that may render for SECONDS."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        with time_limit(SECONDS, f"it takes more than {SECONDS} seconds"):
            return super().render(*args, **kwargs)


class Bounded(SandboxedEnvironment):
    """Jinja's sandbox, in which a loop, a repetition or a power cannot go on for long."""

    template_class = Limited
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right
        else:
            size = max(_repeated(left, right), _repeated(right, left))
        if size > LONGEST:
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class BoundedChat(Bounded, ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, which may change no object that they are given."""


def _repeated(items: Any, count: Any) -> int:
    return len(items) * count if hasattr(items, "__len__") and isinstance(count, int) else 0


def bound_chat_templates() -> None:
    """Let transformers render chat templates in BoundedChat instead of Jinja's own sandbox."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedChat
