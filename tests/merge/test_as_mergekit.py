"""Compare linear merges, task arithmetic and SLERP with mergekit's output, and TIES with PEFT's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from as_mergekit import mergekit_config
from as_torch import as_torch
from by_mergekit import made_by_mergekit
from safetensors.torch import load_file, save_file

from pipeline.config.merging import Merge
from pipeline.config.training import Partition
from pipeline.merge.adapters import open_source
from pipeline.merge.merge import Merging
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.reset import Reset
from pipeline.merge.methods.slerp import Slerp
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge
from pipeline.merge.ties import kept_count
from pipeline.models.checkpoint import Checkpoint

SIDES = {"math": "m", "language": "l"}
TWO = {"experts": ["m", "l"]}
B = Partition("B", bottom_layers=4, top_layers=2, all_mlp=True)


ASKED: dict[str, tuple[Merge, Partition | None]] = {
    "swap": (LayerSwap(**SIDES, bottom_layers=3, top_layers=1), None),
    "zones": (
        LayerSwap(
            **SIDES,
            bottom_layers=1,
            top_layers=2,
            bottom_transition=2,
            top_transition=1,
            zones="magnitude",
        ),
        None,
    ),
    "norms": (
        LayerSwap(
            **SIDES, bottom_layers=2, layer_norms="average", head="math", embeddings="language"
        ),
        None,
    ),
    "sides": (LayerSwap(**SIDES), B),
    "souped": (LayerSwap(math=["m", "b"], language="l", bottom_layers=3), None),
    "even": (Soup(**TWO), None),
    "weighted": (Soup(**TWO, weights=[0.3, 0.7]), None),
    "float32": (Soup(**TWO, weights=[0.3, 0.7], dtype="float32"), None),
    "arithmetic": (TaskArithmetic(**TWO, weights=[0.3, 0.7], scale=0.6), None),
    "arithmetic in float32": (
        TaskArithmetic(**TWO, weights=[0.3, 0.7], scale=0.6, dtype="float32"),
        None,
    ),
    "soup over depth": (Soup(**TWO, weights=[[1.0, 0.2, 0.5], [0.0, 0.8, 0.5]]), None),
    "arithmetic over depth": (TaskArithmetic(**TWO, weights=[[0.3, 0.9], 0.7], scale=0.6), None),
    "slerp": (Slerp(**TWO, t=0.3), None),
    "reset": (Reset(expert="m", layers=[0, 1, 10]), None),
}
KINDS = ("llama", "qwen2", "tied")


def opened(folders: list[Path], config: Merge, partition: Partition | None = None) -> Merging:
    place = dict(zip(("b", "m", "l"), folders, strict=True))
    roles = {role: place[run] for role, (_, run) in config.references().items()}
    base = Checkpoint.open(place["b"]) if config.needs_base() else None
    return open_merge(
        config, {role: open_source(folder) for role, folder in roles.items()}, base, partition
    )


def names_of(folders: list[Path], config: Merge) -> dict[str, str]:
    place = dict(zip(("b", "m", "l"), folders, strict=True))
    return {role: str(place[run]) for role, (_, run) in config.references().items()} | {
        "base": str(place["b"])
    }


@pytest.fixture(scope="module")
def families(
    models: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Path]]:
    """Write base, math and language experts of each family.

    These are Llama and Qwen with their own head, and a Llama with a tied head.
    """
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
def theirs(
    families: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return mergekit's results for our merges, from one process."""
    asked = {
        f"{kind} {name}": mergekit_config(
            opened(families[kind], config, partition), names_of(families[kind], config)
        )
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
    """The bits are equal, except that SLERP is within a unit of bfloat16."""
    merge, found = opened(families[kind], *ASKED[name]), theirs[f"{kind} {name}"]
    assert set(merge.names) <= set(found)
    for parameter in merge.names:
        ours, other = as_torch(merge, parameter), found[parameter]
        assert ours.dtype == other.dtype
        if name == "slerp":
            torch.testing.assert_close(ours, other, rtol=2**-7, atol=1e-6)
        else:
            assert torch.equal(ours, other), parameter


@pytest.fixture(scope="module")
def sources(models):
    base, *experts = (Checkpoint.open(folder) for folder in models["qwen2"])
    return {str(index): one for index, one in enumerate(experts)}, base


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 0.7]])
def test_ties_is_pefts_ties_of_one_tensor_that_holds_the_whole_model(sources, weights):
    """Two kinds of entries differ:

    PEFT keeps exactly k entries if several are tied with the threshold, and it elects the positive
    sign where the sum is 0.
    """
    from peft.utils.merge_utils import ties

    experts, base = sources
    config = Ties(experts=["a", "b"], dtype="float32", density=0.3, weights=weights)
    merge = open_merge(config, experts, base)
    merge.ready()
    start = flat(base, merge.names)
    vectors = [flat(expert, merge.names) - start for expert in experts.values()]
    expected = start + ties(vectors, torch.tensor(weights), 0.3)
    tied = torch.zeros_like(start, dtype=torch.bool)
    opposite, total = tied.clone(), torch.zeros_like(start)
    for vector in vectors:
        size = vector.abs()
        threshold = size.sort(descending=True).values[kept_count(0.3, size.numel()) - 1]
        tied |= size == threshold
        opposite |= (size >= threshold) & (size > 0)
        total += vector * (size >= threshold)
    opposite &= total == 0
    compared = ~(tied | opposite)
    torch.testing.assert_close(
        flat(merge, merge.names)[compared], expected[compared], rtol=1e-6, atol=1e-7
    )
    assert compared.float().mean() > 0.9


def flat(source, names):
    """Return the named tensors as one vector."""
    return torch.cat([as_torch(source, name).float().flatten() for name in names])
