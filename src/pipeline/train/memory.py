"""What a recipe comes to by arithmetic, before anything is loaded: bytes a parameter, micro-batches a step.

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

from pipeline.config.training import Sft
from pipeline.errors import PipelineError

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


def refuse_without_room(needed: int, room: int | None, sft: Sft) -> None:
    """Before anything is moved there: what training holds besides activations against a GPU's memory, both in bytes.

    Raises:
        PipelineError: they do not fit; shards of fsdp2 share them out.
    """
    sharded = sft.parallel == "fsdp2" and sft.processes > 1
    needed = needed // sft.processes if sharded else needed
    if room is not None and needed > room:
        others = " with fsdp2, more sft.processes," if sharded else " sft.parallel=fsdp2 with more sft.processes,"
        raise PipelineError(
            f"sft.weights={sft.weights} with sft.optimizer={sft.optimizer} takes {needed / 1e9:.1f} GB of weights, "
            f"gradients and moments, and the GPU has {room / 1e9:.1f}: choose fewer bytes a parameter, such as "
            f"sft.weights=bfloat16 sft.optimizer=adamw_8bit,{others} or an adapter"
        )


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
