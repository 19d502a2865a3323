"""The cards of a node, counted among workers.

Eight made-up ones, whose runs write down when they had which.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Patch
from small_runs import a_run

from pipeline.launch import plan_file
from pipeline.launch.cards import Cards, places_of
from pipeline.launch.local import Local
from pipeline.merge import resident
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


def test_two_trainings_at_once_each_on_four_neighbours(node: Local, tmp_path: Path) -> None:
    found = ran(node, [named(tmp_path, f"train-{number}", at_once=2) for number in range(2)])
    assert sorted(sorted(record["cards"]) for record in found.values()) == [CARDS[:4], CARDS[4:]]


def test_scores_and_trainings_of_one_table(node: Local, tmp_path: Path) -> None:
    """A training waits for idle neighbours, which take nothing else meanwhile.

    Then scores have all cards again.
    """
    first = [named(tmp_path, f"score-{number}") for number in range(6)]
    trainings = [named(tmp_path, f"train-{number}") for number in range(3)]
    last = [named(tmp_path, f"late-{number}", trainings[0]) for number in range(4)]
    found = ran(node, [*first, *trainings, named(tmp_path, "wide-0"), *last])
    assert [len(found[f"train-{number}"]["cards"]) for number in range(3)] == [4, 4, 4]
    assert len(found["wide-0"]["cards"]) == 8


def test_who_dies_leaves_its_card_and_its_run(
    node: Local, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [named(tmp_path, label) for label in ("dies-0", "train-0", "score-0")]
    ran(node, runs)
    assert all(read_manifest(run.folder) for run in runs) and len(node.workers) == 8
    assert (
        "its worker ended with SIGKILL. Another worker begins the run again."
        in capfd.readouterr().err
    )


def test_a_model_in_memory_is_given_back_before_neighbours_train(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A worker keeps its GPU while a model is in its memory, until a neighbour closes its gate."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(resident, "LIVE_MODELS", live := [type("Live", (), {"served": None})()])
    places = places_of(["0", "1"], 2)
    mine, other = Cards(tmp_path, places, 0), Cards(tmp_path, places, 1)
    with mine.taken(1, lambda: True) as taken:
        assert taken and os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert not mine.give_way()
    asked: list[bool] = []

    def still_wanted() -> bool:
        asked.append(mine.give_way())  # what an idle worker does meanwhile
        return True

    live.append(live[0])
    kept = other._give_back
    monkeypatch.setattr(other, "_give_back", lambda: None)  # of the same process as the first here
    with other.taken(2, still_wanted) as taken:
        assert taken and asked == [True] and not live
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"  # its own card first
        with mine.taken(1, lambda: True) as refused:
            assert not refused
    with mine.taken(1, lambda: True) as taken:
        assert taken
    kept()


HAS_USED_CUDA = """
import sys, time, types
from pathlib import Path
from pipeline.launch.cards import Cards
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
cards = Cards(Path(sys.argv[1]), [["0"], ["1"]], 0)
with cards.taken(1, lambda: True):
    print("taken", flush=True)
while not cards.give_way():
    time.sleep(0.05)
"""


def test_a_worker_whose_context_is_on_its_card_starts_anew_and_waits_for_more(
    tmp_path: Path,
) -> None:
    places = places_of(["0", "1"], 2)
    command = [sys.executable, "-c", HAS_USED_CUDA, str(tmp_path), json.dumps(places), "0"]
    worker = START(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "taken\n"
    with Cards(tmp_path, places, 1).taken(2, lambda: True) as taken:
        assert taken and worker.poll() is None
        line = f"/proc/{worker.pid}/cmdline"
        assert Path(line).read_text().split("\0")[1:3] == ["-m", "pipeline.launch.worker"]
    worker.terminate()
    assert worker.wait(60) in (75, -15)


@pytest.mark.parametrize(
    ("workers", "places"),
    [
        (8, [[card] for card in CARDS]),
        (2, [CARDS[:4], CARDS[4:]]),
        (3, [CARDS[:2], CARDS[2:4], CARDS[4:6], CARDS[6:]]),
        (9, [[card] for card in CARDS]),
    ],
)
def test_places(workers: int, places: list[list[str]]) -> None:
    assert places_of(CARDS, workers) == places
