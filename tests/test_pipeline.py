"""The whole table on tiny models: made, made again (nothing is), and with one run that fails."""

import csv
import json
import re
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fixture_types import Call, Patch
from small_runs import writes

from pipeline.config.compose import compose
from pipeline.evaluate import score as evaluation
from pipeline.launch import in_process
from pipeline.launch.launchers import what_failed
from pipeline.launch.local import execute_here
from pipeline.stages.rows import build
from pipeline.tables.planned_runs import Planning

REAL_STAGE = in_process.stage_function
OWN = {
    "defaults": ["tiny"],
    "name": "own",
    "axes": {"b": [3, 5]},
    "runs": {
        "again": {
            "merge": "layer_swap",
            "merge.math": "math expert",
            "merge.language": "language expert",
            "merge.bottom_layers": "{b}",
            "merge.top_layers": 0,
            "merge.scale_to_depth": True,
        }
    },
    "score": {
        "eval": "mgsm_0shot",
        "eval.split": "dev",
        "eval.max_gen_toks": 4,
        "eval.limit": 2,
        "in": "qac",
    },
    "columns": {"swap {counts}": {"run": "layer swap"}, "again {b}": {"run": "again"}},
    "rows": {},
    "compare": {},
}


@pytest.fixture
def table(tiny_table: list[str]) -> list[str]:
    """Made in this process, whose functions tests replace."""
    return [*tiny_table, "launcher.workers=1"]


class Calls:
    """The labels of the runs whose stages are called.

    Fails those whose label starts with `fails`.
    """

    def __init__(self, monkeypatch: Patch) -> None:
        self.made: list[str] = []
        self.fails: str | None = None
        monkeypatch.setattr(in_process, "stage_function", self.stage_function)

    def stage_function(self, run: Any) -> Any:
        if self.fails and run.label.startswith(self.fails):
            self.made.append(run.label)
            raise RuntimeError("injected by the test")

        def stage(*given: Any) -> Any:
            self.made.append(run.label)
            return REAL_STAGE(run)(*given)

        return stage


def times(folder: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_mtime_ns
        for path in folder.glob("*/**/*")
        if path.is_file() and not {"reports", ".plans"} & set(path.parts)
    }


def test_what_failed_is_told_apart_from_what_depends_on_it() -> None:
    one = {"parent-0": "no room"}
    assert what_failed(one) == "1 run failed (parent-0: no room)"
    blocked = {f"child-{number}": "its parent parent-0 failed" for number in range(2)}
    assert (
        what_failed(one | blocked)
        == "1 run failed (parent-0: no room), so 2 that depend on them were not computed"
    )
    told = what_failed({f"parent-{number}": "no room" for number in range(4)})
    assert (
        told.startswith("4 runs failed (")
        and told.count("no room") == 3
        and told.endswith("; and 1 more)")
    )


