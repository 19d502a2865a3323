"""Token tries: log-likelihoods against a model that gets one request at a time.

Each distinct token is computed once.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.evaluate import prefix
from pipeline.evaluate.model import Answering
from pipeline.evaluate.prefix import build_tries
from pipeline.evaluate.torch_backend import TorchBackend, visible_tokens

Request = tuple[
    tuple[str, str], list[int], list[int]
]  # as HFLM has them: texts (not read here), context, continuation
Answer = tuple[float, bool]
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
MIXED = {
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
SOFTCAPPED = MIXED | {
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 8,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "sdpa", {}),
    "llama, eager": ("llama", "eager", {}),
    "qwen2": ("qwen2", "sdpa", {}),
    "cohere": ("cohere", "sdpa", {}),
    "mistral": ("mistral", "sdpa", {"sliding_window": 8}),
    "gemma2": ("gemma2", "eager", SOFTCAPPED),  # transformers has no sdpa for its softcap
    "gemma3": ("gemma3_text", "sdpa", MIXED | {"query_pre_attn_scalar": 8}),
    "gemma3, eager": ("gemma3_text", "eager", MIXED | {"query_pre_attn_scalar": 8}),
}


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotations and eager softmax, which are float32 in a float64 model too, in float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(autouse=True)
def prefixes_of_few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "SMALL", 100)


def answering(folder: Path, name: str, batch_size: int = 40) -> Answering:
    kind, attention, knobs = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SIZES, **knobs)
        model = (
            AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
        )
    backend = TorchBackend(batch_size, model=model)
    lm = Answering(backend, pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    lm.share_prefix = True
    return lm


def questions(exemplars: int = 40) -> list[Request]:
    """Return five questions of one to four steps with four choices each.

    Choices begin alike or not, and gold steps stay in the prompt.
    """
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1, 97) for _ in range(count)]

    shots, requests = tokens(exemplars), []
    for steps, length in ((3, 12), (1, 30), (4, 7), (2, 19), (1, 6)):
        context = shots + tokens(length)
        for _ in range(steps):
            first, gold = tokens(1), tokens(4)
            choices = first + gold, first + gold[:2] + tokens(3), first + tokens(1), tokens(6)
            requests += [(("", ""), context, choice) for choice in choices]
            context = context + first + gold
    draw.shuffle(requests)
    return requests


def one_at_a_time(model: Any, requests: list[Request]) -> list[Answer]:
    answers = []
    with torch.no_grad():
        for _, context, continuation in requests:
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
            chosen = torch.log_softmax(logits, -1)[range(len(continuation)), continuation]
            answers.append((float(chosen.sum()), logits.argmax(-1).tolist() == continuation))
    return answers


def distinct(requests: list[Request]) -> int:
    """Tokens to compute at the least: the distinct beginnings of all prompts."""
    prompts = [context + continuation[:-1] for _, context, continuation in requests]
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


def largest_difference(found: list[Answer], right: list[Answer]) -> float:
    return max(abs(one[0] - two[0]) for one, two in zip(found, right, strict=True))


class Passes:
    """The shape of the token ids of each forward pass; no pass may have more than `most` tokens."""

    def __init__(self, model: Any, most: int = 10**6) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.most = most
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        rows, tokens = (args[0] if args else kwargs["input_ids"]).shape
        if rows * tokens > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")
        self.shapes.append((rows, tokens))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("float64")
def test_tries_are_one_request_at_a_time(tiny: Path, name: str) -> None:
    """With a shared prefix longer than the window, and without one."""
    lm = answering(tiny, name)
    for exemplars in (40, 0):
        requests = questions(exemplars)
        right = one_at_a_time(lm.model, requests)
        found = lm._loglikelihood_tokens(requests)
        assert largest_difference(found, right) < 1e-10
        assert [greedy for _, greedy in found] == [greedy for _, greedy in right]
    greedy = [
        (("", ""), context, best_after(lm.model, context)) for _, context, _ in questions()[:3]
    ]
    assert [is_greedy for _, is_greedy in lm._loglikelihood_tokens([*requests, *greedy])[-3:]] == [
        True
    ] * 3


def best_after(model: Any, context: list[int]) -> list[int]:
    """Return the three likeliest tokens, each after the tokens before it."""
    tokens = list(context)
    with torch.no_grad():
        for _ in range(3):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(context) :]


def test_each_distinct_token_is_computed_once(tiny: Path) -> None:
    lm, requests = answering(tiny, "llama", batch_size=1), questions()
    passes = Passes(lm.model)
    lm._loglikelihood_tokens(requests)
    assert passes.shapes[0] == (1, 40) and len(passes.shapes) == 6  # the exemplars, five questions
    assert sum(rows * tokens for rows, tokens in passes.shapes) == distinct(requests)


def test_single_tokens_share_the_prefix_alone(tiny: Path) -> None:
    """Each prompt of letters is a row of a batch of eval.batch_size, so rounding stays the same."""
    requests = [(one, context, choice[:1]) for one, context, choice in questions()]
    lm = answering(tiny, "llama", batch_size=4)
    passes = Passes(lm.model)
    found = lm._loglikelihood_tokens(requests)
    prompts = len({tuple(context) for _, context, _ in requests})
    assert [rows for rows, _ in passes.shapes[1:]] == [4] * (prompts // 4) + [prompts % 4] * (
        prompts % 4 > 0
    )
    assert (
        largest_difference(found, HFLM._loglikelihood_tokens(lm, requests, disable_tqdm=True))
        < 1e-6
    )


def test_a_trie_by_hand() -> None:
    """Exemplars 1 2; a question 3 4 with the prompts 3 4, 3 4 5 and 3 4 6; another question."""
    prompts = [[1, 2, 3, 4, 6], [1, 2, 9], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
    question, other = build_tries(prompts, range(4), 2, 10)
    assert (question.tokens, question.parents) == ([3, 4, 5, 6], [-1, 0, 1, 1])
    assert question.paths == {2: [0, 1], 3: [0, 1, 2], 0: [0, 1, 3]} and other.paths == {1: [0]}
    visible, places = visible_tokens([question, other])
    assert visible[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert visible[1].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert places.tolist() == [[0, 1, 2, 2], [0, 0, 0, 0]]
    assert [len(trie.tokens) for trie in build_tries(prompts, range(4), 2, 3)] == [
        3,
        3,
        1,
    ]  # at most 3 tokens
    assert [trie.paths for trie in build_tries(prompts, [2, 3], 2, 0)] == [
        {2: [0, 1]},
        {3: [0, 1, 2]},
    ]


@pytest.mark.parametrize("kind", ["mpt", "bloom", "falcon", "gpt_neo", "xglm"])
def test_attention_of_a_models_own_is_scored_as_it_computes(kind: str) -> None:
    """ALiBi and local windows, which masks by positions do not say.

    Against the model itself, a request at a time.
    """
    local = {
        "attention_types": [[["global", "local"], 2]],
        "num_layers": 4,
        "window_size": 8,
        "num_heads": 4,
    }
    known = {**small_decoders.DECODERS, "gpt_neo": local}[kind] | (
        {"alibi": True} if kind == "falcon" else {}
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **small_decoders.SIZES, **small_decoders.TOKENS, **known)
    model = AutoModelForCausalLM.from_config(config)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3 if parameter.ndim > 1 else 1)
    draw = random.Random(0)
    prefix, *texts = (
        [draw.randrange(3, 64) for _ in range(length)] for length in (20, *range(1, 8))
    )
    requests = [(prefix + text, text[::-1]) for text in texts]
    backend, found = TorchBackend(4, model=model), dict[int, float]()
    backend.loglikelihood(
        requests, backend.can_share(), lambda place, value, _: found.__setitem__(place, value)
    )
    for place, (context, after) in enumerate(requests):
        logits = model(input_ids=torch.tensor([context + after])).logits[0, len(context) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None]).sum()
        assert found[place] == pytest.approx(float(expected), abs=1e-3)


def test_out_of_memory_scores_the_rest_in_smaller_batches(tiny: Path) -> None:
    lm, requests = answering(tiny, "llama"), questions()
    right = one_at_a_time(lm.model, requests)
    passes = Passes(lm.model, most=100)  # of the batches, which are sorted by length, the last fits
    heard: list[Any] = []
    lm.ended = lambda kind, arguments, answer: heard.append(answer)
    assert largest_difference(lm._loglikelihood_tokens(requests), right) < 1e-6
    assert lm.batch_size < 40 and passes.shapes and len(heard) == len(requests)
