"""Merges as mergekit makes them, to the bit: linear ones, task arithmetic, TIES and SLERP, put in its own words;
and TIES under PEFT's definition, against PEFT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from as_mergekit import mergekit_config
from as_torch import as_torch
from by_mergekit import made_by_mergekit
from safetensors.torch import load_file, save_file

from pipeline.config.compose import compose
from pipeline.config.merging import Merge
from pipeline.config.training import Partition
from pipeline.merge.adapters import open_source
from pipeline.merge.merge import Merging, open_merge
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.reset import Reset
from pipeline.merge.methods.slerp import Slerp
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.merge.ties import kept_count
from pipeline.models.checkpoint import Checkpoint

SIDES = {"math": "m", "language": "l"}
TWO = {"experts": ["m", "l"]}
EXACT = {"experts": "[m,l]"}  # as the preset has it
KEEP_ALL = EXACT | {"ties_at_threshold": "keep_all"}
B = Partition("B", bottom_layers=4, top_layers=2, all_mlp=True)


def preset(name: str, **settings) -> Ties:
    """conf/merge/ties_<name>.yaml with some knobs."""
    words = [f"merge.{key}={value}".replace(" ", "") for key, value in settings.items()]
    return compose(["stage=merge", f"merge=ties_{name}", *words]).merge  # type: ignore[attr-defined]


ASKED: dict[str, tuple[Merge, Partition | None]] = {
    "swap": (LayerSwap(**SIDES, bottom_layers=3, top_layers=1), None),
    "zones": (
        LayerSwap(**SIDES, bottom_layers=1, top_layers=2, bottom_transition=2, top_transition=1, zones="magnitude"),
        None,
    ),
    "norms": (LayerSwap(**SIDES, bottom_layers=2, layer_norms="average", head="math", embeddings="language"), None),
    "sides": (LayerSwap(**SIDES), B),
    "souped": (LayerSwap(math=["m", "b"], language="l", bottom_layers=3), None),
    "even": (Soup(**TWO), None),
    "weighted": (Soup(**TWO, weights=[0.3, 0.7]), None),
    "float32": (Soup(**TWO, weights=[0.3, 0.7], dtype="float32"), None),
    "arithmetic": (TaskArithmetic(**TWO, weights=[0.3, 0.7], scale=0.6), None),
    "arithmetic in float32": (TaskArithmetic(**TWO, weights=[0.3, 0.7], scale=0.6, dtype="float32"), None),
    "ties": (preset("mergekit", density=0.3, **KEEP_ALL), None),
    "ties weighted": (preset("mergekit", density=0.3, weights=[0.3, 0.7], scale=0.8, **KEEP_ALL), None),
    "exact ties": (preset("mergekit", density=0.3, **EXACT), None),
    "exact ties weighted": (preset("mergekit", density=0.29, weights=[0.3, 0.7], scale=0.8, **EXACT), None),
    "exact ties in float32": (preset("mergekit", density=0.3, dtype="float32", **EXACT), None),
    "slerp": (Slerp(**TWO, t=0.3), None),
    "reset": (Reset(expert="m", layers=[0, 1, 10]), None),
}
KINDS = ("llama", "qwen2", "tied")


def opened(folders: list[Path], config: Merge, partition: Partition | None = None) -> Merging:
    place = dict(zip(("b", "m", "l"), folders, strict=True))
    roles = {role: place[run] for role, (_, run) in config.references().items()}
    base = Checkpoint.open(place["b"]) if config.needs_base() else None
    return open_merge(config, {role: open_source(folder) for role, folder in roles.items()}, base, partition)


def names_of(folders: list[Path], config: Merge) -> dict[str, str]:
    place = dict(zip(("b", "m", "l"), folders, strict=True))
    return {role: str(place[run]) for role, (_, run) in config.references().items()} | {"base": str(place["b"])}


@pytest.fixture(scope="module")
def families(models: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Base, math and language of each: Llama and Qwen with a head of their own, and a Llama whose head is tied."""
    tied = [tmp_path_factory.mktemp("tied") / folder.name for folder in models["llama"]]
    for folder, source in zip(tied, models["llama"], strict=True):
        folder.mkdir()
        tensors = load_file(source / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
    return {**models, "tied": tied}


@pytest.fixture(scope="module")
def theirs(families: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What mergekit makes of our merges; one process for all."""
    asked = {
        f"{kind} {name}": mergekit_config(opened(families[kind], config, partition), names_of(families[kind], config))
        for kind in KINDS
        for name, (config, partition) in ASKED.items()
    }
    return made_by_mergekit(asked, tmp_path_factory.mktemp("mergekit"))


@pytest.mark.mergekit
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("kind", KINDS)
def test_mergekit_makes_the_same_weights(
    kind: str, name: str, families: dict[str, list[Path]], theirs: dict[str, dict[str, Any]]
) -> None:
    """To the bit, of bfloat16 models: SLERP within a unit of bfloat16, TIES that keeps all ties but for these."""
    merge, found = opened(families[kind], *ASKED[name]), theirs[f"{kind} {name}"]
    assert set(merge.names) <= set(found)
    different = entries = 0
    for parameter in merge.names:
        ours, other = as_torch(merge, parameter), found[parameter]
        assert ours.dtype == other.dtype
        if name == "slerp":
            torch.testing.assert_close(ours, other, rtol=2**-7, atol=1e-6)
        elif not name.startswith("ties"):
            assert torch.equal(ours, other), parameter
        different, entries = different + int((ours != other).sum()), entries + ours.numel()
    assert different < 0.02 * entries


@pytest.fixture(scope="module")
def sources(models):
    base, *experts = (Checkpoint.open(folder) for folder in models["qwen2"])
    return {str(index): one for index, one in enumerate(experts)}, base


def vectors(sources, name):
    experts, base = sources
    return [as_torch(one, name).float() - as_torch(base, name).float() for one in experts.values()]


def tied(vector, density):
    """Entries whose magnitude is exactly that at which the trim cuts."""
    size = vector.abs()
    return size == size.flatten().sort(descending=True).values[kept_count(density, size.numel()) - 1]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 0.7]])
def test_ties_under_pefts_definition_is_pefts(sources, weights):
    """Equal but for entries tied with a threshold: PEFT keeps exactly k of them, we keep all."""
    from peft.utils.merge_utils import ties

    experts, base = sources
    merge = open_merge(preset("peft", experts="[a,b]", dtype="float32", density=0.3, weights=weights), experts, base)
    compared = 0
    for name in merge.names:
        both = vectors(sources, name)
        expected = as_torch(base, name).float() + ties(both, torch.tensor(weights), 0.3)
        free = ~(tied(both[0], 0.3) | tied(both[1], 0.3))
        torch.testing.assert_close(as_torch(merge, name)[free], expected[free], rtol=1e-6, atol=1e-7)
        compared += int(free.sum())
    assert compared > 20_000
