"""Stage compare: the report page of what lm_eval or inspect_ai wrote, for two models or more."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from pipeline.config.stages import CompareStage
from pipeline.progress import say
from pipeline.report.compare import headline_sentences
from pipeline.report.logs import compare_logs
from pipeline.report.write import write_report


def compare(config: CompareStage) -> Path:
    """Write the page of a comparison to runs_dir/reports, and its verdict to standard error. Returns its path."""
    entries = config.results
    digits = hashlib.sha256("\n".join(str(Path(entry).resolve()) for entry in entries).encode()).hexdigest()[:8]
    name = f"compare-{digits}"
    command = shlex.join(["python", "-m", "pipeline", "stage=compare", f"results=[{','.join(entries)}]"])
    results = compare_logs(entries, name, command)
    page = write_report(results, Path(config.runs_dir) / "reports" / name)
    for sentence in [*headline_sentences(results.contrasts, results.primary), results.note]:
        say(sentence)
    return page
