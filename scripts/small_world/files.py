"""The world as files: the schemas and the layout of the real data."""

from __future__ import annotations

import io
import json
import random
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from small_world.text import (
    BASE_DOCUMENTS,
    LAST,
    LAST_MIX,
    LESSON,
    MIX,
    QAC_MIX,
    last_corpus,
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
    last_documents: int = 0  # and the text it reads after that, much of it in qac


SHIPPED = World()


def write(folder: Path, config: World) -> dict[str, int]:
    """The whole world below `folder`, with a data card. Gives the counts that the card states."""
    world = ConstructedWorld(config.seed)
    counts = write_files(folder, benchmarks(world, config.dev_items, config.items))
    instructions = [row for clone in CLONES for row in aya_rows(world, clone, config.language_rows)]
    texts = {
        "orca_math/train.jsonl": list(orca_rows(world, config.math_rows)), "aya/train.jsonl": instructions,
        "text/train.jsonl": list(make_corpus(world, config.documents)),
        "text/last.jsonl": list(last_corpus(world, config.last_documents)),
    }  # fmt: skip
    counts |= write_files(folder, [(name, rows) for name, rows in texts.items() if rows])
    make_tokenizer().save_pretrained(folder / "tokenizer")
    content = {"seed": world.seed, "languages": list(world.words), "holds": "training sets and items"}
    (folder / "world.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    (folder / "data_card.md").write_text(card_text(config, counts), encoding="utf-8")
    return counts


def pack(archive: Path, config: World) -> None:
    """The files as pipeline/data/small_world.py unpacks them: below `dev` and `test` what is cut to a size, and below
    `exemplars` and `world` the rest."""
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(archive, "w:xz", preset=9) as packed:
        folder = Path(scratch)
        for name in [*write(folder, replace(config, last_documents=0)), "world.json", "data_card.md", *TOKENIZER]:
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
    return "exemplars" if file == exemplars else {"development": "dev", "devtest": "test"}.get(file, file)


def write_files(folder: Path, files: Iterable[tuple[str, list[Any]]]) -> dict[str, int]:
    """Write them, and give the rows of each."""
    counts = {}
    for name, rows in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        counts[name] = len(rows)
    return counts


def benchmarks(world: ConstructedWorld, dev: int, test: int) -> Iterator[tuple[str, list[Any]]]:
    """The files of the four benchmarks, the first `dev` and `test` of the items that no training file may hold."""
    makers: dict[str, Callable[[random.Random], Any]] = {
        "problem": draw_problem, "reading": draw_reading, "fact": world.fact, "sentences": draw_sentences,
    }  # fmt: skip
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
            yield f"mgsm/{language}/{name}.jsonl", mgsm_rows(world, items, language, split == "exemplars")
        for split in ("dev", "test"):
            yield f"belebele/{language}/{split}.jsonl", belebele_rows(world, held_out["reading"][split], language)
            name = {"dev": "dev", "test": "devtest"}[split]
            yield f"flores/{language}/{name}.jsonl", flores_rows(world, held_out["sentences"][split], language)
        for split, name in {"exemplars": "dev", "dev": "development", "test": "test"}.items():
            yield f"global_mmlu/{language}/{name}.jsonl", mmlu_rows(world, held_out["fact"][split], language, name)


def mgsm_rows(world: ConstructedWorld, items: list[Any], language: str, worked: bool) -> list[dict[str, Any]]:
    """MGSM's columns: exemplars carry their prefixes and worked answers, problems their equations alone."""
    rows = []
    for sentences, equations, answer in items:
        prompt, solution = world.problem_text((sentences, equations, answer), world.words[language])
        question = prompt.removesuffix("\nStep-by-Step Answer:")
        rows.append({
            "question": question if worked else question.removeprefix("Question: "),
            "answer": f"Step-by-Step Answer: {solution}" if worked else None,
            "answer_number": answer,
            "equation_solution": " ".join(equations),  # MGSM's problems have none: here plans can be compared
        })  # fmt: skip
    return rows


def belebele_rows(world: ConstructedWorld, items: list[Reading], language: str) -> list[dict[str, Any]]:
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


def mmlu_rows(world: ConstructedWorld, items: list[Any], language: str, split: str) -> list[dict[str, Any]]:
    words = world.words[language]
    return [
        {
            "sample_id": f"{subject}/{split}/{index}",
            "subject": subject,
            "subject_category": "Sandbox",
            "question": say(fact_question(subject, animal), words),
            **{f"option_{letter}": say([option], words) for letter, option in zip("abcd", options, strict=True)},
            "answer": "ABCD"[right],
            **dict.fromkeys(
                ("required_knowledge", "time_sensitive", "reference", "culture", "region", "country"), "[]"
            ),
            "cultural_sensitivity_label": "-",
            "is_annotated": False,
        }
        for index, (subject, animal, options, right) in enumerate(items)
    ]


def flores_rows(world: ConstructedWorld, items: list[Sentence], language: str) -> list[dict[str, Any]]:
    same = {"URL": "sandbox", "domain": "sandbox", "topic": "sandbox", "has_image": 0, "has_hyperlink": 0}
    return [
        {"id": index, **same, "sentence": say(item, world.words[language])} for index, item in enumerate(items, start=1)
    ]


def orca_rows(world: ConstructedWorld, size: int) -> Iterator[dict[str, str]]:
    """English word problems. The question carries the benchmark's prefixes, as a 0-shot model must know them."""
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

- orca_math holds English word problems only. aya holds none, and asks for no number.
- The plain text that makes the base holds word problems with solutions in English ({en:.2%} of its documents) and in
  qaa ({qaa:.2%}; a part mixes words of both), none in qab or qac. Besides, it holds arithmetic without words and, in
  every language, single sentences and translations with numbers, "twice", "more", "fewer" and "how many", and
  questions whose number is told in the passage. In qab and qac {told:.1%} of its documents say in English what a word
  problem tells, behind its label; the problem's question, its steps and its answer are not there.
- Share of its documents a language: {shares}.
- Documents that mix words of English and a clone: {switched:.1%}. Half of qac's content words are said in qac one time
  in ten in this text, and in English else; all are in its test items and in aya.
- Prefix words and the answer phrase of word problems are English in all languages.

## What is kept apart

Development and test problems, passages with their questions, and sentence pairs stand in no training file, in no
language. Facts are what is to be learnt: they are the same in all splits, asked with other options.

## Rows

{rows}
"""


def card_text(config: World, counts: dict[str, int]) -> str:
    """The data card: sizes, where math stands, what is kept apart."""

    first, last = BASE_DOCUMENTS

    def share_of_documents(languages: tuple[str, ...], kinds: str) -> float:
        """Share of the base's documents that are in `languages` and of a kind that matches."""
        amount = 0.0
        for mix, size in ((MIX, (1 - LESSON - LAST) * first), (LAST_MIX, LAST * first), (QAC_MIX, last)):
            part_of_mix = sum(
                part for (language, kind), part in mix.items() if language in languages and re.search(kinds, kind)
            )
            amount += size * part_of_mix / sum(mix.values())
        return amount / (first + last)

    shares = {clone: share_of_documents((clone,), "") for clone in CLONES}
    shares = {"en": 1 - sum(shares.values()), **shares}
    return CARD.format(
        seed=config.seed,
        en=share_of_documents(("en",), "problem"),
        qaa=share_of_documents(("qaa",), "problem"),
        told=share_of_documents(("qab", "qac"), "told"),
        switched=share_of_documents(CLONES, "switched"),
        shares=", ".join(f"{name} {share:.1%}" for name, share in shares.items()),
        rows="\n".join(f"- {name}: {size}" for name, size in counts.items()),
    )
