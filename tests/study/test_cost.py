"""Costs against hand counts, torch's counts, autograd's memory, and the papers' studies."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixture_types import Patch
from safetensors.torch import save_file

from pipeline.config.compose import compose
from pipeline.config.training import Partition, Sft
from pipeline.errors import PipelineError
from pipeline.estimate import flops
from pipeline.estimate.flops import QuestionSet, cards, question_set, scoring_seconds
from pipeline.estimate.gpu_budget import bytes_of_training
from pipeline.evaluate.memory import scoring_memory
from pipeline.models.shape import LLAMA_8B, SHAPES, Shape, shape_of
from pipeline.runs.disk import check_disk
from pipeline.runs.manifest import Manifest
from pipeline.runs.run import External, Run
from pipeline.stages.rows import bytes_of_merge
from pipeline.train.memory import (
    full_model,
    layer_bytes,
    one_side,
    trained_parameters,
    training_memory,
)

H100 = cards()["h100_80"]
STEP = 0.5  # seconds of a layer's small kernels

# --- shapes ---


@pytest.mark.parametrize("kind", ["llama", "qwen2", "cohere"])
def test_a_shape_is_read_from_a_config(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(kind, num_key_value_heads=2, vocab_size=64, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())


def test_what_is_trained_is_counted_as_the_trainer_counts_it() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    from pipeline.models.anatomy import anatomy
    from pipeline.models.partition import sides_of_all

    cut = Partition("own", 2, 1, all_attention=True)
    config = CohereConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=2,
        vocab_size=32,
    )
    with torch.device("meta"):
        named = dict(CohereForCausalLM(config).named_parameters())
    side_of = sides_of_all(cut, anatomy(named))
    shape = shape_of(config.to_dict())
    for side in ("math", "language"):
        there = sum(p.numel() for name, p in named.items() if side_of[name] == side)
        assert trained_parameters(shape, one_side(shape, cut, side)) == there
    assert trained_parameters(shape, full_model(shape)) == shape.parameters
    assert (
        trained_parameters(LLAMA_8B, full_model(LLAMA_8B), 64) == 167_772_160
    )  # as PEFT makes them
    falcon = SHAPES["falcon3_7b_instruct"]
    assert trained_parameters(falcon, full_model(falcon), 64) == 177_078_272


# --- training ---

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def small_llama(layers: int, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=256, num_hidden_layers=layers, use_cache=False, **SMALL)
    return LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)


@pytest.mark.parametrize("way", ["full", "math", "language", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_are_those_that_torch_counts(way: str, checkpointing: bool) -> None:
    """FlopCounterMode over a step of a small Llama.

    Its loss computes the head once, TRL's twice.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from pipeline.train.load import choose_parameters

    cut = Partition("own", 2, 1)
    knobs: Mapping[str, Any] = {
        "full": {},
        "lora": {"adapter": "lora", "lora_rank": 4},
        "math": {"method": "partial", "side": "math"},
        "language": {"method": "partial", "side": "language"},
    }[way]
    network = small_llama(6)
    shape = shape_of(network.config.to_dict())
    model, _ = choose_parameters(network, Sft(name=way, **knobs), cut if "side" in knobs else None)
    model.train()
    if checkpointing:
        network.activation_checkpointing_enable()
        network.disable_input_require_grads()  # as our trainer does
    ids = torch.arange(2 * 40).view(2, 40)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    trained = one_side(shape, cut, way) if "side" in knobs else full_model(shape)
    ours = (
        flops.training_flops(shape, trained, 40, checkpointing, 4 if way == "lora" else 0)
        - 2 * shape.embedding
    )
    if (
        checkpointing and way != "lora"
    ):  # torch stops before the last product of a layer, whose output nobody needs
        ours -= 2 * shape.mlp / 3 * (4 if way == "math" else 6)  # the layers recomputed
    # The products of adapters themselves are not counted
    within = 0.1 if way == "lora" else 1e-12
    assert ours * 80 == pytest.approx(counter.get_total_flops(), rel=within)


def test_bytes_of_a_step_by_hand() -> None:
    assert flops.optimizer_bytes(recipe()) == 28
    assert flops.optimizer_bytes(recipe(weights="bfloat16")) == 14
    assert (
        flops.optimizer_bytes(recipe(weights="bfloat16", optimizer="adamw_8bit"))
        == 2 * 2 + 2 + 2 * 2
    )


