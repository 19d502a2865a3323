"""One owner without locks.

Who is dead, who waits, what is taken over, and what one that was taken for dead can do; and the
resume point of a run: whole or not used, of this very run, and all that is kept of its work folder.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from limits import files_up_to
from small_runs import a_run, never, writes

from pipeline.errors import Held
from pipeline.runs import lease as leases
from pipeline.runs import resume, state
from pipeline.runs.lease import (
    DEAD_AFTER,
    Holder,
    Lease,
    Lost,
    live_holder,
    take_lease,
    this_process,
)
from pipeline.runs.make import make_once
from pipeline.runs.run import Run


def elsewhere(run: Run, age: float, **changes: Any) -> Holder:
    """Return a lease of a process on another machine, last touched `age` seconds ago.

    The age is by the clock of the file system.
    """
    run.workplace.mkdir(parents=True, exist_ok=True)
    other = replace(
        this_process(),
        host="node17",
        machine="another boot",
        job="812_3",
        since="2026-01-02T03:04:05",
        **changes,
    )
    file = run.workplace / "lease-1"
    file.write_text(json.dumps(asdict(other)))
    then = leases.now_at(run.workplace) - age
    os.utime(file, (then, then))
    return other


def test_there_is_one_owner_and_the_next_comes_when_it_is_done(tmp_path: Path) -> None:
    place = a_run(tmp_path).workplace
    first = take_lease(place)
    assert isinstance(first, Lease) and live_holder(place) == first.of == take_lease(place)
    first.release()
    assert live_holder(place) is None and not place.exists()
    second = take_lease(place)
    assert isinstance(second, Lease) and second.folder != first.folder
    second.release()


def test_in_an_allocation_a_live_lease_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "813")
    run = a_run(tmp_path)
    elsewhere(run, age=DEAD_AFTER - 30)
    expected = (
        f"^{run.name} is held by job 812_3 on node17 since 2026-01-02T03:04:05. Rerun the same"
        " command to resume when"
    )
    with pytest.raises(Held, match=expected):
        make_once(run, never)
    assert (run.workplace / "lease-1").is_file()


def test_at_a_terminal_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path)
    other = elsewhere(run, age=0)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (run.workplace / "lease-1").unlink()  # as its owner does at the end

    monkeypatch.setattr(time, "sleep", sleep)
    assert make_once(run, writes()).is_dir()
    assert len(looks) == 3 and capfd.readouterr().err == f"{run.name}: held by {other}; waiting\n"


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch a dead lease for only a tenth of a second."""
    monkeypatch.setattr(leases, "BEAT", 0.05), monkeypatch.setattr(leases, "LOOK", 0.02)


def test_one_that_gave_no_sign_is_dead_and_its_resume_point_is_taken_over(
    tmp_path: Path, quickly: None
) -> None:
    """Judged by the clock of the file system: this machine's may be wrong by hours."""
    run = a_run(tmp_path)
    other = elsewhere(run, age=DEAD_AFTER + 30)
    run.lease = other.id
    at_step(run, 3)
    (run.work / "half").write_text("not of the resume point")
    run.lease = None
    seen: list[Any] = []

    def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        seen.append((work.name, resume.usable_resume_point(run), (work / "half").exists()))
        return {}

    make_once(run, stage)
    ((name, record, half),) = seen
    assert name != other.id and record is not None and record["step"] == 3 and not half
    assert not run.workplace.exists()


@pytest.mark.parametrize("off", [-600.0, 600.0])
def test_a_clock_that_is_off_takes_nothing_from_the_living(
    off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickly: None
) -> None:
    run, real = a_run(tmp_path), time.time
    elsewhere(run, age=30)
    monkeypatch.setattr(time, "time", lambda: real() + off)
    assert isinstance(take_lease(run.workplace), Holder)
    elsewhere(run, age=DEAD_AFTER + 30)
    assert isinstance(take_lease(run.workplace), Lease)


