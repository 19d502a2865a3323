"""The evaluations of a plan that cannot run, found before anything is computed: by all that stage=eval checks early.

Data that a data run is still to write is not checked. The lengths of prompts need the tokenizer and the harness, which
takes seconds: they are kept in runs_dir/.lengths by task, language, data, tokenizer and config of the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.benchmarks.task_files import Definition, whole
from pipeline.config.stages import EvalStage
from pipeline.errors import PipelineError
from pipeline.estimate.gpu_budget import models_of
from pipeline.evaluate.before import Lengths, defined, refuse_early, refuse_model, too_long
from pipeline.files import sha256, write_atomically
from pipeline.models.files import ADAPTER_CONFIG
from pipeline.report.render.text import some
from pipeline.runs.graph import unfinished
from pipeline.runs.run import Parent, Run
from pipeline.stages.evaluation import is_bundle

LENGTHS = ".lengths"
Known = tuple[dict[str, Path | None], dict[str, str | None]]  # as in model_here, and as in problem_of_data
DECIDING = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


def refusals(runs: Sequence[Run], prompts: bool) -> list[str]:
    """A sentence for each cause why evaluations among these runs cannot run, with how many it stops and the first.

    prompts: check the lengths of prompts too.
    """
    left = unfinished(list(runs))
    causes: dict[str, list[str]] = {}
    known: Known = {}, {}
    for run in runs:
        if run.hash in left and isinstance(run.config, EvalStage) and not is_bundle(run):
            try:
                check(run, prompts, known)
            except PipelineError as error:
                causes.setdefault(str(error), []).append(run.name)
    return [
        f"{some(len(names), 'evaluation')} cannot run: {cause} ({names[0]}{', ...' if len(names) > 1 else ''})"
        for cause, names in causes.items()
    ]


def check(run: Run[EvalStage], prompts: bool, known: Known) -> None:
    """Raise PipelineError for what stage=eval would refuse before it loads a model."""
    models, problems = known
    model = model_here(run, models)
    if model is not None:
        refuse_model(model, run.config.eval)
    root = run.parents.get("data_root")
    if root is not None and not root.folder.is_dir():
        return
    if problem := problem_of_data(run, problems):
        raise PipelineError(problem)
    if prompts and model is not None and run.config.eval.backend == "hf":
        with TemporaryDirectory() as folder:
            for definition in defined(run, Path(folder), []):
                lengths, questions, most = lengths_of(run, definition, model)
                too_long(definition.name, lengths, questions, most, run.config.eval.too_long)


def model_here(run: Parent, known: dict[str, Path | None]) -> Path | None:
    """The first folder with a config among the model and what it is made from; None where none is here.

    What is trained keeps the tokenizer, the positions and the chat template of its base. known: what was found before.
    """
    if run.hash not in known:
        here = (run.folder / "config.json").is_file() and not (run.folder / ADAPTER_CONFIG).is_file()
        found = (model_here(parent, known) for parent in models_of(run))
        known[run.hash] = run.folder if here else next(filter(None, found), None)
    return known[run.hash]


def problem_of_data(run: Run[EvalStage], seen: dict[str, str | None]) -> str | None:
    """Why the data of an evaluation, or what it needs besides a model, is not there; None where it is.

    seen: what was found of others, as evaluations of many models ask the same.
    """
    config, root = run.config, run.parents.get("data_root")
    asked = [asdict(config.eval), config.languages, str(root.folder) if root else None, "checkpoint" in run.parents]
    key = json.dumps(asked)
    if key not in seen:
        seen[key] = None
        try:
            with TemporaryDirectory() as folder:
                refuse_early(run, defined(run, Path(folder), []))
        except PipelineError as error:
            seen[key] = str(error)
    return seen[key]


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
