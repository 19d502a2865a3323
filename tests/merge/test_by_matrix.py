"""WUDI and ACE: whole matrices against hand computations, torch's least squares and descents; the rest is averaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.merge.merge import open_merge
from pipeline.merge.mergekit import why_inexpressible
from pipeline.merge.methods.ace import Ace, leading_directions, size_variation
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.wudi import Wudi, least_interference
from pipeline.models import floats
from pipeline.models.checkpoint import Checkpoint

NAME = "model.layers.1.mlp.up_proj.weight"
OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")
ONE = np.ones(2)


def drawn(*shape: int, rank: int | None = None, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    if rank is None:
        return random.standard_normal(shape)
    return random.standard_normal((shape[0], shape[1], rank)) @ random.standard_normal((shape[0], rank, shape[2]))


def interference(change: torch.Tensor, vectors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The objective of WUDI's equation, term by term."""
    terms = (((change - vector) @ vector.T).square().sum() / vector.square().sum() for vector in vectors)
    return sum(weight * term for weight, term in zip(weights, terms, strict=True))


@pytest.mark.parametrize(
    "vectors",
    [drawn(2, 12, 6), drawn(2, 4, 9), drawn(3, 4, 9), drawn(2, 8, 9, rank=2), drawn(2, 12, 6, rank=2)],
    ids=["tall", "wide", "wide, full rank", "low rank, wide", "low rank, tall"],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_wudi_is_the_smallest_minimum(vectors: np.ndarray, weighted: bool) -> None:
    """The gradient is zero; it is torch's least squares of least norm."""
    weights = np.array([0.3, 1.7, 1.0])[: len(vectors)] if weighted else np.ones(len(vectors))
    found = torch.tensor(least_interference(vectors, weights), requires_grad=True)
    whole, shares = torch.tensor(vectors), torch.tensor(weights)
    loss = interference(found, whole, shares)
    loss.backward()
    assert found.grad.abs().max() < 1e-9
    scaled = [vector * (share.sqrt() / vector.norm()) for vector, share in zip(whole, shares, strict=True)]
    left, right = torch.cat(scaled), torch.cat([part @ vector.T for part, vector in zip(scaled, whole, strict=True)])
    expected = torch.linalg.lstsq(left, right, rcond=1e-6, driver="gelsd").solution.T
    torch.testing.assert_close(found.detach(), expected, rtol=1e-7, atol=1e-8)


def test_wudi_is_where_adam_ends() -> None:
    """The paper's way: Adam from the sum of the task vectors."""
    vectors = torch.tensor(drawn(2, 12, 6))
    found = interference(torch.tensor(least_interference(vectors.numpy(), ONE)), vectors, torch.ones(2)).item()
    change = vectors.sum(dim=0).requires_grad_()
    optimizer = torch.optim.Adam([change], lr=0.02)
    first = interference(change, vectors, torch.ones(2)).item()
    for step in range(1000):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 1000)
        optimizer.zero_grad()
        loss = interference(change, vectors, torch.ones(2))
        loss.backward()
        optimizer.step()
    assert found - 1e-9 <= loss.item() < found + 1e-3 * (first - found)


def test_wudi_by_hand() -> None:
    """One input feature: the weighted mean. Task vectors in different features do not interfere: their sum."""
    one, two = np.array([[1.0], [2.0]]), np.array([[3.0], [0.0]])
    np.testing.assert_allclose(least_interference(np.array([one, two]), ONE), [[2.0], [1.0]])
    np.testing.assert_allclose(least_interference(np.array([one, two]), np.array([3.0, 1.0])), [[1.5], [1.5]])
    apart = np.array([[[1.0, 0.0]], [[0.0, 5.0]]])
    np.testing.assert_allclose(least_interference(apart, ONE), [[1.0, 5.0]])


def test_the_flow_is_a_descent_in_small_steps() -> None:
    vectors = drawn(2, 5, 7)
    whole = torch.tensor(vectors)
    change = whole.sum(dim=0)
    for _ in range(4000):
        change.requires_grad_()
        (gradient,) = torch.autograd.grad(interference(change, whole, torch.ones(2)), change)
        change = change.detach() - 0.5 * gradient * (3 / 4000)
    np.testing.assert_allclose(least_interference(vectors, ONE, 3.0), change.numpy(), atol=2e-3)
    np.testing.assert_allclose(least_interference(vectors, ONE, 0.0), vectors.sum(axis=0), atol=1e-12)
    end = least_interference(vectors, ONE, 1e6)
    np.testing.assert_allclose(end, least_interference(vectors, ONE), atol=1e-6)


def test_ace_by_hand() -> None:
    """One input feature: covariances are 0.5 and 4.5, their common part is their sum."""
    one, two = np.array([[1.0], [2.0]]), np.array([[3.0], [0.0]])
    total = (0.5 + 0.01) + (4.5 + 0.01) + 5.0
    expected = (one * 0.51 + two * 4.51) / total
    found = Ace(experts=["a", "b"]).change_of_matrix(np.array([one, two]), ONE)
    np.testing.assert_allclose(found, expected)
    sizes = np.log([5.0, 9.0])
    assert size_variation(np.array([5.0, 9.0])) == pytest.approx(((sizes[0] - sizes[1]) ** 2 / 2) / sizes.mean() ** 2)
    assert size_variation(np.array([5.0])) == 0
    np.testing.assert_allclose(leading_directions(np.diag([4.0, 2.0, 1.0]), 0.7), np.diag([3.0, 3.0, 0.0]))
    np.testing.assert_allclose(leading_directions(np.diag([4.0, 2.0]), 0.1), np.diag([4.0, 0.0]))


