"""Reads the logs that stage=compare compares. The files come from other machines and are untrusted.

Each format is one file with a `Reader`. Another format is another file, listed in READERS.
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

Logs = dict[tuple[str, str], Log]  # the logs of a model, by task and filter


def read_models(entries: Sequence[str]) -> dict[str, Logs]:
    """Return the logs of the models in these folders and files, by the models' titles.

    Raises PipelineError for logs that cannot be read, for fewer than two models, and for a task
    that a model ran twice.
    """
    models: dict[tuple[str, str], Logs] = {}
    for entry in entries:
        for log in read_entry(Path(entry)):
            logs = models.setdefault((os.path.realpath(entry), log.model), {})
            other = logs.setdefault((log.task, log.filter), log)
            if other is not log:
                raise PipelineError(
                    f"results={entry} holds {log.task} of {log.model} twice, in {other.file.name}"
                    f" and {log.file.name}: name one of these files instead"
                )
    counts = Counter(model for _, model in models)
    shared = os.path.commonpath([entry for entry, _ in models])
    titled = {}
    for (entry, model), logs in models.items():
        if counts[model] > 1:
            title = f"{model} ({os.path.relpath(entry, shared)})"
        else:
            title = model
        titled[title] = logs
    if len(titled) < 2:
        raise PipelineError(
            f"results holds one model, {next(iter(titled))}: name the folders or files of two or"
            " more"
        )
    return titled


def read_entry(path: Path) -> list[Log]:
    """Return the logs of a file, or of all files below a folder.

    Raises PipelineError if there are none.
    """
    if path.suffix == ".jsonl":
        raise PipelineError(
            f"results={path} is a samples file: give the results_*.json next to it, or its folder"
        )
    if path.suffix == ".eval":
        raise PipelineError(
            f"{path} is a log of inspect_ai, which is not read since 0.2.0: give {EXPECTED}"
        )
    logs: list[Log] = []
    for file in log_files(path):
        with as_one_sentence(file):
            content = json.loads(file.read_bytes().decode(errors="replace"))
            for reader in READERS:
                if isinstance(content, dict) and reader.recognizes(file, content):
                    logs += reader.read(file, without_surrogates(content))
                    break
    if not logs:
        problem = "does not exist"
        if path.exists():
            problem = "holds no log"
        raise PipelineError(f"results={path} {problem}: give {EXPECTED}")
    return logs


def log_files(path: Path) -> list[Path]:
    """Return the JSON files of an entry, without hidden ones such as macOS' ._results.

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
    """Return JSON content in which unpaired surrogates, which UTF-8 cannot write, are question
    marks.
    """
    cleaned: dict[str, Any] = json.loads(
        json.dumps(content, ensure_ascii=False).encode(errors="replace")
    )
    return cleaned
