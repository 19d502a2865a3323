"""The end of a training step, before the resume point of that step is written."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import TrainerCallback

from pipeline.train import checkpoints

REAL = checkpoints.Checkpoints


class At(TrainerCallback):
    def __init__(self, step: int, do: Callable[[Any], None]) -> None:
        self.step, self.do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            self.do(model)


def disturb(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[Any], None]) -> None:
    """Have something done at the end of this step of the trainings to come; 0: no more."""

    class Disturbed(REAL):
        def __init__(self, trainer: Any, *rest: Any) -> None:
            super().__init__(trainer, *rest)
            trainer.add_callback(At(step, do))

    monkeypatch.setattr(checkpoints, "Checkpoints", Disturbed)
