"""What each way to train moves, on the four architectures; adapters, and what is refused."""

from pathlib import Path

import pytest
import small_decoders
import tiny
import torch
from small_world.tokenizer import make_tokenizer as sandbox_tokenizer

from pipeline.config.knob import identity
from pipeline.config.training import LLAMA_MATRICES, Partition
from pipeline.errors import PipelineError
from pipeline.models.anatomy import OUTSIDE, anatomy, plain_name, towers
from pipeline.models.partition import sides_of_all
from pipeline.train.load import adapted_modules, choose_parameters
from pipeline.train.save import save_model

A = Partition(name="A", bottom_layers=1, top_layers=1, all_attention=True)
PROJECTIONS = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]


@pytest.mark.parametrize("kind", list(tiny.ARCHITECTURES))
@pytest.mark.parametrize("partition", [A, tiny.B])
@pytest.mark.parametrize("side", ["math", "language"])
def test_partial_moves_its_side_and_nothing_else(
    tmp_path: Path, kind: str, partition: Partition, side: str
) -> None:
    recipe = tiny.recipe(
        method="partial", side=side, steps=2, gradient_checkpointing=side == "math"
    )
    made = tiny.trainer(tmp_path, recipe, tiny.rows(8), partition, of=tiny.model(kind))
    before = tiny.snapshot(made.model)
    expected = {
        name for name, where in sides_of_all(partition, anatomy(before)).items() if where == side
    }
    made.train()
    assert tiny.moved(before, made.model) == expected
    assert sum(len(group["params"]) for group in made.optimizer.param_groups) == len(expected)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_precision_is_that_of_the_products(tmp_path: Path, precision: str) -> None:
    made = tiny.trainer(tmp_path, tiny.recipe(steps=1, precision=precision), tiny.rows(4))
    dtypes = set()
    (layer,) = [
        module
        for name, module in made.model.named_modules()
        if name.endswith("layers.0.mlp.up_proj")
    ]
    layer.register_forward_hook(lambda *call: dtypes.add(call[2].dtype))
    made.train()
    assert dtypes == {{"bf16": torch.bfloat16, "fp32": torch.float32}[precision]}


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_backward_below_the_lowest_trained_layer(
    tmp_path: Path, adapter: str, checkpointing: bool
) -> None:
    """The middle alone is trained: what comes out of layer 0 needs no gradient."""
    recipe = tiny.recipe(
        method="partial",
        side="math",
        adapter=adapter,
        steps=1,
        gradient_checkpointing=checkpointing,
    )
    made = tiny.trainer(tmp_path, recipe, tiny.rows(4), tiny.B)
    need: dict[int, bool] = {}
    layers = [
        module
        for name, module in made.model.named_modules()
        if name.rpartition(".")[0].endswith("layers")
    ]
    for number, layer in enumerate(layers):
        layer.register_forward_hook(
            lambda *call, number=number: need.update({number: call[2].requires_grad})
        )
    made.train()
    assert need == {0: False, 1: True, 2: True, 3: True}


@pytest.mark.parametrize("kind", list(tiny.ARCHITECTURES))
@pytest.mark.parametrize(
    ("method", "side"), [("full", None), ("partial", "language"), ("partial", "math")]
)
def test_adapters_sit_where_they_should(
    tmp_path: Path, kind: str, method: str, side: str | None
) -> None:
    recipe = tiny.recipe(method=method, side=side, adapter="lora", lora_rank=4, steps=2)
    partition = A if side else None
    base = tiny.model(kind)
    names = [name for name, _ in base.named_parameters()]
    found = sides_of_all(A, anatomy(names))
    made = tiny.trainer(tmp_path, recipe, tiny.rows(8), partition, of=base)
    before = tiny.snapshot(made.model)
    made.train()
    moved = tiny.moved(before, made.model)
    assert all(".lora_" in name for name in moved)
    wanted = {
        name
        for name in names
        if name.split(".")[-2] in PROJECTIONS
        and name.endswith("weight")
        and (side is None or found[name] == side)
    }
    assert {plain_name(name) for name in moved} == wanted
    scalings = [module.scaling for module in made.model.modules() if hasattr(module, "lora_A")]
    assert all(one == {"default": 16.0 / 2} for one in scalings) and len(scalings) == len(
        wanted
    )  # alpha / sqrt(rank)


def test_simultaneous_adapters_take_turns(tmp_path: Path) -> None:
    recipe = tiny.recipe(method="simultaneous", adapter="lora", lora_rank=4, steps=1)
    made = tiny.trainer(tmp_path, recipe, tiny.joint(8), tiny.B)
    before = tiny.snapshot(made.model)
    made.train()
    assert {name.split(".")[4] for name in tiny.moved(before, made.model)} == {
        "1",
        "2",
    }  # one step: math's layers


