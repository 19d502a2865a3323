"""What an evaluation can be refused for before its model is loaded: its data, and the files of the
model.

Imports nothing heavy, so that a plan checks the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.config.evaluation import Eval
from pipeline.config.extensions import BACKENDS, outside_core
from pipeline.errors import PipelineError
from pipeline.evaluate.code_eval import check_confinement
from pipeline.evaluate.records import ScoreRow
from pipeline.evaluate.tasks import task_specs
from pipeline.hub.models import local_folder, of_hub
from pipeline.models.checkpoint import check_headers, is_adapter, read_json
from pipeline.models.load import refuse_without_tokenizer, wrapped_names
from pipeline.runs.run import Folder

if TYPE_CHECKING:
    from pipeline.config.stages import EvalStage
    from pipeline.runs.run import Run


Check = Callable[["Run[EvalStage]", Sequence[TaskSpec]], None]


def define_tasks(run: Run[EvalStage], folder: Path, left_out: list[ScoreRow]) -> list[TaskSpec]:
    """Define the task files of what the stage asks for, and check their data.

    What a bundle cannot have goes into `left_out`.
    """
    stage = run.config
    root = run.parents["data_root"].folder if "data_root" in run.parents else stage.data_root
    return task_specs(stage.eval, stage.languages, Path(root) if root else None, folder, left_out)


def check_all(checks: Sequence[Check], run: Run[EvalStage], specs: Sequence[TaskSpec]) -> None:
    """Raise the first PipelineError of some checks, for what would otherwise fail after minutes of
    loading or scoring.

    A plan makes the checks of OF_TASKS once for all models, and those of OF_MODEL once for each.
    """
    for check in checks:
        check(run, specs)


def check_sandbox(run: Run[EvalStage], specs: Sequence[TaskSpec]) -> None:
    """Raise PipelineError if a task runs programs that a model writes, and this machine cannot
    confine them.
    """
    if any(spec.kind == "program" for spec in specs):
        check_confinement()


def check_packages(run: Run[EvalStage], specs: Sequence[TaskSpec]) -> None:
    """Raise PipelineError if a package is not installed:

    SentencePiece for spBLEU, or that of the backend.
    """
    settings = run.config.eval
    if settings.spm_model and not find_spec("sentencepiece"):
        raise PipelineError(
            "eval.spm_model needs SentencePiece, which is not installed: pip install sentencepiece"
        )
    engine_of(settings)


def engine_of(settings: Eval) -> dict[str, str]:
    """Return what of a backend outside of this program changes answers.

    Raises: PipelineError: it is not installed.
    """
    if settings.backend == "hf":
        return {}
    return outside_core(BACKENDS, settings.backend).versions()


def check_base(run: Run[EvalStage], specs: Sequence[TaskSpec]) -> None:
    """Raise PipelineError for an adapter from elsewhere whose base is on the Hub and cannot be
    fetched from it.
    """
    base, adapter = run.parents.get("base"), run.parents.get("0")
    if (
        base is None
        or not isinstance(adapter, Folder)
        or not is_adapter(adapter.folder)
        or not of_hub(base.folder)
    ):
        return
    try:
        _look_for(base.folder)
    except PipelineError as error:
        raise PipelineError(
            f"{adapter.name} is an adapter, and its base {error}; or give a copy of the base:"
            " eval.base=FOLDER (a merge: merge.base=FOLDER), in a table among the words of the"
            " run, in a study base: FOLDER"
        ) from error


@functools.cache
def _look_for(base: Path) -> None:
    local_folder(base, fetch=False)


def check_checkpoint(run: Run[EvalStage], specs: Sequence[TaskSpec]) -> None:
    """Check the files of a checkpoint. Those of a merge are checked with its headers."""
    if "checkpoint" in run.parents:
        refuse_model(run.parents["checkpoint"].folder, run.config.eval)


def refuse_model(folder: Path, settings: Eval) -> None:
    """Raise PipelineError where the files of a model show that it cannot be scored: truncated
    weights, no tokenizer, no chat template. A folder without weights is judged where these are
    loaded.
    """
    if not any(folder.glob("*.safetensors")):
        return
    check_headers(folder)
    if settings.backend != "hf" and not is_adapter(folder):
        wrapped = wrapped_names(folder)
        if wrapped:
            raise PipelineError(
                f"eval.backend={settings.backend} does not read {min(wrapped)} of checkpoint"
                f" {folder}, named by what held the model in training: write it anew, stage=export"
                f" checkpoint={folder}, or score it with eval.backend=hf"
            )
    refuse_without_tokenizer(folder)
    if settings.chat_template and not has_chat_template(folder):
        raise PipelineError(
            f"eval.chat_template=true, but the tokenizer of {folder} has none: leave it off"
        )


def has_chat_template(folder: Path) -> bool:
    """Whether the files of a tokenizer hold a chat template, in any of the places where
    transformers looks.
    """
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))


OF_TASKS: tuple[Check, ...] = (check_sandbox, check_packages)
OF_MODEL: tuple[Check, ...] = (check_base, check_checkpoint)


# --- prompts ---


def refuse_too_long(name: str, tokens_of: Mapping[int, int], max_length: int) -> None:
    """Raise PipelineError for a task with prompts and answers that do not fit a model that takes
    `max_length` tokens. tokens_of: question -> tokens.
    """
    too_long = sum(tokens > max_length for tokens in tokens_of.values())
    if too_long:
        raise PipelineError(
            f"{name}: {too_long} of {len(tokens_of)} prompts do not fit: the longest takes"
            f" {max(tokens_of.values())} tokens with its answer, the model {max_length}: ask for"
            " fewer exemplars or shorter answers (eval.max_gen_toks)"
        )
