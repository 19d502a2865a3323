"""Folders that would keep a program busy for ever: one sentence, before anything of their claimed size is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

import pipeline
from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.stages.rows import build

BASE = Path(pipeline.__file__).parent / "data/sandbox_base"


def deep(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def deep_settings(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[" * 100_000)


def many_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (folder / "config.json").write_text(json.dumps(config))


def many_layers_of_text(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 10**9}}))


def pipe(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (deep, r"config.json is not valid JSON \(maximum recursion depth"),
        (deep_settings, r"generation_config.json is not valid JSON \(maximum recursion depth"),
        (many_layers, r"num_hidden_layers of its config.json is 1000000000, above 1000"),
        (many_layers_of_text, r"num_hidden_layers of its config.json is 1000000000, above 1000"),
        (pipe, r"tokenizer.json is not a regular file"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        "stage=eval eval=mgsm_0shot checkpoint={}",
        "stage=merge merge=soup merge.experts=[{},hub:org/other]",
        "stage=sft expert=math model=trained model.path={}",
        "stage=analyze checkpoint={} base=hub:org/base",
    ],
)
def test_refused_in_one_sentence(words: str, spoil: Callable[[Path], None], sentence: str, tmp_path: Path) -> None:
    folder = copytree(BASE, tmp_path / "hostile")
    (folder / "manifest.json").unlink()
    spoil(folder)
    with pytest.raises(PipelineError, match=sentence) as told:
        build(compose(f"{words.format(folder)} runs_dir={tmp_path}/runs".split()))  # type: ignore[arg-type]
    assert "\n" not in str(told.value) and len(str(told.value)) < 500
