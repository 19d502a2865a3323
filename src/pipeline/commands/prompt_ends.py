"""Notes of a plan about training prompts that end differently from a benchmark's prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.config.data import has_own_prompts
from pipeline.config.stages import EvalStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate.training_rows import known_rows
from pipeline.evaluate.before import define_tasks
from pipeline.launch.preflight import data_key
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run

COLUMN = "\0"  # placeholder for a column in a benchmark's template


def prompt_lines(runs: Sequence[Run]) -> list[str]:
    """Return a line for each pair of a training and a task whose prompts end differently.

    The text between question and answer is compared: the end that all prompts share, and the text
    after it. Only trainings on local prompts are compared.
    """
    asked: dict[str, dict[str, str]] = {}
    lines: dict[str, None] = {}
    for run in runs:
        if not isinstance(run.config, EvalStage) or run.config.eval.chat_template:
            continue
        for training in order_runs([run]):
            trained = trained_end(training)
            if trained is None:
                continue
            if data_key(run) not in asked:
                asked[data_key(run)] = asked_ends(run)
            for task, end in asked[data_key(run)].items():
                if not trained.endswith(end):
                    told = (
                        f"{training.label} is trained on prompts that end with {trained[-20:]!r}"
                        " before the answer"
                    )
                    lines[f"{told}, and {task} asks prompts that end with {end!r}"] = None
    return [*lines]


def trained_end(run: Run) -> str | None:
    """Return the text before all answers of a training.

    Returns None if its prompts do not come from the user or are not on this machine.
    """
    config = run.config
    if not isinstance(config, TrainStage) or config.stage == "cpt":
        return None
    if config.sft.template != "plain" or not has_own_prompts(config.expert):
        return None
    rows = known_rows(run)[0]
    if not rows:
        return None
    reversed_prompts = [row["prompt"][::-1] for row in rows]
    end = os.path.commonprefix(reversed_prompts)[::-1]
    start = os.path.commonprefix([row["completion"] for row in rows])
    blank = start[: len(start) - len(start.lstrip())]
    return f"{end}{config.sft.separator}{blank}"


def asked_ends(run: Run[EvalStage]) -> dict[str, str]:
    """Return task -> the text that its template puts before all answers.

    Tasks whose prompts a function writes are left out.
    """
    ends: dict[str, str] = {}
    with (
        TemporaryDirectory() as folder,
        suppress(PipelineError),
    ):  # problems of a task are reported elsewhere
        for spec in define_tasks(run, Path(folder), []):
            with suppress(Exception):  # a template is a program and may raise any exception
                delimiter = spec.body.get("target_delimiter", " ")
                ends[spec.task] = template_end(spec.body["doc_to_text"]) + delimiter
    return ends


def template_end(template: Any) -> str:
    """Return the text after the last column of a task's template."""
    from jinja2 import meta

    from pipeline.sandbox import SandboxedEnvironment

    if "{" not in template:  # the name of a column
        return ""
    environment = SandboxedEnvironment(keep_trailing_newline=True)
    names = meta.find_undeclared_variables(environment.parse(template))
    text = environment.from_string(template).render(dict.fromkeys(names, COLUMN))
    return text[text.rindex(COLUMN) + 1 :]
