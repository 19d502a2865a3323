"""Checks of an evaluation's data and of its model's files, made before the model is loaded.

Its imports are light, so that a plan can make the same checks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
from pipeline.models.checkpoint import check_headers, is_adapter
from pipeline.models.load import refuse_without_tokenizer
from pipeline.runs.run import Folder

if TYPE_CHECKING:
    from pipeline.config.stages import EvalStage
    from pipeline.runs.run import Run


def define_tasks(run: Run[EvalStage], folder: Path, left_out: list[ScoreRow]) -> list[TaskSpec]:
    """Write the task files of an evaluation and check their data.

    Tasks that a bundle asks for `where_possible` and that cannot be defined go into `left_out`.
    """
    stage = run.config
    root = run.parents["data_root"].folder if "data_root" in run.parents else stage.data_root
    return task_specs(stage.eval, stage.languages, Path(root) if root else None, folder, left_out)


def check_inputs(settings: Eval, specs: Sequence[TaskSpec]) -> None:
    """Check what tasks need besides their data, before minutes of loading or scoring.

    Raises:
        PipelineError: A task runs programs and this machine cannot confine them, or a package is
            missing: SentencePiece (for spBLEU) or the backend's.
    """
    if any(spec.kind == "program" for spec in specs):
        check_confinement()
    if settings.spm_model and not find_spec("sentencepiece"):
        raise PipelineError(
            "eval.spm_model: SentencePiece is not installed. Run pip install sentencepiece."
        )
    engine_of(settings)


def engine_of(settings: Eval) -> dict[str, str]:
    """Return the versions and settings of a backend's own package that change answers.

    Raises:
        PipelineError: The package is not installed.
    """
    if settings.backend == "hf":
        return {}
    return outside_core(BACKENDS, settings.backend).versions()


def check_base(run: Run[EvalStage]) -> None:
    """Raise PipelineError if a foreign adapter's base is on the Hub and cannot be fetched."""
    base = run.parents.get("base")
    adapter = run.parents.get("0")
    if base is None or not isinstance(adapter, Folder):
        return
    if not is_adapter(adapter.folder) or not of_hub(base.folder):
        return
    try:
        _look_for(base.folder)
    except PipelineError as error:
        raise PipelineError(
            f"The base model of adapter {adapter.name} cannot be loaded: {error}. To use a local"
            " copy, set eval.base=FOLDER (for a merge merge.base=FOLDER, in a study base: FOLDER)."
        ) from error


@functools.cache
def _look_for(base: Path) -> None:
    local_folder(base, fetch=False)


def refuse_model(folder: Path) -> None:
    """Raise PipelineError if a model's files show that it cannot be scored.

    Finds truncated weights and a missing tokenizer. A folder without weights is checked when they
    are loaded.
    """
    if not any(folder.glob("*.safetensors")):
        return
    check_headers(folder)
    refuse_without_tokenizer(folder)


# --- prompts ---


def refuse_too_long(name: str, tokens_of: Mapping[int, int], max_length: int) -> None:
    """Raise PipelineError if prompts with their answers are longer than the model takes.

    Args:
        name: The task's name, for the message.
        tokens_of: Question -> tokens of its longest prompt and answer.
        max_length: The most tokens that the model takes.
    """
    too_long = sum(tokens > max_length for tokens in tokens_of.values())
    if too_long:
        longest = max(tokens_of.values())
        raise PipelineError(
            f"{name}: {too_long} of {len(tokens_of)} prompts do not fit. The longest needs"
            f" {longest} tokens with its answer, and the model takes {max_length}. Use fewer"
            " exemplars, or shorter answers (eval.max_gen_toks)."
        )
