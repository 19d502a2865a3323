"""launcher=slurm without Slurm.

What is submitted and in which order, and what a refusal half-way leaves.
"""

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_types import Call
from small_runs import a_run, writes

from pipeline.config.compose import compose
from pipeline.config.stages import Launcher
from pipeline.errors import Held, PipelineError
from pipeline.launch import attempts, in_process, resources, slurm, slurm_commands, worker
from pipeline.launch.in_process import error_sentence
from pipeline.launch.local import execute_here
from pipeline.launch.plan_file import Task, plan_name, read_plan, write_plan
from pipeline.launch.resources import Resources, resources_of
from pipeline.launch.work import Session
from pipeline.runs import state
from pipeline.runs.graph import order_runs
from pipeline.runs.make import make_once
from pipeline.runs.run import Run
from pipeline.runs.stop import handle_signals
from pipeline.stages.rows import build

TOOL = """#!/bin/bash
echo "$(basename $0) $@" >> {at}/calls
case $(basename $0) in
  squeue) cat {at}/banner 2>/dev/null; sed 's/^/pipeline:/' {at}/queue 2>/dev/null || true ;;
  scancel) ;;
  sbatch) N=$(cat {at}/count 2>/dev/null || echo 0)
    TASKS=$(sed -n 's/.*--array 0-\\([0-9]*\\) .*/\\1/p' <<< "$*")
    MOST=$(cat {at}/most 2>/dev/null || echo 99)
    if [ "$N" -ge "$MOST" ] || [ "${{TASKS:-0}}" -ge "$(cat {at}/tasks 2>/dev/null || echo 99)" ]; then
      echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi
    echo $((N + 1)) > {at}/count; cat {at}/banner 2>/dev/null; echo $((N + 1)) ;;
esac
"""


LAUNCHER = Launcher(name="slurm")
AGAIN = ["stage=table", "table=x"]


class Site:
    """squeue, scontrol, sbatch and scancel that write down what they are asked, and a runs_dir."""

    def __init__(self, folder: Path) -> None:
        self.tools, self.runs = folder / "tools", folder / "runs"
        self.tools.mkdir()
        for name in ("squeue", "scontrol", "sbatch", "scancel"):
            self.tool(name, TOOL.format(at=self.tools))

    def tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def calls(self, name: str = "sbatch") -> list[list[str]]:
        """Return the words of each call of a tool so far."""
        log = self.tools / "calls"
        lines = log.read_text().splitlines() if log.is_file() else []
        return [line.split()[1:] for line in lines if line.startswith(f"{name} ")]

    def plan(self) -> list[Run]:
        """Six data runs, and a run of the first two."""
        parents = [a_run(self.runs, seed=seed) for seed in range(6)]
        child = a_run(self.runs, {"data": parents[0], "data_root": parents[1]}, label="child")
        return [child, *parents[2:]]

    def submit(
        self,
        targets: list[Run],
        told: str | None = None,
        again: list[str] | None = None,
        launcher: Launcher = LAUNCHER,
    ) -> Held:
        """Submit what is not finished; the error, which says how much that is."""
        with pytest.raises(Held, match=told) as held:
            slurm.execute(launcher, again, targets)
        return held.value

    def folder(self, targets: list[Run]) -> Path:
        """Return the folder of a submission."""
        return self.runs / ".slurm" / plan_name(targets)

    def in_queue(self, folder: Path, *jobs: str, script: str = "0-0gpu.sh") -> None:
        (self.tools / "queue").write_text(
            "".join(f"{job}|{folder.resolve()}/{script}\n" for job in jobs)
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path)
    monkeypatch.setenv("PATH", f"{found.tools}:{os.environ['PATH']}")
    monkeypatch.setattr(resources, "WORKERS", 3)
    return found


def option(call: list[str], name: str) -> str:
    return call[call.index(name) + 1]


