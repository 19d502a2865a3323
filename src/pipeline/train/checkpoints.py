"""Callbacks of a training: its log, progress bar, snapshots, resume points, and orderly stop.

A killed training resumes from its resume point and ends with the same weights and log, bit for bit.
The trainer saves weights, optimizer, schedule and generators. The log, with a row per step, holds
the rest of the state.
"""

from __future__ import annotations

import faulthandler
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from pipeline.config.stages import TrainStage
from pipeline.errors import PipelineError
from pipeline.progress import Bar, say
from pipeline.runs import resume
from pipeline.runs.provenance import machine_facts
from pipeline.runs.run import Run
from pipeline.runs.state import record_step, update_state
from pipeline.runs.stop import UNFINISHED, heard_by
from pipeline.runs.tracking import Tracker
from pipeline.train.steps import side_of_step, snapshot_steps

LOG = "log.jsonl"
LOOK = 4  # steps between two exchanges of requests among processes
NAMES = {  # the trainer's name -> ours
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "num_tokens": "tokens",
    "eval_loss": "validation_loss",
    "eval_math_loss": "validation_loss_math",
    "eval_language_loss": "validation_loss_language",
}
Record = dict[str, Any] | None  # describes a resume point
# Writes weights, tokenizer and configs to a folder, and returns the weights' root and digests
Save = Callable[[Path], dict[str, Any]]


