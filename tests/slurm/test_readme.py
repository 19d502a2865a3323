"""slurm/README.md.

Every command, in a block or in a sentence, is composed or run, those of Slurm where it is here. And
slurm/Dockerfile and slurm/apptainer.def: of the same base with the same packages, and extras that
exist.
"""

import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from reader import ROOT, blocks, commands, planned
from small_runs import a_run, writes

from pipeline.config.compose import compose
from pipeline.config.stages import Tracking
from pipeline.runs.make import make_once

PAGE = ROOT / "slurm/README.md"
PRINTED = re.compile(r"job \d+: ")  # what the launcher prints


def all_commands() -> list[str]:
    """Those of blocks, and spans of code in the text that have several words."""
    found = [
        command for block in blocks(PAGE) if block.language == "bash" for command in commands(block)
    ]
    text = re.sub(r"```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    found += [span for span in spans if re.match(r"[a-z]+ ", span) and not PRINTED.match(span)]
    return list(dict.fromkeys(found))


def by_bash(command: str, folder: Path) -> str:
    """Run a command that must succeed with the programs of this environment; return its output."""
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def composes(command: str, folder: Path) -> None:
    """tests/stranger/test_documents.py prints the plans, too."""
    for words in planned(command):
        compose(words)


def parses(command: str, folder: Path) -> None:
    """By pip's own parser, which does not come to installing."""
    assert "Usage:" in by_bash(f"python -m {command} --help", ROOT)
    assert (ROOT / "constraints.txt").is_file() and (ROOT / "pyproject.toml").is_file()


def shares(command: str, folder: Path) -> None:
    """Give existing files to the group, and make new files in its folders group-owned."""
    (folder / "runs/a").mkdir(parents=True, mode=0o700)
    (folder / "runs/a/old").touch(mode=0o600)
    by_bash(command.replace("GROUP", "$(id -g)"), folder)
    assert (folder / "runs/a/old").stat().st_mode & 0o777 == 0o660
    assert (folder / "runs/a").stat().st_mode & (
        stat.S_ISGID | stat.S_IRWXG
    ) == stat.S_ISGID | stat.S_IRWXG


def lets_the_group_write(command: str, folder: Path) -> None:
    by_bash(f"{command}; touch new", folder)
    assert (folder / "new").stat().st_mode & 0o777 == 0o664


def finds_offline_runs(command: str, folder: Path) -> None:
    run = a_run(folder / "runs")
    run.config.tracking = Tracking(mode="offline")
    make_once(run, writes())
    told = by_bash(command.replace("sync", "sync --dry-run"), folder)
    assert f"Would sync 1 run(s):\nwandb:   runs/{run.name}/wandb/offline-run-" in told, told


def on_a_cluster(command: str, folder: Path) -> None:
    """test_scontrol_knows_the_commands_of_the_page runs it, and fails for one more."""


def unnamed(*_: object) -> None:
    raise AssertionError("a command of slurm/README.md that no rule covers")


RULES: dict[str, Callable[[str, Path], None]] = {
    "python": composes,
    "HF_HUB_OFFLINE=1": composes,
    "sbatch": composes,
    "pip": parses,
    "chgrp": shares,
    "umask": lets_the_group_write,
    "wandb": finds_offline_runs,
    "scontrol": on_a_cluster,
}


@pytest.mark.parametrize("command", all_commands())
def test_a_command_of_the_page(command: str, tmp_path: Path) -> None:
    RULES.get(command.split()[0], unnamed)(command, tmp_path)


def of_slurm(program: str) -> list[str]:
    found = [command for command in all_commands() if command.startswith(f"{program} ")]
    assert found, f"slurm/README.md has no {program}"
    return found


@pytest.mark.slurm
@pytest.mark.parametrize("command", of_slurm("sbatch"))
def test_sbatch_accepts_the_files_and_options_of_the_page(command: str, cluster: Cluster) -> None:
    """What is requested is cut to what this cluster has."""
    words = shlex.split(command)
    (script,) = (index for index, word in enumerate(words) if word.endswith(".sbatch"))
    less = ["--nodes=1", "--ntasks-per-node=1", "--gres=none", "--cpus-per-task=1", "--mem=100M"]
    words[script] = str(ROOT / words[script])
    cluster.run(*words[:script], "--test-only", *less, *words[script:])


@pytest.mark.slurm
def test_scontrol_knows_the_commands_of_the_page(cluster: Cluster, tmp_path: Path) -> None:
    requeue, show = sorted(of_slurm("scontrol"))
    assert "ClusterName" in cluster.run("bash", "-c", show)
    job = cluster.run(
        "sbatch", "--parsable", "--output=/dev/null", "--mem=100M", "--wrap=sleep 60"
    ).strip()
    try:
        cluster.until(lambda: cluster.jobs().get(job) == "RUNNING", 30)
        cluster.run(*requeue.split(), job)
        assert cluster.jobs()[job] != "RUNNING"
    finally:
        cluster.run("scancel", job)
    cluster.idle(30)


FILES = {name: (ROOT / "slurm" / name).read_text() for name in ("Dockerfile", "apptainer.def")}


@pytest.mark.parametrize("name", FILES)
def test_each_is_short_and_copies_files_that_are_there(name: str) -> None:
    text = FILES[name]
    assert len(text.splitlines()) <= 30
    copied = re.findall(r"^(?:COPY +|    )([\w. /]+?) (?:/opt/pipeline/)?\S+$", text, re.M)
    files = [file for line in copied if "apt-get" not in line for file in line.split()]
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "conf", "src"} <= set(
        files
    )
    assert all((ROOT / file).exists() for file in files if file in ("conf", "src") or "." in file)


def test_both_install_the_same() -> None:
    docker, apptainer = FILES.values()
    installed = (r"no-install-recommends ([\w+ -]+)", r"constraint constraints.txt '\.\[(.+)\]'")
    for pattern in (r"nvidia/cuda:\S+", *installed):
        (one,), (other,) = (re.findall(pattern, text) for text in (docker, apptainer))
        assert one.strip() == other.strip()
    (extras,) = re.findall(r"'\.\[(.+)\]'", docker)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
