"""Under torchrun, the death of a process ends all: nobody waits for it in a collective."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tiny_words import FEW, last_of


def test_a_follower_of_torchrun_that_dies_ends_all_within_a_minute(
    base: Path, world: Path, tmp_path: Path
) -> None:
    runs_dir, torchrun = tmp_path / "runs", Path(sys.executable).with_name("torchrun")
    words = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        *FEW,
    ]
    words += [
        "sft.micro_batch_size=2",
        "sft.steps=30000",
        "sft.epochs=9000",
        "sft.processes=2",
        "threads=1",
    ]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [
                str(torchrun),
                "--nproc_per_node=2",
                "-m",
                "pipeline",
                *last_of(words),
                f"runs_dir={runs_dir}",
                "tracking.mode=disabled",
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline, told = time.monotonic() + 180, {}
        while told.get("stage") != "sft" or not told.get("step"):
            assert process.poll() is None and time.monotonic() < deadline, (
                tmp_path / "log"
            ).read_text()[-3000:]
            for path in runs_dir.glob(".work/*/state.json"):
                told = json.loads(path.read_text())
            time.sleep(0.05)
        (follower,) = [pid for pid in children(process.pid) if b"RANK=1" in environment(pid)]
        os.kill(follower, signal.SIGKILL)
        assert process.wait(60) != 0
        assert not Path(f"/proc/{told['pid']}").exists() and not list(runs_dir.glob("math-full*"))
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
