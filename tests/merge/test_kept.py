"""The share of an expert that a reset keeps, against a count by hand.

Recorded by merges and by scores of live ones.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fixture_types import Make
from safetensors.torch import load_file
from small_decoders import network

from pipeline.commands.table import make_table
from pipeline.config.compose import compose
from pipeline.merge.formulas import mean_change, row_changes
from pipeline.merge.methods.reset import Reset
from pipeline.merge.open_merge import open_merge
from pipeline.models.checkpoint import Checkpoint
from pipeline.report.cells import cell_result
from pipeline.report.stored import StoredAnswers
from pipeline.runs.manifest import read_manifest
from pipeline.tables.planned_runs import Planning


def by_hand(base: Path, expert: Path, threshold: float, axis: str = "input") -> dict[str, float]:
    """Count rows whose mean absolute change is above the threshold. A vector is one row."""
    ours, theirs = load_file(expert / "model.safetensors"), load_file(base / "model.safetensors")
    rows = entries = rows_kept = entries_kept = 0
    for name in (name for name in ours if ".layers." in name):
        change = (ours[name].double() - theirs[name].double()).abs()
        change = (
            change.reshape(1, -1) if change.dim() == 1 else change.T if axis == "input" else change
        )
        keep = change.mean(dim=1) > threshold
        rows, rows_kept = rows + len(keep), rows_kept + int(keep.sum())
        entries, entries_kept = (
            entries + change.numel(),
            entries_kept + int(keep.sum()) * change.shape[1],
        )
    return {"rows_kept": 100 * rows_kept / rows, "parameters_kept": 100 * entries_kept / entries}


@pytest.mark.parametrize("axis", ["input", "output"])
@pytest.mark.parametrize("threshold", [0.0, 0.036, 0.04, 1.0])
def test_the_share_of_rows_above_a_threshold(
    models: dict[str, list[Path]], axis: str, threshold: float
) -> None:
    base, math, _ = models["llama"]
    config = Reset(expert="a", threshold=threshold, axis=axis)
    merge = open_merge(config, {"expert": Checkpoint.open(math)}, Checkpoint.open(base), None, 1)
    expected = by_hand(base, math, threshold, axis)
    assert merge.method.measured(2) == pytest.approx(expected)
    if 0 < threshold < 1:
        assert 0 < expected["rows_kept"] < 100 and 0 < expected["parameters_kept"] < 100


@pytest.mark.parametrize("axis", ["input", "output"])
def test_rows_of_gpt2_are_features_although_it_stores_matrices_the_other_way(
    axis: str, tmp_path: Path
) -> None:
    """One input feature, or one output feature, of a Conv1D changes.

    A row, or a column, of (inputs, outputs).
    """
    name = "transformer.h.0.attn.c_attn.weight"
    model = network("gpt2", 0)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        weight = dict(model.named_parameters())[name]
        (weight[5] if axis == "input" else weight[:, 5]).add_(0.01)
    model.save_pretrained(tmp_path / "expert")
    base, expert = Checkpoint.open(tmp_path / "base"), Checkpoint.open(tmp_path / "expert")
    changes = row_changes(expert, base, name, axis)
    inputs, outputs = weight.shape
    assert len(changes) == (inputs if axis == "input" else outputs)
    assert list(np.flatnonzero(changes > 1e-4)) == [5] and changes[5] == pytest.approx(
        0.01, rel=1e-3
    )
    merge = open_merge(
        Reset(expert="a", threshold=0.005, axis=axis), {"expert": expert}, base, None, 1
    )
    (tmp_path / "merged").mkdir()
    merge.write(tmp_path / "merged")
    merged, changed = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "expert")
    )
    assert all(
        torch.equal(merged[key], changed[key]) for key in merged
    )  # the feature stays the expert's
    of_rows = {key: info.shape for key, info in base.infos.items()}
    sizes = {
        key: shape[0] if len(shape) < 2 or ".c_" in key else shape[1]
        for key, shape in of_rows.items()
    }
    rows = {key: size if len(of_rows[key]) > 1 else 1 for key, size in sizes.items()}
    if axis == "input":
        expected = len(changes) * changes.mean() / sum(rows.values())
        assert mean_change([(1.0, expert)], base, 1) == pytest.approx(expected, rel=1e-4)


def test_the_share_of_layers_that_are_kept(models: dict[str, list[Path]]) -> None:
    base, math, _ = models["llama"]
    merge = open_merge(
        Reset(expert="a", layers=[0, 3]),
        {"expert": Checkpoint.open(math)},
        Checkpoint.open(base),
        None,
        1,
    )
    sizes = {name: tensor.numel() for name, tensor in load_file(base / "model.safetensors").items()}
    reset = sum(
        size for name, size in sizes.items() if ".layers.0." in name or ".layers.3." in name
    )
    whole = sum(size for name, size in sizes.items() if ".layers." in name)
    assert merge.method.measured(1)["parameters_kept"] == pytest.approx(100 * (1 - reset / whole))


def test_a_table_shows_the_share_and_writes_no_merge(
    make_run: Make, runs_dir: Path, world: Path, base: Path, math_expert: Path, tmp_path: Path
) -> None:
    change = torch.cat([one.flatten() for one in _changes(base, math_expert)])
    threshold = float(change.mean())
    table = tmp_path / "sparse.yaml"
    table.write_text(
        f"name: sparse\naxes: {{threshold: [0, {threshold}]}}\nevery: {{data_root: {world}}}\nruns:"
        f" {{sparse: {{merge: reset, merge.expert: {math_expert}, merge.threshold:"
        " '{threshold}'}}\nscore: {eval: mgsm_0shot, eval.max_gen_toks: 4, eval.limit: 2, in:"
        " [en, qac]}\ncolumns: {'{threshold}': sparse}\nrows: {mgsm: {}, rows: {fact:"
        " rows_kept}, parameters: {fact: parameters_kept}}\n"
    )
    words = ["stage=table", f"table={table}", f"runs_dir={runs_dir}", "tracking.mode=disabled"]
    before = set(runs_dir.iterdir())
    make_table(compose(words))  # type: ignore[arg-type]
    new = [folder for folder in set(runs_dir.iterdir()) - before if read_manifest(folder)]
    assert {read_manifest(folder).stage for folder in new} == {"eval"} and len(new) == 4  # type: ignore[union-attr]
    table = Planning.of(compose(words))  # type: ignore[arg-type]
    cells = {
        place: cell_result(StoredAnswers(table), cell) for place, cell in table.plan.cells.items()
    }
    expected = by_hand(base, math_expert, threshold)
    assert cells["rows", str(threshold)].value == pytest.approx(expected["rows_kept"])
    assert cells["parameters", str(threshold)].value == pytest.approx(expected["parameters_kept"])
    written = make_run(
        "stage=merge", "merge=reset", f"merge.expert={math_expert}", f"merge.threshold={threshold}"
    )
    facts = json.loads((written / "manifest.json").read_text())["facts"]
    assert {key: facts[key] for key in expected} == pytest.approx(expected)


def _changes(base: Path, expert: Path) -> list[torch.Tensor]:
    ours, theirs = load_file(expert / "model.safetensors"), load_file(base / "model.safetensors")
    return [(ours[name] - theirs[name]).abs() for name in ours if ".layers." in name]
