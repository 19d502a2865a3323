"""The stage compare: two or more models on the same questions, from logs or evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.knob import knob
from pipeline.config.stages import Stage
from pipeline.errors import PipelineError, first_line
from pipeline.extras.log import Log
from pipeline.extras.logs_of_lm_eval import read_harness_logs
from pipeline.extras.logs_of_runs import read_run
from pipeline.files import write_atomically
from pipeline.progress import say
from pipeline.runs.find import find_run

# the formats; each reader returns the logs of a JSON file, or none if the file has another format
READERS: tuple[Callable[[Path, Mapping[str, Any]], Iterable[Log]], ...] = (
    read_run,
    read_harness_logs,
)
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError)


@dataclass
class CompareStage(Stage):
    """Compares two or more models on the same questions.

    It reads logs that `lm_eval --log_samples` wrote, and runs of stage=eval.
    """

    # folders or files of lm_eval, or evaluations of runs_dir, the baseline first
    results: list[str] = knob()

    def answer(self) -> str:
        """Return the comparisons as text, and write them to runs_dir/reports/compare.csv."""
        from pipeline.extras.compare_logs import compare_logs, comparison_text
        from pipeline.report.render.sheets import lines_csv

        models = {entry: read_logs(self.folder_of(entry)) for entry in self.results}
        if len(models) < 2:
            raise PipelineError(
                f"results=[{','.join(self.results)}] names one model. Name the folders or files of"
                " two or more models."
            )
        lines, notes = compare_logs(models)
        for note in notes:
            say(note)
        file = self.runs_path / "reports" / "compare.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lines_csv(lines))
        say(f"Written to {file}.")
        return comparison_text(lines)

    def folder_of(self, entry: str) -> Path:
        """Return the entry as a path, or else the folder of the finished run that it names."""
        if Path(entry).exists():
            return Path(entry)
        return find_run(entry, self.runs_path, "results").folder


def read_logs(path: Path) -> dict[str, Log]:
    """Return the logs of a file, or of all files below a folder, by task.

    Files come from other machines and are untrusted.

    Raises:
        PipelineError: there are none, one cannot be read, or a task occurs twice.
    """
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*.json")) if not file.name.startswith(".")]
    logs: dict[str, Log] = {}
    for file in files:
        for log in logs_in(file):
            other = logs.setdefault(log.task, log)
            if other is not log:
                raise PipelineError(
                    f"results={path} holds {log.task} twice, in {other.file.name} and {file.name}."
                    " Name only the file to compare."
                )
    if not logs:
        raise PipelineError(
            f"results={path} holds no log. Give results_*.json of lm_eval 0.4.8 or later, with the"
            " samples_*.jsonl of --log_samples next to it, or runs of stage=eval."
        )
    return logs


def logs_in(file: Path) -> list[Log]:
    try:
        content = json.loads(file.read_bytes().decode(errors="replace"))
        logs: list[Log] = []
        if isinstance(content, dict):
            for reader in READERS:
                logs += reader(file, content)
        return logs
    except MALFORMED as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise PipelineError(
            f"{file} cannot be read as a log ({problem}). Copy it again, score again with lm_eval"
            " 0.4.8 or later, or name other files in results."
        ) from error
