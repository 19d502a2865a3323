"""Optimizers and schedules that the trainer does not offer by name."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.config.training import Sft
from pipeline.train.memory import refuse_without_torchao, rounds_stochastically


def torchao_optimizer(sft: Sft) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """torchao's AdamW with moments of 8 bits (Dettmers et al. 2022), or of bfloat16, and its settings.

    Its steps are compiled, a kernel per shape; on a CPU they run uncompiled, as compiling costs more than it saves.
    """
    refuse_without_torchao(sft)
    from torchao.optim import AdamW8bit
    from torchao.optim.adam import _AdamW  # the same step with moments in the weights' dtype

    if not torch.cuda.is_available():
        torch.compiler.set_stance("force_eager")
    kind = AdamW8bit if sft.optimizer == "adamw_8bit" else _AdamW
    return kind, {
        "lr": sft.learning_rate, "betas": (sft.adam_beta1, sft.adam_beta2), "eps": 1e-8,
        "bf16_stochastic_round": rounds_stochastically(sft),
    }  # fmt: skip


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximately the closest orthogonal matrix to each of `matrices` (n, rows, columns), by Newton-Schulz.

    The iterations of torch.optim.Muon (Jordan et al. 2024: singular values end between about 0.7 and 1.2), in the
    matrices' dtype, and of all n at once.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # the spectral norm is at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with its iteration in float32, on all matrices of a shape at once.

    torch's runs in bfloat16, one matrix after the other: on a CPU that has to emulate bfloat16, longer than the rest of
    a small model's step. Nesterov momentum of 0.95; the update is scaled to the root mean square of AdamW's
    (adjust_lr_fn="match_rms_adamw").
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                update = orthogonalize(torch.stack([self._with_momentum(p, group["momentum"]) for p in matrices]))
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                for p, change in zip(matrices, update.to(matrices[0].dtype), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-rate)

    def _with_momentum(self, p: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        assert p.grad is not None
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffer = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum).float()


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon on the matrices of the layers, AdamW on embeddings, head and norms; one optimizer for the trainer.

    One learning rate serves both, Muon's updates being scaled to AdamW's. Used to train small bases from random
    weights, where it needs about two thirds of AdamW's tokens.
    """

    def __init__(
        self, model: torch.nn.Module, learning_rate: float, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in trained if p.ndim == 2 and ".layers." in name]
        adamw_parameters = [p for name, p in trained if not (p.ndim == 2 and ".layers." in name)]
        muon = Muon(matrices, learning_rate, weight_decay)
        adamw = torch.optim.AdamW(adamw_parameters, lr=learning_rate, betas=betas, weight_decay=0.0)
        super().__init__(muon.param_groups + adamw.param_groups, {})
        self.parts: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        self.state = muon.state
        self.param_groups = muon.param_groups + adamw.param_groups
        self._share_state()

    def _share_state(self) -> None:
        """Groups and state are the same objects here and in the two, so that a schedule reaches them, and one
        state_dict holds all."""
        muon, adamw = self.parts
        count = len(muon.param_groups)
        muon.param_groups, adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # which makes new groups and a new state; accelerate calls it too
        self._share_state()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.parts:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.parts:
            optimizer.zero_grad(set_to_none)


def trainer_schedule(name: str, steps: int, decay_share: float) -> tuple[str, dict[str, Any]]:
    """The trainer's name and keywords of our schedule `name`. wsd decays linearly over the last share of steps."""
    if name == "wsd":
        return "warmup_stable_decay", {"num_decay_steps": max(1, round(steps * decay_share)), "decay_type": "linear"}
    return {"linear": "linear", "constant": "constant_with_warmup"}[name], {}
