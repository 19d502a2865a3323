"""What the harness reads of the hub: which sets, whether they can be had, and how to do without asking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.evaluate.flores_plus import FLORES_PLUS, FLORES_SPLITS, configuration
from pipeline.evaluate.tasks import whole
from pipeline.languages import language

SECONDS = 5  # for the hub to answer


def data_sets(task_file: Path) -> list[tuple[str, str | None, str]]:
    """(repository, configuration, split) of each set of the hub that a task file reads; none where data is local."""
    body = whole(task_file)
    if body.get("dataset_path") == "json":
        return []
    if "custom_dataset" in body:
        spoken = [language(body["dataset_kwargs"][side]) for side in ("source", "target")]
        return [(FLORES_PLUS, configuration(one), split) for one in spoken for split in FLORES_SPLITS.values()]
    splits = {body.get(f"{kind}_split") for kind in ("test", "training", "fewshot", "validation")}
    return [(body["dataset_path"], body.get("dataset_name"), split) for split in sorted(filter(None, splits))]


def why_not(repository: str) -> str | None:
    """None where the hub has this data set for us, else what it says; it is asked once."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(repository, timeout=SECONDS)
    except Exception as error:  # whatever the network does, HF_HUB_OFFLINE, or a refusal
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None


@contextmanager
def offline() -> Iterator[None]:
    """Inside, sets come from the cache alone: `datasets` asks a hub that does not answer six times, half a minute."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
