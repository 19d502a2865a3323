"""The core does not need extras/: without that folder the papers' tables are planned and a table is made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest

from pipeline.config import conf

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
PLAN = """
import sys
from pipeline.__main__ import main
for table in ("layer_swapping_table6", "unreasonable_table3"):
    assert main(["stage=plan", f"table={table}", "plan.lines=3"]) == 0, table
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A copy of this checkout's program."""
    for name in ("src", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def run(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    there: dict[str, Any] = os.environ | {"PYTHONPATH": str(core / "src"), "WANDB_MODE": "disabled"}
    return forked.python(*words, env=there, cwd=core.parent)


def test_without_extras_the_papers_tables_are_planned(core: Path) -> None:
    shutil.rmtree(core / "src/pipeline/extras")
    done = run(core, "-c", PLAN)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert done.stdout.count("Next: ") == 2 and done.stdout.count(" lists all") == 2


def test_without_extras_a_table_is_made(core: Path, world: Path) -> None:
    shutil.rmtree(core / "src/pipeline/extras")
    (core.parent / "own.yaml").write_text(TABLE.replace("WORLD", str(world)))
    done = run(core, "-m", "pipeline", "stage=table", "table=./own.yaml", "launcher.workers=1")
    assert done.returncode == 0, done.stderr[-2000:]
    cells = (core.parent / done.stdout.strip()).with_name("cells.csv").read_text().splitlines()
    assert len(cells) == 1 + (5 + 3) * 2 and not [line for line in cells if "failed" in line]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("mergekit", "stage=merge merge=mergekit merge.file=x.yaml"),
        ("compare", "stage=compare results=[a,b]"),
        ("search", "stage=search merge=soup eval=mgsm_0shot"),
    ],
)
def test_a_missing_extra_is_named(core: Path, file: str, words: str) -> None:
    (core / f"src/pipeline/extras/{file}.py").unlink()
    done = run(core, "-m", "pipeline", *words.split())
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: {file} is in ") and f"extras/{file}.py, which is not there" in done.stderr


def test_extras_are_options_like_those_of_other_packages() -> None:
    assert {"compare", "search"} <= set(conf.options("stage")) and "mergekit" in conf.options("merge")
