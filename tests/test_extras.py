"""The core does not need extras/: without it the papers' tables plan and a table runs."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest

ROOT = Path(__file__).parents[1]
TABLE = """
name: own
axes: {seed: [0]}
every: {model: sandbox, data_root: WORLD, threads: 1}
runs:
  base: {}
  math: {stage: sft, expert: math, recipe: sandbox_math, sft.steps: 4, sft.epochs: 9, seed: "{seed}"}
  language: {stage: sft, expert: qac, recipe: sandbox_language, sft.steps: 4, sft.epochs: 9, seed: "{seed}"}
  swap: {merge: layer_swap, merge.math: math, merge.language: language, merge.scale_to_depth: true}
  soup: {merge: soup, merge.experts: [math, language]}
  ties: {stage: merge, merge: ties, merge.experts: [math, language]}
score: {eval: mgsm_0shot, eval.max_gen_toks: 8, eval.limit: 4, mean: [seed]}
columns: {en: {in: en}, qac: {in: qac}}
rows: {base: {run: base}, math: {run: math}, swap: {run: swap}, soup: {run: soup}, ties: {run: ties}}
compare: {swap: [math, soup]}
controls: true
"""
COMMANDS = """
import sys
from pipeline.__main__ import main
for words in sys.argv[1:]:
    print("status", main(words.split()), flush=True)
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """Return a copy of this checkout's program."""
    for name in ("src", "conf"):
        shutil.copytree(
            ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path / "copy"


def run(core: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    """Run the commands one after the other in one process of that copy."""
    there: dict[str, Any] = os.environ | {"PYTHONPATH": str(core / "src"), "WANDB_MODE": "disabled"}
    return forked.python("-c", COMMANDS, *commands, env=there, cwd=core.parent)


def test_without_extras_the_papers_tables_are_planned_and_a_table_is_made(
    core: Path, world: Path
) -> None:
    shutil.rmtree(core / "src/pipeline/extras")
    (core.parent / "own.yaml").write_text(TABLE.replace("WORLD", str(world)))
    plans = [
        f"stage=plan table={name} plan.lines=3"
        for name in ("layer_swapping_table6", "unreasonable_table3")
    ]
    done = run(core, *plans, "stage=table table=./own.yaml launcher.workers=1")
    assert done.stdout.count("status 0\n") == 3, done.stdout[-1000:] + done.stderr[-2000:]
    assert done.stdout.count("Next: ") == 2 and done.stdout.count(" lists all") == 2
    cells = (
        (core.parent / done.stdout.splitlines()[-2]).with_name("cells.csv").read_text().splitlines()
    )
    assert len(cells) == 1 + (5 + 3) * 2 and not [line for line in cells if "failed" in line]