@pytest.mark.parametrize(("weights", "autocast"), [("float32", True), ("bfloat16", False)])
def test_activations_are_what_autograd_keeps(weights: str, autocast: bool) -> None:
    """What one more layer keeps for the backward pass, weights and their casts aside."""
    tokens, kept = 2 * 48, []
    shape = shape_of(small_llama(1).config.to_dict())
    for layers in (2, 3):
        model = small_llama(layers, getattr(torch, weights), "sdpa").train()
        weight_shapes = {tuple(p.shape) for p in model.parameters()} | {
            tuple(p.shape[::-1]) for p in model.parameters()
        }
        seen: dict[int, torch.UntypedStorage] = {}

        def keep(
            tensor: torch.Tensor, seen: Any = seen, weight_shapes: Any = weight_shapes
        ) -> torch.Tensor:
            if tuple(tensor.shape) not in weight_shapes:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            states = model.model(input_ids=torch.zeros(2, 48, dtype=torch.long)).last_hidden_state
        kept.append(sum(storage.nbytes() for storage in seen.values()))
        del states
    assert tokens * layer_bytes(shape, weights) == pytest.approx(kept[1] - kept[0], rel=0.02)


def recipe(**knobs: Any) -> Sft:
    given = {"batch_size": 4, "precision": "bf16", "gradient_checkpointing": True, **knobs}
    return Sft(name="full", **given)


def test_memory_of_the_choices() -> None:
    """Llama 3.1 8B: 16, 8 and 6 bytes a parameter before activations; what fits a card of 80 GB."""
    whole = LLAMA_8B.parameters

    def bytes_of(**knobs: Any) -> dict[str, float]:
        return training_memory(LLAMA_8B, [full_model(LLAMA_8B)], 1024, recipe(**knobs))

    def held(**knobs: Any) -> float:
        found = training_memory(
            LLAMA_8B, [full_model(LLAMA_8B)], 0, recipe(batch_size=8, micro_batch_size=1, **knobs)
        )
        return sum(found[part] for part in ("weights", "gradients", "moments"))

    full = bytes_of()
    assert held() == 16 * whole and sum(full.values()) > H100.memory
    assert (
        bytes_of(micro_batch_size=2)["casts"] == 2 * whole
    )  # held besides gradients of the pass before
    eight = {"weights": "bfloat16", "optimizer": "adamw_8bit"}
    assert held(**eight) == 6 * whole and sum(bytes_of(**eight).values()) < H100.memory
    assert held(weights="bfloat16") == 8 * whole
    assert held(parallel="fsdp2", processes=4) == 4 * whole and held(processes=4) == 16 * whole
    for dtypes in ({}, eight):  # no copies of all weights under fsdp2
        shards = bytes_of(parallel="fsdp2", processes=4, **dtypes)
        assert 4 * 128256 * 4096 < shards["gathered"] < whole / 2
        assert "casts" not in shards and sum(shards.values()) < H100.memory
    assert "gathered" not in full and "gathered" not in bytes_of(parallel="fsdp2")
    of_adapters = trained_parameters(LLAMA_8B, full_model(LLAMA_8B), 64)
    frozen = (
        32 * (LLAMA_8B.attention + LLAMA_8B.mlp) + LLAMA_8B.embedding
    )  # in bf16; norms and head in fp32
    assert held(adapter="lora") == 4 * whole - 2 * frozen + 16 * of_adapters < 23.5e9
    assert held(adapter="lora", parallel="fsdp2", processes=4) == whole + 4 * of_adapters
    assert bytes_of(adapter="lora")["context"] == 1e9
    twice = recipe(precision="fp32", batch_size=8)
    on_cpu = training_memory(LLAMA_8B, [full_model(LLAMA_8B)], 4096, twice, on_gpu=False)
    assert (
        on_cpu["context"] == 0.7e9 and on_cpu["activations"] > 4 * 4 * 4096 * LLAMA_8B.vocabulary
    )  # all logits


def test_sides_that_take_turns_have_gradients_one_at_a_time() -> None:
    sides = [one_side(LLAMA_8B, Partition("B", 8, 4), side) for side in ("math", "language")]
    counts = [trained_parameters(LLAMA_8B, side) for side in sides]
    turns = training_memory(LLAMA_8B, sides, 1024, recipe(micro_batch_size=2))
    assert counts[0] > counts[1]
    assert turns["gradients"] == 4 * counts[0] and turns["moments"] == 8 * sum(counts)
    alone = training_memory(LLAMA_8B, sides[:1], 1024, recipe(micro_batch_size=4))
    assert (
        alone["casts"] == 2 * (LLAMA_8B.parameters - LLAMA_8B.outside) / 32
    )  # of one layer at a time, in bf16


# --- scoring ---


