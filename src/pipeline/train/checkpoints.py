"""Snapshots and resume points of a training, an early check of what it will save, and an orderly stop.

A training that is killed resumes from its resume point and ends with the same weights and log, bit for bit. The trainer
saves weights, optimizer, schedule and generators; this module adds the state between two lines of the log (the sums
behind the mean losses, the tokens so far).
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from transformers import TrainerCallback

from pipeline.config.stages import TrainStage
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.progress import say
from pipeline.runs import resume
from pipeline.runs.provenance import machine_facts, package_versions
from pipeline.runs.state import update_state as at_stop
from pipeline.runs.stop import UNFINISHED
from pipeline.train.reload_check import check_saved
from pipeline.train.steps import kept_snapshots, snapshot_steps
from pipeline.train.updates import own_shard

if TYPE_CHECKING:
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


BETWEEN_LOGS = (  # attributes of the trainer: its own sums since the last log, and those of a side
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_total_train_tokens", "current_flos"),
    *("sums", "counts", "measured"),
)

SHARE = 0.02  # the part of a training's time that its resume points may take
BYTES_A_SECOND = 0.5e9  # assumed speed of the file system, for the first resume point

# writes weights, tokenizer and configs to a folder; returns their root and digests
Save = Callable[[Path], dict[str, Any]]


class Checkpoints(TrainerCallback):
    """Snapshots and resume points, as the trainer's steps go by.

    Args:
        trainer: a transformers Trainer, its number of steps planned.
        save: writes what the run would end with if it ended now.
        base: the folder of the base, which adapters are checked on.
    """

    def __init__(
        self, trainer: Any, run: Run[TrainStage], tracker: Tracker, save: Save, base: Path | None = None
    ) -> None:
        config = run.config
        self.trainer, self.run, self.tracker, self.save, self.base = trainer, run, tracker, save, base
        self.sft: Sft = config.sft
        self.first = trainer.args.process_index == 0
        self.validated = trainer.eval_dataset is not None
        self.steps = snapshot_steps(self.sft.snapshot_every, self.sft.batch_size, trainer.args.max_steps)
        if self.sft.snapshot_keep and self.sft.snapshot_keep_by == "validation_loss" and not self.validated:
            raise PipelineError("sft.snapshot_keep_by=validation_loss needs a validation set: give data.validation=N")
        self.record = resume.usable_resume_point(run)
        self.snapshots: dict[str, dict[str, Any]] = self.record["snapshots"] if self.record else {}
        self.earlier_seconds: float = self.record["seconds"] if self.record else 0.0  # of earlier attempts
        self.resumed: list[dict[str, Any]] = self.record["resumed"] if self.record else []
        self.can_resume = self.record is not None  # a resume point exists
        self.asked_to_stop: str | None = None
        self.begun = self.beat = self.saved = time.monotonic()
        # seconds that a resume point takes: estimated, then measured
        self.cost = resume_point_bytes(trainer.model) / BYTES_A_SECOND
        if self.record:
            self._refuse_other_processes(self.record)
            tied = "There were missing keys"  # the trainer warns so about a tied head
            logging.getLogger("transformers.trainer").addFilter(lambda record: tied not in record.getMessage())

    def ask_to_stop(self, signal_name: str) -> None:
        """Request a stop after the current step, with a resume point."""
        self.asked_to_stop = signal_name

    @property
    def resume_from(self) -> str | None:
        return str(resume.resume_folder(self.run.work, self.record)) if self.record else None

    @property
    def seconds(self) -> float:
        """Seconds of training, including earlier attempts."""
        return self.earlier_seconds + time.monotonic() - self.begun

    def finish(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Facts for the manifest: the kept snapshots, and the steps at which the training was resumed.

        A snapshot of the last step shares its files with the run's own weights.
        """
        for step, entry in self.snapshots.items():
            if not self._snapshot_folder(step).is_dir():
                raise PipelineError(f"{self.run.work} lost snapshots/step-{step}: remove that folder and rerun")
            if entry["root"] == weights["root"]:
                share_weight_files(self._snapshot_folder(step), self.run.work)
        facts = {"snapshots": self.snapshots} if self.steps else {}
        return {**facts, **({"resumed": self.resumed} if self.resumed else {})}

    # ------------------------------------------------------------------------------------------ the trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = self.beat = self.saved = time.monotonic()
        if not self.record:
            return
        folder = resume.resume_folder(self.run.work, self.record)
        file = folder / f"between_logs_{args.process_index}.pt"
        device = "cpu" if args.device.type == "cpu" else args.device  # torch cannot restore to cpu:0, as gloo calls it
        between_logs = torch.load(file, weights_only=True, map_location=device)
        for name, value in between_logs["numbers"].items():
            if isinstance(value, dict):
                getattr(self.trainer, name).update(value)
            else:
                setattr(self.trainer, name, value)
        self.trainer._initial_global_step = 0
        for mode, metrics in between_logs["metrics"].items():
            self.trainer._metrics[mode].update(metrics)
        self.resumed.append({"step": self.record["step"], "made_with": self.record["made_with"]})
        if self.first:
            self._restore_log(folder / "log.jsonl")
            say(f"{self.run.name}: resumes after step {self.record['step']}")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat = time.monotonic()

    on_prediction_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat, step = time.monotonic(), state.global_step
        if step == 1 and self.sft.check_saved:
            self._check_saving()
        if step in self.steps:
            if self.validated:
                control.should_evaluate = True  # the snapshot is taken with its loss
            else:
                self._save_snapshot(step)
        if self._is_due() and step < args.max_steps:
            self.saving = time.monotonic()
            refuse_broken(self.trainer.model, step)
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        step, loss = state.global_step, (logs or {}).get("eval_loss")
        if step in self.steps and str(step) not in self.snapshots and loss is not None:
            self._save_snapshot(step, loss)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer has written its checkpoint: make it the resume point."""
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        numbers = {name: getattr(self.trainer, name) for name in BETWEEN_LOGS}
        between_logs = {
            "numbers": {name: dict(value) if isinstance(value, dict) else value for name, value in numbers.items()},
            "metrics": {mode: dict(metrics) for mode, metrics in self.trainer._metrics.items()},
        }
        torch.save(between_logs, checkpoint / f"between_logs_{args.process_index}.pt")
        self.trainer.accelerator.wait_for_everyone()
        if self.first:
            (checkpoint / "training_args.bin").unlink(missing_ok=True)
            log = self.run.work / "log.jsonl"
            (checkpoint / "log.jsonl").write_bytes(log.read_bytes() if log.is_file() else b"")
            facts = {
                "snapshots": self.snapshots, "seconds": self.seconds, "resumed": self.resumed,
                "processes": args.world_size, "made_with": made_with(),
            }  # fmt: skip
            resume.write_resume_point(self.run, checkpoint, state.global_step, facts)
        self.trainer.accelerator.wait_for_everyone()
        self.can_resume = True
        self.beat = self.saved = time.monotonic()
        self.cost = self.saved - self.saving
        if self.asked_to_stop:
            summary = f"{self.asked_to_stop}: {self.run.name} stopped after step {state.global_step}"
            if self.first:
                at_stop(self.run.workplace, step=state.global_step)
                say(f"{summary}, its resume point is written; rerun the same command to resume")
            raise SystemExit(UNFINISHED)

    # ------------------------------------------------------------------------------------------ their actions

    def _is_due(self) -> bool:
        """Whether to write a resume point now: as often as they take SHARE of the time, at the latest after
        sft.resume_minutes. Processes agree: what one of them requests, all do."""
        longest = self.sft.resume_minutes
        timely = longest is not None and time.monotonic() - self.saved >= min(60 * longest, self.cost / SHARE)
        request = 2 if self.asked_to_stop else int(timely)
        if self.trainer.args.world_size > 1:
            shared = torch.tensor(request, device=self.trainer.args.device)
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
            request = int(shared)
        if request == 2:
            self.asked_to_stop = self.asked_to_stop or "asked to stop"
        return request > 0

    def _snapshot_folder(self, step: int | str) -> Path:
        return self.run.work / resume.SNAPSHOTS / f"step-{step}"

    def _save_snapshot(self, step: int, loss: float | None = None) -> None:
        """Called by all processes together; the first writes."""
        refuse_broken(self.trainer.model, step)
        entry: dict[str, Any] = {"step": step, "samples": step * self.sft.batch_size, "validation_loss": loss}
        with same_random_numbers():
            entry |= self.save(self._snapshot_folder(step))
        self.snapshots[str(step)] = entry
        kept_steps = kept_snapshots(self.snapshots, self.sft.snapshot_keep, self.sft.snapshot_keep_by)
        for dropped_step in self.snapshots.keys() - kept_steps:
            del self.snapshots[dropped_step]
            if self.first:
                shutil.rmtree(self._snapshot_folder(dropped_step), ignore_errors=True)
        self.beat = time.monotonic()

    def _check_saving(self) -> None:
        folder = self.run.work / "check"
        with same_random_numbers():
            self.save(folder)
            check_saved(self.trainer, folder, self.base)
        if self.first:
            shutil.rmtree(folder)
        self.beat = time.monotonic()

    def _restore_log(self, kept_log: Path) -> None:
        """Restore the log of the resume point, and log it again to the tracker, whose files ended with the attempt."""
        (self.run.work / "log.jsonl").write_bytes(kept_log.read_bytes())
        for line in kept_log.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            step = row.pop("step")
            self.tracker.log({f"train/{key}": value for key, value in row.items()}, step=step)

    def _refuse_other_processes(self, record: dict[str, Any]) -> None:
        processes = self.trainer.args.world_size
        if record["processes"] != processes:
            raise PipelineError(
                f"the resume point of {self.run.name} was written by {record['processes']} processes and this is "
                f"{processes}: start {record['processes']}, or remove {self.run.work} to start over"
            )
        was, now = record["made_with"], made_with()
        changed = [f"{key} {was.get(key)} -> {now[key]}" for key in now if now[key] != was.get(key)]
        if changed:
            say(f"{self.run.name} resumes with another {', '.join(changed)}: bits may differ")


def resume_point_bytes(model: Any) -> int:
    """Approximate bytes of a resume point: all weights, and two float32 moments of each trained one."""
    parameters = list(model.parameters())
    return sum(p.numel() * (p.element_size() + 8 * p.requires_grad) for p in parameters)


def made_with() -> dict[str, Any]:
    """Versions and hardware on which bits may depend besides the configuration."""
    this_machine = machine_facts()
    return {
        "torch": package_versions()["torch"],
        **{key: this_machine[key] for key in ("processor", "device", "threads")},
    }


def refuse_broken(model: Any, step: int) -> None:
    """Raise for the first parameter that is not finite, so that nothing broken is saved."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(own_shard(parameter.detach())).all():
            raise PipelineError(f"{name} is not finite after step {step}: lower sft.learning_rate or sft.max_grad_norm")


def share_weight_files(folder: Path, same_weights: Path) -> None:
    """Replace the weight files of `folder` by hard links to the same weights elsewhere, where links are supported."""
    for path in folder.glob("*.safetensors"):
        original = same_weights / path.name
        if original.is_file() and original.stat().st_size == path.stat().st_size:
            temporary = path.with_suffix(".link")
            with suppress(OSError):
                os.link(original, temporary)
                os.replace(temporary, path)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the random number generators at the end, so that what is drawn inside does not affect training."""
    python, numbers = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    numpy.random.set_state(numbers)
