"""Formulas for the seconds that runs take. No model is loaded, so a plan takes no time.

The memory of training is in train/memory.py, the memory of scoring in evaluate/memory.py; their
checks use the same formulas.

FLOPs, bytes and numbers of tokens are derived (see each docstring). The share of a card's data
sheet that is reached is measured if the card has a record, otherwise assumed (conf/cards.yaml). The
time that Python takes to launch a layer (LAUNCH), the share of answers that do not stop, and the
tokens per row (conf/tokens.yaml) are assumed. Loading and saving are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pipeline.benchmarks import benchmark_of
from pipeline.config.training import Sft
from pipeline.evaluate.memory import MOST_ROWS, ROWS, Prompts, rows_that_fit
from pipeline.files import read_yaml, shipped_conf
from pipeline.models.shape import Shape
from pipeline.train.memory import (
    OUTSIDE,
    WIDTH,
    Trained,
    adapter_parameters,
    micro_batches,
    moment_bytes,
    trained_parameters,
    trained_width,
)

# --- cards ---


LINK_SHARE = 0.75  # the share of the rate between cards that collectives reach (assumed)
WHOLE: Mapping[str, Sequence[float]] = dict.fromkeys(("bfloat16", "float32", "bf16x3"), (1.0, 0.0))


@dataclass(frozen=True)
class Gpu:
    """A card with the rates that it reaches (conf/cards.yaml), or threads of a CPU.

    Attributes:
        bf16: FLOP/s of the data sheet in bf16.
        fp32: FLOP/s of the data sheet in fp32.
        bandwidth: Bytes a second of the memory.
        memory: Bytes of the memory.
        link: Bytes a second between cards. 0: exchanges are not counted.
        bf16_share: The share of `bf16` that training reaches.
        lora_share: The share of `bf16` that training with LoRA reaches.
        fp32_share: The share of `fp32` that training reaches.
        bandwidth_share: The share of `bandwidth` that scoring reaches.
        scoring: By products the share of the rate that scoring reaches, and further seconds a layer
            and step.
        records: The files of the measurements of training and of scoring; empty: assumed.
        is_cpu: True for threads of a CPU.
    """

    bf16: float
    fp32: float
    bandwidth: float
    memory: int
    link: float = 0.0
    bf16_share: float = 1.0
    lora_share: float = 1.0
    fp32_share: float = 1.0
    bandwidth_share: float = 1.0
    scoring: Mapping[str, Sequence[float]] = field(default_factory=lambda: WHOLE)
    records: Sequence[str] = ("", "")
    is_cpu: bool = False

    def rate(self, precision: str, lora: bool = False) -> float:
        """Return the expected FLOP/s of training. TF32 has half the rate of bf16."""
        if precision == "fp32":
            return self.fp32 * self.fp32_share
        share = self.bf16_share
        if lora:
            share = self.lora_share
        if precision == "tf32":
            share = share * 0.5
        return self.bf16 * share

    def scoring_rate(self, products: str) -> float:
        """Return the expected FLOP/s of scoring. bf16x3 has a third of the rate of bf16."""
        peak = {"float32": self.fp32, "bf16x3": self.bf16 / 3}.get(products, self.bf16)
        return peak * self.scoring[products][0]


@lru_cache(maxsize=1)
def cards() -> dict[str, Gpu]:
    """Return the cards of conf/cards.yaml by name."""
    by_name = read_yaml(shipped_conf() / "cards.yaml")
    return {name: Gpu(**values) for name, values in by_name.items()}


# --- training ---


def training_flops(
    shape: Shape, trained: Trained, length: float, checkpointing: bool = True, lora_rank: int = 0
) -> float:
    """Return the FLOPs a token of a training step.

    A matrix of P weights takes 2 P in the forward pass, 2 P for the gradient of its input if a
    trained weight is at or below it, and 2 P for its own gradient if it is trained: 6 N in all
    (Kaplan et al. 2020). Checkpointing repeats the forward pass where the backward pass goes: 8 N,
    4/3 of it (Chen et al. 2016; torch leaves out the last product of a layer, 6 % less, which is
    not counted). TRL's loss computes the head's product again in any case. Attention over s
    positions of width w takes 4 s w forward, and twice that backward (PaLM, appendix B). Input
    embeddings are looked up and take 0. LoRA saves the weights' gradients; its own products, some
    per cent, are not counted.

    Args:
        shape: The model's shape.
        trained: The trained parts.
        length: The tokens of a row.
        checkpointing: Whether gradient checkpointing is on.
        lora_rank: The rank of LoRA. 0: no LoRA.
    """
    lowest, head_passes = 0, 4
    if lora_rank or OUTSIDE not in trained:  # adapters are only in layers
        lowest = min(site.layer for site in trained if site.layer is not None)
        head_passes = 3
    if lora_rank:
        sizes = adapter_parameters(shape, lora_rank)
    else:
        sizes = {"attention": shape.attention, "mlp": shape.mlp}
    moved = sum(sizes.get(site.kind, 0) for site in trained)
    core = 4 * length * shape.heads * shape.head_width
    forward = 2 * (shape.attention + shape.mlp) + core
    backward = forward + core
    if checkpointing:
        backward += forward
    head = 2.0 * shape.embedding * head_passes
    return head + shape.layers * forward + (shape.layers - lowest) * backward + 2 * moved


def optimizer_bytes(sft: Sft) -> int:
    """Return the bytes that a step moves for each trained parameter.

    The weight and its moments are read and written, the gradient is read. AdamW in fp32 moves 28
    bytes: 4 for each reading or writing of a weight, its gradient, and two moments (4 x (2 + 1 +
    4)).
    """
    return 3 * trained_width(sft) + 2 * moment_bytes(sft)


def training_seconds(
    shape: Shape,
    trained: Trained,
    rows: int,
    tokens: float,
    sft: Sft,
    machine: Gpu,
) -> float:
    """Return the seconds of a training's steps.

    Products run at the card's rate. The exchange between cards runs at the same time, so the longer
    of both counts. Then the optimizer runs at the rate of the memory.

    Simultaneous training is the sum of its two sides. Several GPUs share the products, and under
    fsdp2 the optimizer's work, which each GPU repeats under ddp. Processes on a CPU share its
    threads.

    Args:
        shape: The model's shape.
        trained: The trained parts.
        rows: The number of rows.
        tokens: The mean tokens of a row.
        sft: The settings of the training.
        machine: The card or CPU.
    """
    rank = sft.adapter_rank
    steps = rows // sft.batch_size
    flops = rows * tokens * training_flops(shape, trained, tokens, sft.gradient_checkpointing, rank)
    moved = trained_parameters(shape, trained, rank)
    precision = "bf16"
    gpus = sft.processes
    shards = 1
    if sft.weights == "float32":
        precision = sft.precision
    if machine.is_cpu:
        gpus = 1
    if sft.parallel == "fsdp2":
        shards = gpus
    seconds = flops / (machine.rate(precision, bool(rank)) * gpus)
    if machine.link:
        exchanged = steps * bytes_between(shape, moved, sft)
        seconds = max(seconds, exchanged / (machine.link * LINK_SHARE))
    return seconds + steps * moved / shards * optimizer_bytes(sft) / machine.bandwidth


def bytes_between(shape: Shape, moved: int, sft: Sft) -> float:
    """Return the bytes that each GPU receives in a step, with ring collectives.

    Under fsdp2 it receives all weights in each forward and backward pass, and the gradients, which
    are summed in fp32. Under ddp it receives the gradients twice, in an all-reduce.
    """
    peers_share = (sft.processes - 1) / sft.processes
    if sft.parallel != "fsdp2":
        return 2 * peers_share * moved * trained_width(sft)
    width = 2 if sft.precision == "bf16" else WIDTH[sft.weights]
    _, passes = micro_batches(sft)
    return passes * peers_share * (2 * shape.parameters * width + 4 * moved)


# --- scoring ---

ROOM = 512  # the default of eval.max_gen_toks in the task files
LAUNCH = 0.6e-3  # seconds that Python takes to launch a layer's kernels (assumed)
LONGEST_QUESTION = 2.5  # relative to the mean; 2.4 for MGSM's 250 questions
# relative to a row's mean tokens: a step reads as many columns as the longest row has (assumed)
COLUMNS = 2.0


@lru_cache(maxsize=1)
def token_counts() -> dict[str, Any]:
    """Return conf/tokens.yaml: mean tokens of MGSM's texts by language, and of rows by set."""
    return read_yaml(shipped_conf() / "tokens.yaml")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one kind.

    Attributes:
        questions: The number of questions.
        prefix: Tokens of the exemplars before a question.
        question: Tokens of a question.
        answer: Tokens of an answer. 0: log-likelihoods of letters.
        prefixes: The number of sets of exemplars, such as one per subject.
        room: The most tokens of an answer.
    """

    questions: int
    prefix: float
    question: float
    answer: float = 0.0
    prefixes: int = 1
    room: int = ROOM


def question_set(task: str, shots: int, language: str) -> QuestionSet:
    """Return the questions of a task in one language, with their lengths in tokens.

    MGSM and other tasks with numeric answers have measured lengths; a language without a
    measurement has the English lengths. Other tasks are translations, so their English lengths are
    multiplied by the relative length of MGSM's problems in the language. The English lengths are
    assumed (`Benchmark.tokens`): 90 tokens for a program's tests, 70 for the program, 10 for the
    names of two languages.
    """
    mgsm = token_counts()["mgsm"]
    english_question, *_ = mgsm["en"]
    question, exemplar, answer = mgsm.get(language, mgsm["en"])
    benchmark = benchmark_of(task)
    count = benchmark.questions
    alike = benchmark.continuation_tokens
    tokens = alike + (benchmark.tokens - alike) * question / english_question
    if benchmark.kind == "number":
        return QuestionSet(count, shots * exemplar, question, answer)
    if benchmark.kind == "translation":
        pair = tokens + benchmark.tokens
        return QuestionSet(2 * count, shots * pair, pair / 2 + 10, pair / 2)  # both directions
    if benchmark.kind == "program":
        return QuestionSet(count, shots * (tokens + 160), tokens + 90, 70)
    written = benchmark.tokens if benchmark.kind == "answer" else 0
    return QuestionSet(count, shots * tokens, tokens, written, benchmark.exemplar_sets)


@dataclass(frozen=True)
class _Scorer:
    """A model on a machine, in seconds and FLOPs.

    Attributes:
        rate: FLOP/s.
        launch: Seconds to launch a forward pass.
        step: Seconds of a decoding step's small kernels.
        weights: Seconds to read the weights.
        token: Seconds to read a token's keys and values.
        layers: FLOPs a token of the layers, without attention.
        core: FLOPs of attention for each pair of tokens.
        head: FLOPs of a token's logits.
        adds_up: True on a CPU, where reading and computing do not overlap.
    """

    rate: float
    launch: float
    step: float
    weights: float
    token: float
    layers: float
    core: float
    head: float
    adds_up: bool

    def prefill(self, kind: QuestionSet, rows: int, shared: bool) -> float:
        prefix = kind.prefix * (kind.prefixes if shared else kind.questions)
        questions = kind.questions * kind.question
        reached = kind.prefix + kind.question
        flops = prefix * (self.layers + self.core * kind.prefix)
        flops += questions * (self.layers + self.core * reached)
        flops += self.head * kind.questions
        batches = math.ceil(kind.questions / kind.prefixes / rows)
        passes = kind.prefixes * (batches + bool(kind.prefix))
        return max(flops / self.rate, passes * max(self.launch, self.weights))

    def decode(self, kind: QuestionSet, rows: int, shared: bool) -> float:
        """Return the seconds of the steps with all rows, then with the longest answer's row."""
        once = kind.prefix if shared else 0
        answer = min(kind.room, kind.answer)
        if self.adds_up:
            answer = kind.room
        columns = kind.prefix - once + COLUMNS * (kind.question + answer / 2)
        cached = self.token * columns
        all_rows = answer * kind.questions / rows * self._step(once, cached, rows)
        return all_rows + (kind.room - answer) * self._step(once, cached, 1)

    def _step(self, once: float, cached: float, rows: int) -> float:
        reading = self.weights + self.token * once + rows * cached
        computing = rows * ((self.layers + self.head) / self.rate)
        if self.adds_up:
            return self.step + (reading + computing)
        return self.step + max(reading, computing)


