"""Global MMLU (Singh et al. 2024): four-way questions of 57 subjects, each with five exemplars of its own."""

from __future__ import annotations

from collections import Counter

from pipeline.benchmarks.benchmark import Benchmark, on_hub
from pipeline.benchmarks.local_files import Row, rows_of
from pipeline.benchmarks.task_files import (
    Ask,
    Definition,
    by_text,
    check_exemplars,
    local_files,
    own_task_file,
    read_from,
    stock_file,
    write_task,
)

COLUMNS = ("question", "option_a", "option_b", "option_c", "option_d")


def define(ask: Ask) -> list[Definition]:
    code = ask.language.global_mmlu or ask.language.stock
    included = stock_file(
        ask, f"global_mmlu/full/{code}/_{code}_template_yaml", "global_mmlu/full/en/_en_template_yaml"
    )
    body: Row = {"include": [str(included), str(own_task_file("global_mmlu")), *by_text(ask)]}
    if ask.data_root:
        dev, test = local_files(ask, "global_mmlu", "dev", "test" if ask.split == "test" else "development")
        columns: dict[str, type] = dict.fromkeys(("subject", *COLUMNS), str)
        rows, exemplars = (rows_of(file, columns, {"answer": ("A", "B", "C", "D")}) for file in (test, dev))
        shots = Counter(row["subject"] for row in exemplars)
        for subject in dict.fromkeys(row["subject"] for row in rows):
            check_exemplars(ask, f"global_mmlu, {subject}", shots[subject], dev)
        read_from(body, dev=dev, test=test)
    return [write_task(ask, body)]


BENCHMARK = Benchmark(
    name="global_mmlu", title="Global MMLU", kind="choice", metric="acc", choices=4, letters=True, columns=COLUMNS,
    group="subject", questions=14042, tokens=105, exemplar_sets=57, exemplar_file="dev.jsonl",
    define=define,
    texts=lambda row: ["\n".join(row[column] for column in COLUMNS)],
    sources=lambda spoken: [] if spoken.code == "th" else [on_hub("CohereLabs/Global-MMLU", spoken.code)],  # no Thai
)  # fmt: skip
