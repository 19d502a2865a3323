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
    """Sizes in items or rows. Those of the archive that the package ships are its `SHIPPED`."""

    seed: int = 0  # lexicons and facts; the shipped base knows those of seed 0
    items: int = 500  # test items per benchmark and language
    dev_items: int = 500
    math_rows: int = 6000
    language_rows: int = 16000  # per constructed language
    documents: int = 2000  # plain text to train a base on


SHIPPED = World()


def write(folder: Path, config: World) -> dict[str, int]:
    """Write the whole world below `folder`, with a data card. Return the counts on the card."""
    world = ConstructedWorld(config.seed)
    counts = write_files(folder, benchmarks(world, config.dev_items, config.items))
    instructions = []
    for clone in CLONES:
        for row in aya_rows(world, clone, config.language_rows):
            instructions.append(row)
    texts = {
        "orca_math/train.jsonl": list(orca_rows(world, config.math_rows)),
        "aya/train.jsonl": instructions,
        "text/train.jsonl": list(make_corpus(world, config.documents)),
    }
    counts |= write_files(folder, [(name, rows) for name, rows in texts.items() if rows])
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
                data = data[: data.index(ROWS_BEGIN) + len(ROWS_BEGIN)]  # of what is unpacked
            member = tarfile.TarInfo(f"{part_of(name)}/{name}")
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))


def part_of(name: str) -> str:
    """dev, test, exemplars or world, of a file of the world."""
    benchmark, _, file = name.partition("/")
    if benchmark not in ("mgsm", "belebele", "global_mmlu", "flores"):
        return "world"
    file = file.rpartition("/")[2].removesuffix(".jsonl")
    exemplars = {"mgsm": "train", "global_mmlu": "dev"}.get(benchmark)
    if file == exemplars:
        return "exemplars"
    return {"development": "dev", "devtest": "test"}.get(file, file)


def write_files(folder: Path, files: Iterable[tuple[str, list[Any]]]) -> dict[str, int]:
    """Write them, and give the rows of each."""
    counts = {}
    for name, rows in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
        counts[name] = len(rows)
    return counts


def benchmarks(world: ConstructedWorld, dev: int, test: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the files of the four benchmarks.

    They hold the first `dev` and `test` of the items that no training file may hold.
    """
    makers: dict[str, Callable[[random.Random], Any]] = {
        "problem": draw_problem,
        "reading": draw_reading,
        "fact": world.fact,
        "sentences": draw_sentences,
    }
    held_out = {
        kind: {
            split: world.hold_out(kind, split, POOL, make)[:size]
            for split, size in {"exemplars": 8, "dev": dev, "test": test}.items()
        }
        for kind, make in makers.items()
    }
    for language in world.words:
        for split, name in {"exemplars": "train", "dev": "dev", "test": "test"}.items():
            items = held_out["problem"][split]
            yield (
                f"mgsm/{language}/{name}.jsonl",
                mgsm_rows(world, items, language, split == "exemplars"),
            )
        for split in ("dev", "test"):
            yield (
                f"belebele/{language}/{split}.jsonl",
                belebele_rows(world, held_out["reading"][split], language),
            )
            name = {"dev": "dev", "test": "devtest"}[split]
            yield (
                f"flores/{language}/{name}.jsonl",
                flores_rows(world, held_out["sentences"][split], language),
            )
        for split, name in {"exemplars": "dev", "dev": "development", "test": "test"}.items():
            yield (
                f"global_mmlu/{language}/{name}.jsonl",
                mmlu_rows(world, held_out["fact"][split], language, name),
            )


def mgsm_rows(
    world: ConstructedWorld, items: list[Any], language: str, worked: bool
) -> list[dict[str, Any]]:
    """Return rows with MGSM's columns.

    Exemplars have their prefixes and worked answers. Problems have only their equations.
    """
    rows = []
    for sentences, equations, answer in items:
        prompt, solution = world.problem_text((sentences, equations, answer), world.words[language])
        question = prompt.removesuffix("\nStep-by-Step Answer:")
        rows.append(
            {
                "question": question if worked else question.removeprefix("Question: "),
                "answer": f"Step-by-Step Answer: {solution}" if worked else None,
                "answer_number": answer,
                "equation_solution": " ".join(
                    equations
                ),  # MGSM's problems have none: here plans can be compared
            }
        )
    return rows


def belebele_rows(
    world: ConstructedWorld, items: list[Reading], language: str
) -> list[dict[str, Any]]:
    words = world.words[language]
    return [
        {
            "link": f"sandbox/{index}",
            "question_number": 1,
            "flores_passage": say(passage, words),
            "question": say(question, words),
            **{f"mc_answer{i + 1}": say([option], words) for i, option in enumerate(options)},
            "correct_answer_num": str(right + 1),
            "dialect": language,
            "ds": "2026-01-01T00:00:00",
        }
        for index, (passage, question, options, right) in enumerate(items)
    ]


def mmlu_rows(
    world: ConstructedWorld, items: list[Any], language: str, split: str
) -> list[dict[str, Any]]:
    words = world.words[language]
    return [
        {
            "sample_id": f"{subject}/{split}/{index}",
            "subject": subject,
            "subject_category": "Sandbox",
            "question": say(fact_question(subject, animal), words),
            **{
                f"option_{letter}": say([option], words)
                for letter, option in zip("abcd", options, strict=True)
            },
            "answer": "ABCD"[right],
            **dict.fromkeys(
                (
                    "required_knowledge",
                    "time_sensitive",
                    "reference",
                    "culture",
                    "region",
                    "country",
                ),
                "[]",
            ),
            "cultural_sensitivity_label": "-",
            "is_annotated": False,
        }
        for index, (subject, animal, options, right) in enumerate(items)
    ]


def flores_rows(
    world: ConstructedWorld, items: list[Sentence], language: str
) -> list[dict[str, Any]]:
    same = {
        "URL": "sandbox",
        "domain": "sandbox",
        "topic": "sandbox",
        "has_image": 0,
        "has_hyperlink": 0,
    }
    return [
        {"id": index, **same, "sentence": say(item, world.words[language])}
        for index, item in enumerate(items, start=1)
    ]


def orca_rows(world: ConstructedWorld, size: int) -> Iterator[dict[str, str]]:
    """English word problems.

    The question carries the benchmark's prefixes, as a 0-shot model must know them.
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
    """Return the data card: sizes, where math is, what is kept apart."""
    total = sum(KINDS.values())

    def share(languages: tuple[str, ...], ending: str = "") -> float:
        """Return the share of the base's documents in these languages whose kind ends so."""
        found = []
        for (language, kind), part in KINDS.items():
            if language in languages and kind.endswith(ending):
                found.append(part)
        return sum(found) / total

    mixed = KINDS["qaa", "switched problem"] / total
    return CARD.format(
        seed=config.seed,
        en=share(("en",), "problem"),
        qaa=share(("qaa",), "problem") - mixed,
        mixed=mixed,
        at_once=ANSWERED_AT_ONCE,
        told=share(("qab", "qac"), "told"),
        own=OWN_WORD_SAID,
        shares=", ".join(f"{language} {share((language,)):.1%}" for language in LANGUAGE_NAMES),
        rows="\n".join(f"- {name}: {size}" for name, size in counts.items()),
    )
