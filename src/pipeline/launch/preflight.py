"""Finds what of a plan cannot run before anything is computed: evaluations, by the early checks of
stage=eval, training sets that hold items of benchmarks that were added later, trainings without a
library that they need, or memory.

Data that an unfinished data run will write is not checked. Measuring prompt lengths needs the
tokenizer and the harness and takes seconds: they are cached in runs_dir/.lengths by task, language,
data, tokenizer and config of the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.benchmarks.benchmark import TaskSpec
from pipeline.config.stages import DataStage, EvalStage, TrainStage, trains
from pipeline.config.training import refuse_unknown_targets
from pipeline.data.benchmarks import uncompared_benchmarks
from pipeline.data.draw import draw_rows
from pipeline.data.mixture import refuse_unusable
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.estimate.durations import gpu_memory, memory_here, visible_gpus
from pipeline.estimate.gpu_budget import hardware_that_fits
from pipeline.estimate.models import models_of
from pipeline.estimate.training_rows import row_problems, source_files
from pipeline.evaluate.before import (
    OF_TASKS,
    check_all,
    check_base,
    define_tasks,
    refuse_model,
    refuse_too_long,
)
from pipeline.files import sha256, write_atomically
from pipeline.hub.lock import read_lock
from pipeline.hub.models import local_folder
from pipeline.models.checkpoint import Checkpoint, is_adapter
from pipeline.models.files import ADAPTER_CONFIG, DECIDING
from pipeline.models.skeleton import check_shapes
from pipeline.progress import warn
from pipeline.runs.make import why_not_finished
from pipeline.runs.run import Folder, Parent, Run
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.hub_inputs import experts_on_hub
from pipeline.stages.lengths import LARGE, rows_of
from pipeline.stages.merge import has_full_weights, is_external
from pipeline.text import pluralize
from pipeline.train.memory import refuse_without_torchao

LENGTHS = ".lengths"
MOST_ROWS = 1_000_000  # of a file whose rows are drawn in a plan
Cache = tuple[
    dict[str, Path | None], dict[str, str | None]
]  # as in model_here, and as in check_once


def training_problems(runs: Sequence[Run], remaining: Container[str]) -> list[str]:
    """Return one sentence for each training that cannot run: rows without a loss, a library that is
    not installed, adapters on matrices that its base does not have. Warn of benchmarks that came
    after a training set was built.

    remaining: the hashes of the runs that are not finished.
    """
    problems: dict[str, None] = {}
    for run in runs:
        if isinstance(run.config, DataStage) and run.hash not in remaining:
            sentence = uncompared_benchmarks(run)
            if sentence:
                warn(sentence)
    unfinished = [run for run in runs if run.hash in remaining]
    for run in unfinished:
        if isinstance(run.config, TrainStage):
            try:
                refuse_without_torchao(run.config.sft)
                refuse_targets_of_base(run)
                check_base_files(run)
            except PipelineError as error:
                problems[str(error)] = None
        if isinstance(run.config, DataStage):
            root = None
            if "data_root" in run.parents:
                root = run.parents["data_root"].folder
            files = {name: file for name, _, file in source_files(run)}
            for name, source in run.config.expert.sources.items():
                of_hub = source.hub is not None or "://" in (source.url or "")
                if name not in files and (root is not None or of_hub):
                    continue  # what another run will write, or what is to be fetched
                try:
                    refuse_unusable(
                        name,
                        source,
                        root,
                        name in files
                        and files[name].is_file()
                        and files[name].stat().st_size <= LARGE,
                    )
                except (PipelineError, OSError) as error:
                    problems[str(error)] = None
            problem = too_few_rows(run)
            if problem:
                problems[problem] = None
    return [*problems, *row_problems(unfinished)]


def too_few_rows(run: Run[DataStage]) -> str:
    """Return why a data run cannot draw its rows from the files that are here, of which some may
    still be dropped.
    """
    sources = run.config.expert.sources
    counts = {name: rows_of(file, source) or 0 for name, source, file in source_files(run)}
    if (
        not counts
        or counts.keys() != sources.keys()
        or not all(0 < count <= MOST_ROWS for count in counts.values())
    ):
        return ""
    try:
        draw_rows(run.config, {name: [*range(count)] for name, count in counts.items()})
    except PipelineError as error:
        return str(error)
    return ""


def check_base_files(run: Run[TrainStage]) -> None:
    """Raise PipelineError for a base that no run made and that is here, where its files lack a
    tensor, or hold others than its config.json asks for.
    """
    base = run.parents.get("model")
    if base and is_external(base) and has_full_weights(base):
        check_shapes(base.folder, "model.path")


def refuse_targets_of_base(run: Run[TrainStage]) -> None:
    """Raise as `refuse_unknown_targets` where the base's files are here."""
    sft, base = run.config.sft, run.parents.get("model")
    if sft.adapter == "lora" and sft.lora_targets and base and has_full_weights(base):
        infos = Checkpoint.open(base.folder).infos.items()
        matrices = []
        for name, info in infos:
            if len(info.shape) == 2 and re.search(r"\.\d+\.", name):
                matrices.append(name)
        refuse_unknown_targets(sft.lora_targets, {name.split(".")[-2] for name in matrices})


