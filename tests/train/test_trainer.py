"""Stages sft and cpt: tokens, labels, counts, and what is refused.

Whole runs are in test_pipeline.py.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_decoders import config_of
from small_world.tokenizer import make_tokenizer as sandbox_tokenizer
from tiny import model
from tiny import trainer as tiny_trainer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, training_args
from trl import SFTTrainer

from pipeline.config.data import Data, Expert
from pipeline.config.stages import TrainStage
from pipeline.config.training import Model, Sft
from pipeline.errors import PipelineError
from pipeline.train.examples import check_rows, cut_words, datasets_of, side_without_loss
from pipeline.train.load import load_model, make_bpe
from pipeline.train.memory import micro_batches
from pipeline.train.save import save_model
from pipeline.train.steps import steps_of
from pipeline.train.trainer import Trainer, order_of_turns, plan_steps, trainer_arguments

ROW = {
    "prompt": "Question: Mia has 3 cups.\nStep-by-Step Answer:",
    "completion": "3 + 1 = 4. The answer is 4.",
}


def sft(**knobs: object) -> Sft:
    return Sft(**{"name": "full", "separator": " ", "seq_length": 64, "batch_size": 2, **knobs})  # type: ignore[arg-type]


tiny = partial(model, layers=2, tie_word_embeddings=True, attn_implementation="sdpa")


def stage(recipe: Sft) -> TrainStage:
    return TrainStage(
        stage="sft",
        model=Model(name="m"),
        expert=Expert(name="e", side="math"),
        data=Data(),
        sft=recipe,
    )


def trainer(
    tmp_path: Path, rows: list[dict[str, str]], recipe: Sft, steps: int = 2, tokenizer: Any = None
) -> Trainer:
    args = trainer_arguments(stage(recipe), "text" in rows[0], False, tmp_path)
    tokenizer, sets = tokenizer or sandbox_tokenizer(), datasets_of(rows, recipe, ["all"])
    made = Trainer(
        model=tiny(),
        args=args,
        train_dataset=sets,
        processing_class=tokenizer,
        sft=recipe,
        parts={"all": []},
    )
    plan_steps(made.args, recipe, steps)
    return made


@pytest.mark.parametrize(
    ("precision", "products"), [("fp32", "ieee"), ("bf16", "ieee"), ("tf32", "tf32")]
)
def test_products_are_in_the_precision_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, products: str
):
    """With torch.compile too, for which transformers turns TF32 on where a GPU has it.

    And after another training.
    """
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    before = torch.get_float32_matmul_precision()
    try:
        for compiled in (True, False):
            torch.set_float32_matmul_precision("high" if products == "ieee" else "highest")
            tiny_trainer(tmp_path, sft(precision=precision, compile=compiled), [ROW] * 4)
            assert torch.backends.cuda.matmul.fp32_precision == products
    finally:
        torch.set_float32_matmul_precision(before)


def test_same_example_same_tokens_in_training_and_in_the_harness(tmp_path: Path):
    """There is one beginning of sequence, and only training adds an end of sequence."""
    from lm_eval.models.huggingface import HFLM

    batch = trainer(tmp_path, [ROW, ROW], sft()).get_train_dataloader().__iter__().__next__()
    trained = batch["input_ids"][0].tolist()
    lm = HFLM(pretrained=tiny(), tokenizer=sandbox_tokenizer(), batch_size=1)
    context, answer = lm._encode_pair(ROW["prompt"], " " + ROW["completion"])
    assert trained == [*context, *answer, 2]
    assert trained.count(1) == 1 and trained[0] == 1


def test_loss_is_on_the_completion_token_by_token(tmp_path: Path):
    batch = trainer(tmp_path, [ROW, ROW], sft()).get_train_dataloader().__iter__().__next__()
    ours = sandbox_tokenizer()
    learnt = [token for token in batch["labels"][0].tolist() if token != -100]
    words = ["▁3", "▁+", "▁1", "▁=", "▁4", ".", "▁The", "▁answer", "▁is", "▁4", ".", "</s>"]
    assert ours.convert_ids_to_tokens(learnt) == words


def test_loss_on_all_learns_the_prompt_too(tmp_path: Path):
    batch = (
        trainer(tmp_path, [ROW, ROW], sft(loss_on="all"))
        .get_train_dataloader()
        .__iter__()
        .__next__()
    )
    assert (batch["labels"] == batch["input_ids"])[batch["attention_mask"].bool()].all()


def test_packed_text_is_cut_into_full_rows_with_an_end_between_documents(tmp_path: Path):
    rows = [{"text": "Mia has 3 cups."}] * 40  # 6 tokens with beginning and period, 7 with the end
    recipe = sft(seq_length=14, packing=True)
    made = trainer(tmp_path, rows, recipe)
    assert sum(map(len, made.train_dataset["input_ids"])) == 40 * 7
    batch = made.get_train_dataloader().__iter__().__next__()
    assert batch["input_ids"].shape == (2, 14)
    assert batch["input_ids"][0].tolist()[:7] == batch["input_ids"][0].tolist()[7:]
    assert batch["input_ids"][0].tolist()[6] == 2


def test_truncated_and_dropped_rows_are_counted(tmp_path: Path):
    """Before the model is loaded as TRL then does it: each row against TRL's uncut one."""
    rows = [
        ROW,
        *({"prompt": "Mia " * count, "completion": "3 + 1 = 4 " * 3} for count in range(30, 80)),
    ]
    texts = [{"text": row["prompt"] + row["completion"]} for row in rows]
    for examples, knobs in ((rows, {}), (rows, {"loss_on": "all"}), (texts, {})):
        recipe, uncut = sft(**knobs), sft(**knobs, seq_length=4096)
        cut, lost = check_rows(examples, sandbox_tokenizer(), recipe)
        lengths = [
            len(ids) for ids in trainer(tmp_path, examples, uncut).train_dataset["input_ids"]
        ]
        trained = trainer(tmp_path, examples, recipe).train_dataset
        assert 0 < cut == sum(length > 64 for length in lengths) < len(rows)
        assert len(rows) - len(trained) == len(lost)
        assert bool(lost) == (knobs == {} and examples is rows)
        assert side_without_loss(examples, lost, recipe) == ""
        without = f", {len(lost)} of them before any response: these are dropped" if lost else ""
        told = f"sft.seq_length=64 truncates {cut} of {len(rows)} rows{without}"
        assert cut_words(recipe, cut, len(lost), f"{len(rows)} rows") == told
    short = [{"text": "Mia " * 80}, {"text": "Mia"}]
    for packing, tokens, cut in ((False, 32 + 3, 1), (True, 83 + 3, 0)):
        recipe = sft(packing=packing, seq_length=32)
        assert check_rows(short, sandbox_tokenizer(), recipe) == (cut, [])
        made = trainer(tmp_path, short, recipe).train_dataset
        assert sum(map(len, made["input_ids"])) == tokens
    _, lost = check_rows(rows[-2:], sandbox_tokenizer(), sft())
    assert side_without_loss(rows[-2:], lost, sft()).startswith(
        "sft.seq_length=64 leaves no row with a loss"
    )
    sides = [{**ROW, "side": "language"}, {**rows[-1], "side": "math"}]
    none_left = side_without_loss(sides, [1], sft(method="simultaneous"))
    assert none_left.startswith("sft.seq_length=64 leaves no row of side math with a loss")
    assert check_rows(sides, sandbox_tokenizer(), sft(method="mixed")) == (1, [1])
    assert side_without_loss(sides, [1], sft(method="mixed")) == ""


