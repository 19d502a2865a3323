"""One owner without locks: who is dead, who waits, what is taken over, and what one that was taken for dead can do."""

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
from pipeline.runs.lease import DEAD_AFTER, Holder, Lease, Lost, live_holder, take_lease, this_process
from pipeline.runs.make import make_once
from pipeline.runs.run import Run


def elsewhere(run: Run, age: float, **changes: Any) -> Holder:
    """A lease of a process on another machine, last touched `age` seconds ago by the clock of the file system."""
    run.workplace.mkdir(parents=True, exist_ok=True)
    other = replace(
        this_process(), host="node17", machine="another boot", job="812_3", since="2026-01-02T03:04:05", **changes
    )
    file = run.workplace / "lease-1"
    file.write_text(json.dumps(asdict(other)))
    then = leases.now_at(run.workplace) - age
    os.utime(file, (then, then))
    return other


def with_a_resume_point(run: Run, folder: Path) -> None:
    """What an interrupted training leaves in its work folder."""
    run.lease = folder.name
    (run.work / "beside").mkdir(parents=True)
    (run.work / "beside/state").write_text("state")
    (run.work / "half").write_text("not of the resume point")
    resume.write_resume_point(run, run.work / "beside", 3, {"snapshots": {}, "seconds": 1.0})
    run.lease = None


def test_there_is_one_owner_and_the_next_comes_when_it_is_done(tmp_path: Path) -> None:
    place = a_run(tmp_path).workplace
    first = take_lease(place)
    assert isinstance(first, Lease) and live_holder(place) == first.of == take_lease(place)
    first.release()
    assert live_holder(place) is None and not place.exists()
    second = take_lease(place)
    assert isinstance(second, Lease) and second.folder != first.folder
    second.release()


def test_in_an_allocation_a_live_lease_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "813")
    run = a_run(tmp_path)
    elsewhere(run, age=DEAD_AFTER - 30)
    expected = (
        f"^{run.name} is held by job 812_3 on node17 since 2026-01-02T03:04:05: rerun the same command to resume when"
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
    """A dead lease is watched for a tenth of a second."""
    monkeypatch.setattr(leases, "BEAT", 0.05), monkeypatch.setattr(leases, "LOOK", 0.02)


def test_one_that_gave_no_sign_is_dead_and_its_resume_point_is_taken_over(tmp_path: Path, quickly: None) -> None:
    """Judged by the clock of the file system: this machine's may be wrong by hours."""
    run = a_run(tmp_path)
    other = elsewhere(run, age=DEAD_AFTER + 30)
    with_a_resume_point(run, run.workplace / other.id)
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
    """It could be created and not written: an empty one would be waited for, as one that is about to be."""
    place = a_run(tmp_path).workplace
    with files_up_to(0), pytest.raises(OSError, match="File too large"):
        take_lease(place)
    assert live_holder(place) is None and not list(place.iterdir())
    assert isinstance(take_lease(place), Lease)


def test_a_process_of_this_machine_is_dead_when_it_is_gone(tmp_path: Path) -> None:
    """At once, killed as it may be; and one that has its number since is another."""
    run = a_run(tmp_path)
    code = "import sys, time; from pathlib import Path; from pipeline.runs.lease import take_lease; "
    code += "take_lease(Path(sys.argv[1])).take_over(); print('taken', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(run.workplace)], stdout=subprocess.PIPE, text=True)
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
    several = [subprocess.Popen([sys.executable, "-c", MANY, str(place), str(log)]) for _ in range(4)]
    assert [process.wait(60) for process in several] == [0, 0, 0, 0]
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 2 * 4 * 40
    for entered, gone in zip(lines[::2], lines[1::2], strict=True):
        assert (entered[0], gone[0]) == ("in", "out") and entered[1] == gone[1]


def test_seconds_a_step_are_of_the_steps_of_this_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
