"""Notes of a plan on prompts that end in other blanks in training than in scoring.

An expert that was trained on `A:\n15` and is scored on `A: 15` loses much of its score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from jinja2 import meta

from pipeline.config.stages import EvalStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.evaluate.before import define_tasks
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.sandbox import SandboxedEnvironment

COLUMN = "\0"  # stands for a column in a task's template


def prompt_lines(runs: Sequence[Run]) -> list[str]:
    """Return a line for each training on own prompts and task that differ in blanks alone.

    The text between question and answer is compared, by the templates of both.
    """
    ends = {run.hash: list(trained_ends(run)) for run in runs}
    if not any(ends.values()):
        return []
    labels: dict[str, dict[str, None]] = {}  # the difference -> its trainings
    asked: dict[str, dict[str, str]] = {}
    for run in runs:
        if not isinstance(run.config, EvalStage) or run.config.eval.chat_template:
            continue
        trainings = [training for training in order_runs([run]) if ends.get(training.hash)]
        if not trainings:
            continue
        questions = f"{run.config.eval.tasks} {run.config.languages} {run.config.data_root}"
        if questions not in asked:
            asked[questions] = asked_ends(run)
        for training in trainings:
            for end, (task, asks) in product(ends[training.hash], asked[questions].items()):
                same_words = without_blanks(end).endswith(without_blanks(asks))
                if same_words and not end.endswith(asks):
                    difference = (
                        f"trained on prompts that end with {end!r} before the answer, and {task}"
                        f" asks prompts that end with {asks!r}"
                    )
                    labels.setdefault(difference, {})[training.label] = None
    return [f"{', '.join(names)}: {difference}" for difference, names in labels.items()]


def without_blanks(text: str) -> str:
    return "".join(text.split())


def trained_ends(run: Run) -> Iterator[str]:
    """Yield the text between question and answer of each template of a user's rows."""
    config = run.config
    if not isinstance(config, TrainStage) or config.sft.template != "plain":
        return
    for _, source in config.expert.all_sources():
        if source.rows == "template":
            _, _, end = (source.prompt or "").rpartition("}")
            start, _, _ = (source.completion or "").partition("{")
            blank = start[: len(start) - len(start.lstrip())]
            yield f"{end}{config.sft.separator or ''}{blank}"


def asked_ends(run: Run[EvalStage]) -> dict[str, str]:
    """Return task -> the text that its template puts between question and answer.

    Tasks whose prompts a function writes are left out.
    """
    ends = {}
    # Problems of a task are reported elsewhere
    with TemporaryDirectory() as folder, suppress(PipelineError):
        for spec in define_tasks(run, Path(folder), []):
            with suppress(Exception):  # a template is a program and may raise any exception
                delimiter = spec.body.get("target_delimiter", " ")
                ends[spec.task] = template_end(spec.body["doc_to_text"]) + delimiter
    return ends


def template_end(template: str) -> str:
    """Return the text after the last column of a task's template."""
    if "{" not in template:  # the name of a column
        return ""
    environment = SandboxedEnvironment(keep_trailing_newline=True)
    names = meta.find_undeclared_variables(environment.parse(template))
    text = environment.from_string(template).render(dict.fromkeys(names, COLUMN))
    return text[text.rindex(COLUMN) + 1 :]
