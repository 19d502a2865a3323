"""Made-up benchmark rows, a scripted model, and the mark of tests on real data."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.model import LM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.config.evaluation import Eval, EvalTask
from pipeline.config.stages import EvalStage
from pipeline.evaluate.model import Answering, open_model
from pipeline.evaluate.store import Store
from pipeline.runs.run import External, Run

REAL_DATA = os.environ.get("PIPELINE_TEST_DATA")


def byte_tokenizer() -> tuple[list[str], PreTrainedTokenizerFast]:
    """Its words by their ids, and a tokenizer with a token a byte."""
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return words, PreTrainedTokenizerFast(tokenizer_object=made, **special)


def likelihood(model: torch.nn.Module, tokenizer: Any, prompt: str, answer: str) -> float:
    """Of an answer after a prompt, by transformers alone."""
    before, whole = (
        tokenizer(text, return_tensors="pt").input_ids for text in (prompt, prompt + answer)
    )
    with torch.no_grad():
        logits = torch.log_softmax(model(whole).logits[0].double(), -1)
    return sum(float(logits[at - 1, whole[0, at]]) for at in range(before.shape[1], whole.shape[1]))


class Scripted(LM):
    """A model that answers from a script and keeps the prompts in their order.

    `answer` gives answers, `weigh` gives likelihoods. It reports its answers as `Answering` does,
    and takes prompts of any length.
    """

    batch_size, max_length, max_gen_toks, unshared = 1, 2**30, 0, False
    engine = SimpleNamespace(halved=False, has_queue=False)

    def __init__(
        self,
        answer: Callable[[str], str] = lambda prompt: "",
        weigh: Callable[[str, str], float] | None = None,
    ):
        super().__init__()
        self.answer, self.weigh = answer, weigh or (lambda prompt, continuation: 0.0)
        self.prompts: list[str] = []
        self.ended: Callable[..., Any] = lambda kind, arguments, answer: None

    def tok_encode(self, text: str) -> list[str]:
        return text.split()

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        self.prompts += [request.args[0] for request in requests]
        answers = []
        for request in requests:
            text = self.answer(request.args[0])
            for stop in request.args[1]["until"]:
                text = text.split(stop)[0]
            self.ended("generate_until", request.args, (text, None))
            answers.append(text)
        return answers

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self.prompts += [request.args[0] for request in requests]
        weights = [(self.weigh(*request.args), False) for request in requests]
        for request, weight in zip(requests, weights, strict=True):
            self.ended("loglikelihood", request.args, weight)
        return weights

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def load_model(*opened: Any) -> Answering:
    """As `open_model`, with its weights."""
    lm = open_model(*opened)
    lm.load()
    return lm


def none_stored(folder: Path) -> Store:
    """Return an empty store of answers."""
    return Store(folder / "answers", {"root": "made up"}, fresh=True)


def ended(lm: Any) -> dict[str, Any]:
    """Return the answers that a model reports from now on, by their prompts."""
    found: dict[str, Any] = {}
    lm.ended = lambda kind, arguments, answer: found.update({arguments[0]: answer})
    return found


def asked(task: str, num_fewshot: int, where_possible: bool = False) -> EvalTask:
    return EvalTask(task, num_fewshot, where_possible)


def choice(*tasks: EvalTask, **knobs: Any) -> Eval:
    return Eval(name="made up", tasks=list(tasks), **({"batch_size": 4} | knobs))


def run_of(
    folder: Path, checkpoint: Path, data_root: Path | None, *tasks: EvalTask, **knobs: Any
) -> Run:
    """Return an eval run as the stage gets it. `languages` and `redo` are the stage's own knobs."""
    own = {name: knobs.pop(name) for name in ("languages", "redo") if name in knobs}
    config = EvalStage(
        stage="eval",
        runs_dir=str(folder / "runs"),
        eval=choice(*tasks, **knobs),
        data_root=str(data_root) if data_root else None,
    )
    config = replace(config, **({"languages": ["en", "qac"]} | own))
    return Run(
        config, "eval", {"checkpoint": External(checkpoint.name, "hash", checkpoint)}, version=1
    )


class Notes:
    """A tracker that keeps what it is told."""

    def summary(self, found: dict[str, float]) -> None:
        self.found = found


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def worked(question: str, answer: str | None, number: int) -> dict[str, Any]:
    return {
        "question": question,
        "answer": answer,
        "answer_number": number,
        "equation_solution": None,
    }


def passage(number: int, right: str) -> dict[str, Any]:
    options = {f"mc_answer{i}": f"option {number}.{i}" for i in range(1, 5)}
    row = {
        "link": f"l{number}",
        "question_number": 1,
        "flores_passage": f"Passage {number}.",
        "question": f"Which {number}?",
    }
    return (
        row | options | {"correct_answer_num": right, "dialect": "x", "ds": "2023-05-03T00:00:00"}
    )


def fact(number: int, subject: str, right: str) -> dict[str, Any]:
    options = {f"option_{letter}": f"{letter}{number}" for letter in "abcd"}
    row = {
        "sample_id": f"{subject}/{number}",
        "subject": subject,
        "subject_category": "x",
        "question": f"What {number}?",
    }
    return row | options | {"answer": right}


def problem(number: int) -> dict[str, Any]:
    tests = [f"assert add({one}, {number}) == {one + number}" for one in range(3)]
    return {
        "task_id": number,
        "text": f"Add {number}.",
        "code": "def add(a, b): return a + b",
        "test_list": tests,
    }


def sentence(number: int, text: str) -> dict[str, Any]:
    return {
        "id": number,
        "URL": "u",
        "domain": "d",
        "topic": "t",
        "has_image": 0,
        "has_hyperlink": 0,
        "sentence": text,
    }


def needs_real_data(test: Any) -> Any:
    """For tests that read the real MGSM from the folder PIPELINE_TEST_DATA."""
    return pytest.mark.real_data(
        pytest.mark.skipif(not REAL_DATA, reason="PIPELINE_TEST_DATA names no folder")(test)
    )
