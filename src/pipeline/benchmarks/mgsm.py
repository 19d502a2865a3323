"""MGSM (Shi et al. 2023): 250 word problems of grade school in 11 languages, with eight worked
exemplars in each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from pipeline.benchmarks.benchmark import Ask, Benchmark, TaskSpec, on_hub
from pipeline.benchmarks.local_files import Row, rows_of, write_rows
from pipeline.benchmarks.task_files import (
    check_exemplars,
    generation_kwargs,
    has_stock_file,
    local_files,
    own_task_file,
    read_from,
    stock_file,
    write_task,
)
from pipeline.config.data import Source
from pipeline.config.task_yaml import read_task
from pipeline.errors import PipelineError
from pipeline.languages import Language


def define(ask: Ask) -> list[TaskSpec]:
    """MGSM with worked answers in the question's language (the papers'), worked in English, or bare
    answers.

    A language that the harness has no file for is asked with the words of its exemplars
    (`prompt_words`).
    """
    kind = {"mgsm": "native_cot", "mgsm_en_cot": "en_cot", "mgsm_direct": "direct"}[ask.task]
    code = ask.language.mgsm or ask.language.stock
    english = f"mgsm/{kind}/mgsm_{kind}_en.yaml"
    included = stock_file(ask, f"mgsm/{kind}/mgsm_{kind}_{code}.yaml", english)
    body: Row = {
        "include": [str(included), str(own_task_file("mgsm"))],
        **generation_kwargs(ask, included, own_task_file("mgsm")),
    }
    if ask.data_root:
        train, test = local_files(ask, "mgsm", "train", ask.split)
        items = rows_of(
            test, {"question": str, "answer_number": int}, optional={"answer": type(None)}
        )
        if kind == "direct":
            worked: dict[str, type] = {"answer_number": int}
        else:
            worked = {"answer": str}
        exemplars = []
        if ask.num_fewshot or train.is_file():
            exemplars = rows_of(train, {"question": str} | worked)
        check_exemplars(ask, ask.task, len(exemplars), train)
        if included.name == Path(english).name and code != "en":
            question, answer = prompt_words(exemplars)
            exemplars = [with_words(row, question, answer) for row in exemplars]
            body |= reword_prompt(
                read_task(included).body, question, answer, native=ask.task == "mgsm"
            )
            body["generation_kwargs"]["until"] = [question, *body["generation_kwargs"]["until"][1:]]
        elif ask.task == "mgsm":
            check_worked(train, exemplars, yaml.safe_load(included.read_text()))
        read_from(body, **with_all_columns(ask, {train: exemplars, test: items}))
        if not exemplars:
            body["training_split"] = None
    if ask.exemplars == "random":
        body["fewshot_config"] = {"sampler": "default"}
    return [write_task(ask, body)]


COLUMNS = ("question", "answer", "answer_number", "equation_solution")
QUESTION, STEPS = "Question:", "Step-by-Step Answer:"  # MGSM's words in English
_WORDS = re.compile(r"""\s*([^:：{}"\\\n]{1,60}[:：])""")


def prompt_words(exemplars: Sequence[Row]) -> tuple[str, str]:
    """Return what stands before each question and each worked answer, colon included.

    MGSM's own exemplars have `Swali:` and `Jibu la Hatua kwa Hatua:`. English words stand in where
    the exemplars do not all begin alike, or are fewer than two.
    """
    beginnings = []
    for column, english in (("question", QUESTION), ("answer", STEPS)):
        first_words = {
            match[1] if (match := _WORDS.match(str(row.get(column, "")))) else ""
            for row in exemplars
        }
        beginnings.append(first_words.pop() if len(first_words) == 1 and len(exemplars) > 1 else "")
        beginnings[-1] = beginnings[-1] or english
    return beginnings[0], beginnings[1]


def with_words(row: Row, question: str, answer: str) -> Row:
    """Return an exemplar that begins with these words, one space after each, whether it had them or
    not.
    """
    changes = {"question": f"{question} {row['question'].strip().removeprefix(question).lstrip()}"}
    if isinstance(row.get("answer"), str):
        changes["answer"] = f"{answer} {row['answer'].strip().removeprefix(answer).lstrip()}"
    return row | changes


def reword_prompt(english: Row, question: str, answer: str, native: bool) -> Row:
    """Return the prompt of MGSM's English file with other words before question and answer.

    Args: native: ask for an answer in these words, not English's.
    """
    text, target = (
        english["doc_to_text"].replace(f"{QUESTION} ", f"{question} "),
        english["doc_to_target"],
    )
    return {
        "doc_to_text": text.replace(STEPS, answer) if native else text,
        "doc_to_target": target.replace(f"[{len(STEPS) + 1}:]", f"[{len(answer) + 1}:]"),
    }


def with_all_columns(ask: Ask, splits: Mapping[Path, Sequence[Row]]) -> dict[str, Path]:
    """Split -> file: those of `splits` where they hold these rows with MGSM's four columns, else
    new files.

    The templates tell an exemplar by its answer, and datasets takes the types of all splits from
    the first one.
    """
    names = {}
    for file, rows in splits.items():
        if rows:
            if file.stem == "train":
                names[file] = "train"
            else:
                names[file] = "test"
    if all(row.keys() == set(COLUMNS) for file in names for row in splits[file]) and all(
        splits[file] == rows_of(file, {}) for file in names
    ):
        return {name: file for file, name in names.items()}
    files = {}
    for file, name in names.items():
        default = {
            "answer": "-" if name == "train" else None,
            "answer_number": 0,
            "equation_solution": "",
        }
        filled = (
            {**default, **{key: row[key] for key in COLUMNS if row.get(key) is not None}}
            for row in splits[file]
        )
        files[name] = write_rows(
            ask.folder / f"{ask.task}.{ask.language.code}.{name}.jsonl", filled
        )
    return files


def check_worked(file: Path, exemplars: list[Row], stock: Row) -> None:
    """Check that an exemplar's answer begins with the stock task's words.

    The task cuts a fixed count of characters off.
    """
    match = re.search(r'question\+"\\n(.+?)"', stock["doc_to_text"])
    if not match:
        return
    # Some of the harness' phrases differ from MGSM's own in spaces and in the width of the colon.
    plain = [
        re.sub(r"\s", "", text).replace("：", ":")
        for text in (match[1], *(row["answer"] for row in exemplars))
    ]
    for number, answer in enumerate(plain[1:], start=1):
        if not answer.startswith(plain[0]):
            raise PipelineError(
                f"{file}: the answer of exemplar {number} must begin with {match[1]!r}, as"
                " MGSM's do"
            )


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