def refuse_too_large(runs: Sequence[Run]) -> None:
    """Raise PipelineError for runs whose weights, gradients and optimizer state exceed this
    machine's GPUs or, without one, its memory; before anything is fetched. Models of unknown shape,
    and scores on GPUs, are not checked.
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
        options = [option for option, _ in hardware_that_fits([largest], room)]
        remedy = "no hardware= makes it fit, use a larger GPU"
        if options:
            remedy = f"give {' or '.join(options)}"
        raise PipelineError(f"{need} on each GPU, and these have {room / 1e9:.0f}: {remedy}")
    raise PipelineError(
        f"{need}, and this machine has {room / 1e9:.0f} and no GPU: run it on a node with GPUs"
        " (launcher=slurm, hardware=a100_80x8 for example), or take a smaller model=NAME"
    )


def evaluation_problems(
    runs: Sequence[Run], reasons: Container[str], prompts: bool, waiting: Sequence[Run] = ()
) -> list[str]:
    """One sentence per cause why evaluations among these runs cannot run, with the count and the
    first one, and per training set that needs to be built again.

    reasons: the hashes of the unfinished ones. prompts: check the lengths of prompts too. waiting:
    further evaluations, like those of models that are still to be chosen.
    """
    causes: dict[str, list[str]] = {}
    cache: Cache = {}, {}
    unfinished = []
    for run in runs:
        if run.hash in reasons and isinstance(run.config, EvalStage):
            unfinished.append(run)
    for run in [*unfinished, *filter(why_not_finished, waiting)]:
        if not is_bundle(run):
            try:
                check_evaluation(run, prompts, cache)
            except PipelineError as error:
                causes.setdefault(str(error), []).append(run.name)
    return training_problems(runs, reasons) + [
        f"{pluralize(len(names), 'evaluation')} cannot run: {cause}"
        f" ({names[0]}{', ...' if len(names) > 1 else ''})"
        for cause, names in causes.items()
    ]


def check_evaluation(run: Run[EvalStage], prompts: bool, cache: Cache) -> None:
    """Raise the PipelineError that stage=eval would raise before it loads a model."""
    models, problems = cache
    model = model_here(run, models)
    if model is not None:
        key = f"{model} {run.config.eval.chat_template}"
        check_once(key, problems, partial(refuse_model, model, run.config.eval))
    check_base(run, [])
    for adapter, base in adapters_here(run):
        check_once(f"{adapter} on {base}", problems, partial(check_adapter, adapter, base))
    for expert in experts_on_hub(run):  # before others are trained for their merges
        check_once(str(expert), problems, partial(local_folder, expert, fetch=False))
    root = run.parents.get("data_root")
    if root is not None and not root.folder.is_dir():
        return
    check_once(data_key(run), problems, partial(check_data, run))
    if prompts and model is not None and run.config.eval.backend == "hf":
        check_once(f"{model} {data_key(run)}", problems, partial(check_lengths, run, model))


def adapters_here(run: Run[EvalStage]) -> Iterator[tuple[Path, Path]]:
    """Yield the adapters from elsewhere that an evaluation merges, with the base that they are read
    on.
    """
    base = run.parents.get("base")
    if base is None or not (base.folder / "config.json").is_file():
        return
    for role, parent in run.parents.items():
        if role != "base" and isinstance(parent, Folder) and is_adapter(parent.folder):
            yield parent.folder, base.folder


def check_adapter(adapter: Path, base: Path) -> None:
    """Raise PipelineError if an adapter does not fit the base, by the names and shapes of its
    tensors.
    """
    from pipeline.merge.adapters import open_source

    open_source(adapter, base)


def check_lengths(run: Run[EvalStage], model: Path) -> None:
    """Raise PipelineError if prompts do not fit the model."""
    with TemporaryDirectory() as folder:
        for definition in define_tasks(run, Path(folder), []):
            refuse_too_long(definition.name, *tokens_needed(run, definition, model))


def check_data(run: Run[EvalStage]) -> None:
    """Raise PipelineError if the data of an evaluation, or another input besides the model, is
    missing.
    """
    with TemporaryDirectory() as folder:
        check_all(OF_TASKS, run, define_tasks(run, Path(folder), []))


def check_once(key: str, problems: dict[str, str | None], check: Callable[[], object]) -> None:
    """Raise the PipelineError that a check raises.

    It is done once for a key, since evaluations of many models, or of one model, share it.
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


