"""scripts/bench_gpu.py on a tiny shape: every part measures, and one that fails or is too slow loses nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipeline.estimate import flops
from pipeline.evaluate.decode import _attention_of

SCRIPT = Path(__file__).parents[1] / "scripts/bench_gpu.py"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench() -> Any:
    return load(SCRIPT)


@pytest.fixture(scope="module")
def decoding() -> Any:
    return load(SCRIPT.with_name("bench_gpu_decode.py"))


def run(out: Path, *words: str, **environment: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text()), done.stdout


def test_all_parts_on_a_tiny_shape(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported torch: of the parts' own processes, the next two tests."""

    def run_here(part: str, size: str, card: dict[str, Any], _: float, take: Any) -> str:
        for row in bench.PARTS[part](size, card):
            take(json.loads(json.dumps(row)))
        return ""

    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(bench, "run", run_here)
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--size", "tiny", "--out", str(tmp_path / "gpu.json")])
    bench.main()
    record, told = json.loads((tmp_path / "gpu.json").read_text()), capsys.readouterr().out
    assert record["failed"] == {}
    assert record["card"]["device"] and record["card"]["versions"]["torch"] and record["card"]["bandwidth"] > 0
    rows = {row["name"]: row for row in record["rows"]}
    ways = ["full, bfloat16, adamw_8bit", "bare, bfloat16, adamw_8bit", "full, float32, adamw", "lora, bfloat16, adamw"]
    ways += [f"{way}, bfloat16, adamw_8bit" for way in ("partial A math", "partial C math", "simultaneous B")]
    for name in ways:
        found = rows[name]["compared"]
        assert found["seconds a step"]["measured"] > 0 and found["seconds a step"]["predicted"] > 0
        assert found["parameters trained"]["measured"] == found["parameters trained"]["predicted"]  # counted by torch
    for name in (
        "generate_until, shared, bfloat16",
        "generate_until, HFLM, bfloat16",
        "generate_until, shared, float32",
    ):
        assert set(rows[name]["compared"]) == {"prefill seconds", "decode seconds"}
        assert rows[name]["limit_of_bandwidth_ms"] > 0 and rows[name]["decode_step_ms"] > 0
    no_graphs = [row for name, row in rows.items() if "CUDA graph" in name]
    assert len(no_graphs) == 4 and all(row["not_tried"] == "CUDA graphs need a GPU" for row in no_graphs)
    for form in ("prefix in each row", "prefix once, one softmax", "prefix once, log-sum-exp"):
        assert rows[f"{form}, eager, 3 rows"]["tokens_a_second"] > 0
        assert rows[f"{form}, eager, 3 rows"]["share_of_bandwidth"] > 0
    layer = 2 * (32 * 4 * (2 * 8 + 2 * 4) + 3 * 32 * 112 + 2 * 32)  # bytes
    merges = rows["live merges of 27 configurations"]
    assert len(merges["seconds"]) == 27
    assert sorted({round(size * 1e9 / layer) for size in merges["gigabytes"]}) == [1, 2, 6]  # 6: back to the first
    for language in ("sw", "te", "bn", "ja"):
        assert rows[f"6 questions, {language}"]["without_graphs"] == "CUDA graphs need a GPU"
        assert rows[f"6 questions, {language}"]["tokens_a_second"] > 0
    assert rows["27 configurations x 4 languages"]["compared"]["minutes"]["measured"] > 0
    assert rows["loss, vocabulary 2000, fused head"]["seconds"] > 0
    assert rows["TIES"]["different_entries"] == 0 and rows["TIES"]["entries"] > 20_000
    assert all(f", {name}: " in told for name in rows)