def test_a_merged_adapter_is_the_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    recipe = tiny.recipe(adapter="lora", lora_rank=4, steps=4, learning_rate=1e-1)
    made = tiny.trainer(tmp_path / "t", recipe, tiny.rows(16))
    made.train()
    facts = save_model(made.model, sandbox_tokenizer(), tmp_path / "a", None)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {
        *("adapter_model.safetensors", "adapter_config.json", "generation_config.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert len(facts["digests"]) == 2 * 7 * 4 and facts["root"].startswith("blake3:")
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        base = tiny.model().eval()
        plain = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "a").eval()
        apart = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload().eval()(input_ids=ids).logits
    assert (apart - plain).abs().max() > 1e-2
    torch.testing.assert_close(merged, apart, atol=1e-5, rtol=0)
    save_model(made.model, sandbox_tokenizer(), tmp_path / "b", None)
    once, again = ((tmp_path / folder / "adapter_config.json").read_bytes() for folder in "ab")
    assert once == again


def test_outside_can_be_given_to_a_side(tmp_path: Path) -> None:
    given = Partition(name="B", bottom_layers=1, top_layers=1, outside="language")
    model, parts = choose_parameters(
        tiny.model(), tiny.recipe(method="partial", side="language"), given
    )
    named = anatomy([name for name, _ in model.named_parameters()])
    assert {named[name].kind for name in parts["language"]} >= set(OUTSIDE)


@pytest.mark.parametrize(
    ("knobs", "partition", "words"),
    [
        (
            {"adapter": "lora", "lora_targets": ["query"]},
            None,
            "sft.lora_targets: query matches no matrix. Choose from",
        ),
        (
            {"method": "partial", "side": "math"},
            Partition("P", 4, 0),
            "gives all 4 layers to language",
        ),
        ({"method": "partial", "side": "math"}, Partition("P", 0, 0), "gives all 4 layers to math"),
        ({"method": "partial", "side": "math"}, Partition("P", 4, 1), "but the model has 4"),
        (
            {"method": "partial", "side": "math", "adapter": "lora", "lora_targets": ["q_proj"]},
            A,
            "match no trained matrix",
        ),
    ],
)
def test_what_trains_nothing_is_refused(
    knobs: dict[str, object], partition: Partition | None, words: str
) -> None:
    with pytest.raises(PipelineError, match=words):
        choose_parameters(tiny.model(), tiny.recipe(**knobs), partition)


WAYS = {
    "full": {},
    "partial": {"method": "partial", "side": "math"},
    "lora": {"adapter": "lora", "lora_rank": 2},
    "partial_lora": {"method": "partial", "side": "math", "adapter": "lora", "lora_rank": 2},
    "simultaneous": {"method": "simultaneous"},
}


@pytest.mark.parametrize("kind", list(small_decoders.DECODERS))
def test_every_decoder_trains_in_every_way(kind: str) -> None:
    """A gradient reaches what is trained, and nothing else; each attention and MLP has an adapter.

    The default targets are those of Llama where these exist: a run with the default has the hash
    that it had as the list of seven names.
    """
    ids = torch.arange(3, 27).reshape(2, 12)
    for way, knobs in WAYS.items():
        network = small_decoders.network(kind, 0).train()
        names = {name for name, _ in network.named_parameters()}
        names -= set(towers(names))
        if {*LLAMA_MATRICES} <= {name.split(".")[-2] for name in names if name.count(".") > 1}:
            assert adapted_modules(network, None, names) == adapted_modules(
                network, LLAMA_MATRICES, names
            )
        partition = None if way in ("full", "lora") else tiny.B
        model, parts = choose_parameters(network, tiny.recipe(**knobs), partition)
        for name, module in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(module)  # zeros at first, and no gradient of A
        model(input_ids=ids, labels=ids).loss.backward()
        trained = {name for names in parts.values() for name in names}
        moved = {name for name, p in model.named_parameters() if p.grad is not None}
        assert moved <= trained, way
        assert all(any(name in moved for name in names) for names in parts.values()), way
        if "lora" in way:
            of_adapters = {plain_name(name) for name in moved}
            sites = anatomy(
                name
                for name in model.state_dict()
                if "rotary" not in name and ".attn.bias" not in name
            )
            layers = {
                (site.layer, site.kind)
                for name, site in sites.items()
                if plain_name(name) in of_adapters
            }
            inner = range(1, 3) if partition else range(small_decoders.LAYERS)
            assert {(layer, "mlp") for layer in inner} <= layers, way
            assert "attention" in {kind for _, kind in layers}, way


def test_naming_the_default_targets_has_the_hash_of_the_default() -> None:
    lora, named, fewer = (
        tiny.recipe(adapter="lora", **more)
        for more in ({}, {"lora_targets": list(LLAMA_MATRICES)}, {"lora_targets": ["q_proj"]})
    )
    assert identity(lora) == identity(named) != identity(fewer)