def test_each_level_and_kind_is_an_array_of_workers_that_waits_for_those_before(site: Site) -> None:
    targets = site.plan()
    launcher = Launcher(name="slurm", partition="gpu", memory="4G", options=["--constraint=a100"])
    told = r"^7 runs submitted as 2 arrays\. stage=status shows the runs\. Rerun the same comm"
    site.submit(targets, told, launcher=launcher)
    first, second = site.calls()  # three tasks an array at most
    assert [option(one, "--array") for one in (first, second)] == ["0-2", "0-0"]
    assert "--dependency" not in first and option(second, "--dependency") == "afterany:1"
    assert {
        "--partition=gpu",
        "--mem=4G",
        "--constraint=a100",
        "--signal=B:USR1@60",
        "--requeue",
    } <= set(first)
    assert not any(word.startswith(("--gres", "--time", "--cpus")) for word in first)
    folder = site.folder(targets)
    tasks = read_plan(folder / "plan.jsonl")
    published = read_plan(site.runs / f".plans/{folder.name}.jsonl")
    assert [task.name for task in published] == [task.name for task in tasks] and len(tasks) == 7
    assert (tasks[-1].name, tasks[-1].level, tasks[-1].kind) == (targets[0].name, 1, "0gpu")
    command = f"-m pipeline.launch.worker task {folder.resolve()} 1 0gpu"
    assert (
        command in (folder / "1-0gpu.sh").read_text() and (folder / "1-0gpu.job").read_text() == "2"
    )


