"""One tiny run a stage holds its values. Where one moves, results have changed: raise the stage's number in VERSIONS.

Bits differ between processors, so numbers are held to 1e-5. PIPELINE_WRITE_VALUES=1 writes those of new runs down.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tiny_words import FEW

from pipeline.config import VERSIONS
from pipeline.runs import read_manifest

VALUES = Path(__file__).with_name("values.json")
TENSORS = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.13.self_attn.q_proj.weight")


def weights(folder: Path) -> dict[str, Any]:
    """Four weights of each of three tensors, and their mean size."""
    found = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in TENSORS:
            tensor = file.get_tensor(name).float()
            found[name] = [*tensor[-1, :4].tolist(), tensor.abs().mean().item()]
    return found


def files(folder: Path) -> dict[str, str]:
    """sha256 of the data files. The tokenizer's format is its library's."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".jsonl")}


def training(folder: Path) -> dict[str, Any]:
    logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {"losses": [row["loss"] for row in logged], **weights(folder)}


def scores(folder: Path) -> dict[str, Any]:
    rows = json.loads((folder / "scores.json").read_text())["rows"]
    named = ("task", "language", "pair", "subject", "metric", "filter")
    found = {" ".join(str(row[key]) for key in named): row["value"] for row in rows}
    lines = (folder / "samples/belebele.qac.jsonl").read_text(encoding="utf-8").splitlines()
    return {**found, "loglikelihoods": [list(json.loads(line)["loglikelihoods"].values()) for line in lines]}


def held(what: str, run_hash: str, found: dict[str, Any]) -> None:
    """The same run hash promises the same values. A new one (a parent's version, say) has its values written down."""
    stage = what.split()[0]
    key, kept = f"{what} version {VERSIONS[stage]}", json.loads(VALUES.read_text())
    if os.environ.get("PIPELINE_WRITE_VALUES"):
        kept[key] = {"run": run_hash, "values": found}
        VALUES.write_text(json.dumps(kept, indent=1) + "\n")
    assert kept.get(key, {}).get("run") == run_hash, f"{what} has no values written down: PIPELINE_WRITE_VALUES=1"
    moved = f"the values of {what} moved: raise VERSIONS[{stage!r}] in config"
    was = kept[key]["values"]
    assert found.keys() == was.keys(), moved
    for name, value in found.items():
        for ours, theirs in zip(flat(value), flat(was[name]), strict=True):
            same = ours == theirs if isinstance(ours, str) else ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
            assert same, f"{moved} ({name}: {theirs} -> {ours})"


def flat(value: Any) -> list[Any]:
    return [inner for one in value for inner in flat(one)] if isinstance(value, list) else [value]


def hash_of(folder: Path) -> str:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest["hash"]


def test_data(world: Path, math_expert: Path) -> None:
    held("data world", hash_of(world), files(world))
    manifest = read_manifest(math_expert)
    assert manifest is not None
    folder = world.parent / manifest["parents"]["data"]["name"]
    held("data", hash_of(folder), files(folder))


def test_cpt(base: Path) -> None:
    held("cpt", hash_of(base), training(base))


def test_sft(math_expert: Path) -> None:
    held("sft", hash_of(math_expert), training(math_expert))


def test_merge(swap: Path) -> None:
    held("merge", hash_of(swap), weights(swap))


def test_eval(scored: Path) -> None:
    held("eval", hash_of(scored), scores(scored))


def test_select(make_run: Callable[..., Path], world: Path, base: Path) -> None:
    start = ["model=trained", f"model.path={base}", f"data_root={world}", "expert=math", "recipe=sandbox_math"]
    sets = ["data.size=20", "data.validation=4", "sft.steps=4", "sft.snapshot_every=6"]
    training = make_run("stage=sft", *start, *FEW, *sets)
    words = ["select=unreasonable", "select.snapshots=all", f"checkpoints=[{training.name}]"]
    folder = make_run("stage=select", *words)
    choice = json.loads((folder / "choice.json").read_text())
    ranking = {str(one["step"]): [one["rank"], one["values"]["validation_loss"]] for one in choice["ranking"]}
    held("select", hash_of(folder), {"chosen": [choice["chosen"]["step"]], **ranking})


def test_analyze(analyzed: Path) -> None:
    rows = list(csv.DictReader((analyzed / "delta.csv").read_text().splitlines()))
    columns = ("mean", "share", "norm", "relative", "same")
    shown = {f"{row['expert'].split('-')[0]} {row['parameter']}": row for row in rows if row["parameter"] in TENSORS}
    found = {name: [float(row[column]) for column in columns] for name, row in shown.items()}
    held("analyze", hash_of(analyzed), found)


def test_what_moved_and_what_is_new_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_WRITE_VALUES", raising=False)
    kept = json.loads(VALUES.read_text())
    assert {f"{stage} version {number}" for stage, number in VERSIONS.items()} <= kept.keys()
    run, values = kept[f"merge version {VERSIONS['merge']}"].values()
    held("merge", run, values)
    moved = {**values, TENSORS[0]: [number + 1e-4 for number in values[TENSORS[0]]]}
    with pytest.raises(AssertionError, match="the values of merge moved: raise VERSIONS"):
        held("merge", run, moved)
    with pytest.raises(AssertionError, match="merge has no values written down"):
        held("merge", "another hash", values)
    monkeypatch.setitem(VERSIONS, "merge", 99)
    with pytest.raises(AssertionError, match="merge has no values written down"):
        held("merge", run, values)
