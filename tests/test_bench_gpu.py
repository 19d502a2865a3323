"""scripts/bench_gpu.py on a tiny shape: every part measures, and one that fails or is too slow loses nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.estimate import flops

SCRIPT = Path(__file__).parents[1] / "scripts/bench_gpu.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(out: Path, *words: str, **environment: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text()), done.stdout


def test_all_parts_on_a_tiny_shape(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported torch: of the parts' own processes, the next two tests."""

    def run_here(part: str, size: str, card: dict[str, Any], _: float, take: Any) -> str:
        for row in bench.PARTS[part](size, card):
            take(json.loads(json.dumps(row)))
        return ""

    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(bench, "run", run_here)
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--size", "tiny", "--out", str(tmp_path / "gpu.json")])
    bench.main()
    record, told = json.loads((tmp_path / "gpu.json").read_text()), capsys.readouterr().out
    assert record["failed"] == {}
    assert record["card"]["device"] and record["card"]["versions"]["torch"] and record["card"]["bandwidth"] > 0
    rows = {row["name"]: row for row in record["rows"]}
    ways = ["full, bfloat16, adamw_8bit", "full, float32, adamw", "lora, bfloat16, adamw"]
    ways += [f"{way}, bfloat16, adamw_8bit" for way in ("partial A math", "partial C math", "simultaneous B")]
    for name in ways:
        found = rows[name]["compared"]
        assert found["seconds a step"]["measured"] > 0 and found["seconds a step"]["predicted"] > 0
        assert found["parameters trained"]["measured"] == found["parameters trained"]["predicted"]  # counted by torch
    for name in (
        "generate_until, shared, bfloat16",
        "generate_until, HFLM, bfloat16",
        "generate_until, shared, float32",
    ):
        assert set(rows[name]["compared"]) == {"prefill seconds", "decode seconds"}
        assert rows[name]["limit_of_bandwidth_ms"] > 0 and rows[name]["decode_step_ms"] > 0
    assert rows["one layer swapped"]["gigabytes"] * 1e9 == 2 * (4 * 64 * 64 * 3 / 4 + 3 * 64 * 128 + 2 * 64)
    assert all(f", {name}: " in told for name in rows)


def test_a_part_that_fails_is_said_and_the_others_stand(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("raise ImportError('no lm_eval on this machine')\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    record, told = run(tmp_path / "gpu.json", "--parts", "scoring,card", PYTHONPATH=path)
    assert list(record["failed"]) == ["scoring"] and "no lm_eval on this machine" in record["failed"]["scoring"]
    assert record["card"]["bf16"] > 0 and "scoring: exit status 1" in told


def test_a_part_that_takes_too_long_is_ended(bench: Any) -> None:
    rows: list[Any] = []
    assert bench.run("card", "tiny", {}, 0.3, rows.append) == "ended after its 0 s" and rows == []


def test_what_does_not_fit_by_arithmetic_is_not_tried(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    card = {"device": "NVIDIA H100 80GB HBM3", "memory": 84 * 10**9}
    row = bench.one_way("full", "float32", "adamw", "8b", card)
    assert row["not_tried"] == "133 GB needed, 84 there" and row["compared"] == {}
    assert bench.gpu_of(card) is flops.GPUS["h100_80"]
    assert "133 GB needed" in bench.line(row)
