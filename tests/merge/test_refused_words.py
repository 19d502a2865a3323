"""Words of a merge that contradict each other, its experts, or arithmetic.

One sentence before anything is read.
"""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.stages.rows import build

SWAP = "stage=merge merge=layer_swap merge.math=hub:org/math merge.language=hub:org/sw"


def built(words: str) -> Any:
    return build(compose(words.split()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "count", ["bottom_layers=5", "bottom_layers=4", "top_layers=2", "bottom_transition=0"]
)
def test_any_count_beside_a_partition_is_refused(count: str) -> None:
    """Those of the defaults too."""
    with pytest.raises(
        PipelineError, match=rf"merge.{count} cannot be used with partition=B. Give layer counts"
    ):
        built(f"{SWAP} partition=B merge.{count}")
    assert "bottom_layers" not in built(f"{SWAP} partition=B").decided_by["config"]["merge"]


def test_the_default_counts_add_nothing_to_a_hash() -> None:
    named = built(
        f"{SWAP} merge.bottom_layers=5 merge.top_layers=2 merge.bottom_transition=0"
        " merge.top_transition=0"
    )
    plain = built(SWAP)
    assert named.hash == plain.hash and plain.label == "layer_swap-5-2-math-sw"
    assert (plain.config.merge.bottom_layers, plain.config.merge.top_layers) == (
        5,
        2,
    )  # as recorded
    assert built(f"{SWAP} merge.bottom_layers=4").hash != plain.hash


def test_experts_on_the_wrong_sides(math_expert: Path, language_expert: Path) -> None:
    words = (
        f"stage=merge merge=layer_swap runs_dir={math_expert.parent} merge.math={{}}"
        " merge.language={}"
    )
    swapped, right = (
        words.format(language_expert, math_expert),
        words.format(math_expert, language_expert),
    )
    with pytest.raises(
        PipelineError,
        match=r"merge.math=.* names an expert for language. .*, or set merge.sides=any",
    ):
        built(swapped)
    assert (
        built(f"{right} merge.sides=any").hash
        == built(right).hash
        != built(f"{swapped} merge.sides=any").hash
    )
