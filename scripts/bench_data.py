"""How fast a training set is drawn on one core, and in how much memory: results/bench/data.json.

    python scripts/bench_data.py [--rows 60000] [--memory-rows 10000000] [--out results/bench/data.json]

Speed: rows of 150 words median, a twentieth of them duplicates and a hundredth with an item of a benchmark in it, read
from JSONL, deduplicated, compared with the texts of all benchmarks, searched for word problems, sampled and written.
The benchmarks are made up, as many and as long as the real ones in ten languages; their n-grams are made before the
clock starts (and timed apart). Memory: the peak of a process that draws from rows of a few words, so many of them.
Each measurement is a process of its own on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BENCHMARKS = {  # name -> (items a language, words of an item's text)
    "mgsm": (250, 46), "belebele": (900, 85), "flores": (2009, 21), "global_mmlu": (14042, 45), "mbpp": (974, 16),
}  # fmt: skip
LANGUAGES = 10
MEDIAN_WORDS, SPREAD = 150, 0.6  # of a log-normal distribution


def vocabulary(draw: random.Random, size: int = 30_000) -> list[str]:
    """Words of two to nine letters, every thirtieth a number."""
    words = ["".join(draw.choices("aeioubdfghklmnprstwy", k=draw.randint(2, 9))) for _ in range(size)]
    return [str(draw.randint(0, 999)) if index % 30 == 0 else word for index, word in enumerate(words)]


def item(name: str, text: str) -> dict[str, Any]:
    """A row of a benchmark in the Hub's columns."""
    if name == "flores":
        return {"id": 0, "sentence": text}
    options = {f"mc_answer{n}": "jibu" for n in range(1, 5)} | {f"option_{letter}": letter for letter in "abcd"}
    return {"flores_passage": text, "question": text, "text": text, "code": "def f(): ...", **options}


def write_benchmarks(root: Path, words: list[str], draw: random.Random) -> list[str]:
    """Files as below a data_root. Gives some of the texts."""
    kept = []
    for name, (items, length) in BENCHMARKS.items():
        for language in range(1 if name == "mbpp" else LANGUAGES):
            path = root / name / f"l{language}" / "test.jsonl"
            path.parent.mkdir(parents=True)
            texts = [" ".join(draw.choices(words, k=length)) for _ in range(items)]
            path.write_text("".join(json.dumps(item(name, text)) + "\n" for text in texts))
            kept += texts[:50]
    return kept


def write_rows(path: Path, words: list[str], rows: int, median: float, leaked: list[str], draw: random.Random) -> float:
    """Prompts and completions as JSONL. Gives the megabytes of their text."""
    recent: list[str] = []
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            text = " ".join(draw.choices(words, k=max(2, round(draw.lognormvariate(0, SPREAD) * median))))
            chance = draw.random()
            if chance < 0.05 and recent:
                text = draw.choice(recent)
            elif chance < 0.06 and leaked:
                text = f"{text} {draw.choice(leaked)}"
            recent = [*recent[-500:], text] if len(recent) < 500 or chance < 0.1 else recent
            middle = text.find(" ", len(text) // 3)
            prompt, completion = text[:middle], text[middle + 1 :]
            size += len(prompt) + len(completion)
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    return size / 1e6


def measure(root: Path, sample: int) -> dict[str, Any]:
    """In this process: draw `sample` rows from root/rows.jsonl."""
    from pipeline.config.data import Data, Expert, Source
    from pipeline.config.stages import DataStage
    from pipeline.data import benchmarks
    from pipeline.data.stage import make_training_set

    begun = time.perf_counter()
    known = benchmarks.benchmark_ngrams(13, root, None)
    prepared = time.perf_counter() - begun
    benchmarks.benchmark_ngrams = lambda *_: known
    sources = {"rows": Source(file="rows.jsonl", rows="pairs", language="sw")}
    config = DataStage(
        stage="data", expert=Expert("bench", "language", sources), data=Data(size=sample, validation=100)
    )
    begun, used = time.perf_counter(), time.process_time()
    counts = make_training_set(config, root, root)
    return {
        "seconds": round(time.perf_counter() - begun, 2),
        "core_seconds": round(time.process_time() - used, 2),
        "benchmark_seconds": round(prepared, 2),
        "benchmark_ngrams": len(known.ngrams),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "counts": counts["rows"] | {"train": counts["train"]},
    }


def in_process(root: Path, sample: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", str(root), "--sample", str(sample)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--memory-rows", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=Path("results/bench/data.json"))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sample", type=int, default=40_000, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        found = measure(asked.measure, asked.sample)
        print(json.dumps(found))
        return 0
    from pipeline.runs.provenance import machine_facts, package_versions

    draw = random.Random(0)
    words = vocabulary(draw)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        leaked = write_benchmarks(root, words, draw)
        megabytes = write_rows(root / "rows.jsonl", words, asked.rows, MEDIAN_WORDS, leaked, draw)
        speed = in_process(root, min(40_000, asked.rows // 2))
        speed |= {"rows": asked.rows, "megabytes": round(megabytes, 1)}
        speed["megabytes_per_core_second"] = round(megabytes / speed["core_seconds"], 2)
        write_rows(root / "rows.jsonl", words, asked.memory_rows, 8, leaked, draw)
        memory = in_process(root, min(40_000, asked.memory_rows // 2)) | {"rows": asked.memory_rows}
    record = {
        "what": "drawing a training set: read, deduplicate, decontaminate, sample, write; one thread",
        "speed": speed,
        "memory": memory,
        "machine": machine_facts(),
        "versions": {name: package_versions()[name] for name in ("python", "numpy", "datasets")},
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{speed['megabytes_per_core_second']} MB a second a core (at least 6); {memory['peak_memory_mb']} MB of "
        f"memory at {asked.memory_rows:,} rows (under 2,000); {asked.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
