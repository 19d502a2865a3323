"""Runs of one file for tests: asked for, made by a stage of one line, or never."""

from pathlib import Path
from typing import Any

from pipeline.config.data import Expert, Source
from pipeline.config.stages import DataStage, Tracking
from pipeline.runs.run import Run
from pipeline.stages.rows import RUN_STAGES


def a_run(
    runs_dir: Path, parents: dict[str, Any] | None = None, label: str = "data-x", **changes: Any
) -> Run:
    expert = Expert(name="x", side="none", sources={"x": Source(file="x", rows="text")})
    config = DataStage(
        stage="data",
        runs_dir=str(runs_dir),
        tracking=Tracking(mode="disabled"),
        expert=expert,
        **changes,
    )
    return Run(config, label, parents or {}, version=RUN_STAGES["data"].version)


def writes(text: str = "rows\n", weights: str | None = None) -> Any:
    """Return a stage that writes one file and records the root of its weights."""

    def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        (work / "train.jsonl").write_text(text)
        return {"weights": {"root": weights}} if weights else {}

    return stage


def never(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
    raise AssertionError(f"{run.name} was made again")


def of_digits(run: Run, digits: str = "0123456789ab") -> Run:
    """Return the run with a hash that begins with these digits, as could happen by chance."""
    run.__dict__["hash"] = digits + run.hash[len(digits) :]
    return run
