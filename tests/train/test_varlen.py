"""Rows without padding through torch's varlen_attn, whose kernel is CUDA's.

Here plain torch takes its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from pipeline.errors import PipelineError
from pipeline.train import varlen

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped heads": {"model_type": "llama", "num_key_value_heads": 2, "num_attention_heads": 4},
    "a window": {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 4},
    "some windows, its own scale": {
        "model_type": "gemma3_text",
        "sliding_window": 3,
        "query_pre_attn_scalar": 5,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def in_plain_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    starts_of_keys: torch.Tensor,
    longest: int,
    longest_keys: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute varlen_attn as torch documents it.

    Tensors are [tokens, heads, width], each row is separate, and both ends of a window are
    inclusive.
    """
    assert (
        torch.equal(starts, starts_of_keys)
        and starts.dtype == torch.int32
        and len(query) == starts[-1]
    )
    assert longest == longest_keys == int(starts.diff().max()) and window_size[1] == 0
    assert len({query.dtype, key.dtype, value.dtype}) == 1 and key.shape == value.shape
    rows = []
    for first, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        parts = (states[first:end].transpose(0, 1)[None] for states in (query, key, value))
        places = torch.arange(end - first)
        back = places[:, None] - places[None]
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] == -1))
        row = torch.nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        rows.append(row[0].transpose(0, 1))
    return torch.cat(rows)


def losses(
    folder: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, cuda: bool, **knobs: Any
) -> Any:
    """Return losses and gradient norms of two steps, and the dtypes for varlen_attn.

    `cuda` computes as on a GPU.
    """
    given: set[torch.dtype] = set()

    def attend(query: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        given.add(query.dtype)
        return in_plain_torch(query, *others, **named)

    monkeypatch.setattr(varlen.varlen, "varlen_attn", attend)
    recipe = tiny.recipe(
        batch_size=8, micro_batch_size=4, learning_rate=1e-3, padding_free=True, **knobs
    )
    model = tiny.model(layers=2, **{"attn_implementation": "sdpa", **fields})
    if cuda:
        varlen.attend_within_rows(model)
    made = tiny.trainer(folder, recipe, tiny.rows(16), of=model, validation=tiny.rows(4))
    made.train()
    told = [
        row[key]
        for row in made.state.log_history
        for key in ("loss", "grad_norm", "eval_loss")
        if key in row
    ]
    return told, given, made.model


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_attend_as_through_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, checkpointing: bool
) -> None:
    """sdpa with a mask over all rows gives the same losses and gradients."""
    knobs = {"gradient_checkpointing": checkpointing}
    masked, unused, _ = losses(tmp_path, CONFIGS[kind], monkeypatch, cuda=False, **knobs)
    within, given, model = losses(tmp_path, CONFIGS[kind], monkeypatch, cuda=True, **knobs)
    assert not unused and given == {torch.float32} and len(within) > 4
    assert within == pytest.approx(masked, rel=1e-5)
    model.config.save_pretrained(tmp_path / "saved")
    assert varlen.ATTENTION not in (tmp_path / "saved/config.json").read_text()


def test_autocast_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are float32 after rotary embeddings, values bfloat16."""
    masked, _, _ = losses(
        tmp_path, CONFIGS["grouped heads"], monkeypatch, cuda=False, precision="bf16"
    )
    within, given, _ = losses(
        tmp_path, CONFIGS["grouped heads"], monkeypatch, cuda=True, precision="bf16"
    )
    assert given == {torch.bfloat16} and within == pytest.approx(masked, rel=2e-2)


def test_what_it_cannot_compute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, capped scores, chunks, and a model that does not hand over where rows begin."""
    refused = (
        "sft.padding_free=true: the attention of llama .* torch's varlen_attn does not support."
        " Leave it out"
    )
    for fields in ({"attention_dropout": 0.1}, {"layer_types": ["chunked_attention"] * 2}):
        with pytest.raises(PipelineError, match=refused):
            losses(tmp_path, fields, monkeypatch, cuda=True)
    module, states = tiny.model(), torch.zeros(1, 1, 2, 4)
    unlike: dict[str, Any]
    for unlike in ({}, {"cu_seq_lens_q": torch.tensor([0, 2]), "softcap": 30.0}):
        with pytest.raises(PipelineError, match=refused):
            varlen.attend(module, states, states, states, None, **unlike)


def test_a_gpu_uses_it_in_place_of_sdpa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(model: Any) -> None:
        raise PipelineError(f"{model.config.model_type} attends within rows")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(varlen, "attend_within_rows", reached)
    with pytest.raises(PipelineError, match="llama attends within rows"):
        tiny.trainer(
            tmp_path,
            tiny.recipe(padding_free=True),
            tiny.rows(4),
            of=tiny.model(attn_implementation="sdpa"),
        )
