"""Trainings of the papers' models at their true shapes, on fake tensors.

Dtypes, and memory against the estimate.

shapes_on_fake_tensors.py runs the pipeline's own Trainer, in a process of its own, which it takes
for the first of several. Each way to train, and one GPU and several, are in one that is always run;
all of them with PIPELINE_TEST_SHAPES=1 (make test-shapes), in ten minutes of two cores.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import forked
import pytest
import shapes_on_fake_tensors as script
import yaml

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "results/bench/shapes.json"
ALWAYS = [  # the first: sides whose shards are frozen in turns
    "eight layers: fsdp2, simultaneous",
    "a100_80x1: layer_swapping math_1",
    "a100_80x1: unreasonable partial B, aya_expanse_8b",
    "eight layers: lora, no checkpointing",
]
WITHIN = 0.1


def rows_of(file: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Rows of these trainings, name -> row, by the script."""
    program = f"import runpy; runpy.run_path({script.__file__!r}, run_name='__main__')"
    done = forked.python("-c", program, "--record", str(file), "--only", *names, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["name"]: row for row in json.loads(file.read_text())["rows"]}


def check(row: dict[str, Any]) -> None:
    """Check dtypes, weights, moments (except 8-bit scales), and the peak with its parts."""
    knobs = script.cases()[row["name"]][2]
    adapters = "lora" in row["name"]
    weights = knobs.get("weights", "float32")
    dtypes = row["dtypes"]
    frozen = (
        {"bfloat16"}
        if knobs["processes"] == 1 and (adapters or "partial" in row["name"])
        else set()
    )
    assert set(dtypes["weights"]) == {weights, *frozen} and dtypes["layer output"] == [weights]
    assert dtypes["gradients"] == [weights]
    if knobs.get("optimizer") == "adamw_8bit" and not adapters:
        assert "uint8" in dtypes["moments"]  # those of biases are small, and stay as they are
    else:
        assert dtypes["moments"] == [weights]
    if knobs["processes"] > 1:
        assert dtypes["reduced"] == ["float32"]
    measured, estimated, at_peak = (
        row["measured_gb"],
        row["estimated_gb"],
        defaultdict(float, row["of_peak_gb"]),
    )
    peak = measured["peak"]
    assert measured["weights"] == pytest.approx(estimated["weights"], rel=0.01)
    assert measured["moments"] == pytest.approx(estimated["moments"], rel=0.02, abs=0.01)
    assert peak == pytest.approx(estimated["peak"], rel=WITHIN), row["name"]
    if not row["name"].startswith(
        "eight layers"
    ):  # where two moments of a step are alike, the other may be the worst
        assert at_peak["gradients"] == pytest.approx(estimated["gradients"], abs=WITHIN * peak), (
            row["name"]
        )
        passing = sum(estimated.get(kind, 0) for kind in ("gathered", "casts", "activations"))
        assert at_peak["copies"] + at_peak["activations"] == pytest.approx(
            passing, abs=WITHIN * peak
        ), row["name"]


def check_as_stored(rows: dict[str, dict[str, Any]]) -> None:
    stored = {row["name"]: row for row in json.loads(RECORD.read_text())["rows"]}
    for name, row in rows.items():
        check(row)
        for kind in (
            "weights",
            "gradients",
            "moments",
            "peak",
        ):  # nothing here depends on the processor
            assert row["measured_gb"][kind] == pytest.approx(
                stored[name]["measured_gb"][kind], rel=0.02
            ), (name, kind)


def test_true_shapes(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.json", ALWAYS)
    assert set(ALWAYS) <= rows.keys()  # --only takes names that hold these, too
    check_as_stored(rows)


def test_the_record_has_each_recipe_on_each_hardware() -> None:
    rows = {row["name"]: row for row in json.loads(RECORD.read_text())["rows"]}
    assert sorted(rows) == sorted(script.cases())
    for row in rows.values():
        check(row)
        assert (
            row["measured_gb"]["peak"] < 78 * 2**30 / 1e9 - 1
        )  # what a card of 80 GB has, less its context


def test_hardware_is_that_of_conf() -> None:
    """The knobs that the script takes for a node are those of its file."""
    for name, knobs in script.HARDWARE.items():
        group = name.partition(",")[0]
        for named in {group, group.replace("a100_80x1", "h100_80x1")}:
            file = ROOT / "conf/hardware" / f"{named}.yaml"
            if not file.is_file():
                pytest.skip("this tree has no conf/hardware")
            processes = {"processes": 8} if "processes=8" in name else {}
            assert yaml.safe_load(file.read_text())["sft"] | processes == knobs, file.name


@pytest.mark.shapes
@pytest.mark.parametrize("quarter", range(4))  # so that two workers share them
def test_all_recipes_on_all_hardware(quarter: int, tmp_path: Path) -> None:
    names = sorted(script.cases())
    rows = rows_of(tmp_path / "rows.json", names[quarter::4])
    assert set(names[quarter::4]) <= rows.keys()  # --only takes names that hold these, too
    check_as_stored(rows)
