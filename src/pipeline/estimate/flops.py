"""What runs cost in seconds, by formulas on numbers. Nothing is loaded: a plan takes no time.

The memory of training is in train/memory.py, that of scoring in evaluate/memory.py, whose checks
are by the same formulas.

What is derived, measured and assumed: FLOPs, bytes and counts of tokens are derived (each docstring
says how). Measured where a card has a record, else assumed, is what is reached of its data sheet
(conf/cards.yaml); assumed are the time that Python takes to launch a layer (LAUNCH), how many
answers do not stop, and tokens a row (conf/tokens.yaml). Loading and saving are not counted.
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
from pipeline.models.anatomy import Site
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


LINK_SHARE = 0.75  # of the rate between cards: what collectives reach. Assumed
WHOLE: Mapping[str, Sequence[float]] = dict.fromkeys(("bfloat16", "float32", "bf16x3"), (1.0, 0.0))


@dataclass(frozen=True)
class Gpu:
    """A card by its data sheet and what is reached of it, as conf/cards.yaml has it, or threads of
    a CPU.

    scoring: products -> the share of the rate, and a layer's seconds in a step besides. link: 0
    where what processes exchange is not counted. records: those of training and of scoring.
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
        """FLOP/s of training that are counted on; of products in TF32, half of those in bf16."""
        if precision == "fp32":
            return self.fp32 * self.fp32_share
        return (
            self.bf16
            * (self.lora_share if lora else self.bf16_share)
            * (0.5 if precision == "tf32" else 1)
        )

    def scoring_rate(self, products: str) -> float:
        """FLOP/s of scoring that are counted on; of eval.products=bf16x3 a third."""
        peak = {"float32": self.fp32, "bf16x3": self.bf16 / 3}.get(products, self.bf16)
        return peak * self.scoring[products][0]

    def basis(self) -> str:
        """Return the source of the card's rates, in the words of a plan."""
        training, scoring = (
            f"results/bench/{record}.json" if record else "assumed" for record in self.records
        )
        return f"rates of training: {training}; of scoring: {scoring}; between cards: assumed"


@lru_cache(maxsize=1)
def cards() -> dict[str, Gpu]:
    """Return the cards of conf/cards.yaml by name."""
    return {
        name: Gpu(**values) for name, values in read_yaml(shipped_conf() / "cards.yaml").items()
    }


# --- training ---


def training_flops(
    shape: Shape, trained: Trained, length: float, checkpointing: bool = True, lora_rank: int = 0
) -> float:
    """FLOPs a token of a step that moves `trained`, in rows of `length` tokens.

    Each matrix of P weights takes 2 P forward, 2 P for the gradient of its input where something
    trained lies at or below it, and 2 P for that of its weights where they are trained: 6 N in all
    (Kaplan et al. 2020). Checkpointing adds the forward pass of what the backward pass reaches: 8
    N, 4/3 of it (Chen et al. 2016; torch leaves out the last product of a layer, 6 % less, which is
    not counted). TRL's loss computes the head's product again in any case. Attention over s
    positions of width w: 4 s w forward, twice that backward (PaLM, appendix B). Input embeddings
    are looked up: 0. LoRA saves the weights' gradients and adds its own products.
    """
    outside = OUTSIDE in trained and not lora_rank  # adapters sit in layers
    if outside:
        lowest = 0
    else:
        lowest = min(site.layer for site in trained if site.layer is not None)
    core = 4 * length * shape.heads * shape.head_width
    total = 2.0 * shape.embedding * (4 if outside else 3)
    adapters, matrices = (
        adapter_parameters(shape, lora_rank),
        {"attention": shape.attention, "mlp": shape.mlp},
    )
    for layer in range(shape.layers):
        kinds = []
        for kind in matrices:
            if Site(layer, kind) in trained:
                kinds.append(kind)
        adapter = sum(adapters[kind] for kind in kinds)
        weights = shape.attention + shape.mlp + adapter
        total += 2 * weights + core
        if layer < lowest:
            continue
        total += 2 * weights + 2 * core + (2 * weights + core if checkpointing else 0)
        total += 2 * (adapter if lora_rank else sum(matrices[kind] for kind in kinds))
        if layer == lowest and lora_rank:
            total -= (
                2 * shape.qkv
            )  # the norm below is frozen too: nothing asks for the gradient of their input
    return total


