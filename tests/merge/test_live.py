"""A merge in a model in memory: the same bits as on disk, in place, and back again."""

import random
import shutil

import pytest
import torch
from as_torch import as_torch
from safetensors.torch import load_file

from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge import live as module
from pipeline.merge.live import Live, merge_of_one, model_of
from pipeline.merge.merge import Merging
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.reset import Reset
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge
from pipeline.merge.resident import keep_models_resident
from pipeline.models import arrays
from pipeline.models.checkpoint import Checkpoint
from pipeline.models.products import split_products

METHODS = ["layer_swap", "soup", "ties", "task_arithmetic", "reset"]
OWNERS = ["average", "magnitude", "math", "language"]


def any_recipe(number: int, choose: random.Random):
    """Draw (config, roles of the sources, partition) of a merge; methods take turns."""
    method, partition = METHODS[number % len(METHODS)], None
    dtype = choose.choice([None, None, "float32", "float16"])
    weights = [choose.uniform(-1, 2), choose.uniform(0.1, 2)]
    if method == "layer_swap":
        keys = ("zones", "embeddings", "final_norm", "head")
        settings = {key: choose.choice(OWNERS) for key in keys}
        settings["layer_norms"] = choose.choice(["with_layer", *OWNERS])
        if choose.random() < 0.3:
            letter = choose.choice("ABZ")
            sizes = {"bottom_layers": choose.randint(1, 5), "top_layers": choose.randint(1, 3)}
            partition = Partition(
                letter, **sizes, all_attention=letter == "A", inverse=letter == "Z"
            )
        else:
            keys = ("bottom_layers", "top_layers", "bottom_transition", "top_transition")
            settings |= {key: choose.randint(0, 3) for key in keys}
        return (
            LayerSwap(math="a", language="b", dtype=dtype, **settings),
            ["math", "language"],
            partition,
        )
    two = {"experts": ["a", "b"], "dtype": dtype}
    if method == "soup":
        share = choose.random()
        given = choose.choice([None, "magnitude", [share, 1 - share]])
        return Soup(**two, weights=given), ["0", "1"], None
    if method == "ties":
        given = choose.choice([None, weights])
        return Ties(**two, weights=given, density=choose.random()), ["0", "1"], None
    if method == "task_arithmetic":
        return (
            TaskArithmetic(**two, scale=choose.random(), weights=choose.choice([None, weights])),
            ["0", "1"],
            None,
        )
    what = choose.choice(["side", "layers", "threshold"])
    partition = Partition("C", 3, 1) if what == "side" else None
    value = {"side": "math", "layers": [0, 5], "threshold": 0.039}[what]
    outside, axis = choose.choice([None, "reset", "keep"]), choose.choice(["input", "output"])
    return (
        Reset(expert="a", **{what: value}, outside=outside, axis=axis, dtype=dtype),
        ["expert"],
        partition,
    )


def open_any(models, kind, number):
    config, roles, partition = any_recipe(number, random.Random(f"{kind} {number}"))
    base, *experts = (Checkpoint.open(folder) for folder in models[kind])
    return open_merge(config, dict(zip(roles, experts, strict=False)), base, partition, 1)


def parameters(live: Live) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in live.model.named_parameters()}


def load(merge: Merging, dtype: str = "auto") -> Live:
    return model_of(merge, dtype, "cpu")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "cohere"])
def test_disk_and_live_agree_bit_for_bit_whatever_the_recipe(models, tmp_path, monkeypatch, kind):
    """One model in memory goes from recipe to recipe.

    What it holds is what each writes, in pieces of another size.
    """
    lives = {}
    for number in range(12):
        merge = open_any(models, kind, number)
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(
                arrays, "PIECE", 50
            )  # entries: a few rows at a time, where memory below takes whole tensors
            merge.write(folder, threads=2 if number % 2 else 1)
        written = load_file(folder / "model.safetensors")
        again = open_any(models, kind, number)
        if merge.dtype not in lives:
            lives[merge.dtype] = load(again)
        live = lives[merge.dtype]
        live.apply(again, threads=1 if number % 2 else 2)
        for name, parameter in live.model.named_parameters():
            assert parameter.dtype == written[name].dtype and torch.equal(
                parameter, written[name]
            ), (
                name,
                merge.config,
            )
            assert torch.equal(as_torch(again, name), written[name])


@pytest.mark.parametrize("kind", ["qwen2", "cohere"])
def test_only_what_changes_is_copied_and_there_is_a_way_back(models, kind):
    def swap(**counts):
        _, *experts = (Checkpoint.open(folder) for folder in models[kind])
        settings = {"embeddings": "math", "final_norm": "math", "head": "math", **counts}
        config = LayerSwap(math="a", language="b", **settings)
        return open_merge(config, dict(zip(("math", "language"), experts, strict=True)))

    start = swap(bottom_layers=3, top_layers=0)
    live = load(start)
    was, places = (
        parameters(live),
        {name: one.data_ptr() for name, one in live.model.named_parameters()},
    )
    changed = live.apply(swap(bottom_layers=4, top_layers=0))
    assert {name.split(".")[2] for name in changed} == {"3"}
    assert not torch.equal(
        parameters(live)["model.layers.3.mlp.up_proj.weight"],
        was["model.layers.3.mlp.up_proj.weight"],
    )
    changed = live.apply(
        swap(bottom_layers=4, top_layers=0, embeddings="language", head="language")
    )
    assert set(changed) <= {"model.embed_tokens.weight", "lm_head.weight"} and changed
    if kind == "cohere":
        assert (
            live.model.lm_head.weight.data_ptr() == live.model.model.embed_tokens.weight.data_ptr()
        )
    assert live.apply(start) and live.apply(start) == []
    assert all(torch.equal(one, was[name]) for name, one in parameters(live).items())
    assert places == {name: one.data_ptr() for name, one in live.model.named_parameters()}


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_in_memory_is_the_written_merge_cast(models, tmp_path, stored, dtype):
    def soup():
        roles = zip("01", map(Checkpoint.open, models["llama"][1:]), strict=True)
        return open_merge(Soup(experts=["a", "b"], dtype=stored), dict(roles))

    soup().write(tmp_path)
    live = load(soup(), dtype)
    written = load_file(tmp_path / "model.safetensors")
    memory = dict(live.model.named_parameters())
    assert all(
        one.dtype == getattr(torch, dtype) and torch.equal(one, written[name].to(one.dtype))
        for name, one in memory.items()
    )


@pytest.mark.parametrize("kind", ["llama", "cohere"])  # cohere's head is tied
def test_split_weights_are_those_of_the_merge_itself(models, kind):
    """Split weights after other merges equal those of a merge that is loaded and then split."""
    live = model_of(open_any(models, kind, 0), "float32", "cpu", products="bf16x3")
    for number in (1, 2, 3, 4, 0):
        merge = open_any(models, kind, number)
        merge.config.dtype = None
        live.apply(merge, 1)
        loaded = split_products(model_of(merge, "float32", "cpu").model)
        for (name, found), (_, expected) in zip(
            live.model.named_parameters(), loaded.named_parameters(), strict=True
        ):
            assert torch.equal(found, expected), (name, merge.config)


@pytest.mark.gpu
def test_the_same_bits_on_another_device(models):
    merge = open_any(models, "llama", 0)
    live = model_of(merge, "auto", "cuda")
    for number in (1, 2, 3, 4, 0):
        merge = open_any(models, "llama", number)
        merge.config.dtype = None
        live.apply(merge, 2)
        for name, parameter in live.model.named_parameters():
            assert torch.equal(parameter.data.cpu(), as_torch(merge, name).to(parameter.dtype)), (
                name,
                merge.config,
            )


def test_one_model_in_memory_becomes_a_base_its_experts_and_their_merges(
    models, monkeypatch, tmp_path
):
    """Loaded once where tokenizers are the same, whatever the sources.

    And of a swap after its math expert only the language layers and what lies outside of layers are
    copied.
    """
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in models["llama"]]
    for folder in folders:
        (folder / "chat_template.jinja").unlink()
        (folder / "tokenizer.json").write_text((models["llama"][0] / "tokenizer.json").read_text())
    loaded, real = [], module._load_live
    monkeypatch.setattr(
        module, "_load_live", lambda *given: (loaded.append(given[0].giver.folder), real(*given))[1]
    )
    base, math, language = map(Checkpoint.open, folders)
    sources = {"math": math, "language": language}
    bottom = open_merge(
        LayerSwap(math="a", language="b", bottom_layers=2, top_layers=0, top_transition=0), sources
    )
    asked = [
        *(merge_of_one(folder) for folder in folders),
        open_merge(Soup(experts=["a", "b"]), {"0": math, "1": language}),
        merge_of_one(folders[1]),
        bottom,
        open_merge(TaskArithmetic(experts=["a", "b"]), {"0": math, "1": language}, base),
        merge_of_one(folders[0]),
    ]
    with keep_models_resident():
        for merge in asked:
            live = load(merge, "float32")
            for name, parameter in live.model.named_parameters():
                assert torch.equal(parameter.data, as_torch(merge, name).to(torch.float32)), (
                    name,
                    merge.config,
                )
        load(merge_of_one(folders[1]), "float32")
        changed = live.apply(bottom, 1)
        kept = [name for name in bottom.names if bottom.method.weights[name] == {"math": 1.0}]
        assert kept and sorted(changed) == sorted(set(bottom.names) - set(kept))
        assert loaded == [base.folder]
        with open(folders[2] / "tokenizer.json", "a") as file:
            file.write("\n")
        load(merge_of_one(folders[2]), "float32")
    assert loaded == [base.folder, folders[2]]


def test_a_failure_midway_is_made_good_by_the_next_merge(models):
    good = open_any(models, "llama", 0)
    live = load(good)
    was = parameters(live)
    broken = open_merge(
        Soup(experts=["a", "b"]),
        {str(i): Checkpoint.open(folder) for i, folder in enumerate(models["llama"][1:])},
    )
    real = broken._rows

    def rows(name):
        if name == "model.layers.7.mlp.up_proj.weight":
            raise PipelineError("broken")
        return real(name)

    broken._rows = rows
    with pytest.raises(PipelineError, match="broken"):
        live.apply(broken, 1)
    live.apply(good, 1)
    assert all(torch.equal(one, was[name]) for name, one in parameters(live).items())
