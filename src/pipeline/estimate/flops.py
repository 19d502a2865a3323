"""What runs cost: seconds, and the memory of scoring, by formulas on numbers. Nothing is loaded: a plan takes no time.

The memory of training is in train/memory.py, whose checks are by the same formulas.

What is derived and what is assumed: FLOPs, bytes and counts of tokens are derived (each docstring says how). Assumed is
the share of a card's peak rate that is reached (Gpu; stage=check shows a node's own rate next to it), the time that
Python takes to launch a layer (LAUNCH), how much longer a batch's longest answer is than the mean (LONGEST), and tokens
a row. Time is that of one GPU: what processes say to one another, loading and saving are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.benchmarks import benchmark_of
from pipeline.config.training import Sft
from pipeline.models.anatomy import Site
from pipeline.models.shape import Shape
from pipeline.train.memory import OUTSIDE, WIDTH, Trained, adapter_parameters, bytes_per_parameter, trained_parameters

# ---------------------------------------------------------------------------------------------------- cards


@dataclass(frozen=True)
class Gpu:
    """A card by its data sheet, or threads of a CPU: dense FLOP/s, bytes a second of its memory, usable bytes of it.

    The shares of the peak are assumed: of bf16 in training as a whole, of fp32 (no TF32) in matrix products.
    """

    bf16: float
    fp32: float
    bandwidth: float
    memory: int
    bf16_share: float = 0.4
    fp32_share: float = 0.75
    is_cpu: bool = False

    def rate(self, dtype: str) -> float:
        """FLOP/s that are counted on; of products in TF32, half of those in bf16, of eval.products=bf16x3 a third."""
        if dtype == "float32":
            return self.fp32 * self.fp32_share
        return self.bf16 * self.bf16_share * {"tf32": 0.5, "bf16x3": 1 / 3}.get(dtype, 1)


GPUS = {  # NVIDIA's data sheets of the SXM cards; memory as the driver reports it, less what it keeps
    "a100_80": Gpu(312e12, 19.5e12, 2.04e12, 78 * 2**30, bf16_share=0.45),
    "h100_80": Gpu(989e12, 67e12, 3.35e12, 78 * 2**30),
    "h200_141": Gpu(989e12, 67e12, 4.8e12, 139 * 2**30),
    "a100_40": Gpu(312e12, 19.5e12, 1.555e12, 39 * 2**30, bf16_share=0.45),
    # of several cards the least of each: RTX 3090 71, RTX 4090 165, A5000 111 TFLOP/s in bf16 with sums in fp32; 35.6,
    # 82.6, 27.8 in fp32; 936, 1008, 768 GB/s
    "gpu_24": Gpu(71e12, 27.8e12, 0.768e12, int(23.5 * 2**30)),
    # A40 149.7, L40S 362, RTX A6000 154.8 TFLOP/s; 37.4, 91.6, 38.7; 696, 864, 768 GB/s; with ECC 45 GiB
    "gpu_48": Gpu(149.7e12, 37.4e12, 0.696e12, int(44.5 * 2**30)),
}


# ---------------------------------------------------------------------------------------------------- training


def training_flops(
    shape: Shape, trained: Trained, length: float, checkpointing: bool = True, lora_rank: int = 0
) -> float:
    """FLOPs a token of a step that moves `trained`, in rows of `length` tokens.

    Each matrix of P weights takes 2 P forward, 2 P for the gradient of its input where something trained lies at or
    below it, and 2 P for that of its weights where they are trained: 6 N in all (Kaplan et al. 2020). Checkpointing
    adds the forward pass of what the backward pass reaches: 8 N, 4/3 of it (Chen et al. 2016; torch leaves out the last
    product of a layer, 6 % less, which is not counted). TRL's loss computes the head's product again in any case.
    Attention over s positions of width w: 4 s w forward, twice that backward (PaLM, appendix B). Input embeddings are
    looked up: 0. LoRA saves the weights' gradients and adds its own products.
    """
    outside = OUTSIDE in trained and not lora_rank  # adapters sit in layers
    lowest = 0 if outside else min(site.layer for site in trained if site.layer is not None)
    core = 4 * length * shape.heads * shape.head_width
    total = 2.0 * shape.embedding * (4 if outside else 3)
    adapters, matrices = adapter_parameters(shape, lora_rank), {"attention": shape.attention, "mlp": shape.mlp}
    for layer in range(shape.layers):
        kinds = [kind for kind in matrices if Site(layer, kind) in trained]
        adapter = sum(adapters[kind] for kind in kinds)
        weights = shape.attention + shape.mlp + adapter
        total += 2 * weights + core
        if layer < lowest:
            continue
        total += 2 * weights + 2 * core + (2 * weights + core if checkpointing else 0)
        total += 2 * (adapter if lora_rank else sum(matrices[kind] for kind in kinds))
        if layer == lowest and lora_rank:
            total -= 2 * shape.qkv  # the norm below is frozen too: nothing asks for the gradient of their input
    return total


def optimizer_bytes(sft: Sft) -> int:
    """Bytes that a step moves for each trained parameter: weight and moments are read and written, gradients read.

    28 for AdamW in fp32: 4 read and write a weight, its gradient, and two moments (4 x (2 + 1 + 4)).
    """
    of_weight = 4 if sft.adapter == "lora" else WIDTH[sft.weights]  # adapters stay fp32
    return 3 * of_weight + 2 * (bytes_per_parameter(sft) - 2 * of_weight)


def training_seconds(
    shape: Shape, trained: Trained, rows: int, tokens: float, sft: Sft, gpu: Gpu, gpus: int = 1
) -> float:
    """Seconds for `rows` rows of `tokens` mean tokens: products at the card's rate, then the optimizer at its memory's.

    Simultaneous training is the sum of its two sides. With several GPUs the products are shared, the optimizer's work
    is done on each (ddp).
    """
    rank = sft.adapter_rank
    flops = rows * tokens * training_flops(shape, trained, tokens, sft.gradient_checkpointing, rank)
    moved = rows // sft.batch_size * trained_parameters(shape, trained, rank)
    precision = sft.precision if sft.weights == "float32" else "bf16"
    rate = gpu.rate({"fp32": "float32", "bf16": "bfloat16"}.get(precision, precision))
    return flops / (rate * gpus) + moved * optimizer_bytes(sft) / gpu.bandwidth


def host_memory(parameters: int, dtype: str, processes: int = 1) -> float:
    """Bytes: each process holds the weights once, while they are loaded or gathered, and 6 GB of libraries."""
    return processes * (parameters * WIDTH[dtype] + 6e9)


# ---------------------------------------------------------------------------------------------------- scoring

# Mean tokens of MGSM's question, exemplar (question and worked answer) and worked answer: the 250 problems and the 8
# exemplars of each language, measured with Llama 3.1's tokenizer. Other models cut Bengali and Telugu otherwise.
MGSM = {
    "en": (64, 91, 55), "de": (85, 114, 70), "fr": (84, 115, 68), "zh": (76, 101, 60), "ru": (87, 123, 71),
    "es": (81, 107, 62), "ja": (88, 120, 66), "bn": (287, 344, 191), "sw": (108, 136, 78), "te": (452, 600, 318),
    "th": (112, 173, 104),
}  # fmt: skip
ROW = {"math": 320, "sw": 200, "bn": 420, "te": 600, "ja": 280}  # assumed tokens of a training row
ROOM = {"te": 1024, "bn": 1024}  # eval.max_gen_toks of MGSM; 512 elsewhere
LAUNCH = 0.6e-3  # seconds that Python takes to launch a layer's kernels, below which no forward pass gets: assumed
STEP = 0.22e-3  # seconds of the small kernels of a layer in a recorded step: measured on an H200, evaluate_h200.json
LONGEST = 4.0  # a batch is decoded until its longest answer ends: so many times the mean worked answer. Assumed


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one kind: tokens of the exemplars before them, of a question, and of an answer (0: letters weighed).

    `prefixes`: sets of exemplars, such as one a subject; `room`: most tokens of an answer; `logits`: of so many tokens
    of a question.
    """

    questions: int
    prefix: float
    question: float
    answer: float = 0.0
    prefixes: int = 1
    room: int = 512
    logits: float = 1


