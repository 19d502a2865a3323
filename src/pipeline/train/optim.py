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


def trainer_schedule(name: str, steps: int, decay_share: float) -> tuple[str, dict[str, Any]]:
    """The trainer's name and keywords of our schedule `name`. wsd decays linearly over the last share of steps."""
    if name == "wsd":
        return "warmup_stable_decay", {"num_decay_steps": max(1, round(steps * decay_share)), "decay_type": "linear"}
    return {"linear": "linear", "constant": "constant_with_warmup"}[name], {}
