"""XCOPA (Ponti et al. 2020): which of two sentences is the cause or the effect of a premise.

All that adding it takes, but for its option in conf/eval/.
"""

from pipeline.benchmarks.benchmark import Ask, Benchmark, TaskSpec, on_hub
from pipeline.benchmarks.local_files import Row, path_of_split, rows_of
from pipeline.benchmarks.task_files import (
    read_from,
    stock_file,
    write_task,
)

COLUMNS = ("premise", "choice1", "choice2")


def define(ask: Ask) -> list[TaskSpec]:
    body: Row = {"include": [str(stock_file(ask, f"xcopa/default_{ask.language.stock}.yaml"))]}
    if ask.data_root:
        test = path_of_split(ask.data_root, "xcopa", ask.language, ask.split)
        rows_of(
            test,
            {**dict.fromkeys(COLUMNS, str), "question": ("cause", "effect"), "label": (0, 1)},
        )
        read_from(body, test=test)
        body["validation_split"] = None
    return [write_task(ask, body)]


BENCHMARK = Benchmark(
    name="xcopa",
    kind="choice",
    metric="acc",
    choices=2,
    questions=500,
    tokens=30,
    define=define,
    texts=lambda row: ["\n".join(row[column] for column in COLUMNS)],
    sources=lambda spoken: (
        [on_hub("cambridgeltl/xcopa", spoken.code)] if spoken.code == "sw" else []
    ),
)
