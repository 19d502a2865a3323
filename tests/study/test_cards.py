"""The GPUs of a node, which its workers divide.

Eight made-up ones, whose runs write down when they had which.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import a_run

from pipeline.launch import plan_file
from pipeline.launch.local import Local
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run

START = subprocess.Popen  # which the fixture replaces
CARDS = [f"MIG-{letter}" for letter in "abcdefgh"]
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from pipeline.launch import in_process, worker

def stage(run, work, tracker):
    record = {"label": run.label, "cards": os.environ["CUDA_VISIBLE_DEVICES"].split(","), "begun": time.time()}
    folder = run.runs_dir
    (folder / f"here-{run.label}").touch()
    deadline = time.time() + 60
    while len(list(folder.glob("here-*"))) < run.config.seed % 100 and time.time() < deadline:
        time.sleep(0.01)
    if run.label.startswith("dies") and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    (work / "record.json").write_text(json.dumps({**record, "ended": time.time()}))
    return {}

in_process.stage_function = lambda run: stage
sys.exit(worker.main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Local]:
    """Eight workers, which all tests share.

    A run named train-... asks for four cards, wide-... for all.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(
        plan_file,
        "gpus_requested",
        lambda run: {"train": 4, "wide": 8}.get(run.label.partition("-")[0], 1),
    )
    patch.setattr(
        subprocess,
        "Popen",
        lambda command, **more: START([command[0], "-c", WORKER, *command[3:]], **more),
    )
    try:
        with Local(8, CARDS) as made:
            yield made
    finally:
        patch.undo()


def named(runs_dir: Path, label: str, parent: Run | None = None, at_once: int = 0) -> Run:
    """Return a run that waits until so many have begun.

    Its number, in the label, is part of its seed, and so of its hash.
    """
    kind, number = label.split("-")
    seed = (
        at_once
        + 100 * int(number)
        + 10_000 * sorted(["dies", "late", "score", "train", "wide"]).index(kind)
    )
    return a_run(runs_dir, {"data_root": parent} if parent else None, label=label, seed=seed)


def ran(node: Local, runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Return the record of each run, by label, and check that no GPU was in two at a time."""
    assert node.execute(runs) == {}
    records = [json.loads((run.folder / "record.json").read_text()) for run in runs]
    for number, one in enumerate(records):
        for other in records[:number]:
            apart = one["ended"] <= other["begun"] or other["ended"] <= one["begun"]
            assert apart or not set(one["cards"]) & set(other["cards"]), (one, other)
    return {record["label"]: record for record in records}


def test_eight_scores_at_once_each_on_its_card(node: Local, tmp_path: Path) -> None:
    """Each waits until all eight have begun."""
    found = ran(node, [named(tmp_path, f"score-{number}", at_once=8) for number in range(8)])
    assert sorted(record["cards"] for record in found.values()) == [[card] for card in CARDS]


def test_two_trainings_at_once_each_on_four_cards(node: Local, tmp_path: Path) -> None:
    found = ran(node, [named(tmp_path, f"train-{number}", at_once=2) for number in range(2)])
    assert sorted(sorted(record["cards"]) for record in found.values()) == [CARDS[:4], CARDS[4:]]


def test_scores_and_trainings_of_one_table(node: Local, tmp_path: Path) -> None:
    """Runs of another number of GPUs wait, and each has all GPUs that it asks for."""
    first = [named(tmp_path, f"score-{number}") for number in range(6)]
    trainings = [named(tmp_path, f"train-{number}") for number in range(3)]
    last = [named(tmp_path, f"late-{number}", trainings[0]) for number in range(4)]
    found = ran(node, [*first, *trainings, named(tmp_path, "wide-0"), *last])
    assert [len(found[f"train-{number}"]["cards"]) for number in range(3)] == [4, 4, 4]
    assert len(found["wide-0"]["cards"]) == 8
    assert all(len(found[f"late-{number}"]["cards"]) == 1 for number in range(4))


def test_who_dies_leaves_its_card_and_its_run(
    node: Local, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [named(tmp_path, label) for label in ("dies-0", "train-9", "score-9")]
    ran(node, runs)
    assert all(read_manifest(run.folder) for run in runs)
    assert (
        "its worker ended with SIGKILL. Another worker begins the run again."
        in capfd.readouterr().err
    )
