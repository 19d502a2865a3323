"""launcher=local: lines of a plan, failures, dead workers, how it ends.

Tests/test_pipeline.py has a whole table.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import forked
import pytest
from limits import tree
from small_runs import a_run, writes

from pipeline.config.compose import compose
from pipeline.config.stages import Launcher
from pipeline.errors import Held, PipelineError
from pipeline.launch import launchers
from pipeline.launch.launchers import executor_for, workers_of
from pipeline.launch.local import Local
from pipeline.launch.plan_file import Task
from pipeline.launch.work import TRIES, Session
from pipeline.runs.graph import order_runs
from pipeline.runs.make import make_once
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Run
from pipeline.stages.rows import build
from pipeline.tables.planned_runs import Planning

# --- lines ---


def again(run: Run) -> Run:
    """Return the run of its line in a plan."""
    return Task(**json.loads(json.dumps(vars(Task.of(run))))).run()


def test_a_line_is_the_run_again(tiny_table: list[str], tmp_path: Path) -> None:
    """Of every stage and merge of the table.

    As JSON and back, with parents that stand for finished ones.
    """
    planning = Planning.of(compose(["stage=table", *tiny_table]))  # type: ignore[arg-type]
    runs = order_runs(planning.targets())
    assert len(runs) == 34
    for run in runs:
        for parent in run.parents.values():
            if isinstance(parent, Run):
                finished(parent)
        other = again(run)
        assert (other.hash, other.label, other.config) == (run.hash, run.label, run.config)
        assert {role: (one.hash, one.folder) for role, one in other.parents.items()} == {
            role: (one.hash, one.folder) for role, one in run.parents.items()
        }


def finished(run: Run) -> None:
    """Write a folder with only the manifest of this run."""
    if not run.folder.is_dir():
        run.folder.mkdir(parents=True)
        Manifest(run.name, run.hash, run.decided_by, {}).write(run.folder)


def test_a_line_of_another_version_or_with_an_unfinished_parent_is_refused(tmp_path: Path) -> None:
    parent = a_run(tmp_path, label="parent", seed=1)
    run = a_run(tmp_path, {"data_root": parent})
    task = Task.of(run)
    with pytest.raises(PipelineError, match=f"^its data_root {parent.name} is not finished$"):
        task.run()
    make_once(parent, writes())
    assert task.run().hash == run.hash
    with pytest.raises(PipelineError, match="was planned by another version of this program"):
        dataclasses.replace(task, hash="0" * 64).run()


def test_snapshots_models_of_the_hub_and_plain_folders_are_parents_too(
    tmp_path: Path, base: Path, world: Path, models: dict[str, list[Path]]
) -> None:
    start = ["stage=sft", "expert=math", f"data_root={world}", f"runs_dir={tmp_path}"]
    for more in (["model=llama3.1_8b"], ["model=trained", f"model.path={models['llama'][0]}"]):
        run = build(compose([*start, *more]))  # type: ignore[arg-type]
        finished(run.parents["data"])  # type: ignore[arg-type]
        other = again(run)
        assert (other.hash, other.parents["model"]) == (run.hash, run.parents["model"])


# --- workers ---


DATA = "stage=data expert=sandbox expert.world.items=2"


def small(tmp_path: Path, seed: int, **changes: Any) -> Run:
    words = [*DATA.split(), "tracking.mode=disabled"]
    run = build(compose([*words, f"runs_dir={tmp_path}", f"seed={seed}"]))  # type: ignore[arg-type]
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **changes))


@pytest.fixture
def two(tmp_path: Path) -> Any:
    with Local(2) as made:
        yield made


def test_a_failure_costs_what_depends_on_it_and_nothing_else(
    two: Local, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = a_run(tmp_path)  # of a source that is nowhere
    child = a_run(tmp_path, {"data_root": bad}, label="child")
    good = [small(tmp_path, seed) for seed in (1, 2, 3)]
    failed = two.execute([child, *good])
    assert (
        set(failed) == {bad.name, child.name}
        and failed[child.name] == f"its parent {bad.name} failed"
    )
    assert (
        "is not on the Hub" in failed[bad.name]
        and f"{bad.name} failed: {failed[bad.name]}" in capfd.readouterr().err
    )
    assert all(read_manifest(run.folder) for run in good)
    processes = [worker.pid for worker in two.workers.values()]
    assert two.execute([child, *good]) == failed  # nothing is tried again, and workers stay
    assert [worker.pid for worker in two.workers.values()] == processes


def test_the_time_left_is_that_of_the_runs_that_have_not_ended(tmp_path: Path) -> None:
    """By two workers, less what runs have taken, and at least that of the longest run."""
    runs = [a_run(tmp_path, label=label, seed=seed) for seed, label in enumerate("abc")]
    seconds = (50.0, 40.0, None)
    local = Local(2)
    tasks = [Task.of(run, took) for run, took in zip(runs, seconds, strict=True)]
    local.session = Session(tmp_path / "session", tasks)
    local.watch(tasks, len(tasks))
    assert local.time_left() == "about 50 s"
    local.started = {runs[0].hash: time.monotonic() - 20.0}
    assert local.progress_line() == "3 runs and about 40 s left | a 20 s"
    local.session.left = local.session.left[2:]
    assert local.time_left() == "unknown time"


SUICIDAL = """
import os, signal, sys
from pathlib import Path
from pipeline.launch import in_process, worker
real = in_process.stage_function

