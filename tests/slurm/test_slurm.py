"""A table as arrays of a real Slurm gives the bits of the local run, whatever happens to its jobs.

Left out where Slurm is not installed or this is not root: `make test-slurm` installs it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from limits import command_of
from tiny_words import last_of

from pipeline.files import sha256
from pipeline.runs.manifest import read_manifest

pytestmark = pytest.mark.slurm
SLURM_FOLDER = Path(__file__).parents[2] / "slurm"


@pytest.fixture(scope="module")
def table(base: Path, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings of a few seconds, merges, a choice among them."""
    file = tmp_path_factory.mktemp("table") / "mine.yaml"
    file.write_text(
        f"name: mine\naxes: {{density: [0.2, 0.8]}}\nevery: {{model: trained, model.path: {base},"
        f" data_root: {world}, threads: 1, sft.epochs: 90, sft.steps: 100, sft.batch_size: 4,"
        " sft.micro_batch_size: null, sft.seq_length: 96, sft.precision: fp32, eval.limit: 2,"
        " eval.max_gen_toks: 4}\nruns:\n  math: {stage: sft, expert: math, recipe:"
        " sandbox_math}\n  language: {stage: sft, expert: qac, recipe: sandbox_language}\n "
        " TIES: {merge: ties, merge.experts: [math, language], merge.density:"
        " '{density}'}\nscore: {eval: mgsm_0shot}\ncolumns: {en: {in: en}, qac: {in:"
        " qac}}\nrows:\n  math: {run: math}\n  language: {run: language}\n  TIES: {run:"
        " TIES, best: [density], by: {eval: mgsm_0shot, eval.split: dev, in: qac}}\n"
    )
    return file


def words(table: Path, runs_dir: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pipeline",
        "stage=table",
        f"table={table}",
        f"runs_dir={runs_dir}",
        "tracking.mode=disabled",
        *more,
    ]


SLURM = ["launcher=slurm", "launcher.gpus=0", "launcher.memory=900M"]


def results(runs_dir: Path) -> dict[str, str]:
    """sha256 of the weights of all runs, of the table and its choices."""
    files = [*runs_dir.glob("*/model.safetensors"), runs_dir / "reports/mine/cells.csv"]
    files.append(runs_dir / "reports/mine/choices.json")
    return {path.relative_to(runs_dir).as_posix(): sha256(path) for path in files}


@contextmanager
def on_this_machine(table: Path, runs_dir: Path) -> Iterator[Callable[[], dict[str, str]]]:
    """Beside the jobs, while they wait: gives a function that waits for its results."""
    runs_dir.mkdir()
    with open(runs_dir / "log", "w") as log:
        process = subprocess.Popen(
            words(table, runs_dir, "launcher.workers=1"), stderr=log, stdout=log
        )

    def wait() -> dict[str, str]:
        assert process.wait(300) == 0, (runs_dir / "log").read_text()[-2000:]
        return results(runs_dir)

    try:
        yield wait
    finally:
        process.terminate()


def in_work(runs_dir: Path, label: str, step: int = 1) -> dict[str, Any] | None:
    """Return the state of a training that has begun."""
    for path in runs_dir.glob(".work/*/state.json"):
        told = json.loads(path.read_text())
        if (
            told.get("name", "").startswith(label)
            and told["state"] == "running"
            and (told.get("step") or 0) >= step
        ):
            return told
    return None


