"""Readers of the logs that stage=compare compares.

Files come from other machines and are untrusted. Each format is a module with a `Reader`. A new
format is a new module, listed in READERS.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.extras import logs_of_lm_eval, logs_of_runs
from pipeline.extras.log import Log, Reader, as_one_sentence

READERS: tuple[Reader, ...] = (logs_of_runs.READER, logs_of_lm_eval.READER)
EXPECTED = (
    "results_*.json with samples_*.jsonl of lm_eval 0.4.8 or later, or runs of stage=eval, such as"
    " runs/eval-..."
)

Logs = dict[tuple[str, str], Log]  # a model's logs by task and filter


def read_models(entries: Sequence[str]) -> dict[str, Logs]:
    """Return the logs of the models in these folders and files, by the models' titles.

    Raises:
        PipelineError: a log cannot be read, there are fewer than two models, or a model ran a task
            twice.
    """
    models: dict[tuple[str, str], Logs] = {}
    for entry in entries:
        for log in read_entry(Path(entry)):
            logs = models.setdefault((os.path.realpath(entry), log.model), {})
            other = logs.setdefault((log.task, log.filter), log)
            if other is not log:
                raise PipelineError(
                    f"results={entry} holds {log.task} of {log.model} twice, in {other.file.name}"
                    f" and {log.file.name}. Name only the file to compare."
                )
    counts = Counter(model for _, model in models)
    shared = os.path.commonpath([entry for entry, _ in models])
    titled = {}
    for (entry, model), logs in models.items():
        title = model
        if counts[model] > 1:
            title = f"{model} ({os.path.relpath(entry, shared)})"
        titled[title] = logs
    if len(titled) < 2:
        raise PipelineError(
            f"results holds one model, {next(iter(titled))}. Name the folders or files of two or"
            " more models."
        )
    return titled


def read_entry(path: Path) -> list[Log]:
    """Return the logs of a file, or of all files below a folder.

    Raises:
        PipelineError: there are none.
    """
    if path.suffix == ".jsonl":
        raise PipelineError(
            f"results={path} is a samples file. Give the results_*.json next to it, or its folder."
        )
    if path.suffix == ".eval":
        raise PipelineError(
            f"{path} is a log of inspect_ai, which is not read since 0.2.0. Give {EXPECTED}."
        )
    logs: list[Log] = []
    for file in log_files(path):
        with as_one_sentence(file):
            content = json.loads(file.read_bytes().decode(errors="replace"))
            if not isinstance(content, dict):
                continue
            for reader in READERS:
                if reader.recognizes(file, content):
                    logs += reader.read(file, without_surrogates(content))
                    break
    if not logs:
        problem = "holds no log" if path.exists() else "does not exist"
        raise PipelineError(f"results={path} {problem}. Give {EXPECTED}.")
    return logs


def log_files(path: Path) -> list[Path]:
    """Return the JSON files of an entry, without hidden files such as macOS' ._results.

    Hidden folders may hold logs.
    """
    if path.is_file():
        return [path]
    found = []
    for file in sorted(path.rglob("*.json")):
        if file.is_file() and not file.name.startswith("."):
            found.append(file)
    return found


def without_surrogates(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace unpaired surrogates, which UTF-8 cannot write, by question marks."""
    text = json.dumps(content, ensure_ascii=False)
    cleaned: dict[str, Any] = json.loads(text.encode(errors="replace"))
    return cleaned
