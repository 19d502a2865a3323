"""Stages sft and cpt: load a base (or initialise one at random), choose what is trained, train,
save, digest.

All ways to train go through TRL's SFTTrainer: prompts and completions with the loss on the
completion, or plain text with the loss on all of it, joined with an end of sequence between
documents and cut into rows of seq_length tokens (sft.packing, cpt's default).
"""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
from contextlib import nullcontext, redirect_stderr
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
    """Facts of the sft or cpt stage: weights, token and step counts, truncated rows, and the
    losses.
    """
    return processes.train_together(train, run, work, tracker)


def train(run: Run[TrainStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Train in one of the stage's processes; the first speaks, saves and returns the facts, the
    others none.
    """
    config, sft = run.config, run.config.sft
    silence = redirect_stderr(io.StringIO()) if processes.is_follower() else nullcontext()
    with recorded_warnings() as told, silence:
        prepare_process(config)
        base = load.local_base(run)
        rows, validation = (
            read_jsonl(run.parents["data"].folder / f"{p}.jsonl") for p in ("train", "validation")
        )
        tokenizer = load.load_tokenizer(run, rows, base)
        truncated = check_early(run, rows, validation, tokenizer, base)

        # what happens before the first step can take a minute
        say(
            f"{run.name}: loading {base or 'a model from random weights'}, tokenizing {len(rows):,}"
            " rows"
        )
        model, parts = load.choose_parameters(
            load.load_model(run, tokenizer, base), sft, config.partition
        )
        trainer, counts = trainer_of(
            config, model, parts, tokenizer, rows, validation, work / "trainer"
        )

        def save_to(folder: Path) -> dict[str, Any]:
            """Save the model; called by all processes together, the first writes."""
            weights = trainer.accelerator.get_state_dict(trainer.model)
            first = trainer.is_world_process_zero()
            if first:
                return save.save_model(model, tokenizer, folder, sft.save_dtype, weights)
            return {}

        record = resume.usable_resume_point(run)
        with supervised(trainer, run, tracker, record, save_to) as (checkpoints, progress):
            trainer.args.eval_on_start = sft.validate_at_start and record is None
            trainer.train(
                resume_from_checkpoint=(
                    str(resume.resume_folder(run.work, record)) if record else None
                )
            )
        weights = save_to(work)
    if progress is None:
        return {}
    examples.write_rows(trainer.sets, tokenizer, work / examples.ROWS)
    shutil.rmtree(work / "trainer", ignore_errors=True)
    dtypes = trained_dtypes(trainer)
    # that torch reserved on this process' GPU; on a CPU, that the process had in memory
    peak_bytes = torch.cuda.max_memory_reserved() or 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    return {
        "weights": weights,
        "steps": trainer.args.max_steps,
        "loss": progress.losses / trainer.args.max_steps,
        "tokens": int(progress.tokens),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(
            model.get_parameter(name).numel() for names in parts.values() for name in names
        ),
        "step_tokens_per_second": round(progress.rate, 1),
        "process_peak_bytes": peak_bytes,
        "peak_gigabytes": round(peak_bytes / 1e9, 2),
        "dtypes": dtypes,
        "weight_bits": fewest_bits(dtypes["weights"]),
        "moment_bits": fewest_bits(dtypes["moments"]),
        "truncated": truncated,
        **counts,
        **({"snapshots": checkpoints.snapshots} if checkpoints.steps else {}),
        **({"resumed": checkpoints.resumed} if checkpoints.resumed else {}),
        **({"warnings": told} if told else {}),
    }


def prepare_process(config: TrainStage) -> None:
    """Seeds, and deterministic kernels where they are requested."""
    # PEFT asks by this name, and transformers says that it is deprecated
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    release_models()  # memory of earlier evaluations
    if (
        config.deterministic
    ):  # cuBLAS' own condition, read when it is first used; as transformers' full determinism
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(config.deterministic)
    # every kernel here writes what it allocates, which torch would fill first
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_seed(config.seed)


def check_early(
    run: Run[TrainStage], rows: list[Any], validation: list[Any], tokenizer: Any, base: Path | None
) -> int:
    """Check, before weights are loaded, what this base, these rows or this machine cannot do.

    Returns the number of truncated rows, or raises PipelineError.
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
    """Return the bits of the narrowest of these dtypes. torchao's OptimState8bit has 8."""
    return min(int(re.sub(r"\D", "", name)) for name in dtypes)


def trained_dtypes(trainer: Any) -> dict[str, list[str]]:
    """Dtypes of the trained weights and of their moments; of torchao's quantized moments the name
    of their class.
    """
    held = []
    for state in trainer.optimizer.state.values():
        for value in state.values():
            held.append(value)
    moments = []
    for value in held:
        if torch.is_tensor(value) and value.ndim:
            moments.append(own_shard(value))
    found = {
        "weights": {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad},
        "moments": {
            str(one.dtype) if type(one) is torch.Tensor else type(one).__name__ for one in moments
        },
    }
    return {
        kind: sorted(name.removeprefix("torch.") for name in names) for kind, names in found.items()
    }
