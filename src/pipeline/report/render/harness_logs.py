"""An evaluation as `lm_eval --log_samples` writes one: results_TIME.json, and
samples_TASK_TIME.jsonl next to it.

A task is named TASK_LANGUAGE. Documents are not stored: `doc` has the prompt, and doc_hash is of
the prompt's hash, so that answers to the same prompt are compared.
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
    """Write the scores and answers of an evaluation's folder into another one.

    model: the name that the log records.

    Raises:
        PipelineError: it is no finished evaluation.
    """
    manifest = read_manifest(run)
    if manifest is None or not (run / "scores.json").is_file():
        raise PipelineError(f"{run.name} is no finished evaluation: name a run of stage=eval")
    rows, harness = read_scores(run / "scores.json")
    time = manifest.started[:19].replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        **{key: {} for key in ("results", "configs", "versions", "n-shot", "n-samples")},
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
        shots = next((row.num_fewshot for row in of_task), None)
        content["results"][name] = {"alias": name} | dict(results_of(of_task))
        content["configs"][name] = {"task": name, "num_fewshot": shots}
        content["versions"][name] = manifest.decided_by.get("version")
        content["n-shot"][name] = shots
        content["n-samples"][name] = {"original": len(samples), "effective": len(samples)}
        write_rows(folder / f"samples_{name}_{time}.jsonl", list(map(sample_row, samples)))
    path = folder / f"results_{time}.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def results_of(rows: list[ScoreRow]) -> Iterator[tuple[str, float | None]]:
    """Return the entries of `results`: metric,filter and metric_stderr,filter, fractions as the
    harness has them.
    """
    for row in rows:
        yield f"{row.metric},{row.filter}", row.value
        yield f"{row.metric}_stderr,{row.filter}", row.stderr


def sample_row(sample: Sample) -> dict[str, Any]:
    """Return a line of a samples file; of a choice all options with their log-likelihoods."""
    prompt, options = sample["prompt"], sample.get("loglikelihoods")
    texts = [*(options or [""])]
    return {
        "doc_id": sample["doc_id"],
        "doc": {"prompt": prompt},
        "target": sample["target"],
        "arguments": {
            f"gen_args_{at}": {"arg_0": prompt, "arg_1": text} for at, text in enumerate(texts)
        },
        "resps": (
            [[[value, False]] for value in options.values()] if options else [[sample["response"]]]
        ),
        "filtered_resps": (
            [[value, False] for value in options.values()] if options else [sample["extracted"]]
        ),
        "filter": sample["filter"],
        "metrics": [*sample["scores"]],
        **sample["scores"],
        "doc_hash": digest(f"{sample['doc_id']} {prompt}"),
        "prompt_hash": digest(prompt),
        "target_hash": digest(str(sample["target"])),
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
