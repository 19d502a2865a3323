"""Which data sets the harness reads from the Hub."""

from __future__ import annotations

from pipeline.benchmarks import benchmark_of
from pipeline.benchmarks.task_files import Definition, whole
from pipeline.languages import language


def data_sets(definition: Definition) -> list[tuple[str, str | None, str]]:
    """(repository, configuration, split) of each set on the Hub that a task reads; none where data is local."""
    body = whole(definition.file)
    if body.get("dataset_path") == "json":
        return []
    if "custom_dataset" in body:
        spoken = [language(code) for code in definition.where.split("-")]
        found = [source for one in spoken for source in benchmark_of(definition.task).sources(one)]
        return [(source.hub or "", source.hub_config, source.split) for source in found]
    splits = {body.get(f"{kind}_split") for kind in ("test", "training", "fewshot", "validation")}
    return [(body["dataset_path"], body.get("dataset_name"), split) for split in sorted(filter(None, splits))]
