"""What each way to train is asked for with, and what of it decides a run."""

from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.knob import identity
from pipeline.errors import PipelineError
from pipeline.runs.run import Run
from pipeline.stages.rows import build

SANDBOX = "model=sandbox"  # eight layers
C = "partition=C partition.scale_to_depth=true"


def made(words: str) -> Run:
    return build(compose(f"stage=sft {SANDBOX} {words}".split()))  # type: ignore[arg-type]


REFUSED = {
    "expert=math sft=partial": "sft=partial needs a partition. Set partition=A, B, C, Z, or own",
    "expert=math_sw sft=simultaneous": (
        "sft=simultaneous needs a partition. Set partition=A, B, C, Z"
    ),
    "expert=math partition=B": (
        "sft=full does not use a partition. Leave partition=B out, or set sft=partial"
    ),
    "expert=math_sw sft=mixed partition=B": "sft=mixed does not use a partition",
    "expert=math_sw": (
        "sft=full trains on one set, but expert=math_sw has two. Set sft=mixed or sft=simultaneous"
    ),
    "expert=math_sw sft=partial_lora partition=A": (
        "sft=partial_lora trains on one set, but expert=math_sw has two"
    ),
    "expert=sw sft=mixed": (
        "sft=mixed trains on two sets, but expert=sw has one. Choose a joint set, such as expert=math_sw"
    ),
    "expert=sw sft=simultaneous_lora partition=C": (
        "sft=simultaneous_lora trains on two sets, but expert=sw has one"
    ),
    "expert=gsm8k_text sft=partial partition=B partition.scale_to_depth=true": (
        "sft=partial trains, such as sft.side=math"
    ),
    "expert=math sft.side=language": "sft.side=language is only read by sft=partial",
    f"expert=math sft=partial_lora {C} partition.outside=math": (
        "partition.outside=math: adapters are only in attention and"
    ),
    "expert=math sft=partial partition=B": (
        "takes the first 8 and the last 4 layers, but the model has 8"
    ),
    "expert=math sft.seq_length=9000": (
        "sft.seq_length=9000 is above the 1024 positions of model=sandbox. Set"
    ),
    "expert=math sft.batch_size=6 sft.micro_batch_size=4": (
        "is not a multiple of sft.micro_batch_size=4"
    ),
    "expert=math sft.batch_size=6 sft.processes=4": (
        "sft.micro_batch_size=1 x sft.processes=4. Give"
    ),
    "expert=math sft.batch_size=32 sft.processes=3 sft.micro_batch_size=2": (
        "sft.processes=3. Give sft.batch_size=36"
    ),
    "expert=math sft.batch_size=8 sft.processes=4 sft.micro_batch_size=4": (
        "sft.micro_batch_size=4 x sft.processes=4"
    ),
    f"expert=math_sw sft=simultaneous {C} sft.steps=1": (
        "sft.steps=1 with sft.steps_per_switch=1 ends before the lang"
    ),
    f"expert=math_sw sft=simultaneous {C} sft.steps=3 sft.steps_per_switch=5": (
        "Set sft.steps=10 or more, or lower"
    ),
    f"expert=math_sw sft=simultaneous_lora {C} sft.steps=5 sft.steps_per_switch=5": (
        "ends before the language side"
    ),
    f"expert=math sft=partial {C} partition.all_attention=true partition.all_mlp=true": (
        "none to math. Set partition.a"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_before_anything_is_loaded(words: str) -> None:
    with pytest.raises(PipelineError, match=r"^[^\n]*$") as told:
        made(words)
    assert REFUSED[words] in str(told.value)


def test_a_partition_is_hashed_by_the_numbers_it_comes_to() -> None:
    scaled = made("expert=math sft=partial partition=B partition.scale_to_depth=true")
    numbers = "partition=own partition.bottom_layers=2 partition.top_layers=1"
    assert scaled.hash == made(f"expert=math sft=partial {numbers}").hash
    assert identity(scaled.config)["partition"] == {"bottom_layers": 2, "top_layers": 1}
    assert scaled.hash != made(f"expert=math sft=partial {numbers} partition.inverse=true").hash


def test_the_side_that_partial_trains_is_hashed() -> None:
    words = "sft=partial partition=own partition.bottom_layers=2 partition.top_layers=1"
    math = made(f"expert=math {words}")
    assert identity(math.config)["sft"]["side"] == "math" and math.label == "math-partial-own-s0"
    other = made(f"expert=math {words} sft.side=language")
    assert math.hash == made(f"expert=math {words} sft.side=math").hash != other.hash


def test_depth_of_a_base_that_is_not_made_yet(tmp_path: Path) -> None:
    base = build(
        compose(["stage=cpt", "model=sandbox_random", "expert=gsm8k_text", "model.tokenizer=bpe"])
    )  # type: ignore[arg-type]
    words = (
        "stage=sft model=trained model.path=row expert=math sft=partial partition=B"
        " partition.scale_to_depth=true"
    )
    run = build(compose(words.split()), {"row": base})  # type: ignore[arg-type]
    assert identity(run.config)["partition"] == {"bottom_layers": 2, "top_layers": 1}


def test_ways_have_names_of_their_own() -> None:
    ways = {
        "sft=full": "math-full-s0",
        "sft=lora": "math-lora-s0",
        "sft=partial_lora partition=C partition.scale_to_depth=true": "math-partial_lora-C-s0",
    }
    for words, label in ways.items():
        assert made(f"expert=math {words}").label == label
    joint = "expert=math_qac sft=simultaneous partition=B partition.scale_to_depth=true"
    assert made(joint).label == "math_qac-simultaneous-B-s0"
    assert made(f"{joint} sft.steps_per_switch=2").hash != made(joint).hash
    assert (
        made(f"{joint} sft.steps=6 sft.steps_per_switch=5").config.sft.steps == 6
    )  # a turn of one: uneven, not none
    assert made("expert=math sft.processes=2").hash != made("expert=math").hash
