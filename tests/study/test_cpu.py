"""Estimates for a CPU against CPU seconds of one thread of an EPYC 9004, November 2026.

Models are SmolLM2-135M-Instruct, and a Gemma 3 of 270M with random weights, in fp32. Runs are MGSM
8-shot in English (32 and 8 questions, answers of 512 tokens), 5-shot multiple choice (59
questions), and trainings on GSM8K in rows padded to 232 tokens, without imports.
"""

import random
import statistics
from dataclasses import replace

import pytest

from pipeline.config.training import Sft
from pipeline.estimate import cpu, flops
from pipeline.estimate.flops import QuestionSet, scoring_seconds, training_seconds
from pipeline.estimate.training_rows import assumed_lengths
from pipeline.models.shape import Shape, shape_of
from pipeline.stages.lengths import padded_length
from pipeline.train.memory import full_model

SMOL = Shape(30, 576, 1536, 9, 3, 64, 49152, tied=True)
GEMMA = Shape(18, 640, 2048, 4, 1, 256, 262144, tied=True, norms=4, qk_norm=True, window=512)


@pytest.mark.parametrize(
    ("shape", "kind", "measured"),
    [
        (SMOL, QuestionSet(32, 8 * 96, 62, 55), 297.4),
        (SMOL, QuestionSet(59, 5 * 150, 150), 69.2),
        (GEMMA, QuestionSet(8, 8 * 96, 62, 55), 188.5),
    ],
)
def test_scores_take_as_long_as_was_measured(
    shape: Shape, kind: QuestionSet, measured: float
) -> None:
    found = sum(seconds_of(shape, kind, 32))
    assert measured / 2 < found < 2 * measured


@pytest.mark.parametrize(("shape", "steps", "measured"), [(SMOL, 4, 70.4), (GEMMA, 2, 79.9)])
def test_trainings_take_as_long_as_was_measured(shape: Shape, steps: int, measured: float) -> None:
    found = training_seconds(
        shape, full_model(shape), 4 * steps, 232, Sft(name="x", batch_size=4), cpu.cpu(shape, 1)
    )
    assert measured / 2 < found < 2 * measured


def seconds_of(
    shape: Shape, kind: QuestionSet, batch_size: int, share_prefix: bool = True
) -> tuple[float, float]:
    return scoring_seconds(
        shape, [kind], cpu.cpu(shape, 1), "float32", batch_size, share_prefix=share_prefix
    )


def test_prefill_and_decoding_by_hand() -> None:
    """One layer of width 2: 24 weights in the layer's matrices, 16 in the head."""
    shape = Shape(layers=1, width=2, inner=2, heads=1, kv_heads=1, head_width=2, vocabulary=8)
    assert shape.attention + shape.mlp == 28 and shape.embedding == 16
    rate = cpu.PEAK * 2 / (2 + cpu.HALF)
    asked = QuestionSet(3, 10, 5, 1, room=4)
    with pytest.MonkeyPatch.context() as patch:  # so that prefilling waits for its products alone
        patch.setattr(flops, "LAUNCH", 1e-12)
        patch.setattr(cpu, "BANDWIDTH", 1e15)
        prefill, decode = seconds_of(shape, asked, 2)
        # the exemplars once, each question, its last token's head
        operations = 10 * (56 + 8 * 10) + 15 * (56 + 8 * 15) + 3 * 32
        assert prefill == pytest.approx(operations / rate)
        each_step = 1e-12 + 4 * (shape.layer + 16) / cpu.BANDWIDTH
        each_token = (56 + 32) / rate + 4 * 4 * 2 * (5 + 2) / cpu.BANDWIDTH
        each_step += 4 * 4 * 10 / cpu.BANDWIDTH  # the exemplars once
        assert decode == pytest.approx(
            6 * each_step + 3 * 4 * each_token
        )  # two rows, filled again at once
        alone, _ = seconds_of(shape, asked, 2, share_prefix=False)
        assert alone == pytest.approx((operations + 2 * 10 * (56 + 8 * 10)) / rate)
        assert seconds_of(shape, QuestionSet(3, 10, 5), 2, share_prefix=False) == (alone, 0)
        windows = replace(shape, window=4)
        assert seconds_of(windows, QuestionSet(3, 10, 5), 2)[0] == prefill
        assert seconds_of(windows, asked, 2)[0] == alone


@pytest.mark.parametrize(("rows", "micro"), [(32, 4), (32, 1), (4, 4), (8, 2), (32, 32)])
def test_a_step_is_padded_as_by_drawing_it(rows: int, micro: int) -> None:
    """Two thousand steps of rows of lognormal lengths, each micro-batch padded to its longest.

    Rows are sorted within a step.
    """
    numbers = random.Random(0)
    drawn = [sorted(numbers.lognormvariate(5, 0.5) for _ in range(rows)) for _ in range(2000)]
    computed = statistics.fmean(micro * sum(step[micro - 1 :: micro]) / rows for step in drawn)
    sample = sorted(length for step in drawn for length in step)[::20]
    assert padded_length(sample, rows, micro, 1e9) == pytest.approx(computed, rel=0.06)
    mean = statistics.fmean(sample)
    assert padded_length(assumed_lengths(mean), rows, micro, 1e9) == pytest.approx(
        computed, rel=0.06
    )
    assert padded_length(sample, rows, micro, 10) == pytest.approx(10)


def test_shapes_of_the_two() -> None:
    """By the sums of their tensors: SmolLM2's 272 and Gemma 3 270M's 236."""
    assert SMOL.parameters == 134_515_008 and GEMMA.parameters == 268_098_176
    wrapped = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 18,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    }
    assert shape_of(wrapped) == GEMMA