def optimizer_bytes(sft: Sft) -> int:
    """Bytes that a step moves for each trained parameter: weight and moments are read and written,
    gradients read.

    28 for AdamW in fp32: 4 read and write a weight, its gradient, and two moments (4 x (2 + 1 +
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
    gathered: bool = False,
) -> float:
    """Seconds for `rows` rows of `tokens` mean tokens: products at the card's rate, or what cards
    say to one another where that takes longer, as both are done at the same time; then the
    optimizer at the rate of its memory.

    Simultaneous training is the sum of its two sides. Several GPUs share the products, and under
    fsdp2 the optimizer's work, which each does under ddp. Processes on a CPU share its threads.
    """
    rank, steps = sft.adapter_rank, rows // sft.batch_size
    flops = rows * tokens * training_flops(shape, trained, tokens, sft.gradient_checkpointing, rank)
    moved = trained_parameters(shape, trained, rank)
    precision = "bf16"
    if sft.weights == "float32":
        precision = sft.precision
    gpus = 1 if machine.is_cpu else sft.processes
    seconds = flops / (machine.rate(precision, bool(rank)) * gpus)
    if machine.link:
        exchanged = steps * bytes_between(shape, moved, sft, gathered)
        seconds = max(seconds, exchanged / (machine.link * LINK_SHARE))
    shards = gpus if sft.parallel == "fsdp2" else 1
    return seconds + steps * moved / shards * optimizer_bytes(sft) / machine.bandwidth


def bytes_between(shape: Shape, moved: int, sft: Sft, gathered: bool = False) -> float:
    """Bytes that each GPU receives in a step, in rings: under fsdp2 of all weights, in each pass
    forward and, unless they stay gathered, backward, and of the gradients, which are added up in
    fp32; under ddp of the gradients, added up and given out again.
    """
    peers_share = (sft.processes - 1) / sft.processes
    if sft.parallel != "fsdp2":
        return 2 * peers_share * moved * trained_width(sft)
    weights = shape.parameters * (2 if sft.precision == "bf16" else WIDTH[sft.weights])
    return micro_batches(sft)[1] * peers_share * ((1 if gathered else 2) * weights + 4 * moved)


def host_memory(parameters: int, dtype: str, processes: int = 1) -> float:
    """Bytes: each process holds the weights once, while they are loaded or gathered, and 6 GB of
    libraries.
    """
    return processes * (parameters * WIDTH[dtype] + 6e9)


# --- scoring ---

ROOM = 512  # eval.max_gen_toks where it is not given, as the task files have it
# seconds that Python takes to launch a layer's kernels, below which no forward pass gets: assumed
LAUNCH = 0.6e-3
LONGEST_QUESTION = 2.5  # times the mean; of MGSM's 250 it is 2.4
COLUMNS = (
    2.0  # times a row's mean tokens: a step reads as many of each row as its longest has. Assumed
)
IDLE = (
    1 / 16
)  # rows that wait: a GPU fills an eighth of them at once (REFILL in evaluate/decode.py)


@lru_cache(maxsize=1)
def token_counts() -> dict[str, Any]:
    """Mean tokens of conf/tokens.yaml: of MGSM's texts by language, and of training rows by set."""
    return read_yaml(shipped_conf() / "tokens.yaml")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one kind: tokens of the exemplars before them, of a question, and of an answer
    (0: letters weighed).

    `prefixes`: sets of exemplars, such as one a subject; `room`: most tokens of an answer;
    `logits`: of so many tokens of a question.
    """

    questions: int
    prefix: float
    question: float
    answer: float = 0.0
    prefixes: int = 1
    room: int = ROOM
    logits: float = 1


def question_sets(task: str, shots: int, language: str) -> list[QuestionSet]:
    """Return the questions that a task asks in one language, with their lengths in tokens.

    MGSM and other tasks with numeric answers have measured lengths; languages without a measurement
    have the English ones. Other tasks have English lengths, multiplied by how much longer MGSM's
    problems are in the language, as these tasks are translations. The English lengths are assumed
    (`Benchmark.tokens`): tests of a program 90 tokens, the program 70, the names of two languages
    10.
    """
    mgsm = token_counts()["mgsm"]
    question, exemplar, answer = mgsm.get(language, mgsm["en"])
    benchmark = benchmark_of(task)
    alike = benchmark.continuation_tokens
    questions, tokens_each = (
        benchmark.questions,
        alike + (benchmark.tokens - alike) * question / mgsm["en"][0],
    )
    if benchmark.kind == "number":
        return [QuestionSet(questions, shots * exemplar, question, answer)]
    if benchmark.kind == "translation":
        english, pair = benchmark.tokens, shots * (tokens_each + benchmark.tokens)
        return [
            QuestionSet(questions, pair, english + 10, tokens_each),
            QuestionSet(questions, pair, tokens_each + 10, english),
        ]
    if benchmark.kind == "program":
        return [QuestionSet(questions, shots * (tokens_each + 160), tokens_each + 90, 70)]
    written, exemplars = benchmark.tokens if benchmark.kind == "answer" else 0, shots * tokens_each
    return [
        QuestionSet(
            questions,
            exemplars,
            tokens_each,
            written,
            benchmark.exemplar_sets,
            logits=max(1, alike),
        )
    ]


def scoring_seconds(
    shape: Shape,
    kinds: Sequence[QuestionSet],
    machine: Gpu,
    dtype: str = "float32",
    batch_size: int | None = 32,
    vllm: bool = False,
    share_prefix: bool = True,
    products: str = "ieee",
) -> tuple[float, float]:
    """(prefill, decode) of one model.

    Prefill: 2 FLOPs a weight of the layers and 4 s w of attention a token, at the rate of the
    products; letters need one pass. Exemplars are computed once, unless they are not shared, which
    also gives a letter the logits of all tokens, or answers are generated by layers with a window.
    Decode: a step reads the weights and the rows' keys and values once (the exemplars' once for all
    rows if they are shared), multiplies, and runs the small kernels of its layers. On a GPU reading
    and multiplying overlap, and CUDA graphs save Python's launches; on a CPU they add up. Rows that
    end are filled again: all are in use for as long as the answers take together, and one, which
    does not stop, goes on to eval.max_gen_toks. On a CPU all answers are assumed to reach it, as
    small models often do not stop.
    """
    prefill = decode = 0.0
    if products == "ieee":
        products = "bfloat16"
        if dtype == "float32":
            products = "float32"
    rate, size = machine.scoring_rate(products), WIDTH[dtype]
    bandwidth, layers = machine.bandwidth * machine.bandwidth_share, 0 if vllm else shape.layers
    launch = LAUNCH * layers
    if machine.is_cpu:
        step = launch
    else:
        step = machine.scoring[products][1] * layers
    weights = (shape.layers * shape.layer + shape.embedding) * size / bandwidth
    flops_each, head = 2.0 * shape.layers * (shape.attention + shape.mlp), 2.0 * shape.embedding
    core = 4.0 * shape.layers * shape.heads * shape.head_width
    for kind in kinds:
        shared = share_prefix and not (kind.answer and shape.window)
        prefix = kind.prefix * (kind.prefixes if shared else kind.questions)
        questions = kind.questions * kind.question
        flops = prefix * (flops_each + core * kind.prefix) + questions * (
            flops_each + core * (kind.prefix + kind.question)
        )
        flops += head * (
            kind.questions * kind.logits if shared or kind.answer else prefix + questions
        )
        rows = min(
            rows_of(shape, kind, machine, dtype, batch_size),
            math.ceil(kind.questions / kind.prefixes),
        )
        passes = kind.prefixes * (
            math.ceil(kind.questions / kind.prefixes / rows) + bool(kind.prefix)
        )
        prefill += max(flops / rate, passes * max(launch, weights))
        if not kind.answer:
            continue
        token, computed = shape.kv_values * size / bandwidth, (flops_each + head) / rate
        once = kind.prefix if shared and not vllm else 0
        answer = min(kind.room, kind.room if machine.is_cpu else kind.answer)
        cached = token * min(
            kind.prefix - once + COLUMNS * (kind.question + answer / 2), shape.window or math.inf
        )
        if rows < kind.questions and not machine.is_cpu:
            in_use = rows * (1 - IDLE)
        else:
            in_use = rows
        for steps, used in ((answer * kind.questions / in_use, rows), (kind.room - answer, 1)):
            moved, computing = weights + token * once + used * cached, used * computed
            decode += steps * (
                step + (moved + computing if machine.is_cpu else max(moved, computing))
            )
    return prefill, decode


def prompts_of(kind: QuestionSet) -> Prompts:
    """Return the most tokens that are computed together, by the mean lengths of a kind of
    questions.
    """
    return Prompts(kind.prefix, LONGEST_QUESTION * kind.question, kind.room if kind.answer else 0)


def rows_of(
    shape: Shape, kind: QuestionSet, machine: Gpu, dtype: str, batch_size: int | None
) -> int:
    """Rows that a machine computes together: of eval.batch_size, or of null what its memory
    holds.
    """
    limit = batch_size or (ROWS if machine.is_cpu else MOST_ROWS)
    return rows_that_fit(shape, WIDTH[dtype], prompts_of(kind), machine.memory, limit)
