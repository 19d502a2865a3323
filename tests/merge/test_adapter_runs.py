"""LoRA experts as runs of ours.

Found with their base by manifests, merged, scored in memory and from disk alike.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import Make
from safetensors.torch import load_file
from small_models import lora_expert

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.manifest import Ancestor, Manifest, read_manifest
from pipeline.stages.rows import build

ASKED = ["eval=sandbox", "eval.max_gen_toks=4", "eval.limit=3", "languages=[en,qac]"]


@pytest.fixture(scope="module")
def adapters(runs_dir: Path, base: Path) -> list[str]:
    """Write two runs of adapters: an adapter, a tokenizer, and a manifest with the base."""
    manifest = read_manifest(base)
    assert manifest is not None
    parent = Ancestor(manifest.name, manifest.hash, manifest.weights_root)
    folders = []
    for seed, side in enumerate(("math", "language")):
        folder = runs_dir / f"{side}-lora-s0-{seed:08d}"
        lora_expert(
            base, folder, seed, 0.5, r=4, target_modules=["q_proj", "up_proj"], use_rslora=True
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((base / name).read_bytes())
        Manifest(
            folder.name,
            f"{seed:08d}" * 8,
            {"stage": "sft"},
            {"weights": {"root": f"sha256:{side}", "digests": {}}},
            config={"expert": {"side": side}, "sft": {"optimizer": "adamw"}},
            parents={"model": parent},
            started="2026",
        ).write(folder)
        folders.append(folder.name)
    return folders


def answers(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "samples").glob("*.jsonl"))}


def test_a_swap_of_adapters_is_an_adapter_and_scores_the_same_from_disk_and_from_memory(
    make_run: Make, world: Path, base: Path, adapters: list[str]
) -> None:
    named = [
        "merge=layer_swap",
        f"merge.math={adapters[0]}",
        f"merge.language={adapters[1]}",
        "merge.bottom_layers=3",
    ]
    written = make_run("stage=merge", *named)
    manifest = read_manifest(written)
    assert manifest is not None and set(manifest.parents) == {"math", "language", "base"}
    assert (written / "adapter_model.safetensors").is_file() and not (
        written / "model.safetensors"
    ).exists()
    asked = [*ASKED, f"data_root={world}"]
    from_disk = make_run("stage=eval", f"checkpoint={written}", *asked)
    in_memory = make_run("stage=eval", *named, *asked, "redo=true")  # not found again
    assert answers(from_disk) == answers(in_memory)
    of_base = make_run("stage=eval", f"checkpoint={base}", *asked)
    assert answers(of_base) != answers(from_disk)
    again = make_run(
        "stage=merge", "merge=task_arithmetic", f"merge.experts=[{written}]", "merge.form=dense"
    )  # an expert
    assert Checkpoint.open(again).info("model.norm.weight").dtype == "F32"


def test_an_adapter_is_no_base_of_a_training(adapters: list[str], runs_dir: Path) -> None:
    """Refused when the training is planned, not when it begins; finished, or planned itself."""
    words = ["stage=sft", "model=trained", "expert=math", f"runs_dir={runs_dir}"]
    for base in (adapters[0], str(Path(runs_dir, adapters[0]))):
        with pytest.raises(
            PipelineError,
            match=r"model.path=.* is an adapter. Write it as a model first: stage=merge",
        ):
            build(compose([*words, f"model.path={base}"]))  # type: ignore[arg-type]


def test_ties_of_adapters_is_dense_and_their_changes_can_be_analyzed(
    make_run: Make, adapters: list[str]
) -> None:
    merged = make_run(
        "stage=merge", "merge=ties", f"merge.experts=[{','.join(adapters)}]", "merge.dtype=bfloat16"
    )
    checkpoint = Checkpoint.open(merged)
    assert {info.dtype for info in checkpoint.infos.values()} == {"BF16"} and checkpoint.config[
        "dtype"
    ] == "bfloat16"
    cast = json.loads((merged / "manifest.json").read_text())["facts"]["cast"]
    whole = make_run("stage=merge", "merge=ties", f"merge.experts=[{','.join(adapters)}]")
    assert "cast" not in json.loads((whole / "manifest.json").read_text())["facts"]
    exact = torch.cat(
        [
            tensor.double().flatten()
            for _, tensor in sorted(load_file(whole / "model.safetensors").items())
        ]
    )
    error = (exact.float().bfloat16().double() - exact).norm() / exact.norm()
    assert cast == {"to": "bfloat16", "relative_error": pytest.approx(error.item(), rel=1e-5)}
    found = make_run("stage=analyze", f"checkpoint=[{','.join(adapters)}]")
    lines = (found / "delta.csv").read_text().splitlines()
    assert any(
        "v_proj" in line and line.endswith(",1.0") for line in lines
    )  # what no adapter touches is the same


def test_a_merge_of_runs_is_exported_as_the_adapter_that_it_is(
    make_run: Make,
    call: Callable[..., Any],
    adapters: list[str],
    base: Path,
    runs_dir: Path,
    tmp_path: Path,
) -> None:
    """The base is found by the hashes in the manifests, and is no model of the Hub."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    experts = f"merge.experts=[{','.join(adapters)}]"
    written, merged = (
        make_run("stage=merge", "merge=soup", experts, f"merge.form={form}")
        for form in ("dense", "adapter")
    )
    words = [
        f"checkpoint={merged.name}",
        f"export.to={tmp_path}/out",
        f"runs_dir={runs_dir}",
        "export.adapter=true",
    ]
    told = call("stage=export", *words)
    assert told.status == 0, told.err
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    expected = load_file(written / "model.safetensors")
    for name, tensor in loaded.merge_and_unload().state_dict().items():
        if name in expected:  # the head is tied
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (
        settings["target_modules"] == ["q_proj", "up_proj"]
        and settings["r"] == settings["lora_alpha"] == 8
    )
    assert (
        settings["base_model_name_or_path"] is None
        and base.name in (tmp_path / "out/README.md").read_text()
    )
