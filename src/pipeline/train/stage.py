"""Stages sft and cpt: load a base (or initialise one at random), choose what is trained, train, save, digest.

All ways to train go through TRL's SFTTrainer: prompts and completions with the loss on the completion, or plain text
with the loss on all of it, joined with an end of sequence between documents and cut into rows of seq_length
tokens (sft.packing, cpt's default).
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, set_seed
from trl import SFTConfig

from pipeline.config.stages import TrainStage
from pipeline.config.training import Sft
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.merge.resident import release_models
from pipeline.models.skeleton import build_skeleton
from pipeline.progress import recorded_warnings, say, warn
from pipeline.runs.model_card import CARD
from pipeline.train.card import card_of
from pipeline.train.examples import datasets_by_side, make_dataset, measure_lengths, validation_sets
from pipeline.train.load import check_base, load_model, load_tokenizer, local_base
from pipeline.train.memory import bytes_per_parameter, micro_batches, refuse_without_room
from pipeline.train.optim import trainer_schedule
from pipeline.train.processes import is_follower, train_together
from pipeline.train.progress import Progress
from pipeline.train.save import measure_cast, save_model
from pipeline.train.simultaneous import Alternating, refuse_flat_shards
from pipeline.train.steps import steps_of, steps_of_sides
from pipeline.train.trainable import choose_parameters
from pipeline.train.trainer import Trainer
from pipeline.train.updates import own_shard
from pipeline.train.watchdog import supervised

if TYPE_CHECKING:
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


LOW_RATE = 1e-5  # below which an adapter's training is warned of


def make(run: Run[TrainStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Facts of the sft or cpt stage: weights, token and step counts, truncated rows, and the losses."""
    facts = train_together(train, run, work, tracker)
    if facts:  # of the first process
        (work / CARD).write_text(card_of(run), encoding="utf-8")
    return facts


