"""What users read: names instead of numbers, the knob that is at fault, and lines before minutes of silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import stacked
from small_runs import a_run, writes

from pipeline.config.compose import compose
from pipeline.config.stages import EvalStage
from pipeline.errors import PipelineError
from pipeline.merge.methods.soup import Soup
from pipeline.merge.summary import plan_text, row_cells
from pipeline.models.alike import same_architecture
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs import state
from pipeline.runs.graph import order_runs
from pipeline.runs.make import make_once
from pipeline.stages.rows import build
from pipeline.tables.planned_runs import Planning

TABLE = """
name: mine
runs:
  world: {stage: data, expert: sandbox, data.size: 4}
  math: {stage: sft, expert: math, model: sandbox, recipe: sandbox_math, data_root: world}
columns: {math: {run: math, eval: mgsm_0shot, in: en, data_root: world}}
"""


def test_a_table_file_beside_the_command(
    call: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = call("stage=plan", "table=mine.yaml")
    assert refused.status == 1 and "table=mine.yaml is not a file: give one, or one of" in refused.err
    (tmp_path / "mine.yaml").write_text(TABLE)
    assert call("stage=plan", "table=mine.yaml").out == call("stage=plan", "table=./mine.yaml").out
    assert "runs to compute" in call("stage=plan", "table=mine.yaml").out


def test_a_number_written_as_text_is_named(tmp_path: Path) -> None:
    one, other = (stacked(tmp_path / name, 2, 0, rms_norm_eps=eps) for name, eps in (("a", 1e-6), ("b", "1e-06")))
    with pytest.raises(PipelineError, match='b has rms_norm_eps "1e-06", the first: .*a has rms_norm_eps 1e-06; they'):
        same_architecture(Checkpoint.open(one), Checkpoint.open(other))


@dataclass
class Named:
    name: str
    hash: str = ""
    folder: Path = Path()


def test_a_soup_is_told_by_the_names_of_its_runs() -> None:
    config, parents = Soup(experts=["a", "b"]), {"0": Named("math-full-s0"), "1": Named("sw-full-s0")}
    row = {"where": "layers 0-3", "what": "all", "weights": {"0": 0.5, "1": 0.5}}
    told = "0.5 math-full-s0 + 0.5 sw-full-s0"
    assert row_cells(row, parents) == ["layers 0-3", "all", told]
    size = {"copied": 0, "read": 0, "written": 0}
    assert told in plan_text(config, parents, [row], size)
    swap = {"where": "layer 0", "what": "all", "weights": {"math": 1.0}}
    assert row_cells(swap, {"math": Named("math-full-s0")})[2] == "1 math"  # a role says it already


def test_an_evaluation_is_named_with_its_language(base: Path, world: Path, tmp_path: Path) -> None:
    words = ["stage=eval", f"checkpoint={base}", "eval=mgsm_0shot", f"data_root={world}", f"runs_dir={tmp_path}"]
    runs = [build(compose([*words, f"languages=[{code}]"])) for code in ("en", "qac")]  # type: ignore[arg-type]
    assert [run.label.rpartition("-")[2] for run in runs] == ["en", "qac"]
    run = build(compose([*words, "languages=[en,qac]"]))  # type: ignore[arg-type]
    labels = {one.label for one in run.parents.values() if isinstance(getattr(one, "config", None), EvalStage)}
    assert labels == {one.label for one in runs}


def failing(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    raise PipelineError("no row")


def test_status_of_a_table_and_without_failures_that_were_repaired(
    call: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    first, second, other = a_run(runs), a_run(runs, seed=1), a_run(runs, label="data-y", seed=2)
    for run in (first, other):
        with pytest.raises(PipelineError):
            make_once(run, failing)
    told = json.loads(call("stage=status", f"runs_dir={runs}", "status.json=true").out)
    assert sorted((one["run"], one["state"]) for one in told) == [(first.name, "failed"), (other.name, "failed")]
    make_once(second, writes())  # changed, and finished under the same label
    told = json.loads(call("stage=status", f"runs_dir={runs}", "status.json=true").out)
    assert sorted((one["run"], one["state"]) for one in told) == [(second.name, "finished"), (other.name, "failed")]
    since = "2000-01-01T00:00:00+00:00"
    state.update_state(other.workplace, since=since)
    told = json.loads(call("stage=status", f"runs_dir={runs}", "status.json=true").out)
    assert (other.name, "failed") in [(one["run"], one["state"]) for one in told]  # nothing was finished after it

    (tmp_path / "mine.yaml").write_text(TABLE)
    words = ["stage=status", f"table={tmp_path}/mine.yaml", f"runs_dir={runs}"]
    assert (
        call(*words).out == f"no run of table={tmp_path}/mine.yaml was computed or submitted in runs_dir={runs} yet\n"
    )
    asked: Any = compose(["stage=table", f"table={tmp_path}/mine.yaml", f"runs_dir={runs}"])
    world = order_runs(Planning.of(asked).targets())[0]
    make_once(world, writes())
    assert [one["run"] for one in json.loads(call(*words, "status.json=true").out)] == [world.name]


def test_what_comes_before_the_first_step_is_told(
    call: Callable[..., SimpleNamespace], base: Path, world: Path, tmp_path: Path
) -> None:
    words = ["stage=sft", "expert=math", "model=trained", f"model.path={base}", f"data_root={world}", "data.size=8"]
    words += ["sft.batch_size=4", "sft.steps=1", "sft.epochs=9", "sft.seq_length=96", "sft.precision=fp32"]
    told = call(*words, "data.allow_fewer=true", f"runs_dir={tmp_path}", "tracking.mode=disabled")
    assert told.status == 0, told.err
    order = [told.err.find(part) for part in (f"loading {base}", "tokenizing 8 rows")]
    assert -1 not in order and order == sorted(order)
