"""The world as files: the schemas and the layout of the real data."""

from __future__ import annotations

import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_world.text import (
    ANSWERED_AT_ONCE,
    KINDS,
    OWN_WORD_SAID,
    make_corpus,
    make_instructions,
)
from small_world.tokenizer import make_tokenizer
from small_world.world import (
    CLONES,
    LANGUAGE_NAMES,
    POOL,
    ConstructedWorld,
    Reading,
    Sentence,
    draw_problem,
    draw_reading,
    draw_sentences,
    fact_question,
    say,
)


@dataclass(frozen=True)
class World:
    """Sizes in items or rows. `SHIPPED` has the sizes of the archive in the package."""

    seed: int = 0  # determines lexicons and facts; the shipped base is trained on seed 0
    items: int = 500  # test items per benchmark and language
    dev_items: int = 500
    math_rows: int = 6000
    language_rows: int = 16000  # per constructed language
    documents: int = 2000  # plain text to train a base on


SHIPPED = World()

# The names of a split's file in the benchmarks' data sets
MGSM_FILES = {"exemplars": "train", "dev": "dev", "test": "test"}
FLORES_FILES = {"dev": "dev", "test": "devtest"}
MMLU_FILES = {"exemplars": "dev", "dev": "development", "test": "test"}


def write(folder: Path, config: World) -> dict[str, int]:
    """Write the whole world below `folder`, with a data card. Return the counts on the card."""
    world = ConstructedWorld(config.seed)
    counts = write_files(folder, benchmarks(world, config.dev_items, config.items))
    instructions: list[dict[str, str]] = []
    for clone in CLONES:
        instructions += aya_rows(world, clone, config.language_rows)
    texts = {
        "orca_math/train.jsonl": list(orca_rows(world, config.math_rows)),
        "aya/train.jsonl": instructions,
        "text/train.jsonl": list(make_corpus(world, config.documents)),
    }
    for name, rows in texts.items():
        if rows:
            counts |= write_files(folder, [(name, rows)])
    make_tokenizer().save_pretrained(folder / "tokenizer")
    content = {
        "seed": world.seed,
        "languages": list(world.words),
        "holds": "training sets and items",
    }
    (folder / "world.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    (folder / "data_card.md").write_text(card_text(config, counts), encoding="utf-8")
    return counts


def pack(archive: Path, config: World) -> None:
    """Pack the files as pipeline/data/small_world.py unpacks them.

    Files below `dev` and `test` are cut to a size when they are unpacked; the other files are below
    `exemplars` and `world`.
    """
    with (
        tempfile.TemporaryDirectory() as scratch,
        tarfile.open(archive, "w:xz", preset=9) as packed,
    ):
        folder = Path(scratch)
        for name in [*write(folder, config), "world.json", "data_card.md", *TOKENIZER]:
            data = (folder / name).read_bytes()
            if name == "data_card.md":
                # The list of rows is written when the archive is unpacked.
                data = data[: data.index(ROWS_BEGIN) + len(ROWS_BEGIN)]
            member = tarfile.TarInfo(f"{part_of(name)}/{name}")
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))


def part_of(name: str) -> str:
    """Return the part of the archive that a file belongs to: dev, test, exemplars or world."""
    benchmark, _, file = name.partition("/")
    if benchmark not in ("mgsm", "belebele", "global_mmlu", "flores"):
        return "world"
    file = file.rpartition("/")[2].removesuffix(".jsonl")
    exemplars = {"mgsm": "train", "global_mmlu": "dev"}.get(benchmark)
    if file == exemplars:
        return "exemplars"
    return {"development": "dev", "devtest": "test"}.get(file, file)


def write_files(folder: Path, files: Iterable[tuple[str, list[Any]]]) -> dict[str, int]:
    """Write the files, and return the number of rows of each."""
    counts = {}
    for name, rows in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8")
        counts[name] = len(rows)
    return counts