def test_a_dry_run_writes_the_jobs_that_would_be_submitted(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a Slurm.

    Run by bash, submit.sh submits the same arrays with the same options and dependencies.
    """
    targets, launcher, path = (
        site.plan(),
        replace(LAUNCHER, memory="4G", options=["--comment=a b"]),
        os.environ["PATH"],
    )
    monkeypatch.setenv("PATH", path.removeprefix(f"{site.tools}:"))
    with pytest.raises(SystemExit) as ended:
        slurm.execute(replace(launcher, dry_run=True), AGAIN, targets)
    folder = site.runs / ".slurm-dry-run"
    told = capfd.readouterr().err
    assert (
        ended.value.code == 0
        and f"Nothing was submitted (launcher.dry_run=true). These lines are in {folder}" in told
    )
    assert (folder / "submit.sh").read_text() in told and not site.calls()
    assert "# job $JOB1: level 0, " in told and "# job $JOB2: level 1, " in told
    assert not list(site.runs.glob(".plans/*")) and not list(site.runs.glob(".work/*"))

    monkeypatch.setenv("PATH", path)
    subprocess.run(["bash", "-e", folder / "submit.sh"], check=True)
    by_hand, scripts = site.calls(), sorted(folder.glob("*-*.sh"))
    (site.tools / "calls").unlink()
    (site.tools / "count").unlink()
    site.submit(targets, again=AGAIN, launcher=launcher)
    real = sorted(site.folder(targets).glob("*.sh"))
    assert [call[:-1] for call in by_hand] == [call[:-1] for call in site.calls()]
    assert [file.name for file in scripts] == [file.name for file in real] and len(real) == 3
    for mine, theirs in zip(scripts, real, strict=True):
        assert mine.read_text() == theirs.read_text().replace(str(theirs.parent), str(mine.parent))


def asked_of_sbatch(
    launcher: Launcher, gpus: int, threads: int | None, site: Site
) -> dict[str, str]:
    """Return the options of a job's submission, by name."""
    script = site.tools / "x.sh"
    session: Any = SimpleNamespace(tasks=[SimpleNamespace(runs_dir=site.runs)])
    submission = slurm.Submission(launcher, "x", session, {}, [])
    submission.submit_script(script, "#!/bin/bash\n", Resources(gpus, threads, 60), [], "x")
    return dict(word.partition("=")[::2] for word in site.calls()[-1])


def test_memory_is_asked_for_each_gpu_of_a_job(site: Site) -> None:
    """--mem-per-gpu of jobs with GPUs; launcher.memory comes first.

    A data run asks for none, but for one GPU's where it has a partition of its own, whose nodes may
    give a job one core and its memory.
    """
    for gpus, memory, cpu_partition, asked in (
        (4, None, None, "--mem-per-gpu=48G"),
        (4, "9G", None, "--mem=9G"),
        (0, None, None, ""),
        (0, None, "cpu", "--mem=48G"),
        (0, "9G", "cpu", "--mem=9G"),
        (4, None, "cpu", "--mem-per-gpu=48G"),
    ):
        launcher = replace(
            LAUNCHER, memory=memory, memory_per_gpu="48G", cpu_partition=cpu_partition
        )
        given = asked_of_sbatch(launcher, gpus, None, site)
        assert (
            " ".join(f"{name}={value}" for name, value in given.items() if name.startswith("--mem"))
            == asked
        )


def test_cores_and_partition_follow_the_gpus_of_a_job(site: Site) -> None:
    """Eight cores a GPU unless threads say.

    Jobs without GPUs go to their own partition, with the cores of one; where they have none, with
    the site's.
    """
    launcher = replace(LAUNCHER, partition="gpu", cpu_partition="cpu")
    for gpus, threads, knobs, asked in (
        (4, None, {}, ["gpu", "32"]),
        (4, None, {"cpus_per_gpu": 4}, ["gpu", "16"]),
        (2, 6, {}, ["gpu", "6"]),
        (0, None, {}, ["cpu", "8"]),
        (0, None, {"cpu_partition": None}, ["gpu", None]),
        (0, 3, {}, ["cpu", "3"]),
        (1, None, {"cpus_per_gpu": None}, ["gpu", None]),
        (0, None, {"cpus_per_gpu": None}, ["cpu", None]),
    ):
        given = asked_of_sbatch(replace(launcher, **knobs), gpus, threads, site)
        assert [given.get("--partition"), given.get("--cpus-per-task")] == asked


def test_while_jobs_are_in_the_queue_nothing_is_submitted(site: Site) -> None:
    targets = site.plan()
    site.submit(targets)
    site.in_queue(site.folder(targets), "1_0", "1_1")
    site.submit(
        targets, rf"^2 jobs of {site.folder(targets).name} in the queue, as submitted earlier \("
    )
    assert len(site.calls()) == 2
    site.in_queue(site.folder(targets))
    for run in order_runs(targets)[:3]:
        make_once(run, writes())
    site.submit(targets, "^4 runs submitted as 1 array\\.")
    for run in order_runs(targets):
        make_once(run, writes())
    assert slurm.execute(LAUNCHER, None, targets) == {}


def test_runs_that_another_plan_has_in_the_queue_are_waited_for(site: Site) -> None:
    targets = site.plan()
    site.submit(targets[2:])
    site.in_queue(site.folder(targets[2:]), "1_0", "1_1")
    site.submit(targets, "^7 runs submitted")
    assert option(site.calls()[1], "--dependency") == "afterany:1"


def test_a_site_s_limit_of_jobs_means_fewer_workers_and_the_last_job_takes_the_place_of_one(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    targets, tools = site.plan(), site.tools
    (tools / "tasks").write_text("1")  # 3 workers -> 1
    site.submit(targets, "^7 runs submitted as 2 arrays\.")
    assert [option(one, "--array") for one in site.calls()] == ["0-2", "0-0", "0-0"]
    (tools / "tasks").unlink()
    (tools / "most").write_text("3")  # one more
    (tools / "scancel").write_text(
        (tools / "scancel").read_text().replace("scancel)", f"scancel) rm {tools}/most")
    )
    site.submit(targets, "^6 runs submitted as 1 array, 1 more when these are done\\.", AGAIN)
    assert site.calls("scancel") == [["3_2"]]
    assert capfd.readouterr().err.endswith("job 4: the same command, when these are done\n")
    (tools / "most").write_text("4")
    told = (
        r"^sbatch refused: QOSMaxSubmitJobPerUserLimit; requested: --partition=c --mem=4G"
        r" --cpus-per-task=8 .* --comment=x$"
    )
    launcher = replace(
        LAUNCHER, partition="p", cpu_partition="c", memory="4G", options=["--comment=x"]
    )
    with pytest.raises(PipelineError, match=told):
        slurm.execute(launcher, None, targets)


def hangs(site: Site, name: str, then: str = "") -> None:
    """Make a command work but not respond, with a child that keeps its output open."""
    site.tool(name, f"{(site.tools / name).read_text()}\n{then}\nsleep 30 & sleep 30\n")


def test_a_command_that_does_not_respond_is_75_after_three_attempts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_commands, "SECONDS", 0.3)
    hangs(site, "squeue")
    site.submit(
        site.plan(),
        r"^squeue did not respond within 0.3 s, 3 times\. Rerun the same command when Slurm",
    )
    assert not (site.runs / ".slurm/submitting").exists()  # its lock


def test_a_submission_that_did_not_respond_and_took_effect_is_not_made_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, seen = site.plan()[2:], site.tools / "script"
    monkeypatch.setattr(slurm_commands, "SECONDS", 0.5)
    squeue = (site.tools / "squeue").read_text()
    hangs(site, "sbatch", f"echo ${{@: -1}} > {seen}")
    listed = f'for n in 0 1 2; do echo "pipeline:77_$n|$(cat {seen})"; done'
    site.tool("squeue", f"{squeue}\n[ ! -f {seen} ] || {{ {listed}; }}\n")
    site.submit(targets, "^3 runs submitted as 1 array")
    assert len(site.calls()) == 1 and (site.folder(targets) / "0-0gpu.job").read_text() == "77"
    site.submit(targets, "^3 jobs of ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_submits_it_cancels_what_it_submitted(
    number: signal.Signals, site: Site, interruptible: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal arrives after sbatch took the second array and before it printed its number."""
    count = f"echo $((N + 1)) > {site.tools}/count;"
    hit = f'{count} [ "$N" = 1 ] && kill -{number.value} {os.getpid()} && sleep 0.3;'
    site.tool("sbatch", (site.tools / "sbatch").read_text().replace(count, hit))
    with pytest.raises((KeyboardInterrupt, SystemExit)), handle_signals():
        slurm.execute(LAUNCHER, None, site.plan())
    assert capfd.readouterr().err.endswith("cancelled again: 2 jobs 1, 2\n") and site.calls(
        "scancel"
    ) == [["1", "2"]]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_a_full_disk_cannot_write_down_is_not_left_in_the_queue(
    number: int, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number), "runs/.slurm/x")

    monkeypatch.setattr(slurm.Submission, "tell", full)
    with pytest.raises(OSError, match=os.strerror(number)) as refused:
        slurm.execute(LAUNCHER, None, site.plan())
    assert (
        error_sentence(refused.value)
        == f"{os.strerror(number)}: runs/.slurm/x; nothing was published"
    )
    assert len(site.calls()) == 1 and site.calls("scancel") == [["1"]]


def test_the_last_job_leaves_what_failed_and_submits_what_was_lost_as_long_as_that_gets_further(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table needs one command of its user; the same job does not go round forever."""
    targets = site.plan()
    site.submit(targets, again=AGAIN)
    script = Path(site.calls()[-1][-1]).read_text()
    assert "-m pipeline stage=table table=x" in script and "export PIPELINE_CONTINUES=1" in script
    assert "afterany:1:2" in site.calls()[-1]
    lost, failed, *others = order_runs(targets)[:-1]
    session = Session(site.folder(targets))
    tasks = {task.hash: task for task in session.tasks}
    session.fail(tasks[failed.hash], "no room")
    for run in others:
        if run is not targets[0]:
            make_once(run, writes())
            session.finish(tasks[run.hash])
    monkeypatch.setenv("PIPELINE_CONTINUES", "1")
    held = site.submit(targets, "^[12] runs? submitted as ", AGAIN)
    assert held.failed[failed.name] == "no room" and lost.name not in held.failed
    done = slurm.execute(LAUNCHER, AGAIN, targets)  # gone once more
    assert (
        done[failed.name] == "no room"
        and "ended before it came to this run, twice: job " in done[lost.name]
    )
    monkeypatch.delenv("PIPELINE_CONTINUES")
    site.submit(targets, "^3 runs submitted")  # a user's own command starts anew


def small_plan(runs_dir: Path) -> list[Run]:
    """Return a run that fails, a run that depends on it, and a run that succeeds."""
    parent = a_run(runs_dir, label="parent", seed=1)
    child = a_run(runs_dir, {"data_root": parent}, label="child")
    words = ["stage=data", "expert=sandbox", "expert.world.items=2", "tracking.mode=disabled"]
    return [parent, child, build(compose([*words, f"runs_dir={runs_dir}"]))]  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "status"), [("", 0), ("kill -USR1 $PPID; sleep 1; ", 75)])
