"""Memory and micro-batches of a recipe by arithmetic, before anything is loaded: bytes per parameter and per GPU.

The plan and the training itself use these formulas to reject what does not fit.

Bytes per trained parameter, of weight, gradient and the two moments:

| sft.weights | sft.optimizer | bytes | rounding of an update |
|---|---|---|---|
| float32 | adamw (the default) | 4 + 4 + 4 + 4 = 16 | fp32 |
| float32 | adamw_8bit | 4 + 4 + 1 + 1 = 10 | fp32 |
| bfloat16 | adamw | 2 + 2 + 2 + 2 = 8 | to nearest: below a learning rate of about 1e-5 most are lost |
| bfloat16 | adamw_bf16 | 2 + 2 + 2 + 2 = 8 | stochastic: right in the mean |
| bfloat16 | adamw_8bit | 2 + 2 + 1 + 1 = 6 | stochastic: right in the mean |

adamw_bf16 and adamw_8bit are torchao's (extra `memory`); eight-bit moments carry a scale per block of 256, 1.6 % more.
Accumulating gradients over micro-batches adds nothing: the gradient exists once, under ddp as a view of its buckets,
under fsdp2 as a shard that is reduced after each micro-batch. LoRA holds only the base's weights
(4 or 2 bytes), and 16 bytes for each of the few parameters of its adapters, which stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from pipeline.config.training import Partition, Sft
from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site
from pipeline.models.partition import side_of
from pipeline.models.shape import Shape

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
BYTES = {  # (weights, optimizer) -> bytes per trained parameter
    ("float32", "adamw"): 16, ("float32", "muon_adamw"): 12, ("float32", "adamw_8bit"): 10,
    ("bfloat16", "adamw"): 8, ("bfloat16", "adamw_bf16"): 8, ("bfloat16", "adamw_8bit"): 6,
}  # fmt: skip


# Neighbours in bfloat16 are 0.4 to 0.8 % apart: a second moment that changes by less than half of that a step and is
# rounded to nearest, as in adamw_bf16, never falls. Once gradients are a tenth of what they were, weights move 0.98 as
# far as in fp32 at 0.99, and 0.4 at 0.997 (results/bench/precision.json).
MOST_BETA2 = 0.99


def bytes_per_parameter(sft: Sft) -> int:
    """Bytes per trained parameter: weight + gradient + optimizer moments. Raises PipelineError for an invalid pair."""
    weights = "float32" if sft.adapter == "lora" else sft.weights  # adapters stay float32
    if (weights, sft.optimizer) not in BYTES:
        pairs = ", ".join(f"{dtype} with {optimizer}" for dtype, optimizer in BYTES)
        raise PipelineError(
            f"sft.weights={weights} with sft.optimizer={sft.optimizer} is not supported: there are {pairs}"
        )
    return BYTES[weights, sft.optimizer]


def refuse_without_torchao(sft: Sft) -> None:
    """Raise PipelineError where the optimizer is torchao's, and that is not installed."""
    if sft.optimizer in ("adamw_bf16", "adamw_8bit") and not find_spec("torchao"):
        raise PipelineError(
            f"sft.optimizer={sft.optimizer} is torchao's, which is not installed: "
            "pip install 'cross-lingual-merging[memory]'"
        )


def rounds_stochastically(sft: Sft) -> bool:
    """Whether updates too small for bfloat16 are right on average instead of lost."""
    return sft.weights == "bfloat16" and sft.adapter == "none" and sft.optimizer in ("adamw_bf16", "adamw_8bit")


