"""DARE: which entries are dropped by the seed alone, whatever the threads and pieces; the rest by hand."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from pipeline.config.merging import Merge
from pipeline.merge.merge import open_merge
from pipeline.merge.methods.dare_linear import DareLinear
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.task_vectors import random_bits
from pipeline.models import floats
from pipeline.models.checkpoint import Checkpoint

NAME = "model.layers.1.mlp.up_proj.weight"


def dare(**knobs):
    return DareLinear(**{"experts": ["a", "b"], "dtype": "float32", **knobs})


@pytest.fixture
def three(models):
    return [Checkpoint.open(folder) for folder in models["llama"]]


def merged(three, config, name=NAME):
    base, math, language = three
    return open_merge(config, {"0": math, "1": language}, base).merged(name)


def test_by_hand(three):
    """Each entry is 0 or t / density, experts are masked on their own, and the weights and scale of task arithmetic
    follow."""
    base, math, language = (one.tensor(NAME).float() for one in three)
    drops = []
    for weights, expert in (([1.0, 0.0], math), ([0.0, 1.0], language)):
        change = merged(three, dare(density=0.25, weights=weights)) - base
        full = 4 * (expert - base)
        kept = change.abs() > full.abs() / 2
        torch.testing.assert_close(change, full * kept, rtol=1e-3, atol=1e-5)
        drops.append(kept)
        share = kept[full != 0].float().mean().item()
        assert abs(share - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    assert not torch.equal(*drops)
    both = merged(three, dare(density=0.25, weights=[0.5, 2.0], scale=0.5))
    expected = base + 0.5 * (0.5 * 4 * (math - base) * drops[0] + 2 * 4 * (language - base) * drops[1])
    torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-5)


def test_density_one_is_task_arithmetic(three):
    plain = TaskArithmetic(experts=["a", "b"], dtype="float32", weights=[0.3, 0.7], scale=0.6)
    same = dare(density=1.0, weights=[0.3, 0.7], scale=0.6)
    for name in three[0].names:
        assert torch.equal(merged(three, same, name), merged(three, plain, name))


def test_the_seed_decides_and_nothing_else(three, tmp_path, monkeypatch):
    base, math, language = three

    def written(folder, threads, seed=3):
        (tmp_path / folder).mkdir()
        merge = open_merge(dare(seed=seed), {"0": math, "1": language}, base)
        return merge.write(tmp_path / folder, threads=threads)

    first = written("one", 1)
    monkeypatch.setattr(floats, "PIECE", 1)  # a row at a time
    assert written("two", 4) == first
    assert written("three", 1, seed=4) != first


def test_the_stream_of_a_row_is_fixed():
    """Raw numbers of Philox, which NumPy keeps between versions."""
    rows = random_bits(0, 1, "x", 5, (2, 3)).copy()
    key = int.from_bytes(hashlib.sha256(b"0 1 x").digest()[:8], "little")
    for row, found in zip((5, 6), rows, strict=True):
        wide = np.random.Philox(key=(key << 64) | row).random_raw(2)
        assert found.tolist() == [int(wide[0]) & 0xFFFFFFFF, int(wide[0]) >> 32, int(wide[1]) & 0xFFFFFFFF]


def test_what_others_ask_of_it(three):
    base, math, language = three
    merge = open_merge(dare(), {"0": math, "1": language}, base)
    assert "density 0.5" in merge.plan_rows()[0]["formula"]
    assert isinstance(merge.config, Merge) and merge.changes is None