def test_the_last_job_is_requeued_when_it_was_asked_to_stop_alone(
    asked: str, status: int, site: Site
) -> None:
    """75 means else that jobs which it submitted go on."""
    site.tool("python", f"#!/bin/bash\n{asked}exit 75\n")
    script = slurm.script_of(Launcher(name="slurm", wrap="env"), ["-m", "pipeline"], slurm.GOES_ON)
    done = subprocess.run(
        ["bash", "-c", script.replace("sleep 60", "true")], env={**os.environ, "SLURM_JOB_ID": "8"}
    )
    assert done.returncode == status
    assert site.calls("scontrol") == ([["requeue", "8"]] if asked else [])


def test_a_jobs_script_prepares_its_node_and_asks_for_itself_again_on_75(
    site: Site, tmp_path: Path
) -> None:
    """Run by bash, with a program in place of this one that prints where it is.

    Paths hold what bash would read.
    """
    odd = tmp_path / """my "files" 'of' `id` $(id) \\ 100%"""
    node = {
        "setup": ["export SITE=cuda"],
        "scratch": f"{odd}/$SLURM_JOB_ID",
        "hf_home": "~/hub of ${SITE}",
    }
    launcher = Launcher(name="slurm", wrap="env", **node)  # type: ignore[arg-type]
    site.tool(
        "python", '#!/bin/bash\necho "$SITE|$TMPDIR|$HF_HOME|$*"; ls -d "$TMPDIR"; exit $STATUS\n'
    )
    script = slurm.script_of(launcher, ["-m", "pipeline.launch.worker", "a $file"])

    def run(status: int) -> list[str]:
        ids = {
            "SLURM_JOB_ID": "8",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "1",
            "STATUS": str(status),
        }
        waits = script.replace(
            "sleep 60", "true"
        )  # for Slurm, which ends a job that is asked for again
        environment = {**os.environ, **ids, "HOME": "/home/me"}
        done = subprocess.run(
            ["bash", "-c", waits], env=environment, capture_output=True, text=True
        )
        assert done.returncode == status, done.stderr
        return done.stdout.splitlines()

    place = f"{odd}/8"
    assert (
        run(0)
        == run(1)
        == [f"cuda|{place}|/home/me/hub of cuda|-m pipeline.launch.worker a $file", place]
    )
    assert not (site.tools / "calls").exists()
    run(75)
    assert site.calls("scontrol") == [["requeue", "7_1"]]


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        ({"setup": ["export HF_TOKEN=hf_x"]}, 0o600),
        ({"wrap": "env HF_TOKEN=hf_x"}, 0o600),
        ({"options": ["--export=HF_TOKEN=hf_x"]}, 0o600),
        ({}, 0o644),
    ],
)
def test_scripts_with_lines_of_the_user_are_the_owners_alone(
    more: dict[str, Any], mode: int, site: Site
) -> None:
    """That of the command that continues a table too; no other file has these lines.

    A group may share the folder.
    """
    targets, launcher = site.plan(), replace(LAUNCHER, **more)
    for run in order_runs(targets):
        run.config.launcher = launcher
    before = os.umask(0o022)
    try:
        site.submit(targets, again=AGAIN, launcher=launcher)
    finally:
        os.umask(before)
    files = list(site.folder(targets).glob("*.sh"))
    assert len(files) == 3 and {file.stat().st_mode & 0o777 for file in files} == {mode}
    plans = [*site.folder(targets).glob("*.jsonl"), *(site.runs / ".plans").glob("*.jsonl")]
    assert len(plans) == 2 and not any("hf_x" in file.read_text() for file in plans)


