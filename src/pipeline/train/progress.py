"""The log, the tracker and the progress bar of a training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from pipeline.errors import PipelineError
from pipeline.progress import Bar
from pipeline.runs.state import record_step
from pipeline.train.steps import side_of_step

if TYPE_CHECKING:
    from pipeline.config.stages import TrainStage
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker

LOG = "log.jsonl"
NAMES = {  # the trainer's name -> ours
    "loss": "loss", "learning_rate": "learning_rate", "grad_norm": "grad_norm", "num_tokens": "tokens",
    "eval_loss": "validation_loss", "eval_math_loss": "validation_loss_math",
    "eval_language_loss": "validation_loss_language",
}  # fmt: skip


class Progress(TrainerCallback):
    """The log, a row for each step, which of simultaneous training names its side; the tracker; a bar.

    Raises PipelineError at a loss or gradient that is not finite. resumed: the folder of the resume point, whose log
    is continued, in the tracker too, as its files ended with the earlier attempt.
    """

    def __init__(self, run: Run[TrainStage], tracker: Tracker, steps: int, resumed: Path | None = None) -> None:
        self.run, self.tracker, self.sft = run, tracker, run.config.sft
        self.log_file = run.work / LOG
        self.log_file.unlink(missing_ok=True)
        self.tokens, self.losses = 0.0, 0.0  # of all steps
        self.begun: tuple[float, float] | None = None  # tokens and seconds at this attempt's first log
        self.rate = 0.0  # tokens a second since then, without warm-up costs and earlier attempts
        self.bar = Bar(run.name, steps, "step", stays=True)
        for line in (resumed / LOG).read_text(encoding="utf-8").splitlines() if resumed else ():
            self.write(json.loads(line))
        self.earlier_tokens = self.tokens  # the trainer counts those of this attempt

    def write(self, row: dict[str, Any]) -> None:
        self.tokens, self.losses = row.get("tokens", self.tokens), self.losses + row.get("loss", 0.0)
        with open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        numbers = {f"train/{key}": value for key, value in row.items() if key not in ("step", "side")}
        self.tracker.log(numbers, step=row["step"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.start(state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(1 / args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)
        record_step(self.run.workplace, state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        step, logs = state.global_step, logs or {}
        row: dict[str, Any] = {"step": step, **{name: logs[key] for key, name in NAMES.items() if key in logs}}
        if not {"loss", "validation_loss"} & row.keys():
            return
        for kind in ("loss", "validation_loss", "grad_norm"):
            if not math.isfinite(row.get(kind, 0.0)):
                raise PipelineError(
                    f"{kind} became {row[kind]} at step {step}: lower sft.learning_rate "
                    f"(now {self.sft.learning_rate}) or sft.max_grad_norm (now {self.sft.max_grad_norm})"
                )
        if "loss" in row:  # not a validation
            row["tokens"] += self.earlier_tokens
            if self.sft.method == "simultaneous":
                row["side"] = side_of_step(step - 1, self.sft.steps_per_switch)
            seconds = self.bar.format_dict["elapsed"]
            self.begun = self.begun or (row["tokens"], seconds)
            self.rate = (row["tokens"] - self.begun[0]) / max(seconds - self.begun[1], 1e-9)
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {self.rate:,.0f} tokens/s", refresh=False)
        self.write(row)