def test_a_curriculum_keeps_its_order(tmp_path: Path):
    rows = [{"prompt": f"Mia has {n}", "completion": str(n)} for n in range(8)]
    ours = sandbox_tokenizer()

    def order(recipe: Sft) -> list[str]:
        batches = trainer(tmp_path, rows, recipe, steps=4).get_train_dataloader()
        return [
            ours.decode(ids, skip_special_tokens=True).split()[-1]
            for one in batches
            for ids in one["input_ids"]
        ]

    assert order(sft(shuffle=False)) == [str(n) for n in range(8)]
    assert order(sft()) != order(sft(shuffle=False)) and sorted(order(sft())) == sorted(
        order(sft(shuffle=False))
    )


def test_steps_by_hand():
    rows = {"all": 11}
    # two full batches; the last, incomplete one is left out
    assert steps_of(sft(batch_size=4), rows) == ({"all": 2}, {"all": 3})
    assert steps_of(sft(batch_size=4, epochs=2), rows) == ({"all": 5}, {"all": 2})
    assert steps_of(sft(batch_size=4, steps=1), rows) == ({"all": 1}, {"all": 7})
    with pytest.raises(
        PipelineError,
        match=r"sft.steps=3 with sft.batch_size=4 needs more rows than 11 in",
    ):
        steps_of(sft(batch_size=4, steps=3), rows)
    with pytest.raises(
        PipelineError, match="sft.steps=null with sft.batch_size=4 needs more rows .* Lower one of"
    ):
        steps_of(sft(batch_size=4), {"all": 3})