@pytest.mark.parametrize(
    "line", ["module load nowhere", "exit 3", "source /nowhere/activate", "exit 0"]
)
def test_a_setup_line_that_fails_ends_the_job_and_is_its_last_word(
    line: str, tmp_path: Path
) -> None:
    script = slurm.script_of(
        Launcher(name="slurm", setup=["export A=1", line]), ["-m", "pipeline", "x"]
    )
    log = tmp_path / "log"
    with open(log, "w") as opened:
        assert subprocess.run(["bash", "-c", script], stdout=opened, stderr=opened).returncode == 1
    assert slurm_commands.last_log_line(log) == f"launcher.setup ended the job at: {line}"


@pytest.mark.parametrize(
    ("log", "failed"),
    [
        ("python: No module named pipeline\n", True),
        (
            (
                "slurmstepd-n1: error: *** JOB 15 ON n1 CANCELLED AT 2026-11-22T08:50:26"
                " ***\nTerminated\n"
            ),
            False,
        ),
        (
            "*** JOB 5 ON n1 CANCELLED AT 2026-11-22T08:50:26 DUE TO JOB REQUEUE ***\nno python\n",
            True,
        ),
        ("SIGTERM: x\n7 runs: 1 stopped\n", False),
        ("", False),
    ],
)
def test_a_job_that_was_cancelled_did_not_fail(
    log: str, failed: bool, site: Site, call: Call
) -> None:
    targets = site.plan()
    site.submit(targets)
    (site.runs / ".logs/slurm-1_0.log").write_text(log)
    told = json.loads(call("stage=status", f"runs_dir={site.runs}", "status.json=true").out)
    one = next(one for one in told if one["run"] == targets[1].name)
    asked = (
        "for job 1; where squeue --me does not list it, rerun the same command to submit it again"
    )
    assert one["state"] == ("failed" if failed else "waiting") and (
        failed or one["detail"] == asked
    )
    assert not failed or one["detail"].startswith("job 1 ended before it began: ")


