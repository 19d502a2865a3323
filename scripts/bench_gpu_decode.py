"""Parts of bench_gpu.py about decoding: launch overhead, share of bandwidth, and a live sweep, without lm-eval or trl.

Attention to what follows a shared prefix is computed in two parts, the prefix for the queries of all rows at once, and
each row's own tokens, and merged by their log-sum-exp (FlashAttention's split of keys, Dao et al. 2022, section 3.1; of
prefixes: Hydragen, Juravsky et al. 2024). vLLM 0.32 has removed its form of it, cascade attention. A step reads and
writes fixed memory, so that it can be captured as a CUDA graph: in-place merges leave a captured graph valid.
"""

from __future__ import annotations

import gc
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from pipeline.estimate import flops
from pipeline.evaluate.decode import Slots, _attention_of
from pipeline.models.shape import Shape
from pipeline.train.memory import WIDTH

Row = dict[str, Any]
NO_GRAPHS = "CUDA graphs need a GPU"
LANGUAGES = ("sw", "te", "bn", "ja")
EXEMPLARS = 8
SPREAD = {"question": 0.4, "answer": 0.55}  # standard deviation of the logarithm of lengths: see `lengths`
FILLED = 16  # prompts in one forward pass
READ = 128  # positions: a step reads a multiple


def lengths(language: str, part: str, count: int, scale: float = 1.0) -> list[int]:
    """Token lengths of `count` MGSM questions or answers: the quantiles (i + 1/2) / count of a log-normal distribution.

    Means: flops.MGSM (Llama 3.1's tokenizer). Questions: the logarithms of the 250 questions' characters have standard
    deviations 0.40 (sw, te, bn) and 0.38 (ja), the longest is 2.3 to 2.5 means: cut there. Answers: 0.55, assumed, so
    that the longest of 250 is 4 means (flops.LONGEST), cut at eval.max_gen_toks. In one shuffled order.
    """
    question, _, answer = flops.MGSM[language]
    mean = scale * (question if part == "question" else answer)
    most = 2.5 * mean if part == "question" else scale * flops.ROOM.get(language, 512)
    spread = SPREAD[part]
    quantiles = (statistics.NormalDist().inv_cdf((place + 0.5) / count) for place in range(count))
    drawn = [mean * math.exp(spread * quantile - spread**2 / 2) for quantile in quantiles]
    random.Random(f"{language} {part}").shuffle(drawn)
    return [max(2, round(min(one, most))) for one in drawn]


# ---------------------------------------------------------------------------------------------------- attention


def attention_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, visible: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped-query attention and the log-sum-exp of its scores, in float32 or wider; keys are not copied per head.

    query [rows, heads, tokens, width], key and value [rows, key heads, positions, width], visible (boolean) [rows or 1,
    1, tokens, positions] -> [rows, heads, tokens, width], [rows, heads, tokens]. Where nothing is visible: 0, -inf.
    """
    (rows, heads, tokens, width), (groups, positions) = query.shape, key.shape[1:3]
    grouped = (query * scale).reshape(rows, groups, -1, width)
    scores = (grouped @ key.transpose(2, 3)).view(rows, groups, -1, tokens, positions)
    scores = scores.to(torch.promote_types(query.dtype, torch.float32))
    if visible is not None:
        scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    total = scores.logsumexp(dim=-1)
    weights = (scores - total.clamp(min=torch.finfo(total.dtype).min)[..., None]).exp().to(value.dtype)
    found = weights.view(rows, groups, -1, positions) @ value
    return found.view(rows, heads, tokens, value.shape[3]), total.view(rows, heads, tokens)


def flash_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention_with_lse` for as many key heads as query heads, by torch's fused kernels: of a CPU, or of a GPU
    below float32."""
    operations = torch.ops.aten
    if query.device.type == "cpu":
        return operations._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    found, total = operations._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    return found, total[..., : query.shape[2]]


