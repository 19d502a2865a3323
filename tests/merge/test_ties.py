"""TIES against numbers worked by hand, and the streaming threshold against sorting."""

import json

import numpy as np
import pytest
import torch
from as_torch import as_torch
from safetensors.torch import load_file, save_file

from pipeline.errors import PipelineError
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge
from pipeline.merge.ties import elected_mean, kept_count, kth_largest
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.manifest import read_manifest


def f32(*rows):
    return [np.array(row, dtype=np.float32) for row in rows]


def largest(k, *vectors):
    """Return the k-th largest magnitude of one expert's vectors together."""
    (found,) = kth_largest(
        lambda name: iter([[vectors[int(name)]]]), [str(place) for place in range(len(vectors))], k
    )
    return found


def test_two_experts_by_hand():
    first, second = f32([4, -2, 1, 3, -1, 0, 2, -5], [2, 6, -1, -3, 0.5, 0, -2, -1])
    # density 0.5 of 8 keeps 4. The 4th largest magnitude of the first is 2, where two entries tie:
    # both stay. Of the second (6 3 2 2 1 1 0.5 0) it is 2, tied as well.
    assert kept_count(0.5, 8) == 4
    assert kth_largest(lambda name: iter([[first, second]]), ["x"], 4) == [2.0, 2.0]
    trimmed = [vector * (abs(vector) >= 2) for vector in (first, second)]
    # sums: 6, 4, 0, 0, 0, 0, 0, -5: the sign of the model decides entries 3 and 6
    assert elected_mean(trimmed, 1.0).tolist() == [3.0, 6.0, 0.0, 3.0, 0.0, 0.0, 2.0, -5.0]
    assert elected_mean(trimmed, -1.0).tolist() == [3.0, 6.0, 0.0, -3.0, 0.0, 0.0, -2.0, -5.0]


def test_three_experts_mean_over_those_that_agree():
    assert elected_mean(f32([1, 1], [3, -2], [-2, -4])).tolist() == [2.0, -3.0]


