"""What the command line refuses in one sentence, where Hydra, argparse or a closed pipe would end with a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.__main__ import main


@pytest.mark.parametrize(
    ("words", "sentence"),
    {
        "stage=status =1": "'=1' has no key: write key=value",
        "language=1": "unknown key language: did you mean languages?",
        "tables=1": "unknown key tables: did you mean table",
        "stage=plan table=sandbox evry.seed=1": "unknown key evry: did you mean every?",
        "--resolve": "--resolve is not a flag of this program; there are --help",
        "--stage sft": "--stage is not a flag of this program: write stage=...; there are --help",
        "expert=null --cfg job": "expert=null is not an option: give one of",
        "--cfg job +thsi=1": "unknown key thsi",
        "--cfg": "--cfg shows a command's values: give --cfg job",
        "--cfg=jbo": "--cfg shows a command's values: give --cfg job",
        "-m --cfg job seed=1,2": "-m starts a run for each of several values, --cfg shows one: drop one",
        "--cfg job all": "'all' is not an override: write key=value",
        "stage=sft sft.epochs=-1 expert=math --cfg job": "sft.epochs must be",
    }.items(),
)
def test_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {sentence}") and told.err.count("\n") == 1 and told.out == ""


def test_a_reader_that_closes_its_pipe() -> None:
    """`--help | head -1`, and a result that nobody reads."""
    for words in (["--help"], ["stage=merge", "merge=ties", "--cfg", "job"], ["stage=status", "runs_dir=."]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(writer)
        assert done.returncode == 0 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr, words


def test_cfg_shows_what_will_run(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that a run resolves from others, or from its base; without its data, those that need no file."""
    partial = "stage=sft expert=math sft=partial partition=B partition.scale_to_depth=true recipe=default"
    score = f"stage=eval checkpoint=package:data/sandbox_base eval=mgsm_0shot languages=[qac] data_root={world}"
    rate = "  learning_rate: 1.0e-06"
    for words, shown in {
        f"{partial} model=sandbox": [rate, "  side: math", "  bottom_layers: 2", "  top_layers: 1"],
        f"{partial} model=./none": [rate, "  side: math", "  bottom_layers: 8", "  top_layers: 4"],
        "stage=sft expert=math recipe=default sft=lora": ["  learning_rate: 6.0e-05"],
        score: ["  dtype: float32"],
    }.items():
        assert main([*words.split(), "--cfg", "job"]) == 0
        told = capsys.readouterr().out.splitlines()
        assert set(shown) <= set(told), words