def question_sets(
    task: str, shots: int, language: str, tokens: Mapping[str, tuple[float, float, float]] = MGSM
) -> list[QuestionSet]:
    """What a task puts to a model in one language.

    MGSM, and what else ends in a number, by measured tokens. The others by English counts, times how much longer MGSM's
    problems are in the language than in English (they are translations, as these tasks are). The English counts are
    assumed (`Benchmark.tokens`); a program's tests are 90, itself 70, the names of two languages 10.
    """
    question, exemplar, answer = tokens[language]
    benchmark = benchmark_of(task)
    alike = benchmark.continuation_tokens
    questions, each = benchmark.questions, alike + (benchmark.tokens - alike) * question / tokens["en"][0]
    if benchmark.kind == "number":
        return [QuestionSet(questions, shots * exemplar, question, answer, room=ROOM.get(language, 512))]
    if benchmark.kind == "translation":
        english, pair = benchmark.tokens, shots * (each + benchmark.tokens)
        return [QuestionSet(questions, pair, english + 10, each), QuestionSet(questions, pair, each + 10, english)]
    if benchmark.kind == "answer":
        return [QuestionSet(questions, shots * each, each, benchmark.tokens)]
    if benchmark.kind == "program":
        return [QuestionSet(questions, shots * (each + 160), each + 90, 70)]
    return [QuestionSet(questions, shots * each, each, prefixes=benchmark.exemplar_sets, logits=max(1, alike))]


