"""Stage compare: the report page of logs of lm_eval or evaluations of this program, for two models
or more.
"""

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
    """The report page of what `lm_eval --log_samples` wrote, or stage=eval, for two models or
    more.
    """

    results: list[str] = (
        knob()
    )  # folders or files of lm_eval, or evaluations of runs_dir, the baseline first

    def answer(self) -> Path:
        """Write the page of the comparison to runs_dir/reports, and its verdict to standard error.

        Returns its path.
        """
        from pipeline.extras.compare_logs import compare_logs
        from pipeline.report.compare import headline_sentences
        from pipeline.report.write import write_report

        entries = list(map(self.folder_of, self.results))
        digits = hashlib.sha256(
            "\n".join(str(Path(entry).resolve()) for entry in entries).encode()
        ).hexdigest()[:8]
        name = f"compare-{digits}"
        command = shlex.join(
            ["python", "-m", "pipeline", "stage=compare", f"results=[{','.join(entries)}]"]
        )
        results = compare_logs(entries, name, command)
        page = write_report(results, Path(self.runs_dir) / "reports" / name)
        for sentence in [*headline_sentences(results.contrasts, results.primary), results.note]:
            say(sentence)
        return page

    def folder_of(self, entry: str) -> str:
        """Return the folder of a finished run that an entry names, or the entry, a file or a
        folder.
        """
        runs_dir = Path(self.runs_dir)
        if Path(entry).exists() or not finished_names(runs_dir, entry):
            return entry
        return str(find_run(entry, runs_dir, "results").folder)
