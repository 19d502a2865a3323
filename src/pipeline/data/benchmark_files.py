"""Where the benchmarks lie below a data_root: the one list, for what is scored and for what rows are compared with.

mgsm/sw/test.jsonl, and so belebele, global_mmlu and mbpp; flores/sw/devtest.jsonl, or FLORES as plain text:
flores/sw/devtest.txt, or the release's flores/devtest/swh_Latn.devtest.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.languages import Language

BENCHMARKS = ("mgsm", "belebele", "flores", "global_mmlu", "mbpp")
EXEMPLARS = {"mgsm": "train.jsonl", "global_mmlu": "dev.jsonl"}  # shown in prompts, never scored
FLORES_TEXT = ("*/dev.txt", "*/devtest.txt", "dev/*.dev", "devtest/*.devtest")


def place(data_root: Path, benchmark: str, spoken: Language, split: str) -> Path:
    return data_root / benchmark / spoken.code / f"{split}.jsonl"


def flores_text(data_root: Path, spoken: Language, split: str) -> list[Path]:
    """Where FLORES is looked for as plain text, a sentence a line."""
    beside = place(data_root, "flores", spoken, split).with_suffix(".txt")
    return [beside, data_root / "flores" / split / f"{spoken.flores}.{split}"]


def files(data_root: Path, benchmark: str, code: str = "*") -> list[Path]:
    """The files of a benchmark that are there, in one language or in all (of FLORES as plain text always in all)."""
    found = set(data_root.glob(f"{benchmark}/{code}/*.jsonl"))
    if benchmark == "flores":
        found |= {path for pattern in FLORES_TEXT for path in data_root.glob(f"flores/{pattern}")}
    return sorted(found)


def scored(data_root: Path) -> dict[str, list[Path]]:
    """All files of each benchmark, exemplars aside."""
    return {name: [path for path in files(data_root, name) if path.name != EXEMPLARS.get(name)] for name in BENCHMARKS}
