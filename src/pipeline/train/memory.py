"""Memory and micro-batches of a recipe, computed before a model is loaded.

Plans reject recipes that do not fit by these formulas, before anything is fetched.

A trained parameter needs 16 bytes in float32 and 8 in bfloat16 for weight, gradient and two
moments. With sft.optimizer=adamw_8bit it needs 10 and 6, and its moments carry a scale per block of
256, 1.6 % more (docs/reference/training.md). Accumulating gradients over micro-batches adds no
memory: the gradient exists once, under ddp as a view of its buckets, under fsdp2 as a shard that is
reduced after each micro-batch. LoRA stores the base's weights (2 bytes, and 4 for the output head
if sft.weights=float32). Its adapters stay float32 and need 16 bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pipeline.config.stages import TrainStage
from pipeline.config.training import Partition, Sft
from pipeline.errors import PipelineError
from pipeline.models.anatomy import Site
from pipeline.models.partition import side_of
from pipeline.models.shape import Shape
from pipeline.train.steps import SIDES

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
# Default limit of a micro-batch's rows: on a large model more rows only take more memory
LARGEST = 4
WIDER = 1.6  # ratio of activations with products in fp32 to activations with products in bf16
CONTEXT = 1e9  # bytes of CUDA's context on a GPU
LIBRARIES = 0.7e9  # bytes of Python, torch and transformers on a CPU

# The trained sites: attention, MLP and shared norm of each layer, and OUTSIDE
Trained = frozenset[Site]
OUTSIDE = Site(None, "embedding")  # embeddings, final norm and head


def trained_width(sft: Sft) -> int:
    """Return the bytes of a trained weight or its gradient. Adapters stay float32."""
    if sft.adapter == "lora":
        return 4
    return WIDTH[sft.weights]


def moment_bytes(sft: Sft) -> int:
    """Return the bytes of the two moments of a trained weight."""
    if sft.optimizer == "adamw_8bit":
        return 2
    return 2 * trained_width(sft)


def refuse_without_torchao(sft: Sft) -> None:
    """Raise PipelineError if the optimizer needs torchao, which is not installed."""
    if sft.optimizer == "adamw_8bit" and not find_spec("torchao"):
        raise PipelineError(
            "sft.optimizer=adamw_8bit needs torchao. Run pip install"
            " 'cross-lingual-merging[memory]'."
        )


def micro_batches(sft: Sft) -> tuple[int, int]:
    """Return the sequences per process and pass, and the passes per step.

    Raises:
        PipelineError: sft.batch_size cannot be divided.
    """
    requested = sft.micro_batch_size or 1
    unit = sft.processes * requested
    if sft.batch_size % unit:
        next_multiple = -(-sft.batch_size // unit) * unit
        raise PipelineError(
            f"sft.batch_size={sft.batch_size} is not a multiple of sft.micro_batch_size={requested}"
            f" x sft.processes={sft.processes}. Give sft.batch_size={next_multiple}, or lower the"
            " other two."
        )
    share = sft.batch_size // sft.processes
    micro = sft.micro_batch_size
    if not micro:
        micro = max(size for size in range(1, LARGEST + 1) if share % size == 0)
    return micro, share // micro


def full_model(shape: Shape) -> Trained:
    """Return all layers, embeddings and head."""
    kinds = ["attention", "mlp"]
    if shape.norms == 1:
        kinds.append("shared_norm")
    sites = {OUTSIDE}
    for layer in range(shape.layers):
        sites |= {Site(layer, kind) for kind in kinds}
    return frozenset(sites)


def one_side(shape: Shape, partition: Partition, side: str) -> Trained:
    """Return a side of a partition, by the predicate that freezing and swapping use."""
    sites = full_model(shape)
    return frozenset(site for site in sites if side_of(partition, site, shape.layers) == side)


def trained_parameters(shape: Shape, trained: Trained, lora_rank: int = 0) -> int:
    """Count the trained parameters with norms and biases.

    With lora_rank, count the parameters of adapters on all seven matrices.
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
    """Return LoRA's parameters of a layer's attention and MLP.

    They are rank x (inputs + outputs) of each matrix (Hu et al. 2022).
    """
    queries, keys = shape.head_width * shape.heads, shape.head_width * shape.kv_heads
    attention = 2 * (shape.width + queries) + 2 * (shape.width + keys)
    return {"attention": rank * attention, "mlp": rank * 3 * (shape.width + shape.inner)}