def test_scoring_by_hand() -> None:
    """A shape of one layer; a card that computes and moves 100 a second: nothing waits for Python.

    Six answers of two tokens in four rows, of which one in sixteen waits, and one that goes on
    alone.
    """
    shape = Shape(layers=1, width=2, inner=4, heads=1, kv_heads=1, head_width=2, vocabulary=8)
    rates = {"float32": (1.0, STEP), "bfloat16": (1.0, STEP)}
    card = flops.Gpu(
        bf16=100, fp32=100, bandwidth=100, memory=10**10, scoring=rates, bandwidth_share=1.0
    )
    matrices = 4 * 2 * 2 + 3 * 2 * 4  # 40
    kind = QuestionSet(questions=6, prefix=10, question=3, answer=2, room=100)
    prefill, decode = scoring_seconds(shape, [kind], card, "float32", batch_size=4)
    operations = 10 * (2 * matrices + 4 * 2 * 10) + 6 * 3 * (2 * matrices + 4 * 2 * 13) + 6 * 2 * 16
    assert prefill == pytest.approx(operations / 100)
    weights, token, full = (40 + 2 * 2 + 16) * 4, (2 * 2) * 4, 6 * 2 / 4

    def a_step(
        rows: int, prefix: int = 10, columns: int = 2 * (3 + 1)
    ) -> float:  # the exemplars once
        return (weights + (prefix + rows * columns) * token) / 100 + STEP

    assert decode == pytest.approx(full * a_step(4) + 98 * a_step(1))
    letters = scoring_seconds(shape, [QuestionSet(6, 10, 3)], card, "bfloat16", batch_size=4)
    assert letters == (pytest.approx(operations / 100), 0.0)
    short = QuestionSet(questions=6, prefix=10, question=3, answer=2, room=2)
    assert scoring_seconds(shape, [short], card, "float32", 4)[1] == pytest.approx(full * a_step(4))
    assert scoring_seconds(shape, [short], card, "float32", 8)[1] == pytest.approx(
        2 * a_step(6)
    )  # none filled again
    each_its_own = scoring_seconds(shape, [short], card, "float32", 4, share_prefix=False)[1]
    assert each_its_own == pytest.approx(full * a_step(4, 0, 10 + 8))


def test_three_products_in_bfloat16_take_a_third_of_its_rate() -> None:
    rates = {"float32": (1.0, 0.0), "bf16x3": (1.0, 0.0)}
    card = flops.Gpu(bf16=300, fp32=10, bandwidth=1e9, memory=10**10, scoring=rates)
    shape = Shape(layers=1, width=2, inner=4, heads=1, kv_heads=1, head_width=2, vocabulary=8)
    ieee, split = (
        scoring_seconds(shape, [QuestionSet(6, 10, 3)], card, products=how)[0]
        for how in ("ieee", "bf16x3")
    )
    assert split == pytest.approx(ieee / 10)


def test_nothing_is_faster_than_the_small_kernels_of_its_layers() -> None:
    """An H200 took ten milliseconds a step of 64 rows (results/bench/evaluate_h200.json)."""
    kind = QuestionSet(64, 960, 70, 32, room=128)
    decode = scoring_seconds(LLAMA_8B, [kind], cards()["h200_141"], "bfloat16", 64)[1]
    assert decode == pytest.approx(128 * 10.6e-3, rel=0.1)
    assert decode > 128 * 32 * cards()["h200_141"].scoring["bfloat16"][1]


def test_a_batch_is_halved_until_it_fits() -> None:
    """Telugu, 8-shot, in fp32.

    32.1 GB of weights, 1.3 GB of keys and values of the exemplars, 565 MB a row. A card of 80 GB
    has room for 64 rows, by memory too; an H200 for 128; in bfloat16 twice as many.
    """
    math = replace(question_set("mgsm", 8, "te"), room=1024)
    for batch_size in (256, None):
        rows = [
            flops.rows_of(LLAMA_8B, math, gpu, "float32", batch_size)
            for gpu in (H100, cards()["h200_141"])
        ]
        assert (
            rows == [64, 128] and flops.rows_of(LLAMA_8B, math, H100, "bfloat16", batch_size) == 128
        )
    assert flops.rows_of(LLAMA_8B, math, H100, "float32", 16) == 16
    slower = scoring_seconds(LLAMA_8B, [math], H100, batch_size=256)[1]
    assert slower == pytest.approx(scoring_seconds(LLAMA_8B, [math], H100, batch_size=64)[1])


def test_counts_of_tokens_follow_the_language() -> None:
    math = question_set("mgsm", 8, "te")
    assert (math.prefix, math.question, math.room) == (4800, 452, 512)
    mmlu = question_set("global_mmlu", 5, "sw")
    assert (mmlu.questions, mmlu.prefixes, mmlu.prefix) == (14042, 57, 5 * mmlu.question)
    both = question_set("flores", 0, "ja")  # directions
    assert both.answer == (28 * 88 / 64 + 28) / 2 and both.prefix == 0
    cache = scoring_memory(LLAMA_8B, 4, flops.prompts_of(math), 32)["cache"]
    assert cache == (4800 + 32 * 13 * 128) * 2 * 8 * 128 * 32 * 4


