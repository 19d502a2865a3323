"""MGSM (Shi et al. 2023): 250 grade-school word problems in 11 languages.

Each language has eight few-shot examples with worked answers.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from pipeline.benchmarks.benchmark import Ask, Benchmark, TaskSpec, on_hub
from pipeline.benchmarks.local_files import Row, path_of_split, rows_of
from pipeline.benchmarks.task_files import (
    generation_kwargs,
    has_stock_file,
    own_task_file,
    read_from,
    stock_file,
    write_task,
)
from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.languages import Language


def define(ask: Ask) -> list[TaskSpec]:
    """Write MGSM's task file.

    Worked answers are in the question's language (the papers') or in English, or answers are bare.
    A language without a file in the harness uses the English words.
    """
    kind = {"mgsm": "native_cot", "mgsm_en_cot": "en_cot", "mgsm_direct": "direct"}[ask.task]
    code = ask.language.mgsm or ask.language.stock
    english = f"mgsm/{kind}/mgsm_{kind}_en.yaml"
    included = stock_file(ask, f"mgsm/{kind}/mgsm_{kind}_{code}.yaml", english)
    own_file = own_task_file("mgsm")
    body: Row = {"include": [str(included), str(own_file)]}
    body |= generation_kwargs(ask, included, own_file)
    if ask.data_root:
        train = path_of_split(ask.data_root, "mgsm", ask.language, "train")
        test = train.with_stem(ask.split)
        # templates know an example by its answer
        rows_of(test, {"question": str, "answer": (None,), "answer_number": int})
        files = {"test": test}
        if ask.num_fewshot or train.is_file():
            holds: dict[str, type] = {"question": str, "answer": str}
            if kind == "direct":
                holds["answer_number"] = int
            exemplars = rows_of(train, holds)
            if kind == "native_cot":
                check_worked(train, exemplars, yaml.safe_load(included.read_text()))
            files = {"train": train, **files}
        else:
            body["training_split"] = None
        read_from(body, **files)
    if ask.exemplars == "random":
        body["fewshot_config"] = {"sampler": "default"}
    return [write_task(ask, body)]


def check_worked(file: Path, exemplars: list[Row], stock: Row) -> None:
    """Check that the answers of few-shot examples begin with the stock task's words.

    The task cuts a fixed number of characters off.

    Args:
        file: the file of the examples, for the message.
        exemplars: the examples.
        stock: the content of the stock task's file.

    Raises:
        PipelineError: an answer begins with other words.
    """
    match = re.search(r'question\+"\\n(.+?)"', stock["doc_to_text"])
    if not match:
        return
    words = _plain(match[1])
    for number, row in enumerate(exemplars, start=1):
        if not _plain(row["answer"]).startswith(words):
            raise PipelineError(
                f"{file}: the answer of example {number} must begin with {match[1]!r}, as MGSM's"
                " do. Correct it."
            )


def _plain(text: str) -> str:
    """Remove spaces and replace wide colons.

    The harness' phrases differ from MGSM's only in these.
    """
    return re.sub(r"\s", "", text).replace("：", ":")


def hub_sets(spoken: Language) -> list[Source]:
    if has_stock_file(f"mgsm/native_cot/mgsm_native_cot_{spoken.code}.yaml"):
        return [on_hub("juletxara/mgsm", spoken.code)]
    return []


BENCHMARK = Benchmark(
    name="mgsm",
    variants=("mgsm_en_cot", "mgsm_direct"),
    in_english=("mgsm_en_cot",),
    kind="number",
    metric="exact_match",
    filter="flexible-extract",
    questions=250,
    tokens=64,
    exemplar_file="train.jsonl",
    exemplars_drawn=True,
    define=define,
    texts=lambda row: [row["question"]],
    sources=hub_sets,
)
