"""Which data sets the harness reads from the Hub."""

from __future__ import annotations

from pathlib import Path

from pipeline.evaluate.flores_plus import FLORES_PLUS, FLORES_SPLITS, configuration
from pipeline.evaluate.tasks import whole
from pipeline.languages import language


def data_sets(task_file: Path) -> list[tuple[str, str | None, str]]:
    """(repository, configuration, split) of each set on the Hub that a task file reads; none where data is local."""
    body = whole(task_file)
    if body.get("dataset_path") == "json":
        return []
    if "custom_dataset" in body:
        spoken = [language(body["dataset_kwargs"][side]) for side in ("source", "target")]
        return [(FLORES_PLUS, configuration(one), split) for one in spoken for split in FLORES_SPLITS.values()]
    splits = {body.get(f"{kind}_split") for kind in ("test", "training", "fewshot", "validation")}
    return [(body["dataset_path"], body.get("dataset_name"), split) for split in sorted(filter(None, splits))]
