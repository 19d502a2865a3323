"""Runs of stage=eval as logs: scores.json and samples/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.evaluate.records import read_scores
from pipeline.extras.log import Answer, Log, log_of
from pipeline.report.load.answers import sample_files

FACTS = ("packages", "versions", "task_hashes", "found_again")  # of scores.json, no settings


def read_run(path: Path, __: Mapping[str, Any]) -> Iterator[Log]:
    """Yield the logs of the run that a scores.json belongs to, by task and language."""
    if path.name != "scores.json":
        return
    rows, harness = read_scores(path)
    settings = {name: value for name, value in harness.items() if name not in FACTS}
    for (_, task, where), samples in sample_files(path.parent):
        printed = {}
        shots = None
        for row in rows:
            if (row.task, row.where, row.subject) == (task, where, None):
                printed[row.metric] = row.value
                shots = row.num_fewshot
        answers = []
        for sample in samples:
            document = f"{sample['doc_id']} {sample['target']}"
            answers.append(Answer(document, sample["prompt"], sample["scores"]))
        of_task = settings | {"num_fewshot": shots}
        yield log_of(f"{task} {where}", path, of_task, answers, printed)