def halted(
    cluster: Cluster, runs_dir: Path, *labels: str, after: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Yield the states of trainings that have begun, each halted when it is seen.

    So no training ends before the test acts on it, however fast this machine is. Slurm continues
    what it is asked to end.
    """
    found: dict[str, dict[str, Any]] = {}

    def all_seen() -> bool:
        for label in labels:
            one = in_work(runs_dir, label)
            if label not in found and one and (after is None or one["pid"] != after["pid"]):
                os.kill(one["pid"], signal.SIGSTOP)
                found[label] = one
        return len(found) == len(labels)

    cluster.until(all_seen, logs=runs_dir / ".logs")
    return [found[label] for label in labels]


def test_a_table_as_arrays_while_jobs_are_killed_requeued_preempted_and_cancelled(
    cluster: Cluster, table: Path, tmp_path: Path
) -> None:
    runs_dir = tmp_path / "runs"
    command = words(table, runs_dir, *SLURM, "launcher.workers=8")

    # twice at once: one submits, the other finds the jobs in the queue
    both = [
        subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [75, 75], told
    assert sorted(text.count("job ") > 2 for text in told) == [False, True], told
    jobs = cluster.jobs()
    assert (
        len(jobs) == len(set(jobs))
        and len((runs_dir / ".plans/mine.jsonl").read_text().splitlines()) == 10
    )

    # a step dies by kill -9: its run is free, and another worker or the last job makes it
    math, language = halted(cluster, runs_dir, "math-", "qac-")
    os.kill(math["pid"], signal.SIGKILL)
    # another is put back into the queue by hand, with a resume point
    assert cluster.run("squeue", "-h", "-j", language["job"], "-o", "%j") == "qac-full-s0\n"
    cluster.run("scontrol", "requeue", language["job"])
    (again,) = halted(cluster, runs_dir, "qac-", after=language)
    assert again["step"] >= language["step"]
    # and then preempted without a time to say farewell
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 3\n")
    cluster.run("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", str(urgent))
    (last,) = halted(cluster, runs_dir, "qac-", after=again)
    # then its node is lost, and comes back
    lose_a_node(cluster, last["pid"])
    (last,) = halted(cluster, runs_dir, "qac-", after=last)
    # and cancelled: the last job submits again what was lost; nobody has typed a second command
    # when all is done
    cluster.run("scancel", last["job"].partition("_")[0])
    with on_this_machine(table, tmp_path / "local") as expected:
        cluster.idle(300)
        assert (
            list(runs_dir.glob("math-full*")) and (runs_dir / "reports/mine/choices.json").is_file()
        )
        done = cluster.call(command)
        assert done.returncode == 0 and "submitted" not in done.stderr, done.stderr[-3000:]
        assert results(runs_dir) == expected()
    resumed = [read_manifest(path).facts.get("resumed") for path in runs_dir.glob("qac-full*")]  # type: ignore[union-attr]
    assert resumed[0], "the requeued training went on from its resume point"
    assert list((runs_dir / ".logs").glob("qac-full-s0-*.log"))


def lose_a_node(cluster: Cluster, pid: int) -> None:
    """Kill a node's daemon and its step with kill -9, as a power cut does, and restart the node.

    The administrator says that it is down. Slurm would find out after half a minute, and requeue
    its jobs as well.
    """
    node = variable(pid, "SLURMD_NODENAME")
    tree = [pid]
    while (parent := parent_of(tree[-1])) > 1 and "slurmctld" not in command_of(parent):
        tree.append(parent)
    daemon = int((cluster.at / f"run/slurmd.{node}.pid").read_text())
    for one in [daemon, *reversed(tree)]:
        os.kill(one, signal.SIGKILL)
    cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    cluster.until(
        lambda: "down" in cluster.run("sinfo", "-h", "-n", node, "-p", "debug", "-o", "%T"), 90
    )
    cluster.node_up(node)


def variable(pid: int, name: str) -> str:
    """Of the environment of a process."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(one.partition("=")[2] for one in environment if one.startswith(f"{name}="))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- the files ---


FOUR = ["sft.processes=4", "sft.batch_size=8"]


@dataclass(frozen=True)
class Job:
    """One of slurm/*.sbatch, submitted."""

    id: str
    runs_dir: Path

    def log(self) -> str:
        return (self.runs_dir.parent / f"{self.id}.log").read_text()[-2000:]


@pytest.fixture(scope="module")
def training(base: Path, world: Path) -> list[str]:
    start = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        "threads=1",
    ]
    start += [
        "sft.seq_length=96",
        "sft.batch_size=4",
        "sft.micro_batch_size=null",
        "sft.precision=fp32",
    ]
    return [*start, "sft.warmup_steps=0", "sft.epochs=9000", "tracking.mode=disabled"]


