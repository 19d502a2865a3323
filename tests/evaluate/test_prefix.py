"""Shared prefixes: the same answers as without, from fewer tokens."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from made_up import Notes, asked, choice, ended, load_model, needs_real_data, run_of
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.evaluate import prefix
from pipeline.evaluate.model import Answering
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.stage import make
from pipeline.evaluate.tasks import task_specs
from pipeline.hub.lock import Lock


def computed(prompts: list[list[int]], found: list[tuple[int, list[int]]]) -> int:
    assert sorted(place for _, places in found for place in places) == list(range(len(prompts)))
    for shared, places in found:
        assert len({tuple(prompts[place][:shared]) for place in places}) == 1 or not shared
    return sum(
        shared + sum(len(prompts[place]) - shared for place in places) for shared, places in found
    )


def test_what_is_taken_together() -> None:
    shots, other = list(range(100)), list(range(500, 560))
    prompts = (
        [[*shots, 900 + i, 7] for i in range(5)]
        + [[*other, 900 + i] for i in range(3)]
        + [[1, 2, 3]]
    )
    found = prefix.group_prompts(prompts)
    assert sorted((shared, sorted(places)) for shared, places in found) == [
        (0, [8]),
        (60, [5, 6, 7]),
        (100, [0, 1, 2, 3, 4]),
    ]
    # Two questions of one passage do not leave the exemplars that all share.
    pairs = [[*shots, *range(i * 50, i * 50 + 40), 901, k] for i in range(20, 25) for k in (1, 2)]
    ((shared, places),) = prefix.group_prompts(pairs)
    assert shared == 100 and len(places) == 10
    # Single questions share their short beginning; the questions with exemplars keep theirs.
    mixed = [[*shots, 900 + i] for i in range(30)] + [[*shots[:20], 700 + i] for i in range(5)]
    assert sorted(shared for shared, _ in prefix.group_prompts(mixed)) == [20, 100]
    assert prefix.group_prompts([[1, 2], [1, 3]]) == [(0, [0, 1])]  # too short to be worth it
    assert prefix.group_prompts([]) == []
    nested = [list(range(length)) for length in range(20, 2000)]  # as deep as it gets
    assert computed(nested, prefix.group_prompts(nested)) < sum(map(len, nested))


def test_no_choice_needs_more_tokens_than_none() -> None:
    draw = random.Random(0)
    for _ in range(200):
        heads = [[draw.randrange(3) for _ in range(draw.randrange(40))] for _ in range(3)]
        prompts = [
            draw.choice(heads) + [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
            for _ in range(12)
        ]
        assert computed(prompts, prefix.group_prompts(prompts)) <= sum(map(len, prompts))


def test_prompts_of_few_further_tokens_are_grouped_as_tries() -> None:
    """Questions with eight prompts each keep their exemplars; those of a subject share theirs.

    Questions have 40 tokens. A question without exemplars is one trie.
    """
    shots = list(range(100))
    prompts = [
        [*shots, *range(q * 50, q * 50 + 40), 901, end] for q in range(20, 25) for end in range(8)
    ]
    assert prefix.group_prompts([prompt[100:] for prompt in prompts], token_limit=200) == [
        (0, list(range(40)))
    ]
    assert prefix.group_prompts(prompts, token_limit=200) == [(100, list(range(40)))]
    subjects = [
        [subject, *shots, question, end]
        for subject in range(3)
        for question in range(30)
        for end in range(2)
    ]
    assert [shared for shared, _ in prefix.group_prompts(subjects, token_limit=120)] == [101] * 3


# --- the model class ---


def both(tiny: Path, double: bool = True) -> tuple[Answering, HFLM]:
    ours = load_model(tiny, 4)
    if double:
        ours.model.double()
    ours.share_prefix = True
    return ours, HFLM(pretrained=copy.deepcopy(ours.model), tokenizer=ours.tokenizer, batch_size=4)


def requests(
    data_root: Path, folder: Path, task: Any, code: str = "qac", limit: int = 30, **more: Any
) -> list[Any]:
    definitions = task_specs(choice(task, **more), [code], data_root, folder)
    loaded, *_ = load_tasks(definitions[:1], Lock())
    loaded.build_all_requests(
        samples=range(definitions[0].first, min(limit, len(loaded.eval_docs)))
    )
    return loaded.instances


class Counter:
    """Counts the tokens that go through a model."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        self.tokens += (args[0] if args else kwargs["input_ids"]).numel()


