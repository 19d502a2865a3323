"""Families with sliding windows and other norms through training, merging and scoring."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import Make
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

LAYERS, WINDOW = 4, 8
ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma2": {
        **ALTERNATING,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
    },
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "qwen3": {"head_dim": 16},
}
EAGER = {"gemma2": ["model.attn_implementation=eager"]}
ATTENTION_NORMS = {"gemma3_text": {"q_norm", "k_norm"}, "qwen3": {"q_norm", "k_norm"}}
AROUND_ATTENTION = {family: {"input_layernorm"} for family in ("mistral", "qwen3")} | {
    family: {"input_layernorm", "post_attention_layernorm"} for family in ("gemma2", "gemma3_text")
}
TRAIN = (
    "sft.seq_length=96 sft.batch_size=4 sft.steps=2 sft.precision=fp32 sft.learning_rate=1e-2"
    " recipe=default".split()
)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(family: str, world: Path, tmp_path: Path) -> Path:
    """Return a random model with the small world's tokenizer, whose answers differ by prompt."""
    from small_world.tokenizer import make_tokenizer as sandbox_tokenizer

    tokenizer = sandbox_tokenizer()
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, which begin as ones or zeros
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def moved(base: Path, expert: Path) -> set[str]:
    before, after = load_file(base / "model.safetensors"), load_file(expert / "model.safetensors")
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def first_loss(base: Path, expert: Path, eager: bool) -> float:
    """Return the mean loss over the completions of the first step's rows, by transformers.

    Rows are shuffled by the seed.
    """
    manifest = json.loads((expert / "manifest.json").read_text())
    file = expert.parent / manifest["parents"]["data"]["name"] / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()[:4]
    tokenizer = AutoTokenizer.from_pretrained(base)
    how = {"attn_implementation": "eager"} if eager else {}
    model, total, count = AutoModelForCausalLM.from_pretrained(base, **how).eval(), 0.0, 0
    for row in (rows[i] for i in order):
        prompt = len(tokenizer(row["prompt"]).input_ids)
        ids = [
            *tokenizer(row["prompt"] + "\n" + row["completion"]).input_ids,
            tokenizer.eos_token_id,
        ][:96]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        total -= sum(float(logits[at - 1, ids[at]]) for at in range(prompt, len(ids)))
        count += len(ids) - prompt
        assert len(ids) > WINDOW  # the window closes within the row
    return total / count


def test_an_architecture_is_trained_merged_and_scored(
    family: str, start: Path, world: Path, make_run: Make
) -> None:
    eager = EAGER.get(family, [])
    shared = ["stage=sft", f"model={start}", f"data_root={world}", *TRAIN, *eager]
    math_expert = make_run(*shared, "expert=math")
    log = [json.loads(line) for line in (math_expert / "log.jsonl").read_text().splitlines()]
    assert log[0]["loss"] == pytest.approx(first_loss(start, math_expert, bool(eager)), rel=1e-4)
    assert moved(start, math_expert) == set(load_file(start / "model.safetensors"))

    partition = (
        "partition=own partition.bottom_layers=1 partition.top_layers=0"
        " partition.all_attention=true".split()
    )
    language_expert = make_run(*shared, "expert=qac", "sft=partial", *partition)
    parts = {
        name.removeprefix("model.").removesuffix(".weight")
        for name in moved(start, language_expert)
    }
    attention = {f"self_attn.{part}_proj" for part in "qkvo"} | AROUND_ATTENTION[family]
    attention |= {f"self_attn.{norm}" for norm in ATTENTION_NORMS.get(family, ())}
    assert {part for part in parts if not part.startswith("layers.0.")} == {
        f"layers.{layer}.{part}" for layer in range(1, LAYERS) for part in attention
    }
    assert {f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")} < parts

    swap = make_run(
        "stage=merge",
        "merge=layer_swap",
        f"merge.math={math_expert}",
        f"merge.language={language_expert}",
        "merge.bottom_layers=1",
        "merge.top_layers=1",
    )
    merged, of_math, of_language = (
        load_file(at / "model.safetensors") for at in (swap, math_expert, language_expert)
    )
    for name, tensor in merged.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None:
            expected = (of_math[name] + of_language[name]) / 2
        else:
            expected = of_language[name] if int(layer[1]) in (0, LAYERS - 1) else of_math[name]
        assert torch.equal(tensor, expected), name

    scored = make_run(
        "stage=eval",
        f"checkpoint={swap}",
        f"data_root={world}",
        "eval=mgsm_2shot",
        "eval.limit=4",
        "eval.max_gen_toks=12",
        "eval.batch_size=4",
        "languages=[en,qac]",
    )
    tokenizer = AutoTokenizer.from_pretrained(swap)
    model = AutoModelForCausalLM.from_pretrained(swap, attn_implementation="eager").eval()
    answers = set()
    for file in sorted((scored / "samples").glob("*.jsonl")):
        for sample in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
            assert ids.shape[1] > 4 * WINDOW
            with torch.no_grad():
                made = model.generate(ids, do_sample=False, max_new_tokens=12)
            text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
            assert text.startswith(sample["response"])
            answers.add(sample["response"])
    assert len(answers - {""}) > 2


TODAY = (
    "qwen3_5_text",
    "lfm2",
    "gemma4_text",
    "gemma3",
)  # linear attention, convolutions, per-layer inputs, a tower


@pytest.mark.parametrize("kind", TODAY)
def test_a_decoder_of_today_is_trained_and_scored(
    kind: str, world: Path, make_run: Make, tmp_path: Path
) -> None:
    """What is trained moves, and nothing else: a tower stays as it is.

    The swap gives the answers of transformers.
    """
    from small_decoders import config_of
    from small_world.tokenizer import make_tokenizer as sandbox_tokenizer

    from pipeline.models.anatomy import anatomy

    tokenizer, config = sandbox_tokenizer(), config_of(kind)
    for part in (config, config.get_text_config()):
        part.vocab_size, part.pad_token_id, part.bos_token_id, part.eos_token_id = (
            len(tokenizer),
            3,
            1,
            2,
        )
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = len(tokenizer)
    config.get_text_config().max_position_embeddings = 1024
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    sites = anatomy(load_file(tmp_path / "start/model.safetensors"))
    shared = ["stage=sft", f"model={tmp_path / 'start'}", f"data_root={world}", *TRAIN]
    math_expert = make_run(*shared, "expert=math")
    fixed = {name for name, site in sites.items() if site.kind == "tower" or "layer_scalar" in name}
    assert not moved(tmp_path / "start", math_expert) & fixed
    outer = "partition=own partition.bottom_layers=1 partition.top_layers=1".split()
    language_expert = make_run(*shared, "expert=qac", "sft=partial", *outer)
    layers = {sites[name].layer for name in moved(tmp_path / "start", language_expert)}
    assert layers == {0, LAYERS - 1}
    sides = [
        f"merge.math={math_expert}",
        f"merge.language={language_expert}",
        "merge.scale_to_depth=true",
    ]
    asked = [
        f"data_root={world}",
        "eval=mgsm_0shot",
        "eval.limit=2",
        "eval.max_gen_toks=6",
        "languages=[en]",
    ]
    swap = make_run("stage=merge", "merge=layer_swap", *sides)
    written = make_run("stage=eval", f"checkpoint={swap}", *asked)
    live = make_run("stage=eval", "merge=layer_swap", *sides, *asked, "redo=true")
    answers = [
        [
            json.loads(line)["response"]
            for file in (run / "samples").glob("*.jsonl")
            for line in file.open()
        ]
        for run in (written, live)
    ]
    assert answers[0] == answers[1] and answers[0]
