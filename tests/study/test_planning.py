"""Tables as runs: every shipped table plans, its runs are those of the command line, and knobs mean what they say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from planned import TABLES

from pipeline.commands.plan import show_plan
from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.estimate.durations import History
from pipeline.files import ADDED_CONF
from pipeline.report.cells import model_role
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.stages.rows import build
from pipeline.stages.steps import expected_steps
from pipeline.tables.overrides import describe_every_keys
from pipeline.tables.plan import Candidate
from pipeline.tables.planned_runs import Planning

NAMES = sorted(path.stem for path in TABLES.glob("*.yaml"))


def planning(tmp_path: Path, *words: str) -> Planning:
    return Planning.of(compose(["stage=plan", f"runs_dir={tmp_path}/runs", *words]))  # type: ignore[arg-type]


def kinds(runs: list[Run]) -> Counter[str]:
    return Counter(run.config.stage for run in order_runs(runs))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_table_plans_without_a_problem(name: str, tmp_path: Path) -> None:
    found = planning(tmp_path, f"table={name}")
    assert found.targets() and not found.problems
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["layer_swapping_table1", "unreasonable_table3"])
def test_the_largest_tables_plan(name: str, tmp_path: Path) -> None:
    """Table 1 with all 81 configurations of the swap. How long it takes: scripts/bench.py plan.

    To select, the eight snapshots of 3 math trainings are scored in ten languages, those of 12 language trainings on
    four tasks, and the base in four languages on these: each with a run that holds the averages. The base's MGSM of
    these is table 1's.
    """
    selected = 8 * 3 * (10 + 1) + 8 * 12 * (4 + 1) + 4 * (4 + 1) - 4
    own = tmp_path / "own.yaml"
    zones = {f"{b}+{t}": {"bottom": b, "top": t} for b in range(3) for t in range(3)}
    axes = {"axes": {"t": zones}} if name == "layer_swapping_table1" else {}
    own.write_text(yaml.safe_dump({"defaults": [name], "name": "own", **axes}))
    runs = planning(tmp_path, f"table={own}").targets()
    assert kinds(runs) == (
        {"eval": 3016 + selected, "sft": 15, "data": 15, "select": 15} if axes else {"eval": 472, "sft": 212, "data": 7}
    )


def test_a_score_is_the_run_of_the_same_command(tmp_path: Path) -> None:
    """One task of the bundle, one language, the longest answer of that language: its hash is that of stage=eval."""
    found = planning(tmp_path, "table=unreasonable_table_a8")
    runs = {(run.config.eval.tasks[0].task, run.config.languages[0]): run for run in found.targets()}  # type: ignore[attr-defined]
    for language, room in (("te", ["eval.max_gen_toks=1024"]), ("sw", [])):
        model = next(iter(runs["mgsm", language].parents.values()))
        asked = ["stage=eval", "eval=mgsm_2shot", f"languages=[{language}]", "eval.dtype=float32", *room]
        config = compose([*asked, f"checkpoint=hub:{model.hub}", f"runs_dir={tmp_path}/runs"])  # type: ignore[attr-defined]
        assert build(config).hash == runs["mgsm", language].hash  # type: ignore[arg-type]


def test_every_from_the_command_line_goes_to_the_runs_that_read_it(tmp_path: Path) -> None:
    plain, more = (
        {run.label: run for run in order_runs(planning(tmp_path, "table=sandbox", *words).targets())}
        for words in ([], ["every.sft.max_grad_norm=0.5"])
    )
    changed = {label for label in plain if plain[label].hash != more[label].hash}
    assert changed >= {"math-full-s0", "qac-full-s0"} and not any(label.startswith("data-") for label in changed)
    assert all("sandbox_text" not in label for label in changed)  # the base is scored as before


def test_what_every_does_not_reach_is_said_or_refused(tmp_path: Path) -> None:
    """Simultaneous training has a recipe of its own; the others are given the command line's."""
    found = planning(tmp_path, "table=unreasonable_table3", "every.recipe=unreasonable_cpt")
    assert describe_every_keys(found)[-1] == "every.recipe does not reach: simultaneous, which override it"
    with pytest.raises(PipelineError, match="recipe=nope is not an option"):
        planning(tmp_path, "table=unreasonable_table3", "every.recipe=nope").targets()
    with pytest.raises(PipelineError, match="table=sandbox|sandbox.yaml, every: expert reaches no run of .*math"):
        planning(tmp_path, "table=sandbox", "every.expert=nope")


