"""Optimizers and schedules that the trainer does not bring by name."""

from __future__ import annotations

from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon on the matrices of the layers, AdamW on embeddings, head and norms; one optimizer to the trainer.

    Muon's update is scaled to AdamW's root mean square (torch.optim.Muon, adjust_lr_fn="match_rms_adamw"), so that one
    learning rate serves both. Used to make small bases from nothing, where it needs about two thirds of AdamW's tokens.
    """

    def __init__(
        self, model: torch.nn.Module, learning_rate: float, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in named if not (p.ndim == 2 and ".layers." in name)]
        muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr=learning_rate, betas=betas, weight_decay=0.0)
        super().__init__(muon.param_groups + adamw.param_groups, {})
        self.parts = (muon, adamw)
        self.param_groups = muon.param_groups + adamw.param_groups
        self._share()

    def _share(self) -> None:
        """One state and the same groups, so that a schedule and a resume point reach both parts."""
        muon, adamw = self.parts
        count = len(muon.param_groups)
        muon.param_groups, adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.parts:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.parts:
            optimizer.zero_grad(set_to_none)


def schedule(name: str, steps: int, decay_share: float) -> tuple[str, dict[str, Any]]:
    """Our name of a schedule -> the trainer's name and keywords. wsd decays linearly over the last share of steps."""
    if name == "wsd":
        return "warmup_stable_decay", {"num_decay_steps": max(1, round(steps * decay_share)), "decay_type": "linear"}
    return {"linear": "linear", "constant": "constant_with_warmup"}[name], {}
