"""TIES under PEFT's definition and the paper's, and all that mergekit does too, against those programs themselves."""

from __future__ import annotations

import pytest
import torch
from as_torch import as_torch
from by_mergekit import made_by_mergekit

from pipeline.config.compose import compose
from pipeline.merge.merge import open_merge
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.merge.ties import kept_count
from pipeline.models.checkpoint import Checkpoint

WEIGHTS = [0.3, 0.7]


def preset(name: str, **settings) -> Ties:
    """conf/merge/ties_<name>.yaml with some knobs."""
    words = [f"merge.{key}={value}".replace(" ", "") for key, value in settings.items()]
    config = compose(["stage=merge", f"merge=ties_{name}", "merge.experts=[a,b]", "merge.dtype=float32", *words])
    return config.merge  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("weights", [[1.0, 1.0], WEIGHTS])
def test_ties_under_pefts_definition_is_pefts(sources, weights):
    """Equal but for entries tied with a threshold: PEFT keeps exactly k of them, we keep all."""
    from peft.utils.merge_utils import ties

    experts, base = sources
    merge = open_merge(preset("peft", density=0.3, weights=weights), experts, base)
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


@pytest.fixture(scope="module")
def theirs(models, tmp_path_factory):
    """What mergekit makes of the same models, in float32; one process for all."""
    base, *experts = map(str, models["qwen2"])

    def config(method, **parameters):
        each = [
            {"model": model, "parameters": {"weight": weight, **({"density": 0.3} if method == "ties" else {})}}
            for model, weight in zip(experts, parameters.pop("weights", [1.0, 1.0]), strict=True)
        ]
        found = {"merge_method": method, "dtype": "float32", "models": each, "parameters": parameters}
        return found if method == "linear" else {**found, "base_model": base}

    asked = {
        "even": config("linear"),
        "weighted": config("linear", weights=WEIGHTS),
        "arithmetic": config("task_arithmetic", weights=WEIGHTS, **{"lambda": 0.6}),
        "ties": config("ties"),
        "ties_weighted": config("ties", weights=WEIGHTS, **{"lambda": 0.7}),
    }
    return made_by_mergekit(asked, tmp_path_factory.mktemp("mergekit"))


@pytest.mark.mergekit
def test_linear_merges_are_mergekits_bit_for_bit(sources, theirs):
    """Sources from the left, each product and sum rounded once together, as torch's addcmul has it."""
    experts, base = sources
    two = {"experts": ["a", "b"], "dtype": "float32"}
    ours = {
        "even": open_merge(Soup(**two), experts),
        "weighted": open_merge(Soup(**two, weights=WEIGHTS), experts),
        "arithmetic": open_merge(TaskArithmetic(**two, weights=WEIGHTS, scale=0.6), experts, base),
    }
    for name, merge in ours.items():
        for parameter in merge.names:
            assert torch.equal(as_torch(merge, parameter), theirs[name][parameter]), (name, parameter)


@pytest.mark.mergekit
@pytest.mark.parametrize(("name", "settings"), [("ties", {}), ("ties_weighted", {"weights": WEIGHTS, "scale": 0.7})])
def test_ties_with_mergekits_preset_is_mergekits(sources, theirs, name, settings):
    """Equal but for entries tied with a threshold: mergekit keeps k of them, which ones its sort decides."""
    experts, base = sources
    merge = open_merge(preset("mergekit", density=0.3, **settings), experts, base)
    different, free_entries = 0, 0
    for parameter in merge.names:
        both = vectors(sources, parameter)
        free = ~(tied(both[0], 0.3) | tied(both[1], 0.3))
        found = as_torch(merge, parameter)
        assert torch.equal(found[free], theirs[name][parameter][free]), parameter
        different, free_entries = (
            different + int((found != theirs[name][parameter]).sum()),
            free_entries + int(free.sum()),
        )
    assert different < 0.02 * free_entries