LAYERS, WIDTH, INNER, WORDS = 4, 4, 6, 10
LAYER = (
    4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
)  # attention of four matrices, an MLP of three, two norms
PARAMETERS = WORDS * WIDTH + LAYERS * LAYER + WIDTH
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": WORDS,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def parents(tmp_path: Path) -> dict[str, Any]:
    """Return a base, and a data run of 40 rows."""
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir(), data.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (data / "manifest.json").write_text(
        Manifest("data", "d", {"stage": "data"}, {"counts": {"train": 40}}).as_json()
    )
    return {"model": External("model", "m", model), "data": External("data", "d", data)}


def training(tmp_path: Path, parents: dict[str, Any], *words: str) -> Run:
    config: Any = compose(
        ["stage=sft", "expert=math", "sft.batch_size=4", f"runs_dir={tmp_path}", *words]
    )
    return Run(config, "math", parents, version=1)


def test_weights_in_fp32_and_two_resume_points_with_both_moments(
    tmp_path: Path, parents: dict[str, Any]
) -> None:
    needs = bytes_of_training(training(tmp_path, parents))
    assert needs == {
        "weights": 4 * PARAMETERS,
        "resume points": 2 * 12 * PARAMETERS,
        "snapshots": 0,
    }
    only_when_stopped = bytes_of_training(training(tmp_path, parents, "sft.resume_minutes=null"))
    assert only_when_stopped["resume points"] == 12 * PARAMETERS


def test_of_a_side_only_its_moments_and_of_adapters_only_they(
    tmp_path: Path, parents: dict[str, Any]
) -> None:
    own = "sft.side=math partition=own partition.bottom_layers=1 partition.top_layers=0".split()
    side = (LAYERS - 1) * LAYER  # all layers but the first
    needs = bytes_of_training(training(tmp_path, parents, "sft=partial", *own))
    assert needs["weights"] == 4 * PARAMETERS and needs["resume points"] == 2 * (
        4 * PARAMETERS + 8 * side
    )
    adapters = (
        LAYERS * 2 * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + INNER))
    )  # two factors of rank 2 at each matrix
    needs = bytes_of_training(training(tmp_path, parents, "sft=lora", "sft.lora_rank=2"))
    assert needs == {"weights": 4 * adapters, "resume points": 2 * 12 * adapters, "snapshots": 0}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("sft.snapshot_every=8 sft.steps=10", 5),  # 40 rows
        ("sft.snapshot_every=8 sft.steps=4", 2),  # 16 rows
        ("sft.snapshot_every=8 sft.steps=10 sft.snapshot_keep=2", 2),
    ],
)
def test_snapshots(words: str, count: int, tmp_path: Path, parents: dict[str, Any]) -> None:
    assert (
        bytes_of_training(training(tmp_path, parents, *words.split()))["snapshots"]
        == count * 4 * PARAMETERS
    )
    halved = training(tmp_path, parents, *words.split(), "sft.save_dtype=bfloat16")
    assert bytes_of_training(halved)["snapshots"] == count * 2 * PARAMETERS


def test_what_does_not_fit_says_what_it_is_for(
    tmp_path: Path, parents: dict[str, Any], monkeypatch: Patch
) -> None:
    monkeypatch.setattr("pipeline.estimate.gpu_budget.shape_for", lambda run: SHAPES["llama3.1_8b"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**30))
    with pytest.raises(
        PipelineError,
        match=r"100.0 GB free, about 209.5 GB needed \(0.1 spare, 29.9 weights, 179.5 resume poi",
    ):
        run = training(tmp_path, parents)
        check_disk(run, bytes_of_training(run))


def test_a_merge_in_float32_of_bfloat16_takes_twice_as_much(tmp_path: Path) -> None:
    experts: dict[str, Any] = {}
    for role, rows in (("0", 3), ("1", 5)):
        folder = tmp_path / role
        folder.mkdir()
        save_file(
            {"model.norm.weight": torch.zeros(rows, 4, dtype=torch.bfloat16)},
            folder / "model.safetensors",
        )
        experts[role] = External(role, role, folder)
    larger = (tmp_path / "1/model.safetensors").stat().st_size
    for dtype, times in (("null", 1), ("bfloat16", 1), ("float32", 2)):
        words = [
            "stage=merge",
            "merge=soup",
            "merge.experts=[./a,./b]",
            f"merge.dtype={dtype}",
            f"runs_dir={tmp_path}",
        ]
        run = Run(compose(words), "soup", experts, version=1)  # type: ignore[type-var]
        assert bytes_of_merge(run) == {"weights": times * larger}