def frozen_matrices(shape: Shape, parts: Collection[Trained]) -> int:
    """Count the weights of the layers' matrices that no part trains."""
    sizes = {"attention": shape.attention, "mlp": shape.mlp}
    frozen = full_model(shape).difference(*parts)
    return sum(sizes.get(site.kind, 0) for site in frozen)


def layer_bytes(shape: Shape, weights: str) -> int:
    """Return the bytes per token that one layer keeps for the backward pass.

    The sum is over the tensors of transformers' layers with products in bf16. Tests compare it with
    the tensors that autograd saves. Two norms keep their input and its normalised form. Six inputs
    of products and the attention's output are kept in bf16. Further tensors are keys and values, a
    number per head, and four of the MLP's width.
    """
    of_width = 30 if weights == "float32" else 20
    keys_and_values = 4 * shape.kv_heads * shape.head_width
    heads = 4 * shape.heads + 8
    return of_width * shape.width + keys_and_values + 8 * shape.inner + heads


def is_sharded(sft: Sft) -> bool:
    return sft.parallel == "fsdp2" and sft.processes > 1


def trained_parts(config: TrainStage, shape: Shape) -> dict[str, Trained]:
    """Return the sites that the rows of each side train.

    Only simultaneous training has two sides.
    """
    sft, expert, partition = config.sft, config.expert, config.partition
    if partition is None:
        return {expert.side: full_model(shape)}
    if sft.method == "partial":
        return {expert.side: one_side(shape, partition, sft.side or expert.side)}
    return {side: one_side(shape, partition, side) for side in SIDES}


class Moment(NamedTuple):
    """The bytes of a process that differ between the moments of a training step."""

    gradients: float
    copies: float
    activations: float


class Copies(NamedTuple):
    """The bytes of copies of weights: casts, or gathered shards.

    Attributes:
        at_loss: the copies while the loss is computed.
        in_layers: the copies in the backward pass of a layer.
    """

    at_loss: float
    in_layers: float


class Activations(NamedTuple):
    """The bytes of activations at three moments of a step."""

    at_loss: float
    at_highest_layer: float
    at_end: float


def training_memory(
    shape: Shape,
    parts: Collection[Trained],
    length: float,
    sft: Sft,
    on_gpu: bool = True,
) -> dict[str, float]:
    """Return the bytes of a process by purpose, at the worst moment of a step.

    The sum is within a tenth of the sum of all tensors (tests/train/shapes_on_fake_tensors.py,
    results/bench/shapes.json). The moments are the loss, the highest layer of the backward pass,
    and its end. If a step has several passes, gradients exist from the first pass on. Otherwise
    they are allocated while activations are freed. If sides take turns, only one side has
    gradients.

    Args:
        shape: the model.
        parts: the trained parameters; two parts if sides take turns.
        length: tokens of a row of the longest micro-batch; 0 for the memory that any row needs.
        sft: the recipe.
        on_gpu: False on a CPU.
    """
    micro, passes = micro_batches(sft)
    sharded = is_sharded(sft)
    shards = sft.processes if sharded else 1
    counts = [trained_parameters(shape, part, sft.adapter_rank) for part in parts]
    trained = sum(counts)
    gradients = max(counts) * trained_width(sft) / shards
    early_gradients = gradients if passes > 1 else 0.0
    narrow = narrow_weights(shape, parts, sft)
    copies = weight_copies(shape, parts, sft, trained, narrow)
    activations = activation_bytes(shape, sft, micro * length, on_gpu)
    moments = [
        Moment(early_gradients, copies.at_loss, activations.at_loss),
        Moment(early_gradients, copies.in_layers, activations.at_highest_layer),
        Moment(gradients, copies.in_layers, activations.at_end),
    ]
    worst = max(moments, key=sum)
    return {
        "weights": weight_bytes(shape, sft, trained, narrow) / shards,
        "gradients": worst.gradients,
        "moments": trained * moment_bytes(sft) / shards,
        "gathered" if sharded else "casts": worst.copies,
        "activations": worst.activations,
        "context": CONTEXT if on_gpu else LIBRARIES,
    }


def computed_width(sft: Sft) -> int:
    """Return the bytes of a number in the dtype of the products."""
    if sft.precision == "bf16":
        return 2
    return WIDTH[sft.weights]


