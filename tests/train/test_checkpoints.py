"""Killed at any step, a training ends with the bits and the log that it would have had.

And what stops it early.
"""

import errno
import gc
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from at_step import disturb
from fixture_types import Call, Make
from tiny_words import FEW, TINY, last_of

from pipeline.config.compose import compose
from pipeline.config.training import Sft
from pipeline.files import sha256
from pipeline.launch.in_process import stage_function
from pipeline.runs import resume
from pipeline.runs.graph import order_runs
from pipeline.runs.make import make_once
from pipeline.runs.manifest import read_manifest
from pipeline.runs.stop import UNFINISHED, heard_by
from pipeline.runs.tracking import Tracker
from pipeline.stages.rows import build
from pipeline.train import checkpoints, stage
from pipeline.train.checkpoints import Progress
from pipeline.train.processes import forward_signal, train_together

STEPS = 6
SMALL = [
    *(
        "sft.seq_length=96",
        "sft.batch_size=4",
        f"sft.steps={STEPS}",
        "sft.warmup_steps=2",
        "sft.resume_minutes=0",
    ),
    *("sft.learning_rate=1e-3", "tracking.mode=disabled", "threads=1"),
    "sft.precision=fp32",
]


class Killed(Exception):
    """What a test kills a training with."""


def kill(model: Any) -> None:
    raise Killed


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def at(step: int, do: Callable[[Any], None] = kill) -> None:
        disturb(monkeypatch, step, do)

    return at


@pytest.fixture(scope="module")
def words(make_run: Make, world: Path) -> Callable[..., list[str]]:
    """Return the command of a small training of a base with five layers."""
    few = [
        *FEW,
        "expert=sandbox_text",
        f"data_root={world}",
        "recipe=sandbox_math",
        "sft.packing=false",
    ]
    base = make_run("stage=cpt", *last_of([*TINY, "model.architecture.num_hidden_layers=5", *few]))

    def command(runs_dir: Path, *more: str) -> list[str]:
        start = [
            "stage=sft",
            "expert=math",
            "model=trained",
            f"model.path={base}",
            f"data_root={world}",
        ]
        return [*start, *SMALL, f"runs_dir={runs_dir}", *more]

    return command


def made(command: list[str]) -> Path:
    run = build(compose(command))  # type: ignore[arg-type]
    for parent in order_runs([run])[:-1]:
        make_once(parent, stage_function(parent))
    return make_once(run, stage_function(run))


