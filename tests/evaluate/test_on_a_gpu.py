"""What only a GPU executes.

Recorded steps and products of two dtypes give the answers of the steps and products that a CPU can
compute.
"""

import random
from typing import Any

import pytest
import torch
from test_decode import SMALL, WINDOW
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from pipeline.evaluate.decode import Ending, decode
from pipeline.evaluate.shared_cache import KEPT
from pipeline.evaluate.steps import Sampling
from pipeline.models.products import SplitLinear, split_products

pytestmark = pytest.mark.gpu
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


def model_like(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **WINDOW)).double().eval()
    return (
        LlamaForCausalLM(LlamaConfig(**SMALL, **(DYNAMIC if kind == "dynamic" else {})))
        .double()
        .eval()
    )


def answers(
    model: Any, prefix: list[int], rests: list[list[int]], sampling: Sampling | None
) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    ending = Ending(
        {3}, ["\x07"], 150, lambda tokens: "".join(chr(65 + token % 26) for token in tokens)
    )
    with torch.no_grad():
        decode(model, prefix, rests, 6, ending, found.__setitem__, sampling)
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3", "dynamic"])
@pytest.mark.parametrize("length", [0, 50])
@pytest.mark.parametrize("drawn", [False, True])
def test_recorded_steps_give_the_answers_of_a_cpu(
    kind: str, length: int, drawn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second task, which uses the first task's graphs, and changed weights are included.

    The second task has a prefix of another length. `dynamic` cannot be recorded, and a message says
    so once.
    """
    draw = random.Random(1)
    rests = [[draw.randrange(4, 256) for _ in range(draw.randint(2, 90))] for _ in range(21)]
    prefixes = [
        [draw.randrange(4, 256) for _ in range(length + task * (length > 0))] for task in range(3)
    ]
    sampling = Sampling(1.0, 0.9, [str(at) for at in range(21)]) if drawn else None
    expected, found = [], []
    for device, given in (("cpu", expected), ("cuda", found)):
        model = model_like(kind).to(device)
        for prefix in (*prefixes, prefixes[0]):
            given.append(answers(model, prefix, rests, sampling))
            with torch.no_grad():
                model.get_output_embeddings().weight.add_(
                    torch.linspace(-0.1, 0.1, 64, device=device)
                )
    assert found == expected
    cache = getattr(model, KEPT)
    assert (
        cache.recordable is (kind != "dynamic") and any(cache.graphs.values()) is cache.recordable
    )
    assert capsys.readouterr().err.count("not recorded") == (kind == "dynamic")


def test_three_bfloat16_products_are_near_float32() -> None:
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(512, 300), torch.randn(2, 7, 512)
    exact = torch.nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double())
    layer, inputs = layer.cuda(), inputs.cuda()
    error = (SplitLinear(layer)(inputs).cpu().double() - exact).abs().max() / exact.abs().max()
    assert error < 3e-5  # TF32 3e-4, bfloat16 3e-3


def test_answers_by_split_weights_are_recorded_too() -> None:
    model = split_products(model_like("llama").float().cuda())
    assert len(answers(model, [5] * 30, [[7, 8], [9], [10, 11, 12]], None)) == 3
