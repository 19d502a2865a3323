"""`-m`: the folders of all, and the status of the worst: 130, 1, 75, 0."""

from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Patch

from pipeline.config.compose import compose
from pipeline.config.overrides import sweep_jobs
from pipeline.errors import Held
from pipeline.launch import in_process


@pytest.mark.parametrize(
    ("errors", "status", "printed"),
    [
        ({}, 0, 3),
        ({1: RuntimeError("no")}, 1, 2),
        ({1: Held("held by job 7"), 2: RuntimeError("no")}, 1, 1),
        ({1: Held("held by job 7")}, 75, 2),
        ({1: SystemExit(75)}, 75, 0),  # stopped: nothing is printed of what was not tried
        ({2: KeyboardInterrupt()}, 130, 0),
    ],
)
def test_folders_are_printed_and_the_worst_status_returned(
    errors: dict[int, BaseException],
    status: int,
    printed: int,
    call: Call,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    def stage(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
        if run.config.seed in errors:
            raise errors[run.config.seed]
        return {}

    monkeypatch.setattr(in_process, "stage_function", lambda run: stage)
    words = [
        "stage=data",
        "expert=math",
        "tracking.mode=disabled",
        f"runs_dir={tmp_path}",
        "seed=0,1,2",
    ]
    told = call("-m", *words, "launcher.workers=1")
    folders = told.out.split()
    assert told.status == status, told.err
    assert len(folders) == printed and all(Path(folder).is_dir() for folder in folders)


def test_a_stage_without_a_run_is_no_sweep(call: Call) -> None:
    told = call("-m", "stage=plan", "table=real_smoke", "every.sft.learning_rate=1e-4,2e-4")
    assert told.status == 1 and "-m starts runs, but stage=plan computes none" in told.err


def test_evaluations_take_several_values() -> None:
    """-m eval=a,b, a task of the harness among them."""
    words = ["stage=eval", "checkpoint=x", "eval=mgsm_2shot,arc_easy", "seed=0,1"]
    tasks = [compose(job).eval.tasks[0].task for job in sweep_jobs(words)]  # type: ignore[attr-defined]
    assert tasks == ["mgsm", "mgsm", "arc_easy", "arc_easy"]