@pytest.fixture(scope="module")
def jobs(
    cluster: Cluster, training: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Job]:
    """Submit jobs of one_gpu.sbatch and several_nodes.sbatch.

    One runs out of time, one is wrong, one will be killed, and one runs to its end.
    """
    folder = tmp_path_factory.mktemp("files")
    one = ["--mem=500M", "--cpus-per-task=1", "--gres=gpu:1"]
    several = ["--mem=1400M", "--nodes=2", "--cpus-per-task=1", "--ntasks-per-node=1"]
    asked = {
        "long": (
            "one_gpu",
            [*one, "--time=10", "--signal=B:USR1@480"],
            ["sft.steps=30000"],
        ),  # after two minutes
        "bad": ("one_gpu", one, ["sft.steps=300", "sft.learning_rate=no"]),
        "dies": (
            "several_nodes",
            [*several, "--gres=gpu:1"],
            ["sft.steps=30000", "sft.processes=2"],
        ),
        "srun": ("several_nodes", [*several, "--gres=gpu:2"], ["sft.steps=3", *FOUR]),
    }
    found = {}
    for name, (file, options, more) in asked.items():
        runs_dir = folder / name / "runs"
        runs_dir.mkdir(parents=True)
        command = ["sbatch", "--parsable", f"--output={runs_dir.parent}/%j.log", *options]
        job = cluster.run(
            *command,
            str(SLURM_FOLDER / f"{file}.sbatch"),
            *last_of([*training, *more]),
            f"runs_dir={runs_dir}",
        )
        found[name] = Job(job.strip(), runs_dir)
    return found


@pytest.fixture(scope="module")
def begun(cluster: Cluster, jobs: dict[str, Job]) -> int:
    """Return the process of the long job, halted past its first step, so that cores are free."""
    pid = int(cluster.until(lambda: in_work(jobs["long"].runs_dir, "math-", step=2))["pid"])
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_follower_of_srun_that_dies_ends_all_within_a_minute(
    cluster: Cluster, jobs: dict[str, Job], begun: int
) -> None:
    leader = cluster.until(lambda: in_work(jobs["dies"].runs_dir, "math-"))["pid"]
    os.kill(task_of(jobs["dies"].id, rank=1), signal.SIGKILL)
    # Slurm says that a job has ended while it still takes the last processes away
    cluster.until(
        lambda: cluster.ended(jobs["dies"].id) and not os.path.isdir(f"/proc/{leader}"), seconds=60
    )
    assert cluster.ended(jobs["dies"].id) == ["FAILED"]
    assert not list(jobs["dies"].runs_dir.glob("math-full*"))


