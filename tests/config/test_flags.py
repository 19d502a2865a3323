"""What the command line refuses in one sentence, and `stage=S --help`.

Hydra, argparse or a closed pipe would end with a traceback. The help shows every knob of a command
with its default, its bounds and its meaning.
"""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from fixture_types import Call

from pipeline.config.compose import compose
from pipeline.config.knob import format_value
from pipeline.config.manual import manual_text
from pipeline.config.training import Sft


@pytest.mark.parametrize(
    ("words", "sentence"),
    {
        "stage=status =1": "'=1' has no key. Write key=value",
        "language=1": "unknown key language: did you mean languages?",
        "tables=1": "unknown key tables: did you mean table",
        "stage=plan table=sandbox evry.seed=1": "unknown key evry: did you mean every?",
        "--resolve": "--resolve is not a flag of this program. The flags are --help",
        "--stage sft": "--stage is not a flag of this program. The flags are --help",
        "expert=null --cfg job": "expert=null is not an option. Choose from",
        "--cfg job +thsi=1": "unknown key thsi",
        "--cfg": "--cfg shows the values of a command. Write --cfg job",
        "--cfg=jbo": "--cfg shows the values of a command. Write --cfg job",
        "-m --cfg job seed=1,2": (
            "-m starts a run for each of several values, but --cfg shows one. Remove one"
        ),
        "--cfg job all": "'all' is not an override. Write key=value",
        "stage=sft sft.epochs=-1 expert=math --cfg job": "sft.epochs must be",
    }.items(),
)
def test_one_sentence(words: str, sentence: str, call: Call) -> None:
    told = call(*words.split(), status=1)
    assert (
        told.err.startswith(f"error: {sentence}") and told.err.count("\n") == 1 and told.out == ""
    )


def test_a_reader_that_closes_its_pipe() -> None:
    """`--help | head -1`, and a result that nobody reads."""
    for words in (
        ["--help"],
        ["stage=merge", "merge=ties", "--cfg", "job"],
        ["stage=status", "runs_dir=."],
    ):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(writer)
        assert (
            done.returncode == 0
            and "Traceback" not in done.stderr
            and "BrokenPipe" not in done.stderr
        ), words


def test_cfg_shows_what_will_run(world: Path, call: Call) -> None:
    """Values that a run resolves from others, or from its base.

    Without its data, those that need no file.
    """
    partial = (
        "stage=sft expert=math sft=partial partition=B partition.scale_to_depth=true recipe=default"
    )
    score = (
        "stage=eval checkpoint=package:data/sandbox_base eval=mgsm_0shot languages=[qac]"
        f" data_root={world}"
    )
    rate = "  learning_rate: 1.0e-06"
    for words, shown in {
        f"{partial} model=sandbox": [rate, "  side: math", "  bottom_layers: 2", "  top_layers: 1"],
        f"{partial} model=./none": [rate, "  side: math", "  bottom_layers: 8", "  top_layers: 4"],
        "stage=sft expert=math recipe=default sft=lora": ["  learning_rate: 6.0e-05"],
        score: ["  dtype: float32"],
    }.items():
        assert set(shown) <= {*call(*words.split(), "--cfg", "job", status=0).out.splitlines()}, (
            words
        )


def entry_of(text: str, key: str) -> str:
    """Return the lines of a knob as one."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"  {key}="))
    more = lines[start + 1 :]
    stop = next(
        (place for place, line in enumerate(more) if not line.startswith(" " * 10)), len(more)
    )
    return " ".join(" ".join([lines[start], *more[:stop]]).split())


def test_a_knob_has_its_default_its_meaning_and_its_bounds(call: Call) -> None:
    text = call("stage=sft", "--help", status=0).out
    assert entry_of(text, "sft.warmup_steps") == "sft.warmup_steps=0 optimizer steps [>= 0]"
    assert entry_of(text, "sft.steps").startswith(
        "sft.steps=null optimizer steps, counting both sides; null: all"
    )
    assert (
        entry_of(text, "sft.template")
        == "sft.template=plain plain: prompt, separator, completion [plain, chat]"
    )
    assert entry_of(text, "seed") == "seed=0 [>= 0 and <= 4294967295]"
    assert (
        "full unless given" in text
        and "(needed)" in text
        and max(map(len, text.splitlines())) <= 120
    )
    for item in fields(Sft):
        assert item.name == "name" or f"  sft.{item.name}=" in text, item.name


def test_the_defaults_are_those_that_are_composed() -> None:
    """Of the partition and the merge that are asked for, those of their classes."""
    text = manual_text(["stage=merge", "merge=ties"])
    stage = compose(["stage=merge", "merge=ties", "merge.experts=[a,b]"])
    assert entry_of(text, "merge.density").startswith(f"merge.density={stage.merge.density} ")  # type: ignore[attr-defined]
    swap = manual_text(["stage=merge", "merge=layer_swap"])
    assert "merge.bottom_layers" not in text and "merge.bottom_layers=null" in swap


def test_values_are_those_of_the_command() -> None:
    """Of its recipe, of what the command sets, and of the groups that it names."""
    words = ["stage=sft", "expert=math", "sft=lora", "recipe=layer_swapping_math_1", "sft.epochs=3"]
    stage, text = compose(words), manual_text(words)
    for knob in (
        "learning_rate",
        "precision",
        "weights",
        "batch_size",
        "warmup_steps",
        "lora_rank",
    ):
        assert entry_of(text, f"sft.{knob}").startswith(
            f"sft.{knob}={format_value(getattr(stage.sft, knob))} "
        ), knob  # type: ignore[attr-defined]
    assert entry_of(text, "sft.epochs").startswith("sft.epochs=3 ")
    default = manual_text(["stage=sft"])  # the expert is needed and not named
    assert entry_of(default, "sft.precision").startswith(
        f"sft.precision={compose(words[:2]).sft.precision} "
    )  # type: ignore[attr-defined]
    assert "expert.side=... " in default
    rates = [
        entry_of(manual_text(["stage=sft", f"sft={way}"]), "sft.learning_rate")
        for way in ("full", "lora")
    ]
    assert [rate.split()[0] for rate in rates] == [
        "sft.learning_rate=1e-06",
        "sft.learning_rate=6e-05",
    ]
