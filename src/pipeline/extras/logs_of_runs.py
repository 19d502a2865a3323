"""Runs of stage=eval as logs, in the form that export.format=lm_eval writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.extras import logs_of_lm_eval
from pipeline.extras.log import Log, Reader
from pipeline.report.render.harness_logs import write_harness_logs
from pipeline.runs.folders import label_in
from pipeline.runs.manifest import MANIFEST, read_manifest


def recognizes(path: Path, content: Mapping[str, Any]) -> bool:
    return {"rows", "harness"} <= content.keys() and (path.parent / MANIFEST).is_file()


def read(path: Path, _: dict[str, Any]) -> Iterator[Log]:
    with TemporaryDirectory() as folder:
        written = write_harness_logs(path.parent, Path(folder), scored_model(path.parent))
        time = written.stem.removeprefix("results_")
        content = json.loads(written.read_bytes())
        for log in logs_of_lm_eval.logs_written_at(time, written, content):
            yield replace(log, file=path)


def scored_model(run: Path) -> str:
    """Return the name of the checkpoint that a run scored, or the label of its merge in memory."""
    manifest = read_manifest(run)
    assert manifest is not None
    checkpoint = manifest.parents.get("checkpoint")
    if checkpoint:
        return checkpoint.name
    evaluated = manifest.config["eval"]["name"]
    languages = "-".join(manifest.config["languages"])
    label = label_in(manifest.name)
    return label.removeprefix(f"eval-{evaluated}-").removesuffix(f"-{languages}")


READER = Reader(recognizes, read)