def test_a_part_that_fails_is_said_and_the_others_stand(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("raise ImportError('no lm_eval on this machine')\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    record, told = run(tmp_path / "gpu.json", "--parts", "scoring", PYTHONPATH=path)
    assert list(record["failed"]) == ["scoring"] and "no lm_eval on this machine" in record["failed"]["scoring"]
    assert record["card"]["bf16"] > 0 and "scoring: exit status 1" in told


def test_an_unknown_part_is_refused(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--parts", "card,live"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--parts live: choose from card, launch, decode" in capsys.readouterr().err


def test_a_part_that_takes_too_long_is_ended(bench: Any) -> None:
    rows: list[Any] = []
    assert bench.run("card", "tiny", {}, 0.3, rows.append) == "ended after its 0 s" and rows == []


def test_what_does_not_fit_by_arithmetic_is_not_tried(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    card = {"device": "NVIDIA H100 80GB HBM3", "memory": 84 * 10**9}
    row = bench.one_way("full", "float32", "adamw", "8b", card)
    assert row["not_tried"] == "132 GB needed, 84 there" and row["compared"] == {}
    assert bench.gpu_of(card) is flops.GPUS["h100_80"]
    assert "132 GB needed" in bench.line(row)


def test_the_time_budgets_of_all_parts_fit_into_the_minutes(bench: Any) -> None:
    assert sum(bench.BUDGETS.values()) <= 19 * 60 and max(bench.BUDGETS.values()) < 600
    assert set(bench.BUDGETS) == set(bench.PARTS)


# ---------------------------------------------------------------------------------------------------- decoding


def heads_and_keys(*sizes: tuple[int, ...], scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_prefix_and_suffix_merged_by_log_sum_exp_are_plain_attention(decoding: Any, magnitude: float) -> None:
    """6 query heads of 2 key heads, 3 query tokens, rows of 0 to 7 tokens after a prefix of 11, float64."""
    rows, heads, groups, tokens, width, prefix, longest = 4, 6, 2, 3, 8, 11, 7
    query, first_keys, first_values, keys, values = heads_and_keys(
        (rows, heads, tokens, width), (1, groups, prefix, width), (1, groups, prefix, width),
        (rows, groups, longest, width), (rows, groups, longest, width), scale=magnitude,
    )  # fmt: skip
    suffixes = torch.tensor([0, 1, 5, 7])
    visible = torch.arange(longest) < suffixes[:, None, None, None] - torch.tensor([2, 1, 0])[:, None]
    own = decoding.attention_with_lse(query, keys, values, 0.3, visible)
    found = decoding.merge_attention(decoding.prefix_attention(query, first_keys, first_values, 0.3), own)
    for row, head, token in ((r, h, t) for r in range(rows) for h in range(heads) for t in range(tokens)):
        seen, group = int(visible[row, 0, token].sum()), head // (heads // groups)
        every_key = torch.cat([first_keys[0, group], keys[row, group, :seen]])
        every_value = torch.cat([first_values[0, group], values[row, group, :seen]])
        plain = functional.scaled_dot_product_attention(
            query[None, None, row, head, token : token + 1], every_key[None, None], every_value[None, None], scale=0.3
        )
        assert (found[row, head, token] - plain[0, 0, 0]).abs().max() < 1e-10 * magnitude
    assert own[0][0].abs().max() == 0 and own[1][0].max() == -torch.inf  # nothing of its own is visible


def test_both_forms_of_attention_give_the_same_log_sum_exp(decoding: Any) -> None:
    query, keys, values = heads_and_keys((3, 4, 9, 8), (3, 4, 9, 8), (3, 4, 9, 8))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    for visible in (None, causal):
        fused = decoding.flash_with_lse(query, keys, values, 0.4, causal=visible is not None)
        for one, two in zip(fused, decoding.attention_with_lse(query, keys, values, 0.4, visible), strict=True):
            assert (one - two).abs().max() < 1e-10


def small_model(bench: Any, decoding: Any, dtype: torch.dtype = torch.float64) -> Any:
    model = decoding.random_model(bench.TINY, dtype)
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.ndim == 2 else 1  # wider: answers that differ from prompt to prompt
    return model


PROMPTS, NEW = [7, 3, 12, 5, 2], [4, 9, 2, 11, 6]  # tokens


def tokens_of_prompts(decoding: Any) -> tuple[list[int], list[list[int]]]:
    return decoding.random_tokens(40, 1024, "p"), [decoding.random_tokens(size, 1024, f"{size}") for size in PROMPTS]


@torch.no_grad()
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_answers_in_fixed_slots_are_those_of_transformers(
    bench: Any, decoding: Any, merged: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 prompts in 3 rows, which are refilled and halved; the weights change between two rounds."""
    monkeypatch.setattr(decoding, "READ", 8)
    monkeypatch.setattr(decoding, "FILLED", 2)
    model = small_model(bench, decoding)
    prefix, rests = tokens_of_prompts(decoding)
    prompts = rests if shared else [prefix + rest for rest in rests]
    slots = decoding.FixedSlots(model, 3, max(map(len, prompts)) + max(NEW) + 1, merged)
    for _ in range(2):
        with _attention_of(slots):
            if shared:
                slots.share(prefix)
            answers, steps = decoding.answer(slots, prompts, NEW)
        assert 11 <= steps < sum(NEW)
        for rest, count, answer in zip(rests, NEW, answers, strict=True):
            ids = torch.tensor([prefix + rest])
            alone = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
            assert alone[0, ids.shape[1] :].tolist() == answer
        assert len({answer[0] for answer in answers}) > 2
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))


@torch.no_grad()
def test_capturing_a_step_leaves_the_rows_as_they_were(
    bench: Any, decoding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for CUDA graphs on the CPU: what is captured is not computed, and replaying computes it. The memory
    that a graph reads stays the same when the prefix is computed again."""
    captured: list[tuple[int, int]] = []

    class Graph:
        def pool(self) -> str:
            return "pool"

        def replay(self) -> None:
            size = next(size for size, (graph, _) in slots.graphs.items() if graph is self)
            slots.graphs[size][1].copy_(slots.advance(*size))

    @contextmanager
    def capture(graph: Graph, pool: str | None) -> Iterator[None]:
        assert pool == ("pool" if captured else None)
        rows = slots.ids.clone(), slots.places.clone()
        yield
        captured.append((slots.written[0].numel(), slots.reads))
        slots.ids.copy_(rows[0])
        slots.places.copy_(rows[1])

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext())
    monkeypatch.setattr(decoding, "READ", 4)
    model, (prefix, prompts) = small_model(bench, decoding), tokens_of_prompts(decoding)
    slots = decoding.FixedSlots(model, 3, 24, graphs=True)
    eager = decoding.FixedSlots(model, 3, 24)
    places = []
    for _ in range(2):
        answers = []
        for one in (eager, slots):
            with _attention_of(one):
                one.share(prefix)
                answers.append(decoding.answer(one, prompts, NEW)[0])
        assert answers[0] == answers[1]
        places.append([states.data_ptr() for layer in slots.layers for states in (*layer.prefix, layer.keys)])
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    assert places[0] == places[1] and len(captured) == len(slots.graphs) > 1


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_step_gives_the_eager_tokens_also_after_a_live_change(bench: Any, decoding: Any) -> None:
    model = small_model(bench, decoding, torch.bfloat16)
    prefix, prompts = tokens_of_prompts(decoding)
    both = [decoding.FixedSlots(model, 3, 40, graphs=graphs) for graphs in (False, True)]
    for _ in range(2):
        answers = []
        for slots in both:
            with _attention_of(slots):
                slots.share(prefix)
                answers.append(decoding.answer(slots, prompts, NEW)[0])
        assert answers[0] == answers[1] and both[1].graphs
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))


@pytest.mark.parametrize("language", ["sw", "te", "bn", "ja"])
def test_lengths_have_the_stated_distribution(decoding: Any, language: str) -> None:
    question, _, answer = flops.MGSM[language]
    questions, answers = (decoding.lengths(language, part, 250) for part in ("question", "answer"))
    assert statistics.mean(questions) == pytest.approx(question, rel=0.02) and max(questions) <= 2.5 * question + 1
    assert statistics.mean(answers) == pytest.approx(answer, rel=0.02)
    assert 3 < max(answers) / answer < 4.5 and max(answers) <= flops.ROOM.get(language, 512)
    assert answers == decoding.lengths(language, "answer", 250) != sorted(answers)


@pytest.mark.real_data
@pytest.mark.parametrize("language", ["sw", "te", "bn", "ja"])
def test_the_spread_of_questions_is_that_of_mgsm(decoding: Any, language: str) -> None:
    lines = (
        (Path(os.environ["PIPELINE_TEST_DATA"]) / f"mgsm/{language}/test.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    sizes = [len(json.loads(line)["question"]) for line in lines]
    logarithms = torch.tensor(sizes, dtype=torch.float64).log()
    assert float(logarithms.std()) == pytest.approx(decoding.SPREAD["question"], abs=0.025)
    assert 2.2 < max(sizes) / statistics.mean(sizes) < 2.6


def test_27_configurations_of_which_neighbours_differ_in_one_count(decoding: Any) -> None:
    chosen = [tuple(counts.values()) for counts in decoding.configurations(4)]
    assert len(set(chosen)) == 27 and {counts[0] for counts in chosen} == {4, 5, 6}
    for one, two in zip(chosen, chosen[1:], strict=False):
        assert sum(abs(a - b) for a, b in zip(one, two, strict=True)) == 1


def test_without_disk_or_memory_the_rest_of_the_sweep_is_measured(
    bench: Any, decoding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))
    answered = decoding.answer_language

    def answer_language(given: Any, model: Any, language: str, *rest: Any) -> Any:
        if language != "ja":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return answered(given, model, language, *rest)

    monkeypatch.setattr(decoding, "answer_language", answer_language)
    merges, *rows = decoding.sweep(bench.SIZES["tiny"], flops.GPUS["h100_80"])
    assert merges["not_tried"] == "0 GB of disk needed, 0 free"
    assert [row.get("not_tried") for row in rows] == ["CUDA out of memory"] * 3 + [None]  # no total of one language
    assert rows[3]["compared"]["seconds"]["measured"] > 0