def train(run: Run[TrainStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Facts of the stage in one of its processes (empty but in the first), with the warnings."""
    with recorded_warnings() as warnings:
        facts = train_in_process(run, work, tracker)
    return {**facts, "warnings": warnings} if facts and warnings else facts


def train_in_process(run: Run[TrainStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Train in one of the stage's processes; the first saves and returns the facts."""
    config = run.config
    silence_warnings()
    if not is_follower():
        warn_of_low_rate(config.sft)
    release_models()  # memory of earlier evaluations
    if config.deterministic:  # cuBLAS' own condition, read when it is first used; as transformers' full determinism
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(config.deterministic)
    set_seed(config.seed)

    data = run.parents["data"].folder
    examples, validation = read_jsonl(data / "train.jsonl"), read_jsonl(data / "validation.jsonl")
    base = local_base(run)
    report_progress(f"{run.name}: counting the tokens of {len(examples):,} rows")
    tokenizer = load_tokenizer(run, examples, base)
    if base is not None:
        check_base(base, tokenizer)
    if (room := gpu_memory()) is not None:
        refuse_large(config, weightless(run, tokenizer, base), room)
    lengths = measure_lengths(examples, tokenizer, config.sft, base, validation)
    report_progress(f"{run.name}: loading {base or 'a model from random weights'}")
    model, parts = choose_parameters(load_model(run, tokenizer, base), config.sft, config.partition)
    numbers = size_of(model, config.sft)

    report_progress(f"{run.name}: tokenizing for the trainer")
    trainer, steps, sides = trainer_of(config, model, parts, tokenizer, examples, validation, work / "trainer")
    first = trainer.is_world_process_zero()
    if first:
        warn_where_slow(config.sft)
    progress = Progress(run, tracker, steps)
    if first:
        trainer.add_callback(progress)
    trainer.remove_callback(PrinterCallback)

    def gather_weights() -> dict[str, Any] | None:
        """The full weights where the model is sharded, else None; called by all processes together."""
        return trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None

    def save_to(folder: Path) -> dict[str, Any]:
        """Save the model; called by all processes together, the first writes."""
        full_weights = gather_weights()
        return save_model(model, tokenizer, folder, config.sft.save_dtype, full_weights) if first else {}

    with supervised(trainer, run, tracker, save_to, base) as checkpoints:
        trainer.args.eval_on_start = config.sft.validate_at_start and checkpoints.resume_from is None
        result = trainer.train(resume_from_checkpoint=checkpoints.resume_from)
    full_weights = gather_weights()
    if not first:
        return {}
    weights = save_model(model, tokenizer, work, config.sft.save_dtype, full_weights)
    shutil.rmtree(work / "trainer", ignore_errors=True)
    if "cast" in weights and base is not None and not hasattr(model, "peft_config"):
        trained = {name: (full_weights or {}).get(name, p) for name, p in model.named_parameters()}
        weights["cast"] |= measure_cast(trained, base, getattr(torch, str(config.sft.save_dtype)))
    return {
        "weights": weights, "steps": steps, "loss": result.training_loss, "tokens": progress.tokens,
        "tokens_per_second": round(progress.tokens / checkpoints.seconds, 1),
        "step_tokens_per_second": round(progress.rate, 1), "process_peak_bytes": peak_bytes(),
        "dtypes": trained_dtypes(trainer),
        **lengths, **numbers, **sides, **checkpoints.finish(weights),
    }  # fmt: skip


def report_progress(line: str) -> None:
    """Print, in the first process, what happens before the first step, which can take a minute."""
    if not is_follower():
        say(line)


def trainer_of(
    config: TrainStage, model: Any, parts: Any, tokenizer: Any, examples: Any, validation: Any, output: Path
) -> tuple[Trainer, int, dict[str, Any]]:
    """The trainer of this method, its optimizer steps, and facts about its sides.

    Joint sets are validated per side, with equally many rows of each.
    """
    sft = config.sft
    joint = sft.method in ("mixed", "simultaneous")
    args = trainer_arguments(config, text="text" in examples[0], validated=bool(validation), output=output)
    held_out: Any = None
    if validation:
        held_out = validation_sets(validation, sft) if joint else make_dataset(validation, sft)
    shared: dict[str, Any] = {
        "model": model, "args": args, "eval_dataset": held_out, "processing_class": tokenizer,
        "sft": sft, "parts": parts,
    }  # fmt: skip
    if sft.method == "simultaneous":
        alternating = Alternating(train_dataset=datasets_by_side(examples, sft), **shared)
        of_sides, left_out = steps_of_sides(sft, {side: len(rows) for side, rows in alternating.sets.items()})
        steps = sum(of_sides.values())
        plan_steps(args, sft, steps)
        return alternating, steps, {"steps_a_side": of_sides, "rows_left_out": left_out}
    trainer = Trainer(train_dataset=make_dataset(examples, sft), **shared)
    if config.partition is not None:
        refuse_flat_shards(trainer)
    rows = len(trainer.train_dataset)  # type: ignore[arg-type]
    steps = steps_of(sft, rows)
    plan_steps(args, sft, steps)
    return trainer, steps, {"rows_left_out": rows * sft.epochs - steps * sft.batch_size}


def size_of(model: Any, sft: Sft) -> dict[str, int]:
    """Numbers of parameters and of trained ones, and the bytes of weights, gradients and moments."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "trained_parameters": trained,
        "training_bytes": trained * bytes_per_parameter(sft) + frozen,
    }  # fmt: skip


def weightless(run: Run[TrainStage], tokenizer: Any, base: Path | None) -> Any:
    """The model that will be trained, without memory for its weights."""
    if base is not None:
        return build_skeleton(base, "model.path")
    with torch.device("meta"):
        return load_model(run, tokenizer, None)


def refuse_large(config: TrainStage, model: Any, room: int) -> None:
    """Raise PipelineError for a training whose states exceed the bytes of a GPU; `model` may have no weights."""
    model, parts = choose_parameters(model, config.sft, config.partition)
    numbers, parameters = size_of(model, config.sft), dict(model.named_parameters())
    adapters = numbers["trained_parameters"] if config.sft.adapter == "lora" else 0
    at_once = max(sum(parameters[name].numel() for name in names) for names in parts.values())
    refuse_without_room(numbers["parameters"] - adapters, numbers["trained_parameters"], room, config.sft, at_once)


def trained_dtypes(trainer: Trainer) -> dict[str, list[str]]:
    """Dtypes of the trained weights and of their moments; of torchao's quantized moments the name of their class."""
    assert trainer.model is not None and trainer.optimizer is not None
    weights = {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    moments = {
        str(own.dtype) if type(own := own_shard(value)) is torch.Tensor else type(own).__name__
        for value in states
        if isinstance(value, torch.Tensor) and value.ndim
    }
    found = {"weights": weights, "moments": moments}
    return {kind: sorted(name.removeprefix("torch.") for name in names) for kind, names in found.items()}


def peak_bytes() -> int:
    """Most bytes that torch reserved on this process' GPU; on a CPU, that the process had in memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_memory() -> int | None:
    """Bytes of memory of this process' GPU; None on a CPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def warn_of_low_rate(sft: Sft) -> None:
    """Warn of a rate at which adapters, of which one factor starts from zero, hardly change what a model answers."""
    if sft.adapter == "lora" and sft.learning_rate is not None and sft.learning_rate < LOW_RATE:
        warn(
            f"sft.learning_rate={sft.learning_rate:g} is a rate of full training: adapters hardly move below "
            f"{LOW_RATE:g}, the papers' have 6e-5 (recipe=unreasonable_lora); give sft.learning_rate=6e-5"
        )


def warn_where_slow(sft: Sft) -> None:
    """Warn where a training computes in bfloat16 on a CPU that has to emulate it."""
    bfloat16_knobs = {
        "sft.precision=bf16": (sft.precision == "bf16", "sft.precision=fp32"),
        "sft.optimizer=muon_adamw": (sft.optimizer == "muon_adamw", "sft.optimizer=adamw"),
        "sft.weights=bfloat16": (sft.weights == "bfloat16", "sft.weights=float32"),
    }
    slow_knobs = {knob: remedy for knob, (is_set, remedy) in bfloat16_knobs.items() if is_set}
    if slow_knobs and not torch.cuda.is_available() and not cpu_has_bf16():
        warn(
            f"this CPU has no bfloat16 instructions, so {' and '.join(slow_knobs)} can take 3 to 10 times as "
            f"long as {' '.join(slow_knobs.values())}, which is another run"
        )


def cpu_has_bf16() -> bool:
    """Whether matrix products in bfloat16 run on instructions of their own (AVX512_BF16, AMX; bf16 on Arm).

    oneDNN, which computes them, also reports support for AVX-512 without those, where it casts to fp32 and back.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()


def silence_warnings() -> None:
    """Silence warnings that only libraries can fix."""
    import warnings

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")


def trainer_arguments(config: TrainStage, text: bool, validated: bool, output: Path) -> SFTConfig:
    """Our recipe as arguments of the trainer. All differences between its defaults and ours are set here."""
    sft, seed = config.sft, config.seed
    assert sft.learning_rate is not None
    micro, passes = micro_batches(sft)
    return SFTConfig(
        output_dir=str(output), seed=seed, data_seed=seed, save_strategy="no", report_to="none",
        per_device_train_batch_size=micro, per_device_eval_batch_size=micro,
        gradient_accumulation_steps=passes,
        learning_rate=sft.learning_rate, warmup_steps=sft.warmup_steps, weight_decay=sft.weight_decay,
        adam_beta1=sft.adam_beta1, adam_beta2=sft.adam_beta2, max_grad_norm=sft.max_grad_norm,
        max_length=sft.seq_length, packing=sft.packing, packing_strategy="wrapped",
        assistant_only_loss=sft.loss_on == "assistant_turns" and not text,
        completion_only_loss=None if text else sft.loss_on == "response" and not sft.prompt_weight,
        bf16=sft.precision == "bf16", use_cpu=not torch.cuda.is_available(),
        activation_checkpointing=sft.gradient_checkpointing,
        train_sampling_strategy="random" if sft.shuffle else "sequential",
        eval_strategy="steps" if validated else "no", logging_nan_inf_filter=False, disable_tqdm=True,
        ddp_find_unused_parameters=sft.method == "simultaneous", **fsdp_arguments(sft),
    )  # fmt: skip


def fsdp_arguments(sft: Sft) -> dict[str, Any]:
    """FSDP2 as arguments of the trainer. Raises PipelineError where accelerate would silently use DDP instead."""
    if sft.parallel != "fsdp2" or sft.processes == 1:
        return {}
    if not torch.cuda.is_available():
        raise PipelineError("sft.parallel=fsdp2 needs GPUs: on a CPU accelerate falls back to sft.parallel=ddp")
    # not FSDP's own checkpointing, which renames the parameters
    return {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


def plan_steps(args: SFTConfig, sft: Sft, steps: int) -> None:
    """Set what depends on the number of steps, known after packing: the schedule, when to log and to validate."""
    args.max_steps = steps
    if sft.warmup_steps >= steps and args.process_index == 0:
        share = (steps - 1) / sft.warmup_steps  # the first step has rate 0
        warn(
            f"sft.warmup_steps={sft.warmup_steps} of {steps} steps: the rate ends at {share:.0%} of "
            f"sft.learning_rate={sft.learning_rate} and is never reached; lower sft.warmup_steps"
        )
    args.lr_scheduler_type, args.lr_scheduler_kwargs = trainer_schedule(sft.schedule, steps, sft.decay_share)
    args.logging_steps, args.eval_steps = max(1, steps // 200), max(1, steps // 4)
