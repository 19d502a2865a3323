"""MGSM (Shi et al. 2023): 250 grade-school word problems in 11 languages.

Each language has eight few-shot examples with worked answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from pipeline.benchmarks.benchmark import Ask, Benchmark, TaskSpec, on_hub
from pipeline.benchmarks.local_files import Row, rows_of, write_rows
from pipeline.benchmarks.task_files import (
    generation_kwargs,
    has_stock_file,
    local_files,
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
        train, test = local_files(ask, "mgsm", "train", ask.split)
        items = rows_of(test, {"question": str, "answer_number": int})
        refuse_answers(test, items)
        answer: dict[str, type] = {"answer": str}
        if kind == "direct":
            answer = {"answer_number": int}
        exemplars = []
        if ask.num_fewshot or train.is_file():
            exemplars = rows_of(train, {"question": str, **answer})
        if included.name == Path(english).name and code != "en":
            exemplars = list(map(with_english_words, exemplars))
        elif ask.task == "mgsm":
            check_worked(train, exemplars, yaml.safe_load(included.read_text()))
        read_from(body, **with_all_columns(ask, {train: exemplars, test: items}))
        if not exemplars:
            body["training_split"] = None
    if ask.exemplars == "random":
        body["fewshot_config"] = {"sampler": "default"}
    return [write_task(ask, body)]


def refuse_answers(file: Path, items: list[Row]) -> None:
    """Raise PipelineError if a test item has an answer, by which templates know an example."""
    for number, row in enumerate(items, start=1):
        if row.get("answer") is not None:
            raise PipelineError(
                f"{file}, row {number}: answer must be null, got {row['answer']!r}. Correct the"
                " row."
            )


COLUMNS = ("question", "answer", "answer_number", "equation_solution")
QUESTION, STEPS = "Question:", "Step-by-Step Answer:"  # MGSM's English words


def with_english_words(row: Row) -> Row:
    """Return an example that begins with MGSM's English words, with one space after them."""
    changes = {}
    for column, word in (("question", QUESTION), ("answer", STEPS)):
        text = row.get(column)
        if isinstance(text, str):
            changes[column] = f"{word} {text.strip().removeprefix(word).lstrip()}"
    return row | changes


def with_all_columns(ask: Ask, splits: Mapping[Path, list[Row]]) -> dict[str, Path]:
    """Return files of the splits whose rows have MGSM's four columns.

    They are the given files if these hold such rows, otherwise new files. The templates recognise a
    few-shot example by its answer, and datasets takes the types of all splits from the first one.
    """
    named = {}
    for file, rows in splits.items():
        if rows:
            named["train" if file.stem == "train" else "test"] = file
    if all(_has_all_columns(file, splits[file]) for file in named.values()):
        return named
    files = {}
    for name, file in named.items():
        rows = []
        for row in splits[file]:
            answer = "-" if name == "train" else None
            filled = {"answer": answer, "answer_number": 0, "equation_solution": ""}
            filled |= {key: row[key] for key in COLUMNS if row.get(key) is not None}
            rows.append(filled)
        new_file = ask.folder / f"{ask.task}.{ask.language.code}.{name}.jsonl"
        files[name] = write_rows(new_file, rows)
    return files


def _has_all_columns(file: Path, rows: list[Row]) -> bool:
    """Return True if a file holds these rows, and they have MGSM's columns."""
    return all(row.keys() == set(COLUMNS) for row in rows) and rows == rows_of(file, {})


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
    is_known = has_stock_file(f"mgsm/native_cot/mgsm_native_cot_{spoken.code}.yaml")
    if is_known:
        return [on_hub("juletxara/mgsm", spoken.code)]
    return []


BENCHMARK = Benchmark(
    name="mgsm",
    variants=("mgsm_en_cot", "mgsm_direct"),
    in_english=("mgsm_en_cot",),
    title="MGSM",
    kind="number",
    metric="exact_match",
    filter="flexible-extract",
    columns=("question",),
    questions=250,
    tokens=64,
    exemplar_file="train.jsonl",
    exemplars_drawn=True,
    define=define,
    texts=lambda row: [row["question"]],
    sources=hub_sets,
)