def task_of(job: str, rank: int) -> int:
    """Return the process id of a rank that torchrun started under srun."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"RANK={rank}".encode(), b"SLURM_STEP_ID=0"}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            words = command_of(int(path.parent.name)).split("\0")
            if wanted <= set(path.read_bytes().split(b"\0")) and {"-m", "pipeline"} <= set(
                words[1:4]
            ):
                return int(path.parent.name)
    raise AssertionError(f"job {job} has no task {rank}")


def test_srun_on_two_nodes_trains_as_torchrun_does(
    cluster: Cluster, jobs: dict[str, Job], training: list[str], tmp_path: Path
) -> None:
    """Two of its processes on each node."""
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc_per_node=4",
        "-m",
        "pipeline",
    ]
    asked = ["sft.steps=3", *FOUR, f"runs_dir={tmp_path}"]
    subprocess.run([*torchrun, *last_of([*training, *asked])], check=True)
    cluster.until(lambda: cluster.ended(jobs["srun"].id), seconds=180)
    assert cluster.ended(jobs["srun"].id) == ["COMPLETED"], jobs["srun"].log()
    folders = [*tmp_path.glob("math-full*"), *jobs["srun"].runs_dir.glob("math-full*")]
    roots = {read_manifest(folder).weights_root for folder in folders}  # type: ignore[union-attr]
    assert len(folders) == 2 and len(roots) == 1


def test_a_wrong_number_of_tasks_is_one_sentence(
    cluster: Cluster, base: Path, world: Path, tmp_path: Path
) -> None:
    refusal = (
        "srun started 2 tasks. Start one torchrun on each node, as slurm/several_nodes.sbatch does"
    )
    for asked in (["stage=plan"], ["stage=sft", "expert=math"]):
        words = [sys.executable, "-m", "pipeline", *asked, f"runs_dir={tmp_path}/runs"]
        done = cluster.call(["srun", "-N2", "-n2", "--mem=500M", *words])
        assert done.returncode == 1 and refusal in done.stderr, done.stderr
        assert not (tmp_path / "runs").exists()


# --- refusals ---


def test_refusals_are_one_sentence_with_slurms_words(
    cluster: Cluster, training: list[str], tmp_path: Path
) -> None:
    def asked(*more: str, **environment: str) -> tuple[int, str]:
        given = last_of([*training, "sft.steps=2", f"runs_dir={tmp_path}/runs", *SLURM, *more])
        done = cluster.call([sys.executable, "-m", "pipeline", *given], **environment)
        assert done.stdout == ""
        return done.returncode, done.stderr.strip().splitlines()[-1]

    before = cluster.jobs().keys()
    status, line = asked("launcher.partition=nowhere")
    assert status == 1 and "sbatch refused: invalid partition specified: nowhere; " in line
    assert "--partition=nowhere" in line
    status, line = asked(PATH="/nonexistent")
    told = (
        "launcher=slurm needs squeue, which is not installed here. Use launcher=local or"
        " launcher.dry_run=true."
    )
    assert status == 1 and line == f"error: {told}"
    status, line = asked("launcher.time=0:30")
    assert status == 1 and "launcher.time=0:30 is 30 s, but a job of " in line
    assert "write one resume point. Set a longer launcher.time" in line
    assert cluster.jobs().keys() <= before


def test_out_of_time_it_goes_on_where_it_was(
    cluster: Cluster, jobs: dict[str, Job], begun: int
) -> None:
    """Eight minutes before its limit the job is asked to stop, and is requeued.

    The tests before may take long on a busy machine. A failed job is not requeued.
    """
    os.kill(begun, signal.SIGCONT)
    (workplace,) = (jobs["long"].runs_dir / ".work").glob("*")
    again = cluster.until(
        lambda: (one := in_work(jobs["long"].runs_dir, "math-")) and one["pid"] != begun and one,
        240,
    )
    (point,) = workplace.glob("*/resume.json")
    stopped_at = json.loads(point.read_text())["step"]
    assert (
        again["step"] >= stopped_at > 1 and int(variable(again["pid"], "SLURM_RESTART_COUNT")) >= 1
    )
    assert "TIMEOUT" not in cluster.ended(jobs["long"].id)
    cluster.run("scancel", jobs["long"].id)
    assert cluster.ended(jobs["bad"].id) == ["FAILED"]


def test_a_long_plan_has_as_many_workers_as_the_largest_array(
    cluster: Cluster, training: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pipeline", "-m", *training, "sft.steps=2", "seed=1,2,3,4,5,6"]
    command += [
        f"runs_dir={tmp_path}/runs",
        *SLURM,
        "launcher.options=[--hold]",
        "launcher.workers=6",
    ]
    try:
        done = cluster.call(command)
        assert done.returncode == 75 and done.stdout == "", done.stderr
        arrays = [line for line in done.stderr.splitlines() if line.startswith("job ")]
        (trainings,) = [line for line in arrays if "level 1" in line]
        assert trainings.split(", ")[1] == "3 tasks for 6 runs" and len(cluster.jobs()) >= 4
        first, second = (line.split()[1].rstrip(":") for line in arrays)
        awaited = cluster.run("squeue", "-h", "-j", second, "-o", "%E").split()
        assert awaited and all(f"afterany:{first}" in one for one in awaited), awaited
    finally:
        cluster.run("scancel", "--me", status=None)


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Callable[[str, str], Path]:
    """Put a site's command before Slurm's own, $REAL, for processes with its folder in PATH."""

    def wrap(name: str, lines: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(f"#!/bin/bash\nREAL={shutil.which(name)}\n{lines}\n")
        (folder / name).chmod(0o755)
        return folder

    return wrap


BANNER = """echo "*** Welcome. 4 nodes, job 12 of the day ***"; echo 2026; exec $REAL "$@"
"""
LIMIT = """[[ "$*" =~ --array\\ 0-([0-9]+) ]] && [ $(($($SQUEUE -h --array | wc -l) + BASH_REMATCH[1])) -ge 3 ] && {
  echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
"""
QUICK = """
import sys
from pipeline.__main__ import main
from pipeline.launch import slurm_commands
slurm_commands.SECONDS = 1
sys.exit(main())
"""


def test_a_banner_a_submission_limit_and_a_squeue_that_hangs(
    cluster: Cluster, site: Callable[[str, str], Path], world: Path, tmp_path: Path
) -> None:
    """Workers are submitted once, whatever the site's commands print, refuse or hold up."""
    words = [
        "-m",
        "stage=data",
        "expert=math",
        f"data_root={world}",
        "seed=1,2,3,4,5,6",
        "tracking.mode=disabled",
    ]
    words += [
        f"runs_dir={tmp_path}/100% of %j/runs",
        *SLURM,
        "launcher.options=[--hold]",
        "launcher.workers=6",
    ]

    def asked(before: Path | None = None) -> tuple[int, list[str]]:
        path = f"{before}:{os.environ['PATH']}" if before else os.environ["PATH"]
        done = cluster.call(
            [sys.executable, "-c", QUICK, *words], PATH=path, SQUEUE=str(shutil.which("squeue"))
        )
        return done.returncode, done.stderr.strip().splitlines()

    status, (line,) = asked(site("squeue", "sleep 60 & sleep 60"))
    assert status == 75 and line.startswith(
        "squeue did not respond within 1 s, 3 times. Rerun the same command"
    )
    try:
        cluster.run("scancel", "--me")
        cluster.idle(60)
        status, lines = asked(site("sbatch", LIMIT + BANNER))
        assert status == 75 and lines[-1].startswith("6 runs submitted as 1 array. "), lines
        assert sorted(cluster.jobs()) == [
            f"{lines[0].split()[1].rstrip(':')}_{index}" for index in (0, 1, 2)
        ]
        status, (line,) = asked()
        assert (
            status == 75 and line.startswith("3 jobs of runs-") and "as submitted earlier" in line
        )
        assert len(cluster.jobs()) == 3
        job = next(iter(cluster.jobs()))
        cluster.run("scontrol", "release", job)
        cluster.until((tmp_path / f"100% of %j/runs/.logs/slurm-{job}.log").is_file, 60)
    finally:
        cluster.run("scancel", "--me", status=None)


def test_a_node_without_the_package_is_named_by_status(
    cluster: Cluster, world: Path, tmp_path: Path
) -> None:
    """A real Python that does not have it; the same command where it is there goes on."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True
    )
    command = [sys.executable, "-m", "pipeline", "stage=data", "expert=math", f"data_root={world}"]
    command += [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled", *SLURM]
    bare = f"launcher.wrap='env -u PYTHONPATH PATH={tmp_path}/bare/bin:/usr/bin:/bin'"

    assert cluster.call([*command, bare]).returncode == 75
    cluster.idle(60)
    shown = cluster.call([*command[:3], "stage=status", f"runs_dir={tmp_path}/runs"]).stdout
    assert (
        "failed: job " in shown
        and "No module named 'pipeline'" in shown
        and ".logs/slurm-" in shown
    )
    assert cluster.call(command).returncode == 75
    cluster.idle(60)
    done = cluster.call(command)
    assert done.returncode == 0 and Path(done.stdout.strip()).is_dir()