@pytest.mark.parametrize("heterogeneity", [1e9, 0.0], ids=["homogeneous", "heterogeneous"])
def test_ace_expert_by_expert(heterogeneity: float) -> None:
    """docs/merging.md's formulas in torch, a term at a time."""
    vectors, weights = drawn(3, 6, 4) * np.array([1.0, 0.1, 3.0])[:, None, None], np.array([1.0, 2.0, 0.5])
    whole = [torch.tensor(vector) for vector in vectors]
    eye = torch.eye(4).double()
    top, below, sigmas = torch.zeros(6, 4).double(), torch.zeros(4, 4).double(), []
    for weight, vector in zip(weights, whole, strict=True):
        centred = vector - vector.mean(dim=0)
        sigma, ridge = centred.T @ centred, 0.01
        if heterogeneity == 0:
            sigma, ridge = sigma / sigma.trace(), ridge / sigma.trace()
        sigmas.append(weight * sigma)
        below += weight * (sigma + ridge * eye)
        top += weight * vector @ (sigma + ridge * eye)
    common = sum(sigmas).mean(dim=0)
    if heterogeneity == 0:
        common = common / (sum(vector.square().sum() for vector in whole) / 3)
    merged = top @ torch.linalg.inv(below + torch.ones(4, 1).double() @ common[None])
    if heterogeneity == 0:
        left, values, right = torch.linalg.svd(
            merged + sum(vector @ (sigma - below / 3) for vector, sigma in zip(whole, sigmas, strict=True)),
            full_matrices=False,
        )
        merged = merged + values[:2].mean() * left[:, :2] @ right[:2]
    found = Ace(experts=["a", "b", "c"], heterogeneity=heterogeneity, top=0.5).change_of_matrix(vectors, weights)
    np.testing.assert_allclose(found, merged.numpy(), rtol=1e-8, atol=1e-10)


@pytest.fixture(params=["wudi", "ace"])
def method(request):
    kind = {"wudi": Wudi, "ace": Ace}[request.param]
    return lambda **knobs: kind(**{"experts": ["a", "b"], "dtype": "float32", **knobs})


@pytest.fixture
def three(models):
    return [Checkpoint.open(folder) for folder in models["llama"]]


def merged(three, config, name=NAME):
    base, *experts = three
    return open_merge(config, {str(index): expert for index, expert in enumerate(experts)}, base).merged(name)


def test_a_model(three, method, tmp_path, monkeypatch) -> None:
    """Matrices of the layers by the method, all else their weighted mean, whatever the pieces."""
    base, math, language = three
    vectors = np.stack([(one.tensor(NAME).float() - base.tensor(NAME).float()).numpy() for one in (math, language)])
    weights = [0.5, 2.0]
    config = method(weights=weights, scale=0.7)
    change = config.change_of_matrix(vectors.astype(np.float64), np.array(weights))
    expected = base.tensor(NAME).float() + 0.7 * torch.from_numpy(change).float()
    torch.testing.assert_close(merged(three, config), expected, rtol=1e-5, atol=1e-6)
    for name in OUTSIDE:
        mean = TaskArithmetic(experts=["a", "b"], dtype="float32", weights=weights, scale=0.7 / 2.5)
        torch.testing.assert_close(merged(three, config, name), merged(three, mean, name), rtol=1e-6, atol=1e-7)

    def written(folder, threads):
        (tmp_path / folder).mkdir()
        return open_merge(config, {"0": math, "1": language}, base).write(tmp_path / folder, threads=threads)

    first = written("one", 1)
    monkeypatch.setattr(floats, "PIECE", 1)  # a row at a time
    assert written("two", 1) == first


def test_a_control_is_the_other_expert_by_itself(three, method) -> None:
    """The base in an expert's place has no term in the layers: WUDI then gives the other one whole."""
    base, math, _ = three
    alone = merged([base, math], method(experts=["a"]))
    torch.testing.assert_close(merged(three, method(control=["1"])), alone)
    if method().method == "wudi":
        torch.testing.assert_close(alone, math.tensor(NAME).float(), rtol=1e-5, atol=1e-6)


def test_what_is_refused_and_said(three, method) -> None:
    base, math, language = three
    for weights in ([-0.1, 1.0], [0.0, 0.0]):
        with pytest.raises(PipelineError, match="needs weights from 0 on, not all 0"):
            merged(three, method(weights=weights))
    merge = open_merge(method(), {"0": math, "1": language}, base)
    assert [row["what"] for row in merge.plan_rows()] == ["matrices", "all else"] and merge.changes is None
    assert "mergekit 0.1.5 has no merge=" in (why_inexpressible(merge) or "")
