"""Memory and micro-batches of a recipe by arithmetic, before anything is loaded: bytes per
parameter and per GPU.

Plans, and commands before they fetch anything, reject by these formulas what does not fit.

Bytes per trained parameter, of weight, gradient and the two moments, are 16 in float32 and 8 in
bfloat16, and 10 and 6 with sft.optimizer=adamw_8bit, whose moments carry a scale per block of 256,
1.6 % more (docs/reference/training.md). Accumulating gradients over micro-batches adds nothing: the
gradient exists once, under ddp as a view of its buckets, under fsdp2 as a shard that is reduced
after each micro-batch. LoRA holds only the base's weights (2 bytes, and 4 of the output head where
sft.weights=float32), and 16 bytes for each of the few parameters of its adapters, which stay
float32.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from pipeline.config.stages import TrainStage
from pipeline.config.training import Partition, Sft
from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site
from pipeline.models.partition import side_of
from pipeline.models.shape import Shape
from pipeline.train.steps import SIDES

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
# rows of a micro-batch that is left open: on a large model more are not faster, and take memory
LARGEST = 4
WIDER = 1.6  # activations of products in fp32 over those in bf16
SPARE = 0.9  # of a card's memory, up to which shards stay gathered: the estimate is within a tenth
CONTEXT, LIBRARIES = (
    1e9,
    0.7e9,
)  # bytes of CUDA's context on a GPU; on a CPU of Python, torch and transformers

Trained = frozenset[
    Site
]  # the halves of layers that are trained, a norm that both share, and what lies outside
OUTSIDE = Site(None, "embedding")  # embeddings, final norm and head


def trained_width(sft: Sft) -> int:
    """Bytes of a trained weight, and of its gradient: adapters stay float32."""
    if sft.adapter == "lora":
        return 4
    return WIDTH[sft.weights]


def moment_bytes(sft: Sft) -> int:
    """Bytes of the two moments of a trained weight."""
    return 2 * (1 if sft.optimizer == "adamw_8bit" else trained_width(sft))


def refuse_without_torchao(sft: Sft) -> None:
    """Raise PipelineError where the optimizer is torchao's, and that is not installed."""
    if sft.optimizer == "adamw_8bit" and not find_spec("torchao"):
        raise PipelineError(
            "sft.optimizer=adamw_8bit needs torchao: pip install 'cross-lingual-merging[memory]'"
        )


def micro_batches(sft: Sft) -> tuple[int, int]:
    """(sequences per process and pass, passes per step).

    Raises PipelineError where sft.batch_size does not divide.
    """
    unit = sft.processes * (sft.micro_batch_size or 1)
    if sft.batch_size % unit:
        raise PipelineError(
            f"sft.batch_size={sft.batch_size} is not a multiple of"
            f" sft.micro_batch_size={sft.micro_batch_size or 1} x sft.processes={sft.processes}:"
            f" give sft.batch_size={-(-sft.batch_size // unit) * unit}, or lower these"
        )
    share = sft.batch_size // sft.processes
    micro = sft.micro_batch_size or max(size for size in range(1, LARGEST + 1) if share % size == 0)
    return micro, share // micro


def full_model(shape: Shape) -> Trained:
    """All layers, embeddings and head."""
    kinds = ("attention", "mlp", "shared_norm")[: 3 if shape.norms == 1 else 2]
    return frozenset(
        {OUTSIDE, *(Site(layer, kind) for layer in range(shape.layers) for kind in kinds)}
    )


def one_side(shape: Shape, partition: Partition, side: str) -> Trained:
    """Return the math or language side of a partition, by the predicate that freezing and swapping
    use.
    """
    return frozenset(
        site for site in full_model(shape) if side_of(partition, site, shape.layers) == side
    )


def trained_parameters(shape: Shape, trained: Trained, lora_rank: int = 0) -> int:
    """Count the trained parameters, with norms and biases; with lora_rank those of adapters on all
    seven matrices.
    """
    if lora_rank:
        sizes = adapter_parameters(shape, lora_rank)
    else:
        sizes = {
            "attention": shape.attention + shape.around_attention,
            "mlp": shape.mlp + shape.norms // 2 * shape.width,
            "shared_norm": shape.width,
            OUTSIDE.kind: shape.outside,
        }
    return sum(sizes.get(site.kind, 0) for site in trained)


def adapter_parameters(shape: Shape, rank: int) -> dict[str, int]:
    """LoRA's parameters of a layer's attention and MLP: rank x (inputs + outputs) of each matrix
    (Hu et al. 2022).
    """
    queries, keys = shape.head_width * shape.heads, shape.head_width * shape.kv_heads
    attention = 2 * (shape.width + queries) + 2 * (shape.width + keys)
    return {"attention": rank * attention, "mlp": rank * 3 * (shape.width + shape.inner)}


def frozen_matrices(shape: Shape, parts: Collection[Trained]) -> int:
    """Count the weights of the layers' matrices that no part trains."""
    frozen = full_model(shape).difference(*parts)
    return sum(
        {"attention": shape.attention, "mlp": shape.mlp}.get(site.kind, 0) for site in frozen
    )


def layer_bytes(shape: Shape, weights: str) -> int:
    """Bytes a token that the backward pass needs of one layer, tensor by tensor in transformers'
    layers with products in bf16 (tests compare with what autograd saves).

    Two norms keep their input and its normalised form; six inputs of products and the attention's
    output are kept in bf16; keys and values, a number per head, four of the MLP's width.
    """
    of_width = 30 if weights == "float32" else 20
    return (
        of_width * shape.width
        + 4 * shape.kv_heads * shape.head_width
        + 8 * shape.inner
        + 4 * shape.heads
        + 8
    )


