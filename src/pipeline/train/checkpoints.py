"""Snapshots and resume points of a training, and its orderly stop.

A training that is killed resumes from its resume point and ends with the same weights and log, bit for bit: the trainer
saves weights, optimizer, schedule and generators; the log, a row for each step, holds all else.
"""

from __future__ import annotations

import faulthandler
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from pipeline.config.stages import TrainStage
from pipeline.errors import PipelineError
from pipeline.progress import say
from pipeline.runs import resume
from pipeline.runs.run import Run
from pipeline.runs.state import update_state
from pipeline.runs.stop import UNFINISHED, heard_by
from pipeline.train.progress import LOG
from pipeline.train.steps import snapshot_steps

LOOK = 4  # steps between two looks of several processes for a signal that one of them received

# writes weights, tokenizer and configs to a folder; returns their root and digests
Save = Callable[[Path], dict[str, Any]]


class Checkpoints(TrainerCallback):
    """Snapshots and resume points, as the trainer's steps go by.

    Args:
        trainer: a transformers Trainer, its number of steps planned.
        record: of the resume point that it resumes from.
        save: writes what the run would end with if it ended now; called by all processes together.
    """

    def __init__(self, trainer: Any, run: Run[TrainStage], record: dict[str, Any] | None, save: Save) -> None:
        self.trainer, self.run, self.save, self.sft = trainer, run, save, run.config.sft
        self.first = trainer.args.process_index == 0
        self.steps = snapshot_steps(self.sft, trainer.args.max_steps)
        record = record or {"snapshots": {}, "seconds": 0.0, "resumed": [], "step": 0}
        self.snapshots: dict[str, dict[str, Any]] = record["snapshots"]
        self.resumed = [*record["resumed"], *([{"step": record["step"]}] if record["step"] else [])]
        self.earlier_seconds: float = record["seconds"]  # of earlier attempts
        self.asked_to_stop: str | None = None
        self.begun = self.saved = time.monotonic()

    def ask_to_stop(self, signal_name: str) -> None:
        """Request a stop after the current step, with a resume point."""
        self.asked_to_stop = signal_name

    def beat(self) -> None:
        """Sign of life: where no other comes within sft.stall_minutes, the stacks of all threads are written, and the
        process ends with status 1."""
        if self.sft.stall_minutes is not None:
            faulthandler.dump_traceback_later(60 * self.sft.stall_minutes, exit=True, file=2)

    # ------------------------------------------------------------------------------------------ the trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat()
        if state.global_step:
            say(f"{self.run.name}: resumes after step {state.global_step}")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat()

    on_prediction_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat()
        step = state.global_step
        if step in self.steps:
            if self.trainer.eval_dataset is not None:
                control.should_evaluate = True  # the snapshot is taken with its loss
            else:
                self._save_snapshot(step)
        if step < args.max_steps and self._is_due(step):
            refuse_broken(self.trainer.model, step)
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        step, loss = state.global_step, (logs or {}).get("eval_loss")
        if step in self.steps and str(step) not in self.snapshots and loss is not None:
            self._save_snapshot(step, loss)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer has written its checkpoint: make it the resume point."""
        self.trainer.accelerator.wait_for_everyone()
        if self.first:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (checkpoint / "training_args.bin").unlink(missing_ok=True)
            shutil.copyfile(self.run.work / LOG, checkpoint / LOG)
            facts = {
                "snapshots": self.snapshots,
                "seconds": self.earlier_seconds + time.monotonic() - self.begun,
                "resumed": self.resumed,
            }
            resume.write_resume_point(self.run, checkpoint, state.global_step, facts)
        self.trainer.accelerator.wait_for_everyone()
        self.saved = time.monotonic()
        self.beat()
        if self.asked_to_stop:
            if self.first:
                update_state(self.run.workplace, step=state.global_step)
            say(
                f"{self.asked_to_stop}: {self.run.name} stopped after step {state.global_step}, its resume point is "
                "written; rerun the same command to resume"
            )
            raise SystemExit(UNFINISHED)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        faulthandler.cancel_dump_traceback_later()

    # ------------------------------------------------------------------------------------------ their actions

    def _is_due(self, step: int) -> bool:
        """Whether to write a resume point now: after sft.resume_minutes, or to stop.

        Several processes agree, as each has its own clock and signals: every LOOK steps they do what one of them
        requests.
        """
        minutes = self.sft.resume_minutes
        due = minutes is not None and time.monotonic() - self.saved >= 60 * minutes
        request = 2.0 if self.asked_to_stop else float(due)
        if self.trainer.args.world_size > 1:
            if step % LOOK and minutes != 0:  # 0: after each step, as all of them know
                return False
            shared = torch.tensor(request, device=self.trainer.args.device)
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
            request = shared.item()
        if request == 2:
            self.asked_to_stop = self.asked_to_stop or "asked to stop"
        return request > 0

    def _save_snapshot(self, step: int, loss: float | None = None) -> None:
        """Called by all processes together; the first writes."""
        refuse_broken(self.trainer.model, step)
        weights = self.save(self.run.work / resume.SNAPSHOTS / f"step-{step}")
        self.snapshots[str(step)] = {
            "step": step, "samples": step * self.sft.batch_size, "validation_loss": loss, **weights,
        }  # fmt: skip
        self.beat()


@contextmanager
def supervised(trainer: Any, run: Run[TrainStage], record: dict[str, Any] | None, save: Save) -> Iterator[Checkpoints]:
    """Inside, snapshots and resume points are written as the trainer trains, and a signal (SIGTERM; SIGUSR1, which
    Slurm sends before a job ends) stops it after a step with a resume point and the exit status UNFINISHED."""
    try:
        checkpoints = Checkpoints(trainer, run, record, save)
        trainer.add_callback(checkpoints)
        with heard_by(checkpoints.ask_to_stop):
            yield checkpoints
    except PipelineError as error:
        usable = resume.usable_resume_point(run)
        if usable is None:
            raise
        raise PipelineError(f"{error}; the resume point after step {usable['step']} stays in {run.work}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def refuse_broken(model: Any, step: int) -> None:
    """Raise for the first parameter that is not finite, so that nothing broken is saved."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(own_shard(parameter.detach())).all():
            raise PipelineError(f"{name} is not finite after step {step}: lower sft.learning_rate or sft.max_grad_norm")


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This process' shard of a tensor, or the tensor itself where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
