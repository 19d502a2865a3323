"""A joint set: the union of what its two experts' data runs give with the same mixture and seed."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import repositories
from fixture_types import Make

from pipeline.config.compose import compose
from pipeline.data.rows import read_jsonl
from pipeline.data.union import unite_sets
from pipeline.errors import PipelineError
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stages.rows import build
from pipeline.stages.steps import training_steps

START = ["model=sandbox", "recipe=sandbox_math", "sft.batch_size=4", "sft.micro_batch_size=null"]
START += ["sft.steps=2", "sft.warmup_steps=0"]
SIMULTANEOUS = ["sft=simultaneous", "partition=B", "partition.scale_to_depth=true"]


def built(*words: str) -> Run:
    return build(compose(list(words)))  # type: ignore[arg-type]


def rows(folder: Path, part: str) -> list[tuple[str, str, str | None]]:
    return [
        (row["prompt"], row["completion"], row.get("side"))
        for row in read_jsonl(folder / f"{part}.jsonl")
    ]


@pytest.mark.parametrize("ways", [["sft=mixed"], SIMULTANEOUS])
def test_a_joint_training_reads_the_union_of_both_experts_sets(
    ways: list[str], make_run: Make, world: Path
) -> None:
    """Against sets of Python.

    With data.size=20, 20 rows of each and 4 of each for validation, as each alone gives.
    """
    words = ["data.size=20", "data.validation=4", f"data_root={world}", "seed=3"]
    trained = make_run("stage=sft", "expert=math_qac", *ways, *START, *words)
    manifest = read_manifest(trained)
    assert manifest is not None
    joint = make_run("stage=data", "expert=math_qac", *words)
    assert (
        manifest.parents["data"].name == joint.name
    )  # the training's own set is the one that stage=data gives
    alone = {
        side: make_run("stage=data", f"expert={expert}", *words)
        for expert, side in (("math", "math"), ("qac", "language"))
    }
    told = read_manifest(joint)
    assert told is not None and {one.name for one in told.parents.values()} == {
        one.name for one in alone.values()
    }
    for part, size in (("train", 20), ("validation", 4)):
        expected = [
            (*row[:2], side) for side, folder in alone.items() for row in rows(folder, part)
        ]
        assert Counter(rows(joint, part)) == Counter(expected) and len(expected) == 2 * size
        assert part == "validation" or rows(joint, part) != expected  # shuffled
    assert {row[:2] for row in rows(joint, "train")}.isdisjoint(
        row[:2] for row in rows(joint, "validation")
    )
    assert (
        told.facts["counts"]["train"] == 40
        and "shuffled once (seed 3)" in (joint / "data_card.md").read_text()
    )
    last = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()][-1]
    assert {"validation_loss_math", "validation_loss_language"} <= last.keys()


def test_the_papers_joint_sets_are_of_the_two_experts_sets() -> None:
    """decisions.md: both papers' joint sets are the union.

    40,000 + 40,000, and 78,000 + 78,000 with 2,000 of each.
    """
    for mixture, size, validation in (
        ("layer_swapping", 40_000, 0),
        ("unreasonable", 78_000, 2_000),
    ):
        words = [f"mixture={mixture}", "seed=2"]
        joint = built("stage=sft", "expert=math_sw", "sft=mixed", *words).parents["data"]
        assert isinstance(joint, Run)
        for name in ("math", "sw"):
            own = built("stage=data", f"expert={name}", *words)
            assert joint.parents[name].hash == own.hash
            assert (
                joint.parents[name].hash
                == built("stage=sft", f"expert={name}", *words).parents["data"].hash
            )
            assert (own.config.data.size, own.config.data.validation) == (size, validation)


def test_the_hash_of_a_joint_set_is_that_of_its_parents_and_the_shuffle() -> None:
    words = ["stage=data", "expert=math_sw", "mixture=unreasonable"]
    joint = built(*words)
    assert "data" not in joint.decided_by["config"] and list(joint.decided_by["parents"]) == [
        "math",
        "sw",
    ]
    others = [
        ["seed=1"],
        ["data.shuffle=false"],
        ["data.validation=100"],
        ["expert.union.sw.size=7", "mixture=all"],
    ]
    assert len({joint.hash, *(built(*words, *more).hash for more in others)}) == 5


def test_steps_of_a_joint_training_are_planned_from_both_sets() -> None:
    """UE 4.5: 78,000 rows a side in steps of 64: 1,218 steps a side.

    Mixed, 156,000 in steps of 32: 4,875.
    """
    both = ["stage=sft", "expert=math_sw", "mixture=unreasonable", "model=llama3.1_8b_instruct"]
    alternating = built(
        *both, "sft=simultaneous", "partition=B", "recipe=unreasonable_simultaneous"
    )
    assert training_steps(alternating) == 2 * (78_000 // 64) == 2 * 1_218
    assert (
        training_steps(built(*both, "sft=mixed", "recipe=unreasonable_full"))
        == 2 * 78_000 // 32
        == 4_875
    )


def put(folder: Path, **parts: list[Any]) -> Path:
    folder.mkdir(parents=True)
    for part in ("train", "validation"):
        repositories.jsonl(
            folder / f"{part}.jsonl",
            [{"prompt": name, "completion": "a"} for name in parts.get(part, [])],
        )
    return folder


def test_the_other_experts_validation_rows_are_left_out(tmp_path: Path) -> None:
    sets = {
        "math": put(tmp_path / "math", train=["1", "2", "shared"], validation=["3"]),
        "sw": put(tmp_path / "sw", train=["3", "4"], validation=["shared"]),
    }
    united, left_out = unite_sets(sets, {"math": "math", "sw": "language"}, None)
    told = {part: [(row["prompt"], row["side"]) for row in found] for part, found in united.items()}
    assert told["train"] == [("1", "math"), ("2", "math"), ("4", "language")]
    assert told["validation"] == [("3", "math"), ("shared", "language")] and left_out == {
        "math": 1,
        "sw": 1,
    }
    shuffled, _ = unite_sets(sets, {"math": "math", "sw": "language"}, 5)
    order = list(united["train"])
    random.Random(5).shuffle(order)
    assert shuffled["train"] == order


def test_gpteacher_is_of_the_second_papers_telugu_alone() -> None:
    """LS table 3 names one machine-translated instruction set for Telugu.

    UE A.6 names a collection of such sets.
    """
    sources = {
        mixture: set(built("stage=data", "expert=te", f"mixture={mixture}").config.expert.sources)
        for mixture in ("layer_swapping", "unreasonable")
    }
    assert sources["unreasonable"] - sources["layer_swapping"] == {"telugu_gpteacher"}
    joint = built("stage=data", "expert=math_te", "mixture=layer_swapping").parents["te"]
    assert joint.hash == built("stage=data", "expert=te", "mixture=layer_swapping").hash
    with pytest.raises(
        PipelineError, match="data.leave_out=gpteacher is not a source of expert=te"
    ):
        built("stage=data", "expert=te", "data.leave_out=[gpteacher]")
