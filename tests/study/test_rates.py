"""The rates of cards in plans against the records that they name."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.training import Sft
from pipeline.estimate import flops
from pipeline.estimate.flops import (
    QuestionSet,
    cards,
    scoring_seconds,
    training_flops,
    training_seconds,
)
from pipeline.models.shape import LLAMA_8B
from pipeline.train.memory import full_model

BENCH = Path(__file__).parents[2] / "results/bench"
EACH = 2 * 32 * (LLAMA_8B.attention + LLAMA_8B.mlp)  # FLOPs a token of the layers' matrices
CORE = 4 * 32 * 4096  # of attention, a token and position
WEIGHTS = 32 * LLAMA_8B.layer + LLAMA_8B.embedding
PREFIX, QUESTION, ANSWER = 960, 70, 128  # tokens that scripts/gpu_evaluate.py scores
WAYS = {
    "bfloat16": ("bfloat16", "ieee"),
    "float32": ("float32", "ieee"),
    "bf16x3": ("float32", "bf16x3"),
}


def record(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((BENCH / f"{name}.json").read_text())["rows"]
    return rows


@pytest.mark.parametrize("card", [name for name, gpu in cards().items() if gpu.records[1]])
def test_rates_of_scoring_are_those_of_the_record(card: str) -> None:
    """The record has shares of the peak, and the time of a step besides its reads or products.

    A forward pass has 8 x 1,024 tokens, and in bfloat16 fills 64 rows with 59 tokens.
    """
    gpu, rows = cards()[card], record(cards()[card].records[1])
    measured = cards()["h200_141"]
    by_what = {row["what"]: row for row in rows}
    (filled,) = (row["fill_of_64_s"] for row in rows if row["what"] == "a step of 256 rows")
    passes = {
        products: by_what[f"a forward pass of 8 x 1,024 tokens, float32 by {products}"]["seconds"]
        for products in ("ieee", "bf16x3")
    }
    whole = 8192 * (EACH + CORE * 1024)
    shares = {
        "bfloat16": 64 * 59 * (EACH + CORE * (PREFIX + 59)) / filled / 989e12,
        "float32": whole / passes["ieee"] / 67e12,
        "bf16x3": 3 * whole / passes["bf16x3"] / 989e12,
    }
    steps = [row for row in rows if row["what"] == "a step of 64 rows"]  # in the order of WAYS
    for products, step in zip(WAYS, steps, strict=True):
        share, rest = gpu.scoring[products]
        assert share == pytest.approx(shares[products], rel=0.01)
        size = 2 if products == "bfloat16" else 4
        read = (
            (WEIGHTS + (PREFIX + 64 * 104) * 65_536)
            * size
            / (measured.bandwidth * measured.bandwidth_share)
        )
        computed = 64 * (EACH + 2 * LLAMA_8B.embedding) / measured.scoring_rate(products)
        assert 32 * rest == pytest.approx(step["ms"] / 1000 - max(read, computed), rel=0.05)


@pytest.mark.parametrize("products", WAYS)
@pytest.mark.parametrize(("questions", "rows"), [(64, 64), (250, 256)])
def test_answers_take_as_long_as_was_measured(products: str, questions: int, rows: int) -> None:
    """All of 128 tokens, so that none goes on after the others; the exemplars included."""
    name = {"float32": "float32 by ieee", "bf16x3": "float32 by bf16x3"}.get(products, products)
    what = f"{questions} answers of {ANSWER} tokens, {name}"
    rows_of_it = [row for row in record("evaluate_h200") if row["what"] == what]
    (measured,) = (row["seconds"] for row in rows_of_it if row["rows"] == rows)
    dtype, how = WAYS[products]
    kind = QuestionSet(questions, PREFIX, QUESTION, ANSWER, room=ANSWER)
    planned = sum(scoring_seconds(LLAMA_8B, [kind], cards()["h200_141"], dtype, rows, products=how))
    assert planned == pytest.approx(measured, rel=0.15)


def test_rates_of_training_are_those_of_the_record() -> None:
    """An H100 by trainings with random weights, with its optimizer.

    An H200 by forward and backward passes alone.
    """
    (checked,) = (
        line["numbers"]
        for line in json.loads((BENCH / "check_h100_full.json").read_text())["lines"]
        if line["name"] == "full"
    )
    recipe = Sft(
        name="full",
        batch_size=4,
        weights="bfloat16",
        optimizer="adamw_8bit",
        gradient_checkpointing=True,
    )
    every, h100, h200 = full_model(LLAMA_8B), cards()["h100_80"], cards()["h200_141"]
    seconds = training_seconds(LLAMA_8B, every, 4 * 100, 2048, recipe, h100)
    assert 4 * 100 * 2048 / seconds == pytest.approx(checked["tokens_a_second"], rel=0.005)
    tokens = {row["what"]: row["tokens_a_second"] for row in record("train_h200")}
    full = tokens["full, bfloat16 weights"] * training_flops(LLAMA_8B, every, 2048)
    lora = tokens["LoRA, frozen matrices in bfloat16, inputs not cast"]
    lora *= training_flops(LLAMA_8B, every, 2048, lora_rank=64)
    assert h200.bf16_share * 989e12 == pytest.approx(full, rel=0.005)
    assert h200.lora_share * 989e12 == h100.lora_share * 989e12 == pytest.approx(lora, rel=0.005)


def test_a_card_that_has_a_record_is_planned_by_it() -> None:
    """evaluate_h100.json is of steps that were not recorded as graphs.

    Of the H100 the H200's stands for it.
    """
    for name, gpu in cards().items():
        own = f"evaluate_{name.partition('_')[0]}"
        if (BENCH / f"{own}.json").is_file() and any("ms" in row for row in record(own)):
            assert gpu.records[1] == own
        for named in filter(None, gpu.records):
            assert (BENCH / f"{named}.json").is_file()


def test_what_cards_exchange_by_hand() -> None:
    """Four cards, two passes a step.

    Each gathers three quarters of 16 GB in bf16 forward and backward, and receives as much of 32 GB
    of gradients; under ddp these twice. Where products take longer nobody waits for it.
    """
    count = LLAMA_8B.parameters
    shards = Sft(
        name="full",
        batch_size=8,
        micro_batch_size=1,
        processes=4,
        parallel="fsdp2",
        precision="bf16",
    )
    assert flops.bytes_between(LLAMA_8B, count, shards) == 2 * 0.75 * (2 * 2 + 4) * count
    copies = Sft(
        name="full", batch_size=8, micro_batch_size=1, processes=4, parallel="ddp", precision="bf16"
    )
    assert flops.bytes_between(LLAMA_8B, count, copies) == 2 * 0.75 * 4 * count
    every, gpu = full_model(LLAMA_8B), cards()["h100_80"]
    optimizer = 28 * count / 4 / gpu.bandwidth
    short, long = (
        training_seconds(LLAMA_8B, every, 8, tokens, shards, gpu) for tokens in (10, 4000)
    )
    assert short == pytest.approx(2 * 0.75 * 8 * count / (450e9 * 0.75) + optimizer)
    products = (
        8
        * 4000
        * training_flops(LLAMA_8B, every, 4000, shards.gradient_checkpointing)
        / (gpu.rate("bf16") * 4)
    )
    assert long == pytest.approx(products + optimizer)