def test_the_log_of_an_array_and_of_the_last_job_are_found(tmp_path: Path) -> None:
    """The last job's log is named by its job, because each plan of a runs_dir has such a job."""
    folder, logs = tmp_path / ".slurm/table", tmp_path / ".logs"
    folder.mkdir(parents=True)
    logs.mkdir()
    assert slurm.log_of("0-1gpu", folder) == (None, None)
    (folder / "goes-on.job").write_text("7")
    assert slurm.log_of("0-1gpu", folder) == ("7", None)
    for name in ("slurm-goes-on-6.log", "slurm-goes-on-7.log", "slurm-5_0.log"):
        (logs / name).write_text("the reason\n")
    assert slurm.log_of("0-1gpu", folder) == ("7", logs / "slurm-goes-on-7.log")
    (folder / "0-1gpu.job").write_text("5")
    assert slurm.log_of("0-1gpu", folder) == ("5", logs / "slurm-5_0.log")


def of_8b(tmp_path: Path, *words: str) -> Run:
    return build(
        compose(
            [
                "stage=sft",
                "expert=math",
                f"runs_dir={tmp_path}/runs",
                "sft.micro_batch_size=4",
                *words,
            ]
        )
    )


def test_a_training_is_asked_to_stop_early_enough_to_write_a_resume_point(tmp_path: Path) -> None:
    """Ten minutes before the limit, or a quarter of a shorter one.

    Also of a model whose size is not known before.
    """
    full = resources_of(of_8b(tmp_path, "sft.processes=4", "sft.micro_batch_size=1"), LAUNCHER)
    assert full == Resources(gpus=4, cpus=None, lead=600) and full.name == "4gpu-long"
    assert resources_of(of_8b(tmp_path, "model=hub:foo/bar"), LAUNCHER).lead == 600
    short = Launcher(name="slurm", time="8:00")
    assert resources_of(of_8b(tmp_path, "threads=8"), short) == Resources(gpus=1, cpus=8, lead=120)
    with pytest.raises(
        PipelineError,
        match=r"^launcher.time=2:00 is 120 s, but a job of math-full-s0-\w+ needs 240 s to",
    ):
        resources_of(of_8b(tmp_path), Launcher(name="slurm", time="2:00"))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30", 1800),
        ("2:30", 150),
        ("01:00:00", 3600),
        ("2-0", 172800),
        ("1-02:30", 95400),
        ("1-00:00:05", 86405),
    ],
)
def test_time_limits_are_read_as_sbatch_does(limit: str, seconds: float) -> None:
    assert slurm_commands.parse_time_limit(limit) == seconds


