"""Decoding in slots: the tokens of plain greedy search, in the steps that refilled slots need."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from made_up import ended, load_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from pipeline.evaluate import decode, steps
from pipeline.evaluate.decode import Ending
from pipeline.evaluate.model import Answering
from pipeline.evaluate.shared_cache import KEPT
from pipeline.evaluate.steps import Sampling
from pipeline.evaluate.torch_backend import TorchBackend

WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 8,
        "query_pre_attn_scalar": 1,
        "tie_word_embeddings": False,
    },
}
SHOTS = "An example that all prompts begin with. "


# --- steps by hand ---


def lookup_table(following: Sequence[int]) -> Any:
    """Return a Llama without layers that answers token i with following[i].

    It has one-hot embeddings and a permuting head.
    """
    size = len(following)
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, num_hidden_layers=0, num_attention_heads=1, head_dim=2
    )
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[torch.tensor(following), torch.arange(size)] = 1
    return model


class Shapes:
    """The shape (rows, tokens) of each forward pass."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        self.seen.append(tuple(kwargs["input_ids"].shape))


def run(
    model: Any,
    prefix: list[int],
    rests: list[list[int]],
    slots: int,
    room: int = 99,
    end: int = 0,
    **how: Any,
) -> tuple[dict[int, list[int]], list[int], list[tuple[int, int]]]:
    """Return the answers, the order in which they ended, and the shapes of forward passes."""
    found: dict[int, list[int]] = {}
    shapes = Shapes(model)
    with torch.no_grad():
        decode.decode(
            model, prefix, rests, slots, Ending({end}, [], room, str), found.__setitem__, **how
        )
    return found, list(found), shapes.seen


COUNT_UP = [*range(1, 20), 0]  # after i comes i + 1, after 19 the end token 0


def test_a_slot_is_refilled_at_once_and_dropped_when_no_prompt_waits() -> None:
    """Two slots, answers of 5, 1, 2 and 1 tokens.

    By hand five steps, where batches of two would take 5 + 2.
    """
    found, order, shapes = run(
        lookup_table(COUNT_UP), [], [[3, 15], [3, 19], [3, 18], [3, 19]], slots=2
    )
    assert found == {0: [16, 17, 18, 19, 0], 1: [0], 2: [19, 0], 3: [0]}
    assert order == [1, 2, 3, 0]
    # Prefill of two prompts without their last tokens, a step; of the third, two steps; of the
    # fourth, a step; and the first answer alone.
    assert shapes == [(2, 1), (2, 1), (1, 1), (2, 1), (2, 1), (1, 1), (2, 1), (1, 1)]


def test_steps_that_are_begun_ahead_change_no_answer_and_no_more_tokens_than_there_is_room_for_are_kept() -> (
    None
):
    """As on a GPU, which begins a step before the tokens of the last one are looked at."""
    prompts = [[3, 15], [3, 19], [3, 18], [2], [3, 19]]
    for room in (1, 2, 4, 99):
        expected, _, _ = run(lookup_table(COUNT_UP), [9, 8], prompts, slots=2, room=room)
        for ahead in (1, 2, 3):
            assert (
                run(lookup_table(COUNT_UP), [9, 8], prompts, slots=2, room=room, ahead=ahead)[0]
                == expected
            )


SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
WINDOW = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.parametrize("length", [0, 50], ids=["no prefix", "a prefix"])
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_shapes_rounded_up_change_no_answer(
    kind: str, drawn: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns as on CUDA, where each shape is recorded.

    Rows that have no prompt compute what nobody reads, in windows too. The second task finds the
    memory of the first one.
    """
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL))
    if kind == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **WINDOW))
    model, draw = model.double().eval(), random.Random(1)
    rests = [[draw.randrange(4, 256) for _ in range(draw.randint(1, 40))] for _ in range(11)]
    prefixes = [
        [draw.randrange(4, 256) for _ in range(length and length - task)] for task in range(2)
    ]
    how = {"sampling": Sampling(1.0, 0.9, list(map(str, range(11))))} if drawn else {}
    plain, rounded = [], []
    cuda, rows_for, columns_for = torch.device("cuda"), steps.rows_for, steps.columns_for
    for found in (plain, rounded):
        for prefix in prefixes:
            found.append(run(model, prefix, rests, slots=5, room=60, end=3, **how)[0])
        monkeypatch.setattr(decode, "rows_for", lambda device, count: rows_for(cuda, count))
        monkeypatch.setattr(decode, "columns_for", lambda device, count: columns_for(cuda, count))
        monkeypatch.setattr(steps, "columns_for", decode.columns_for)
        how |= {"ahead": 1}
    assert rounded == plain
    assert not torch.isnan(getattr(model, KEPT).layers[0].keys).any()


def test_room_ends_an_answer_and_the_shared_prefix_is_computed_once() -> None:
    found, _, shapes = run(lookup_table(COUNT_UP), [1, 2, 3], [[5, 4], [7]], slots=8, room=2)
    assert found == {0: [5, 6], 1: [8, 9]}
    assert shapes == [
        (1, 3),
        (2, 1),
        (2, 1),
        (2, 1),
    ]  # prefix, the longer rest without its last token, two steps


# --- stop strings ---


def byte_tokenizer(fallback: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte, and two words.

    It is byte-level as in Llama 3, or falls back to bytes as in Llama 2.
    """
    if fallback:
        words = ["<pad>", "</s>", "▁Q", "▁a", *[f"<0x{byte:02X}>" for byte in range(256)]]
        tokenizer = Tokenizer(
            models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[])
        )
        strip = decoders.Strip(" ", 1, 0)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
        )
    else:
        words = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokenizer = Tokenizer(
            models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[])
        )
        tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("fallback", [False, True], ids=["byte-level", "byte fallback"])
def test_a_stop_string_is_found_with_the_token_that_completes_it(fallback: bool) -> None:
    """Random bytes of Telugu, Latin and broken characters.

    The answer is over as soon as all of its tokens, decoded together, hold a stop string, also one
    in the middle of bytes of which some are missing.
    """
    tokenizer, draw = byte_tokenizer(fallback), random.Random(0)
    alphabet = [
        *(bytes([byte]) for byte in "ప్ర\n".encode()),
        "ప".encode(),
        "్ర".encode(),
        b"\n\n",
        b"Q",
        b" Q",
    ]
    tokens_of = {bytes([byte]): token for byte, token in _byte_tokens(tokenizer, fallback).items()}
    ended = 0
    for stop in (["ప్ర"], ["\n\n", "ర\n"], [" Q", "్"]):
        ending = Ending({1}, stop, 60, tokenizer.decode)
        for _ in range(150):
            stream = b"".join(draw.choice(alphabet) for _ in range(30))
            tokens = [tokens_of[bytes([byte])] for byte in stream]
            row = decode._Row(0, [5])
            for count in range(1, len(tokens) + 1):
                over = any(string in tokenizer.decode(tokens[:count]) for string in stop)
                row.tokens.append(tokens[count - 1])
                assert row.is_over(ending) is (over or count == 60)
                if over:
                    ended += 1
                    break
                if count == 60:
                    break
    assert ended > 30


def _byte_tokens(tokenizer: PreTrainedTokenizerFast, fallback: bool) -> dict[int, int]:
    if fallback:
        return {byte: tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)}
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {
        byte: tokenizer.convert_tokens_to_ids(char) for byte, char in bytes_to_unicode().items()
    }


# --- against the harness ---


def model_like(kind: str, tiny: Path, batch_size: int = 3) -> Answering:
    """Return a random float64 model of this kind with the tokenizer of `tiny`."""
    ours = load_model(tiny, batch_size)
    sizes: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    sizes |= WINDOWS.get(kind, {})
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = (
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **ids))
            .double()
            .eval()
        )
    with torch.no_grad():  # letters are likelier than the rest, so that answers are text
        for letter in map(ord, "abcdefghijklmnopqrstuvwxyz"):
            model.get_output_embeddings().weight[ours.tok_encode(chr(letter))[0]] *= 4
    model.generation_config.eos_token_id = 2
    return Answering(
        TorchBackend(batch_size, model=model), pretrained=model, tokenizer=ours.tokenizer
    )