def prefix_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all rows to one prefix, whose keys and values, [1, key heads, positions, width], are read once: the
    rows and the heads of a group are queries of one key head."""
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    together = query.reshape(rows, groups, -1, width).transpose(0, 1).reshape(1, groups, -1, width)
    found, total = flash_with_lse(together, key, value, scale)
    found = found.reshape(groups, rows, -1, value.shape[3]).transpose(0, 1)
    total = total.reshape(groups, rows, -1).transpose(0, 1)
    return found.reshape(rows, heads, tokens, -1), total.reshape(rows, heads, tokens)


def merge_attention(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Attention to two disjoint sets of keys together, from that to each and its log-sum-exp."""
    total = torch.logaddexp(first[1], second[1])
    parts = [found * (of_part - total).exp()[..., None] for found, of_part in (first, second)]
    return (parts[0] + parts[1]).to(first[0].dtype)


# ---------------------------------------------------------------------------------------------------- decoding


class FixedSlots(Slots):
    """Slots whose step reads and writes fixed memory, so that it can be a CUDA graph.

    merged: attention to the prefix and to the row's tokens are computed apart and merged by log-sum-exp; else all
    scores in one softmax, as in evaluate/decode.py. Without a prefix each row reads all of its tokens.
    """

    def __init__(self, model: Any, rows: int, length: int, merged: bool = True, graphs: bool = False) -> None:
        super().__init__(model, rows, length, draft=0)
        self.merged, self.with_graphs = merged, graphs
        self.ids, self.places = (torch.zeros(rows, 1, dtype=torch.long, device=self.device) for _ in range(2))
        self.numbers = torch.arange(max(rows, length), device=self.device)
        self.graphs: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}

    def share(self, prefix: Sequence[int]) -> None:
        layers: list[Any] = list(self.layers)
        before = [layer.prefix for layer in layers]
        self.written, self.reads, self.plain_layers = None, 0, 0
        super().share(prefix)
        for layer, old in zip(layers, before, strict=True):
            if old is not None:  # graphs read it there
                for there, new in zip(old, layer.prefix, strict=True):
                    there.copy_(new)
                layer.prefix = old

    def fill_rows(self, first: int, prompts: Sequence[Sequence[int]]) -> None:
        """Write prompts to the rows from `first` on; the last token of each is the input of the row's next step."""
        width = max(map(len, prompts)) - 1
        padded = torch.tensor([[*prompt[:-1], *[0] * (width + 1 - len(prompt))] for prompt in prompts])
        rows = slice(first, first + len(prompts))
        self.ids[rows, 0] = torch.tensor([prompt[-1] for prompt in prompts], device=self.device)
        self.places[rows, 0] = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        places = self.numbers[None, :width]
        self.reads, self.written = 0, (self.numbers[rows, None], places)
        self.model(
            input_ids=padded.to(self.device), position_ids=(self.shared + places).expand(padded.shape),
            past_key_values=self, logits_to_keep=1,
        )  # fmt: skip

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.ids[target], self.places[target] = self.ids[source], self.places[source]

    def advance(self, count: int, reads: int) -> torch.Tensor:
        """One token of the first `count` rows, [count], which read `reads` positions each; it is their next input."""
        places = self.places[:count]
        self.reads, self.written = reads, (self.numbers[:count, None], places)
        mask = self.numbers[None, None, None, :reads] <= places[:, None, :, None]
        if not self.merged:
            least = torch.finfo(self.model.dtype).min
            mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device).masked_fill(~mask, least)
        logits = self.model(
            input_ids=self.ids[:count], position_ids=self.shared + places, attention_mask=mask,
            past_key_values=self, logits_to_keep=1,
        ).logits  # fmt: skip
        chosen = logits[:, -1].argmax(dim=-1)
        self.ids[:count, 0] = chosen
        places.add_(1).clamp_(max=self.length - 1)  # rows that have ended
        return chosen

    def next_tokens(self, count: int, reads: int) -> torch.Tensor:
        """As `advance`, by a CUDA graph where `graphs` is set, captured at the first step of this size."""
        if not self.with_graphs:
            return self.advance(count, reads)
        if (count, reads) not in self.graphs:
            self.graphs[count, reads] = self._capture(count, reads)
        graph, chosen = self.graphs[count, reads]
        graph.replay()
        return chosen

    def _capture(self, count: int, reads: int) -> tuple[Any, torch.Tensor]:
        before, stream = (self.ids.clone(), self.places.clone()), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.advance(count, reads)  # libraries allocate their workspaces
        torch.cuda.current_stream().wait_stream(stream)
        self.ids.copy_(before[0])
        self.places.copy_(before[1])
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            chosen = self.advance(count, reads)
        return graph, chosen

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **other: Any
    ) -> Any:
        """As in `Slots`, for filling rows and for `merged` steps by log-sum-exp."""
        if self.written is None or (self.reads and not self.merged):
            return super().attend(module, query, key, value, mask, scaling=scaling, **other)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if self.reads:
            own = attention_with_lse(query, key, value, scale, mask)
        else:  # prompts, padded on the right; the prefix comes before the keys
            group = query.shape[1] // key.shape[1]
            keys, values = (states[:, :, self.shared :].repeat_interleave(group, 1) for states in (key, value))
            own = flash_with_lse(query, keys, values, scale, causal=True)
        found = own[0]
        if self.shared:
            found = merge_attention(prefix_attention(query, *self.layers[module.layer_idx].prefix, scale), own)
        return found.transpose(1, 2).contiguous(), None