@pytest.fixture(scope="module")
def whole(
    words: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the results of the undisturbed small training."""
    return results(made(words(tmp_path_factory.mktemp("whole"))))


def results(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return facts_of(manifest.facts, folder)


def facts_of(facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the digests of the weights, of each snapshot, and of the log."""
    assert {f"step-{step}" for step in facts.get("snapshots", {})} == {
        path.name for path in folder.glob("snapshots/*")
    }
    found = {
        "weights": facts["weights"]["root"],
        "log": sha256(folder / "log.jsonl"),
        "loss": facts["loss"],
    }
    return found | {
        step: [one["root"], one["validation_loss"]]
        for step, one in facts.get("snapshots", {}).items()
    }


JOINT = [
    "expert=math_qac",
    "data.size=30",
    "data.validation=4",
    "sft.snapshot_every=9",
    "sft.snapshot_keep=1",
]
SCALED = "partition.scale_to_depth=true"
WAYS = {
    "full": [
        "data.size=28",
        "data.validation=8",
        "sft.snapshot_every=9",
        "sft.save_dtype=bfloat16",
    ],
    "accumulated over a short epoch": ["data.size=14", "sft.epochs=2", "sft.micro_batch_size=2"],
    "autocast": ["sft.precision=bf16"],
    "8 bits": ["sft.optimizer=adamw_8bit", "sft.weights=bfloat16"],  # rounded by chance
    "partial_lora": ["sft=partial_lora", "partition=C", SCALED, "sft.lora_dropout=0.1"],
    "mixed": ["sft=mixed", *JOINT],
    "simultaneous": ["sft=simultaneous", "partition=A", SCALED, *JOINT],
    "simultaneous_lora": [
        "sft=simultaneous_lora",
        "partition=B",
        SCALED,
        "sft.steps_per_switch=2",
        *JOINT,
    ],
}
JOINED = ("mixed", "simultaneous", "simultaneous_lora")  # of which one snapshot is kept
KILLED = {"full": (1, 3, STEPS), "simultaneous": (2, 5)}  # of the others, one step


@pytest.mark.parametrize("way", WAYS)
def test_killed_at_any_step_it_ends_with_the_same_bits_and_log(
    way: str, words: Callable[..., list[str]], at_step: Callable[..., None], tmp_path: Path
) -> None:
    """Where at several steps, in one attempt after the other."""
    expected = results(made(words(tmp_path / "whole", *WAYS[way])))
    assert {"3", "5"} & expected.keys() == (
        {"full": {"3", "5"}} | dict.fromkeys(JOINED, {"5"})
    ).get(way, set())
    command, steps = words(tmp_path / "killed", *WAYS[way]), KILLED.get(way, (4,))
    for step in steps:
        at_step(step)
        with pytest.raises(Killed):
            made(command)
        record = resume.read_resume_point(build(compose(command)).work)  # type: ignore[arg-type]
        assert (record["step"] if record else 0) == step - 1
    at_step(0)
    folder = made(command)
    assert results(folder) == expected
    assert not {"resume", "resume.json", "trainer"} & {path.name for path in folder.iterdir()}
    taken_up = read_manifest(folder).facts["resumed"]  # type: ignore[union-attr]
    assert [one["step"] for one in taken_up] == [step - 1 for step in steps if step > 1]


IMPORTS = "import pipeline.__main__, pipeline.train.stage, datasets"
SLOW = """
import sys, time
from transformers import TrainerCallback
from pipeline.__main__ import main
from pipeline.train import checkpoints
class Sleep(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(float(sys.argv[1]) * (state.global_step >= 3))
class Slow(checkpoints.Checkpoints):
    def __init__(self, trainer, *rest):
        super().__init__(trainer, *rest)
        trainer.add_callback(Sleep())
checkpoints.Checkpoints = Slow
sys.exit(main(sys.argv[2:]))
"""  # from its third step on, before the resume point of each is written
KILL = """
import os, signal, sys, threading, time
from pathlib import Path
from pipeline.runs.lease import latest_work_folder
from pipeline.runs.resume import read_resume_point
def kill(workplace):
    while (read_resume_point(latest_work_folder(workplace)) or {"step": 0})["step"] < 3:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, args=(Path(sys.argv.pop(1)),), daemon=True).start()
"""


def test_killed_for_good_and_taken_up_in_another_process(
    words: Callable[..., list[str]], tmp_path: Path, whole: dict[str, Any]
) -> None:
    """SIGKILL, wherever it comes."""
    command = words(tmp_path / "killed")
    workplace = str(build(compose(command)).workplace)  # type: ignore[arg-type]
    done = forked.python("-c", KILL + SLOW, workplace, "1", *command, after=IMPORTS)
    assert done.returncode == -signal.SIGKILL
    folder = made(command)
    (taken_up,) = read_manifest(folder).facts["resumed"]  # type: ignore[union-attr]
    assert 3 <= taken_up["step"] < STEPS and results(folder) == whole


def test_a_signal_stops_it_with_a_resume_point_and_a_status_of_its_own(
    interruptible: None,
    words: Callable[..., list[str]],
    at_step: Callable[..., None],
    tmp_path: Path,
    call: Call,
    whole: dict[str, Any],
) -> None:
    command = words(tmp_path / "runs", "sft.resume_minutes=null")
    for step, number, status in (
        (2, signal.SIGTERM, 75),
        (3, signal.SIGUSR1, 75),
        (5, signal.SIGINT, 130),
    ):
        at_step(step, lambda model, number=number: os.kill(os.getpid(), number))
        told = call(*command)
        assert told.status == status and told.out == ""
        assert (
            f"{number.name}: math-full-s0" in told.err
            and told.err.count("Rerun the same command to resume") == 1
        )
        ordinary = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        assert (
            signal.getsignal(number) == ordinary
        )  # outside of a training it does what it always does
        record = resume.read_resume_point(build(compose(command)).work)  # type: ignore[arg-type]
        assert record is not None and record["step"] == step
    at_step(0)
    told = call(*command)
    assert told.status == 0 and "resumes after step 5" in told.err
    assert results(Path(told.out.strip())) == whole


def whole_and_stopped(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Train in each of two processes, then again with a signal that only the second gets."""
    gc.freeze()  # what is imported is not searched for garbage before each training
    rank = int(os.environ["RANK"])
    checkpoints.LOOK = 1  # look at each step
    found = [stage.train(run, run.work, Tracker(None))]
    other = replace(run, config=replace(run.config, runs_dir=str(work)))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        disturb(patch, 3 if rank else 0, lambda model: os.kill(os.getpid(), signal.SIGTERM))
        stage.train(other, other.work, Tracker(None))
    record = resume.usable_resume_point(other)
    assert stopped.value.code == UNFINISHED and record is not None and record["step"] == 3
    found.append(stage.train(other, other.work, Tracker(None)))
    if rank == 0:
        told = [facts_of(facts, one.work) for facts, one in zip(found, (run, other), strict=True)]
        (work / "told.json").write_text(json.dumps([told, found[1]["resumed"]]))
    torch.distributed.barrier()  # the first that ends, ends the other
    raise SystemExit(UNFINISHED)


@pytest.mark.usefixtures("forked_ranks")
def test_two_processes_stop_together_and_go_on_together(
    words: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Each process has its own sums and generators, and its own signals.

    What they end with is the status of all.
    """
    way = [*WAYS["simultaneous"], "sft.micro_batch_size=2"]
    run: Any = build(compose(words(tmp_path / "whole", *way, "sft.processes=2")))  # type: ignore[arg-type]
    for parent in order_runs([run])[:-1]:
        make_once(parent, stage_function(parent))
    run.work.mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        train_together(whole_and_stopped, run, tmp_path, Tracker(None))
    assert ended.value.code == UNFINISHED
    (whole, stopped), resumed = json.loads((tmp_path / "told.json").read_text())
    assert whole == stopped and len(whole) > 3 and [one["step"] for one in resumed] == [3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_processes_that_were_started(
    number: signal.Signals, interruptible: None
) -> None:
    """A Ctrl-C as SIGTERM.

    From a terminal they have had one already, and a second one would stop them at once.
    """
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    with heard_by(forward_signal):
        os.kill(os.getpid(), number)
        process.join(10)
    assert process.exitcode == -signal.SIGTERM


# --- what is not used ---


def test_a_manifest_has_the_machines_of_all_attempts(
    words: Callable[..., list[str]],
    at_step: Callable[..., None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Bits depend on the number of threads.

    That of the last attempt alone would name one that gives others. Another configuration leaves
    the resume point as it is.
    """
    command, threads = words(tmp_path / "runs"), torch.get_num_threads()
    at_step(STEPS)
    with pytest.raises(Killed):
        made(command)
    run = build(compose(command))  # type: ignore[arg-type]
    work = run.work
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    at_step(1)
    with pytest.raises(Killed):
        made(last_of([*command, "sft.learning_rate=2e-3"]))
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before
    at_step(0)
    try:
        torch.set_num_threads(threads + 1)
        manifest = read_manifest(made(command))
    finally:
        torch.set_num_threads(threads)
    told = capfd.readouterr().err
    assert "resumes after step 5" in told
    assert manifest is not None and manifest.machine["threads"] == f"{threads}, then {threads + 1}"
    assert manifest.machine["device"] == "cpu"


def test_a_disk_that_fills_while_a_resume_point_is_written_leaves_the_one_before(
    words: Callable[..., list[str]],
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, Any],
) -> None:
    command, real = words(tmp_path / "runs"), os.rename

    def full(path: Any, to: Any) -> None:
        if str(to).endswith("step-3"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        told = call(*command)
    assert (
        told.status == 1 and "No space left on device" in told.err and "Traceback" not in told.err
    )
    record = resume.read_resume_point(build(compose(command)).work)  # type: ignore[arg-type]
    assert record is not None and record["step"] == 2
    assert results(made(command)) == whole


# --- what stops it ---


def test_weights_that_are_no_numbers_are_not_kept(
    words: Callable[..., list[str]], at_step: Callable[..., None], call: Call, tmp_path: Path
) -> None:
    command = words(tmp_path / "runs")
    at_step(4, lambda model: next(model.parameters()).data[0].fill_(float("nan")))
    told = call(*command)
    assert told.status == 1 and told.err.count("error: ") == 1
    assert (
        "model.embed_tokens.weight is not finite after step 4. Lower sft.learning_rate" in told.err
    )
    assert "The resume point after step 3 stays in" in told.err
    record = resume.read_resume_point(build(compose(command)).work)  # type: ignore[arg-type]
    assert record is not None and record["step"] == 3


def test_no_step_for_long_ends_it_with_the_stacks_of_all_threads(
    words: Callable[..., list[str]], tmp_path: Path, whole: dict[str, Any]
) -> None:
    """Of a step that hangs before its resume point is written.

    The same command resumes from the one before.
    """
    command = words(tmp_path / "runs")
    done = forked.python("-c", SLOW, "60", *command, "sft.stall_minutes=0.1", after=IMPORTS)
    assert (
        done.returncode == 1
        and "Timeout (0:00:06)!" in done.stderr
        and "in on_step_end" in done.stderr
    )
    folder = made(command)
    assert [one["step"] for one in read_manifest(folder).facts["resumed"]] == [2]  # type: ignore[union-attr]
    assert results(folder) == whole


def test_the_bar_counts_no_tokens_of_an_attempt_before(tmp_path: Path) -> None:
    """300 tokens of two seconds are 150 a second, despite 1,000 tokens of the resume point."""
    at: Any = SimpleNamespace(work=tmp_path, name="x", config=SimpleNamespace(sft=Sft(name="x")))
    told = Progress(at, SimpleNamespace(log=lambda *_, **__: None), 4)  # type: ignore[arg-type]
    speeds = []
    for step, (tokens, seconds) in enumerate([(1000, 5.0), (1300, 7.0)], 3):
        told.bar.start_t = time.time() - seconds
        told.on_log(
            None, SimpleNamespace(global_step=step), None, {"loss": 1.0, "num_tokens": tokens}
        )
        speeds.append(told.bar.postfix)
    assert speeds == ["loss 1.000, 0 tokens/s", "loss 1.000, 150 tokens/s"]


def test_a_resume_point_is_due_after_resume_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second: after 1,800 of them, or none."""
    now = 0.0
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now))
    one = checkpoints.Checkpoints.__new__(checkpoints.Checkpoints)
    one.trainer = SimpleNamespace(args=SimpleNamespace(world_size=1))
    one.saved, one.asked_to_stop = 0.0, None
    for minutes, expected in ((30.0, 1800), (None, None)):
        one.sft, due = SimpleNamespace(resume_minutes=minutes), None
        for step in range(1, 4000):
            now = float(step)
            due = due or (step if one._is_due(step) else None)
        assert due == expected
