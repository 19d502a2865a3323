"""Merges of SmolLM2: mergekit's bits, the base's tensors, and the same in memory as on the disk."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mergekit_digests as recorded
import pytest
import torch
from fixture_types import Call
from safetensors import safe_open
from safetensors.torch import load_file

from pipeline.config.compose import compose
from pipeline.merge.adapters import open_source
from pipeline.merge.live import model_of
from pipeline.merge.open_merge import open_merge
from pipeline.merge.resident import keep_models_resident
from pipeline.models.checkpoint import Checkpoint

pytestmark = pytest.mark.real_models

EXPERTS = f"merge.experts=[{{math}},{{language}}] merge.weights={recorded.WEIGHTS}".replace(
    " 0", "0"
)
MERGES = {  # as mergekit_digests.mergekit_configs has them
    "layer_swap": recorded.SWAP,
    "soup": EXPERTS,
    "task_arithmetic": f"{EXPERTS} merge.scale={recorded.LAMBDA} merge.base={{base}}",
    "slerp": f"merge.experts=[{{math}},{{language}}] merge.t={recorded.T}",
}


@pytest.fixture(scope="module")
def folders(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Write the base and two experts of 540 MB each, and delete them at the end.

    A model stays in memory meanwhile.
    """
    folder = tmp_path_factory.mktemp("experts")
    with keep_models_resident():
        yield {"base": smollm2, **recorded.make_experts(smollm2, folder)}
    shutil.rmtree(folder)


@pytest.fixture
def merged(folders: dict[str, Path], call: Call, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return the folder of a merge by stage=merge, deleted after the test."""

    def merge(method: str) -> Path:
        told = call("stage=merge", *overrides(method, folders), f"runs_dir={tmp_path}/runs")
        assert told.status == 0, told.err
        return Path(told.out.strip())

    yield merge
    shutil.rmtree(tmp_path / "runs")


def overrides(method: str, folders: dict[str, Path]) -> list[str]:
    return [f"merge={method}", *MERGES[method].format(**folders).split(), "tracking.mode=disabled"]


def in_memory(method: str, folders: dict[str, Path]) -> Any:
    """Apply the merge to the model in memory, which holds the previous merge."""
    config = compose(["stage=merge", *overrides(method, folders)]).merge  # type: ignore[attr-defined]
    sources = {role: open_source(Path(run)) for role, (_, run) in config.references().items()}
    base = Checkpoint.open(folders["base"]) if config.needs_base() else None
    return model_of(open_merge(config, sources, base), "auto", "cpu", 1).model


def shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("method", MERGES)
def test_a_merge_equals_mergekits_on_disk_and_in_memory(
    method: str, folders: dict[str, Path], merged: Callable[[str], Path]
) -> None:
    """Every tensor, bit for bit.

    SLERP in slices, as the last bits of its angles differ between processors. Experts in float32 of
    a bfloat16 base; the merge has the experts' dtype and the base's tensors (a tied head is none).
    """
    theirs: dict[str, Any] = json.loads(recorded.FILE.read_text())
    for role, folder in folders.items():
        assert recorded.whole(folder / "model.safetensors") == theirs[role], (
            f"another {role} than mergekit merged"
        )
    folder = merged(method)
    assert shapes(folder) == shapes(folders["base"])
    tensors = load_file(folder / "model.safetensors")
    if method == "slerp":
        found: dict[str, Any] = recorded.slices(tensors)
        for name, values in theirs[method].items():
            assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
    else:
        found = recorded.digests(tensors)
        assert {name for name in found if found[name] != theirs[method][name]} == set()
    assert found.keys() == theirs[method].keys() == tensors.keys()
    live = dict(in_memory(method, folders).named_parameters())
    assert {
        name for name, tensor in tensors.items() if not torch.equal(live[name], tensor)
    } == set()
    assert live.keys() == tensors.keys()
