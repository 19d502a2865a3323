"""MBPP (Austin et al. 2021): short Python programs, run against three tests each, without exemplars.

The task file is ours, as the stock one asks the Hub for a metric when it is read; its prompt is kept.
"""

from __future__ import annotations

from pipeline.benchmarks.benchmark import Benchmark, on_hub
from pipeline.benchmarks.local_files import Missing, Row, rows_of
from pipeline.benchmarks.task_files import (
    Ask,
    Definition,
    generation_kwargs,
    local_files,
    own_task_file,
    read_from,
    write_task,
)
from pipeline.errors import PipelineError


def define(ask: Ask) -> list[Definition]:
    if ask.num_fewshot:
        raise PipelineError(f"mbpp is asked without exemplars: num_fewshot=0, not {ask.num_fewshot}")
    if not ask.run_code:
        raise Missing("mbpp runs the programs that a model writes: allow it with eval.run_code=true, or leave mbpp out")
    body: Row = {"include": [str(own_task_file("mbpp"))]}
    if ask.data_root:
        (test,) = local_files(ask, "mbpp", ask.split)
        for number, row in enumerate(rows_of(test, {"text": str, "test_list": list}), start=1):
            if len(row["test_list"]) < 3 or not all(isinstance(text, str) for text in row["test_list"]):
                raise PipelineError(f"{test}, row {number}: test_list must hold three tests, as the prompt shows three")
        read_from(body, test=test)
    elif ask.language.code != "en":
        raise Missing(
            f"mbpp has no translation into {ask.language.name} on the Hub: set data_root to a folder with "
            f"mbpp/{ask.language.code}/test.jsonl"
        )
    return [write_task(ask, body | generation_kwargs(ask, own_task_file("mbpp")))]


BENCHMARK = Benchmark(
    name="mbpp", title="MBPP", kind="program", metric="pass_at_1", filter="tests", questions=500, tokens=45,
    define=define,
    texts=lambda row: [row.get("text") or row.get("prompt") or "", row["code"]],
    sources=lambda spoken: [on_hub("google-research-datasets/mbpp", "full")],  # one set, whatever the language
)  # fmt: skip
