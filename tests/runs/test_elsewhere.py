"""Models made elsewhere, without a manifest: their base is merge.base or base.

Their model cards are not read.
"""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from as_torch import as_torch
from fixture_types import Make
from small_models import stacked

from pipeline.errors import PipelineError
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.manifest import read_manifest


@pytest.fixture
def three(tmp_path: Path) -> dict[str, Path]:
    base = stacked(tmp_path / "base", 3, 0)
    return {"base": base} | {
        name: stacked(tmp_path / name, 3, seed, base=base)
        for seed, name in enumerate(("math", "language"), 1)
    }


@pytest.fixture
def cached(three: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """org/base, org/math and org/language are in the Hub's cache."""
    import huggingface_hub

    of_name = {f"org/{name}": folder for name, folder in three.items()}
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(of_name[name]))
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda name, file, **_: str(of_name[name] / file)
    )
    return three


def analyzed(make_run: Make, tmp_path: Path, *words: str) -> list[dict[str, str]]:
    folder = make_run(
        "stage=analyze", f"runs_dir={tmp_path}/runs", "analyze.threshold=1e-3", *words
    )
    with open(folder / "delta.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def names(cached: dict[str, Path], on_hub: bool) -> dict[str, Any]:
    return {name: f"hub:org/{name}" if on_hub else folder for name, folder in cached.items()}


@pytest.mark.parametrize("on_hub", [False, True])
def test_analyze_takes_the_base(
    on_hub: bool, cached: dict[str, Path], make_run: Make, tmp_path: Path
) -> None:
    named = names(cached, on_hub)
    rows = analyzed(make_run, tmp_path, f"checkpoint={named['math']}", f"base={named['base']}")
    was, now = (Checkpoint.open(cached[name]) for name in ("base", "math"))
    changes = {
        name: as_torch(now, name).float() - as_torch(was, name).float() for name in was.names
    }
    expected = {name: float(change.abs().mean()) for name, change in changes.items()}
    assert {row["parameter"]: float(row["mean"]) for row in rows} == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("on_hub", [False, True])
def test_a_merge_of_task_vectors_takes_the_base(
    on_hub: bool, cached: dict[str, Path], make_run: Make, tmp_path: Path
) -> None:
    named = names(cached, on_hub)
    words = [f"merge.experts=[{named['math']},{named['language']}]", f"merge.base={named['base']}"]
    merged = make_run(
        "stage=merge",
        "merge=task_arithmetic",
        *words,
        "merge.scale=0.5",
        f"runs_dir={tmp_path}/runs",
    )
    manifest = read_manifest(merged)
    assert manifest is not None and manifest.base is not None and manifest.base.name == "base"
    base, math, language = (Checkpoint.open(cached[name]) for name in ("base", "math", "language"))
    for name, tensor in ((one, as_torch(Checkpoint.open(merged), one)) for one in base.names):
        start = as_torch(base, name).float()
        expected = start + 0.5 * (
            (as_torch(math, name).float() - start) + (as_torch(language, name).float() - start)
        )
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


def test_no_base_is_one_sentence(three: dict[str, Path], make_run: Make, tmp_path: Path) -> None:
    """Whatever a card says."""
    (three["math"] / "README.md").write_text(f"---\nbase_model: {three['base']}\n---\n")
    with pytest.raises(PipelineError) as refused:
        analyzed(make_run, tmp_path, f"checkpoint={three['math']}")
    assert (
        str(refused.value)
        == "checkpoint: math: its base is unknown, because it has no manifest and no adapter_config.json"
        " (model cards are not read). Name an sft run, or give base=RUN."
    )


def test_merges_of_checkpoints_made_elsewhere(
    base: Path, math_expert: Path, language_expert: Path, world: Path, tmp_path: Path, call: Any
) -> None:
    """The experts' folders as another program would have left them: no manifest."""
    made = {"base": base, "math": math_expert, "language": language_expert}
    for name, folder in made.items():
        (tmp_path / name).mkdir()
        for pattern in ("*.safetensors", "config.json", "generation_config.json", "tokenizer*"):
            for path in folder.glob(pattern):
                (tmp_path / name / path.name).write_bytes(path.read_bytes())
    words = [
        "merge=task_arithmetic",
        f"merge.experts=[{tmp_path}/math,{tmp_path}/language]",
        "merge.scale=0.2,0.4",
    ]
    words += [f"runs_dir={tmp_path}/runs", f"data_root={world}", "tracking.mode=disabled"]
    words += ["eval=mgsm_0shot", "eval.max_gen_toks=4", "eval.limit=2", "languages=[qac]"]
    assert "its base is unknown" in call("-m", "stage=eval", *words, status=1).err
    told = call("-m", "stage=eval", *words, f"merge.base={tmp_path}/base", status=0)
    scored = {path.parent for path in (tmp_path / "runs").glob("eval-*/scores.json")}
    assert len(scored) == 2 and {Path(line) for line in told.out.split()} == scored