def greedy(lm: Answering, prompt: str, room: int) -> list[int]:
    """Greedy search without a cache, to the end token or `room` tokens."""
    tokens = lm.tok_encode(prompt)
    start = len(tokens)
    with torch.no_grad():
        while len(tokens) < start + room and tokens[-1] != 2:
            tokens.append(int(lm.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[start:]


def asking(prompts: list[str], until: list[str], room: int) -> list[Instance]:
    settings = {"until": until, "do_sample": False, "max_gen_toks": room}
    return [
        Instance("generate_until", {}, (prompt, settings), index, ("task", index, 1))
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "gpt_neox", "diffllama", "mistral", "gemma3_text"]
)
def test_answers_are_the_harness_own(tiny: Path, kind: str, shared: bool) -> None:
    """Eleven prompts of unequal length in three slots.

    Stop strings are cut from the plain answers: the first byte of one (an answer that is over with
    its first token), two bytes within one, and the last two of one.

    HFLM is given one prompt at a time: in a batch its answers run on after a stop string, and are
    cut at another place where two stop strings overlap.
    """
    room = 10
    lm = model_like(kind, tiny)
    lm.share_prefix = shared
    prompts = [
        SHOTS * shared + f"Question {'x' * (7 * index % 11)} {index}?" for index in range(11)
    ]
    plain = [greedy(lm, prompt, room) for prompt in prompts]
    texts = [lm.tok_decode(tokens) for tokens in plain]
    assert len(set(texts)) > 4
    for until in [], [texts[0][:1]], [texts[1][3:5], texts[2][4:6]], [texts[3][-2:]]:
        assert "\ufffd" not in "".join(until)
        asks = asking(prompts, until, room)
        stock = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=1)
        reported = ended(lm)
        answers = lm.generate_until(asks)
        assert answers == stock.generate_until(asks, disable_tqdm=True)
        cut_off = [
            2 not in tokens and not any(stop in lm.tok_decode(tokens) for stop in until)
            for tokens in plain
        ]
        assert [reported[prompt] for prompt in prompts] == list(zip(answers, cut_off, strict=True))


def test_an_overflow_stays_in_its_row(tiny: Path) -> None:
    """A prompt that gives infinities, as in float16, changes no other prompt.

    This includes the next prompt in its slot.
    """
    lm = model_like("llama", tiny, batch_size=2)
    prompts = [
        f"{'?' * index} what {index}" for index in (0, 1, 2, 3, 4, 30)
    ]  # the last one begins beside the Zs
    expected = lm.generate_until(asking(prompts, [], 6))
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[lm.tok_encode("Z")[0]] = float("inf")
    mixed = [*prompts[:3], "Z" * 20, *prompts[3:], "Z"]
    answers = lm.generate_until(asking(mixed, [], 6))
    assert [*answers[:3], *answers[4:7]] == expected


class FullOnce:
    """Runs out of memory at the first forward pass after two answers of `lm` have ended."""

    def __init__(self, lm: Answering) -> None:
        self.ended, self.ran_out = ended(lm), False
        lm.model.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        if len(self.ended) >= 2 and not self.ran_out:
            self.ran_out = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")


def test_answers_that_ended_before_memory_ran_out_are_kept(tiny: Path) -> None:
    """The answers of the slots are computed again, with half as many.

    None that ended is, and none is counted twice.
    """
    lm = model_like("llama", tiny, batch_size=4)
    lm.share_prefix = True
    prompts = [f"{SHOTS} question {index}?" for index in range(9)]
    asks = asking(prompts, ["e"], 12)
    expected = lm.generate_until(asks)
    full = FullOnce(lm)
    assert lm.generate_until(asks) == expected and full.ran_out
    assert lm.batch_size == 2 and len(full.ended) == 9


def test_what_is_not_plain_greedy_search_is_left_to_the_harness(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A penalty in generation_config.json, beams in the request.

    max_new_tokens, as Qwen 2.5 has it, is no reason.
    """
    lm = model_like("llama", tiny)
    assert lm.engine.can_generate()
    lm.model.generation_config.update(
        max_new_tokens=2048, temperature=0.6, top_p=0.9, repetition_penalty=1.0
    )
    assert lm.engine.can_generate()
    lm.model.generation_config.max_new_tokens = None
    penalized = load_model(tiny, 2)
    penalized.model.generation_config.repetition_penalty = 1.3
    monkeypatch.setattr(
        "pipeline.evaluate.torch_backend.decode", lambda *_: pytest.fail("decoded in slots")
    )
    (ask,) = asking(["What?"], [], 3)
    assert len(penalized.generate_until([ask])) == 1
    ask.args[1]["num_beams"] = 2
    assert len(lm.generate_until([ask])) == 1


def test_any_end_token_of_the_model_ends_an_answer(tiny: Path) -> None:
    """A model may have several, as Llama 3 does.

    An answer of all its tokens that ends with one is not cut off.
    """
    lm = model_like("llama", tiny)
    first = greedy(lm, "What?", 3)
    lm.model.generation_config.eos_token_id = [2, first[2]]
    asks = asking(["What?"], [], 3)
    reported = ended(lm)
    (answer,) = lm.generate_until(asks)
    assert answer == lm.tok_decode(first) and reported == {"What?": (answer, False)}
