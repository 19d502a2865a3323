"""The control of a merge.

The base in the language expert's place, with the weights that the merge itself has.
"""

import numpy as np
import pytest
import torch
from as_torch import as_torch

from pipeline.errors import PipelineError
from pipeline.merge.methods import METHODS
from pipeline.merge.open_merge import open_merge
from pipeline.models.anatomy import anatomy
from pipeline.models.checkpoint import Checkpoint

SIDES = {"math": "m", "language": "l"}
PAIR = {"experts": ["m", "l"]}


@pytest.fixture
def three(models):
    return [Checkpoint.open(folder) for folder in models["llama"]]


def merged(three, method, control, **knobs):
    base, math, language = three
    roles = ("math", "language") if method == "layer_swap" else ("0", "1")
    config = METHODS[method](dtype="float32", control=control, **knobs)
    merge = open_merge(config, dict(zip(roles, (math, language), strict=True)), base)
    return {name: as_torch(merge, name) for name in merge.names}


def task_vectors(three):
    base, *experts = ({name: as_torch(one, name).float() for name in one.names} for one in three)
    return base, *({name: expert[name] - base[name] for name in base} for expert in experts)


def test_of_a_soup_it_is_half_of_the_math_vector(three) -> None:
    base, math, _ = task_vectors(three)
    for name, tensor in merged(three, "soup", ["1"], **PAIR).items():
        torch.testing.assert_close(tensor, base[name] + math[name] / 2, rtol=1e-6, atol=1e-7)


def test_weights_by_magnitude_are_those_of_the_merge(three) -> None:
    """With the numbers of section 4.3, computed here: in proportion to 1 / mean absolute change."""
    base, math, language = task_vectors(three)
    rows = [  # a row is an input feature: a column of the stored matrix
        [
            row.abs().mean().item()
            for t in vectors.values()
            for row in (t.T if t.ndim > 1 else t[None])
        ]
        for vectors in (math, language)
    ]
    inverse = [1 / np.mean(one) for one in rows]
    share = inverse[0] / sum(inverse)
    assert abs(share - 0.5) > 1e-4
    for name, tensor in merged(three, "soup", ["1"], **PAIR, weights="magnitude").items():
        torch.testing.assert_close(tensor, base[name] + share * math[name], rtol=1e-5, atol=1e-6)


def test_of_a_swap_it_is_the_reset_of_the_same_layers(three) -> None:
    base, math, _ = task_vectors(three)
    keys = {
        "embeddings": "math",
        "final_norm": "math",
        "head": "math",
        "bottom_layers": 1,
        "top_layers": 1,
    }
    layers = {name: site.layer for name, site in anatomy(list(base)).items()}
    outer = {0, max(layer for layer in layers.values() if layer is not None)}
    for name, tensor in merged(three, "layer_swap", ["language"], **SIDES, **keys).items():
        expected = base[name] if layers[name] in outer else base[name] + math[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("method", ["ties", "task_arithmetic"])
def test_of_other_methods_it_is_the_merge_with_a_task_vector_of_zeros(three, method) -> None:
    base, math, _ = three
    expected = open_merge(METHODS[method](dtype="float32", experts=["m"]), {"0": math}, base)
    for name, tensor in merged(three, method, ["1"], **PAIR).items():
        assert torch.equal(tensor, as_torch(expected, name)), name


@pytest.mark.parametrize(
    "control, words",
    [
        (["2"], "merge.control=.*2 is not a role. Choose from 0, 1"),
        (["0", "1"], "leaves no expert. Name only the language"),
    ],
)
def test_roles_that_make_no_control(three, control, words) -> None:
    with pytest.raises(PipelineError, match=words):
        merged(three, "soup", control, **PAIR)


def test_all_experts_of_a_side(three) -> None:
    config = METHODS["layer_swap"](math="m", language=["a", "b"], control=["language"])
    assert config.controlled_roles() == ["language.0", "language.1"]
