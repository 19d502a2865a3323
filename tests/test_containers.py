"""slurm/Dockerfile and slurm/apptainer.def: of the same base with the same packages, and extras that exist."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {name: (ROOT / "slurm" / name).read_text() for name in ("Dockerfile", "apptainer.def")}


@pytest.mark.parametrize("name", FILES)
def test_each_is_short_and_copies_files_that_are_there(name: str) -> None:
    text = FILES[name]
    assert len(text.splitlines()) <= 30
    copied = re.findall(r"^(?:COPY +|    )([\w. /]+?) (?:/opt/pipeline/)?\S+$", text, re.M)
    files = [file for line in copied if "apt-get" not in line for file in line.split()]
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "conf", "src"} <= set(files)
    assert all((ROOT / file).exists() for file in files if file in ("conf", "src") or "." in file)


def test_both_install_the_same() -> None:
    docker, apptainer = FILES.values()
    installed = (r"no-install-recommends ([\w+ -]+)", r"constraint constraints.txt '\.\[(.+)\]'")
    for pattern in (r"nvidia/cuda:\S+", *installed):
        (one,), (other,) = (re.findall(pattern, text) for text in (docker, apptainer))
        assert one.strip() == other.strip()
    (extras,) = re.findall(r"'\.\[(.+)\]'", docker)
    assert set(extras.split(",")) <= set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
