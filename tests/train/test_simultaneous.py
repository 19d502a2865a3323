"""Simultaneous training against two AdamW optimizers of its own, by hand, in float64."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from small_world.tokenizer import make_tokenizer as sandbox_tokenizer
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.models.anatomy import anatomy
from pipeline.models.partition import sides_of_all
from pipeline.train import trainer as trainers
from pipeline.train.load import choose_parameters
from pipeline.train.steps import side_of_step, steps_of
from pipeline.train.trainer import Trainer, order_of_turns, pass_order

RATE, WARMUP, CLIP = 1e-2, 2, 0.5
WORDS = dict(
    method="simultaneous",
    schedule="constant",
    warmup_steps=WARMUP,
    max_grad_norm=CLIP,
    weight_decay=0.1,
    micro_batch_size=2,
    learning_rate=RATE,
)


def pure_loss(model: Any, inputs: Any, tokens: Any) -> torch.Tensor:
    """Cross entropy in the model's own dtype: the fused head of TRL computes in float32."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[
        :, :-1
    ]
    return (
        cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")
        / tokens
    )


class Pure(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
        return pure_loss(model, inputs, num_items_in_batch)


class Record(TrainerCallback):
    """After each step: weights, gradients' norm as the optimizer saw it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.weights, self.seen = trainer, [], []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(
            [p.grad.norm() for p in self.trainer.model.parameters() if p.grad is not None]
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.weights.append(tiny.snapshot(self.trainer.model))


def sides_of(model: Any, partition: Partition) -> dict[str, list[torch.nn.Parameter]]:
    found = sides_of_all(partition, anatomy([name for name, _ in model.named_parameters()]))
    return {
        side: [p for name, p in model.named_parameters() if found[name] == side]
        for side in ("math", "language")
    }


@pytest.mark.parametrize("kind", list(tiny.ARCHITECTURES))
@pytest.mark.parametrize("turn", [1, 2])
def test_equals_two_independent_optimizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, turn: int
) -> None:
    monkeypatch.setattr(trainers, "Trainer", Pure)
    recipe = tiny.recipe(**WORDS, steps_per_switch=turn, gradient_checkpointing=turn == 2)
    made = tiny.trainer(
        tmp_path, recipe, tiny.joint(16), tiny.B, of=tiny.model(kind, dtype=torch.float64)
    )
    record = Record(made)
    made.add_callback(record)
    batches = [made._prepare_inputs(batch) for batch in made.get_train_dataloader()]
    made.train()

    # TRL patches the forward pass of a model that it is given, which moves a gradient by 3e-20:
    # patched here too
    twin = tiny.trainer(
        tmp_path, recipe, tiny.joint(16), tiny.B, of=tiny.model(kind, dtype=torch.float64)
    ).model
    parts = sides_of(twin, tiny.B)
    assert len(parts["math"]) + len(parts["language"]) < len(
        list(twin.parameters())
    )  # embeddings and norm are neither
    decays = {p for name, p in twin.named_parameters() if "norm" not in name and "bias" not in name}
    for p in twin.parameters():
        p.requires_grad_(any(p is one for part in parts.values() for one in part))
    optimizers = {
        side: torch.optim.AdamW(
            [
                {"params": [p for p in part if p in decays], "weight_decay": 0.1},
                {"params": [p for p in part if p not in decays], "weight_decay": 0.0},
            ],
            lr=RATE,
            betas=(0.9, 0.99),
            eps=1e-8,
            fused=True,
        )
        for side, part in parts.items()
    }
    logged = [row for row in made.state.log_history if "grad_norm" in row]
    for step in range(8):
        side = ("math", "language")[step // turn % 2]
        pair = batches[2 * step : 2 * step + 2]
        tokens = sum((one["labels"][:, 1:] != -100).sum() for one in pair)
        for one in pair:
            (pure_loss(twin, one, tokens)).backward()
        norm = torch.nn.utils.clip_grad_norm_(parts[side], CLIP)  # that of the active side alone
        for group in optimizers[side].param_groups:
            group["lr"] = RATE * min(1.0, step / WARMUP)
        optimizers[side].step()
        twin.zero_grad()
        weights = record.weights[step]
        for name, p in twin.named_parameters():
            assert torch.equal(weights[name], p), (step, name)
        assert logged[step]["grad_norm"] == norm.item()
        assert torch.stack(record.seen[step]).norm().item() == pytest.approx(
            min(CLIP, norm.item()), rel=1e-4
        )


def test_validation_losses_are_told_of_each_side(tmp_path: Path) -> None:
    made = tiny.trainer(
        tmp_path, tiny.recipe(**WORDS), tiny.joint(16), tiny.B, validation=tiny.joint(4)
    )
    made.train()
    assert [row["step"] for row in made.state.log_history if "loss" in row] == list(
        range(1, 9)
    )  # a row for each step
    told = [row for row in made.state.log_history if "eval_loss" in row]
    sides_told = [row for row in told if "eval_math_loss" in row]
    assert sides_told and all(
        row["eval_loss"] == pytest.approx((row["eval_math_loss"] + row["eval_language_loss"]) / 2)
        for row in sides_told
    )
    assert {side: len(rows) for side, rows in made.eval_dataset.items()} == {
        "math": 4,
        "language": 4,
    }


def test_turns_are_a_function_of_seed_and_step() -> None:
    recipe = tiny.recipe(method="simultaneous", steps_per_switch=2)
    rows = {"math": 9, "language": 8}
    assert steps_of(recipe, rows) == ({"math": 2, "language": 2}, {"math": 1, "language": 0})
    steps = 4
    lengths = {side: [7] * count for side, count in rows.items()}
    flat = order_of_turns(lengths, recipe, steps, seed=3)
    assert (
        flat
        == order_of_turns(lengths, recipe, steps, seed=3)
        != order_of_turns(lengths, recipe, steps, seed=4)
    )
    assert all(row < 9 for row in flat[:8]) and sorted(flat[8:]) == list(
        range(9, 17)
    )  # two steps each
    assert len(set(flat)) == 16  # no row twice
    assert [side_of_step(step, 2) for step in range(5)] == [
        "math",
        "math",
        "language",
        "language",
        "math",
    ]
    twice = tiny.recipe(method="simultaneous", epochs=2)
    order = pass_order(4, twice, seed=0)
    assert sorted(order[:4]) == sorted(order[4:]) == [0, 1, 2, 3] and order[:4] != order[4:]


def test_steps_stop_with_the_shorter_set() -> None:
    recipe = tiny.recipe(method="simultaneous")
    assert steps_of(recipe, {"math": 40, "language": 11}) == (
        {"math": 2, "language": 2},
        {"math": 32, "language": 3},
    )
    some = tiny.recipe(method="simultaneous", steps=3)
    assert steps_of(some, {"math": 40, "language": 40}) == (
        {"math": 2, "language": 1},
        {"math": 32, "language": 36},
    )
    with pytest.raises(
        PipelineError, match="sft.steps=6 with sft.batch_size=4.*40 math and 11 language in each"
    ):
        steps_of(tiny.recipe(method="simultaneous", steps=6), {"math": 40, "language": 11})


def test_steps_of_each_side_are_counted_and_not_halved(tmp_path: Path) -> None:
    """Turns of four: math takes steps 0 to 3 and 8 to 11, language 4 to 7 and the last two."""
    recipe = tiny.recipe(method="simultaneous", steps=14, steps_per_switch=4)
    chosen, parts = choose_parameters(tiny.model(), recipe, tiny.B)
    made, told = trainers.trainer_of(
        tiny.stage(recipe, tiny.B), chosen, parts, sandbox_tokenizer(), tiny.joint(40), [], tmp_path
    )
    assert made.args.max_steps == 14
    assert told["steps_a_side"] == {"math": 8, "language": 6} and told["rows_left_out"] == {
        "math": 8,
        "language": 16,
    }


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_shards_that_are_not_in_the_hash_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `accelerate launch` would have them by its own configuration."""

    class Sharding(Trainer):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            setattr(self, f"is_{kind}_enabled", True)

    monkeypatch.setattr(trainers, "Trainer", Sharding)
    with pytest.raises(
        PipelineError, match="enables FSDP or DeepSpeed. Remove it there, and set sft.par"
    ):
        tiny.trainer(tmp_path, tiny.recipe(**WORDS), tiny.joint(16), tiny.B)


def test_packed_text_of_the_two_sets_is_not_mixed(tmp_path: Path) -> None:
    words = {"math": "apples", "language": "cups"}
    rows = [
        {"text": f"Mia has {n % 9} {words[side]}.", "side": side}
        for n in range(80)
        for side in words
    ]
    recipe = tiny.recipe(method="simultaneous", packing=True, seq_length=16)
    made = tiny.trainer(tmp_path, recipe, rows, tiny.B)
    tokenizer: Any = made.processing_class
    for number, batch in enumerate(made.get_train_dataloader()):
        text = tokenizer.decode(batch["input_ids"].flatten())
        assert ("apples" in text, "cups" in text) == (number % 2 == 0, number % 2 == 1)
        assert batch["input_ids"].shape == (4, 16)