def test_a_table_whose_trainings_cannot_be_planned_is_still_shown(tmp_path: Path) -> None:
    """Five processes do not divide the recipes' batches: what is trained has no run to count questions of."""
    words = ["processes=5"]
    config = compose(
        ["stage=plan", "table=layer_swapping_table1", f"runs_dir={tmp_path}", *(f"every.sft.{word}" for word in words)]
    )
    with pytest.raises(PipelineError, match="^cannot be planned: sft.batch_size=") as refused:
        show_plan(config)  # type: ignore[arg-type]
    assert " parts that depend on these" in str(refused.value) and "cells of 1108 scores" in refused.value.output
    found = Planning.of(config)  # type: ignore[arg-type]
    first, *_, last = refused.value.output.splitlines()
    unplanned = [score for score in found.plan.scores if found.evaluation_of(score) is None]
    assert first == last and f"; not including {len(unplanned):,} of 1,108 scores, which cannot be planned; " in first
    assert 0 < len(unplanned) < 1108


OWN = """
name: own
every: {model: sandbox, threads: 1}
runs:
  mine: {stage: sft, expert: mine, recipe: sandbox_math}
columns: {mine: {run: mine, fact: seconds}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An expert of 40 rows in CSV, in a folder of options, and a data_root."""
    monkeypatch.setenv(ADDED_CONF, str(tmp_path / "conf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "conf/expert").mkdir(parents=True)
    (tmp_path / "conf/expert/mine.yaml").write_text(
        "name: mine\nside: math\nsources: {own: {file: rows.csv, rows: template, prompt: '{q}', completion: '{a}'}}\n"
    )
    rows = [f'"Question {number},\nin two lines?",{number}' for number in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["q,a", *rows]) + "\n")
    return tmp_path


def test_rows_in_csv_are_counted(own: Path) -> None:
    """As those in JSON lines are: the plan knows the steps, and the seconds."""
    words = [
        "stage=sft",
        "expert=mine",
        "model=sandbox",
        "recipe=sandbox_math",
        f"data_root={own}",
        f"runs_dir={own}/r",
    ]
    run = build(compose([*words, "sft.steps=null", "sft.epochs=3", "sft.batch_size=8", "sft.micro_batch_size=4"]))  # type: ignore[arg-type]
    assert expected_steps(run) == 15
    assert re.fullmatch(r"~\d+", History().seconds_text(run))


def test_a_set_of_unknown_size_does_not_need_a_gpu(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another format of rows: 32 rows of 1,024 tokens would not fit, but nobody knows that they are so long."""
    (own / "rows.csv").rename(own / "rows.tsv")
    file = own / "conf/expert/mine.yaml"
    file.write_text(file.read_text().replace("rows.csv", "rows.tsv"))
    monkeypatch.setattr(cpu, "memory", lambda: 16 * 10**9)
    words = ["stage=sft", "expert=mine", "model=gemma3_270m", f"data_root={own}", f"runs_dir={own}/r"]
    assert History().seconds_text(build(compose(words))) == "?"  # type: ignore[arg-type]


def test_single_commands_are_shown_and_planned_by_the_program(
    tmp_path: Path, call: Callable[..., SimpleNamespace]
) -> None:
    words = ["stage=plan", "model=sandbox", "recipe=sandbox_math", f"runs_dir={tmp_path}"]
    assert "batch_size: 16" in call(*words, "expert=math", "--cfg", "job").out
    both = call("-m", *words, "expert=math,sw")
    assert both.out.count(" runs to compute here: ") == 4, both.err


def test_a_single_command_is_planned(own: Path) -> None:
    """What it takes first and last, of the stage that its groups name, or plan.stage."""
    words = ["expert=mine", "model=sandbox", "recipe=sandbox_math", f"data_root={own}", f"runs_dir={own}/r"]
    lines = show_plan(compose(["stage=plan", *words, "sft.steps=3"])).splitlines()  # type: ignore[arg-type]
    assert lines[0] == lines[-1] and re.search(r"; 2 of 2 runs to compute here: about \d+ s", lines[0])
    assert lines[0].startswith("mine-full-s0: recipe=sandbox_math mixture=all, ") and " rows in 3 steps, " in lines[0]
    run = build(compose(["stage=sft", *words, "sft.steps=3"]))  # type: ignore[arg-type]
    assert any(line.startswith(run.name) for line in lines)
    fetched = compose(["stage=prefetch", *words])
    assert fetched.runs_dir == f"{own}/r" and fetched.command == ["stage=sft", *words]  # type: ignore[attr-defined]
    data = show_plan(compose(["stage=plan", "plan.stage=data", *words[:1], *words[3:]]))  # type: ignore[arg-type]
    assert data.startswith("1 of 1 runs to compute here: ") and "data-mine-" in data
    assert not (own / "r").exists()
    with pytest.raises(PipelineError, match="unknown key sft.stops: did you mean sft.steps"):
        show_plan(compose(["stage=plan", *words, "sft.stops=3"]))  # type: ignore[arg-type]


def test_workers_divide_the_time_of_a_plan(own: Path) -> None:
    """As stage=table does: two trainings of the same data, by two workers, take the longest path."""
    table = OWN.replace("mine: {stage", "mine: {seed: '{seed}', stage").replace("{run", "{mean: [seed], run")
    (own / "own.yaml").write_text(table + "axes: {seed: [0, 1]}\n")
    words = ["stage=plan", f"table={own}/own.yaml", f"data_root={own}", f"runs_dir={own}/r"]
    one, two = (show_plan(compose([*words, f"launcher.workers={count}"])).splitlines()[0] for count in (1, 2))  # type: ignore[arg-type]
    seconds = [int(re.search(r"about (\d+) s", text)[1]) for text in (one, two)]  # type: ignore[index]
    assert two.endswith(" with 2 workers") and seconds[0] / 2 - 1 <= seconds[1] <= seconds[0] / 2 + 2


def test_a_selection_is_planned_from_the_sizes_of_its_sets(tmp_path: Path) -> None:
    """40,000 rows, a snapshot each 5,000: eight, the last of them the final weights."""
    found = planning(tmp_path, "table=layer_swapping_table1")
    select = next(run for run in order_runs(found.targets()) if run.config.stage == "select")
    steps = sorted(int(role.partition("@")[2]) for role in select.parents if "@" in role)
    training = next(run for run in order_runs([select]) if run.config.stage == "sft")
    batch = training.config.sft.batch_size  # type: ignore[attr-defined]
    assert steps == [5000 * number // batch for number in range(1, 9)]
    with_fewer = planning(tmp_path, "table=layer_swapping_table1", "every.data.allow_fewer=true")
    assert not [run for run in with_fewer.targets() if "select" in run.label]
    assert any("the snapshots of" in problem for problem in with_fewer.problems.values())


def test_what_a_choice_names_is_planned_once_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planning(tmp_path, "table=sandbox")
    assert len(found.waiting_scores()) == 28  # of the chosen merges and of their controls
    numbers = {score: float("counts=3+0" in score.model or "density=0.5" in score.model) for score in found.plan.scores}
    monkeypatch.setattr(found, "primary_number", numbers.__getitem__)
    winners: set[Candidate | None] = {found.chosen_candidate(key) for key in found.plan.choices}
    assert winners == {("3+0",), (0.5,)} and not found.waiting_scores()
    chosen = [run for run in found.targets() if run.config.chosen_by]  # type: ignore[attr-defined]
    assert len(chosen) == 28
    assert {getattr(run.config.merge, "bottom_layers", None) for run in chosen} == {3, None}  # type: ignore[attr-defined]


def test_a_file_of_ones_own_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [sandbox]\nname: mine\naxes: {seed: [0, 1]}\n")
    monkeypatch.chdir(tmp_path)
    assert kinds(planning(tmp_path, "table=./mine.yaml").targets())["sft"] == 4
    (tmp_path / "mine.yaml").write_bytes(b"name: \xff")
    with pytest.raises(PipelineError, match="is not UTF-8"):
        planning(tmp_path, "table=./mine.yaml")


def test_random_exemplars_are_for_mgsm(tmp_path: Path) -> None:
    from pipeline.config.evaluation import EvalTask
    from pipeline.evaluate.tasks import task_definitions

    (drawn,) = task_definitions([EvalTask("mgsm", 2)], ["sw"], None, tmp_path / "a", exemplars="random")
    assert yaml.unsafe_load(drawn.file.read_text())["fewshot_config"] == {"sampler": "default"}
    with pytest.raises(PipelineError, match="exemplars=random is for MGSM: belebele"):
        task_definitions([EvalTask("belebele", 5)], ["sw"], None, tmp_path / "c", exemplars="random")


def test_a_joint_training_stands_with_the_merges_also_where_a_snapshot_of_it_is_chosen(tmp_path: Path) -> None:
    words = ["stage=table", "table=sandbox_layer_swapping", f"runs_dir={tmp_path}"]
    planning = Planning.of(compose(words))  # type: ignore[arg-type]
    table = planning.bind()
    roles = {
        cell.column: model_role(table, reading[()])
        for cell in planning.plan.cells.values()
        for item in cell.items
        for reading in item.readings
        if () in reading
    }
    assert roles["joint_sft"] == "merge" and roles["base"] == "base"
    assert roles["math_expert"] == roles["language_expert"] == "expert"
