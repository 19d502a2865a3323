"""The log, the tracker and the progress bar of a training."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from pipeline.errors import PipelineError
from pipeline.progress import Bar
from pipeline.runs.state import record_step

if TYPE_CHECKING:
    from pipeline.config.stages import TrainStage
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker

NAMES = {  # the trainer's name -> ours
    "loss": "loss", "learning_rate": "learning_rate", "grad_norm": "grad_norm",
    "num_tokens": "tokens", "eval_loss": "validation_loss",
    "update_norm": "update_norm", "updates_lost": "updates_lost", "updates_unchanged": "updates_unchanged",
}  # fmt: skip
for _name in ("loss", "grad_norm", "update_norm", "updates_lost", "updates_unchanged", "eval_{}_loss"):
    for _side in ("math", "language"):
        _key = _name.format(_side) if "{}" in _name else f"{_name}_{_side}"
        NAMES[_key] = f"validation_loss_{_side}" if "{}" in _name else _key


class Progress(TrainerCallback):
    """The log file, the tracker, a bar with loss and tokens per second. Raises PipelineError at a non-finite loss."""

    def __init__(self, run: Run[TrainStage], tracker: Tracker, steps: int) -> None:
        self.run, self.tracker, self.sft, self.tokens = run, tracker, run.config.sft, 0
        self.log_file = run.work / "log.jsonl"
        self.first: tuple[int, float] | None = None  # tokens and seconds at this attempt's first log
        self.rate = 0.0  # tokens a second since then
        self.bar = Bar(run.name, steps, "step", stays=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.start(state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(1 / args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.to(state.global_step)
        record_step(self.run.workplace, state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        row = {"step": state.global_step}
        logs = logs or {}
        row |= {name: logs[key] for key, name in NAMES.items() if key in logs}
        if not {"loss", "validation_loss"} & row.keys():
            return
        for kind in ("loss", "validation_loss", "grad_norm"):
            if not math.isfinite(row.get(kind, 0.0)):
                raise PipelineError(
                    f"{kind} became {row[kind]} at step {state.global_step}: lower sft.learning_rate "
                    f"(now {self.sft.learning_rate}) or sft.max_grad_norm (now {self.sft.max_grad_norm})"
                )
        self.tokens = int(row.get("tokens", self.tokens))
        if "loss" in row:  # not a validation
            self.bar.note = f"loss {row['loss']:.3f}{self.token_rate()}"
        with open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.tracker.log({f"train/{key}": value for key, value in row.items() if key != "step"}, step=state.global_step)

    def token_rate(self) -> str:
        """Tokens per second since the first log, which excludes warm-up costs and the tokens of earlier attempts."""
        seconds = self.bar.elapsed
        if self.first is None:
            self.first = self.tokens, seconds
            return ""
        tokens, begun = self.first
        self.rate = (self.tokens - tokens) / max(seconds - begun, 1e-9)
        return f", {self.rate:,.0f} tokens/s"

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()
