"""Find runs of a plan that cannot succeed, before anything is computed.

Examples are evaluations that fail the early checks of stage=eval, data runs whose sources cannot be
read, trainings that lack a library, and models that do not fit in memory.

Data that an unfinished data run will write are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.config.stages import DataStage, EvalStage, TrainStage, trains
from pipeline.data.mixture import refuse_unusable
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.estimate.durations import gpu_memory, memory_here, visible_gpus
from pipeline.estimate.models import nearest_folder
from pipeline.estimate.training_rows import source_files
from pipeline.evaluate.before import (
    check_base,
    check_inputs,
    define_tasks,
    refuse_model,
)
from pipeline.hub.models import local_folder
from pipeline.models.files import ADAPTER_CONFIG
from pipeline.models.skeleton import check_shapes
from pipeline.runs.make import why_not_finished
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.hub_inputs import experts_on_hub
from pipeline.stages.merge import has_full_weights, is_external
from pipeline.text import pluralize
from pipeline.train.memory import refuse_without_torchao

LARGE = 10_000_000  # bytes of a file above which its rows are not read before a run


def training_problems(runs: Sequence[Run], remaining: Container[str]) -> list[str]:
    """Return one sentence for each training or data run that cannot run.

    Causes are a missing library, and files of sources or of the base that cannot be read.

    `remaining` has the hashes of the unfinished runs.
    """
    problems: list[str] = []
    unfinished = [run for run in runs if run.hash in remaining]
    for run in unfinished:
        if isinstance(run.config, TrainStage):
            try:
                refuse_without_torchao(run.config.sft)
                check_base_files(run)
            except PipelineError as error:
                problems.append(str(error))
        if isinstance(run.config, DataStage):
            problems += source_problems(run)
    return [*dict.fromkeys(problems)]


def source_problems(run: Run[DataStage]) -> list[str]:
    """Return what is wrong with the local sources of a data run."""
    problems = []
    root = None
    if "data_root" in run.parents:
        root = run.parents["data_root"].folder
    files = source_files(run)
    for name, source in run.config.expert.sources.items():
        file = files.get(name)
        is_remote = source.hub is not None or source.is_on_web
        if file is None and (root is not None or is_remote):
            continue  # another run will write this file, or it will be downloaded
        read_rows = file is not None and file.is_file() and file.stat().st_size <= LARGE
        try:
            refuse_unusable(name, source, root, read_rows)
        except (PipelineError, OSError) as error:
            problems.append(str(error))
    return problems


def check_base_files(run: Run[TrainStage]) -> None:
    """Check the shapes of a local base model that no run has made.

    Raises:
        PipelineError: a tensor is missing, or the tensors do not match config.json.
    """
    base = run.parents.get("model")
    if base and is_external(base) and has_full_weights(base):
        check_shapes(base.folder, "model.path")


def refuse_too_large(runs: Sequence[Run]) -> None:
    """Check that the largest run fits this machine's GPUs or, without a GPU, its memory.

    Weights, gradients and optimizer state are counted. Models of unknown shape are not checked. On
    GPUs, evaluations are not checked.

    Raises:
        PipelineError: the largest run needs more memory. No file has been downloaded yet.
    """
    on_gpu = bool(visible_gpus())
    room = gpu_memory() if on_gpu else cpu.memory()
    sizes = []
    for run in runs:
        if trains(run.config) or not on_gpu:
            sizes.append((memory_here(run, on_gpu, row=0) or 0.0, run))
    bytes_needed, largest = max(sizes, key=itemgetter(0), default=(0.0, None))
    if largest is None or room is None or bytes_needed <= room:
        return
    need = f"{largest.name} takes {bytes_needed / 1e9:.0f} GB of memory"
    if on_gpu:
        raise PipelineError(
            f"{need} on each GPU, and these have {room / 1e9:.0f}. Set hardware= for more or larger"
            " GPUs, or choose a smaller model=NAME."
        )
    raise PipelineError(
        f"{need}, and this machine has {room / 1e9:.0f} and no GPU. Run it on a node with GPUs"
        " (launcher=slurm, hardware=a100_80x8 for example), or choose a smaller model=NAME."
    )


def evaluation_problems(
    runs: Sequence[Run], reasons: Container[str], waiting: Sequence[Run] = ()
) -> list[str]:
    """Return one sentence per cause that stops evaluations, trainings or data runs.

    A sentence about evaluations has their number and the name of the first.

    Args:
        runs: all runs of the plan.
        reasons: the hashes of the unfinished runs.
        waiting: further evaluations, for example of models that are not chosen yet.
    """
    causes: dict[str, list[str]] = {}
    found: dict[str, str | None] = {}
    models: dict[str, Path | None] = {}
    unfinished = []
    for run in runs:
        if run.hash in reasons and isinstance(run.config, EvalStage):
            unfinished.append(run)
    for run in [*unfinished, *filter(why_not_finished, waiting)]:
        if not is_bundle(run):
            try:
                check_evaluation(run, found, models)
            except PipelineError as error:
                causes.setdefault(str(error), []).append(run.name)
    problems = training_problems(runs, reasons)
    for cause, names in causes.items():
        first = names[0]
        if len(names) > 1:
            first += ", ..."
        problems.append(f"{pluralize(len(names), 'evaluation')} cannot run: {cause} ({first})")
    return problems


def check_evaluation(
    run: Run[EvalStage], problems: dict[str, str | None], models: dict[str, Path | None]
) -> None:
    """Run the checks of stage=eval that need no loaded model.

    `problems` has the problem of each earlier check, or None. `models` has the folders that were
    found.
    """
    # Training keeps the base's tokenizer, positions and chat template
    model = nearest_folder(run, is_whole_model, models)
    if model is not None:
        key = f"{model} {run.config.eval.chat_template}"
        check_once(key, problems, partial(refuse_model, model))
    check_base(run)
    for expert in experts_on_hub(run):  # before other experts are trained for the same merge
        check_once(str(expert), problems, partial(local_folder, expert, fetch=False))
    root = run.parents.get("data_root")
    place = root.folder if root else None
    if place and not place.is_dir():
        return
    inputs = f"{run.config.eval} {run.config.languages} {place} {'checkpoint' in run.parents}"
    check_once(inputs, problems, partial(check_data, run))


def is_whole_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file()


def check_data(run: Run[EvalStage]) -> None:
    """Check that the inputs of an evaluation other than the model exist."""
    with TemporaryDirectory() as folder:
        check_inputs(run.config.eval, define_tasks(run, Path(folder), []))


def check_once(key: str, problems: dict[str, str | None], check: Callable[[], object]) -> None:
    """Run a check the first time that a key is seen, and raise its stored error each time.

    Evaluations of many models, or of one model, share a check.
    """
    if key not in problems:
        problems[key] = None
        try:
            check()
        except PipelineError as error:
            problems[key] = str(error)
    problem = problems[key]
    if problem:
        raise PipelineError(problem)