def narrow_weights(shape: Shape, parts: Collection[Trained], sft: Sft) -> int:
    """Count the frozen weights of matrices in layers that stay in the dtype of the products.

    The base is assumed to be stored in bf16. fsdp2 does not narrow weights.
    """
    if is_sharded(sft):
        return 0
    if sft.adapter == "lora":
        return frozen_matrices(shape, [])
    return frozen_matrices(shape, parts)


def weight_bytes(shape: Shape, sft: Sft, trained: int, narrow: int) -> float:
    """Return the bytes of all weights, before fsdp2 divides them.

    `trained` and `narrow` count parameters (`trained_parameters`, `narrow_weights`). Under
    adapters, embeddings that are not tied are narrow too, and adapters are float32.
    """
    width = WIDTH[sft.weights]
    adapters = 0
    if sft.adapter == "lora":
        adapters = trained
        if not shape.tied and not is_sharded(sft):
            narrow += shape.embedding
    return shape.parameters * width - (width - computed_width(sft)) * narrow + 4 * adapters


def weight_copies(
    shape: Shape,
    parts: Collection[Trained],
    sft: Sft,
    trained: int,
    narrow: int,
) -> Copies:
    """Return the bytes of copies of weights, with the head's gradient.

    `trained` and `narrow` count parameters (`trained_parameters`, `narrow_weights`).

    Autocast copies fp32 weights that are not narrow to bf16: trained weights until the forward pass
    ends, and a layer's other weights while the layer is computed. The gradient of tied embeddings
    waits for the whole backward pass, and is then added to the gradient of the input. fsdp2 gathers
    in the dtype of the products: a layer, the next layer and the head. It reduces gradients in
    fp32.
    """
    lora = sft.adapter == "lora"
    width, cast = WIDTH[sft.weights], computed_width(sft)
    embedding = 0  # trained embeddings
    if not lora and any(OUTSIDE in part for part in parts):
        embedding = shape.embedding
    layer = cast * (shape.parameters - shape.outside) / shape.layers
    at_loss = (4.0 + cast) * embedding
    in_layers = 4.0 * (1 + shape.tied) * embedding
    if is_sharded(sft):
        # under adapters the head is gathered in its stored dtype
        head = width if lora else cast
        at_loss += head * shape.embedding + layer
        largest = cast * max(embedding, shape.embedding * shape.tied)
        in_layers = max(in_layers, (2 + 4 / cast) * layer + largest)
    elif cast < width:
        casts = layer * shape.layers - cast * narrow
        at_loss = max(at_loss, 2 * trained)
        if not sft.gradient_checkpointing:
            at_loss = max(at_loss, casts)
        in_layers = max(in_layers, min(layer, casts))
    return Copies(at_loss, in_layers)


def activation_bytes(shape: Shape, sft: Sft, tokens: float, on_gpu: bool) -> Activations:
    """Return the bytes of the activations of so many tokens.

    Checkpointing keeps the input of each layer, and one layer in full. The loss needs a tile of
    logits (4,096 tokens x 32,768 words) and the head's gradient in fp32 in addition to its cast. On
    a CPU it needs all logits.
    """
    width = WIDTH[sft.weights]
    saved = layer_bytes(shape, sft.weights)
    if sft.adapter == "lora":  # frozen norms do not keep their normalised form
        saved -= 2 * width * shape.width
    wider = WIDER if computed_width(sft) == 4 else 1
    one_layer = (saved + 4 * shape.inner) * wider
    if sft.gradient_checkpointing:
        kept_of_layer: float = width * shape.width
    else:
        kept_of_layer = saved * wider
    inputs = shape.layers * kept_of_layer
    logits: float = 8192 * min(shape.vocabulary, 32768)
    if not on_gpu:
        logits = 4 * tokens * shape.vocabulary
    return Activations(
        at_loss=(inputs + 16 * shape.width) * tokens + logits,
        at_highest_layer=(inputs + one_layer) * tokens,
        at_end=one_layer * tokens,
    )


@lru_cache(maxsize=1)
def has_bf16() -> bool:
    """Return True if the processor has instructions for products in bfloat16.

    It does not import torch.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16 "))


def emulated(sft: Sft) -> str:
    """Return a warning if this CPU must emulate bfloat16 products, otherwise an empty text."""
    if sft.precision != "bf16" or has_bf16():
        return ""
    return (
        "sft.precision=bf16 is emulated by this CPU and takes 3 to 10 times as long as fp32. Set"
        " sft.precision=fp32."
    )
