"""Attention within rows that are joined without padding (sft.padding_free), by torch's varlen_attn.

It needs CUDA. transformers passes the rows' boundaries only to FlashAttention's packages; sdpa
would attend through a mask over all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface

from pipeline.errors import PipelineError
from pipeline.text import one_line

ATTENTION = "varlen"  # its name in transformers
# A change relative to the largest logit: rounding causes at most 1e-2, reading another row 0.2
MIXED = 0.05
# Arguments of transformers that varlen_attn does not have
UNKNOWN = ("softcap", "s_aux", "position_bias")


def attend_within_rows(model: Any) -> None:
    """Switch a model that was loaded with sdpa to varlen_attn."""
    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within rows: [1, heads, tokens, width] -> [1, tokens, heads, width].

    A window holds a token and the tokens before it. Autocast does not know this product, so float32
    is cast here.

    Raises:
        PipelineError: the attention has a feature that varlen_attn does not support. Chunks would
            need a mask, which is not made here.
    """
    has_chunks = "chunked_attention" in (getattr(module.config, "layer_types", None) or ())
    has_unknown = any(other.get(name) is not None for name in UNKNOWN)
    if cu_seq_lens_q is None or dropout or has_chunks or has_unknown:
        raise PipelineError(
            f"sft.padding_free=true: the attention of {module.config.model_type} has dropout,"
            " chunks, capped scores or sinks, which torch's varlen_attn does not support. Leave it"
            " out."
        )
    device = query.device.type
    dtype = value.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)

    def by_token(states: torch.Tensor) -> torch.Tensor:
        return states[0].transpose(0, 1).to(dtype)

    window = ((sliding_window or 0) - 1, 0)  # (-1, 0): all earlier tokens
    attended: Any = varlen.varlen_attn(
        by_token(query),
        by_token(key),
        by_token(value),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=window,
        enable_gqa=True,
    )
    return attended[None], None


def refuse_mixed_rows(model: Any, collator: Any, ids: list[int]) -> None:
    """Raise PipelineError unless a model computes the same for joined rows as for each row."""
    ids = ids[:32]
    reversed_part = ids[::-1][: 1 + len(ids) // 2]
    rows = [{"input_ids": row, "labels": row} for row in (ids, reversed_part)]
    problem = f"sft.padding_free=true: {model.config.model_type}"
    was_training = model.training
    model.eval()
    try:
        joined = logits_of(model, collator, rows)
        alone = torch.cat([logits_of(model, collator, [row]) for row in rows])
    except PipelineError:  # from `attend`
        raise
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        raise PipelineError(
            f"{problem} does not support joined rows ({one_line(str(error))}). Leave it out."
        ) from error
    finally:
        model.train(was_training)
    if (joined - alone).abs().max() > MIXED * alone.abs().max():
        raise PipelineError(
            f"{problem} would attend from row to row, which changes the losses. Leave it out."
        )


def logits_of(model: Any, collator: Any, rows: list[Any]) -> torch.Tensor:
    """Return the logits of all tokens of a batch."""
    batch = {}
    for key, value in collator(rows).items():
        if key == "labels":
            continue
        if torch.is_tensor(value):
            value = value.to(model.device)
        batch[key] = value
    with torch.no_grad():
        logits: torch.Tensor = model(**batch, use_cache=False).logits[0]
    return logits.float()
