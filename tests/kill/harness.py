"""Kills commands at random instants and runs them again to their end.

`make test-kill N=100 SEED=7`.

TERM, USR1, HUP or KILL, to the process alone or to its whole tree, W&B offline; or STOP, to W&B's
processes alone. After each kill the same command is run again, until it ends; then the results are
the bits of an undisturbed one, nothing finished was made twice, nothing is left. Commands are
killed side by side, one a core. With `clocks` each start has one of them; on a `disk` of its own a
command finds no space instead, from a random instant on until it has ended.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limits import filled, tree

from pipeline.files import sha256
from pipeline.runs.folders import finished_manifests

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL)
MOST = 6  # kills of one command, after which it is let be
FULL = (
    "No space left on device",
    "is too full for",
)  # what a command says, to any write or before it begins
TRAINING = (
    "sft.seq_length=96 sft.batch_size=4 sft.micro_batch_size=null sft.warmup_steps=2"
    " sft.resume_minutes=0.02 sft.precision=fp32 sft.learning_rate=1e-3 threads=1 sft.epochs=9"
).split()


@dataclass
class Command:
    """A command of the program, and what it gives when nothing happens to it."""

    name: str
    words: list[str]
    seconds: float = 0.0
    expected: dict[str, str] = field(default_factory=dict)

    def started(
        self, runs_dir: Path, log: Path, clock: str | None = None, before: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        words = [
            *before,
            sys.executable,
            "-m",
            "pipeline",
            *self.words,
            f"runs_dir={runs_dir}",
            "tracking.timeout=2",
        ]
        environment = {
            **os.environ,
            "WANDB_MODE": "offline",
            "OMP_NUM_THREADS": "1",
            **clock_of(clock),
        }
        with open(log, "ab") as errors:
            return subprocess.Popen(
                words,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )


def faketime() -> Path | None:
    """Return the library of Debian's package faketime, if it is installed."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


def clock_of(clock: str | None) -> dict[str, str]:
    """Return the environment of a process whose clock is off, such as +10m.

    Times of files stay true, except times that the process sets, as on some network file systems.
    """
    if clock is None:
        return {}
    monotonic = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    return {"LD_PRELOAD": str(faketime()), "FAKETIME": clock, "NO_FAKE_STAT": "1", **monotonic}


def commands(base: Path, world: Path, math: Path, language: Path, table: Path) -> list[Command]:
    """Of each stage, over tiny data and models."""
    start = ["expert=math", "model=trained", f"model.path={base}", f"data_root={world}", *TRAINING]
    joint = [
        *start[1:],
        "expert=math_qac",
        "data.size=28",
        "data.validation=8",
        "sft.snapshot_every=9",
    ]
    experts = [f"merge.math={math}", f"merge.language={language}"]
    scores = [
        "eval=mgsm_0shot",
        "eval.max_gen_toks=8",
        "languages=[en,qac]",
        f"data_root={world}",
        "threads=1",
    ]
    return [
        Command("data", ["stage=data", "expert=math", f"data_root={world}"]),
        Command("full", ["stage=sft", *start, "sft.steps=60"]),
        Command(
            "simultaneous", ["stage=sft", *joint, "sft=simultaneous", "partition=B", "sft.steps=40"]
        ),
        Command("lora", ["stage=sft", *start, "sft=lora", "sft.lora_dropout=0.1", "sft.steps=60"]),
        Command("merge", ["stage=merge", "merge=layer_swap", *experts, "merge.bottom_layers=3"]),
        Command("eval", ["stage=eval", f"checkpoint={math}", *scores]),
        Command(
            "merges",
            [
                "-m",
                "stage=eval",
                "merge=layer_swap",
                *experts,
                "merge.bottom_layers=2,3,4",
                *scores,
            ],
        ),
        Command("table", ["stage=table", f"table={table}", "launcher.workers=2"]),
    ]


def results(runs_dir: Path) -> dict[str, str]:
    """File of a run -> sha256, of all that is a result; times and places are none."""
    found = {}
    for manifest in finished_manifests(runs_dir):
        folder = runs_dir / manifest.name
        for name in manifest.files:
            if name.startswith("wandb/") or name == "scores.json":
                continue
            if Path(name).suffix in (".safetensors", ".jsonl", ".csv") and not name.startswith(
                "tasks/"
            ):
                found[f"{manifest.name}/{name}"] = sha256(folder / name)
    return found


