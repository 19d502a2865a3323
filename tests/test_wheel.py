"""The wheel holds all that the program reads: conf/, the page, the tasks."""

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
BUILDERS = find_spec("build") is not None and find_spec("hatchling") is not None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-isolation"] if BUILDERS else []
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        *isolation,
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_what_the_checkout_holds(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"pipeline/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    package = ROOT / "src/pipeline"
    files = (
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    wanted |= {f"pipeline/{path.relative_to(package)}" for path in files}
    assert wanted <= held, sorted(wanted - held)
    assert "pipeline/conf/__init__.py" not in held


def test_the_distribution_has_a_name_of_its_own(wheel: Path) -> None:
    """`pipeline` is another project's on PyPI.

    The command and the package that is imported are called so.
    """
    assert wheel.name.startswith("cross_lingual_merging-")
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.partition("/")[0] for name in archive.namelist()} - {"pipeline"}
    told = archive.read(f"{info}/METADATA").decode()
    assert (
        "\nName: cross-lingual-merging\n" in told and "torchao>=0.18; extra == 'dev'" in told
    )  # by dev's [ja,memory]
    assert "pipeline = pipeline.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()


MINE = """
name: mine
every: {model: sandbox, data_root: world, threads: 1}
runs:
  world: {stage: data, expert: sandbox, expert.world.items: 2}
  base: {}
score: {eval: mgsm_0shot, eval.max_gen_toks: 40, in: en}
columns: {math: {}}
rows: {base: {run: base}}
"""


def test_it_makes_a_table_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """With the base, the tasks and the page that it holds."""
    installed, here = tmp_path / "installed", tmp_path / "here"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(installed),
    ]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here.mkdir()
    (here / "mine.yaml").write_text(MINE)
    there = os.environ | {"PYTHONPATH": str(installed), "WANDB_MODE": "disabled"}
    words = ["stage=table", "table=./mine.yaml", "launcher.workers=1"]
    done = forked.python("-m", "pipeline", *words, cwd=here, env=there)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == "runs/reports/mine/index.html\n" and (here / done.stdout.strip()).is_file()
    )
    assert done.stderr.count("] done in ") == 2, done.stderr
    (scores,) = here.glob("runs/eval-*/scores.json")
    assert '"n": 2' in scores.read_text()
    assert not {path.name for path in here.iterdir()} - {"mine.yaml", "runs"}
