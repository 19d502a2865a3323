"""What happens as a training's steps go by: its log and bar, snapshots, resume points, and its
orderly stop.

A training that is killed resumes from its resume point and ends with the same weights and log, bit
for bit: the trainer saves weights, optimizer, schedule and generators; the log, a row for each
step, holds all else.
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
LOOK = 4  # steps between two looks of several processes for a signal that one of them received
NAMES = {  # the trainer's name -> ours
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "num_tokens": "tokens",
    "eval_loss": "validation_loss",
    "eval_math_loss": "validation_loss_math",
    "eval_language_loss": "validation_loss_language",
}
Record = dict[str, Any] | None  # of a resume point
Save = Callable[
    [Path], dict[str, Any]
]  # writes weights, tokenizer and configs to a folder; their root and digests


class Progress(TrainerCallback):
    """The log, a row for each step, which of simultaneous training names its side; the tracker; a
    bar.

    Raises PipelineError at a loss or gradient that is not finite. record: of the resume point,
    whose log is continued, in the tracker too, as its files ended with the earlier attempt.
    """

    def __init__(
        self, run: Run[TrainStage], tracker: Tracker, steps: int, record: Record = None
    ) -> None:
        self.run, self.tracker, self.sft = run, tracker, run.config.sft
        self.log_file = run.work / LOG
        self.log_file.unlink(missing_ok=True)
        self.tokens, self.losses = 0.0, 0.0  # of all steps
        self.begun: tuple[float, float] | None = (
            None  # tokens and seconds at this attempt's first log
        )
        self.rate = 0.0  # tokens a second since then, without warm-up costs and earlier attempts
        self.bar = Bar(run.name, steps, "step", stays=True)
        earlier = ""
        if record:
            earlier = (resume.resume_folder(run.work, record) / LOG).read_text(encoding="utf-8")
        for line in earlier.splitlines():
            self.write(json.loads(line))
        self.earlier_tokens = self.tokens  # the trainer counts those of this attempt

    def write(self, row: dict[str, Any]) -> None:
        self.tokens, self.losses = (
            row.get("tokens", self.tokens),
            self.losses + row.get("loss", 0.0),
        )
        with open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        numbers = {}
        for key, value in row.items():
            if key not in ("step", "side"):
                numbers[f"train/{key}"] = value
        self.tracker.log(numbers, step=row["step"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.start(state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(1 / args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)
        record_step(self.run.workplace, state.global_step, state.max_steps)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        step, logs = state.global_step, logs or {}
        row: dict[str, Any] = {
            "step": step,
            **{name: logs[key] for key, name in NAMES.items() if key in logs},
        }
        if not {"loss", "validation_loss"} & row.keys():
            return
        for kind in ("loss", "validation_loss", "grad_norm"):
            if not math.isfinite(row.get(kind, 0.0)):
                raise PipelineError(
                    f"{kind} became {row[kind]} at step {step}: lower sft.learning_rate (now"
                    f" {self.sft.learning_rate}) or sft.max_grad_norm (now"
                    f" {self.sft.max_grad_norm})"
                )
        if "loss" in row:  # not a validation
            row["tokens"] += self.earlier_tokens
            if self.sft.method == "simultaneous":
                row["side"] = side_of_step(step - 1, self.sft.steps_per_switch)
            seconds = self.bar.format_dict["elapsed"]
            self.begun = self.begun or (row["tokens"], seconds)
            self.rate = (row["tokens"] - self.begun[0]) / max(seconds - self.begun[1], 1e-9)
            self.bar.set_postfix_str(
                f"loss {row['loss']:.3f}, {self.rate:,.0f} tokens/s", refresh=False
            )
        self.write(row)


class Checkpoints(TrainerCallback):
    """Snapshots and resume points, as the trainer's steps go by.

    Args:
        trainer: a transformers Trainer, its number of steps planned.
        record: of the resume point that it resumes from.
        save: writes what the run would end with if it ended now; called by all processes together.
    """

    def __init__(self, trainer: Any, run: Run[TrainStage], record: Record, save: Save) -> None:
        self.trainer, self.run, self.save, self.sft = trainer, run, save, run.config.sft
        self.steps = snapshot_steps(self.sft, trainer.args.max_steps)
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.resumed: list[dict[str, Any]] = []
        self.earlier_seconds = 0.0  # of earlier attempts
        if record:
            point = {"step": record["step"], "machine": record.get("machine", {})}
            self.snapshots, self.resumed = record["snapshots"], [*record["resumed"], point]
            self.earlier_seconds = record["seconds"]
        self.asked_to_stop: str | None = (
            None  # by this signal, after the current step, with a resume point
        )
        self.begun = self.saved = time.monotonic()

    def beat(self, *_: Any, **__: Any) -> None:
        """Sign of life: where no other comes within sft.stall_minutes, the stacks of all threads
        are written, and the process ends with status 1.
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
            control.should_evaluate = True  # the snapshot is taken with its loss
        if step < args.max_steps and self._is_due(step):
            refuse_broken(self.trainer.model, step)
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        step, loss = state.global_step, (logs or {}).get("eval_loss")
        without = self.trainer.eval_dataset is None
        if step in self.steps and str(step) not in self.snapshots and (without or loss is not None):
            refuse_broken(self.trainer.model, step)
            weights = self.save(self.run.work / resume.SNAPSHOTS / f"step-{step}")
            samples = step * self.sft.batch_size
            self.snapshots[str(step)] = {
                "step": step,
                "samples": samples,
                "validation_loss": loss,
                **weights,
            }
            self.beat()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the checkpoint that the trainer has written the resume point."""
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.is_world_process_zero():
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (checkpoint / "training_args.bin").unlink(missing_ok=True)
            shutil.copyfile(self.run.work / LOG, checkpoint / LOG)
            seconds = self.earlier_seconds + time.monotonic() - self.begun
            facts = {
                "snapshots": self.snapshots,
                "seconds": seconds,
                "resumed": self.resumed,
                "machine": machine_facts(),
            }
            resume.write_resume_point(self.run, checkpoint, state.global_step, facts)
            update_state(self.run.workplace, step=state.global_step)
        self.trainer.accelerator.wait_for_everyone()
        self.saved = time.monotonic()
        self.beat()
        if self.asked_to_stop:
            say(
                f"{self.asked_to_stop}: {self.run.name} stopped after step {state.global_step}, its"
                " resume point is written; rerun the same command to resume"
            )
            raise SystemExit(UNFINISHED)

    def _is_due(self, step: int) -> bool:
        """Whether to write a resume point now: after sft.resume_minutes, or to stop.

        Several processes agree, as each has its own clock and signals: every LOOK steps they do
        what one of them requests.
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