def model_here(run: Parent, folders: dict[str, Path | None]) -> Path | None:
    """Return the first folder with a config among the model and its ancestors, or None.

    Training keeps the tokenizer, the positions and the chat template of the base.

    Args: folders: a cache by run hash.
    """
    if run.hash not in folders:
        has_model = (run.folder / "config.json").is_file() and not (
            run.folder / ADAPTER_CONFIG
        ).is_file()
        candidates = (model_here(parent, folders) for parent in models_of(run))
        if has_model:
            folders[run.hash] = run.folder
        else:
            folders[run.hash] = next(filter(None, candidates), None)
    return folders[run.hash]


def data_key(run: Run[EvalStage]) -> str:
    """All inputs of an evaluation besides the model."""
    config, root = run.config, run.parents.get("data_root")
    inputs = [
        asdict(config.eval),
        config.languages,
        str(root.folder) if root else None,
        "checkpoint" in run.parents,
    ]
    return json.dumps(inputs)


# --- prompts ---


def tokens_needed(
    run: Run[EvalStage], definition: TaskSpec, model: Path
) -> tuple[dict[int, int], int]:
    """(row -> tokens of its prompt and answer, maximum tokens of the model), from the cache or
    measured now.
    """
    key = lengths_key(run, definition, model)
    file = (
        run.runs_dir
        / LENGTHS
        / f"{definition.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    )
    try:
        record = json.loads(file.read_bytes())
        if record["key"] == key:
            return dict(record["needed"]), record["most"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    from pipeline.evaluate.prompts import measured

    lengths, max_tokens = measured(definition, model, run.config.eval, read_lock(run.runs_dir))
    if any(
        role in run.parents for role in ("data_root", "benchmarks")
    ):  # data from the Hub have no hash to cache by
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            file, json.dumps({"key": key, "needed": list(lengths.items()), "most": max_tokens})
        )
    return lengths, max_tokens


def lengths_key(run: Run[EvalStage], definition: TaskSpec, model: Path) -> str:
    """JSON of all inputs that affect the tokens of a task's prompts."""
    options, body = run.config.eval, dict(definition.body)
    body.pop("dataset_kwargs", None)  # a path; `data` has the contents' hash
    facts: dict[str, Any] = {
        "task": body,
        "first": definition.first,
        "limit": options.limit,
        "split": options.split,
        **({"counts": column} if (column := definition.benchmark.question_column) else {}),
        "exemplars": options.exemplars,
        "chat_template": options.chat_template,
        "harness": version("lm_eval"),
        "turns": [
            options.chat_template_args,
            options.system_instruction,
            options.fewshot_as_multiturn,
        ],
        "data": {
            role: run.parents[role].hash
            for role in ("data_root", "benchmarks")
            if role in run.parents
        },
        "model": {name: sha256(model / name) for name in DECIDING if (model / name).is_file()},
    }
    return json.dumps(facts, sort_keys=True, default=str)
