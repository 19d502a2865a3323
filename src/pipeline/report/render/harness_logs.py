"""An evaluation as `lm_eval --log_samples` writes one: results_TIME.json, and samples_TASK_TIME.jsonl next to it.

A task is named TASK_LANGUAGE. Documents are not stored: `doc` has the prompt, and doc_hash is of the prompt's hash, so
that answers to the same prompt are compared.
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


def write_harness_logs(run: Path, folder: Path, model: str) -> Path:
    """Write the scores and answers of an evaluation's folder into another one. model: the name that the log records.

    Raises:
        PipelineError: it is no finished evaluation.
    """
    manifest = read_manifest(run)
    if manifest is None or not (run / "scores.json").is_file():
        raise PipelineError(f"{run.name} is no finished evaluation: name a run of stage=eval")
    rows, harness = read_scores(run / "scores.json")
    time = manifest.started[:19].replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    scores, counts = {}, {}
    for (_, task, where), samples in sample_files(run):
        name = f"{task}_{where}"
        scores[name] = [row for row in rows if (row.task, row.where, row.subject) == (task, where, None)]
        counts[name] = len(samples)
        write_rows(folder / f"samples_{name}_{time}.jsonl", list(map(sample_row, samples)))
    shots = {name: row.num_fewshot for name, task_rows in scores.items() for row in task_rows}
    content = {
        "results": {name: {"alias": name} | dict(results_of(task_rows)) for name, task_rows in scores.items()},
        "configs": {name: {"task": name, "num_fewshot": shots.get(name)} for name in scores},
        "versions": dict.fromkeys(scores, manifest.decided_by.get("version")),
        "n-shot": {name: shots.get(name) for name in scores},
        "n-samples": {name: {"original": count, "effective": count} for name, count in counts.items()},
        "model_name": model, "date": manifest.started, "lm_eval_version": manifest.versions.get("lm-eval"),
        "config": {"model": "hf", "model_args": {"pretrained": model, "dtype": harness.get("dtype")}},
    }  # fmt: skip
    path = folder / f"results_{time}.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def results_of(rows: list[ScoreRow]) -> Iterator[tuple[str, float | None]]:
    """The entries of `results`: metric,filter and metric_stderr,filter, fractions as the harness has them."""
    for row in rows:
        yield f"{row.metric},{row.filter}", row.value
        yield f"{row.metric}_stderr,{row.filter}", row.stderr


def sample_row(sample: Sample) -> dict[str, Any]:
    """A line of a samples file; of a choice all options with their log-likelihoods."""
    prompt, options = sample["prompt"], sample.get("loglikelihoods")
    texts = [*(options or [""])]
    return {
        "doc_id": sample["doc_id"], "doc": {"prompt": prompt}, "target": sample["target"],
        "arguments": {f"gen_args_{at}": {"arg_0": prompt, "arg_1": text} for at, text in enumerate(texts)},
        "resps": [[[value, False]] for value in options.values()] if options else [[sample["response"]]],
        "filtered_resps": [[value, False] for value in options.values()] if options else [sample["extracted"]],
        "filter": sample["filter"], "metrics": [*sample["scores"]], **sample["scores"],
        "doc_hash": digest(f"{sample['doc_id']} {prompt}"), "prompt_hash": digest(prompt),
        "target_hash": digest(str(sample["target"])),
    }  # fmt: skip


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
