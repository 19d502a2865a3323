"""Jinja's sandbox with a time limit, for templates from outside: those of task files and chat templates."""

from __future__ import annotations

from typing import Any

from jinja2 import Template
from jinja2.sandbox import SandboxedEnvironment

from pipeline.limits import time_limit

SECONDS = 10  # of processor time for one text; a usual template takes less than a millisecond


class Limited(Template):
    """A template that may render for SECONDS."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        with time_limit(SECONDS, f"it takes more than {SECONDS} seconds"):
            return super().render(*args, **kwargs)


SandboxedEnvironment.template_class = Limited  # also of the environment in which transformers renders chat templates
