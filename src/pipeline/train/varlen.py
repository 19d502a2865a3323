"""Attention to rows that follow one another without padding (sft.padding_free), by torch's own
varlen_attn on CUDA.

transformers gives rows to FlashAttention's packages alone; sdpa would attend through a mask over
all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface

from pipeline.errors import PipelineError
from pipeline.text import one_line

ATTENTION = "varlen"  # as transformers knows it
MIXED = (
    0.05  # of the largest logit: rounding moves 1e-2 at most, and reading another row 0.2 or more
)
UNKNOWN = (
    "softcap",
    "s_aux",
    "position_bias",
)  # what varlen_attn cannot do, by transformers' names


def attend_within_rows(model: Any) -> None:
    """Have a model that was loaded with sdpa attend by varlen_attn."""
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
    """[1, heads, tokens, width] -> [1, tokens, heads, width].

    A window holds a token and those before it. Autocast does not know this product: what is float32
    is cast here. Raises PipelineError for attention that is more; that of chunks is told by a mask
    alone, which is not made here.
    """
    chunks = "chunked_attention" in (getattr(module.config, "layer_types", None) or ())
    if (
        cu_seq_lens_q is None
        or dropout
        or chunks
        or any(other.get(name) is not None for name in UNKNOWN)
    ):
        raise PipelineError(
            f"sft.padding_free=true: {module.config.model_type}'s attention is more than torch's"
            " varlen_attn computes (dropout, chunks, capped scores, sinks): leave it out"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = value.dtype
    query, key, value = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    window = ((sliding_window or 0) - 1, 0)  # (-1, 0): all that came before
    attended: Any = varlen.varlen_attn(
        query,
        key,
        value,
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
    """Raise PipelineError unless a model computes the same of rows joined in a batch as of each row
    alone.
    """
    ids = ids[:32]
    rows = [{"input_ids": row, "labels": row} for row in (ids, ids[::-1][: 1 + len(ids) // 2])]
    problem = f"sft.padding_free=true: {model.config.model_type}"
    was_training = model.training
    model.eval()
    try:
        joined = logits_of(model, collator, rows)
        alone = torch.cat([logits_of(model, collator, [row]) for row in rows])
    except PipelineError:  # of `attend`
        raise
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        raise PipelineError(
            f"{problem} does not take joined rows ({one_line(str(error))}): leave it out"
        ) from error
    finally:
        model.train(was_training)
    if (joined - alone).abs().max() > MIXED * alone.abs().max():
        raise PipelineError(
            f"{problem} would attend from row to row, so that the losses differ: leave it out"
        )


def logits_of(model: Any, collator: Any, rows: list[Any]) -> torch.Tensor:
    """Return the logits of all tokens of a batch."""
    batch = {}
    for key, value in collator(rows).items():
        if key != "labels":
            batch[key] = value
    on_device = {
        key: value.to(model.device) if torch.is_tensor(value) else value
        for key, value in batch.items()
    }
    with torch.no_grad():
        found: torch.Tensor = model(**on_device, use_cache=False).logits[0].float()
    return found
