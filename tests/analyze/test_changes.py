"""What training changed, against whole tensors, and the stage that maps it."""

import csv
from types import SimpleNamespace

import pytest
import torch
from as_torch import as_torch
from published_maps import published_maps

from pipeline.analyze.changes import tensor_changes
from pipeline.analyze.heatmaps import Map, svg_of_maps
from pipeline.analyze.stage import make
from pipeline.config.merging import Analyze
from pipeline.config.stages import AnalyzeStage
from pipeline.errors import PipelineError
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.manifest import Manifest


@pytest.mark.parametrize("axis", ["input", "output"])
def test_one_tensor_by_whole_tensors(models, axis):
    base, *experts = (Checkpoint.open(folder) for folder in models["qwen2"])
    for name in (
        "model.layers.3.mlp.down_proj.weight",
        "model.layers.3.self_attn.q_proj.bias",
        "model.norm.weight",
    ):
        each = tensor_changes(experts, base, name, [0.04, 0.042], axis)
        start = as_torch(base, name).float()
        vectors = [as_torch(one, name).float() - start for one in experts]
        for vector, limit, found in zip(vectors, [0.04, 0.042], each, strict=True):
            rows = (
                vector.abs().mean(0 if axis == "input" else 1)
                if vector.dim() > 1
                else vector.abs().mean()[None]
            )
            assert found.mean == pytest.approx(rows.mean().item(), rel=1e-5)
            assert found.share == pytest.approx((rows > limit).float().mean().item())
            assert found.norm == pytest.approx(vector.norm().item(), rel=1e-5)
            assert found.relative == pytest.approx((vector.norm() / start.norm()).item(), rel=1e-5)
            assert found.same == pytest.approx((vector == 0).float().mean().item())


def run_of(models, tmp_path, *sides, optimizers=("adamw", "adamw"), **settings):
    """Return an analyze run of experts whose manifests name their side and optimizer."""
    parents = {"base": SimpleNamespace(folder=models["llama"][0], name="base-1")}
    for index, (side, optimizer) in enumerate(zip(sides, optimizers, strict=False)):
        folder = tmp_path / f"{index}-{side}"
        folder.mkdir()
        for path in models["llama"][1 + index].iterdir():
            (folder / path.name).symlink_to(path)
        config = {"expert": {"side": side}, "sft": {"optimizer": optimizer}}
        Manifest(f"{side}-{index}", "0", {"stage": "sft"}, {}, config=config).write(folder)
        parents[str(index)] = SimpleNamespace(folder=folder, name=f"{side}-{index}")
    stage = AnalyzeStage(stage="analyze", checkpoint="x", analyze=Analyze(**settings))
    (tmp_path / "work").mkdir()
    return SimpleNamespace(config=stage, parents=parents), tmp_path / "work"


def test_the_stage(models, tmp_path):
    run, work = run_of(models, tmp_path, "math", "language")
    facts = make(run, work, None)
    assert [one["threshold"] for one in facts["experts"].values()] == [1.0e-5, 1.9e-5]
    rows = list(csv.DictReader((work / "delta.csv").read_text().splitlines()))
    names = Checkpoint.open(models["llama"][0]).names
    assert len(rows) == 2 * len(names)
    one = next(row for row in rows if row["parameter"] == "model.layers.13.mlp.gate_proj.weight")
    assert (one["expert"], one["layer"], one["column"]) == ("math-0", "13", "feed_forward.w1")
    drawn = (work / "map.svg").read_text()
    for text in (
        "math-0",
        "language-1",
        "rows above 1e-05",
        "rows above 1.9e-05",
        "BF16",
        "adamw",
        "attention.wq",
    ):
        assert text in drawn


