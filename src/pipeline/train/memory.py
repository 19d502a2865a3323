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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from typing import Any

from pipeline.config.training import Partition, Sft
from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site
from pipeline.models.partition import side_of
from pipeline.models.shape import Shape

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
BYTES = {  # (weights, optimizer) -> bytes per trained parameter
    ("float32", "adamw"): 16, ("float32", "adamw_8bit"): 10,
    ("bfloat16", "adamw"): 8, ("bfloat16", "adamw_bf16"): 8, ("bfloat16", "adamw_8bit"): 6,
}  # fmt: skip


# Neighbours in bfloat16 are 0.4 to 0.8 % apart: a second moment that changes by less than half of that a step and is
# rounded to nearest, as in adamw_bf16, never falls. Once gradients are a tenth of what they were, weights move 0.98 as
# far as in fp32 at 0.99, and 0.4 at 0.997 (results/bench/precision.json).
MOST_BETA2 = 0.99


LARGEST = 4  # rows of a micro-batch that is left open: on a large model more are not faster, and take memory


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
    share = max(1, sft.batch_size // sft.processes)
    micro = sft.micro_batch_size or max(size for size in range(1, LARGEST + 1) if share % size == 0)
    unit = sft.processes * (sft.micro_batch_size or 1)
    if sft.batch_size % unit:
        parts = {"sft.micro_batch_size": sft.micro_batch_size or 1, "sft.processes": sft.processes}
        divisor = " x ".join(f"{knob}={value}" for knob, value in parts.items() if value > 1)
        below = sft.batch_size // unit * unit
        sizes = " or ".join(str(size) for size in (below, below + unit) if size)
        most = max(count for count in range(1, sft.processes + 1) if sft.batch_size % count == 0)
        other = f"sft.processes={most}" if most < sft.processes else "another sft.micro_batch_size"
        raise PipelineError(
            f"sft.batch_size={sft.batch_size} is not a multiple of {divisor}: give sft.batch_size={sizes}, or {other}"
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


def states(parameters: int, trained: int, sft: Sft, at_once: int | None = None) -> dict[str, float]:
    """Purpose -> bytes on each GPU that training holds besides activations; fsdp2 divides them.

    Args:
        parameters: number in the whole model, without adapters.
        trained: number trained, of both sides together where these take turns; with adapters theirs.
        at_once: the most of these that have gradients in a step, where sides take turns; None: all.
    """
    lora = sft.adapter == "lora"
    width = 4 if lora else WIDTH[sft.weights]
    shards = sft.processes if sft.parallel == "fsdp2" else 1
    weight_bytes = parameters * WIDTH[sft.weights] + (trained * 4 if lora else 0)
    moments = trained * (bytes_per_parameter(sft) - 2 * width)
    gradients = (trained if at_once is None else at_once) * width
    return {"weights": weight_bytes / shards, "gradients": gradients / shards, "moments": moments / shards}


def layer_bytes(shape: Shape, weights: str) -> int:
    """Bytes a token that the backward pass needs of one layer, tensor by tensor in transformers' layers with products
    in bf16 (tests compare with what autograd saves).

    Two norms keep their input and its normalised form; six inputs of products and the attention's output are kept in
    bf16; keys and values, a number per head, four of the MLP's width.
    """
    of_width = 30 if weights == "float32" else 20
    return of_width * shape.width + 4 * shape.kv_heads * shape.head_width + 8 * shape.inner + 4 * shape.heads + 8


@dataclass(frozen=True)
class Moment:
    """Bytes that exist at a moment besides weights and moments: gradients; copies of weights and gradients that are on
    their way; activations."""

    gradients: float
    copies: float
    activations: float


def training_memory(shape: Shape, parts: Sequence[Trained], length: float, sft: Sft) -> dict[str, float]:
    """Purpose -> bytes on each GPU at the worst moment of a step (scripts/bench_shapes.py adds up all tensors instead;
    results/bench/shapes.json).

    Args:
        parts: what is trained; two where sides take turns.
        length: tokens of a row of the longest micro-batch.

    Returns:
        weights, gradients, moments, activations, context, and `gathered` under fsdp2, else `casts`.
    """
    rank = sft.lora_rank if sft.adapter == "lora" else 0
    counts = [trained_parameters(shape, part, rank) for part in parts]
    held = states(shape.parameters, sum(counts), sft, max(counts))
    sharded = sft.parallel == "fsdp2" and sft.processes > 1
    moments = step_moments(shape, parts, sum(counts), length, sft, held["gradients"])
    worst = max(moments, key=lambda moment: moment.gradients + moment.copies + moment.activations)
    copies = {"gathered" if sharded else "casts": worst.copies}
    return {**held, "gradients": worst.gradients, **copies, "activations": worst.activations, "context": 1e9}


def step_moments(
    shape: Shape, parts: Sequence[Trained], trained: int, length: float, sft: Sft, gradients: float
) -> list[Moment]:
    """The loss, the highest layer, the lowest, and the embeddings, in the order of the backward pass.

    Gradients exist from the first pass on where a step has several, else they appear as activations go. Checkpointing
    keeps the input of each layer, and one layer in full. Autocast copies fp32 weights to bf16, trained ones until the
    forward pass ends, of a layer while it is computed. The loss holds a tile of logits (4,096 tokens x 32,768 words),
    and the head's gradient in fp32 besides its cast. fsdp2 gathers in the dtype that it computes in: a layer, the next
    one, and the head, which under adapters comes whole in its own dtype; it reduces gradients in fp32. The gradient of
    tied embeddings waits for the whole backward pass, and is then added to that of the input.
    """
    micro, passes = micro_batches(sft)
    tokens, residual, width = micro * length, WIDTH[sft.weights], WIDTH[sft.weights]
    lora, whole = sft.adapter == "lora", any(part.outside for part in parts) and sft.adapter == "none"
    autocast = sft.weights == "float32" and sft.precision == "bf16"
    early = gradients if passes > 1 else 0.0
    embedding, layer = shape.embedding, (shape.parameters - shape.outside) / shape.layers
    matrix = 0 if lora else shape.width * shape.inner  # whose gradient is computed while the rest of its layer waits

    kept = layer_bytes(shape, sft.weights)
    inputs = shape.layers * (residual * shape.width if sft.gradient_checkpointing else kept)
    one = (kept if sft.gradient_checkpointing else 0) + 4 * shape.inner * (2 if lora else 1)  # with what is on its way
    of_loss = 16 * shape.width * tokens + min(tokens, 4096) * min(shape.vocabulary, 32768) * 2
    lowest = kept + 4 * shape.inner * (2 if lora else 1) + 2 * residual * shape.width

    if sft.parallel == "fsdp2" and sft.processes > 1:
        cast = 2 if sft.precision == "bf16" else width
        waiting = (2 if whole else 1) * cast * embedding if shape.tied else 0  # the head, and its gradient
        reduced = 0 if lora else 4 * layer
        head = (width if lora and not shape.tied else cast) * embedding + cast * layer
        head += (4 + cast) * embedding if whole else 0
        top = 2 * cast * layer + cast * matrix + (waiting or (4 * embedding if whole else 0))
        low = cast * layer + cast * max(layer, embedding if whole else 0) + reduced + cast * matrix + waiting
        end = (4 * cast * embedding + reduced if shape.tied else (cast + 4) * embedding) if whole else 0
    else:
        head = (4 + (width if width < 4 else 0)) * embedding if whole else 0
        casts = 0 if lora or not autocast else 2 * trained
        head = max(head, casts) if sft.gradient_checkpointing else head + (2 * shape.layers * layer if autocast else 0)
        top = low = (2 * layer if autocast else 0) + width * matrix
        top += 2 * shape.layers * layer if autocast and not sft.gradient_checkpointing else 0
        waiting = width * embedding if whole and shape.tied else 0
        top, low, end = top + waiting, low + waiting, 2 * waiting + (width * embedding if whole else 0)
    return [
        Moment(early, head, inputs * tokens + of_loss),
        Moment(early, top, (inputs + one) * tokens),
        Moment(gradients, low, lowest * tokens),
        Moment(gradients, end, 0),
    ]


# ---------------------------------------------------------------------------------------------------- remedies

CHECKPOINTING, ONE_ROW = {"gradient_checkpointing": True}, {"micro_batch_size": 1}
PASSES: tuple[dict[str, Any], ...] = ({}, CHECKPOINTING, ONE_ROW, {**ONE_ROW, **CHECKPOINTING})
SHARDS: list[dict[str, Any]] = [{"parallel": "fsdp2", "processes": count} for count in (2, 4, 8)]
FEWER_BYTES = {"weights": "bfloat16", "optimizer": "adamw_8bit"}  # of a weight, its gradient and moments: 6
FAMILIES: list[list[dict[str, Any]]] = [[{}], SHARDS, [FEWER_BYTES], [{**FEWER_BYTES, **knobs} for knobs in SHARDS]]


def remedies(fits: Callable[[Mapping[str, Any]], bool]) -> list[Mapping[str, Any]]:
    """Knobs of sft that make a training fit, tried in the order of how much they change: smaller passes, else two of
    more GPUs, fewer bytes per parameter, or both. `fits`: whether the training fits with given knobs."""
    fitting: list[Mapping[str, Any]] = []
    for family in FAMILIES:
        tries = ({**passes, **knobs} for knobs in family for passes in PASSES)
        fitting += islice(filter(fits, tries), 1)
        if family is FAMILIES[0] and fitting:
            break
    return fitting[:2]


def overrides(knobs: Mapping[str, Any], prefix: str = "") -> str:
    return " ".join(f"{prefix}sft.{key}={str(value).lower()}" for key, value in knobs.items())


def with_knobs(sft: Sft, knobs: Mapping[str, Any]) -> Sft:
    """The recipe with these knobs; adapters keep their optimizer. Raises PipelineError for an impossible batch size."""
    applied = {key: value for key, value in knobs.items() if key != "optimizer" or sft.adapter == "none"}
    recipe = replace(sft, **applied)
    micro_batches(recipe)
    return recipe


def refuse_without_room(parameters: int, trained: int, room: int | None, sft: Sft, at_once: int | None = None) -> None:
    """Compare what training holds besides activations with `room`, the GPU's memory in bytes, before loading; the other
    arguments as in `states`.

    Raises:
        PipelineError: it does not fit; the message names what would.
    """

    def total_bytes(knobs: Mapping[str, Any]) -> float:
        return sum(states(parameters, trained, with_knobs(sft, knobs), at_once).values())

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
