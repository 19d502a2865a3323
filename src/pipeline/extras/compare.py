"""The stage compare: a report page of two or more models from logs of lm_eval or evaluations."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.knob import knob
from pipeline.config.stages import Stage
from pipeline.progress import say
from pipeline.runs.find import find_run
from pipeline.runs.folders import finished_names


@dataclass
class CompareStage(Stage):
    """The report page that compares two or more models.

    It reads logs that `lm_eval --log_samples` wrote, and runs of stage=eval.
    """

    # folders or files of lm_eval, or evaluations of runs_dir, the baseline first
    results: list[str] = knob()

    def answer(self) -> Path:
        """Write the page to runs_dir/reports and its verdict to standard error; return its path."""
        from pipeline.extras.compare_logs import compare_logs
        from pipeline.report.compare import headline_sentences
        from pipeline.report.write import write_report

        entries = list(map(self.folder_of, self.results))
        places = "\n".join(str(Path(entry).resolve()) for entry in entries)
        name = f"compare-{hashlib.sha256(places.encode()).hexdigest()[:8]}"
        given = f"results=[{','.join(entries)}]"
        command = shlex.join(["python", "-m", "pipeline", "stage=compare", given])
        results = compare_logs(entries, name, command)
        page = write_report(results, Path(self.runs_dir) / "reports" / name)
        for sentence in [*headline_sentences(results.contrasts, results.primary), results.note]:
            say(sentence)
        return page

    def folder_of(self, entry: str) -> str:
        """Return the folder of the finished run that an entry names, or the entry unchanged."""
        runs_dir = Path(self.runs_dir)
        if Path(entry).exists() or not finished_names(runs_dir, entry):
            return entry
        return str(find_run(entry, runs_dir, "results").folder)
