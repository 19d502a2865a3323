"""The base, the split of its layers, the training methods, and their recipes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.knob import Knobs, knob
from pipeline.errors import PipelineError

ATTENTIONS = (
    "sdpa",
    "eager",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
ATTENTION = rf"{'|'.join(ATTENTIONS)}|kernels-community/[\w.-]+@[0-9a-f]{{40}}"


@dataclass
class Model(Knobs):
    """The base. `path` is a RUN, a folder, hub:org/name, or package:folder for the shipped base."""

    name: str = knob(hashed=False)
    path: str | None = knob(
        None, run=True
    )  # the model that is trained: a finished run, a folder, hub:org/name
    # revision of a model on the Hub; null: as locked by stage=prefetch, the newest until then
    revision: str | None = knob(
        None, read=(lambda model: str(model.path).startswith("hub:"), "model=hub:org/name")
    )
    licence: str = knob(
        "", hashed=False
    )  # as spelled on the Hub, for the card of an export; empty: unknown
    init: str = knob("pretrained", options=("pretrained", "random"))
    # init=random: fields of transformers' config, with model_type among them
    architecture: dict[str, Any] = knob(
        {}, read=(lambda model: model.init == "random", "model.init=random")
    )
    # own: next to the weights; data_root: data_root/tokenizer
    tokenizer: str = knob("own", options=("own", "bpe", "data_root"))
    # tokenizer=bpe: number of pieces, including the 256 bytes
    vocab_size: int = knob(
        4096, ge=257, read=(lambda model: model.tokenizer == "bpe", "model.tokenizer=bpe")
    )
    # transformers' name of an implementation, or a kernel of the Hub's kernels-community at a
    # commit
    attn_implementation: str = knob(
        "sdpa", form=(ATTENTION, f"{', '.join(ATTENTIONS)} or kernels-community/NAME@COMMIT")
    )


@dataclass
class Partition(Knobs):
    """A split of the transformer layers into a language and a math side.

    The first `bottom_layers` and the last `top_layers` are language, the rest math. `all_attention`
    (A) or `all_mlp` assigns that part of every layer to language too; `inverse` exchanges the sides
    (Z). `outside` is the side of embeddings, final norm and head; frozen: they are not trained.
    """

    name: str = knob(hashed=False)
    bottom_layers: int = knob(ge=0)
    top_layers: int = knob(ge=0)
    all_attention: bool = False  # attention of every layer is language
    all_mlp: bool = False  # the MLP of every layer is language
    inverse: bool = False  # exchange the two sides
    outside: str = knob("frozen", options=("frozen", "math", "language"))
    scale_to_depth: bool = False  # the counts are for 32 layers: max(1, floor(count x layers / 32))


# Attention and MLP of models of Llama's shape. Naming them all is the default there.
LLAMA_MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WITH_ADAPTER = (
    lambda sft: sft.adapter == "lora",
    "sft=lora, partial_lora, mixed_lora or simultaneous_lora",
)


def default_rate(adapter: str) -> float:
    """Return the learning rate that a recipe leaves open.

    For adapters it is the rate of unreasonable_lora. Otherwise it is our choice.
    """
    if adapter == "lora":
        return 6e-5
    return 1e-6


@dataclass
class Sft(Knobs):
    """A training method and its recipe.

    Batch sizes are sequences per optimizer step; lengths are tokens. Settings that only some
    training methods read are hashed only for these methods.
    """

    name: str = knob(hashed=False)
    method: str = knob("full", options=("full", "partial", "mixed", "simultaneous"))
    adapter: str = knob("none", options=("none", "lora"))
    # partial: the trained side; null: the expert's side
    side: str | None = knob(None, options=("math", "language"))
    # simultaneous: optimizer steps on one side before it is the other's turn
    steps_per_switch: int = knob(
        1, ge=1, read=(lambda sft: sft.method == "simultaneous", "sft=simultaneous")
    )
    # null: 1e-6, and 6e-5 for adapters (unreasonable_lora), which barely change at rates of full
    # training
    learning_rate: float | None = knob(1e-5, gt=0)
    batch_size: int = knob(32, ge=1)  # over all processes and accumulated micro-batches
    # per process and forward pass; null: the largest divisor of batch_size / processes up to 4
    micro_batch_size: int | None = knob(None, ge=1)
    processes: int = knob(1, ge=1)  # one per GPU
    # if processes > 1: each has a whole copy (ddp), or a shard (fsdp2)
    parallel: str = knob("ddp", options=("ddp", "fsdp2"), hashed=lambda sft: sft.processes > 1)
    seq_length: int = knob(1024, ge=8)
    packing: bool = False  # cpt: concatenate plain text and cut it into rows of seq_length tokens
    epochs: int = knob(1, ge=1)  # passes over the training set
    steps: int | None = knob(
        None, ge=1
    )  # optimizer steps, counting both sides; null: all full batches of the passes
    optimizer: str = knob("adamw", options=("adamw", "adamw_8bit"))
    schedule: str = knob("linear", options=("linear", "wsd", "constant"))  # after the warm-up
    warmup_steps: int = knob(0, ge=0)  # optimizer steps
    # wsd: the share of steps that decays, linearly
    decay_share: float = knob(
        0.1, ge=0, le=1, read=(lambda sft: sft.schedule == "wsd", "sft.schedule=wsd")
    )
    weight_decay: float = knob(0.1, ge=0)
    adam_beta1: float = knob(0.9, ge=0, lt=1)
    adam_beta2: float = knob(0.99, ge=0, lt=1)
    max_grad_norm: float = knob(1.0, gt=0)
    shuffle: bool = True  # false: keep the order of the data run
    # response: the last turn of a conversation; assistant_turns: all of the assistant's, needs
    # sft.template=chat
    loss_on: str = knob("response", options=("response", "assistant_turns", "all"))
    template: str = knob("plain", options=("plain", "chat"))  # plain: prompt, separator, completion
    # further variables of the chat template: {enable_thinking: false} of Qwen 3 and SmolLM3
    chat_template_args: dict[str, Any] = knob(
        {}, read=(lambda sft: sft.template == "chat", "sft.template=chat")
    )
    # the date for chat templates that print today's date
    template_date: str = knob(
        "2024-07-26", read=(lambda sft: sft.template == "chat", "sft.template=chat")
    )
    # between prompt and completion with sft.template=plain; null: empty for your own prompts
    # (rows=template, pairs), a line feed for the shipped sets
    separator: str | None = knob(
        None,
        hashed=lambda sft: sft.template == "plain" and sft.separator != "\n",
        read=(lambda sft: sft.template == "plain", "sft.template=plain"),
    )
    # the token that ends a response, saved with the model; null: the tokenizer's own
    eos_token: str | None = None
    # bf16: matrix products by autocast; tf32: fp32's products in TF32, on GPUs from the A100 on
    precision: str = knob("fp32", options=("fp32", "bf16", "tf32"))
    weights: str = knob(
        "float32", options=("float32", "bfloat16")
    )  # dtype of weights and gradients
    gradient_checkpointing: bool = (
        False  # compute activations twice: less memory, a third more time
    )
    compile: bool = False  # torch.compile
    liger: bool = False  # Liger's kernels for norms, rotary embeddings and MLPs; needs a GPU
    save_dtype: str | None = knob(None, options=("float32", "bfloat16"))  # null: as trained
    lora_rank: int = knob(64, ge=1, read=WITH_ADAPTER)
    lora_alpha: float = knob(
        16.0, gt=0, read=WITH_ADAPTER
    )  # adapters are scaled by alpha / sqrt(rank)
    lora_dropout: float = knob(0.0, ge=0, lt=1, read=WITH_ADAPTER)
    # names of matrices in the layers; null: every matrix of attention and MLP, and the matrices of
    # recurrent mixers that have the same names
    lora_targets: list[str] | None = knob(
        None,
        hashed=lambda sft: sft.adapter == "lora" and sft.lora_targets != LLAMA_MATRICES,
        read=WITH_ADAPTER,
    )
    validate_at_start: bool = False  # also measure the validation loss before the first step
    snapshot_every: int | None = knob(
        None, ge=1
    )  # keep a snapshot after every N training rows, rounded up to a step
    # keep only the last N snapshots; null: all
    snapshot_keep: int | None = knob(
        None, ge=1, read=(lambda sft: sft.snapshot_every is not None, "sft.snapshot_every=N")
    )
    # maximum between two resume points; null: write one only when stopped
    resume_minutes: float | None = knob(30.0, ge=0, hashed=False)
    stall_minutes: float | None = knob(
        30.0, gt=0, hashed=False
    )  # fail after this time without a step; null: no limit

    @property
    def adapter_rank(self) -> int:
        """Return the rank of the adapters, or 0 without adapters."""
        if self.adapter == "lora":
            return self.lora_rank
        return 0


def refuse_unknown_targets(targets: Sequence[str], matrices: Collection[str]) -> None:
    """Check that sft.lora_targets are among the matrices of a model's layers.

    Raises:
        PipelineError: an entry matches no matrix.
    """
    unknown = []
    for target in targets:
        if target not in matrices:
            unknown.append(target)
    if unknown:
        raise PipelineError(
            f"sft.lora_targets: {unknown[0]} matches no matrix. Choose from"
            f" {', '.join(sorted({*matrices}))}, or remove sft.lora_targets to train every matrix"
            " of attention and MLP."
        )
