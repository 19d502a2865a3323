"""merge.layer_weights: layer swaps are special cases to the bit, interpolation by hand, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from as_torch import as_torch
from small_models import LAYERS
from test_as_mergekit import opened

from pipeline.config.compose import compose, stage_of
from pipeline.config.knob import identity
from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.merge.layer_weights import weight_at
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.models.anatomy import anatomy

TWO = {"experts": ["m", "l"]}
KINDS = ("attention", "mlp", "norms")


def mirrored(math: dict[str, Any]) -> dict[str, Any]:
    """Weights of math for role 0, and one minus them for role 1."""

    def other(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: other(inner) for key, inner in value.items()}
        return [other(inner) for inner in value] if isinstance(value, list) else 1 - value

    return {"0": math, "1": other(math)}


def layers(text: str) -> list[float]:
    return [{"m": 1.0, "l": 0.0, "a": 0.5}[letter] for letter in text]


SWAPPED = layers("lll" + "m" * (LAYERS - 4) + "l")
ZONES = layers("laa" + "m" * (LAYERS - 6) + "all")


@pytest.mark.parametrize("kind", ["llama", "cohere"])
@pytest.mark.parametrize(
    ("swap", "math"),
    [
        ({"bottom_layers": 3, "top_layers": 1}, dict.fromkeys(KINDS, SWAPPED)),
        (
            {"bottom_layers": 1, "bottom_transition": 2, "top_transition": 1, "top_layers": 2},
            dict.fromkeys(KINDS, ZONES),
        ),
        ({"bottom_layers": 3, "top_layers": 1, "layer_norms": "average"}, {"attention": SWAPPED, "mlp": SWAPPED}),
        (
            {"bottom_layers": 3, "top_layers": 1, "embeddings": "math", "final_norm": "language"},
            {**dict.fromkeys(KINDS, SWAPPED), "embeddings": 1.0, "final_norm": 0},
        ),
    ],
    ids=["swap", "zones", "norms", "outside"],
)
def test_a_layer_swap_is_a_soup_with_weights_of_layers(
    swap: dict[str, Any], math: dict[str, Any], kind: str, models: dict[str, list[Path]]
) -> None:
    expected = opened(models[kind], LayerSwap(math="m", language="l", **swap))
    soup = opened(models[kind], Soup(**TWO, layer_weights=mirrored(math)))
    copied = {"0": "math", "1": "language", None: None}
    for name in expected.names:
        assert torch.equal(as_torch(soup, name), as_torch(expected, name)), name
        roles = [(merge.copied_from(name) or (None,))[0] for merge in (soup, expected)]
        assert copied[roles[0]] == roles[1]  # what is one expert's is not computed


def test_anchors_are_interpolated_linearly_and_hold_beyond_the_outermost() -> None:
    anchors = {"2": 1.0, "6": 0.0, "8": 0.5}
    expected = np.interp(range(12), [2, 6, 8], [1.0, 0.0, 0.5])
    assert [weight_at(anchors, layer) for layer in range(12)] == pytest.approx(list(expected))
    assert [weight_at({"3": 0.4}, layer) for layer in (0, 3, 9)] == [0.4] * 3


def test_task_arithmetic_with_weights_of_layers_by_hand(models: dict[str, list[Path]]) -> None:
    weights = {1: {"mlp": {0: 0, LAYERS - 1: LAYERS - 1}, "embeddings": 3}}
    merge = opened(models["llama"], TaskArithmetic(**TWO, layer_weights=weights, scale=0.5, weights=[0.25, 2.0]))
    base, math, language = (opened(models["llama"], Soup(experts=[role, "b"], weights=[1, 0])) for role in "bml")
    for name, site in anatomy(merge.names).items():
        second = site.layer if site.kind == "mlp" else 3 if site.kind == "embedding" else 2
        parts = [as_torch(source, name).double() for source in (base, math, language)]
        expected = parts[0] + 0.5 * (0.25 * (parts[1] - parts[0]) + second * (parts[2] - parts[0]))
        torch.testing.assert_close(as_torch(merge, name).double(), expected, rtol=2**-7, atol=1e-6)
    told = {(row["where"], row["what"]): row["formula"] for row in merge.method.rows}
    assert told["layer 3", "mlp"] == "base + 0.5 x (0.25 task vector 0 + 3 task vector 1)"


def test_equal_weights_of_all_layers_are_those_of_no_layer(models: dict[str, list[Path]]) -> None:
    same = {0: dict.fromkeys(KINDS, 0.3), 1: dict.fromkeys(KINDS, {4: 0.7})}
    for method, further in ((Soup, {}), (TaskArithmetic, {"scale": 0.6})):
        plain = opened(models["qwen2"], method(**TWO, weights=[0.3, 0.7], **further))
        layered = opened(models["qwen2"], method(**TWO, weights=[0.3, 0.7], layer_weights=same, **further))
        assert all(torch.equal(as_torch(plain, name), as_torch(layered, name)) for name in plain.names)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            Soup(**TWO, layer_weights={0: {"mlp": [1, 0.5, 0]}}),
            rf"merge.layer_weights.0.mlp has 3 weights, but the model has {LAYERS} layers: give {LAYERS}, one number "
            rf"for all, or anchors such as \{{0: 1, {LAYERS - 1}: 0\}}",
        ),
        (Soup(**TWO, layer_weights={2: {"mlp": 1}}), "2 is not a role: there are 0, 1"),
        (Soup(**TWO, layer_weights={0: {"mpl": 1}}), "mpl is not a kind of parameter: did you mean mlp"),
        (Soup(**TWO, layer_weights={0: {"mlp": "all"}}), "must be a number, a list of numbers or anchors"),
        (Soup(**TWO, layer_weights={0: {"mlp": {}}}), "must be a number, a list of numbers or anchors"),
        (Soup(**TWO, layer_weights={0: {"head": [1, 1]}}), "head is of parameters outside the layers: give one"),
        (Soup(**TWO, layer_weights={0: {"mlp": {LAYERS: 1}}}), f"{LAYERS} is not a layer: .*0 to {LAYERS - 1}"),
        (Soup(**TWO, layer_weights=[0.5]), r"must be \{role: \{kind: weights\}\}"),
        (
            Soup(**TWO, layer_weights={0: {"mlp": {0: 0.5, 2: 0.9}}}),
            r"the weights of mlp in layer 1 are 0.7 \+ 0.5 = 1.2, not 1: .* merge=task_arithmetic",
        ),
        (Soup(**TWO, layer_weights={0: {"mlp": 0.501}}), r"of mlp in layer 0 are 0.501 \+ 0.5 = 1.001, not 1"),
        (TaskArithmetic(**TWO, layer_weights={0: {"norms": [1.0]}}), "norms has 1 weights, but"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_a_run(config: Merge, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        config.refuse(None, LAYERS)


def test_a_tied_model_has_no_head_to_weigh(models: dict[str, list[Path]]) -> None:
    with pytest.raises(PipelineError, match="layer_weights.0.head: the model has no such parameter: leave it out"):
        opened(models["cohere"], TaskArithmetic(**TWO, layer_weights={0: {"head": 0.5}}))


def test_from_the_command_line_and_a_table_to_one_identity(
    models: dict[str, list[Path]], make_run: Callable[..., Path]
) -> None:
    words = ["stage=merge", "merge=soup", "merge.experts=[a,b]"]
    typed = compose([*words, "merge.layer_weights={0:{mlp:{0:1,11:0}},1:{mlp:{0:0,11:1}}}"])
    row = {"0": {"mlp": {0: 1.0, 11: 0}}, "1": {"mlp": {"0": 0, "11": 1}}}
    listed = stage_of({"stage": "merge", "merge": "soup", "merge.experts": ["a", "b"], "merge.layer_weights": row})
    assert identity(typed) == identity(listed)
    assert "layer_weights" not in str(identity(compose(words)))  # a knob at its default leaves old runs valid
    _, math, language = models["llama"]
    weights = "merge.layer_weights={0:{mlp:{0:1,11:0}},1:{mlp:{0:0,11:1}}}"
    folder = make_run("stage=merge", "merge=soup", f"merge.experts=[{math},{language}]", weights)
    assert "merge.layer_weights" in (folder / "README.md").read_text()