def stage_function(run):
    def stage(*given):
        tries = Path(sys.argv[1], f"tries-{run.config.seed}")
        tries.open("a").write("x")
        if run.config.seed == 2 or run.config.seed == 1 and tries.read_text() == "x":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(run)(*given)

    return stage

in_process.stage_function = stage_function
sys.exit(worker.main(*sys.argv[1:]))
"""


def test_a_dead_worker_is_started_again_and_its_run_with_it(
    two: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By kill -9 while it computes: one run once, another whenever it is begun."""
    start = subprocess.Popen

    def suicidal(command: list[str], **more: Any) -> Any:
        return start([command[0], "-c", SUICIDAL, *command[3:]], **more)

    monkeypatch.setattr(subprocess, "Popen", suicidal)
    once, always, never = (small(tmp_path, seed) for seed in (1, 2, 3))
    failed = two.execute([once, always, never])
    told = f"its worker ended without a word, {TRIES} times. See "
    assert set(failed) == {always.name} and failed[always.name].startswith(told)
    assert read_manifest(once.folder) and read_manifest(never.folder)
    assert Path(two.folder.name, "tries-2").read_text() == "x" * TRIES
    assert (
        f"{once.name}: its worker ended with SIGKILL. Another worker begins the run again."
        in capfd.readouterr().err
    )


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Run, IO[str]]]:
    """Yield a run that another process holds until its standard input is closed."""
    run = small(tmp_path, 1)
    code = "import sys; from pathlib import Path; from pipeline.runs.lease import take_lease; "
    code += (
        "lease = take_lease(Path(sys.argv[1])); print('taken', flush=True); sys.stdin.read();"
        " lease.release()"
    )
    command, pipe = [sys.executable, "-c", code, str(run.workplace)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline()
        yield run, other.stdin


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_another_process_makes_is_waited_for(
    workers: int, held: tuple[Run, IO[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, holder = held

    def releases() -> bool:
        """Once a worker says that it waits."""
        told, deadline = "", time.monotonic() + 60
        while f"{run.name}: held by process " not in told and time.monotonic() < deadline:
            told += capfd.readouterr().err
            time.sleep(0.05)
        holder.close()
        return "held by process" in told

    with Local(workers) as local, ThreadPoolExecutor() as thread:
        said = thread.submit(releases)
        assert (
            local.execute([run, small(tmp_path, 2)]) == {} and run.folder.is_dir() and said.result()
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_in_an_allocation_all_else_is_made_and_the_run_is_left_to_its_holder(
    workers: int, held: tuple[Run, IO[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run, _ = held
    child, other = a_run(tmp_path, {"data_root": run}), small(tmp_path, 2)
    told = rf"^{run.name} is held by process \d+ on .*. Rerun the sam"
    with Local(workers) as local, pytest.raises(Held, match=told):
        local.execute([run, child, other])
    assert other.folder.is_dir() and not child.folder.is_dir()


def test_a_signal_ends_all_in_order(tmp_path: Path, base: Path, world: Path) -> None:
    """Nothing is left behind, and each training has a resume point."""
    table = tmp_path / "mine.yaml"
    table.write_text(
        f"name: mine\naxes: {{seed: [1, 2]}}\nevery: {{model: trained, model.path: {base},"
        f" data_root: {world}, threads: 1, sft.epochs: 900, sft.steps: 4000, sft.batch_size: 4,"
        " sft.micro_batch_size: null, sft.seq_length: 96, sft.precision: fp32}\nruns:\n  expert:"
        " {stage: sft, expert: math, recipe: sandbox_math, seed: '{seed}'}\nscore: {eval:"
        " mgsm_0shot, eval.max_gen_toks: 4, in: en}\ncolumns: {'{seed}': {run: expert}}\n"
    )
    words = ["stage=table", f"table={table}", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    files = [Path(os.devnull), tmp_path / "out", tmp_path / "err"]
    process = forked.started(("-m", "pipeline", *words, "launcher.workers=2"), files)
    workplaces = tmp_path / "runs/.work"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.is_alive():
        states = [json.loads(path.read_text()) for path in workplaces.glob("*/state.json")]
        if sum((one.get("step") or 0) > 2 for one in states) == 2:
            break
        time.sleep(0.1)
    _, *workers = tree(process.pid)
    assert len(workers) == 2
    os.kill(process.pid, signal.SIGUSR1)
    process.join(120)
    told = files[2].read_text(encoding="utf-8")
    assert process.exitcode == 75 and "Traceback" not in told, told[-3000:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert len(list(workplaces.glob("*/*/resume.json"))) == 2  # each training wrote a resume point
    assert [json.loads(path.read_text())["state"] for path in workplaces.glob("*/state.json")] == [
        "stopped"
    ] * 2


# --- how many ---


def test_as_many_workers_as_cores_have_threads_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    words = [
        "stage=eval",
        "checkpoint=package:data/sandbox_base",
        "eval=mgsm_0shot",
        f"runs_dir={tmp_path}",
    ]
    run: Any = build(compose(words))  # type: ignore[arg-type]
    assert workers_of(Launcher(), [run]) == 1  # threads are torch's choice: all cores
    for threads, workers in ((1, 12), (5, 2), (99, 1)):
        run.config.threads = threads
        assert workers_of(Launcher(), [run]) == workers
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert launchers.visible_gpus() == ["4", "7"]
    for listed, ids in (
        (" 4, 7", ["4", "7"]),
        ("-1", []),
        ("2,-1,3", ["2"]),
        ("MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert launchers.visible_gpus() == ids
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with executor_for(Launcher(workers=3), []) as execute:
        assert execute.__self__.cards == ["4", "7"]
