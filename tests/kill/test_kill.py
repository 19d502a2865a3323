"""Killed at random instants, nothing is lost:

KILLS kills by SEED (make test-kill N=... SEED=...), 15 unless told.

And once with clocks that are ten minutes off, once on a disk that fills.
"""

import json
import os
import random
import time
from pathlib import Path

import pytest
from harness import Command, commands, faketime, harass
from limits import small_disk

from pipeline.runs.lease import Holder, list_lease_numbers, take_lease
from pipeline.runs.provenance import machine_facts, package_versions

pytestmark = pytest.mark.kill
SEED = int(os.environ.get("SEED") or time.time())
off = pytest.mark.skipif(faketime() is None, reason="clocks: apt-get install faketime")
root = pytest.mark.skipif(os.geteuid() != 0, reason="disks and hosts of their own: needs root")


@pytest.fixture(scope="module")
def asked(
    base: Path,
    world: Path,
    math_expert: Path,
    language_expert: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Command]:
    """One command of each stage, in an order by chance: of few kills, not always the first ones."""
    table = tmp_path_factory.mktemp("table") / "mine.yaml"
    table.write_text(
        f"name: mine\nevery: {{model: trained, model.path: {base}, data_root: {world}, threads: 1,"
        " sft.epochs: 9, sft.steps: 20, sft.batch_size: 4, sft.micro_batch_size: null,"
        " sft.seq_length: 96, sft.precision: fp32, sft.resume_minutes: 0.02}\nruns:\n  math:"
        " {stage: sft, expert: math, recipe: sandbox_math}\n  language: {stage: sft, expert:"
        " qac, recipe: sandbox_language}\n  soup: {merge: soup, merge.experts: [math,"
        " language]}\nscore: {eval: mgsm_0shot, eval.max_gen_toks: 4, in: en}\ncolumns: {math:"
        " {run: math}, language: {run: language}, soup: {run: soup}}\n"
    )
    found = commands(base, world, math_expert, language_expert, table)
    random.Random(SEED).shuffle(found)
    return found


def test_killed_at_random_nothing_is_lost_and_nothing_is_made_twice(
    asked: list[Command], tmp_path: Path
) -> None:
    kills = int(os.environ.get("KILLS", 15))
    few = asked if kills > 30 else asked[:3]
    print(f"SEED={SEED}: {kills} kills of {', '.join(one.name for one in few)}")
    record = harass(few, tmp_path, kills, SEED)
    if file := os.environ.get("KILL_RECORD"):
        record = {"machine": machine_facts(), "versions": package_versions(), **record}
        Path(file).write_text(json.dumps(record, indent=1) + "\n")
    assert record["kills"] >= kills


@off
def test_killed_with_clocks_that_are_off(asked: list[Command], tmp_path: Path) -> None:
    """Each start reads another: of machines that share a runs_dir."""
    (full,) = [one for one in asked if one.name == "full"]
    print(f"SEED={SEED}: with clocks that are off")
    assert harass([full], tmp_path, 3, SEED, clocks=["+10m", "-10m"])["kills"] == 3


@root
def test_on_a_disk_that_fills_nothing_is_lost(asked: list[Command], tmp_path: Path) -> None:
    print(f"SEED={SEED}: on a disk that fills")
    for name, times in ("full", 2), ("table", 1):
        (command,) = [one for one in asked if one.name == name]
        with small_disk(tmp_path / name, 400) as disk:
            assert harass([command], disk, times, SEED, disk=disk)["kills"] == times


@off
@root
def test_a_host_whose_clock_is_behind_keeps_its_run(asked: list[Command], tmp_path: Path) -> None:
    """Its lease looks ten minutes old, but is not taken while the process lives."""
    (full,) = [one for one in asked if one.name == "full"]
    words = [word for word in full.words if not word.startswith(("sft.steps=", "sft.epochs="))]
    long = Command("long", [*words, "sft.steps=9000", "sft.epochs=900"])
    host = (
        "unshare",
        "--pid",
        "--fork",
        "--kill-child=KILL",
    )  # process ids of its own, as another machine has
    process = long.started(tmp_path / "runs", tmp_path / "log", "-10m", before=host)
    try:
        deadline, found = time.monotonic() + 90, []
        while not found:
            assert process.poll() is None and time.monotonic() < deadline, (
                tmp_path / "log"
            ).read_text()[-2000:]
            leases = (tmp_path / "runs/.work").glob("*/lease-1")
            found = [lease for lease in leases if time.time() - lease.stat().st_mtime > 500]
            time.sleep(0.1)
        assert isinstance(take_lease(found[0].parent), Holder) and list_lease_numbers(
            found[0].parent
        ) == [1]
    finally:
        process.kill()
        process.wait()