def is_sharded(sft: Sft) -> bool:
    return sft.parallel == "fsdp2" and sft.processes > 1


def trained_parts(config: TrainStage, shape: Shape) -> dict[str, Trained]:
    """Side of the rows -> what they move: simultaneous training is two, all else one."""
    sft, expert, partition = config.sft, config.expert, config.partition
    if partition is None:
        return {expert.side: full_model(shape)}
    if sft.method == "partial":
        return {expert.side: one_side(shape, partition, sft.side or expert.side)}
    return {side: one_side(shape, partition, side) for side in SIDES}


def stays_gathered(config: TrainStage, shape: Shape, length: float, card: float) -> bool:
    """Whether weights that a forward pass has gathered stay until the backward pass, which then
    gathers none: where a card of so many bytes holds them. The bits are the same.
    """
    held = training_memory(
        shape, trained_parts(config, shape).values(), length, config.sft, gathered=True
    )
    return is_sharded(config.sft) and sum(held.values()) <= SPARE * card


def training_memory(
    shape: Shape,
    parts: Collection[Trained],
    length: float,
    sft: Sft,
    on_gpu: bool = True,
    gathered: bool = False,
) -> dict[str, float]:
    """Purpose -> bytes that a process of a training holds at the worst moment of a step, within a
    tenth of the sum of all tensors (tests/train/shapes_on_fake_tensors.py,
    results/bench/shapes.json).

    The moments are the loss, the highest layer of the backward pass, and its end. Gradients exist
    from the first pass on where a step has several, else they appear as activations go; of sides
    that take turns one's. Checkpointing keeps the input of each layer, and one layer in full. The
    loss holds a tile of logits (4,096 tokens x 32,768 words) and the head's gradient in fp32
    besides its cast; on a CPU all logits. Frozen matrices in layers, and under adapters embeddings
    that are not tied, are held in bf16, as a base stored in bf16 allows, but under fsdp2. Autocast
    copies other fp32 weights to bf16, trained ones until the forward pass ends, of a layer while it
    is computed. fsdp2 divides what is held, and gathers in the dtype that it computes in: a layer,
    the next one, and the head, or what stays `gathered`; it reduces gradients in fp32. The gradient
    of tied embeddings waits for the whole backward pass, and is then added to that of the input.

    Args:
        parts: what is trained; two where sides take turns.
        length: tokens of a row of the longest micro-batch; 0 for what is held in any case.
        gathered: all layers from the forward pass on, see `stays_gathered`.
    """
    micro, passes = micro_batches(sft)
    lora, sharded = sft.adapter == "lora", is_sharded(sft)
    shards, width, dtype = sft.processes if sharded else 1, WIDTH[sft.weights], trained_width(sft)
    counts = [trained_parameters(shape, part, sft.adapter_rank) for part in parts]
    gradients, trained, tokens = max(counts) * dtype / shards, sum(counts), micro * length
    cast = 2 if sft.precision == "bf16" else width
    if sharded:
        narrow = 0
    else:
        narrow = frozen_matrices(shape, [] if lora else parts)
    looked_up = shape.embedding * (lora and not shape.tied and not sharded)
    layer = cast * (shape.parameters - shape.outside) / shape.layers
    if lora or not any(OUTSIDE in part for part in parts):
        embedding = 0
    else:
        embedding = shape.embedding
    saved = (
        layer_bytes(shape, sft.weights) - 2 * width * shape.width * lora
    )  # of frozen norms no normalised form
    wider = WIDER if cast == 4 else 1
    one = (saved + 4 * shape.inner) * wider  # with what is on its way
    inputs = shape.layers * (width * shape.width if sft.gradient_checkpointing else saved * wider)
    top, low = (4.0 + cast) * embedding, 4.0 * (1 + shape.tied) * embedding  # copies
    if sharded:
        top += (
            width if lora else cast
        ) * shape.embedding + layer  # under adapters the head comes in its own dtype
        low = max(low, (2 + 4 / cast) * layer + cast * max(embedding, shape.embedding * shape.tied))
    elif cast < width:
        casts = layer * shape.layers - cast * narrow
        top = max(top, 2 * trained, 0 if sft.gradient_checkpointing else casts)
        low = max(low, min(layer, casts))
    tile = 8192 * min(shape.vocabulary, 32768) if on_gpu else 4 * tokens * shape.vocabulary
    early = gradients if passes > 1 else 0.0
    # besides the head and a layer
    others = 0.0
    if gathered:
        others = cast * (shape.parameters - shape.embedding) - layer
    moments = [
        (early, top + others, (inputs + 16 * shape.width) * tokens + tile),
        (early, low + others, (inputs + one) * tokens),
        (gradients, low, one * tokens),
    ]
    gradients, copies, activations = max(moments, key=sum)
    return {
        "weights": (
            (shape.parameters * width - (width - cast) * (narrow + looked_up) + 4 * lora * trained)
            / shards
        ),
        "gradients": gradients,
        "moments": trained * moment_bytes(sft) / shards,
        "gathered" if sharded else "casts": copies,
        "activations": activations,
        "context": CONTEXT if on_gpu else LIBRARIES,
    }


@lru_cache(maxsize=1)
def has_bf16() -> bool:
    """Whether the processor has instructions for products in bfloat16, without importing torch."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16 "))


def emulated(sft: Sft) -> str:
    """Return what to do about bfloat16 products that this CPU has no instructions for, or ""."""
    if sft.precision != "bf16" or has_bf16():
        return ""
    return (
        "sft.precision=bf16 is emulated by this CPU and takes 3 to 10 times as long as fp32: give"
        " sft.precision=fp32"
    )