@pytest.mark.parametrize("task", ["belebele", "global_mmlu"])
def test_likelihoods_are_the_harness_own_from_fewer_tokens(
    data_root: Path, tmp_path: Path, tiny: Path, task: str
) -> None:
    asks = requests(data_root, tmp_path / "tasks", asked(task, 3))
    ours, stock = both(tiny)
    counts = Counter(ours.model), Counter(stock.model)
    found, theirs = ours.loglikelihood(asks), stock.loglikelihood(asks)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in theirs]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in theirs], abs=1e-6)
    assert counts[0].tokens < counts[1].tokens / 1.5


@needs_real_data
def test_greedy_answers_are_the_same(real_data: Path, tmp_path: Path, tiny: Path) -> None:
    """Real Telugu problems.

    None differs in float64, and in float32 none where the two logits are not within 1e-4.
    """
    asks = requests(
        real_data, tmp_path / "tasks", asked("mgsm", 1), "te", limit=12, max_gen_toks=12
    )
    ours, stock = both(tiny)
    counts = Counter(ours.model), Counter(stock.model)
    reported = ended(ours)
    found = ours.generate_until(asks)
    assert found == stock.generate_until(asks) and len(set(found)) > 6
    assert counts[0].tokens < counts[1].tokens / 1.5
    assert len(reported) == len(asks)
    ours, stock = both(tiny, double=False)
    for ask, one, two in zip(
        asks, ours.generate_until(asks), stock.generate_until(asks), strict=True
    ):
        if one != two:
            same = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
            tokens = torch.tensor([ours.tok_encode(ask.args[0] + one[:same])], device=ours.device)
            top = ours.model(tokens).logits[0, -1].topk(2).values
            assert top[0] - top[1] < 1e-4


def test_settings_that_keep_answers_from_sharing_are_reported(
    data_root: Path, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A penalty is the harness' own loop.

    A sliding window is none, and choices have no settings of generation.
    """
    sizes = json.loads((tiny / "config.json").read_text())
    wanted = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    windows = {"sliding_window": 8, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mistral", **{key: sizes[key] for key in wanted}, **windows)
    )
    for task, penalty, shared in (
        ("mgsm", 1.0, True),
        ("mgsm", 1.3, False),
        ("belebele", 1.3, True),
    ):
        model.generation_config.repetition_penalty = penalty
        model.save_pretrained(tiny)
        folder = tmp_path / f"{task}_{penalty}"
        run = run_of(
            folder, tiny, data_root, asked(task, 2), max_gen_toks=4, limit=2, languages=["en"]
        )
        assert make(run, folder / "work", Notes())["harness"]["share_prefix"] is shared
        assert ("prompts do not share their exemplars" in capsys.readouterr().err) is not shared


class Full:
    """A forward hook that lets no more than `rows` prompts through, as a full GPU would."""

    def __init__(self, model: Any, rows: int) -> None:
        self.rows = rows
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if len(args[0] if args else kwargs["input_ids"]) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")


@pytest.mark.parametrize(
    ("task", "shots"), [("mgsm", 2), ("mgsm", 0), ("belebele", 2), ("belebele", 0)]
)
def test_out_of_memory_halves_the_batch_and_goes_on(
    data_root: Path,
    tmp_path: Path,
    tiny: Path,
    task: str,
    shots: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asks = requests(data_root, tmp_path / "tasks", asked(task, shots), max_gen_toks=4)
    ours, stock = both(tiny)
    ours.engine.batch_size, ours.share_prefix = 8, shots > 0
    Full(ours.model, 2)
    method = "generate_until" if task == "mgsm" else "loglikelihood"
    found, theirs = getattr(ours, method)(asks), getattr(stock, method)(asks)
    assert ours.batch_size == 2 and "continuing with eval.batch_size=2" in capsys.readouterr().err
    assert (
        found == theirs
        if task == "mgsm"
        else found == [pytest.approx(one, abs=1e-6) for one in theirs]
    )