def scoring_seconds(
    shape: Shape, kinds: Sequence[QuestionSet], machine: Gpu, dtype: str = "float32", batch_size: int = 32,
    vllm: bool = False, share_prefix: bool = True, products: str = "ieee",
) -> tuple[float, float]:  # fmt: skip
    """(prefill, decode) of one model.

    Prefill: 2 FLOPs a weight of the layers and 4 s w of attention a token, at the rate of the dtype; letters need one
    pass. Exemplars are computed once, unless they are not shared, which also gives a letter the logits of all tokens,
    or answers are generated by layers with a window. Decode: a step reads the weights and the batch's keys and values
    once, the exemplars' too where they are shared, else in each row, and takes its products, which a GPU does at the
    same time, and the small kernels of its layers (STEP; Python's launches are spared by CUDA graphs). A CPU does one
    after the other, to eval.max_gen_toks, as among the answers of small models one does not stop. A batch is what fits,
    as in scoring.
    """
    prefill = decode = 0.0
    rate, size = machine.rate(products if products != "ieee" else dtype), WIDTH[dtype]
    launch, step = (0.0 if vllm else LAUNCH) * shape.layers, (0.0 if vllm else STEP) * shape.layers
    weights = (shape.layers * shape.layer + shape.embedding) * size / machine.bandwidth
    each, head = 2.0 * shape.layers * (shape.attention + shape.mlp), 2.0 * shape.embedding
    core = 4.0 * shape.layers * shape.heads * shape.head_width
    for kind in kinds:
        shared = share_prefix and not (kind.answer and shape.window)
        prefix = kind.prefix * (kind.prefixes if shared else kind.questions)
        questions = kind.questions * kind.question
        flops = prefix * (each + core * kind.prefix) + questions * (each + core * (kind.prefix + kind.question))
        flops += head * (kind.questions * kind.logits if shared or kind.answer else prefix + questions)
        rows = min(batch_that_fits(shape, kind, machine, dtype, batch_size), math.ceil(kind.questions / kind.prefixes))
        batches = kind.prefixes * math.ceil(kind.questions / kind.prefixes / rows)
        passes = batches + (kind.prefixes if kind.prefix else 0)
        prefill += max(flops / rate, passes * max(launch, weights))
        steps = min(kind.room, kind.answer * (math.inf if machine.is_cpu else LONGEST)) if kind.answer else 0
        token, computed = shape.kv_values * size / machine.bandwidth, (each + head) / rate
        once = kind.prefix if shared and not vllm and not machine.is_cpu else 0
        cached = token * min(kind.prefix - once + kind.question + steps / 2, shape.window or math.inf)
        if machine.is_cpu:
            decode += steps * (batches * (launch + weights) + kind.questions * (computed + cached))
        else:
            read = weights + token * once + rows * cached
            decode += steps * batches * (step + max(read, rows * computed))
    return prefill, decode


def scoring_memory(shape: Shape, kind: QuestionSet, dtype: str = "float32", batch_size: int = 32) -> dict[str, float]:
    """What for -> bytes: weights, keys and values of a batch with the exemplars in each row, a batch's widest layer."""
    size = WIDTH[dtype]
    longest = kind.prefix + 2.5 * kind.question + (kind.room if kind.answer else 0)  # MGSM: the longest is 2.4 means
    passing = max(batch_size * 2.5 * kind.question, kind.prefix) * (2 * shape.inner + 6 * shape.width) * size
    return {
        "weights": shape.parameters * size, "cache": batch_size * longest * shape.kv_values * size,
        "activations": passing, "context": 1e9,
    }  # fmt: skip


def batch_that_fits(shape: Shape, kind: QuestionSet, gpu: Gpu, dtype: str = "float32", batch_size: int = 32) -> int:
    """Halved until it fits the card, as scoring does when memory runs out; 1 at the least."""
    while batch_size > 1 and sum(scoring_memory(shape, kind, dtype, batch_size).values()) > gpu.memory:
        batch_size //= 2
    return batch_size


def merge_seconds(read: float, written: float, disk: float = 1e9, copy: float = 10e9) -> float:
    """Seconds of a merge: bytes read at the rate of memory (`copy`, bytes/s: sources lie in the page cache, or are cast
    and added as fast), bytes written at the disk's. A live merge writes none. Both rates are assumed."""
    return read / copy + written / disk