def measure(command: Command, runs_dir: Path) -> None:
    """Run it undisturbed: how long it takes, and what it gives."""
    begun = time.monotonic()
    status = command.started(runs_dir, runs_dir.with_suffix(".log")).wait()
    assert status == 0, f"{command.name}: {runs_dir.with_suffix('.log').read_text()[-3000:]}"
    command.seconds, command.expected = time.monotonic() - begun, results(runs_dir)


def kill(process: subprocess.Popen[bytes], log: Path, chance: random.Random) -> dict[str, Any]:
    """Send it a signal, and wait for its end."""
    number, whole = chance.choice(SIGNALS), chance.random() < 0.5
    hit = tree(process.pid) if whole else [process.pid]
    for pid in reversed(hit) if chance.random() < 0.5 else hit:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    told = {"signal": number.name, "tree": whole, "status": process.wait(120)}
    allowed = {0, 75, -number} if number != signal.SIGKILL else {-number, 0}
    assert told["status"] in allowed, f"{told}: {log.read_text()[-3000:]}"
    return told


def leave_no_room(process: subprocess.Popen[bytes], log: Path, disk: Path) -> dict[str, Any]:
    """Fill the disk until it has ended: in time, or in a sentence."""
    before = len(log.read_text())
    with filled(disk):
        status = process.wait(120)
    told = log.read_text()[before:]
    in_a_sentence = any(words in told for words in FULL) and "Traceback" not in told
    assert status == 0 or (status == 1 and in_a_sentence), f"no room: {status}: {told[-3000:]}"
    return {"full": True, "status": status}


def disturb(
    command: Command,
    runs_dir: Path,
    chance: random.Random,
    most: int = MOST,
    clocks: Sequence[str] = (),
    disk: Path | None = None,
) -> dict[str, Any]:
    """Kill it until it was killed often enough, each time after a random while; then let it end."""
    log, kills = (
        (disk.parent if disk else runs_dir.parent) / f"{runs_dir.name}.log",
        [],
    )  # the disk may be full
    made: dict[str, tuple[int, int]] = {}
    while True:
        process = command.started(runs_dir, log, chance.choice(clocks) if clocks else None)
        if len(kills) < most:
            after = chance.uniform(0.02, 1.0) * command.seconds
            with suppress(subprocess.TimeoutExpired):
                process.wait(after)
            if process.poll() is None:
                told = leave_no_room(process, log, disk) if disk else kill(process, log, chance)
                kills.append({**told, "after": round(after, 2)})
                now = published(runs_dir)
                assert made.items() <= now.items(), (
                    f"{command.name}: made again or lost: {made.keys() - now.keys()}"
                )
                made = now
                continue
        status = process.wait(600)
        assert status == 0, f"{command.name} after {kills}: {log.read_text()[-3000:]}"
        break
    assert made.items() <= published(runs_dir).items(), f"{command.name}: made again after {kills}"
    assert results(runs_dir) == command.expected, f"{command.name} after {kills}: other bits"
    left = [path.name for path in (runs_dir / ".work").glob("*/*")]
    assert not left, f"{command.name} left {left}"
    return {"command": command.name, "kills": kills}


def published(runs_dir: Path) -> dict[str, tuple[int, int]]:
    """Finished run -> its manifest's time and inode, which making it again would change."""
    stats = {path.parent.name: path.stat() for path in runs_dir.glob("*/manifest.json")}
    return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def harass(
    asked: list[Command],
    folder: Path,
    kills: int,
    seed: int,
    tell: Callable[[str], None] = print,
    **how: Any,
) -> dict[str, Any]:
    """At least so many kills, over all commands in turn, side by side. Gives the record."""
    signal.signal(
        signal.SIGHUP, lambda *_: None
    )  # what is started hears it, also where nohup has this process ignore it
    trials: list[dict[str, Any]] = []

    def trial(number: int) -> None:
        command, place = asked[number % len(asked)], folder / f"trial-{number}"
        trials.append(disturb(command, place, random.Random(f"{seed} {number}"), most, **how))
        tell(json.dumps(trials[-1]))
        shutil.rmtree(place, ignore_errors=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        new = [command for command in asked if not command.expected]
        list(pool.map(lambda command: measure(command, folder / f"whole-{command.name}"), new))
        begun, started, done = time.monotonic(), 0, 0
        while done < kills:
            most = min(MOST, -(-(kills - done) // len(asked)))
            list(pool.map(trial, range(started, started + len(asked))))
            started, done = started + len(asked), sum(len(one["kills"]) for one in trials)
    return {
        "seed": seed,
        "kills": done,
        "seconds": round(time.monotonic() - begun, 1),
        "trials": trials,
    }
