"""Whether a number is even or odd: parity/<language>/test.jsonl, with rows {"number".

3, "label": 1}.
"""

from pipeline.benchmarks.benchmark import Benchmark
from pipeline.benchmarks.local_files import rows_of
from pipeline.benchmarks.task_files import local_files, read_from, write_task


def define(ask):
    (test,) = local_files(ask, "parity", ask.split)
    rows_of(test, {"number": int, "label": (0, 1)})
    body = {
        "include": [],
        "output_type": "multiple_choice",
        "metric_list": [{"metric": "acc"}],
        "test_split": "test",
    }
    body |= {
        "doc_to_text": "{{number}} is",
        "doc_to_choice": ["even", "odd"],
        "doc_to_target": "label",
    }
    read_from(body, test=test)
    return [write_task(ask, body)]


BENCHMARK = Benchmark(
    "parity", "Parity", "choice", "acc", define, lambda row: [], lambda code: [], 100, 5, choices=2
)
