"""slurm/*.sbatch without Slurm.

The commands that they start, and what becomes of their exit status.
"""

import os
import runpy
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.stages import Launcher, TrainStage
from pipeline.launch.slurm import script_of

FOLDER = Path(__file__).parents[2] / "slurm"
FILES = sorted(path.name for path in FOLDER.glob("*.sbatch"))
SETUP = "# module load cuda; source .venv/bin/activate"  # where a site's own lines stand
TOOL = """#!/bin/bash
case $(basename $0) in
  srun) shift; exec "$@" ;;
  python)
    shift 2; printf '%s\\n' "$@" > {at}/words
    echo "${{PIPELINE_SIGNALLED:-none}}" > {at}/signalled
    [ $STATUS != no-handler ] || {{ kill -USR1 $PPID; builtin kill -USR1 $$; sleep 5; }}
    [ $STATUS = asked ] || exit $STATUS
    trap 'exit 75' USR1; echo $$ > {at}/pid; while :; do sleep 0.05; done ;;
  scancel) builtin kill -USR1 $(cat {at}/pid); sleep 0.5 ;;
  *) [ "$1" = show ] || {{ echo "$(basename $0) $@" >> {at}/calls; exit 1; }} ;;
esac
"""


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run a file as Slurm does; gives its status and the words of the command that it started."""
    for name in ("srun", "python", "scontrol", "scancel"):
        (tmp_path / name).write_text(TOOL.format(at=tmp_path))
        (tmp_path / name).chmod(0o755)
    given = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "2",
    }

    def start(name: str, *words: str, **more: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            ["bash", str(FOLDER / name), *words], env={**given, **more}, timeout=60
        )
        return done.returncode, (tmp_path / "words").read_text().splitlines()

    return start


def test_the_fsdp_file_composes_to_shards_on_the_gpus_of_the_node(
    started: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    words = ["stage=sft", "expert=math", "model=llama3.1_8b", "sft.micro_batch_size=1"]
    status, composed = started("one_node_fsdp.sbatch", *words, STATUS="0")
    assert status == 0 and composed == [*words, "sft.parallel=fsdp2", "sft.processes=2"]
    config = compose(composed)
    assert isinstance(config, TrainStage) and (config.sft.parallel, config.sft.processes) == (
        "fsdp2",
        2,
    )
    _, composed = started("one_node_fsdp.sbatch", *words, STATUS="0", SLURM_GPUS_ON_NODE="")
    assert (
        composed[-1] == "sft.processes=4"
        and "--gres=gpu:4" in (FOLDER / "one_node_fsdp.sbatch").read_text()
    )


@pytest.mark.parametrize("name", FILES)
def test_75_asks_for_the_job_again_and_nothing_else_does(
    name: str, started: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    assert len(FILES) == 3
    for status, restarts, asked in (
        ("0", "0", False),
        ("1", "0", False),
        ("75", "20", False),
        ("75", "19", True),
    ):
        assert started(name, "stage=sft", STATUS=status, SLURM_RESTART_COUNT=restarts)[0] == int(
            status
        )
        assert (tmp_path / "calls").is_file() == asked
    assert (tmp_path / "calls").read_text() == "scontrol requeue 7\n"


@pytest.mark.parametrize("name", [*FILES, "launcher"])
def test_one_that_ends_at_once_when_asked_is_asked_for_again_too(
    name: str, started: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    """While the trap that passes the signal on still runs, which is slow here.

    Its status is the program's, not 138.
    """
    (tmp_path / "slow").write_text(
        'kill() { builtin kill "$@" || return; [ $1 = -0 ] || sleep 0.5; }\n'
    )
    (tmp_path / "launcher").write_text(script_of(Launcher("slurm", wrap="env"), ["-m", "pipeline"]))
    pid = tmp_path / "pid"

    def ask() -> None:
        while not pid.is_file() or not pid.read_text():
            time.sleep(0.01)
        job = (
            Path(f"/proc/{pid.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[1]
        )
        os.kill(int(job), signal.SIGUSR1)

    asking = threading.Thread(target=ask)
    file = tmp_path / name if name == "launcher" else FOLDER / name
    asking.start()
    status, _ = started(
        str(file), STATUS="asked", BASH_ENV=str(tmp_path / "slow"), SLURM_ARRAY_JOB_ID="7"
    )
    asking.join()
    assert status == 75 and (tmp_path / "calls").read_text().startswith("scontrol requeue 7")


def test_the_files_are_those_of_the_template() -> None:
    """The one that the launcher's scripts have, too: python scripts/make_sbatch.py writes them."""
    script = runpy.run_path(str(FOLDER.parent / "scripts/make_sbatch.py"))
    assert script["files"]() == {name: (FOLDER / name).read_text() for name in FILES}


@pytest.mark.parametrize("name", [*FILES, "launcher"])
@pytest.mark.parametrize("when", ["while a line of setup runs", "before the program has a handler"])
def test_usr1_at_any_time_requeues_the_job(
    name: str, when: str, started: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    """In the first case the program learns of it, which counts the attempt."""
    early = when.startswith("while")
    line = "kill -USR1 $$" if early else ":"
    text = script_of(Launcher("slurm", wrap="env", setup=[line]), ["-m", "pipeline"])
    if name != "launcher":
        text = (FOLDER / name).read_text().replace(SETUP, line)
    (tmp_path / "job").write_text(text.replace("scancel --signal=USR1", "true"))
    status, _ = started(
        str(tmp_path / "job"), STATUS="75" if early else "no-handler", SLURM_ARRAY_JOB_ID="7"
    )
    assert (tmp_path / "signalled").read_text() == ("SIGUSR1\n" if early else "none\n")
    assert status == 75 and (tmp_path / "calls").read_text().startswith("scontrol requeue 7")
