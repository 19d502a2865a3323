"""Stage select: the rule by hand, and whole runs on tiny snapshots.

Stage clean, which frees what it leaves behind.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from as_torch import as_torch
from fixture_types import Call
from tiny_words import FEW

from pipeline.config.compose import compose
from pipeline.config.evaluation import Measure
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow
from pipeline.evaluate.selection import choose, ranked, scores, value
from pipeline.launch.launchers import make_single_run
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.find import find_run
from pipeline.runs.graph import order_runs
from pipeline.runs.lease import hold_lease
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import parent_runs
from pipeline.stages.rows import build
from pipeline.train.steps import snapshot_steps


def row(training: str, step: int, below: tuple[str, ...] = (), **values: float) -> dict[str, Any]:
    return {
        "checkpoint": f"{training}@{step}",
        "training": training,
        "step": step,
        "values": values,
        "below": [*below],
    }


# --- by hand ---


def test_snapshots_are_at_the_first_step_at_or_after_each_so_many_samples() -> None:
    def found(every: int | None, batch_size: int, steps: int, keep: int | None = None) -> list[int]:
        return snapshot_steps(
            Sft(name="x", batch_size=batch_size, snapshot_every=every, snapshot_keep=keep), steps
        )

    assert found(5000, 32, 1250) == [157, 313, 469, 625, 782, 938, 1094, 1250]  # 157 x 32 = 5,024
    assert found(10, 4, 6) == [3, 5] and found(2, 4, 3) == [1, 2, 3] and found(None, 4, 9) == []
    assert found(5000, 32, 1250, keep=2) == [1094, 1250] and found(10, 4, 6, keep=9) == [3, 5]


def test_ranks_are_averaged_over_the_primary_measures_and_guards_come_first() -> None:
    rows = [
        row("a", 1, x=0.3, y=9.0),  # ranks 2.5 and 1 of three: 1.75
        row("a", 2, x=0.3, y=7.0),  # 2.5 and 3: 2.75
        row("b", 1, x=0.5, y=8.0),  # 1 and 2: 1.5
        row("b", 2, x=0.9, y=9.9, below=("g",)),
    ]
    order = ranked(rows, ["x", "y"])
    assert [(one["checkpoint"], one["rank"]) for one in order] == [
        ("b@1", 1.5),
        ("a@1", 1.75),
        ("a@2", 2.75),
        ("b@2", None),
    ]
    assert (
        choose(order, 1)["checkpoint"] == "b@1" and choose(order, 2)["checkpoint"] == "a@1"
    )  # one a run
    with pytest.raises(PipelineError, match="select.place=3, but only 2 trainings have a snapshot"):
        choose(order, 3)
    with pytest.raises(
        PipelineError, match=r"No snapshot passes the guards \(g\). Raise select.guard_slack"
    ):
        choose([rows[3]], 1)


def test_ties_go_to_the_first_measure_then_to_the_earlier_step() -> None:
    order = ranked(
        [row("a", 4, x=1.0, y=2.0), row("b", 2, x=2.0, y=1.0), row("c", 1, x=1.0, y=2.0)],
        ["x", "y"],
    )
    assert [one["checkpoint"] for one in order] == [
        "b@2",
        "c@1",
        "a@4",
    ]  # all rank 2 in the mean, b is best in x
    lowest = ranked([row("a", 1, loss=0.2), row("b", 1, loss=0.1)], ["loss"], lower_is_better=True)
    assert lowest[0]["checkpoint"] == "b@1"


def test_a_measure_is_the_primary_metric_in_a_language_or_the_mean_over_them() -> None:
    def scored(
        value: float, language: str | None = None, pair: str | None = None, **more: Any
    ) -> ScoreRow:
        task, *of_task = (
            ("flores", "chrf++", "none") if pair else ("mgsm", "exact_match", "flexible-extract")
        )
        return replace(
            ScoreRow(task, str(language), pair, None, 0, *of_task, value, None, 1), **more
        )

    rows = [
        scored(0.5, "en"),
        scored(0.1, "sw"),
        scored(0.9, "en", filter="strict-match"),
        scored(0.9, "sw", metric="cut_off"),
        scored(30.0, "sw", "en-sw"),
        scored(40.0, "sw", "sw-en"),
        scored(90.0, "bn", "en-bn"),
    ]
    assert value(rows, Measure("mgsm", "en"), ["sw"]) == 0.5
    assert value(rows, Measure("mgsm"), ["en", "sw"]) == pytest.approx(0.3)
    assert value(rows, Measure("flores"), ["sw"]) == 35.0
    with pytest.raises(PipelineError, match="mgsm te was not scored. Add its language"):
        value(rows, Measure("mgsm", "te"), ["sw"])


# --- whole runs ---

BELEBELE = [
    *(
        "select=layer_swapping_math",
        "select.eval.tasks=[{task:belebele,num_fewshot:0}]",
        "select.eval.limit=3",
    ),
    *("select.primary=[{task:belebele,language:en},{task:belebele}]", "languages=[en,qac]"),
]


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_score_that_is_not_finite_has_no_rank(number: float, tmp_path: Path) -> None:
    """Ranks of others would be undefined beside it."""
    row = ScoreRow("held_out", "sw", None, None, 0, "bits", "none", number, None, 1)
    (tmp_path / "scores.json").write_text(json.dumps({"rows": [row.as_json()]}))
    select = SimpleNamespace(primary=[Measure(task="held_out")], guards=None)
    config: Any = SimpleNamespace(select=select, languages=["sw"])
    with pytest.raises(PipelineError, match="^held_out mean of eval-1 is not a finite number"):
        scores(SimpleNamespace(folder=tmp_path, name="eval-1"), config)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs_of_ours(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [f"runs_dir={tmp_path_factory.mktemp('select') / 'runs'}", "tracking.mode=disabled"]


@pytest.fixture(scope="module")
def trainings(runs_of_ours: list[str], base: Path, world: Path) -> list[Path]:
    """Return trainings at two learning rates with snapshots after 2 and 3 of 4 steps.

    A step has 4 rows. Each snapshot has its validation loss.
    """
    start = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        *runs_of_ours,
    ]
    few = [
        *FEW,
        "sft.steps=4",
        "sft.snapshot_every=6",
        "sft.snapshot_keep=2",
        "data.size=24",
        "data.validation=4",
    ]
    return [
        make_single_run(compose([*start, *few, f"sft.learning_rate={rate}"]))
        for rate in ("1e-3", "1e-2")
    ]  # type: ignore[arg-type]


def names(trainings: list[Path]) -> str:
    return f"checkpoints=[{','.join(path.name for path in trainings)}]"


def test_a_snapshot_is_a_run_of_its_own(
    trainings: list[Path], runs_of_ours: list[str], call: Any
) -> None:
    training, runs_dir = trainings[0], trainings[0].parent
    facts = read_manifest(training).facts  # type: ignore[union-attr]
    assert {step: one["samples"] for step, one in facts["snapshots"].items()} == {"2": 8, "3": 12}
    found = find_run(f"{training.name}@2", runs_dir, "x")
    assert found.folder == training / "snapshots/step-2" and found.name == f"{training.name}@2"
    manifest = read_manifest(found.folder)
    assert (
        manifest.facts["weights"]["root"]
        == facts["snapshots"]["2"]["root"]
        != facts["weights"]["root"]
    )  # type: ignore[union-attr]
    assert "model.safetensors" in manifest.files and "log.jsonl" not in manifest.files  # type: ignore[union-attr]
    logged = [json.loads(line) for line in (training / "log.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["validation_loss"] for row in logged if "validation_loss" in row}
    assert [one["validation_loss"] for one in facts["snapshots"].values()] == [losses[2], losses[3]]
    assert (
        find_run(str(found.folder), runs_dir, "x")
        == find_run(f"{training}@2", runs_dir, "x")
        == found
    )
    with pytest.raises(PipelineError, match=r"has no snapshot of that step; there are 2, 3"):
        find_run(f"{training.name}@4", runs_dir, "checkpoint")


def test_best_by_scores(
    trainings: list[Path], runs_of_ours: list[str], world: Path, base: Path, call: Call
) -> None:
    words = [
        *BELEBELE,
        f"data_root={world}",
        *runs_of_ours,
        "select.guards=[{task:belebele}]",
        "select.guard_slack=1",
    ]
    told = call("stage=select", names(trainings), *words, status=0)
    folder = Path(told.out.strip())
    choice = json.loads((folder / "choice.json").read_text())
    assert (
        len(choice["ranking"]) == 6
    )  # three of each training: two snapshots and the final weights
    manifest = read_manifest(folder)
    assert manifest is not None
    for role, parent in manifest.parents.items():  # each number is that of its evaluation
        if role in ("base", "model"):
            continue
        rows = json.loads((folder.parent / parent.name / "scores.json").read_text())["rows"]
        scored = {row["language"]: row["value"] for row in rows if row["metric"] == "acc"}
        training, step = role.split("@")
        mine = next(
            one
            for one in choice["ranking"]
            if (one["training"], one["step"]) == (training, int(step))
        )
        assert mine["values"] == {
            "belebele en": scored["en"],
            "belebele mean": (scored["en"] + scored["qac"]) / 2,
        }
    # it is an expert: the same weights, the same base
    chosen = find_run(choice["chosen"]["checkpoint"], folder.parent, "x")
    ours, theirs = Checkpoint.open(folder), Checkpoint.open(chosen.folder)
    assert all((as_torch(ours, name) == as_torch(theirs, name)).all() for name in theirs.names)
    assert manifest.facts["weights"]["root"] == read_manifest(chosen.folder).weights_root  # type: ignore[union-attr]
    merged = f"merge.experts=[{folder.name},{trainings[0].name}]"
    ties = build(compose(["stage=merge", "merge=ties", merged, *runs_of_ours]))  # type: ignore[arg-type]
    assert ties.parents["base"].hash == read_manifest(base).hash  # type: ignore[union-attr]
    call("stage=merge", "merge=soup", merged, *runs_of_ours, status=0)
    # asked again, nothing is made; the order of checkpoints= is no matter
    before = {path: path.stat().st_mtime_ns for path in folder.parent.glob("*/manifest.json")}
    assert call("stage=select", names(trainings[::-1]), *words).out == told.out
    assert {
        path: path.stat().st_mtime_ns for path in folder.parent.glob("*/manifest.json")
    } == before


def test_the_lowest_validation_loss(
    trainings: list[Path], runs_of_ours: list[str], call: Call
) -> None:
    losses = {}
    for path in trainings:
        logged = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
        losses[path.name] = [row["validation_loss"] for row in logged if "validation_loss" in row][
            -1
        ]
    for place, expected in enumerate(sorted(losses, key=lambda name: losses[name]), start=1):
        told = call(
            "stage=select",
            "select=unreasonable",
            names(trainings),
            f"select.place={place}",
            *runs_of_ours,
        )
        assert told.status == 0, told.err[-2000:]
        chosen = json.loads((Path(told.out.strip()) / "choice.json").read_text())["chosen"]
        assert (chosen["checkpoint"], chosen["values"]) == (
            expected,
            {"validation_loss": losses[expected]},
        )


def test_snapshots_of_one_run_are_not_two_runs(
    trainings: list[Path], runs_of_ours: list[str], call: Any
) -> None:
    """select.place counts runs, also where their snapshots are named one by one."""
    first, other = (path.name for path in trainings)
    named = f"checkpoints=[{first}@2,{first}@3,{other}@2]"
    chosen = []
    for place in (1, 2):
        told = call(
            "stage=select",
            "select=unreasonable",
            named,
            f"select.place={place}",
            *runs_of_ours,
            status=0,
        )
        chosen.append(
            json.loads((Path(told.out.strip()) / "choice.json").read_text())["chosen"]["checkpoint"]
        )
    assert sorted(name.partition("@")[0] for name in chosen) == sorted([first, other])
    told = call("stage=select", "select=unreasonable", named, "select.place=3", *runs_of_ours)
    assert told.status == 1 and "select.place=3, but only 2 trainings have a snapshot" in told.err


def test_snapshots_of_trainings_that_are_planned(base: Path, world: Path, tmp_path: Path) -> None:
    """In a table, the select row is built before its trainings are made.

    Their steps decide the snapshots.
    """
    shared = [f"runs_dir={tmp_path}", "tracking.mode=disabled", f"data_root={world}"]
    start = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        *shared,
        "sft.batch_size=4",
    ]
    many = ["sft.snapshot_every=8", "sft.steps=5"]
    known: Any = {
        "slow": build(compose([*start, *many, "sft.learning_rate=1e-5"])),  # type: ignore[arg-type]
        "fast": build(compose([*start, *many, "sft.snapshot_keep=1"])),  # type: ignore[arg-type]
    }
    asked = ["stage=select", "checkpoints=[slow,fast]", *BELEBELE, *shared]
    run = build(compose(asked), known)  # type: ignore[arg-type]
    order = {one.hash: index for index, one in enumerate(order_runs([run]))}
    steps = sorted(role.partition("@")[2] for role in run.parents if role != "model")
    assert steps == ["2", "4", "4", "5", "5"]  # and the last weights of each
    for role, evaluation in run.parents.items():
        if role != "model":
            behind = parent_runs(evaluation.parents)  # type: ignore[attr-defined]
            (training,) = [one for one in behind if one.config.stage == "sft" and one.hash in order]
            assert order[training.hash] < order[evaluation.hash] < order[run.hash]
    snapshot = build(
        compose(["stage=eval", "eval=mgsm_2shot", "checkpoint=slow@4", *shared]), known
    )  # type: ignore[arg-type]
    assert snapshot.parents["checkpoint"].hash in {
        evaluation.parents["checkpoint"].hash
        for role, evaluation in run.parents.items()
        if role != "model"  # type: ignore[attr-defined]
    }
    unknown: Any = {"all": build(compose([*start, "sft.snapshot_every=8"]))}  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="are not known yet. Train it first, or set sft.steps"):
        build(compose([*asked, "checkpoints=[all]"]), unknown)  # type: ignore[arg-type]


def test_losses_elsewhere(
    trainings: list[Path], runs_of_ours: list[str], base: Path, world: Path, call: Call
) -> None:
    start = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        *runs_of_ours,
    ]
    other = make_single_run(compose([*start, *FEW, "data.size=20", "data.validation=4"]))  # type: ignore[arg-type]
    told = call("stage=select", "select=unreasonable", names([trainings[0], other]), *runs_of_ours)
    assert told.status == 1 and "have different validation sets" in told.err
    same_rows: Any = compose([*start, *FEW, "data.size=24", "data.validation=4", "sft.loss_on=all"])
    told = call(
        "stage=select",
        "select=unreasonable",
        names([trainings[0], make_single_run(same_rows)]),
        *runs_of_ours,
    )
    assert (
        told.status == 1
        and "with sft.loss_on='all' cannot be compared. Use the same sft.loss_on" in told.err
    )
    none = make_single_run(compose([*start, *FEW]))  # type: ignore[arg-type]
    told = call("stage=select", "select=unreasonable", names([none]), *runs_of_ours)
    assert (
        told.status == 1 and "has no validation loss. Train it with data.validation=N" in told.err
    )


# --- clean ---


def test_clean_tells_first_and_then_frees_what_nothing_needs(
    trainings: list[Path], runs_of_ours: list[str], world: Path, call: Call
) -> None:
    runs_dir = trainings[0].parent
    words = [
        *BELEBELE,
        "select.guards=[{task:belebele}]",
        "select.guard_slack=1",
        f"data_root={world}",
    ]
    assert call("stage=select", names(trainings), *words, *runs_of_ours).status == 0
    kept_one = f"{trainings[0].name}@3"
    asked = [
        "eval=belebele_0shot",
        "eval.limit=1",
        f"checkpoint={kept_one}",
        f"data_root={world}",
        *runs_of_ours,
    ]
    call("stage=eval", *asked, status=0)
    stale, young = runs_dir / ".work" / ("a" * 64), runs_dir / ".work" / ("b" * 64)
    for folder in (stale, young):
        folder.mkdir()
        (folder / "half.safetensors").write_bytes(b"0" * 2**21)
    for path in (stale / "half.safetensors", stale):
        os.utime(path, (0, 0))
    everything = {path: path.stat().st_mtime_ns for path in runs_dir.rglob("*") if path.is_file()}
    told = call("stage=clean", runs_of_ours[0])
    assert told.status == 0 and "clean.dry_run=false frees them" in told.out
    assert {path: path.stat().st_mtime_ns for path in everything} == everything
    assert str(stale) in told.out and str(young) not in told.out and "2.0 MB" in told.out
    assert (
        told.out.count("a snapshot that no other run needs") == 3
        and str(trainings[0] / "snapshots/step-3") not in told.out
    )

    freed = call("stage=clean", runs_of_ours[0], "clean.dry_run=false")
    assert freed.status == 0 and not stale.exists() and young.exists()
    assert (
        not (trainings[0] / "snapshots/step-2").exists()
        and (trainings[0] / "snapshots/step-3").is_dir()
    )
    assert "0 folders would be freed" in call("stage=clean", runs_of_ours[0]).out
    # finished runs stay finished: the selection too, whose candidates are gone
    assert (
        "done in" not in call("stage=select", names(trainings), *words, *runs_of_ours, status=0).err
    )
    soup = ["stage=merge", "merge=soup", *runs_of_ours]
    call(*soup, f"merge.experts=[{kept_one},{trainings[1].name}]", status=0)
    gone = call(*soup, f"merge.experts=[{trainings[0].name}@2,{trainings[1].name}]", status=1)
    assert (
        "@2 was deleted by stage=clean or a table with free_snapshots. Train it again with"
        " redo=true" in gone.err
    )


def test_work_that_is_held_or_can_go_on_is_left(call: Call, tmp_path: Path) -> None:
    held, resumable = tmp_path / ".work" / ("c" * 64), tmp_path / ".work" / ("d" * 64)
    (resumable / "12ab/resume/step-7").mkdir(parents=True), (held / "34cd").mkdir(parents=True)
    (resumable / "12ab/resume.json").write_text(json.dumps({"step": 7, "files": {}}))
    words = ["stage=clean", f"runs_dir={tmp_path}", "clean.hours=0"]
    with hold_lease(held, "held"):
        assert "0 folders would be freed" in call(*words).out
        told = call(*words, "clean.resume_points=true").out
    assert "an interrupted run, with a resume point after step 7" in told and str(held) not in told
    assert (
        str(held) in call(*words, "clean.dry_run=false").out
        and not held.exists()
        and resumable.exists()
    )


def test_what_is_in_use_is_left_and_the_rest_is_freed(call: Call, tmp_path: Path) -> None:
    """Of three trainings, each with a snapshot of 1 MB that nothing was made from."""
    facts, files = {"snapshots": {"2": {"root": "x"}}}, {"snapshots/step-2/model.safetensors": {}}
    first, held, last = folders = [tmp_path / f"math-{letter * 8}" for letter in "abc"]
    for folder, letter in zip(folders, "abc", strict=True):
        (folder / "snapshots/step-2").mkdir(parents=True)
        (folder / "snapshots/step-2/model.safetensors").write_bytes(b"0" * 2**20)
        Manifest(
            folder.name, letter * 64, {"stage": "sft"}, facts, files=files, started=letter
        ).write(folder)
    (tmp_path / ".work").mkdir()
    with hold_lease(tmp_path / ".work" / ("b" * 64), "held"):
        told = call("stage=clean", f"runs_dir={tmp_path}", "clean.dry_run=false")
    assert (
        told.status == 0
        and told.out.count("in use: left") == 1
        and "2.0 MB in 2 folders freed" in told.out
    )
    assert [(one / "snapshots/step-2").exists() for one in (first, held, last)] == [
        False,
        True,
        False,
    ]
    in_use, freed = (
        json.loads((one / "manifest.json").read_text())["facts"]["snapshots"]
        for one in (held, last)
    )
    assert in_use == {"2": {"root": "x"}} and freed["2"]["freed"]
