"""Jinja's sandbox with limits of time and memory, for the templates of task files and models."""

from __future__ import annotations

from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment

from pipeline.limits import time_limit

SECONDS = 5  # of processor time for one text; a usual template takes less than a millisecond
LONGEST = 10_000_000  # characters that one repetition may give


class Limited(Template):
    """A template that may render for SECONDS."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        with time_limit(SECONDS, f"it takes more than {SECONDS} seconds"):
            return super().render(*args, **kwargs)


def multiply(environment: Any, context: Any, operator: str, left: Any, right: Any) -> Any:
    """Multiply two values, unless the result is a text that could fill the memory."""
    for text, count in ((left, right), (right, left)):
        if isinstance(text, str) and isinstance(count, int) and len(text) * count > LONGEST:
            raise SecurityError("it repeats a text too often")
    return left * right


# Also of the environment in which transformers renders chat templates
SandboxedEnvironment.template_class = Limited
SandboxedEnvironment.intercepted_binops = frozenset("*")
SandboxedEnvironment.call_binop = multiply  # type: ignore[method-assign, assignment]
