"""Optimizers and schedules that the trainer does not bring by name."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.train.memory import rounds_stochastically


def of_torchao(sft: Sft) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """torchao's AdamW with moments of 8 bits (Dettmers et al. 2022), or of bfloat16, and its settings.

    Its steps are compiled, a kernel a shape; on a CPU they run as they are, as compiling costs more than they do.
    """
    try:
        from torchao.optim import AdamW8bit
        from torchao.optim.adam import _AdamW  # the same step with moments in the weights' dtype
    except ImportError as error:
        raise PipelineError(
            f"sft.optimizer={sft.optimizer} is torchao's, which is not installed: pip install 'pipeline[memory]'"
        ) from error
    if not torch.cuda.is_available():
        torch.compiler.set_stance("force_eager")
    kind = AdamW8bit if sft.optimizer == "adamw_8bit" else _AdamW
    return kind, {
        "lr": sft.learning_rate, "betas": (sft.adam_beta1, sft.adam_beta2), "eps": 1e-8,
        "bf16_stochastic_round": rounds_stochastically(sft),
    }  # fmt: skip


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
        self.parts, self.state = (muon, adamw), muon.state
        self.param_groups = muon.param_groups + adamw.param_groups
        self._share()

    def _share(self) -> None:
        """Groups and state are the same objects here and in the two, so that a schedule reaches them, and one
        state_dict holds all."""
        muon, adamw = self.parts
        count = len(muon.param_groups)
        muon.param_groups, adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # which makes new groups and a new state; accelerate calls it too
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
