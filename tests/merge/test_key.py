"""What a merge is known by.

What it is made of, the same before and after it is written, and of nothing else.
"""

import json
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
from fixture_types import Make
from small_models import stacked
from test_adapters import lora  # noqa: F401

from pipeline.config.compose import compose
from pipeline.evaluate.store import merge_key, model_key
from pipeline.merge.digests import known_digests, weights_key
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.slerp import Slerp
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge
from pipeline.merge.stage import merge_of
from pipeline.models.checkpoint import Checkpoint, digest_tensors, weights_root
from pipeline.runs.lineage import named_base
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import External
from pipeline.stages.rows import build

TWO = {"experts": ["a", "b"]}
SWAP = {"math": "a", "language": "b", "embeddings": "math", "final_norm": "math", "head": "math"}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    base = stacked(tmp_path / "base", 3, 0)
    return [base, *(stacked(tmp_path / str(seed), 3, seed, base) for seed in (1, 2))]


def key(config: Any, folders: list[Path], runs_dir: Path) -> str:
    base, *experts = map(Checkpoint.open, folders)
    merge = open_merge(
        config,
        dict(zip(config.references(), experts, strict=True)),
        base if config.needs_base() else None,
    )
    return weights_key(merge, known_digests(merge, runs_dir))


def test_each_merge_has_its_own_key_wherever_its_sources_are(
    folders: list[Path], tmp_path: Path
) -> None:
    merges = [
        Soup(**TWO),
        Soup(**TWO, weights=[0.3, 0.7]),
        Soup(**TWO, dtype="float32"),
        Ties(**TWO),
        Ties(**TWO, density=0.3),
        TaskArithmetic(**TWO),
        TaskArithmetic(**TWO, scale=0.5),
        Slerp(**TWO),
        Slerp(**TWO, t=0.4),
        LayerSwap(**SWAP, bottom_layers=1, top_layers=0),
        LayerSwap(**SWAP, bottom_layers=1, top_layers=1),
    ]
    keys = [key(config, folders, tmp_path) for config in merges]
    assert len(set(keys)) == len(keys) and all(one.startswith("merge:") for one in keys)
    moved = [copytree(folder, tmp_path / "moved" / folder.name) for folder in folders]
    assert [key(config, moved, tmp_path) for config in merges] == keys
    other = [folders[0], folders[2], folders[1]]
    assert all(
        key(config, other, tmp_path) != one for config, one in zip(merges, keys, strict=True)
    )


def test_a_merge_that_is_one_source_has_its_key(folders: list[Path], tmp_path: Path) -> None:
    root = weights_root(digest_tensors(folders[1]))
    nothing = LayerSwap(**SWAP, bottom_layers=0, top_layers=0)
    assert (
        key(nothing, folders, tmp_path)
        == key(Soup(**TWO, weights=[1.0, 0.0]), folders, tmp_path)
        == root
    )
    assert key(Soup(**TWO, weights=[1.0, 0.0], dtype="float32"), folders, tmp_path) != root


@pytest.mark.parametrize("method", ["soup", "ties", "task_arithmetic"])
def test_a_merge_in_memory_is_known_as_the_written_one(
    method: str, folders: list[Path], make_run: Make, tmp_path: Path
) -> None:
    words = [
        f"merge={method}",
        f"merge.experts=[{folders[1]},{folders[2]}]",
        f"runs_dir={tmp_path}/runs",
    ]
    words += [f"merge.base={folders[0]}"] if method != "soup" else []
    written = make_run("stage=merge", *words)
    live = merge_of(build(compose(["stage=merge", *words])))  # type: ignore[arg-type]
    found = merge_key(live, tmp_path / "runs")
    assert found == model_key(External("m", "m", written))
    manifest = read_manifest(written)
    assert manifest and manifest.weights["made_of"] == found["root"] != manifest.weights_root
    assert manifest.weights_root == weights_root(digest_tensors(written))


def test_merges_of_adapters(lora: dict[str, Path], make_run: Make, tmp_path: Path) -> None:  # noqa: F811
    words = [
        "merge=soup",
        f"merge.experts=[{lora['math']},{lora['language']}]",
        f"runs_dir={tmp_path}/runs",
    ]
    keys = []
    for form in ("auto", "dense"):
        written = make_run("stage=merge", *words, f"merge.form={form}")
        live = merge_of(build(compose(["stage=merge", *words, f"merge.form={form}"])))  # type: ignore[arg-type]
        keys.append(merge_key(live, tmp_path / "runs"))
        assert keys[-1] == model_key(External("m", "m", written)), json.dumps(keys)
    assert keys[0] != keys[1]


def test_an_adapter_from_elsewhere_is_known_by_the_files_of_its_base(
    lora: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Its folder has no config.json.

    Another epsilon there is another model, on the same tensors.
    """
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    (base_of, _), named = (
        named_base(lora["math"]),
        ("adapter_config.json", "adapter_model.safetensors"),
    )
    copytree(base_of, base, ignore=ignore_patterns("manifest.json"))
    adapter.mkdir()
    for name in named:
        (adapter / name).write_bytes((lora["math"] / name).read_bytes())
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {
        "base_model_name_or_path": str(base)
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    keys = []
    for epsilon in (1e-6, 1e-3):
        config = json.loads((base / "config.json").read_text()) | {"rms_norm_eps": epsilon}
        (base / "config.json").write_text(json.dumps(config))
        words = [
            "stage=eval",
            f"checkpoint={adapter}",
            "eval=gsm8k_0shot",
            f"runs_dir={tmp_path}/runs",
        ]
        live = merge_of(build(compose([*words, "languages=[en]"])))  # type: ignore[arg-type]
        keys.append(merge_key(live, tmp_path / "runs"))
    assert keys[0] != keys[1] and keys[0]["root"] == keys[1]["root"]