@pytest.mark.parametrize("launcher", ["local", "slurm"])
@pytest.mark.parametrize("place", ["file", "file/runs"])
def test_a_folder_that_cannot_be_is_refused_at_once(
    launcher: str, place: str, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    runs_dir = f"runs_dir={tmp_path}/{place}"
    for words in (
        ["stage=table", "table=sandbox"],
        ["stage=plan", "table=sandbox"],
        ["stage=data", "expert=sandbox"],
    ):
        told = call(*words, runs_dir, f"launcher={launcher}")
        refusal = told.err.splitlines()[-1]
        assert told.status == 1 and refusal.startswith(f"error: {runs_dir} cannot be written (")
        assert "). Give another. " in refusal


def test_a_report_from_another_folder_names_missing_paths(
    call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    study = (
        "base: ./model\nexperts: {math: ./math, sw: {run: ./sw, side: language}}\nmethods: [soup]\n"
    )
    (tmp_path / "mine.yaml").write_text(study + "languages: [sw]\nbenchmarks: [mgsm_0shot]\n")
    monkeypatch.chdir(tmp_path)
    refused = call("stage=report", "table=./mine.yaml", "runs_dir=there")
    assert refused.status == 1 and "table=./mine.yaml has no finished run in there" in refused.err
    assert f"checkpoint=math is not a folder of {tmp_path}. Name a finished run" in refused.err


def test_a_table_with_a_failure_and_again(
    table: list[str], call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Three data sets, two trainings; of 7 rows 2 tasks in 2 languages, FLORES in one.

    7 x 5 scores. Five models' are known at once, and four candidates' on development problems; the
    two that are chosen come after.
    """
    runs_dir = tmp_path / "runs"
    planned = call("stage=plan", "plan.lines=99", *table)
    assert planned.status == 0 and planned.out.count("never made") == 5 + 25 + 4
    assert "34 runs, 0 done." in planned.out and re.search(r"^scores .* \+ 10 ", planned.out, re.M)
    assert "table=tiny has no finished run in" in call("stage=report", *table, status=1).err

    scores: list[str] = []  # each (weights, task, questions) that is put to a model
    compute = evaluation.compute

    def counted(lm: Any, asked: Any, *rest: Any) -> Any:
        scores.append(asked.name)
        return compute(lm, asked, *rest)

    monkeypatch.setattr(evaluation, "compute", counted)

    # one merge fails: what does not need it is made, its cells say so, the status is 1
    calls = Calls(monkeypatch)
    calls.fails = "eval-mgsm_0shot-soup"
    told = call("stage=table", *table)
    assert told.status == 1 and told.out == ""
    assert "RuntimeError: injected by the test" in told.err and "Traceback" in told.err
    assert (
        told.err.strip().splitlines()[-1].startswith("error: 2 runs failed (eval-mgsm_0shot-soup-")
    )
    assert (
        len(calls.made) == 5 + 25 + 4 + 10
    )  # what was chosen is scored too, and nothing is tried twice
    page = runs_dir / "reports/tiny/index.html"
    assert page.is_file() and "injected by the test" in page.read_text(encoding="utf-8")
    assert "44 runs, 42 done." in call("stage=plan", *table).out
    assert {path.parent.name[:4] for path in runs_dir.glob("*/model.safetensors")} == {
        "math",
        "qac-",
    }  # no merge

    # the same command makes the rest
    before = times(runs_dir)
    calls.fails, calls.made = None, []
    told = call("stage=table", *table)
    assert (told.status, told.out.strip()) == (0, str(page))
    assert [label.rpartition("-math")[0] for label in calls.made] == ["eval-mgsm_0shot-soup"] * 2
    assert {path: time for path, time in times(runs_dir).items() if path in before} == before
    assert "injected by the test" not in page.read_text(encoding="utf-8")

    for name in ("cells.csv", "cells.md", "results.csv", "contrasts.csv", "plots"):
        assert (page.parent / name).exists(), sorted(path.name for path in page.parent.iterdir())
    rows = {
        (row["row"], row["column"]): row
        for row in csv.DictReader((page.parent / "cells.csv").open())
    }
    choices = json.loads((page.parent / "choices.json").read_text())
    assert list(dict.fromkeys(row for row, _ in rows)) == [
        "base",
        "math expert",
        "language expert",
        "layer swap",
        "layer swap, default",
        "soup",
        "TIES",
    ]
    assert list(dict.fromkeys(column for _, column in rows)) == [
        f"qac: {column}"
        for column in ("mgsm en", "mgsm", "belebele en", "belebele", "flores to", "flores from")
    ]
    assert "—" not in (page.parent / "cells.md").read_text(encoding="utf-8")

    # the choice is that of the means on development problems, and what it chose says so
    for choice in choices.values():
        best = max(choice["candidates"], key=lambda one: one["mean"])  # the first of equals
        assert choice["chosen"] == {axis: best[axis] for axis in choice["chosen"]}
    swap = next(
        choice["chosen"]["counts"][0] for choice in choices.values() if "counts" in choice["chosen"]
    )
    manifests = runs_dir.glob("eval-mgsm*-layer_swap-*/manifest.json")
    scored = [json.loads(file.read_text())["config"] for file in manifests]
    chosen = [one for one in scored if one["chosen_by"]]
    assert len(chosen) == 2 and {one["merge"]["bottom_layers"] for one in chosen} == {int(swap)}
    assert all(one["chosen_by"].startswith("best counts of layer swap ") for one in chosen)

    # each cell is what its run wrote
    assert len(rows) == 7 * 6 and not [row for row in rows.values() if row["missing"]]
    for (name, column), row in rows.items():
        written = json.loads((runs_dir / row["runs"] / "scores.json").read_text())["rows"]
        pair = {"flores to": "en-qac", "flores from": "qac-en"}.get(column.removeprefix("qac: "))
        mine = [one for one in written if not one["subject"] and pair in (None, one["pair"])]
        primary = [("exact_match", "flexible-extract"), ("acc", "none"), ("chrf++", "none")]
        (found,) = [one["value"] for one in mine if (one["metric"], one["filter"]) in primary]
        assert float(row["value"]) == pytest.approx(found if pair else 100 * found), (name, column)

    # the dtype that all were scored in
    with (page.parent / "results.csv").open(encoding="utf-8") as file:
        assert {row["dtype"] for row in csv.DictReader(file)} == {"float32"}
    assert "Scored in float32." in page.read_text(encoding="utf-8")
    kept = [json.loads(file.read_text()) for file in runs_dir.glob("eval-*/manifest.json")]
    assert {(one["config"]["eval"]["dtype"], one["facts"]["harness"]["dtype"]) for one in kept} == {
        ("float32",) * 2
    }

    # and once more, nothing
    before, calls.made = times(runs_dir), []
    assert call("stage=table", *table).status == 0
    assert calls.made == [] and times(runs_dir) == before
    assert "44 runs, 44 done." in call("stage=plan", *table).out
    told = call("stage=report", *table)
    assert (told.status, told.out.strip()) == (0, str(page)) and "missing: " not in told.err
    with open(tmp_path / "runs/reports/tiny/claims.csv", encoding="utf-8", newline="") as file:
        verdicts = list(csv.DictReader(file))
    assert len(verdicts) == 6 and {row["n"] for row in verdicts} == {"2"}
    assert {row["verdict"] for row in verdicts} <= {"shown", "contradicted", "undecided"}
    with open(tmp_path / "runs/reports/tiny/contrasts.csv", encoding="utf-8", newline="") as file:
        assert {(row["left"], row["over"], row["missing"]) for row in csv.DictReader(file)} == {
            ("layer swap", "problems", "")
        }

    # nor is a score made twice that another table asks for, of swaps by other words: new runs, old
    # weights
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(OWN, sort_keys=False))
    told = call("stage=table", f"table={own}", *table[1:], status=0)
    # of the second table two runs are the first's, two are the same weights by other words
    assert len(list(runs_dir.glob("eval-*"))) == 7 * 5 + 4 + 2
    files = list((runs_dir / ".scores").glob("*.jsonl"))
    assert len(scores) == len(files) == 7 * 6 + 4  # FLORES is two tasks, one a direction

    # by two workers the same bytes: one training, then four scores
    other = tmp_path / "two"
    for folder in (*runs_dir.glob("data-*"), *runs_dir.glob("qac-*")):
        shutil.copytree(folder, other / folder.name)
    told = call(
        "stage=table", f"table={own}", *table[1:], "launcher.workers=2", f"runs_dir={other}"
    )
    assert told.status == 0 and told.err.count(" left in all") == told.err.count(" done in ") == 5
    (weights,) = other.glob("math-*/model.safetensors")
    for name in (weights.relative_to(other), "reports/own/cells.csv"):
        assert (other / name).read_bytes() == (runs_dir / name).read_bytes()
    assert len(list((other / ".logs").iterdir())) == 5 and not list((other / ".work").iterdir())


def test_a_run_that_changed_on_disk_stops_what_needs_it(
    table: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(in_process, "stage_function", lambda run: writes())
    asked = Planning.of(compose(["stage=table", *table]))  # type: ignore[arg-type]
    monkeypatch.setattr(Planning, "primary_number", lambda self, score: None)  # nothing is chosen
    targets = asked.targets()
    assert execute_here(targets) == {}
    (next((tmp_path / "runs").glob("math-*")) / "train.jsonl").write_text("changed")
    failed = execute_here(targets)
    assert {name.partition("-")[0] for name in failed} == {"math", "eval"}
    told = [reason for reason in failed.values() if "was changed after it was finished" in reason]
    assert len(failed) == 1 + 3 * 5 + 4 and len(told) == 1


def test_a_failed_parent_of_one_run_is_the_reason(call: Call, tmp_path: Path, base: Path) -> None:
    """One of two rows is a question of the benchmark, which only the data run finds."""
    question = " ".join(f"word{number}" for number in range(20))
    (tmp_path / "data/mgsm/en").mkdir(parents=True)
    item = {"question": question, "answer": None, "answer_number": 1}
    (tmp_path / "data/mgsm/en/test.jsonl").write_text(json.dumps(item) + "\n")
    rows = [{"q": question, "a": "1"}, {"q": "another", "a": "2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = (
        f"expert.sources.own={{url: {tmp_path}/rows.jsonl, rows: template, prompt: '{{q}}',"
        " completion: '{a}'}"
    )
    few = [
        "data.size=2",
        "sft.batch_size=1",
        "model=trained",
        f"model.path={base}",
        f"data_root={tmp_path}/data",
    ]
    told = call(
        "stage=sft", "expert=own", own, *few, f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"
    )
    assert told.status == 1 and told.err.count("error: ") == 1
    assert (
        told.err.splitlines()[-1].startswith("error: data-own-")
        and "has 1. Lower them, or set data.allow_fewer" in told.err
    )


def test_what_a_run_sets_of_torch_ends_with_it(
    tmp_path: Path, monkeypatch: Patch, base: Path
) -> None:
    """Threads; and TF32 and deterministic kernels, as trainings turn them on.

    The next run of a process computes as it would in one of its own. A trainer and its model, which
    hold each other, are gone by then.
    """
    import torch

    from pipeline.train import stage

    def settings() -> tuple[Any, ...]:
        enabled = torch.are_deterministic_algorithms_enabled()
        return torch.get_num_threads(), torch.get_float32_matmul_precision(), enabled

    def train(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
        found.append(settings())
        assert not any(model() for model in models)
        model = torch.nn.Linear(1, 1)
        model.trainer = SimpleNamespace(model=model)  # type: ignore[assignment]
        models.append(weakref.ref(model))
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        (work / "x").write_text("x")
        return {}

    monkeypatch.setattr(stage, "make", train)
    found: list[tuple[Any, ...]] = []
    models: list[weakref.ref[Any]] = []
    before, words = settings(), ["stage=sft", "expert=math", "model=trained", f"model.path={base}"]
    more = before[0] + 2
    for seed, threads in enumerate(([f"threads={more}"], [])):
        here = [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled", f"seed={seed}", *threads]
        in_process.make_run(build(compose([*words, *here])))  # type: ignore[arg-type]
    assert found == [(more, *before[1:]), before] and settings() == before
