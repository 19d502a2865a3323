"""TIES under PEFT's definition, against PEFT, and under the paper's; tests/merge/test_as_mergekit.py has mergekit's."""

import pytest
import torch
from as_torch import as_torch

from pipeline.config.compose import compose
from pipeline.merge.merge import open_merge
from pipeline.merge.methods.ties import Ties
from pipeline.merge.ties import kept_count
from pipeline.models.checkpoint import Checkpoint


def preset(name: str, **settings) -> Ties:
    """conf/merge/ties_<name>.yaml with some knobs."""
    words = [f"merge.{key}={value}".replace(" ", "") for key, value in settings.items()]
    return compose(["stage=merge", f"merge=ties_{name}", *words]).merge  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def sources(models):
    base, *experts = (Checkpoint.open(folder) for folder in models["qwen2"])
    return {str(index): one for index, one in enumerate(experts)}, base


def vectors(sources, name):
    experts, base = sources
    return [as_torch(one, name).float() - as_torch(base, name).float() for one in experts.values()]


def tied(vector, density):
    """Entries whose magnitude is exactly that at which the trim cuts."""
    size = vector.abs()
    return size == size.flatten().sort(descending=True).values[kept_count(density, size.numel()) - 1]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 0.7]])
def test_ties_under_pefts_definition_is_pefts(sources, weights):
    """Equal but for entries tied with a threshold: PEFT keeps exactly k of them, we keep all."""
    from peft.utils.merge_utils import ties

    experts, base = sources
    merge = open_merge(preset("peft", experts="[a,b]", dtype="float32", density=0.3, weights=weights), experts, base)
    compared = 0
    for name in merge.names:
        both = vectors(sources, name)
        expected = as_torch(base, name).float() + ties(both, torch.tensor(weights), 0.3)
        free = ~(tied(both[0], 0.3) | tied(both[1], 0.3))
        torch.testing.assert_close(as_torch(merge, name)[free], expected[free], rtol=1e-6, atol=1e-7)
        compared += int(free.sum())
    assert compared > 20_000
