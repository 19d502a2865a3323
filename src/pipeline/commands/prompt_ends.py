"""What a plan says where experts are trained on prompts that end otherwise than those of a benchmark."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.config.data import has_own_prompts
from pipeline.config.harness_tasks import merge_includes
from pipeline.config.stages import EvalStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate.training_rows import known_rows
from pipeline.evaluate.before import define_tasks
from pipeline.launch.preflight import data_key
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.train.examples import trainer_columns

COLUMN = "\0"  # stands for the text of a column in a benchmark's template
SHOWN = 20  # characters of a prompt's end

Ends = tuple[str, str]  # the end of a prompt, and what stands between it and the answer


def prompt_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for each training on the user's own prompts and each task that ends its prompts otherwise."""
    asked: dict[str, dict[str, Ends]] = {}
    lines: dict[str, None] = {}
    for run in runs:
        if not isinstance(run.config, EvalStage) or run.config.eval.chat_template:
            continue
        for training in order_runs([run]):
            trained = trained_ends(training)
            if trained is None:
                continue
            key = data_key(run)
            if key not in asked:
                asked[key] = asked_ends(run)
            for task, ends in asked[key].items():
                if not "".join(trained).endswith("".join(ends)):
                    lines[f"{training.label} is trained on {described(trained)}, and {task} asks {described(ends)}"] = (
                        None
                    )
    yield from lines


def described(ends: Ends) -> str:
    return f"prompts that end with {ends[0][-SHOWN:]!r} and then {ends[1]!r} before the answer"


def trained_ends(run: Run) -> Ends | None:
    """Return what all prompts of a training end with; None if its prompts are not the user's own, or not here."""
    config = run.config
    if not isinstance(config, TrainStage) or config.sft.template != "plain" or not has_own_prompts(config.expert):
        return None
    rows = [trainer_columns(row, config.sft) for row in known_rows(run)[0]]
    if not rows:
        return None
    end = os.path.commonprefix([row["prompt"][::-1] for row in rows])[::-1]
    start = os.path.commonprefix([row["completion"] for row in rows])
    return end, start[: len(start) - len(start.lstrip())]


def asked_ends(run: Run[EvalStage]) -> dict[str, Ends]:
    """Return task -> what its template ends all prompts with, without the tasks whose prompts a function writes."""
    ends: dict[str, Ends] = {}
    with TemporaryDirectory() as folder, suppress(PipelineError):  # what is wrong with a task is to be fixed
        for definition in define_tasks(run, Path(folder), []):
            body = merge_includes(definition.file)
            end = template_end(body.get("doc_to_text"))
            if end is not None and body.get("output_type") != "loglikelihood_rolling":
                ends[definition.task] = end, body.get("target_delimiter", " ")
    return ends


def template_end(template: Any) -> str | None:
    """Return the text after the last column of a task's template; None if it cannot be rendered without a row."""
    from jinja2 import Environment, TemplateError, meta

    if not isinstance(template, str) or "{{" not in template:
        return None
    environment = Environment(keep_trailing_newline=True)
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
        text = environment.from_string(template).render(dict.fromkeys(names, COLUMN))
    except (TemplateError, TypeError, ValueError):
        return None
    return text.rpartition(COLUMN)[2]
