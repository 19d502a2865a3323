"""TIES against numbers worked by hand, and the streaming threshold against sorting."""

from __future__ import annotations

import numpy
import pytest
import torch

from pipeline.knobs import PipelineError
from pipeline.merge.ties import disjoint_mean, elect_sign, kept_count, kth_largest, majority_sign, trim


def test_two_experts_by_hand():
    first = torch.tensor([4.0, -2.0, 1.0, 3.0, -1.0, 0.0, 2.0, -5.0])
    second = torch.tensor([2.0, 6.0, -1.0, -3.0, 0.5, 0.0, -2.0, -1.0])
    # density 0.5 of 8 keeps 4. The 4th largest magnitude of the first is 2, where two entries tie: both stay.
    # Of the second (6 3 2 2 1 1 0.5 0) it is 2, tied as well.
    assert kept_count(0.5, 8) == 4
    thresholds = [kth_largest(lambda v=v: [v], 4) for v in (first, second)]
    assert thresholds == [2.0, 2.0]
    trimmed = torch.stack([trim(v, t) for v, t in zip((first, second), thresholds, strict=True)])
    assert trimmed.tolist() == [
        [4.0, -2.0, 0.0, 3.0, 0.0, 0.0, 2.0, -5.0],
        [2.0, 6.0, 0.0, -3.0, 0.0, 0.0, -2.0, 0.0],
    ]
    # sums: 6, 4, 0, 0, 0, 0, 0, -5: two elect +, one -, so the majority is + and decides entries 3 and 6
    majority = majority_sign([trimmed])
    assert majority == 1.0
    sign = elect_sign(trimmed, majority)
    assert sign.tolist() == [1, 1, 1, 1, 1, 1, 1, -1]
    assert disjoint_mean(trimmed, sign).tolist() == [3.0, 6.0, 0.0, 3.0, 0.0, 0.0, 2.0, -5.0]
    # had the majority been -, those entries would have taken the negative expert
    assert disjoint_mean(trimmed, elect_sign(trimmed, -1.0)).tolist() == [
        3.0,
        6.0,
        0.0,
        -3.0,
        0.0,
        0.0,
        -2.0,
        -5.0,
    ]


def test_the_majority_is_of_the_whole_model():
    plus, minus = torch.tensor([[1.0], [1.0]]), torch.tensor([[-1.0, -9.0], [0.0, 1.0]])
    assert majority_sign([plus]) == 1.0
    assert majority_sign([plus, minus]) == -1.0  # one elects +, two -: entries count, not magnitudes
    assert majority_sign([plus, -plus]) == 1.0  # an even split


def test_three_experts_mean_over_those_that_agree():
    vectors = torch.tensor([[1.0, 1.0], [3.0, -2.0], [-2.0, -4.0]])
    sign = elect_sign(vectors, 1.0)
    assert disjoint_mean(vectors, sign).tolist() == [2.0, -3.0]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0])
def test_threshold_is_exact(ties, scale):
    torch.manual_seed(3)
    vectors = [torch.randn(shape) for shape in ((100, 30), (7,), (50, 2, 5))]
    if ties:  # as the differences of bfloat16 weights: few magnitudes, many zeros
        vectors = [(vector * 4).round() / 4 for vector in vectors]
    vectors = [vector * scale for vector in vectors]
    flat = torch.cat([vector.flatten() for vector in vectors]).abs()
    for k in (1, 2, 350, len(flat) // 2, len(flat) - 1, len(flat)):
        expected = flat.kthvalue(len(flat) - k + 1).values.item()
        assert kth_largest(lambda: iter(vectors), k) == expected
        assert expected == numpy.sort(flat.numpy())[-k]


def test_threshold_of_neighbouring_floats():
    ulp = numpy.spacing(numpy.float32(1))
    vector = torch.tensor([1.0, 1.0 + ulp, 1.0 + 2 * ulp, -(1.0 + 3 * ulp)], dtype=torch.float32)
    assert [kth_largest(lambda: [vector], k) for k in (1, 2, 3, 4)] == [
        1 + 3 * ulp,
        1 + 2 * ulp,
        1 + ulp,
        1.0,
    ]


def test_threshold_refuses_what_has_no_answer():
    with pytest.raises(PipelineError, match="5-th largest of 4"):
        kth_largest(lambda: [torch.ones(4)], 5)
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(PipelineError, match="NaN or infinite"):
            kth_largest(lambda v=value: [torch.tensor([1.0, v])], 2)


def test_kept_count_is_of_the_decimal_as_typed():
    assert kept_count(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996
    assert kept_count(0.2, 8_030_261_248) == 1_606_052_249
    assert kept_count(0.001, 10) == 1
    assert kept_count(1, 10) == 10
    for density in (0, -0.1, 1.5, float("nan")):
        with pytest.raises(PipelineError, match="merge.density"):
            kept_count(density, 10)


def test_density_one_with_agreeing_experts_is_their_mean():
    vectors = torch.rand(3, 4, 5) + 0.1
    mean = disjoint_mean(vectors, elect_sign(vectors, 1.0))
    torch.testing.assert_close(mean, vectors.mean(0))