def test_how_the_changes_of_two_experts_agree(models, tmp_path):
    """By torch's cosine of whole task vectors."""
    run, work = run_of(models, tmp_path, "math", "language")
    facts = make(run, work, None)
    base, *experts = (Checkpoint.open(folder) for folder in models["llama"])

    def vectors(names):
        starts = {name: as_torch(base, name).double() for name in names}
        return [
            torch.cat([(as_torch(one, name).double() - starts[name]).flatten() for name in names])
            for one in experts
        ]

    of_layer = [name for name in base.names if name.startswith("model.layers.13.")]
    for key, names in (("", base.names), (".13", of_layer)):
        first, second = vectors(names)
        expected = torch.nn.functional.cosine_similarity(first, second, dim=0).item()
        assert facts[f"cosine{key}"] == pytest.approx(expected, rel=1e-6)
        both = (first != 0) & (second != 0)
        agree = (first.sign() == second.sign())[both].double().mean().item()
        assert facts[f"sign_agreement{key}"] == pytest.approx(agree)
    assert facts["pairs"]["math-0 language-1"]["cosine"] == facts["cosine"]


def test_a_map_names_the_optimizer_of_its_expert(models, tmp_path):
    run, work = run_of(models, tmp_path, "math", "language", optimizers=("adamw", "muon"))
    make(run, work, None)
    drawn = (work / "map.svg").read_text()
    assert "· adamw" in drawn and "· muon" in drawn


def test_thresholds_that_nobody_gave(models, tmp_path):
    run, work = run_of(models, tmp_path, "none")
    with pytest.raises(PipelineError, match="Give analyze.threshold"):
        make(run, work, None)


def test_a_selected_expert_has_the_side_and_the_optimizer_of_its_training(models, tmp_path):
    """As in the tables of the papers, whose experts are all selected."""
    run, work = run_of(
        models, tmp_path, "math", "language", optimizers=("adamw_8bit", "adamw_8bit")
    )
    for index, side in enumerate(("math", "language")):
        folder = tmp_path / f"select-{index}"
        folder.mkdir()
        for path in models["llama"][1 + index].iterdir():
            (folder / path.name).symlink_to(path)
        chosen = {"choice": {"checkpoint": f"{index}-{side}@2", "step": 2}}
        Manifest(folder.name, "0", {"stage": "select"}, chosen, config={"stage": "select"}).write(
            folder
        )
        run.parents[str(index)] = SimpleNamespace(folder=folder, name=folder.name)
    facts = make(run, work, None)["experts"]
    assert [one["threshold"] for one in facts.values()] == [1.0e-5, 1.9e-5]
    assert [one["optimizer"] for one in facts.values()] == ["adamw_8bit"] * 2
    assert [one["name"] for one in facts.values()] == ["select-0", "select-1"]


def test_maps_are_drawn_from_their_values_alone():
    first = Map(
        "Figure 9: x", ["1", "0"], ["attention.wq", "feed_forward.w2"], [[1.0, 0.5], [0.25, 0.0]]
    )
    second = Map("math expert #1", ["0"], ["attention.wq", "feed_forward.w2"], [[0.1, 0.2]])
    drawn = svg_of_maps([first, second], "a", "what changed")
    assert drawn == svg_of_maps([first, second], "a", "what changed")
    assert "math expert #1" in drawn and 'aria-label="what changed"' in drawn
    holes = svg_of_maps([Map("t", ["a"], ["b", "c"], [[None, 0.5]])], "a", "x")
    assert "–" in holes


def test_the_papers_maps_are_drawn():
    """Figures 4 to 9 of the first paper.

    Six maps of 32 layers by seven parameters, on one scale.
    """
    maps = published_maps()
    assert [one.title.partition(":")[0] for one in maps] == [
        f"Figure {number}" for number in range(4, 10)
    ]
    assert all(
        one.rows == [str(layer) for layer in range(31, -1, -1)] and len(one.columns) == 7
        for one in maps
    )
    assert maps[0].values[0][:3] == [0.411865, 0.680908, 0.840820]
    drawn = svg_of_maps(maps, "published", "the published maps")
    assert drawn.count("0.932") >= 1 and all(one.title in drawn for one in maps)
    columns = [[sum(row[i] for row in one.values) for i in range(7)] for one in maps]
    assert all(
        max(sums[:4]) > max(sums[4:]) for sums in columns
    )  # attention changes more than feed-forward, section 3.2