class Progress(TrainerCallback):
    """The log with a row per step, the tracker and the progress bar.

    In simultaneous training a row names its side. A loss or gradient that is not finite raises
    PipelineError. If `record` describes a resume point, the log continues its log. The tracker also
    gets the earlier rows, because its files ended with the earlier attempt.
    """

    def __init__(
        self, run: Run[TrainStage], tracker: Tracker, steps: int, record: Record = None
    ) -> None:
        self.run, self.tracker, self.sft = run, tracker, run.config.sft
        self.log_file = run.work / LOG
        self.log_file.unlink(missing_ok=True)
        self.tokens, self.losses = 0.0, 0.0  # sums over all steps
        # tokens and seconds at this attempt's first log
        self.begun: tuple[float, float] | None = None
        self.rate = 0.0  # tokens per second since the first log, which excludes warm-up costs
        self.bar = Bar(run.name, steps, "step", stays=True)
        earlier = ""
        if record:
            earlier = (resume.resume_folder(run.work, record) / LOG).read_text(encoding="utf-8")
        for line in earlier.splitlines():
            self.write(json.loads(line))
        self.earlier_tokens = self.tokens  # the trainer only counts this attempt's tokens

    def write(self, row: dict[str, Any]) -> None:
        self.tokens = row.get("tokens", self.tokens)
        self.losses += row.get("loss", 0.0)
        with open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        numbers = {}
        for key, value in row.items():
            if key not in ("step", "side"):
                numbers[f"train/{key}"] = value
        self.tracker.log(numbers, step=row["step"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)
        record_step(self.run.workplace, state.global_step, state.max_steps)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        row: dict[str, Any] = {"step": state.global_step}
        for key, name in NAMES.items():
            if logs and key in logs:
                row[name] = logs[key]
        if "loss" not in row and "validation_loss" not in row:
            return
        self.refuse_not_finite(row)
        is_training_step = "loss" in row
        if is_training_step:
            self.add_tokens(row)
        self.write(row)

    def refuse_not_finite(self, row: dict[str, Any]) -> None:
        for kind in ("loss", "validation_loss", "grad_norm"):
            if not math.isfinite(row.get(kind, 0.0)):
                raise PipelineError(
                    f"{kind} became {row[kind]} at step {row['step']}. Lower sft.learning_rate (now"
                    f" {self.sft.learning_rate}) or sft.max_grad_norm (now"
                    f" {self.sft.max_grad_norm})."
                )

    def add_tokens(self, row: dict[str, Any]) -> None:
        """Complete the row of a training step, and show its loss and speed in the bar."""
        row["tokens"] += self.earlier_tokens
        if self.sft.method == "simultaneous":
            row["side"] = side_of_step(row["step"] - 1, self.sft.steps_per_switch)
        seconds = self.bar.format_dict["elapsed"]
        if self.begun is None:
            self.begun = (row["tokens"], seconds)
        first_tokens, first_seconds = self.begun
        self.rate = (row["tokens"] - first_tokens) / max(seconds - first_seconds, 1e-9)
        shown = f"loss {row['loss']:.3f}, {self.rate:,.0f} tokens/s"
        self.bar.set_postfix_str(shown, refresh=False)


class Checkpoints(TrainerCallback):
    """The snapshots and resume points of a training.

    Args:
        trainer: a transformers Trainer whose number of steps is planned.
        run: the run.
        record: describes the resume point that the training resumes from.
        save: writes what the run would end with now. All processes call it together.
    """

    def __init__(self, trainer: Any, run: Run[TrainStage], record: Record, save: Save) -> None:
        self.trainer, self.run, self.save, self.sft = trainer, run, save, run.config.sft
        self.steps = snapshot_steps(self.sft, trainer.args.max_steps)
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.resumed: list[dict[str, Any]] = []
        self.earlier_seconds = 0.0  # sum over earlier attempts
        if record:
            point = {"step": record["step"], "machine": record.get("machine", {})}
            self.snapshots, self.resumed = record["snapshots"], [*record["resumed"], point]
            self.earlier_seconds = record["seconds"]
        self.asked_to_stop: str | None = None  # the signal
        self.begun = self.saved = time.monotonic()

    def beat(self, *_: Any, **__: Any) -> None:
        """Restart the timer of sft.stall_minutes.

        When it expires, the stacks of all threads are written, and the process ends with status 1.
        """
        if self.sft.stall_minutes is not None:
            faulthandler.dump_traceback_later(60 * self.sft.stall_minutes, exit=True, file=2)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat()
        if state.global_step:
            say(f"{self.run.name}: resumes after step {state.global_step}")

    on_substep_end = on_prediction_step = beat

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat()
        step = state.global_step
        if step in self.steps and self.trainer.eval_dataset is not None:
            control.should_evaluate = True  # the snapshot records its loss
        if step < args.max_steps and self._is_due(step):
            refuse_broken(self.trainer.model, step)
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        step = state.global_step
        if step not in self.steps or str(step) in self.snapshots:
            return
        loss = (logs or {}).get("eval_loss")
        if loss is None and self.trainer.eval_dataset is not None:
            return
        refuse_broken(self.trainer.model, step)
        weights = self.save(self.run.work / resume.SNAPSHOTS / f"step-{step}")
        self.snapshots[str(step)] = {
            "step": step,
            "samples": step * self.sft.batch_size,
            "validation_loss": loss,
            **weights,
        }
        self.beat()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Turn the checkpoint that the trainer has written into the resume point."""
        step = state.global_step
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.is_world_process_zero():
            checkpoint = Path(args.output_dir) / f"checkpoint-{step}"
            (checkpoint / "training_args.bin").unlink(missing_ok=True)
            shutil.copyfile(self.run.work / LOG, checkpoint / LOG)
            facts = {
                "snapshots": self.snapshots,
                "seconds": self.earlier_seconds + time.monotonic() - self.begun,
                "resumed": self.resumed,
                "machine": machine_facts(),
            }
            resume.write_resume_point(self.run, checkpoint, step, facts)
            update_state(self.run.workplace, step=step)
        self.trainer.accelerator.wait_for_everyone()
        self.saved = time.monotonic()
        self.beat()
        if self.asked_to_stop:
            say(
                f"{self.asked_to_stop}: {self.run.name} stopped after step {step}. Its resume point"
                " is written. Rerun the same command to resume."
            )
            raise SystemExit(UNFINISHED)

    def _is_due(self, step: int) -> bool:
        """Return True if a resume point is due, after sft.resume_minutes or to stop.

        Processes have different clocks and signals. Every LOOK steps they exchange their requests,
        and all follow the strongest.
        """
        minutes = self.sft.resume_minutes
        is_due = minutes is not None and time.monotonic() - self.saved >= 60 * minutes
        request = 2.0 if self.asked_to_stop else float(is_due)
        if self.trainer.args.world_size > 1:
            if step % LOOK and minutes != 0:  # with 0, all processes write after each step
                return False
            shared = torch.tensor(request, device=self.trainer.args.device)
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
            request = shared.item()
        if request == 2:
            self.asked_to_stop = self.asked_to_stop or "asked to stop"
        return request > 0


@contextmanager
def supervised(
    trainer: Any, run: Run[TrainStage], tracker: Tracker, record: Record, save: Save
) -> Iterator[tuple[Checkpoints, Progress | None]]:
    """Log, write snapshots and resume points, and handle signals while a trainer trains.

    Only the first process logs. A signal stops the training after a step, with a resume point and
    the exit status UNFINISHED: SIGTERM, or SIGUSR1, which Slurm sends before a job ends.
    """
    checkpoints = Checkpoints(trainer, run, record, save)
    progress = None
    if trainer.is_world_process_zero():
        progress = Progress(run, tracker, trainer.args.max_steps, record)
        trainer.add_callback(progress)
    trainer.add_callback(checkpoints)
    try:
        with heard_by(partial(setattr, checkpoints, "asked_to_stop")):
            yield checkpoints, progress
    except PipelineError as error:
        usable = resume.usable_resume_point(run)
        if usable is None:
            raise
        problem = str(error).rstrip(".")
        raise PipelineError(
            f"{problem}. The resume point after step {usable['step']} stays in {run.work}."
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        if progress:
            progress.bar.close()  # so that the next message begins a line


def refuse_broken(model: Any, step: int) -> None:
    """Raise PipelineError for a parameter that is not finite, so that it is not saved."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(own_shard(parameter.detach())).all():
            raise PipelineError(
                f"{name} is not finite after step {step}. Lower sft.learning_rate or"
                " sft.max_grad_norm."
            )


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process' shard of a tensor, or the tensor itself if it is not sharded."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor
