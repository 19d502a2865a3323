"""An evaluation as `lm_eval --log_samples` writes it.

The files are results_TIME.json and samples_TASK_TIME.jsonl. A task is named TASK_LANGUAGE.
Documents are not stored: `doc` has the prompt. doc_hash includes the prompt, so that only answers
to the same prompt are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.benchmarks.local_files import write_rows
from pipeline.errors import PipelineError
from pipeline.evaluate.records import Sample, ScoreRow, read_scores
from pipeline.report.load.answers import sample_files
from pipeline.runs.manifest import read_manifest

BY_TASK = ("results", "configs", "versions", "n-shot", "n-samples")  # keys of results_TIME.json


def write_harness_logs(run: Path, folder: Path, model: str) -> Path:
    """Write the scores and answers of an evaluation's folder into another one.

    Args:
        run: The folder of the evaluation.
        folder: The folder to write to.
        model: The name that the log records.

    Raises:
        PipelineError: If the run is no finished evaluation.
    """
    manifest = read_manifest(run)
    if manifest is None or not (run / "scores.json").is_file():
        raise PipelineError(f"{run.name} is no finished evaluation. Name a run of stage=eval.")
    rows, harness = read_scores(run / "scores.json")
    time = manifest.started[:19].replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        **{key: {} for key in BY_TASK},
        "model_name": model,
        "date": manifest.started,
        "lm_eval_version": manifest.versions.get("lm-eval"),
        "config": {
            "model": "hf",
            "model_args": {"pretrained": model, "dtype": harness.get("dtype")},
        },
    }
    for (_, task, where), samples in sample_files(run):
        name = f"{task}_{where}"
        of_task = []
        for row in rows:
            if (row.task, row.where, row.subject) == (task, where, None):
                of_task.append(row)
        shots = of_task[0].num_fewshot if of_task else None
        content["results"][name] = {"alias": name} | dict(results_of(of_task))
        content["configs"][name] = {"task": name, "num_fewshot": shots}
        content["versions"][name] = manifest.decided_by.get("version")
        content["n-shot"][name] = shots
        content["n-samples"][name] = {"original": len(samples), "effective": len(samples)}
        lines = [sample_row(sample) for sample in samples]
        write_rows(folder / f"samples_{name}_{time}.jsonl", lines)
    path = folder / f"results_{time}.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def results_of(rows: list[ScoreRow]) -> Iterator[tuple[str, float | None]]:
    """Yield the entries of `results`: metric,filter and metric_stderr,filter.

    Values are fractions, as in the harness.
    """
    for row in rows:
        yield f"{row.metric},{row.filter}", row.value
        yield f"{row.metric}_stderr,{row.filter}", row.stderr


def sample_row(sample: Sample) -> dict[str, Any]:
    """Return a line of a samples file; a choice has all options with their log-likelihoods."""
    prompt, options = sample["prompt"], sample.get("loglikelihoods")
    responses: list[Any]
    filtered: list[Any]
    if options:
        texts = list(options)
        filtered = [[value, False] for value in options.values()]
        responses = [[pair] for pair in filtered]
    else:
        texts = [""]
        filtered = [sample["extracted"]]
        responses = [[sample["response"]]]
    arguments = {}
    for index, text in enumerate(texts):
        arguments[f"gen_args_{index}"] = {"arg_0": prompt, "arg_1": text}
    return {
        "doc_id": sample["doc_id"],
        "doc": {"prompt": prompt},
        "target": sample["target"],
        "arguments": arguments,
        "resps": responses,
        "filtered_resps": filtered,
        "filter": sample["filter"],
        "metrics": [*sample["scores"]],
        **sample["scores"],
        "doc_hash": digest(f"{sample['doc_id']} {prompt}"),
        "prompt_hash": digest(prompt),
        "target_hash": digest(str(sample["target"])),
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
