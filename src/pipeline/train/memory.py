"""What a recipe comes to by arithmetic, before anything is loaded: bytes a parameter, on a GPU, micro-batches a step.

A plan and the training itself refuse by these formulas what does not fit.

Bytes a trained parameter, of weight, gradient and the two moments:

| sft.weights | sft.optimizer | bytes | rounding of an update |
|---|---|---|---|
| float32 | adamw (the default) | 4 + 4 + 4 + 4 = 16 | fp32 |
| float32 | adamw_8bit | 4 + 4 + 1 + 1 = 10 | fp32 |
| bfloat16 | adamw | 2 + 2 + 2 + 2 = 8 | to nearest: below a learning rate of about 1e-5 most are lost |
| bfloat16 | adamw_bf16 | 2 + 2 + 2 + 2 = 8 | stochastic: right in the mean |
| bfloat16 | adamw_8bit | 2 + 2 + 1 + 1 = 6 | stochastic: right in the mean |

adamw_bf16 and adamw_8bit are torchao's (extra `memory`); eight-bit moments carry a scale a block of 256, 1.6 % more.
Accumulating gradients over micro-batches adds nothing: the gradient is there once. LoRA holds the base's weights alone
(4 or 2 bytes), and 16 bytes for each of the few parameters of its adapters, which stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.training import Partition, Sft
from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site
from pipeline.models.partition import side_of
from pipeline.models.shape import Shape

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
BYTES = {  # (weights, optimizer) -> bytes a trained parameter
    ("float32", "adamw"): 16, ("float32", "muon_adamw"): 12, ("float32", "adamw_8bit"): 10,
    ("bfloat16", "adamw"): 8, ("bfloat16", "adamw_bf16"): 8, ("bfloat16", "adamw_8bit"): 6,
}  # fmt: skip


# Neighbours in bfloat16 are 0.4 to 0.8 % apart: a second moment that changes by less than half of that a step and is
# rounded to nearest, as in adamw_bf16, never falls. Once gradients are a tenth of what they were, weights move 0.98 as
# far as in fp32 at 0.99, and 0.4 at 0.997 (results/bench/precision.json).
MOST_BETA2 = 0.99


def bytes_per_parameter(sft: Sft) -> int:
    """Of a trained parameter: weight, gradient and moments. Raises PipelineError for a pair that has no meaning."""
    weights = "float32" if sft.adapter == "lora" else sft.weights  # adapters stay float32
    if (weights, sft.optimizer) not in BYTES:
        pairs = ", ".join(f"{one} with {other}" for one, other in BYTES)
        raise PipelineError(f"sft.weights={weights} with sft.optimizer={sft.optimizer} is no choice: there are {pairs}")
    return BYTES[weights, sft.optimizer]


def rounds_stochastically(sft: Sft) -> bool:
    """Whether an update too small for bfloat16 is kept in the mean and not lost."""
    return sft.weights == "bfloat16" and sft.adapter == "none" and sft.optimizer in ("adamw_bf16", "adamw_8bit")


def micro_batches(sft: Sft) -> tuple[int, int]:
    """(sequences a process and pass, passes a step). PipelineError where they do not make up sft.batch_size."""
    micro = sft.micro_batch_size or max(1, sft.batch_size // sft.processes)
    if sft.batch_size % (micro * sft.processes):
        by, other = f"sft.micro_batch_size={micro}", "sft.micro_batch_size"
        if sft.batch_size % sft.processes:  # whatever the micro-batch, which a default may have given
            by, other = f"sft.processes={sft.processes}", "sft.processes"
        elif sft.processes > 1:
            by += f" x sft.processes={sft.processes}"
        unit = sft.processes * (sft.micro_batch_size or 1)
        below = sft.batch_size // unit * unit
        sizes = " or ".join(str(size) for size in (below, below + unit) if size)
        raise PipelineError(
            f"sft.batch_size={sft.batch_size} is no multiple of {by}: give sft.batch_size={sizes}, or another {other}"
        )
    return micro, sft.batch_size // (micro * sft.processes)


# ---------------------------------------------------------------------------------------------------- what is trained


@dataclass(frozen=True)
class Trained:
    """What moves in a step: the layers whose attention, and whose MLP, is trained; and what lies outside of layers."""

    attention: frozenset[int]
    mlp: frozenset[int]
    outside: bool = False


def everything(shape: Shape) -> Trained:
    layers = frozenset(range(shape.layers))
    return Trained(layers, layers, outside=True)


def one_side(shape: Shape, partition: Partition, side: str) -> Trained:
    """The math or language side of a partition, by the predicate that freezes and swaps."""

    def layers(kind: str) -> frozenset[int]:
        return frozenset(
            layer for layer in range(shape.layers) if side_of(partition, Site(layer, kind), shape.layers) == side
        )

    return Trained(
        layers("attention"), layers("mlp"), side_of(partition, Site(None, "embedding"), shape.layers) == side
    )


def trained_parameters(shape: Shape, trained: Trained, lora_rank: int = 0) -> int:
    """Of a side, with its norms and biases; of adapters of this rank on all seven matrices, theirs alone."""
    if lora_rank:
        a, m = adapters(shape, lora_rank)
        return len(trained.attention) * a + len(trained.mlp) * m
    of_attention = shape.attention + shape.around_attention
    of_mlp = shape.mlp + shape.norms // 2 * shape.width
    shared = shape.width * len(trained.attention & trained.mlp) if shape.norms == 1 else 0
    layers = len(trained.attention) * of_attention + len(trained.mlp) * of_mlp + shared
    return layers + (shape.outside if trained.outside else 0)


def adapters(shape: Shape, rank: int) -> tuple[int, int]:
    """LoRA's parameters on a layer's (attention, MLP): rank x (inputs + outputs) of each matrix (Hu et al. 2022)."""
    queries, keys = shape.head_width * shape.heads, shape.head_width * shape.kv_heads
    attention = 2 * (shape.width + queries) + 2 * (shape.width + keys)
    return rank * attention, rank * 3 * (shape.width + shape.inner)


# ---------------------------------------------------------------------------------------------------- on a GPU


def states(parameters: int, trained: int, sft: Sft) -> dict[str, float]:
    """What training holds besides activations, what for -> bytes on each GPU; fsdp2 shares it out.

    Args:
        parameters: of the whole model, without adapters.
        trained: of what is trained, of both sides together where these take turns; of adapters theirs.
    """
    lora = sft.adapter == "lora"
    width = 4 if lora else WIDTH[sft.weights]
    shards = sft.processes if sft.parallel == "fsdp2" else 1
    held = parameters * WIDTH[sft.weights] + (trained * 4 if lora else 0)
    moments = trained * (bytes_per_parameter(sft) - 2 * width)
    return {"weights": held / shards, "gradients": trained * width / shards, "moments": moments / shards}


def activation_bytes(shape: Shape, tokens: float, weights: str = "float32", checkpointing: bool = True) -> float:
    """What the backward pass needs of `tokens` tokens of a micro-batch, tensor by tensor in transformers' layers with
    products in bf16 (tests compare with what autograd saves).

    A layer, a token: two norms keep their input and its normalised form, six inputs of products and the attention's
    output are kept in bf16, keys and values, a number a head, four of the MLP's width. Checkpointing keeps the input of
    each layer, and one layer in full. The fused loss holds one tile of logits (4,096 tokens x 16,384 words, fp32).
    """
    residual = WIDTH[weights]
    of_width = 30 if weights == "float32" else 20
    keys = 2 * 2 * shape.kv_heads * shape.head_width
    layer = of_width * shape.width + keys + 8 * shape.inner + 4 * shape.heads + 8
    kept = shape.layers * residual * shape.width + layer if checkpointing else shape.layers * layer
    return tokens * kept + min(tokens, 4096) * min(shape.vocabulary, 16384) * 4


def training_memory(shape: Shape, trained: int, length: float, sft: Sft) -> dict[str, float]:
    """What for -> bytes on each GPU; `trained` as of `states`, `length`: tokens of a row of the longest micro-batch.

    Casts: the bf16 copies that autocast makes of fp32 weights and keeps until the forward pass ends, of trained ones,
    or without checkpointing until the backward pass has used them, of all. Gradients take their place unless they are
    there already, accumulated over micro-batches. fsdp2 shares out what is not activations and casts.
    """
    micro, passes = micro_batches(sft)
    held, checkpointing = states(shape.parameters, trained, sft), sft.gradient_checkpointing
    casts: float = (0 if sft.adapter == "lora" else 2 * trained) if checkpointing else 2 * shape.parameters
    casts = max(0, casts - (0 if passes > 1 else held["gradients"]))
    autocast = sft.weights == "float32" and sft.precision == "bf16"
    activations = activation_bytes(shape, micro * length, sft.weights, checkpointing)
    return {**held, "casts": casts if autocast else 0, "activations": activations, "context": 1e9}


# ---------------------------------------------------------------------------------------------------- what does not fit

PASSES = {"micro_batch_size": 1, "gradient_checkpointing": True}
FEWER_BYTES = {"weights": "bfloat16", "optimizer": "adamw_8bit"}  # of a weight, its gradient and moments: 6


def remedies(fits: Callable[[Mapping[str, Any]], bool]) -> list[Mapping[str, Any]]:
    """What makes a training fit, tried in the order of how much it changes: smaller passes, or else more GPUs, or fewer
    bytes a parameter, or both. `fits`: whether it does with these knobs of sft."""
    more: list[dict[str, Any]] = [{"parallel": "fsdp2", "processes": count} for count in (2, 4, 8)]
    families: list[list[dict[str, Any]]] = [[{}], more, [FEWER_BYTES], [{**FEWER_BYTES, **one} for one in more]]
    found: list[Mapping[str, Any]] = []
    for tried in families:
        asked = [{**PASSES, **one} for one in tried]
        found += [needed(one, fits) for one in asked if fits(one)][:1]
        if found and (tried == [{}] or len(found) == 2):
            break
    return found


def overrides(knobs: Mapping[str, Any], prefix: str = "") -> str:
    return " ".join(f"{prefix}sft.{key}={str(value).lower()}" for key, value in knobs.items())


def needed(asked: Mapping[str, Any], fits: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """These knobs without those of PASSES that it fits without too."""
    for key in PASSES:
        without = {name: value for name, value in asked.items() if name != key}
        asked = without if fits(without) else asked
    return asked


def changed(sft: Sft, knobs: Mapping[str, Any]) -> Sft:
    """A recipe with other knobs; adapters keep their optimizer. PipelineError where they do not make up its batch."""
    kept = {key: value for key, value in knobs.items() if key != "optimizer" or sft.adapter == "none"}
    found = replace(sft, **kept)
    micro_batches(found)
    return found


def refuse_without_room(parameters: int, trained: int, room: int | None, sft: Sft) -> None:
    """Before anything is moved there: what training holds besides activations against a GPU's memory in bytes.

    Raises:
        PipelineError: they do not fit, and what would.
    """

    def held(knobs: Mapping[str, Any]) -> float:
        return sum(states(parameters, trained, changed(sft, knobs)).values())

    if room is None or held({}) <= room:
        return
    found = [overrides(one) for one in remedies(lambda knobs: possible(lambda: held(knobs) <= room))]
    if sft.adapter == "none" and parameters * WIDTH[sft.weights] <= room:
        found.append("an adapter, sft=lora,")
    raise PipelineError(
        f"sft.weights={sft.weights} with sft.optimizer={sft.optimizer} takes {held({}) / 1e9:.1f} GB of weights, "
        f"gradients and moments on each GPU, which has {room / 1e9:.1f}: "
        + (f"{' or '.join(found)} would fit" if found else "nothing of this recipe would fit, take a larger GPU")
    )


def possible(fits: Callable[[], bool]) -> bool:
    """Whether something fits, and has a meaning at all."""
    try:
        return fits()
    except PipelineError:
        return False
