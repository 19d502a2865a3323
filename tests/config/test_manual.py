"""`stage=S --help`: every knob of a command with its default, its bounds and its meaning."""

from dataclasses import fields

import pytest

from pipeline.__main__ import main
from pipeline.config.compose import compose
from pipeline.config.knob import format_value
from pipeline.config.manual import manual_text
from pipeline.config.training import Sft


def entry_of(text: str, key: str) -> str:
    """The lines of a knob, as one."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"  {key}="))
    more = [line for line in lines[start + 1 :]]
    stop = next((place for place, line in enumerate(more) if not line.startswith(" " * 10)), len(more))
    return " ".join(" ".join([lines[start], *more[:stop]]).split())


def test_a_knob_has_its_default_its_meaning_and_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stage=sft", "--help"]) == 0
    text = capsys.readouterr().out
    assert entry_of(text, "sft.warmup_steps") == "sft.warmup_steps=0 optimizer steps [>= 0]"
    assert entry_of(text, "sft.steps").startswith("sft.steps=null optimizer steps, counting both sides; null: all")
    assert entry_of(text, "sft.template") == "sft.template=plain plain: prompt, separator, completion [plain, chat]"
    assert entry_of(text, "seed") == "seed=0 [>= 0 and <= 4294967295]"
    assert "full unless given" in text and "(needed)" in text and max(map(len, text.splitlines())) <= 120
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
    for knob in ("learning_rate", "precision", "weights", "batch_size", "warmup_steps", "lora_rank"):
        assert entry_of(text, f"sft.{knob}").startswith(f"sft.{knob}={format_value(getattr(stage.sft, knob))} "), knob  # type: ignore[attr-defined]
    assert entry_of(text, "sft.epochs").startswith("sft.epochs=3 ")
    default = manual_text(["stage=sft"])  # the expert is needed and not named
    assert entry_of(default, "sft.precision").startswith(f"sft.precision={compose(words[:2]).sft.precision} ")  # type: ignore[attr-defined]
    assert "expert.side=... " in default
    rates = [entry_of(manual_text(["stage=sft", f"sft={way}"]), "sft.learning_rate") for way in ("full", "lora")]
    assert [rate.split()[0] for rate in rates] == ["sft.learning_rate=1e-06", "sft.learning_rate=6e-05"]
