"""The stages sft and cpt: load a base, choose the trained parameters, train and save.

All training methods use TRL's SFTTrainer. For prompts and completions, the loss is on the
completion by default (sft.loss_on). For plain text, the loss is on all tokens: documents are joined
with an end of sequence and cut into rows of seq_length tokens (sft.packing, cpt's default).
"""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
from contextlib import nullcontext, redirect_stderr
from itertools import chain
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from transformers import set_seed

from pipeline.config.stages import TrainStage
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.merge.resident import release_models
from pipeline.progress import recorded_warnings, say, warn
from pipeline.runs import resume
from pipeline.runs.run import Run
from pipeline.runs.tracking import Tracker
from pipeline.train import examples, load, memory, processes, save
from pipeline.train.checkpoints import own_shard, supervised
from pipeline.train.trainer import trainer_of, warn_of_rate


def make(run: Run[TrainStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Run the stage, and return its facts: weights, counts of steps and tokens, losses."""
    return processes.train_together(train, run, work, tracker)


def train(run: Run[TrainStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Train in one of the stage's processes.

    The first process prints, saves and returns the facts. The others return an empty dictionary.
    """
    config, sft = run.config, run.config.sft
    silence = redirect_stderr(io.StringIO()) if processes.is_follower() else nullcontext()
    with recorded_warnings() as told, silence:
        prepare_process(config)
        base = load.local_base(run)
        data = run.parents["data"].folder
        rows = read_jsonl(data / "train.jsonl")
        validation = read_jsonl(data / "validation.jsonl")
        tokenizer = load.load_tokenizer(run, rows, base)
        truncated = check_early(run, rows, validation, tokenizer, base)

        # The work before the first step can take a minute
        source = base or "a model from random weights"
        say(f"{run.name}: loading {source}, tokenizing {len(rows):,} rows")
        loaded = load.load_model(run, tokenizer, base)
        model, parts = load.choose_parameters(loaded, sft, config.partition)
        trainer, counts = trainer_of(
            config, model, parts, tokenizer, rows, validation, work / "trainer"
        )

        def save_to(folder: Path) -> dict[str, Any]:
            """Save the model. All processes call it together, and the first writes."""
            weights = trainer.accelerator.get_state_dict(trainer.model)
            if not trainer.is_world_process_zero():
                return {}
            return save.save_model(model, tokenizer, folder, sft.save_dtype, weights)

        record = resume.usable_resume_point(run)
        resume_point = str(resume.resume_folder(run.work, record)) if record else None
        with supervised(trainer, run, tracker, record, save_to) as (checkpoints, progress):
            trainer.args.eval_on_start = sft.validate_at_start and record is None
            trainer.train(resume_from_checkpoint=resume_point)
        weights = save_to(work)
    if progress is None:
        return {}
    examples.write_rows(trainer.sets, tokenizer, work / examples.ROWS)
    shutil.rmtree(work / "trainer", ignore_errors=True)
    dtypes = trained_dtypes(trainer)
    trained_names = chain.from_iterable(parts.values())
    # Memory that torch reserved on this process' GPU; on a CPU, the memory of the process
    peak_bytes = torch.cuda.max_memory_reserved() or 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    facts = {
        "weights": weights,
        "steps": trainer.args.max_steps,
        "loss": progress.losses / trainer.args.max_steps,
        "tokens": int(progress.tokens),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(model.get_parameter(name).numel() for name in trained_names),
        "step_tokens_per_second": round(progress.rate, 1),
        "process_peak_bytes": peak_bytes,
        "peak_gigabytes": round(peak_bytes / 1e9, 2),
        "dtypes": dtypes,
        "weight_bits": fewest_bits(dtypes["weights"]),
        "moment_bits": fewest_bits(dtypes["moments"]),
        "truncated": truncated,
        **counts,
    }
    if checkpoints.steps:
        facts["snapshots"] = checkpoints.snapshots
    if checkpoints.resumed:
        facts["resumed"] = checkpoints.resumed
    if told:
        facts["warnings"] = told
    return facts


def prepare_process(config: TrainStage) -> None:
    """Set seeds, and deterministic kernels if they are requested."""
    # PEFT uses this name, which transformers has deprecated
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    release_models()  # memory of earlier evaluations
    if config.deterministic:
        # As in transformers' full determinism. cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(config.deterministic)
    # Torch would fill memory that every kernel here overwrites
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_seed(config.seed)


def check_early(
    run: Run[TrainStage], rows: list[Any], validation: list[Any], tokenizer: Any, base: Path | None
) -> int:
    """Check, before weights are loaded, that base, rows and machine fit the recipe.

    `base` is None for random weights.

    Returns:
        The number of truncated rows.

    Raises:
        PipelineError: the base, the rows or the machine do not fit.
    """
    config = run.config
    warn_of_rate(config.sft)
    if not torch.cuda.is_available():
        emulated = memory.emulated(config.sft)
        if emulated:
            warn(emulated)
    load.check_kernels(config)
    if base is not None:
        load.check_base(base, tokenizer, rows)
    cut, lost = examples.check_rows(rows, tokenizer, config.sft, base)
    examples.check_rows(validation, tokenizer, config.sft, base, "validation.jsonl")
    problem = examples.side_without_loss(rows, lost, config.sft)
    if problem:
        raise PipelineError(problem)
    sentence = examples.cut_words(config.sft, cut, len(lost), f"{len(rows):,} rows")
    if sentence:
        warn(sentence)
    return cut


def fewest_bits(dtypes: list[str]) -> int:
    """Return the bits of the narrowest dtype. torchao's OptimState8bit has 8."""
    return min(int(re.sub(r"\D", "", name)) for name in dtypes)


def trained_dtypes(trainer: Any) -> dict[str, list[str]]:
    """Return the dtypes of the trained weights and of their moments.

    torchao's quantized moments are named by their class.
    """
    weights = set()
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            weights.add(str(parameter.dtype).removeprefix("torch."))
    moments = set()
    for state in trainer.optimizer.state.values():
        for value in state.values():
            if not torch.is_tensor(value) or not value.ndim:
                continue
            moment = own_shard(value)
            name = type(moment).__name__
            if type(moment) is torch.Tensor:
                name = str(moment.dtype).removeprefix("torch.")
            moments.add(name)
    return {"weights": sorted(weights), "moments": sorted(moments)}
