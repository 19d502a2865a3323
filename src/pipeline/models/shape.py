"""The sizes and parameter counts of a decoder from its config.json, without torch or weights.

They are exact for the families that models/anatomy.py knows. The models of the shipped tables are
listed, so a plan has a cost before they are fetched. Sources are the config.json files of public
repositories (for gated models, of public copies). The sums equal the published totals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.checkpoint import TIED_BY_CLASS, read_json, text_settings


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder.

    Args:
        layers: number of layers.
        width: width of the residual stream.
        inner: width of the MLP.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        head_width: width of a head.
        vocabulary: rows of the embeddings.
        tied: the head is the embeddings.
        qkv_bias: queries, keys and values have biases.
        norms: norms of a layer: 2, 1 that feeds both parts (Cohere), or 4 (Gemma 2 and 3).
        qk_norm: queries and keys have a norm (Qwen 3, Gemma 3).
        window: tokens that some layers attend to; None if all layers attend to all earlier tokens.
    """

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
    qk_norm: bool = False
    window: int | None = None

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
        if self.qkv_bias:
            return self.head_width * (self.heads + 2 * self.kv_heads)
        return 0

    @property
    def around_attention(self) -> int:
        """Parameters of a layer's attention other than its matrices: biases and norms."""
        norms = self.norms // 2 * self.width
        if self.qk_norm:
            norms += 2 * self.head_width
        return self.bias + norms

    @property
    def layer(self) -> int:
        other_norms = (self.norms - self.norms // 2) * self.width  # the MLP's or shared
        return self.attention + self.around_attention + self.mlp + other_norms

    @property
    def embedding(self) -> int:
        """Parameters of the embeddings, or of the head."""
        return self.vocabulary * self.width

    @property
    def outside(self) -> int:
        """Parameters outside the layers: embeddings, head, final norm."""
        return self.embedding * (1 if self.tied else 2) + self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside

    @property
    def kv_values(self) -> int:
        """Numbers that the cache stores for a token."""
        return 2 * self.kv_heads * self.head_width * self.layers


FOUR_NORMS = ("gemma2", "gemma3_text")
QK_NORM = ("qwen3", "gemma3_text")
WINDOWED = ("gemma2", "gemma3_text", "mistral")  # other types do not use sliding_window
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape that a config.json describes.

    Raises:
        PipelineError: it lacks a size of a dense decoder, or is a mixture of experts.
    """
    config = text_settings(config)
    kind = config.get("model_type")
    for key in NEEDED:
        if not isinstance(config.get(key), int):
            raise PipelineError(
                f"model_type={kind}: its config.json has no {key}, so its size is not known. Give"
                " a dense decoder."
            )
    if any((config.get(key) or 0) > 1 for key in EXPERTS):
        raise PipelineError(
            f"model_type={kind} is a mixture of experts, whose cost is not known. Give a dense"
            " decoder."
        )
    heads = config["num_attention_heads"]
    layer_types = config.get("layer_types")
    is_windowed = "sliding_attention" in layer_types if layer_types else kind in WINDOWED
    norms = 2
    if kind == "cohere":
        norms = 1
    elif kind in FOUR_NORMS:
        norms = 4
    return Shape(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        inner=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", kind in TIED_BY_CLASS),
        qkv_bias=kind == "qwen2",
        norms=norms,
        qk_norm=kind in QK_NORM,
        window=config.get("sliding_window") if is_windowed else None,
    )


def common_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's settings in a config.json by transformers' common names.

    Such a name is num_hidden_layers for GPT-2's n_layer. Defaults are transformers'. If
    transformers has no such model, the settings are returned unchanged.
    """
    names = ("num_hidden_layers", "max_position_embeddings")
    settings = text_settings(config)
    if settings.keys() >= set(names):
        return settings  # without importing transformers
    from transformers import CONFIG_MAPPING

    if settings.get("model_type") not in CONFIG_MAPPING:
        return settings
    known = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    common = {name: getattr(known, name) for name in names if hasattr(known, name)}
    return settings | common


@lru_cache(maxsize=256)
def shape_in(folder: Path) -> Shape:
    """Return the shape of the model in a folder.

    Raises:
        PipelineError: as in `shape_of`.
    """
    return shape_of(read_json(folder / "config.json"))


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)  # Llama-3.1-8B
SHAPES = {  # conf/model
    "llama3.1_8b": LLAMA_8B,
    "llama3.1_8b_instruct": LLAMA_8B,
    "qwen2.5_7b_instruct": Shape(28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True),
    "aya_expanse_8b": Shape(32, 4096, 14336, 32, 8, 128, 256000, tied=True, norms=1),
    "falcon3_7b_instruct": Shape(28, 3072, 23040, 12, 4, 256, 131072),
    "qwen3_8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
}