# --- a task ---


def test_a_signal_after_a_run_was_published_is_no_attempt_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state would be left where no run is."""
    run = a_run(tmp_path / "runs")
    monkeypatch.setenv("PIPELINE_SIGNALLED", "SIGUSR1")
    with handle_signals(), pytest.raises(SystemExit), attempts.count_attempt(run):
        raise AssertionError("it went on")
    assert state.read_state(run.workplace)["stops"] == [None]
    make_once(run, writes())
    attempts.add_attempt(run, None)
    assert not run.workplace.exists()


@pytest.fixture
def in_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a task of a Slurm array."""
    for key, value in (("ARRAY_JOB_ID", 7), ("ARRAY_TASK_ID", 1), ("JOB_ID", 8)):
        monkeypatch.setenv(f"SLURM_{key}", str(value))


@pytest.fixture
def task(site: Site, in_array: None, tmp_path: Path) -> Callable[..., int]:
    """Make runs of one level as a task of an array does; gives its exit status."""

    def make(*runs: Run) -> Any:
        write_plan(tmp_path / "session/plan.jsonl", [Task.of(run, kind="x") for run in runs])
        try:
            return worker.main("task", f"{tmp_path}/session", "0", "x")
        except SystemExit as ended:
            return ended.code

    return make


def test_a_task_makes_what_is_free_and_leaves_the_rest(
    site: Site, task: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """A failed run fails only dependent runs, and is not retried in the same submission."""
    parent, child, other = small_plan(site.runs)
    assert task(parent, child, other) == 1
    assert other.folder.is_dir() and "2 runs: 1 failed" in capfd.readouterr().err
    assert "is not on the Hub" in state.read_state(parent.workplace)["last_line"]
    assert site.calls("scontrol")[0] == ["update", "JobId=7_1", f"JobName={parent.label}"]
    assert (site.runs / f".logs/parent-{parent.hash[:12]}.log").is_file()
    assert task(parent, child, other) == 0  # requeued: nothing is left
    assert "0 runs: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("left", "seconds", "fits"),
    [
        ("1:01", 30.0, True),
        ("1:00", 30.0, False),
        ("1-00:00:00", 43199.0, True),
        ("UNLIMITED", 1e9, True),
        ("UNLIMITED", None, False),
        ("INVALID", 1.0, False),
        ("9:00\n*** Welcome ***", 1.0, True),
        ("", 1.0, False),
    ],
)
def test_another_training_needs_twice_its_time_of_the_job(
    left: str, seconds: float | None, fits: bool, site: Site, in_array: None
) -> None:
    site.tool("squeue", f"#!/bin/sh\n[ $2 = --job=7_1 ] && printf 'pipeline:%s\\n' '{left}'\n")
    assert worker.has_time_for(Task.of(a_run(site.runs), seconds=seconds)) is fits


