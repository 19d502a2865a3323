"""Templates of task files, rendered in Jinja's sandbox and within a time limit.

The harness' own environment lets a template call any Python function. Importing this module
replaces it. The rendered text is the same.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, StrictUndefined, Template
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import utils

import pipeline.sandbox  # noqa: F401 - limits the time of templates
from pipeline.config.task_yaml import read_task
from pipeline.errors import PipelineError
from pipeline.limits import TooLong


class RefusedTemplate(PipelineError):
    """The error of a template that the sandbox refuses, or that does not end."""


_ENVIRONMENT = SandboxedEnvironment(
    loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True
)
_ENVIRONMENT.filters["regex_replace"] = utils.regex_replace
loaded: list[Path] = []  # the task files whose templates are rendered


@cache
def compiled(template: str) -> Template:
    """Compile a template once.

    The harness compiles it for each exemplar of each question, which takes a millisecond each time.
    """
    return _ENVIRONMENT.from_string(template)


def place_of(template: str) -> str:
    """Return the file and key of a template, for an error message."""
    for file in loaded:
        for path, body in reversed(read_task(file).parts):
            for key, text in body.items():
                if text == template:
                    return f"{path}: {key}"
    return "a template of the task"


def render(template: str, doc: dict[str, Any]) -> str:
    """Render a template with the columns of a row.

    Raises:
        RefusedTemplate: The template uses something that could run code, or does not end.
    """
    try:
        return compiled(template).render(**doc)
    except (SecurityError, OverflowError, MemoryError, RecursionError, TooLong) as error:
        reason = str(error) or "it fills the memory"
        raise RefusedTemplate(
            f"{place_of(template)} is refused by the sandbox of templates ({reason}). Correct the"
            " template."
        ) from error


utils.env, utils.apply_template = _ENVIRONMENT, render
