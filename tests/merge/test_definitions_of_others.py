"""TIES under PEFT's definition, against PEFT, and under the paper's; tests/merge/test_as_mergekit.py has mergekit's."""

from __future__ import annotations

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


@pytest.mark.parametrize("trim", ["tensor", "model"])
def test_ties_is_the_papers_in_ten_lines(sources, trim):
    experts, base = sources
    merge = open_merge(Ties(experts=["a", "b"], density=0.4, scale=0.8, trim=trim, dtype="float32"), experts, base)
    kept = {}
    whole = [torch.cat([vectors(sources, name)[i].flatten().abs() for name in base.names]) for i in (0, 1)]
    for name in base.names:
        for i, vector in enumerate(vectors(sources, name)):
            over = whole[i] if trim == "model" else vector.abs().flatten()
            limit = over.sort(descending=True).values[int(0.4 * over.numel()) - 1 if over.numel() > 2 else 0]
            kept.setdefault(name, []).append(vector * (vector.abs() >= limit))
    majority = sum(sum(pair).sign().sum() for pair in kept.values()).sign()
    for name, pair in kept.items():
        stacked = torch.stack(pair)
        sign = stacked.sum(0).sign()
        sign[sign == 0] = majority
        agree = stacked * sign > 0
        expected = as_torch(base, name).float() + 0.8 * (stacked * agree).sum(0) / agree.sum(0).clamp(min=1)
        assert torch.equal(as_torch(merge, name), expected), name
    assert merge.method.rows[0]["formula"] == f"base + 0.8 x TIES of 2 task vectors, density 0.4, trim {trim}"