def asked_to_stop(number: signal.Signals) -> Any:
    """Return a stage that Slurm asks to stop before it has done anything."""

    def stage(*_: Any) -> dict[str, Any]:
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")

    return stage


def test_a_task_that_gets_no_further_is_not_requeued(
    task: Callable[..., int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three attempts that the time limit ended.

    A preemption is none; nor is one that got further.
    """
    run = a_run(tmp_path / "runs")
    monkeypatch.setattr(in_process, "stage_function", lambda run: asked_to_stop(signal.SIGTERM))
    assert [task(run) for _ in range(5)] == [75] * 5
    monkeypatch.setattr(in_process, "stage_function", lambda run: asked_to_stop(signal.SIGUSR1))
    assert [task(run) for _ in range(2)] == [75, 75]
    assert state.read_state(run.workplace)["stops"] == [None, None]
    assert task(run) == 1
    told = "3 attempts ended before its end without getting further: give a longer time limit"
    assert told in capfd.readouterr().err
    record = state.read_state(run.workplace)
    assert record["state"] == "failed" and record["last_line"].endswith("it is not requeued")
    assert task(run) == 0  # nor is it tried again by another
    further = iter(range(9))
    monkeypatch.setattr(attempts, "last_step", lambda run: next(further))
    other = a_run(tmp_path / "runs", seed=5)
    other.workplace.mkdir(parents=True)
    state.update_state(other.workplace, stops=[1, 1], state="stopped")
    assert task(other) == 75


def test_a_second_training_gets_the_whole_time_of_a_job(
    task: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job asks for itself again before it.

    The limit could come before its first resume point.
    """
    runs = [of_8b(tmp_path, f"seed={seed}") for seed in (1, 2)]
    made: list[Any] = []
    monkeypatch.setattr(worker, "compute", lambda task, begin: made.append(task.hash))
    monkeypatch.setattr(worker, "wait_for_parents", lambda task: None)
    monkeypatch.setattr(worker.Session, "ready", lambda self, models: self.left)
    assert task(*runs) == 75 and made == [runs[0].hash]
    assert task(*runs) == 0 and made == [run.hash for run in runs]


def test_a_training_whose_limit_comes_before_its_first_step_is_reported_once(
    task: Callable[..., int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As slurm/one_gpu.sbatch with --time=2, whose signal comes 15 minutes before the limit.

    While it imports.
    """
    run = of_8b(tmp_path)
    monkeypatch.setenv("PIPELINE_SIGNALLED", "SIGUSR1")
    monkeypatch.setattr(Task, "run", lambda self: run)
    assert task(run) == 1
    told = (
        "its first resume point was not reached when the job was asked to stop: give a longer"
        " time l"
    )
    assert told in capfd.readouterr().err and state.read_state(run.workplace)[
        "last_line"
    ].startswith(told)
    (run.workplace / "state.json").unlink()
    monkeypatch.setenv(
        "PIPELINE_SIGNALLED", "SIGUSR1"
    )  # the same of a command, whose first run is the data's
    with handle_signals(), pytest.raises(SystemExit) as ended:
        execute_here([run])
    assert ended.value.code == 1 and state.read_state(run.workplace)["last_line"].startswith(told)
