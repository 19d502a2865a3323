"""What SIGTERM and SIGUSR1 do, from the first line of the program to its last."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_types import Call
from small_runs import a_run, writes

from pipeline.launch import in_process
from pipeline.launch.local import execute_here
from pipeline.runs.make import make_once
from pipeline.runs.stop import (
    STOPPING,
    UNFINISHED,
    Stopped,
    handle_signals,
    heard_by,
    raise_if_signalled,
)


def test_it_ends_what_is_in_work_with_a_status_of_its_own() -> None:
    with handle_signals():
        with pytest.raises(Stopped) as stopped:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(5)
        assert stopped.value.code == UNFINISHED and stopped.value.signal_name == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_waits_until_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the midst of it ends the process with SIGABRT."""
    importing = SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=importing))
    with handle_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.15)  # it has asked again
        importing._initializing = False
        with pytest.raises(Stopped):
            time.sleep(5)


def test_a_second_signal_does_not_cut_short_what_the_first_ends() -> None:
    """Slurm's SIGTERM comes to the whole tree, and once more from the shell of the job."""
    ended: list[str] = []

    @contextmanager
    def work() -> Iterator[None]:
        try:
            yield
        except SystemExit:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            ended.append("state")
            raise
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            ended.append("lease")

    with handle_signals(), pytest.raises(Stopped), work():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert ended == ["state", "lease"]


def test_who_listens_decides_and_what_follows_is_not_begun() -> None:
    told: list[str] = []
    with handle_signals():
        with heard_by(told.append):
            os.kill(os.getpid(), signal.SIGTERM)
            check_runs_on = True
        assert told == ["SIGTERM"] and check_runs_on
        with pytest.raises(Stopped):
            raise_if_signalled()
    raise_if_signalled()


def test_the_first_ctrl_c_lets_work_end_and_the_second_stops_at_once(
    interruptible: None, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt), handle_signals(), heard_by(told.append):
        os.kill(os.getpid(), signal.SIGINT)
        assert told == ["SIGINT"] and "Ctrl-C again stops at once" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    with handle_signals(), heard_by(told.append):  # counted anew
        os.kill(os.getpid(), signal.SIGINT)
    assert told == ["SIGINT", "SIGINT"]


@pytest.mark.parametrize(
    ("stage", "number"),
    zip(["data", "merge", "eval", "table"], [signal.SIGINT, *STOPPING], strict=True),
)
def test_outside_a_training_it_drops_the_work_and_the_same_command_goes_on(
    number: signal.Signals,
    stage: str,
    interruptible: None,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: Path,
    world: Path,
    math_expert: Path,
    language_expert: Path,
) -> None:
    words = {
        "data": ["stage=data", "expert=math", f"data_root={world}"],
        "merge": ["stage=merge", "merge=soup", f"merge.experts=[{math_expert},{language_expert}]"],
        "eval": ["stage=eval", f"checkpoint={base}", "eval=mgsm_0shot", f"data_root={world}"],
        "table": ["stage=table", "table=sandbox", "launcher.workers=1"],
    }[stage]
    words += [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]

    def signalled(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
        (work / "half").write_text("half")
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")

    monkeypatch.setattr(in_process, "stage_function", lambda run: signalled)
    told = call(*words)
    assert told.status == (130 if number == signal.SIGINT else 75) and told.out == ""
    name = "interrupted" if number == signal.SIGINT else number.name
    assert (
        f"{name}: finished runs and resume points stay" in told.err and "Traceback" not in told.err
    )
    assert not list((tmp_path / "runs").glob("*/manifest.json"))
    if stage in ("data", "merge"):
        monkeypatch.setattr(in_process, "stage_function", lambda run: lambda *_: {})
        assert call(*words).status == 0


def test_a_signal_when_all_is_finished_is_75(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    make_once(run, writes())
    with handle_signals(), heard_by(lambda _: None):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            execute_here([run])
    assert stopped.value.code == UNFINISHED


@pytest.mark.parametrize(("number", "delay"), zip(STOPPING, (0.15, 0.8, 1.6), strict=True))
def test_while_libraries_are_imported_it_is_75_too(
    number: signal.Signals, delay: float, tmp_path: Path
) -> None:
    """At any time after the first line:

    Hydra and OmegaConf take a third of a second, torch and others seconds.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "stage=plan", "table=sandbox", f"runs_dir={tmp_path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    started_our_code(process.pid)
    time.sleep(delay)
    process.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode in (0, 75) and "Traceback" not in told, told[-2000:]
    assert process.returncode == 75 or delay > 0.2


def started_our_code(pid: int) -> None:
    """Wait until the process has a handler for SIGTERM (bit 14 of the signals that it catches)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt")).split()[1]
        if int(caught, 16) & (1 << (signal.SIGTERM - 1)):
            return
        time.sleep(0.005)
    raise AssertionError("no handler within a minute")


HEEDS = """
import os, signal, sys
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
from pipeline.runs import stop
stop.answer_early()
if sys.argv[1] == "early":
    os.kill(os.getpid(), signal.SIGUSR1)
with stop.handle_signals():
    if sys.argv[1] != "early":
        os.kill(os.getpid(), signal.SIGHUP)
    print(stop.stop_signal_name(), stop.EARLY in os.environ)
"""


@pytest.mark.parametrize(
    ("how", "job", "status", "printed"),
    [
        ("default", {}, 75, ""),
        ("ignored", {}, 0, "None False"),
        ("early", {}, 75, ""),
        ("early", {"SLURM_JOB_ID": "7"}, 0, "SIGUSR1 False"),
    ],
)
def test_what_is_heeded(how: str, job: dict[str, str], status: int, printed: str) -> None:
    """A terminal that is closed ends a command in good order, which nohup keeps.

    A time limit that is announced early is kept for the first run of a job.
    """
    outside = {key: value for key, value in os.environ.items() if key != "SLURM_JOB_ID"}
    done = subprocess.run(
        [sys.executable, "-c", HEEDS, how], env=outside | job, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (status, printed)