def test_four_micro_batches_of_two_equal_a_batch_of_eight(tmp_path: Path):
    """Of unequal lengths.

    The mean is over the response tokens of the step, not over those of each micro-batch.
    """
    rows = [
        {"prompt": f"Mia has {n}", "completion": " ".join([str(n)] * (1 + n % 5))}
        for n in range(16)
    ]
    whole = trainer(tmp_path / "a", rows, sft(batch_size=8, learning_rate=1e-3))
    parts = trainer(tmp_path / "b", rows, sft(batch_size=8, micro_batch_size=2, learning_rate=1e-3))
    whole.train(), parts.train()
    logged = [
        [row for row in made.state.log_history if "grad_norm" in row] for made in (whole, parts)
    ]
    for one, other in zip(*logged, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-6)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_rows_of_a_step_are_sorted_by_length_and_stay_its_rows(tmp_path: Path):
    rows = [
        {"prompt": f"Mia has {n}", "completion": " ".join([str(n)] * (1 + 7 * n % 10))}
        for n in range(20)
    ]
    ours = sandbox_tokenizer()

    def batches(**knobs: object) -> list[list[tuple[str, int]]]:
        made = trainer(tmp_path, rows, sft(batch_size=8, **knobs)).get_train_dataloader()
        ids = [
            [
                of[mask == 1]
                for of, mask in zip(one["input_ids"], one["attention_mask"], strict=True)
            ]
            for one in made
        ]
        return [[(ours.decode(of), len(of)) for of in one] for one in ids]

    whole, parts = batches(micro_batch_size=8), batches(micro_batch_size=2)
    assert [len(one) for one in batches()] == [4] * 4
    assert [len(one) for one in whole] == [8, 8] and [len(one) for one in parts] == [2] * 8
    for step in range(2):
        mine = [row for one in parts[4 * step : 4 * step + 4] for row in one]
        assert sorted(mine) == sorted(whole[step])
        assert [length for _, length in mine] == sorted(length for _, length in whole[step])
    assert parts == batches(micro_batch_size=2)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_training_is_that_of_a_bare_sfttrainer(tmp_path: Path, kind: str):
    """All losses, gradient norms and weights to the bit, on the same rows in the same order.

    With the router's loss where the model is a mixture of experts.
    """
    rows = [
        {"prompt": f"Mia has {n} cups.", "completion": " ".join([str(n)] * (1 + n % 3))}
        for n in range(16)
    ]
    recipe = sft(batch_size=4, micro_batch_size=2, learning_rate=1e-3)
    more = {"num_local_experts": 4, "router_aux_loss_coef": 0.5} if kind == "mixtral" else {}
    ours = tiny_trainer(tmp_path / "ours", recipe, rows, of=tiny(model_type=kind, **more))
    lengths = [len(ids) for ids in ours.train_dataset["input_ids"]]
    ordered = order_of_turns({"all": lengths}, recipe, 4, seed=0)
    args = trainer_arguments(stage(recipe), False, False, tmp_path / "bare")
    args.train_sampling_strategy = "sequential"
    plan_steps(args, recipe, 4)
    bare = SFTTrainer(
        model=tiny(model_type=kind, **more),
        args=args,
        processing_class=sandbox_tokenizer(),
        train_dataset=datasets_of([rows[n] for n in ordered], recipe, ["all"])["all"],
    )
    ours.train(), bare.train()
    told = [
        [(row["loss"], row["grad_norm"]) for row in one.state.log_history if "loss" in row]
        for one in (ours, bare)
    ]
    assert told[0] == told[1] and len(told[0]) == 4
    for one, other in zip(ours.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_rows_of_a_micro_batch_that_is_left_open():
    """The largest divisor of a process' share of a step up to 4."""
    found = {
        (batch, count): micro_batches(sft(batch_size=batch, processes=count))[0]
        for batch, count in OPEN
    }
    assert found == OPEN
    assert micro_batches(sft(batch_size=32, micro_batch_size=16)) == (16, 2)


OPEN = {
    (32, 1): 4,
    (8, 1): 4,
    (6, 1): 3,
    (7, 1): 1,
    (2, 1): 2,
    (8, 4): 2,
    (4, 4): 1,
    (24, 2): 4,
    (10, 1): 2,
}


def rates_of(made: Trainer, steps: int) -> list[float]:
    """Return the learning rates of the steps."""
    made.create_optimizer_and_scheduler(steps)
    rates = []
    for _ in range(steps):
        rates.append(made.lr_scheduler.get_last_lr()[0])
        made.optimizer.step(), made.lr_scheduler.step()
    return rates


def test_schedules(tmp_path: Path):
    recipe = sft(schedule="wsd", decay_share=0.5, learning_rate=1.0, batch_size=2)
    made = trainer(tmp_path, [ROW] * 8, recipe, steps=4)
    assert rates_of(made, 4) == pytest.approx([1.0, 1.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("schedule", "warmup", "share"),
    [
        ("constant", 0, None),
        ("constant", 3, None),
        ("constant", 4, 75),
        ("constant", 100, 3),
        ("linear", 3, None),
        ("wsd", 1, None),
        ("wsd", 2, 67),
        ("wsd", 3, 67),
    ],
)
def test_a_warmup_that_never_ends_is_told(
    schedule: str,
    warmup: int,
    share: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """wsd may reach into the decay, here in three of four steps, where the rate falls at once."""
    recipe = sft(warmup_steps=warmup, schedule=schedule, decay_share=0.75, learning_rate=1.0)
    made = trainer(tmp_path, [ROW] * 8, recipe, steps=4)
    told = capsys.readouterr().err
    assert ("warning: sft.warmup_steps" in told) == (share is not None)
    rates = rates_of(made, 4)
    assert (max(rates) < 1.0) == (share is not None)
    if share is not None:
        assert f"sft.warmup_steps={warmup} of 4 steps: the rate is at most {share}% of" in told
        assert round(100 * max(rates)) == share


def test_bpe_is_byte_level_and_lossless():
    examples = [{"text": f"{n} apples cost ${n}.50 in Köln"} for n in range(200)]
    made = make_bpe(examples, 300)
    text = "7 apples\n日本 cost"
    assert len(made) <= 300 and made.decode(made(text).input_ids, skip_special_tokens=True) == text
    assert made("x").input_ids[0] == made.bos_token_id == 0


def test_chat_examples_learn_the_answer_and_its_end(tmp_path: Path):
    """The labels are the answer with what closes it, whatever the template.

    And the counts are the trainer's.
    """
    ours = sandbox_tokenizer()
    ours.chat_template = (
        "{% for m in messages %}{{ '<s>' if loop.first }}{{ m.role }} : {{ m.content }}{{ '</s>'"
        " }}{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
    )
    long = {"prompt": "Mia " * 80, "completion": "3"}
    rows = [ROW, ROW | {"completion": ROW["completion"] * 6}, long]
    recipe = sft(template="chat", batch_size=1)
    made = trainer(tmp_path, rows, recipe, tokenizer=ours)
    assert check_rows(rows, ours, recipe) == (2, [2])
    assert (
        len(made.train_dataset) == 2
        and max(len(row) for row in made.train_dataset["input_ids"]) == 64
    )
    learnt = [token for token in made.train_dataset["labels"][0] if token != -100]
    words = ["▁3", "▁+", "▁1", "▁=", "▁4", ".", "▁The", "▁answer", "▁is", "▁4", ".", "</s>"]
    assert [word.lstrip("▁") for word in ours.convert_ids_to_tokens(learnt)] == [
        word.lstrip("▁") for word in words
    ]


def test_saved_in_another_dtype(tmp_path: Path):
    model, expected = tiny(), tiny().to(torch.bfloat16)
    assert save_model(model, sandbox_tokenizer(), tmp_path, "bfloat16")["cast"] == {
        "to": "bfloat16"
    }
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16
    for one, other in zip(again.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("kind", ["gemma4", "mpt"])
def test_the_loss_of_a_step_is_of_its_tokens_in_any_architecture(tmp_path: Path, kind: str):
    """Against the logits of each row alone.

    Transformers would average the micro-batches of a model that sees.
    """
    fields, size = config_of(kind).to_dict(), len(sandbox_tokenizer())
    fields.get("text_config", fields).update(vocab_size=size, vocab_size_per_layer_input=size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    rows = [
        {"prompt": f"Mia has {n}", "completion": " ".join([str(n)] * (1 + 3 * n))} for n in range(4)
    ]
    made = tiny_trainer(tmp_path, sft(batch_size=4, micro_batch_size=2), rows, of=model)
    total, count = 0.0, 0
    for row in made.train_dataset:
        ids, labels = (
            torch.tensor([row["input_ids"]]).to(model.device),
            torch.tensor(row["labels"][1:]),
        )
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].cpu()
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != -100).sum())
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_accelerates_configuration_does_not_change_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`accelerate launch` sets it in the environment; it is not hashed."""
    losses = []
    for precision in ("no", "bf16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", {"no": "no", "bf16": "EAGER"}[precision])
        made = tiny_trainer(tmp_path, sft(batch_size=2), [ROW] * 4)
        made.train()
        losses.append([row.get("loss") for row in made.state.log_history])
        assert made.accelerator.mixed_precision == "no" and made.model_wrapped is made.model
    assert losses[0] == losses[1]


def test_a_bpe_is_trained_on_what_is_trained_on() -> None:
    """Not on the sides of the rows of a joint set; on all turns of a conversation."""
    texts = ["Mia has 3 apples.", "3 + 4 is 7."]
    turns = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    rows: list[dict[str, Any]] = [{"prompt": texts[0], "completion": texts[1]} for _ in range(20)]
    plain = make_bpe(rows, 300).get_vocab()
    assert make_bpe([row | {"side": "language"} for row in rows], 300).get_vocab() == plain
    assert make_bpe([row | {"messages": turns} for row in rows], 300).get_vocab() == plain
    assert make_bpe([{"text": text} for text in texts * 20], 300).get_vocab() == plain


def test_gemma_2_has_no_attention_of_torchs_own(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = AutoConfig.for_model("gemma2", **sizes, num_hidden_layers=1, vocab_size=32, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def loaded(**words: Any) -> Any:
        asked = SimpleNamespace(
            model=Model(name="x", path=str(tmp_path), **words),
            sft=SimpleNamespace(weights="float32", eos_token=None),
        )
        return load_model(SimpleNamespace(config=asked), None, tmp_path)  # type: ignore[arg-type]

    with pytest.raises(
        PipelineError,
        match=r"attn_implementation=sdpa: .* or eager if the model does not support it.$",
    ):
        loaded()
    assert loaded(attn_implementation="eager").config.model_type == "gemma2"