@contextmanager
def supervised(
    trainer: Any, run: Run[TrainStage], tracker: Tracker, record: Record, save: Save
) -> Iterator[tuple[Checkpoints, Progress | None]]:
    """Inside, the first process logs, snapshots and resume points are written as the trainer
    trains, and a signal (SIGTERM; SIGUSR1, which Slurm sends before a job ends) stops it after a
    step with a resume point and the exit status UNFINISHED.
    """
    first, checkpoints = trainer.is_world_process_zero(), Checkpoints(trainer, run, record, save)
    progress = None
    if first:
        progress = Progress(run, tracker, trainer.args.max_steps, record)
    for callback in filter(None, (progress, checkpoints)):
        trainer.add_callback(callback)
    try:
        with heard_by(partial(setattr, checkpoints, "asked_to_stop")):
            yield checkpoints, progress
    except PipelineError as error:
        usable = resume.usable_resume_point(run)
        if usable is None:
            raise
        raise PipelineError(
            f"{error}; the resume point after step {usable['step']} stays in {run.work}"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        if progress:
            progress.bar.close()  # so that a message about the end begins a line


def refuse_broken(model: Any, step: int) -> None:
    """Raise for the first parameter that is not finite, so that nothing broken is saved."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(own_shard(parameter.detach())).all():
            raise PipelineError(
                f"{name} is not finite after step {step}: lower sft.learning_rate or"
                " sft.max_grad_norm"
            )


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process' shard of a tensor, or the tensor itself where it is not sharded."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor
