"""The papers' configurations, all of them, against Algorithm 1 written out.

And definitions against one another.
"""

import itertools

import pytest
import torch
from as_torch import as_torch
from small_models import stacked

from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.reset import Reset
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.open_merge import open_merge
from pipeline.merge.summary import group_weights
from pipeline.models.checkpoint import Checkpoint


@pytest.fixture(scope="module", params=[28, 32])
def three(request, tmp_path_factory):
    """(layers, base, math, language), with a head of its own at 28 layers and a tied one at 32."""
    folder, layers = tmp_path_factory.mktemp("stacked"), request.param
    base = stacked(folder / "base", layers, 0, tied=layers == 32)
    others = [
        stacked(folder / name, layers, seed, base, tied=layers == 32)
        for seed, name in ((1, "math"), (2, "language"))
    ]
    return layers, *(Checkpoint.open(one) for one in (base, *others))


def algorithm_1(name, layers, b, u, t_b, t_u, math, language):
    """Compute the paper's Algorithm 1, lines 1 to 11, with `and` in line 5.

    Weights are 1 and 1; norms and biases go with their layer.
    """
    task, lang = math[name].float(), language[name].float()
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
    if layer is None:
        merged = (task + lang) / 2
    elif layer < b or layer > layers - 1 - u:
        merged = lang
    elif layer > b - 1 + t_b and layer < layers - u - t_u:
        merged = task
    else:
        merged = (1 * task + 1 * lang) / (1 + 1)
    return merged.bfloat16()


def tensors(source) -> dict[str, torch.Tensor]:
    return {name: as_torch(source, name) for name in source.names}


def test_all_81_configurations_are_algorithm_1(three):
    layers, _, math, language = three
    m, n = tensors(math), tensors(language)
    ranges = ((3, 4, 5), (0, 1, 2), (0, 1, 2), (0, 1, 2))
    for b, u, t_b, t_u in itertools.product(*ranges):
        config = LayerSwap(
            math="a",
            language="b",
            bottom_layers=b,
            top_layers=u,
            bottom_transition=t_b,
            top_transition=t_u,
        )
        merge = open_merge(config, {"math": math, "language": language})
        for name in merge.names:
            assert torch.equal(
                as_torch(merge, name), algorithm_1(name, layers, b, u, t_b, t_u, m, n)
            ), (
                b,
                u,
                t_b,
                t_u,
                name,
            )


def test_by_partition_b_is_by_its_counts(three):
    _, _, math, language = three
    sources = {"math": math, "language": language}
    counts = open_merge(LayerSwap(math="a", language="b", bottom_layers=8, top_layers=4), sources)
    by_b = open_merge(LayerSwap(math="a", language="b"), sources, partition=Partition("B", 8, 4))
    assert by_b.method.weights == counts.method.weights


def test_by_partitions_a_and_z(three):
    layers, _, math, language = three
    sources, config = {"math": math, "language": language}, LayerSwap(math="a", language="b")
    a = open_merge(
        config, sources, partition=Partition("A", 6, 2, all_attention=True)
    ).method.weights
    for layer in range(layers):
        at, outer = f"model.layers.{layer}.", layer < 6 or layer >= layers - 2
        for part in ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "input_layernorm.weight"):
            assert a[at + part] == {"language": 1.0}
        for part in ("mlp.up_proj.weight", "post_attention_layernorm.weight"):
            assert a[at + part] == ({"language": 1.0} if outer else {"math": 1.0})
    z = open_merge(config, sources, partition=Partition("Z", 8, 4, inverse=True)).method.weights
    assert z["model.layers.0.mlp.up_proj.weight"] == {"math": 1.0}
    assert z["model.layers.10.mlp.up_proj.weight"] == {"language": 1.0}


def test_soup_then_swap_is_the_swap_of_the_soups(three, tmp_path):
    """The papers' table 6: experts of a side are souped first; twelve in the multilingual soup."""
    layers, base, math, language = three
    others = [
        stacked(tmp_path / str(seed), layers, seed, base.folder, tied=base.tied_head)
        for seed in (7, 8)
    ]
    experts = [language, *map(Checkpoint.open, others)]
    config = LayerSwap(math=["m"], language=["a", "b", "c"])
    sources = {"math": math, **{f"language.{index}": one for index, one in enumerate(experts)}}
    merge = open_merge(config, sources)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        soup = sum(as_torch(one, name).float() for one in experts) / 3
        expected = soup if "layers" in name else (as_torch(math, name).float() + soup) / 2
        torch.testing.assert_close(as_torch(merge, name).float(), expected, rtol=1e-2, atol=1e-3)
    assert group_weights(merge)[1]["weights"] == {f"language.{index}": 1 / 3 for index in range(3)}


def test_magnitude_weights_by_hand(three):
    """w = 1 / mean over rows (input features; a vector is one) of the mean absolute change.

    `layer_swapping` 4.3.
    """
    _, base, math, language = three

    def size(expert):
        rows = []
        for name in base.names:
            change = (as_torch(expert, name).float() - as_torch(base, name).float()).abs().double()
            rows += (
                change.mean(0).flatten().tolist() if change.dim() > 1 else [change.mean().item()]
            )
        return sum(rows) / len(rows)

    weights = [1 / size(math), 1 / size(language)]
    expected = [weight / sum(weights) for weight in weights]
    swap = LayerSwap(math="a", language="b", embeddings="magnitude")
    found = open_merge(swap, {"math": math, "language": language}, base).method.weights[
        "model.embed_tokens.weight"
    ]
    assert list(found.values()) == pytest.approx(expected, rel=1e-6)
    soup = open_merge(
        Soup(experts=["a", "b"], weights="magnitude"), {"0": math, "1": language}, base
    )
    assert list(soup.method.weights["model.norm.weight"].values()) == pytest.approx(
        expected, rel=1e-6
    )
    with pytest.raises(PipelineError, match="needs merge.base"):
        open_merge(swap, {"math": math, "language": language})


def test_task_arithmetic_by_hand(three):
    _, base, math, language = three
    config = TaskArithmetic(experts=["a", "b"], scale=0.5, weights=[1.0, 0.5], dtype="float32")
    merge = open_merge(config, {"0": math, "1": language}, base)
    for name in base.names[:5]:
        b, m, n = (as_torch(one, name).float() for one in (base, math, language))
        assert torch.equal(as_torch(merge, name), b + ((m - b) + (n - b) * 0.5) * 0.5)


def test_resets_by_hand(three):
    layers, base, math, _ = three

    def owners(partition=None, **settings):
        merge = open_merge(Reset(expert="a", **settings), {"expert": math}, base, partition)
        return {
            name: "base" if torch.equal(as_torch(merge, name), as_torch(base, name)) else "expert"
            for name in merge.names
        }

    found = owners(layers=[0, 1, layers - 1])  # `layer_swapping` 3.3: outer layers reverted
    assert {int(name.split(".")[2]) for name, whose in found.items() if whose == "base"} == {
        0,
        1,
        layers - 1,
    }
    by_side = owners(Partition("B", 8, 4), side="language")
    assert by_side["model.embed_tokens.weight"] == by_side["model.norm.weight"] == "base"
    assert {by_side[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 7, layers - 1)} == {"base"}
    assert by_side["model.layers.8.mlp.up_proj.weight"] == "expert"
    assert (
        owners(Partition("B", 8, 4), side="math", outside="keep")["model.norm.weight"] == "expert"
    )
    for axis, dim in (("input", 0), ("output", 1)):
        merge = open_merge(Reset(expert="a", threshold=0.04, axis=axis), {"expert": math}, base)
        for name in ("model.layers.3.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.bias"):
            b, m = as_torch(base, name), as_torch(math, name)
            change = (m.float() - b.float()).abs()
            keep = (
                change.mean(dim, keepdim=True) > 0.04 if change.dim() > 1 else change.mean() > 0.04
            )
            assert torch.equal(as_torch(merge, name), torch.where(keep, m, b))
    assert torch.equal(as_torch(merge, "model.norm.weight"), as_torch(math, "model.norm.weight"))
    for settings, words in (
        ({"layers": [0], "threshold": 0.1}, "merge.layers and merge.threshold"),
        ({"side": "math"}, "needs a partition"),
    ):
        with pytest.raises(PipelineError, match=words):
            owners(**settings)
