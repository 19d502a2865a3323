"""The evaluations of a plan that cannot run, found before anything is computed: by all that stage=eval checks early.

Data that a data run is still to write is not checked. The lengths of prompts need the tokenizer and the harness, which
takes seconds: they are kept in runs_dir/.lengths by task, language, data, tokenizer and config of the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.config.stages import EvalStage
from pipeline.errors import PipelineError
from pipeline.evaluate.before import Lengths, defined, refuse_early, refuse_model, too_long
from pipeline.evaluate.tasks import Definition, whole
from pipeline.files import sha256, write_atomically
from pipeline.models.files import ADAPTER_CONFIG
from pipeline.report.text import some
from pipeline.runs.run import Run
from pipeline.study.bill import behind
from pipeline.study.build.evaluation import is_bundle
from pipeline.study.graph import unfinished

LENGTHS = ".lengths"
DECIDING = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


def refusals(runs: Sequence[Run], prompts: bool) -> list[str]:
    """A sentence for each cause why evaluations among these runs cannot run, with how many it stops and the first.

    prompts: check the lengths of prompts too.
    """
    left, causes = unfinished(list(runs)), {}  # type: ignore[var-annotated]
    for run in runs:
        if run.hash in left and isinstance(run.config, EvalStage) and not is_bundle(run):
            try:
                check(run, prompts)
            except PipelineError as error:
                causes.setdefault(str(error), []).append(run.name)
    return [
        f"{some(len(names), 'evaluation')} cannot run: {cause} ({names[0]}{', ...' if len(names) > 1 else ''})"
        for cause, names in causes.items()
    ]


def check(run: Run[EvalStage], prompts: bool) -> None:
    """Raise PipelineError for what stage=eval would refuse before it loads a model."""
    model = model_here(run)
    if model is not None:
        refuse_model(model, run.config.eval)
    root = run.parents.get("data_root")
    if root is not None and not root.folder.is_dir():
        return
    if problem := problem_of_data(Asked(run)):
        raise PipelineError(problem)
    if prompts and model is not None and run.config.eval.backend == "hf" and (model / "config.json").is_file():
        with TemporaryDirectory() as folder:
            for definition in defined(run, Path(folder), []):
                lengths, questions, most = lengths_of(run, definition, model)
                too_long(definition.name, lengths, questions, most, run.config.eval.too_long)


def model_here(run: Run[EvalStage]) -> Path | None:
    """The first folder with a tokenizer and weights among the model and what it is made from; None where none is here.

    What is trained keeps the tokenizer, the positions and the chat template of its base.
    """
    checkpoint = run.parents.get("checkpoint")
    folders = [one.folder for one in ([checkpoint] if checkpoint else []) if one.folder.is_dir()]
    folders += [one.folder for one in behind(run) if (one.folder / "config.json").is_file()]
    return next((folder for folder in folders if not (folder / ADAPTER_CONFIG).is_file()), None)


class Asked:
    """What of an evaluation its data is checked by: runs that agree in it are checked once."""

    def __init__(self, run: Run[EvalStage]) -> None:
        config, root = run.config, run.parents.get("data_root")
        self.run = run
        self.key = json.dumps(
            [asdict(config.eval), config.languages, str(root.folder) if root else None, "checkpoint" in run.parents]
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Asked) and self.key == other.key


@lru_cache(maxsize=4096)
def problem_of_data(asked: Asked) -> str | None:
    """Why the data of an evaluation, or what it needs besides a model, is not there; None where it is."""
    try:
        with TemporaryDirectory() as folder:
            refuse_early(asked.run, defined(asked.run, Path(folder), []))
    except PipelineError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------------------------------------- prompts


def lengths_of(run: Run[EvalStage], definition: Definition, model: Path) -> tuple[Lengths, int, int]:
    """(lengths of the prompts, questions, tokens that the model takes), as they are kept or measured now."""
    key = lengths_key(run, definition, model)
    file = run.runs_dir / LENGTHS / f"{definition.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        kept = json.loads(file.read_bytes())
        if kept["key"] == key:
            prompts = [(row, length) for row, length in kept["prompts"]]
            return Lengths(prompts, kept["answer"]), kept["questions"], kept["most"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    from pipeline.evaluate.unloaded import measured

    lengths, questions, most = measured(definition, model, run.config.eval)
    if any(role in run.parents for role in ("data_root", "benchmarks")):  # the Hub's newest is not known by anything
        file.parent.mkdir(parents=True, exist_ok=True)
        told = {"key": key, **asdict(lengths), "questions": questions, "most": most}
        write_atomically(file, json.dumps(told))
    return lengths, questions, most


def lengths_key(run: Run[EvalStage], definition: Definition, model: Path) -> str:
    """All that decides the tokens of a task's prompts."""
    asked, body = run.config.eval, whole(definition.file)
    body.pop("dataset_kwargs", None)  # where the data lies; what it is stands in `data`
    told: dict[str, Any] = {
        "task": body, "first": definition.first, "limit": asked.limit, "split": asked.split,
        "exemplars": asked.exemplars, "chat_template": asked.chat_template, "harness": version("lm_eval"),
        "data": {role: run.parents[role].hash for role in ("data_root", "benchmarks") if role in run.parents},
        "model": {name: sha256(model / name) for name in DECIDING if (model / name).is_file()},
    }  # fmt: skip
    return json.dumps(told, sort_keys=True, default=str)