def micro_batches(sft: Sft) -> tuple[int, int]:
    """(sequences per process and pass, passes per step). Raises PipelineError where sft.batch_size does not divide."""
    micro = sft.micro_batch_size or max(1, sft.batch_size // sft.processes)
    if sft.batch_size % (micro * sft.processes):
        divisor, knob = f"sft.micro_batch_size={micro}", "sft.micro_batch_size"
        if sft.batch_size % sft.processes:  # whatever the micro-batch, which a default may have given
            divisor, knob = f"sft.processes={sft.processes}", "sft.processes"
        elif sft.processes > 1:
            divisor += f" x sft.processes={sft.processes}"
        unit = sft.processes * (sft.micro_batch_size or 1)
        below = sft.batch_size // unit * unit
        sizes = " or ".join(str(size) for size in (below, below + unit) if size)
        raise PipelineError(
            f"sft.batch_size={sft.batch_size} is not a multiple of {divisor}: give sft.batch_size={sizes}, or "
            f"another {knob}"
        )
    return micro, sft.batch_size // (micro * sft.processes)


# ---------------------------------------------------------------------------------------------------- what is trained


@dataclass(frozen=True)
class Trained:
    """The trained part of a model: layers whose attention, whose MLP is trained, and whether embeddings are."""

    attention: frozenset[int]
    mlp: frozenset[int]
    outside: bool = False


def full_model(shape: Shape) -> Trained:
    """All layers, embeddings and head."""
    layers = frozenset(range(shape.layers))
    return Trained(layers, layers, outside=True)


def one_side(shape: Shape, partition: Partition, side: str) -> Trained:
    """The math or language side of a partition, by the same predicate as freezing and swapping."""

    def layers(kind: str) -> frozenset[int]:
        return frozenset(
            layer for layer in range(shape.layers) if side_of(partition, Site(layer, kind), shape.layers) == side
        )

    return Trained(
        layers("attention"), layers("mlp"), side_of(partition, Site(None, "embedding"), shape.layers) == side
    )


def trained_parameters(shape: Shape, trained: Trained, lora_rank: int = 0) -> int:
    """Number of trained parameters, with norms and biases; with lora_rank those of adapters on all seven matrices."""
    if lora_rank:
        a, m = adapter_parameters(shape, lora_rank)
        return len(trained.attention) * a + len(trained.mlp) * m
    of_attention = shape.attention + shape.around_attention
    of_mlp = shape.mlp + shape.norms // 2 * shape.width
    shared = shape.width * len(trained.attention & trained.mlp) if shape.norms == 1 else 0
    layers = len(trained.attention) * of_attention + len(trained.mlp) * of_mlp + shared
    return layers + (shape.outside if trained.outside else 0)


def adapter_parameters(shape: Shape, rank: int) -> tuple[int, int]:
    """LoRA's parameters of a layer's (attention, MLP): rank x (inputs + outputs) of each matrix (Hu et al. 2022)."""
    queries, keys = shape.head_width * shape.heads, shape.head_width * shape.kv_heads
    attention = 2 * (shape.width + queries) + 2 * (shape.width + keys)
    return rank * attention, rank * 3 * (shape.width + shape.inner)


# ---------------------------------------------------------------------------------------------------- on a GPU


def states(parameters: int, trained: int, sft: Sft) -> dict[str, float]:
    """Purpose -> bytes on each GPU that training holds besides activations; fsdp2 divides them.

    Args:
        parameters: number in the whole model, without adapters.
        trained: number trained, of both sides together where these take turns; with adapters theirs.
    """
    lora = sft.adapter == "lora"
    width = 4 if lora else WIDTH[sft.weights]
    shards = sft.processes if sft.parallel == "fsdp2" else 1
    weight_bytes = parameters * WIDTH[sft.weights] + (trained * 4 if lora else 0)
    moments = trained * (bytes_per_parameter(sft) - 2 * width)
    return {"weights": weight_bytes / shards, "gradients": trained * width / shards, "moments": moments / shards}


def activation_bytes(shape: Shape, tokens: float, weights: str = "float32", checkpointing: bool = True) -> float:
    """Bytes that the backward pass needs for `tokens` tokens of a micro-batch, tensor by tensor in transformers' layers
    with products in bf16 (tests compare with what autograd saves).

    Per layer and token: two norms keep their input and its normalised form; six inputs of products and the attention's
    output are kept in bf16; keys and values, a number per head, four of the MLP's width. Checkpointing keeps the input
    of each layer, and one layer in full. The fused loss holds one tile of logits (4,096 tokens x 16,384 words, fp32).
    """
    residual = WIDTH[weights]
    of_width = 30 if weights == "float32" else 20
    keys = 2 * 2 * shape.kv_heads * shape.head_width
    layer = of_width * shape.width + keys + 8 * shape.inner + 4 * shape.heads + 8
    token_bytes = shape.layers * residual * shape.width + layer if checkpointing else shape.layers * layer
    return tokens * token_bytes + min(tokens, 4096) * min(shape.vocabulary, 16384) * 4


def training_memory(shape: Shape, trained: int, length: float, sft: Sft) -> dict[str, float]:
    """Purpose -> bytes on each GPU. trained: as in `states`; length: tokens of a row of the longest micro-batch.

    Casts: the bf16 copies that autocast makes of fp32 weights and keeps until the forward pass ends, of trained ones;
    without checkpointing of all, until the backward pass has used them. Gradients take their place unless they exist
    already, accumulated over micro-batches. fsdp2 divides the states, casts before it gathers, and holds `gathered`.
    """
    micro, passes = micro_batches(sft)
    state_bytes, checkpointing = states(shape.parameters, trained, sft), sft.gradient_checkpointing
    casts: float = (0 if sft.adapter == "lora" else 2 * trained) if checkpointing else 2 * shape.parameters
    casts = max(0, casts - (0 if passes > 1 else state_bytes["gradients"]))
    autocast = sft.weights == "float32" and sft.precision == "bf16"
    sharded = sft.parallel == "fsdp2" and sft.processes > 1
    activations = activation_bytes(shape, micro * length, sft.weights, checkpointing)
    whole = {"gathered": gathered_bytes(shape, sft)} if sharded else {"casts": casts if autocast else 0}
    return {**state_bytes, **whole, "activations": activations, "context": 1e9}


def gathered_bytes(shape: Shape, sft: Sft) -> float:
    """Bytes of what fsdp2 holds unsharded at a time, in the dtype that it computes in: embeddings and head, a layer and
    the next one, and the largest gradient among these with the float32 copy that is reduced."""
    width = 2 if sft.precision == "bf16" else WIDTH[sft.weights]
    layer = (shape.parameters - shape.outside) / shape.layers
    gradient = 0 if sft.adapter == "lora" else max(layer, shape.vocabulary * shape.width)
    return width * (shape.outside + 2 * layer) + (width + 4) * gradient


# ---------------------------------------------------------------------------------------------------- remedies

PASSES = {"micro_batch_size": 1, "gradient_checkpointing": True}
FEWER_BYTES = {"weights": "bfloat16", "optimizer": "adamw_8bit"}  # of a weight, its gradient and moments: 6


def remedies(fits: Callable[[Mapping[str, Any]], bool]) -> list[Mapping[str, Any]]:
    """Knobs of sft that make a training fit, tried in the order of how much they change: smaller passes, else more
    GPUs, fewer bytes per parameter, or both. `fits`: whether the training fits with given knobs."""
    more_gpus: list[dict[str, Any]] = [{"parallel": "fsdp2", "processes": count} for count in (2, 4, 8)]
    fewer_bytes_too = [{**FEWER_BYTES, **knobs} for knobs in more_gpus]
    families: list[list[dict[str, Any]]] = [[{}], more_gpus, [FEWER_BYTES], fewer_bytes_too]
    fitting: list[Mapping[str, Any]] = []
    for family in families:
        candidates = [{**PASSES, **knobs} for knobs in family]
        fitting += [drop_unneeded_passes(knobs, fits) for knobs in candidates if fits(knobs)][:1]
        if fitting and (family == [{}] or len(fitting) == 2):
            break
    return fitting


def overrides(knobs: Mapping[str, Any], prefix: str = "") -> str:
    return " ".join(f"{prefix}sft.{key}={str(value).lower()}" for key, value in knobs.items())


def drop_unneeded_passes(knobs: Mapping[str, Any], fits: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """The knobs without those of PASSES that are not needed to fit."""
    for key in PASSES:
        fewer = {name: value for name, value in knobs.items() if name != key}
        knobs = fewer if fits(fewer) else knobs
    return knobs


def with_knobs(sft: Sft, knobs: Mapping[str, Any]) -> Sft:
    """The recipe with these knobs; adapters keep their optimizer. Raises PipelineError for an impossible batch size."""
    applied = {key: value for key, value in knobs.items() if key != "optimizer" or sft.adapter == "none"}
    recipe = replace(sft, **applied)
    micro_batches(recipe)
    return recipe


def refuse_without_room(parameters: int, trained: int, room: int | None, sft: Sft) -> None:
    """Compare what training holds besides activations with `room`, the GPU's memory in bytes, before loading.

    Raises:
        PipelineError: it does not fit; the message names what would.
    """

    def total_bytes(knobs: Mapping[str, Any]) -> float:
        return sum(states(parameters, trained, with_knobs(sft, knobs)).values())

    if room is None or total_bytes({}) <= room:
        return
    fitting = remedies(lambda knobs: is_possible(lambda: total_bytes(knobs) <= room))
    suggestions = [overrides(knobs) for knobs in fitting]
    if sft.adapter == "none" and parameters * WIDTH[sft.weights] <= room:
        suggestions.append("an adapter, sft=lora,")
    raise PipelineError(
        f"sft.weights={sft.weights} with sft.optimizer={sft.optimizer} takes {total_bytes({}) / 1e9:.1f} GB of "
        f"weights, gradients and moments on each GPU, which has {room / 1e9:.1f}: "
        + (f"{' or '.join(suggestions)} would fit" if suggestions else "no variant of it fits, use a larger GPU")
    )


def is_possible(fits: Callable[[], bool]) -> bool:
    """Whether something fits; False where the knobs are invalid."""
    try:
        return fits()
    except PipelineError:
        return False
