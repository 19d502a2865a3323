"""Belebele (Bandarkar et al. 2024): four-way reading comprehension on passages of FLORES, 900 questions a language."""

from __future__ import annotations

from pipeline.benchmarks.benchmark import Benchmark, on_hub
from pipeline.benchmarks.local_files import Row, rows_of
from pipeline.benchmarks.task_files import (
    Ask,
    Definition,
    by_text,
    check_exemplars,
    local_files,
    read_from,
    stock_file,
    write_task,
)

COLUMNS = ("flores_passage", "question", *(f"mc_answer{number}" for number in range(1, 5)))


def define(ask: Ask) -> list[Definition]:
    code = "eng_Latn" if ask.language.constructed else ask.language.flores
    included = stock_file(ask, f"belebele/belebele_{code}.yaml", "belebele/belebele_eng_Latn.yaml")
    body: Row = {"include": [str(included), *by_text(ask)]}
    if ask.data_root:
        (test,) = local_files(ask, "belebele", ask.split)
        rows = rows_of(test, dict.fromkeys(COLUMNS, str), {"correct_answer_num": ("1", "2", "3", "4")})
        check_exemplars(ask, "belebele", len(rows) - 1, test)  # one question at least is to be left
        read_from(body, test=test)
    return [write_task(ask, body, first=ask.num_fewshot)]


BENCHMARK = Benchmark(
    name="belebele", title="Belebele", kind="choice", metric="acc", choices=4, letters=True, columns=COLUMNS,
    passage="flores_passage", questions=900, tokens=160, define=define,
    texts=lambda row: [row["flores_passage"], "\n".join(row[column] for column in COLUMNS[1:])],
    sources=lambda spoken: [on_hub("facebook/belebele", spoken.flores)],
)  # fmt: skip
