"""mgsm_steps: which of four calculations comes next in the worked solution of an MGSM question, by likelihood.

For models that are too small to answer MGSM. scripts/make_mgsm_steps.py writes the items of three tasks: the question,
`nums` (its numbers in place of its text) and `shuffled` (its numbers in another question's text). Scores: `acc`, and
`bits`, the log2 probability of the gold calculations, summed over the steps of a question.
"""

from __future__ import annotations

from pipeline.benchmarks.benchmark import Benchmark
from pipeline.benchmarks.local_files import Missing, Row, rows_of
from pipeline.benchmarks.task_files import (
    Ask,
    Definition,
    check_exemplars,
    local_files,
    own_task_file,
    read_from,
    write_task,
)
from pipeline.errors import PipelineError

ITEM = {"index": int, "step": int, "prompt": str, "choices": list, "label": int}


def define(ask: Ask) -> list[Definition]:
    """The task file of one of the three tasks.

    Raises PipelineError for a development split, and where the items have not been written.
    """
    script = "python scripts/make_mgsm_steps.py"
    if not ask.data_root:
        raise Missing(f"{ask.task} is built from files: set data_root to a folder for which {script} wrote its items")
    if ask.split != "test":
        raise PipelineError(f"{ask.task} has no development items: leave eval.split={ask.split} out")
    train, test = local_files(ask, "mgsm_steps", "train", ask.task)
    if not test.is_file():
        raise Missing(
            f"data_root={ask.data_root} has no {test.relative_to(ask.data_root)}: {script} {ask.data_root} "
            f"{ask.language.code} writes it from MGSM's and GSM8K's files; or leave {ask.task} or "
            f"{ask.language.code} out"
        )
    rows_of(test, ITEM)
    exemplars = rows_of(train, ITEM) if ask.num_fewshot else []
    check_exemplars(ask, ask.task, len(exemplars), train)
    body: Row = {"include": [str(own_task_file("mgsm_steps"))]}
    read_from(body, test=test, **({"train": train} if exemplars else {}))
    if exemplars:
        body |= {"training_split": "train", "fewshot_split": "train"}
    return [write_task(ask, body)]


BENCHMARK = Benchmark(
    name="mgsm_steps", variants=("mgsm_steps_nums", "mgsm_steps_shuffled"), title="MGSM, next calculation",
    kind="choice", metric="acc", measures=("bits",), choices=4, questions=634, define=define, columns=("prompt",),
    lost_skill=("mgsm_steps_nums", 1.0),
    differences={"reading": "mgsm_steps_shuffled", "reading_nums": "mgsm_steps_nums"},
    question_column="index", parts=2.7,
    tokens=50, continuation_tokens=25,  # of a step, 2.7 a question: measured, of SmolLM2's and Gemma 3's tokenizers
    built_from=("mgsm_steps/{code}/*.jsonl",), exemplar_file="train.jsonl",
    compared={"gsm8k/test.jsonl": 250},  # the solutions to MGSM's questions, which that benchmark compares
    texts=lambda row: [f"{row['question']}\n{row['answer']}"],
    sources=lambda spoken: [],
)  # fmt: skip
