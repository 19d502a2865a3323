"""held_out: the log2 probability of text that a data run held out (data.validation), such as a language's.

Shows whether a model knows a language better than its base does, before and after a merge. data_root is that data run,
or a folder with a validation.jsonl of prompt and completion, or of text.
"""

from __future__ import annotations

from pipeline.benchmarks.benchmark import Benchmark
from pipeline.benchmarks.local_files import Missing, Row, rows_of, write_rows
from pipeline.benchmarks.task_files import Ask, Definition, own_task_file, read_from, write_task
from pipeline.errors import PipelineError

FILE = "validation.jsonl"


def define(ask: Ask) -> list[Definition]:
    """The task file and its items. Raises PipelineError for exemplars, and where no text was held out."""
    if ask.num_fewshot or ask.split != "test":
        raise PipelineError(
            f"held_out has neither exemplars nor development items: num_fewshot=0 and eval.split=test, not "
            f"{ask.num_fewshot} and {ask.split}"
        )
    file = ask.data_root / FILE if ask.data_root else None
    if file is None or not file.is_file():
        raise Missing(
            f"held_out scores {FILE} of a data run: set data_root to one with data.validation, not {ask.data_root}"
        )
    rows = rows_of(file, {}, optional={"prompt": str, "completion": str, "text": str})
    items = write_rows(ask.folder / f"{ask.task}.{ask.language.code}.jsonl", map(build_item, rows))
    body: Row = {"include": [str(own_task_file("held_out"))]}
    read_from(body, test=items)
    return [write_task(ask, body)]


def build_item(row: Row) -> Row:
    """Prompt and completion, joined by a line feed as trainings join them by default. Plain text has no prompt."""
    if "text" in row:
        return {"prompt": "", "completion": row["text"]}
    return {"prompt": row["prompt"], "completion": ("\n" if row["prompt"] else "") + row["completion"]}


BENCHMARK = Benchmark(
    name="held_out", title="Held-out text", kind="text", metric="bits", measures=("bits",), questions=64, tokens=60,
    define=define, built_from=(FILE,),
    texts=lambda row: [],  # data runs hold out rows of their own
    sources=lambda spoken: [],
)  # fmt: skip