def benchmarks(world: ConstructedWorld, dev: int, test: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the files of the four benchmarks.

    They have the first `dev` and `test` of the held-out items, which no training file contains.
    """
    makers: dict[str, Callable[[random.Random], Any]] = {
        "problem": draw_problem,
        "reading": draw_reading,
        "fact": world.fact,
        "sentences": draw_sentences,
    }
    sizes = {"exemplars": 8, "dev": dev, "test": test}
    held_out = {}
    for kind, make in makers.items():
        for split, size in sizes.items():
            held_out[kind, split] = world.hold_out(kind, split, POOL, make)[:size]
    for language in world.words:
        for split, name in MGSM_FILES.items():
            items = held_out["problem", split]
            rows = mgsm_rows(world, items, language, split == "exemplars")
            yield f"mgsm/{language}/{name}.jsonl", rows
        for split, name in FLORES_FILES.items():
            rows = belebele_rows(world, held_out["reading", split], language)
            yield f"belebele/{language}/{split}.jsonl", rows
            rows = flores_rows(world, held_out["sentences", split], language)
            yield f"flores/{language}/{name}.jsonl", rows
        for split, name in MMLU_FILES.items():
            rows = mmlu_rows(world, held_out["fact", split], language, name)
            yield f"global_mmlu/{language}/{name}.jsonl", rows


def mgsm_rows(
    world: ConstructedWorld, items: list[Any], language: str, worked: bool
) -> list[dict[str, Any]]:
    """Return rows with MGSM's columns.

    Exemplars have their prefixes and worked answers. Problems have only their equations.
    """
    rows = []
    for item in items:
        _, equations, number = item
        prompt, solution = world.problem_text(item, world.words[language])
        question = prompt.removesuffix("\nStep-by-Step Answer:")
        answer: str | None = f"Step-by-Step Answer: {solution}"
        if not worked:
            question = question.removeprefix("Question: ")
            answer = None
        row = {"question": question, "answer": answer, "answer_number": number}
        # MGSM's test problems have no equations. Here they have, so that plans can be compared.
        row["equation_solution"] = " ".join(equations)
        rows.append(row)
    return rows


def belebele_rows(
    world: ConstructedWorld, items: list[Reading], language: str
) -> list[dict[str, Any]]:
    words = world.words[language]
    rows = []
    for index, (passage, question, options, right) in enumerate(items):
        row = {"link": f"sandbox/{index}", "question_number": 1}
        row["flores_passage"] = say(passage, words)
        row["question"] = say(question, words)
        for number, option in enumerate(options, start=1):
            row[f"mc_answer{number}"] = say([option], words)
        row["correct_answer_num"] = str(right + 1)
        row |= {"dialect": language, "ds": "2026-01-01T00:00:00"}
        rows.append(row)
    return rows


MMLU_ANNOTATIONS = (
    "required_knowledge",
    "time_sensitive",
    "reference",
    "culture",
    "region",
    "country",
)


def mmlu_rows(
    world: ConstructedWorld, items: list[Any], language: str, split: str
) -> list[dict[str, Any]]:
    words = world.words[language]
    rows = []
    for index, (subject, animal, options, right) in enumerate(items):
        row = {"sample_id": f"{subject}/{split}/{index}", "subject": subject}
        row["subject_category"] = "Sandbox"
        row["question"] = say(fact_question(subject, animal), words)
        for letter, option in zip("abcd", options, strict=True):
            row[f"option_{letter}"] = say([option], words)
        row["answer"] = "ABCD"[right]
        row |= dict.fromkeys(MMLU_ANNOTATIONS, "[]")
        row |= {"cultural_sensitivity_label": "-", "is_annotated": False}
        rows.append(row)
    return rows


def flores_rows(
    world: ConstructedWorld, items: list[Sentence], language: str
) -> list[dict[str, Any]]:
    facts: dict[str, Any] = dict.fromkeys(("URL", "domain", "topic"), "sandbox")
    facts |= dict.fromkeys(("has_image", "has_hyperlink"), 0)
    rows = []
    for index, item in enumerate(items, start=1):
        sentence = say(item, world.words[language])
        rows.append({"id": index, **facts, "sentence": sentence})
    return rows


def orca_rows(world: ConstructedWorld, size: int) -> Iterator[dict[str, str]]:
    """Yield English word problems.

    The questions have the benchmark's prefixes, because a 0-shot model must know them.
    """
    draw = random.Random(f"{world.seed} orca_math")
    for _ in range(size):
        question, answer = world.problem_text(world.fresh(draw, draw_problem), {})
        yield {"question": question, "answer": answer}


def aya_rows(world: ConstructedWorld, clone: str, size: int) -> Iterator[dict[str, str]]:
    for prompt, completion in make_instructions(world, clone, size):
        yield {
            "inputs": prompt,
            "targets": completion,
            "language": LANGUAGE_NAMES[clone],
            "language_code": clone,
            "annotation_type": "original-annotations",
            "user_id": "sandbox",
        }


TOKENIZER = ("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")
ROWS_BEGIN = b"## Rows\n\n"
CARD = """# The small world

Made from world seed {seed}: lexicons and facts are its functions, and the shipped base knows those of seed 0.

## Where math is

- orca_math holds English word problems only, each worked out. aya holds none, and asks for no number.
- The plain text that makes the base holds word problems in English ({en:.1%} of its documents), in qaa ({qaa:.1%}),
  and in words of English, qaa and qab mixed ({mixed:.1%}). There is none in qac. {at_once:.0%} of them are answered at
  once, the others are worked out. Besides, the text holds arithmetic without words and, in every language, sentences
  and translations with numbers, "twice", "more", "fewer" and "how many".
- In qab and qac {told:.1%} of the documents say in English what a word problem tells, behind its label; the problem's
  question, its steps and its answer are not there.
- Share of the documents a language: {shares}.
- qac borrows all verbs of problems and half of the nouns and colours from English. Its own words for these occur in
  this text {own:.0%} of the times; all are in its test items and in aya.
- Prefix words and the answer phrase of word problems are English in all languages.

## What is kept apart

Development and test problems, passages with their questions, and sentence pairs stand in no training file, in no
language. Facts are what is to be learnt: they are the same in all splits, asked with other options.

## Rows

{rows}
"""


def card_text(config: World, counts: dict[str, int]) -> str:
    """Return the data card: the sizes, the files with math, and the held-out items."""
    total = sum(KINDS.values())

    def share(languages: tuple[str, ...], ending: str = "") -> float:
        """Return the share of the base's documents in these languages whose kind ends so."""
        found = []
        for (language, kind), part in KINDS.items():
            if language in languages and kind.endswith(ending):
                found.append(part)
        return sum(found) / total

    mixed = KINDS["qaa", "switched problem"] / total
    shares = [f"{language} {share((language,)):.1%}" for language in LANGUAGE_NAMES]
    rows = [f"- {name}: {size}" for name, size in counts.items()]
    values = {
        "en": share(("en",), "problem"),
        "qaa": share(("qaa",), "problem") - mixed,
        "told": share(("qab", "qac"), "told"),
    }
    values |= {"mixed": mixed, "at_once": ANSWERED_AT_ONCE, "own": OWN_WORD_SAID}
    texts = {"shares": ", ".join(shares), "rows": "\n".join(rows)}
    return CARD.format(seed=config.seed, **values, **texts)