def test_one_whose_clock_sets_the_times_of_its_files_is_alive_while_it_touches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre, ten minutes behind: its lease looks old for ever, and moves."""
    run, touched = a_run(tmp_path), []
    other = elsewhere(run, age=600)
    monkeypatch.setattr(leases, "BEAT", 0.1)

    def sleep(seconds: float) -> None:
        touched.append(leases.now_at(run.workplace) - 600)
        os.utime(run.workplace / "lease-1", (touched[-1], touched[-1]))

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        assert take_lease(run.workplace) == other and touched
    assert isinstance(take_lease(run.workplace), Lease)  # now it is still


def test_a_disk_without_room_for_a_lease_leaves_none(tmp_path: Path) -> None:
    """It could be created and not written.

    An empty one would be waited for, as one that is about to be.
    """
    place = a_run(tmp_path).workplace
    with files_up_to(0), pytest.raises(OSError, match="File too large"):
        take_lease(place)
    assert live_holder(place) is None and not list(place.iterdir())
    assert isinstance(take_lease(place), Lease)


def test_a_process_of_this_machine_is_dead_when_it_is_gone(tmp_path: Path) -> None:
    """At once, killed as it may be; and one that has its number since is another."""
    run = a_run(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from pipeline.runs.lease import take_lease; "
    )
    code += "take_lease(Path(sys.argv[1])).take_over(); print('taken', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run.workplace)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "taken\n"
    assert (found := live_holder(run.workplace)) is not None and found.pid == process.pid
    process.kill()
    process.wait()
    assert live_holder(run.workplace) is None
    mine = this_process()
    (run.workplace / "lease-2").write_text(json.dumps(asdict(replace(mine, began="1"))))
    assert live_holder(run.workplace) is None
    (run.workplace / "lease-2").write_text(json.dumps(asdict(mine)))
    assert live_holder(run.workplace) == mine


def test_one_that_was_taken_for_dead_publishes_nothing_and_is_told_so(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two processes of which the first slept for long: what is published is the second's."""
    run = a_run(tmp_path)
    other = a_run(tmp_path)

    def sleeps(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        file = run.workplace / "lease-1"
        told = json.loads(file.read_text())
        file.write_text(json.dumps({**told, "machine": "another boot"}))
        os.utime(file, (0, 0))
        request.getfixturevalue("quickly")  # for the second: this one beats at its own pace
        assert (make_once(other, writes("theirs\n")) / "train.jsonl").read_text() == "theirs\n"
        assert not work.exists()
        return {}

    with pytest.raises(Lost, match="was taken over: this process gave no sign for 120 s"):
        make_once(run, sleeps)
    assert (run.folder / "train.jsonl").read_text() == "theirs\n" and not run.workplace.exists()


MANY = """
import sys, time
from pathlib import Path
from pipeline.runs.lease import Lease, take_lease
place, log = Path(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
for turn in range(40):
    while not isinstance(lease := take_lease(place), Lease):
        time.sleep(0.001)
    lease.take_over()
    lease.check()
    log.write(f"in {lease.of.id}\\n")
    time.sleep(0.001)
    log.write(f"out {lease.of.id}\\n")
    lease.release()
"""


def test_many_processes_hold_it_one_after_the_other(tmp_path: Path) -> None:
    place, log = a_run(tmp_path).workplace, tmp_path / "log"
    several = [
        subprocess.Popen([sys.executable, "-c", MANY, str(place), str(log)]) for _ in range(4)
    ]
    assert [process.wait(60) for process in several] == [0, 0, 0, 0]
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 2 * 4 * 40
    for entered, gone in zip(lines[::2], lines[1::2], strict=True):
        assert (entered[0], gone[0]) == ("in", "out") and entered[1] == gone[1]


def test_seconds_a_step_are_of_the_steps_of_this_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on after step 500 has not made 500 steps in a second."""
    run, now = a_run(tmp_path), [1000.0]
    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def goes_on(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        for step, seconds in ((501, None), (502, None), (503, 2.0), (504, 2.0), (520, 3.0)):
            state.record_step(run.workplace, step, 900)
            assert state.read_state(run.workplace)["seconds_a_step"] == seconds
            now[0] += {501: 1.5, 502: 2.5, 503: 1.0, 504: 52.0}.get(step, 0)
        raise RuntimeError("no room")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            make_once(run, goes_on)


def at_step(run: Run, step: int, snapshots: tuple[int, ...] = ()) -> Path:
    """Its resume point of a step, two files in folders, as a training writes it."""
    run.work.mkdir(parents=True, exist_ok=True)
    for one in snapshots:
        (run.work / f"snapshots/step-{one}").mkdir(parents=True, exist_ok=True)
    beside = run.work / "trainer" / f"checkpoint-{step}"
    (beside / "inner").mkdir(parents=True)
    (beside / "state").write_text(f"state {step}")
    (beside / "inner/moments").write_text("moments")
    resume.write_resume_point(
        run, beside, step, {"snapshots": {str(one): {} for one in snapshots}, "seconds": 1.5}
    )
    return run.work / f"resume/step-{step}"


def test_there_is_one_and_it_is_the_last(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    first, second = at_step(run, 1), at_step(run, 2)
    record = resume.usable_resume_point(run)
    assert (
        record is not None
        and record["step"] == 2
        and resume.resume_folder(run.work, record) == second
    )
    assert record["files"] == {"inner/moments": 7, "state": 7} and not first.exists()


def test_beginning_again_keeps_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    at_step(run, 4, snapshots=(2, 3))
    (run.work / "snapshots/step-4").mkdir()  # taken after the resume point
    (run.work / "model.safetensors").write_text("x")
    assert resume.prepare_work_folder(run) == 1.5
    there = {path.relative_to(run.work).as_posix() for path in run.work.rglob("*")}
    point = {
        "resume",
        "resume/step-4",
        "resume/step-4/inner",
        "resume/step-4/inner/moments",
        "resume/step-4/state",
    }
    assert there == {"resume.json", *point, "snapshots", "snapshots/step-2", "snapshots/step-3"}


@pytest.mark.parametrize("broken", ["cut", "gone", "no JSON", "no record"])
def test_one_that_is_not_whole_is_not_used(broken: str, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    point = at_step(run, 3)
    if broken == "cut":
        (point / "state").write_text("sta")
    elif broken == "gone":
        (point / "inner/moments").unlink()
    elif broken == "no JSON":
        (run.work / "resume.json").write_text("{")
    else:
        (run.work / "resume.json").unlink()
    assert resume.read_resume_point(run.work) is None and resume.usable_resume_point(run) is None
    assert resume.prepare_work_folder(run) == 0.0 and list(run.work.iterdir()) == []


def test_one_of_another_attempt_or_other_parents_is_not_used(tmp_path: Path) -> None:
    parent = a_run(tmp_path, label="parent", seed=1)
    make_once(parent, writes("one\n", weights="one"))
    run = a_run(tmp_path, {"data_root": parent}, label="child")
    at_step(run, 3)
    assert resume.usable_resume_point(run) is not None
    again = a_run(tmp_path, label="parent", seed=1, redo=True)
    make_once(again, writes("two\n", weights="two"))
    assert (
        resume.usable_resume_point(run) is None and resume.read_resume_point(run.work) is not None
    )
    make_once(again, writes("one\n", weights="one"))
    assert resume.usable_resume_point(run) is not None
    make_once(
        a_run(tmp_path, {"data_root": parent}, label="child"), writes()
    )  # which takes up the point, and ends
    at_step(run, 3)
    assert resume.usable_resume_point(run) is not None  # of attempt 2, as the run is finished