def scoring_seconds(
    shape: Shape,
    kinds: Sequence[QuestionSet],
    machine: Gpu,
    dtype: str = "float32",
    batch_size: int | None = 32,
    share_prefix: bool = True,
    products: str = "ieee",
) -> tuple[float, float]:
    """Return the seconds of prefill and of decoding.

    Prefill takes 2 FLOPs a weight of the layers and 4 s w of attention a token, at the rate of the
    products. Letters need one pass. Exemplars are computed once, with two exceptions: they are not
    shared, or answers are generated by layers with a window.

    A decoding step reads the weights and the rows' keys and values once, and those of shared
    exemplars once for all rows. It multiplies, and runs the small kernels of its layers. On a GPU
    reading and multiplying overlap, and CUDA graphs save Python's launches; on a CPU they add up.
    Finished rows are refilled, so all rows are in use until the questions run out. Then one answer
    that does not stop continues to eval.max_gen_toks. On a CPU all answers are assumed to reach it,
    because small models often do not stop.

    Args:
        shape: The model's shape.
        kinds: The questions.
        machine: The card or CPU.
        dtype: The dtype of the weights.
        batch_size: eval.batch_size.
        share_prefix: eval.share_prefix.
        products: eval.products.
    """
    if products == "ieee":
        products = "float32" if dtype == "float32" else "bfloat16"
    size = WIDTH[dtype]
    bandwidth = machine.bandwidth * machine.bandwidth_share
    launch = step = LAUNCH * shape.layers
    if not machine.is_cpu:
        step = machine.scoring[products][1] * shape.layers
    scorer = _Scorer(
        rate=machine.scoring_rate(products),
        launch=launch,
        step=step,
        weights=(shape.layers * shape.layer + shape.embedding) * size / bandwidth,
        token=shape.kv_values * size / bandwidth,
        layers=2.0 * shape.layers * (shape.attention + shape.mlp),
        core=4.0 * shape.layers * shape.heads * shape.head_width,
        head=2.0 * shape.embedding,
        adds_up=machine.is_cpu,
    )
    prefill = decode = 0.0
    for kind in kinds:
        shared = share_prefix and not (kind.answer and shape.window)
        most = math.ceil(kind.questions / kind.prefixes)
        rows = min(rows_of(shape, kind, machine, dtype, batch_size), most)
        prefill += scorer.prefill(kind, rows, shared)
        if kind.answer:
            decode += scorer.decode(kind, rows, shared)
    return prefill, decode


def prompts_of(kind: QuestionSet) -> Prompts:
    """Return the most tokens that are computed together, from the mean lengths of the questions."""
    return Prompts(kind.prefix, LONGEST_QUESTION * kind.question, kind.room if kind.answer else 0)


def rows_of(
    shape: Shape, kind: QuestionSet, machine: Gpu, dtype: str, batch_size: int | None
) -> int:
    """Return how many rows a machine computes together: eval.batch_size, or as many as fit."""
    limit = batch_size or (ROWS if machine.is_cpu else MOST_ROWS)
    return rows_that_fit(shape, WIDTH[dtype], prompts_of(kind), machine.memory, limit)
