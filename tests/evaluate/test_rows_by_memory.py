"""Rows computed together that the memory of a GPU decides, on made-up GPUs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up import Notes, asked, run_of
from transformers import LlamaConfig, MixtralConfig

from pipeline.evaluate import stage, torch_backend
from pipeline.evaluate.decode import Ending
from pipeline.evaluate.memory import Prompts, rows_that_fit, scoring_memory
from pipeline.evaluate.shared_cache import KEPT
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.models.shape import LLAMA_8B

GIB = 2**30
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SHARED, REST, ROOM = 960, 100, 512


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return the numbers of rows of a model on a GPU with this much free memory."""

    def rows(
        free: float, config: Any = None, kept: Any = None, batch_size: int | None = None
    ) -> list[int]:
        found: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free) - GIB, 80 * GIB))
        monkeypatch.setattr(
            torch.cuda, "memory_reserved", lambda: 41 * GIB
        )  # of which one is free again
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 40 * GIB)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch_backend, "decode", lambda *given: found.append(given[3]))
        config = config or LlamaConfig(**SIZES)
        model = SimpleNamespace(
            device=torch.device("cuda"), dtype=torch.float32, config=config, **{KEPT: kept}
        )
        prompts = [[*range(SHARED), -row, *range(REST - 1)] for row in range(300)]
        backend = TorchBackend(batch_size, model=model)
        backend.generate(prompts, Ending(set(), [], ROOM, str), True, lambda place, tokens: None)
        return found

    return rows


def test_as_many_rows_as_the_free_memory_holds(gpu: Callable[..., list[int]]) -> None:
    """A row of 640 tokens keeps 168 MB, so 80 GB hold 256 rows beside 32 GB of weights.

    This is 8B in float32, with 262 kB a token.
    """
    assert [gpu(free * 1e9) for free in (100, 52, 20, 5)] == [[512], [256], [64], [8]]
    assert gpu(52e9, batch_size=32) == [32]


def test_what_the_last_prompts_left_is_room_for_the_next(gpu: Callable[..., list[int]]) -> None:
    states = torch.empty(16 * 10**9, dtype=torch.uint8, device="meta")
    layer = SimpleNamespace(is_initialized=True, keys=states, values=states, kept=[])
    unused = SimpleNamespace(is_initialized=False)
    kept = SimpleNamespace(layers=[layer, unused])
    assert gpu(20e9, kept=kept) == gpu(52e9) == [256]
    gpu(20e9)
    config, device = LlamaConfig(**SIZES), torch.device("cuda")
    found = []
    for memory in (kept, None):  # likelihoods do not take its place
        backend = TorchBackend(
            None, model=SimpleNamespace(config=config, device=device, dtype=torch.float32)
        )
        setattr(backend.model, KEPT, memory)
        backend._fit_rows([(0, [0])], [[0] * 1000])
        found.append(backend.batch_size)
    assert found == [32, 32]


def test_a_model_whose_shape_is_not_known_has_32_rows(gpu: Callable[..., list[int]]) -> None:
    assert gpu(500e9, MixtralConfig(**SIZES)) == [32]


def test_on_a_cpu_there_are_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TorchBackend(None).batch_size == 32 and TorchBackend(7).batch_size == 7


def test_more_than_fits_is_not_tried_twice(
    gpu: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran out of memory with 256 rows has 128 at its next task."""
    gpu(75e9)
    tried: list[int] = []

    def decode(*given: Any) -> None:
        tried.append(given[3])
        if given[3] > 128:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")

    monkeypatch.setattr(torch_backend, "decode", decode)
    model = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float32, config=LlamaConfig(**SIZES)
    )
    backend = TorchBackend(None, model=model)
    for _ in range(2):
        backend.generate(
            [[row] * 600 for row in range(300)], Ending(set(), [], 9, str), False, lambda *_: None
        )
    assert tried == [256, 128, 128] and backend.halved


def test_memory_by_hand() -> None:
    """Answers keep keys and values, 65,536 a token, in columns by 128.

    Likelihoods have a mask, and no more keys and values than a layer's. Eight bytes a word of the
    vocabulary are of logits.
    """
    answers = scoring_memory(LLAMA_8B, 4, Prompts(SHARED, REST, ROOM), 8)
    assert answers["weights"] == 4 * 8_030_261_248
    assert answers["cache"] == (SHARED + 8 * 640) * 65_536 * 4
    words = 8 * 8 * 128_256
    token, key = 3 * 14336 + 8 * 4096, 2 * 128 * 40
    assert answers["activations"] == pytest.approx(
        (SHARED * token + 8 * (SHARED + REST) * key) * 4 + words
    )
    letters = scoring_memory(LLAMA_8B, 4, Prompts(SHARED, REST), 8)
    assert letters["cache"] == SHARED * 65_536 * 4
    mask = 5 * 8 * REST * (SHARED + REST)
    assert letters["activations"] == pytest.approx(answers["activations"] + mask)
    whole = scoring_memory(LLAMA_8B, 4, Prompts(0, REST, ROOM), 8)
    assert whole["cache"] == 8 * 640 * 65_536 * 4
    assert whole["activations"] == pytest.approx(
        (8 * REST * token + 8 * 640 * key) * 4 + words
    )  # a step's are copied
    needed = sum(answers.values())
    assert rows_that_fit(LLAMA_8B, 4, Prompts(SHARED, REST, ROOM), needed, 512) == 8
    assert rows_that_fit(LLAMA_8B, 4, Prompts(SHARED, REST, ROOM), needed - 1, 512) == 4


def test_the_number_that_memory_decided_stays_with_the_answers(
    data_root: Path, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below float32, also where they are found again.

    That run's number is not what this GPU would hold.
    """

    def scored(rows: int, dtype: str) -> Any:
        monkeypatch.setattr(
            TorchBackend, "_fit_rows", lambda self, *_: setattr(self, "batch_size", rows)
        )
        run = run_of(
            tmp_path,
            tiny,
            data_root,
            asked("mgsm", 2),
            languages=["en"],
            limit=4,
            max_gen_toks=2,
            batch_size=None,
            dtype=dtype,
        )
        work = tmp_path / f"{dtype}{rows}"
        stage.make(run, work, Notes())
        return json.loads((work / "scores.json").read_text())["harness"]

    first, again = (scored(rows, "bfloat16") for rows in (7, 9))
    assert (first["batch_size"], first["found_again"]) == (7, [])
    assert (again["batch_size"], again["found_again"]) == (7, ["mgsm_en_2shot"])
    first, again = (scored(rows, "float32") for rows in (7, 9))
    assert first["batch_size"] == 7 and again["found_again"] and "batch_size" not in again