def answer(slots: FixedSlots, prompts: Sequence[Sequence[int]], new: Sequence[int]) -> tuple[list[list[int]], int]:
    """Answers of `new` tokens to each prompt, and steps: a row that ends is refilled, and rows are halved at the end.

    Each step's tokens come to the host, where an evaluation looks for stop strings.
    """
    waiting = deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index])))
    answers: list[list[int]] = [[] for _ in prompts]
    rows: list[int] = []
    steps = 0
    while waiting or rows:
        while waiting and slots.rows - len(rows) >= min(FILLED, len(waiting), max(1, slots.rows // 8)):
            taken = [waiting.popleft() for _ in range(min(FILLED, len(waiting), slots.rows - len(rows)))]
            slots.fill_rows(len(rows), [prompts[index] for index in taken])
            rows += taken
        count = slots.rows
        while count // 2 >= len(rows):
            count //= 2
        last = max(len(prompts[index]) + len(answers[index]) for index in rows)
        chosen = slots.next_tokens(count, min(-(-last // READ) * READ, slots.length)).tolist()
        steps += 1
        for index, token in zip(rows, chosen, strict=False):
            answers[index].append(token)
        for place in reversed(range(len(rows))):
            if len(answers[rows[place]]) == new[rows[place]]:
                final = rows.pop()
                if place < len(rows):
                    slots.move(len(rows), place)
                    rows[place] = final
    return answers, steps


# ---------------------------------------------------------------------------------------------------- parts


def random_model(shape: Shape, dtype: torch.dtype) -> Any:
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width, max_position_embeddings=16384, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def random_tokens(count: int, vocabulary: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(4, vocabulary), k=count)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_a_step(step: Callable[[], Any], steps: int, rounds: int = 1) -> float:
    """Mean over `steps`, the smallest of `rounds`; two more steps come first."""
    step()
    step()
    means = []
    for _ in range(rounds):
        wait()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        means.append((time.perf_counter() - begun) / steps)
    return min(means)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def launch(given: dict[str, Any]) -> Iterator[Row]:
    """Seconds that a layer costs when its arithmetic costs nothing: narrow layers, one row, by the difference between
    two depths."""
    depths, steps = given["depths"], given["launch_steps"]

    def step_of(way: str, layers: int) -> float:
        model = random_model(replace(given["narrow"], layers=layers), torch.bfloat16)
        tokens = random_tokens(32, given["narrow"].vocabulary, "launch")
        if way == "transformers, eager":
            cache, ids = DynamicCache(config=model.config), torch.tensor([tokens], device=model.device)
            model(input_ids=ids, past_key_values=cache)
            return seconds_a_step(lambda: model(input_ids=ids[:, :1], past_key_values=cache), steps, 3)
        slots = FixedSlots(model, 1, READ, graphs=way.endswith("graph"))
        with _attention_of(slots):
            slots.share(tokens)
            slots.fill_rows(0, [tokens])
            return seconds_a_step(lambda: slots.next_tokens(1, READ), steps, 3)

    for way in ("transformers, eager", "prefix apart, eager", "prefix apart, CUDA graph"):
        row: Row = {"part": "launch", "name": f"launch of a layer, {way}", "compared": {}}
        if reason := no_graph(way):
            yield row | {"not_tried": reason}
            continue
        try:
            few, many = (step_of(way, layers) for layers in depths)
        except RuntimeError as error:
            yield row | {"not_tried": f"{way}: {str(error)[:200]}"}
            continue
        measured = 1e3 * (many - few) / (depths[1] - depths[0])
        predicted = 0.0 if way.endswith("graph") else 1e3 * flops.LAUNCH
        row["compared"] = {"ms a layer": {"predicted": predicted, "measured": measured}}
        yield row | {"outside_layers_ms": 1e3 * few - depths[0] * measured}


def no_graph(way: str) -> str:
    return NO_GRAPHS if way.endswith("graph") and not torch.cuda.is_available() else ""


FORMS = ("prefix in each row", "prefix once, one softmax", "prefix once, log-sum-exp")


@torch.no_grad()
def decode(given: dict[str, Any], bandwidth: float) -> Iterator[Row]:
    """Steps of decoding after Swahili's 8 exemplars, half of a mean answer in: tokens a second, share of bandwidth.

    Bytes: all weights but the embeddings, and the keys and values of every position that is read, once where the prefix
    is read once.
    """
    shape, scale = given["shape"], given["scale"]
    question, exemplar, new = (max(1, round(scale * tokens)) for tokens in flops.MGSM["sw"])
    model = random_model(shape, torch.bfloat16)
    prefix = random_tokens(EXEMPLARS * exemplar, shape.vocabulary, "prefix")
    for rows, form, how in product(given["rows"], FORMS, ("eager", "CUDA graph")):
        row: Row = {"part": "decode", "name": f"{form}, {how}, {rows} rows", "compared": {}}
        if reason := no_graph(how):
            yield row | {"not_tried": reason}
            continue
        shared = [] if form == FORMS[0] else prefix
        prompts = [
            [*([] if shared else prefix), *random_tokens(question + new // 2, shape.vocabulary, f"{one}")]
            for one in range(rows)
        ]
        reads = len(prompts[0]) + given["decode_steps"] + 3
        try:
            slots = FixedSlots(model, rows, reads, merged=form != FORMS[1], graphs=how != "eager")
            with _attention_of(slots):
                if shared:
                    slots.share(shared)
                for first in range(0, rows, FILLED):
                    slots.fill_rows(first, prompts[first : first + FILLED])
                seconds = seconds_a_step(lambda: slots.next_tokens(rows, reads), given["decode_steps"])  # noqa: B023
        except RuntimeError as error:  # out of memory, or a step that cannot be captured
            yield row | {"not_tried": f"{how}: {str(error)[:200]}"}
            continue
        finally:
            slots = None  # type: ignore[assignment]
            free_memory()
        weights = shape.layers * shape.layer + shape.embedding
        moved = 2 * (weights + (len(shared) + rows * reads) * shape.kv_values)
        row["compared"] = {"step ms": {"predicted": 1e3 * moved / bandwidth, "measured": 1e3 * seconds}}
        yield row | {
            "tokens_a_second": rows / seconds, "share_of_bandwidth": moved / seconds / bandwidth,
            "gigabytes_a_step": moved / 1e9,
        }  # fmt: skip


def configurations(bottom: int) -> Iterator[dict[str, int]]:
    """27 layer swaps: 3 bottom_layers x 3 top_layers x 3 bottom_transition. One count changes at a time, by one."""
    tops, zones = [1, 2, 3], [0, 1, 2]
    for bottom_layers in range(bottom, bottom + 3):
        for top in tops:
            for zone in zones:
                yield {"bottom_layers": bottom_layers, "top_layers": top, "bottom_transition": zone}
            zones.reverse()
        tops.reverse()


class LiveMerges:
    """Layer swaps of two checkpoints in bfloat16, applied to a model in memory (pipeline.merge.live).

    The checkpoints are the model's own weights, saved once: what is copied does not depend on the values.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        from pipeline.merge.live import Live
        from pipeline.models.checkpoint import Checkpoint

        model.save_pretrained(folder / "math")
        (folder / "language").mkdir()
        for file in (folder / "math").iterdir():
            os.link(file, folder / "language" / file.name)
        self.sources = {side: Checkpoint.open(folder / side) for side in ("math", "language")}
        self.live, self.parameters = Live(model, None), dict(model.named_parameters())

    def apply(self, counts: dict[str, int]) -> tuple[int, float]:
        """Bytes of the parameters that changed, and seconds."""
        from pipeline.merge.merge import open_merge
        from pipeline.merge.methods.layer_swap import LayerSwap

        owners = dict.fromkeys(("embeddings", "final_norm", "head"), "math")
        wait()
        begun = time.perf_counter()
        swap = LayerSwap(math="m", language="l", **counts, **owners)  # type: ignore[arg-type]
        changed = self.live.apply(open_merge(swap, self.sources))
        wait()
        return sum(self.parameters[name].nbytes for name in changed), time.perf_counter() - begun


def live_merges(merges: LiveMerges, chosen: list[dict[str, int]]) -> Row:
    """From each configuration to the next, the last to the first included."""
    merges.apply(chosen[-1])
    steps = [merges.apply(counts) for counts in chosen]
    bytes_moved, seconds = (statistics.median(column) for column in zip(*steps, strict=True))
    predicted = flops.merge_seconds(bytes_moved, 0)
    total_bytes, total_seconds = (sum(column) for column in zip(*steps, strict=True))
    return {
        "part": "sweep", "name": f"live merges of {len(chosen)} configurations",
        "compared": {"median seconds": {"predicted": predicted, "measured": seconds}},
        "seconds_in_all": total_seconds, "gigabytes_a_second": total_bytes / total_seconds / 1e9,
        "gigabytes": [size / 1e9 for size, _ in steps], "seconds": [spent for _, spent in steps],
    }  # fmt: skip


def ideal_seconds(shape: Shape, prefix: int, questions: Sequence[int], new: Sequence[int], gpu: flops.Gpu) -> float:
    """Seconds to answer all questions at once at the card's rates: products of the prompts, then in each step the
    weights and the prefix once and each row's own keys and values."""
    each = 2.0 * shape.layers * (shape.attention + shape.mlp)
    core = 4.0 * shape.layers * shape.heads * shape.head_width
    products = (prefix + sum(questions)) * each
    products += core * (prefix**2 / 2 + sum(tokens * (prefix + tokens / 2) for tokens in questions))
    once = shape.layers * shape.layer + shape.embedding + prefix * shape.kv_values
    own = sum(count * (tokens + count / 2) for tokens, count in zip(questions, new, strict=True)) * shape.kv_values
    return products / gpu.rate("bfloat16") + 2 * (max(new) * once + own) / gpu.bandwidth


def rows_that_fit(shape: Shape, length: int, questions: int) -> int:
    """Rows of `length` positions that fit into 85 % of the GPU's free memory, at most all questions."""
    if not torch.cuda.is_available():
        return max(2, questions // 2)  # so that rows are refilled
    free_memory()
    return max(1, min(questions, int(0.85 * torch.cuda.mem_get_info()[0]) // (2 * length * shape.kv_values)))


def quantiles(counts: Sequence[int]) -> dict[str, int]:
    ordered = sorted(counts)
    places = {"min": 0, "median": len(ordered) // 2, "p90": len(ordered) * 9 // 10, "max": -1}
    return {name: ordered[place] for name, place in places.items()} | {"sum": sum(ordered)}


def answer_language(
    given: dict[str, Any], model: Any, language: str, graphs: bool, change: Callable[[int], Any]
) -> Row:
    """All questions of a language under two configurations, change(0) and change(1): seconds of the first, in which
    graphs are captured, and of the second."""
    shape, scale, count = given["shape"], given["scale"], given["sweep_questions"]
    questions, new = (lengths(language, part, count, scale) for part in ("question", "answer"))
    prefix = random_tokens(EXEMPLARS * round(scale * flops.MGSM[language][1]), shape.vocabulary, language)
    prompts = [random_tokens(size, shape.vocabulary, f"{language} {place}") for place, size in enumerate(questions)]
    length = max(questions) + max(new) + 1
    slots = FixedSlots(model, rows_that_fit(shape, length, count), length, graphs=graphs)
    seconds, steps = [], 0
    with _attention_of(slots):
        for number in range(2):
            change(number)
            wait()
            begun = time.perf_counter()
            slots.share(prefix)
            _, steps = answer(slots, prompts, new)
            seconds.append(time.perf_counter() - begun)
    return {
        "rows": slots.rows, "steps": steps, "graphs": len(slots.graphs), "prefix_tokens": len(prefix),
        "question_tokens": quantiles(questions), "answer_tokens": quantiles(new),
        "first_seconds": seconds[0], "seconds": seconds[1], "tokens_a_second": sum(new) / seconds[1],
        "ideal": (len(prefix), questions, new),
    }  # fmt: skip


@torch.no_grad()
def sweep(given: dict[str, Any], gpu: flops.Gpu) -> Iterator[Row]:
    """Live merges of 27 configurations; two of them answer all questions of each language, random tokens of stated
    `lengths`; from these the time of all 27."""
    shape, chosen = given["shape"], list(configurations(given["bottom"]))
    model = random_model(shape, torch.bfloat16)
    merge_seconds, total, ideal, known = 0.0, 0.0, 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        change: Callable[[int], Any] = lambda number: None  # noqa: E731
        needed, free = WIDTH["bfloat16"] * shape.parameters, shutil.disk_usage(name).free
        if free > 1.1 * needed:
            merges = LiveMerges(model, Path(name))
            yield (row := live_merges(merges, chosen))
            merge_seconds = row["seconds_in_all"]
            change = lambda number: merges.apply(chosen[number])  # noqa: E731
        else:
            lacking = f"{needed / 1e9:.0f} GB of disk needed, {free / 1e9:.0f} free"
            yield {"part": "sweep", "name": "live merges", "compared": {}, "not_tried": lacking}
        for language in LANGUAGES:
            row = {"part": "sweep", "name": f"{given['sweep_questions']} questions, {language}", "compared": {}}
            found = None
            for graphs in (True, False):
                reason = no_graph("CUDA graph" if graphs else "eager")
                if not reason:
                    try:
                        found = answer_language(given, model, language, graphs, change)
                        break
                    except RuntimeError as error:  # out of memory, or a step that cannot be captured
                        reason = str(error)[:200]
                    free_memory()
                row["without_graphs" if graphs else "not_tried"] = reason
            if found:
                possible = ideal_seconds(shape, *found.pop("ideal"), gpu)
                row["compared"] = {"seconds": {"predicted": possible, "measured": found["seconds"]}}
                total += found["first_seconds"] + (len(chosen) - 1) * found["seconds"]
                ideal, known = ideal + len(chosen) * possible, known + 1
            yield row | (found or {})
            free_memory()
    if merge_seconds and known == len(LANGUAGES):
        yield {
            "part": "sweep", "name": f"{len(chosen)} configurations x {known} languages",
            "compared": {"minutes": {"predicted": ideal / 60, "measured": (total + merge_seconds) / 60}},
        }  # fmt: skip
