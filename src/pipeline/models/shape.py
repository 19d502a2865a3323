"""The shape of a decoder by its config alone: parameters to the last one, without torch and without weights.

Llama, Qwen2, Falcon3 and Cohere, as models/anatomy.py knows them. The five models of the papers are here, so that a
plan can be costed before they are fetched; their sources are the config.json files of the public repositories (of gated
models, of public copies), and their sums are the published totals (8.03, 7.62, 8.03 and 7.46 billion).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import PipelineError


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; `inner` is the width of the MLP. `norms`: 2 a layer, or 1 that feeds both parts (Cohere)."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    norms: int = 2

    @property
    def qkv(self) -> int:
        """Parameters of the query, key and value matrices of a layer."""
        return self.width * self.head_width * (self.heads + 2 * self.kv_heads)

    @property
    def attention(self) -> int:
        """Parameters of the four matrices of a layer's attention."""
        return self.qkv + self.width * self.head_width * self.heads

    @property
    def mlp(self) -> int:
        """Parameters of the three matrices of a layer's MLP."""
        return 3 * self.width * self.inner

    @property
    def bias(self) -> int:
        return self.head_width * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0

    @property
    def layer(self) -> int:
        return self.attention + self.bias + self.mlp + self.norms * self.width

    @property
    def embedding(self) -> int:
        """Parameters of the embeddings, and of the head, which is their transpose or a matrix of its own."""
        return self.vocabulary * self.width

    @property
    def outside(self) -> int:
        """Parameters that belong to no layer: embeddings, head, final norm."""
        return self.embedding * (1 if self.tied else 2) + self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside

    @property
    def kv_values(self) -> int:
        """Numbers that the cache keeps for a token."""
        return 2 * self.kv_heads * self.head_width * self.layers


TIED = {"cohere": True}  # where config.json leaves tie_word_embeddings out


def shape_of(config: Mapping[str, Any]) -> Shape:
    """From what a config.json holds. Raises PipelineError for a model type that the formulas were not made for."""
    kind = config.get("model_type")
    if kind not in ("llama", "qwen2", "cohere"):
        raise PipelineError(f"model_type={kind} has no shape here: there are llama, qwen2 and cohere")
    heads = config["num_attention_heads"]
    return Shape(
        layers=config["num_hidden_layers"], width=config["hidden_size"], inner=config["intermediate_size"],
        heads=heads, kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or config["hidden_size"] // heads, vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", TIED.get(kind, False)), qkv_bias=kind == "qwen2",
        norms=1 if kind == "cohere" else 2,
    )  # fmt: skip


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)  # Llama-3.1-8B
SHAPES = {  # conf/model
    "llama3.1_8b": LLAMA_8B,
    "llama3.1_8b_instruct": LLAMA_8B,
    "qwen2.5_7b_instruct": Shape(28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True),
    "aya_expanse_8b": Shape(32, 4096, 14336, 32, 8, 128, 256000, tied=True, norms=1),
    "falcon3_7b_instruct": Shape(28, 3072, 23040, 12, 4, 256, 131072),
}