def test_weights_by_hand():
    # both agree on the first entry, the first alone has the sign of the sum on the second
    vectors, weights = f32([2, 6], [4, -2]), [0.5, 0.25]
    assert elected_mean(vectors, 1.0, weights).tolist() == [1.0, 3.0]  # (1 + 1) / 2, 3 / 1


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0])
def test_threshold_is_exact(ties, scale):
    random = np.random.default_rng(3)
    vectors = [
        random.normal(size=shape).astype(np.float32) for shape in ((100, 30), (7,), (50, 2, 5))
    ]
    if ties:  # as the differences of bfloat16 weights: few magnitudes, many zeros
        vectors = [(vector * 4).round() / 4 for vector in vectors]
    vectors = [(vector * scale).astype(np.float32) for vector in vectors]
    flat = abs(np.concatenate([vector.ravel() for vector in vectors]))
    for k in (1, 2, 350, len(flat) // 2, len(flat) - 1, len(flat)):
        assert largest(k, *vectors) == np.partition(flat, len(flat) - k)[len(flat) - k]


def test_threshold_of_neighbouring_floats():
    ulp = np.spacing(np.float32(1))
    vector = np.array([1.0, 1.0 + ulp, -1.0 - 2 * ulp, 1.0 + 3 * ulp], dtype=np.float32)
    assert [largest(k, vector) for k in (1, 2, 3, 4)] == [1 + 3 * ulp, 1 + 2 * ulp, 1 + ulp, 1.0]


def test_threshold_refuses_what_is_not_finite():
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(PipelineError, match="NaN or infinite"):
            largest(2, *f32([1.0, value]))


def test_kept_count_is_of_the_decimal_as_typed():
    assert kept_count(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996
    assert kept_count(0.2, 8_030_261_248) == 1_606_052_249
    assert kept_count(0.001, 10) == 1
    assert kept_count(1, 10) == 10


def test_the_kept_density_is_measured_printed_and_recorded(models, make_run, capsys):
    """Changes of bfloat16 weights are often equal, so more entries are kept than asked for."""
    base, *experts = models["llama"]
    words = [
        f"merge.experts=[{experts[0]},{experts[1]}]",
        f"merge.base={base}",
        "merge.density=0.3",
    ]
    facts = read_manifest(make_run("stage=merge", "merge=ties", *words)).facts
    assert f"kept density: {facts['kept_density']:.4g}" in capsys.readouterr().err
    start, expected = load_file(base / "model.safetensors"), []
    for expert in experts:
        weights = load_file(expert / "model.safetensors")
        size = torch.cat(
            [
                (weights[name].float() - tensor.float()).abs().flatten()
                for name, tensor in start.items()
            ]
        )
        threshold = size.sort(descending=True).values[int(0.3 * size.numel()) - 1]
        expected.append(int(((size >= threshold) & (size > 0)).sum()) / size.numel())
    found = [facts["kept_density"], facts["kept_density_0"], facts["kept_density_1"]]
    assert found == pytest.approx([sum(expected) / 2, *expected])
    assert expected[0] > 0.3


def plain_ties(base, experts, density, scale):
    """Compute TIES in plain NumPy on whole tensors: {name: float32}."""
    vectors = {name: [expert[name] - base[name] for expert in experts] for name in base}
    flat = [
        np.sort(np.concatenate([abs(vectors[name][i]).ravel() for name in base]))
        for i in range(len(experts))
    ]
    limits = [sizes[-kept_count(density, sizes.size)] for sizes in flat]
    for name in base:
        vectors[name] = [
            vector * (abs(vector) >= limit)
            for vector, limit in zip(vectors[name], limits, strict=True)
        ]
    sums = {name: sum(of[1:], of[0]) for name, of in vectors.items()}
    majority = (
        1
        if sum(int((total > 0).sum()) - int((total < 0).sum()) for total in sums.values()) >= 0
        else -1
    )
    merged = {}
    for name, total in sums.items():
        positive = total >= 0 if majority > 0 else total > 0
        agree = [np.where(positive, vector > 0, vector < 0) for vector in vectors[name]]
        parts = [vector * mask for vector, mask in zip(vectors[name], agree, strict=True)]
        mean = sum(parts[1:], parts[0]) / np.maximum(np.sum(agree, axis=0), 1).astype(np.float32)
        merged[name] = base[name] + mean * np.float32(scale)
    return merged


def awkward_checkpoint(folder, dtype, seed, base=None, many=False, zeros=True):
    """Tensors with 0 and -0, changes that are alike, opposite, equal in magnitude, and 0 or -0."""
    random, tensors = np.random.default_rng(seed), {}
    for name, shape in {"a": (70, 300), "b": (3,), "c": (40, 20, 3), "d": (900, 320)}.items():
        start = (
            random.normal(size=shape).astype(np.float32) * 0.02
            if base is None
            else base[name].float().numpy()
        )
        steps = random.normal(size=shape) * 0.002
        if many:
            steps = (steps * 1024).round() / 1024
        values = start + (0 if base is None else steps.astype(np.float32))
        if zeros:
            values = np.where(
                random.random(shape) < 0.03, random.choice([0.0, -0.0], shape), values
            )
        if name == "c":  # the same change of every expert, in part of the opposite sign
            values = start + (0 if base is None else np.float32(2**-9 if seed % 2 else -(2**-9)))
        tensors[name] = torch.from_numpy(values.astype(np.float32)).to(dtype)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_same_bits_as_plain_numpy(tmp_path, dtype, count, zeros):
    """Random tensors have ties, zeros and negative zeros, and share any part of their entries."""
    base = awkward_checkpoint(tmp_path / "base", dtype, 0, zeros=zeros)
    experts = [
        awkward_checkpoint(tmp_path / str(i), dtype, i, base, i == 2, zeros and i < 3)
        for i in range(1, count + 1)
    ]
    sources = {str(i): Checkpoint.open(tmp_path / str(i + 1)) for i in range(count)}
    wide = [
        {name: tensor.float().numpy() for name, tensor in one.items()} for one in (base, *experts)
    ]
    for density, scale in ((0.05, 1.0), (0.2, 0.7), (0.6, 1.0), (1, 1)):
        expected = plain_ties(wide[0], wide[1:], density, scale)
        config = Ties(experts=list(sources), density=density, scale=scale)
        merge = open_merge(config, sources, Checkpoint.open(tmp_path / "base"))
        merge.ready()
        for name, values in expected.items():
            found, stored = as_torch(merge, name), torch.from_numpy(values).to(dtype)
            assert torch.equal(found.view(torch.uint8), stored.view(torch.uint8)), (name, density)
    signs = torch.cat([one.flatten() for one in base.values()])
    assert bool((signs.signbit() & (signs == 0)).any()) == zeros
