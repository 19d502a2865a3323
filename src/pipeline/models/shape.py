"""The shape of a decoder by its config.json: parameters without torch or weights.

Exact for the families that models/anatomy.py knows. The models of the shipped tables are here, so
that a plan can be costed before they are fetched. Sources are the config.json files of the public
repositories (of gated models, of public copies), and the sums are the published totals.
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
    """Sizes of a decoder; `inner` is the width of the MLP.

    norms: of a layer: 2, or 1 that feeds both parts (Cohere), or 4 (Gemma 2 and 3). qk_norm:
    queries and keys have a norm (Qwen 3, Gemma 3). window: tokens that some layers attend to; None:
    all layers attend to all before.
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
        """Parameters of a layer's attention besides its matrices: biases, norms of queries and
        keys, its own norms.
        """
        before_attention = self.norms // 2 * self.width
        return self.bias + before_attention + (2 * self.head_width if self.qk_norm else 0)

    @property
    def layer(self) -> int:
        norms = (self.norms - self.norms // 2) * self.width  # of the MLP, or shared
        return self.attention + self.around_attention + self.mlp + norms

    @property
    def embedding(self) -> int:
        """Parameters of the embeddings, and of the head, which is their transpose or a matrix of
        its own.
        """
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


FOUR_NORMS = ("gemma2", "gemma3_text")
QK_NORM = ("qwen3", "gemma3_text")
WINDOWED = ("gemma2", "gemma3_text", "mistral")  # others have a sliding_window that is not used
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Shape from the content of a config.json.

    Raises PipelineError where it lacks a dense decoder's sizes.
    """
    config = text_settings(config)
    kind = config.get("model_type")
    missing = []
    for key in NEEDED:
        if not isinstance(config.get(key), int):
            missing.append(key)
    if missing:
        raise PipelineError(
            f"model_type={kind}: its config has no {missing[0]}, so that its size is not known"
        )
    if (
        max(
            config.get(key) or 0 for key in ("num_experts", "num_local_experts", "n_routed_experts")
        )
        > 1
    ):
        raise PipelineError(f"model_type={kind} is a mixture of experts, whose cost is not known")
    heads = config["num_attention_heads"]
    kinds = config.get("layer_types")
    if kinds:
        windowed = "sliding_attention" in kinds
    else:
        windowed = kind in WINDOWED
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
        norms=1 if kind == "cohere" else 4 if kind in FOUR_NORMS else 2,
        qk_norm=kind in QK_NORM,
        window=config.get("sliding_window") if windowed else None,
    )


def common_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's settings in a config.json by the names that transformers gives all
    models.

    Such a name is num_hidden_layers for GPT-2's n_layer. Defaults are transformers'. They stay as
    they are where transformers has no such model.
    """
    settings = text_settings(config)
    if {"num_hidden_layers", "max_position_embeddings"} <= settings.keys():
        return settings  # without importing transformers
    from transformers import CONFIG_MAPPING

    if settings.get("model_type") not in CONFIG_MAPPING:
        return settings
    known = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    names = ("num_hidden_layers", "max_position_embeddings")
    return {**settings, **{name: getattr(known, name) for name in names if hasattr(known, name)}}


@lru_cache(maxsize=256)
def shape_in(folder: Path) -> Shape:
    """Shape of the model in a folder, from its config.json. Raises PipelineError as `shape_of`."""
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
