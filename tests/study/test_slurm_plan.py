"""launcher=slurm without Slurm: what is submitted and in which order, what a refusal half-way leaves; and a status."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import a_run, writes

from pipeline.config.compose import compose
from pipeline.config.stages import Launcher
from pipeline.errors import Held, PipelineError
from pipeline.launch import attempts, in_process, slurm_arrays, slurm_commands, slurm_tasks, worker
from pipeline.launch.in_process import error_sentence
from pipeline.launch.local_pool import execute_here
from pipeline.launch.run_json import element_of
from pipeline.runs import state
from pipeline.runs.make import make_once
from pipeline.runs.run import Run
from pipeline.runs.stop import handle_signals
from pipeline.stages.rows import build

TOOL = """#!/bin/bash
echo "$(basename $0) $@" >> {at}/calls
case $(basename $0) in
  squeue) cat {at}/banner 2>/dev/null; sed 's/^/pipeline:/; s/$/|x/' {at}/queue 2>/dev/null || true ;;
  scancel) ;;
  scontrol) echo "MaxArraySize = 4" ;;
  sbatch) N=$(cat {at}/count 2>/dev/null || echo 0)
    TASKS=$(sed -n 's/.*--array 0-\\([0-9]*\\) .*/\\1/p' <<< "$*")
    MOST=$(cat {at}/most 2>/dev/null || echo 99)
    if [ "$N" -ge "$MOST" ] || [ "${{TASKS:-0}}" -ge "$(cat {at}/tasks 2>/dev/null || echo 99)" ]; then
      echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi
    echo $((N + 1)) > {at}/count; cat {at}/banner 2>/dev/null; echo $((N + 1)) ;;
esac
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """squeue, scontrol and sbatch that write down what they are asked."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("squeue", "scontrol", "sbatch", "scancel"):
        (folder / name).write_text(TOOL.format(at=folder))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def calls(tools: Path, name: str = "sbatch") -> list[list[str]]:
    return [line.split()[1:] for line in (tools / "calls").read_text().splitlines() if line.startswith(f"{name} ")]


def plan(tmp_path: Path) -> list[Run]:
    """Six data runs, and a run of the first two."""
    parents = [a_run(tmp_path / "runs", seed=seed) for seed in range(6)]
    child = a_run(tmp_path / "runs", {"data": parents[0], "data_root": parents[1]}, label="child")
    return [child, *parents[2:]]


def test_levels_and_batches_become_arrays_that_wait_for_those_before(tools: Path, tmp_path: Path) -> None:
    targets = plan(tmp_path)
    launcher = Launcher(name="slurm", batch_minutes=0.2, partition="gpu", memory="4G", options=["--constraint=a100"])
    with pytest.raises(Held, match=r"^7 runs submitted as 3 arrays, 7 in the queue or in work; stage=status shows"):
        slurm_arrays.execute(launcher, None, targets)
    first, second, third = calls(tools)  # of 10 s each, one a task; three tasks an array at most
    assert [one[one.index("--array") + 1] for one in (first, second, third)] == ["0-2", "0-2", "0-0"]
    assert "--dependency" not in first and third[third.index("--dependency") + 1] == "afterany:1"
    assert {"--partition=gpu", "--mem=4G", "--constraint=a100", "--signal=B:USR1@60", "--requeue"} <= set(first)
    assert not any(word.startswith(("--gres", "--time", "--cpus")) for word in first)
    held = json.loads((tmp_path / f"runs/.plans/{slurm_arrays.plan_files.plan_name(targets)}.json").read_text())["runs"]
    assert held[targets[0].hash]["job"] == "3_0" and len({one["job"] for one in held.values()}) == 7
    lines = [path.read_text().splitlines() for path in sorted((tmp_path / "runs/.slurm").glob("*.jsonl"))]
    assert [len(one) for one in lines] == [3, 3, 1]
    (element,) = json.loads(lines[2][0])["elements"]
    assert element == json.loads(json.dumps(element_of(targets[0])))


def test_a_dry_run_writes_the_jobs_that_would_be_submitted(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a Slurm. Run by bash, submit.sh submits the same arrays with the same options and dependencies."""
    targets, launcher = (
        plan(tmp_path),
        Launcher(name="slurm", batch_minutes=0.2, memory="4G", options=["--comment=a b"]),
    )
    again, path = ["stage=table", "table=x"], os.environ["PATH"]
    monkeypatch.setenv("PATH", path.removeprefix(f"{tools}:"))
    monkeypatch.setattr(slurm_arrays, "LARGEST_ARRAY", 3)
    with pytest.raises(SystemExit) as ended:
        slurm_arrays.execute(
            Launcher(**{**vars(launcher), "dry_run": True}), [*again, "launcher.dry_run=true"], targets
        )
    folder = tmp_path / "runs/.slurm-dry-run"
    told = capfd.readouterr().err
    assert ended.value.code == 0 and f"nothing was submitted (launcher.dry_run=true); these lines are {folder}" in told
    assert (folder / "submit.sh").read_text() in told and not (tools / "calls").exists()
    assert not list((tmp_path / "runs").glob(".plans/*")) and not list((tmp_path / "runs").glob(".work/*"))

    monkeypatch.setenv("PATH", path)
    subprocess.run(["bash", "-e", folder / "submit.sh"], check=True)
    by_hand, scripts = calls(tools), sorted(folder.glob("*.sh"))[:-1]
    (tools / "calls").unlink()
    (tools / "count").unlink()
    with pytest.raises(Held):
        slurm_arrays.execute(launcher, again, targets)
    real = sorted((tmp_path / "runs/.slurm").glob("*.sh"))
    assert [call[:-1] for call in by_hand] == [call[:-1] for call in calls(tools)]
    assert len(scripts) == len(real) == 4
    for mine, theirs in zip(scripts, real, strict=True):
        assert mine.read_text().replace(mine.stem, "") == theirs.read_text().replace(theirs.stem, "").replace(
            str(theirs.parent), str(mine.parent)
        )


def test_memory_is_asked_for_each_gpu_of_a_job(tools: Path, tmp_path: Path) -> None:
    """--mem-per-gpu of jobs with GPUs; launcher.memory comes first, and a data run asks for none."""
    run = a_run(tmp_path / "runs")
    for gpus, memory, asked in ((4, None, "--mem-per-gpu=48G"), (4, "9G", "--mem=9G"), (0, None, "")):
        launcher = Launcher(name="slurm", memory=memory, memory_per_gpu="48G")
        resources = slurm_tasks.Resources(gpus, None, 60)
        file = run.runs_dir / f".slurm/{gpus}{memory}.sh"
        file.parent.mkdir(parents=True, exist_ok=True)
        slurm_arrays.submit_script(launcher, file, "#!/bin/bash\n", resources, [], "x")
        assert " ".join(word for word in calls(tools)[-1] if word.startswith("--mem")) == asked


def test_submitting_again_adds_what_is_missing_and_nothing_else(tools: Path, tmp_path: Path) -> None:
    targets = plan(tmp_path)
    launcher = Launcher(name="slurm", batch_minutes=0.2, memory="4G", options=["--comment=x"])
    (tools / "most").write_text("0")
    told = (
        r"^sbatch refused: QOSMaxSubmitJobPerUserLimit; requested: launcher.memory=4G, 0 GPUs, --comment=x "
        r"\(0 of 3 arrays were submitted; rerun the same command to submit the rest"
    )
    with pytest.raises(PipelineError, match=told):
        slurm_arrays.execute(launcher, None, targets)
    assert not list((tmp_path / "runs/.slurm").glob("*.*"))
    (tools / "most").write_text("1")
    with pytest.raises(Held, match=r"^3 runs submitted as 1 array, 4 more by the same command when these are done, "):
        slurm_arrays.execute(launcher, None, targets)
    assert [len(list((tmp_path / "runs/.slurm").glob(kind))) for kind in ("*.sh", "*.jsonl")] == [1, 1]
    (tools / "most").write_text("99")
    (tools / "queue").write_text("1_0\n1_1\n1_2\n")
    with pytest.raises(Held, match=r"^4 runs submitted as 2 arrays, 7 in the queue"):
        slurm_arrays.execute(launcher, None, targets)
    assert [one[one.index("--array") + 1] for one in calls(tools)[-2:]] == ["0-2", "0-0"]
    assert calls(tools)[-1][calls(tools)[-1].index("--dependency") + 1] == "afterany:1"  # of the first submission
    (tools / "queue").write_text("1_0\n1_1\n1_2\n2_0\n2_1\n2_2\n3_0\n")
    before = len(calls(tools))
    with pytest.raises(Held, match=r"^7 in the queue or in work, as they were submitted \("):
        slurm_arrays.execute(launcher, None, targets)
    assert len(calls(tools)) == before
    for run in slurm_arrays.order_runs(targets):
        make_once(run, writes())
    assert slurm_arrays.execute(launcher, None, targets) == {}


def test_an_array_beyond_the_sites_limit_is_halved_and_the_last_job_submits_the_rest(
    tools: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Six runs at once, two tasks at most: 3 -> 1."""
    targets, launcher = plan(tmp_path), Launcher(name="slurm", batch_minutes=0.2)
    (tools / "tasks").write_text("1")
    with pytest.raises(
        Held, match=r"^1 run submitted as 1 array, 6 more by the last job when these are done, 7 in the q"
    ):
        slurm_arrays.execute(launcher, ["stage=table", "table=x"], targets)
    arrays = [one[one.index("--array") + 1] for one in calls(tools)[:-1]]
    assert arrays == ["0-2", "0-0"] and "--dependency" in calls(tools)[-1]
    assert capfd.readouterr().err.endswith("job 2: the same command, when these are done\n")
    held = json.loads((tmp_path / f"runs/.plans/{slurm_arrays.plan_files.plan_name(targets)}.json").read_text())["runs"]
    assert sorted(str(one["job"]) for one in held.values()) == ["1_0", *["None"] * 6]


def hangs(tools: Path, name: str, then: str = "") -> None:
    """The command does what it does and then does not respond, with a process of its own that holds its output open."""
    tool = (tools / name).read_text()
    (tools / name).write_text(f"{tool}\n{then}\nsleep 30 & sleep 30\n")


def test_a_command_that_does_not_respond_is_75_after_three_attempts(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, launcher = plan(tmp_path), Launcher(name="slurm", batch_minutes=0.2)
    monkeypatch.setattr(slurm_commands, "SECONDS", 0.3)
    hangs(tools, "squeue")
    with pytest.raises(Held, match=r"^squeue did not respond within 0.3 s, 3 times; rerun the same command when Slurm"):
        slurm_arrays.execute(launcher, None, targets)
    assert not (tmp_path / "runs/.slurm/submitting").exists()  # its lock


def test_what_a_submission_that_did_not_respond_left_in_the_queue_is_not_submitted_again(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once seen by the same command in the queue, once by the next command."""
    targets, launcher = plan(tmp_path), Launcher(name="slurm", batch_minutes=0.2)
    monkeypatch.setattr(slurm_commands, "SECONDS", 0.5)
    seen = f'for n in 0 1 2; do echo "pipeline:77_$n|$(cat {tools}/script)"; done'
    tool, kept = (tools / "squeue").read_text(), (tools / "sbatch").read_text()
    hangs(tools, "sbatch", f"echo ${{@: -1}} > {tools}/script")
    (tools / "squeue").write_text(f"{tool}\n[ ! -f {tools}/script ] || {{ {seen}; }}\n")
    with pytest.raises(Held) as held:  # and no more than one array
        (tools / "most").write_text("1")
        slurm_arrays.execute(launcher, None, targets)
    assert len(calls(tools)) == 1 + 2 and "3 runs submitted as 1 array" in str(held.value)
    name = slurm_arrays.plan_files.plan_name(targets)
    plans = json.loads((tmp_path / f"runs/.plans/{name}.json").read_text())["runs"]
    assert {one["job"] for one in plans.values()} == {"77_0", "77_1", "77_2", None}
    (tools / "sbatch").write_text(kept)
    (
        tmp_path / f"runs/.plans/{slurm_arrays.plan_files.plan_name(targets)}.json"
    ).unlink()  # as where squeue did not respond either
    (tools / "most").write_text("99")
    with pytest.raises(Held, match="^4 runs submitted as 2 arrays, 7 in the queue"):
        slurm_arrays.execute(launcher, None, targets)


def test_children_in_the_queue_wait_for_a_parent_that_is_submitted_again(tools: Path, tmp_path: Path) -> None:
    """Else they would begin when the array of before ends, find nothing, and ask for themselves again and again."""
    targets, launcher = plan(tmp_path), Launcher(name="slurm", batch_minutes=0.2)
    with pytest.raises(Held):
        slurm_arrays.execute(launcher, None, targets)
    (tools / "queue").write_text("1_1\n1_2\n2_0\n2_1\n2_2\n3_0\n")  # 1_0, the child's first parent, was cancelled
    with pytest.raises(Held, match="^1 run submitted as 1 array, 7 in the queue"):
        slurm_arrays.execute(launcher, None, targets)
    (update,) = [words for words in calls(tools, "scontrol") if words[0] == "update"]
    assert update == ["update", "JobId=3", "Dependency=afterany:1:4"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_submits_it_knows_each_job(
    number: signal.Signals, tools: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal comes while sbatch has taken the second array and has not yet printed its number."""
    targets, launcher = plan(tmp_path), Launcher(name="slurm", batch_minutes=0.2)
    tool = (tools / "sbatch").read_text()
    hit = f'echo $((N + 1)) > {tools}/count; [ "$N" = 1 ] && kill -{number.value} {os.getpid()} && sleep 0.3;'
    (tools / "sbatch").write_text(tool.replace(f"echo $((N + 1)) > {tools}/count;", hit))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)), handle_signals():
            slurm_arrays.execute(launcher, None, targets)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err.endswith("jobs in the queue stay there: 1, 2\n")
    (tools / "sbatch").write_text(tool)
    (tools / "queue").write_text("1_0\n1_1\n1_2\n2_0\n2_1\n2_2\n")
    with pytest.raises(Held, match="^1 run submitted as 1 array, 7 in the queue"):
        slurm_arrays.execute(launcher, None, targets)


def test_what_failed_is_submitted_again_unless_the_command_goes_on_by_itself(tools: Path, tmp_path: Path) -> None:
    targets = plan(tmp_path)
    parent = targets[0].parents["data"]
    assert isinstance(parent, Run)
    for run in slurm_arrays.order_runs(targets):
        if run not in (parent, targets[0]):
            make_once(run, writes())
    parent.workplace.mkdir(parents=True)
    state.update_state(parent.workplace, state="failed", last_line="no room")
    failed = slurm_arrays.execute(Launcher(name="slurm", retry_failed=False), None, targets)
    assert failed == {parent.name: "no room", targets[0].name: f"its parent {parent.name} failed"}
    with pytest.raises(Held, match="^2 runs submitted as 2 arrays"):
        slurm_arrays.execute(Launcher(name="slurm"), ["stage=table", "table=x"], targets)
    assert "afterany:1:2" in calls(tools)[-1] and "runs-" in " ".join(calls(tools)[-1])
    script = Path(calls(tools)[-1][-1]).read_text()
    assert "-m pipeline stage=table table=x launcher.retry_failed=false" in script and "requeue" not in script


def test_the_last_job_submits_what_was_cancelled_or_lost_again_once(tools: Path, tmp_path: Path) -> None:
    """A table needs one command of its user; the same job does not go round forever."""
    targets = plan(tmp_path)
    first, again = (Launcher(name="slurm", batch_minutes=0.2, retry_failed=retry) for retry in (True, False))
    with pytest.raises(Held):
        slurm_arrays.execute(first, ["stage=table"], targets)
    lost, failed, cancelled = slurm_arrays.order_runs(targets)[:3]
    state.update_state(lost.workplace, state="running")  # by a node that is gone
    state.update_state(failed.workplace, state="failed", last_line="no room")
    state.update_state(cancelled.workplace, state="stopped")
    for run in slurm_arrays.order_runs(targets):
        if run not in (lost, failed, cancelled, targets[0]):
            make_once(run, writes())
    with pytest.raises(Held, match="^2 runs submitted as 1 array, ") as held:
        slurm_arrays.execute(again, ["stage=table"], targets)
    assert held.value.failed[failed.name] == "no room" and lost.name not in held.value.failed
    done = slurm_arrays.execute(again, ["stage=table"], targets)  # both are gone once more
    assert done.keys() >= {lost.name, failed.name, cancelled.name} and "twice: job " in done[lost.name]
    with pytest.raises(Held, match="^4 runs submitted"):  # a user's own command starts anew
        slurm_arrays.execute(first, None, targets)
    assert not state.read_state(lost.workplace)["resubmitted"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_a_full_disk_cannot_write_down_is_not_left_in_the_queue(
    number: int, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the same command, which does not know of it, would submit it again."""
    targets, launcher = plan(tmp_path), Launcher(name="slurm", batch_minutes=0.2)

    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number), "runs/.plans/x.json")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)) as refused:
        patch.setattr(slurm_arrays.plan_files, "write_plan", full)
        slurm_arrays.execute(launcher, None, targets)
    assert error_sentence(refused.value) == f"{os.strerror(number)}: runs/.plans/x.json; nothing was published"
    assert len(calls(tools)) == 1 and calls(tools, "scancel") == [["1"]]
    with pytest.raises(Held, match="^7 runs submitted as 3 arrays, 7 in the queue"):
        slurm_arrays.execute(launcher, None, targets)


def test_a_jobs_script_prepares_its_node_and_asks_for_itself_again_on_75(tools: Path, tmp_path: Path) -> None:
    """Run by bash, with a program in place of this one that prints where it is. Paths hold what bash would read."""
    odd = tmp_path / """my "files" 'of' `id` $(id) \\ 100%"""
    launcher = Launcher(
        name="slurm",
        setup=["export SITE=cuda"],
        scratch=f"{odd}/$SLURM_JOB_ID",
        hf_home="~/hub of ${SITE}",
        wrap="env",
    )
    (tools / "python").write_text('#!/bin/bash\necho "$SITE|$TMPDIR|$HF_HOME|$*"; ls -d "$TMPDIR"; exit $STATUS\n')
    (tools / "python").chmod(0o755)
    script = slurm_arrays.script_of(launcher, ["-m", "pipeline.launch.worker", "a $file"])

    def run(status: int) -> list[str]:
        ids = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "STATUS": str(status)}
        waits = script.replace("sleep 60", "true")  # for Slurm, which ends a job that is asked for again
        environment = {**os.environ, **ids, "HOME": "/home/me"}
        done = subprocess.run(["bash", "-c", waits], env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout.splitlines()

    place = f"{odd}/8"
    assert run(0) == run(1) == [f"cuda|{place}|/home/me/hub of cuda|-m pipeline.launch.worker a $file", place]
    assert not (tools / "calls").exists()
    run(75)
    assert calls(tools, "scontrol") == [["requeue", "7_1"]]


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        ({"setup": ["export HF_TOKEN=hf_x"]}, 0o600), ({"wrap": "env HF_TOKEN=hf_x"}, 0o600),
        ({"options": ["--export=HF_TOKEN=hf_x"]}, 0o600), ({}, 0o644),
    ],
)  # fmt: skip
def test_job_files_with_lines_of_the_user_are_the_owners_alone(
    more: dict[str, Any], mode: int, tools: Path, tmp_path: Path
) -> None:
    """Elements and scripts, that of the command that continues a table too. A group may share the folder."""
    before = os.umask(0o022)
    try:
        with pytest.raises(Held):
            slurm_arrays.execute(Launcher("slurm", **more), ["stage=table", "table=t"], plan(tmp_path))
    finally:
        os.umask(before)
    files = [file for file in (tmp_path / "runs/.slurm").rglob("*") if file.suffix in (".sh", ".jsonl")]
    assert {file.suffix for file in files} == {".sh", ".jsonl"} and len(files) > 3
    assert {file.stat().st_mode & 0o777 for file in files} == {mode}


@pytest.mark.parametrize("line", ["module load nowhere", "exit 3", "source /nowhere/activate", "exit 0"])
def test_a_setup_line_that_fails_ends_the_job_and_is_its_last_word(line: str, tools: Path, tmp_path: Path) -> None:
    script = slurm_arrays.script_of(Launcher(name="slurm", setup=["export A=1", line]), ["-m", "pipeline", "x"])
    log = tmp_path / "log"
    with open(log, "w") as opened:
        assert subprocess.run(["bash", "-c", script], stdout=opened, stderr=opened).returncode == 1
    assert slurm_arrays.last_log_line(log) == f"launcher.setup ended the job at: {line}"


@pytest.mark.parametrize(
    ("log", "failed"),
    [
        ("python: No module named pipeline\n", True),
        ("slurmstepd-n1: error: *** JOB 15 ON n1 CANCELLED AT 2026-11-22T08:50:26 ***\nTerminated\n", False),
        ("*** JOB 5 ON n1 CANCELLED AT 2026-11-22T08:50:26 DUE TO JOB REQUEUE ***\nno python\n", True),
        ("SIGTERM: x\n7 runs: 1 stopped\n", False),
        ("", False),
    ],
)
def test_a_job_that_was_cancelled_did_not_fail(
    log: str, failed: bool, tools: Path, tmp_path: Path, call: Callable[..., SimpleNamespace]
) -> None:
    targets = plan(tmp_path)
    with pytest.raises(Held):
        slurm_arrays.execute(Launcher(name="slurm", batch_minutes=0.2), None, targets)
    run = next(one for one in targets if state.read_state(one.workplace)["job"] == "2_0")
    (tmp_path / "runs/.logs/slurm-2_0.log").write_text(log)
    told = json.loads(call("stage=status", f"runs_dir={tmp_path}/runs", "status.json=true").out)
    (one,) = [one for one in told if one["run"] == run.name]
    gone = f"{slurm_arrays.JOB_LOST} (job 2_0); rerun the same command to submit it again"
    assert one["state"] == ("failed" if failed else "stopped") and (failed or one["detail"] == gone)


def of_8b(tmp_path: Path, *words: str) -> Run:
    return build(compose(["stage=sft", "expert=math", f"runs_dir={tmp_path}/runs", "sft.micro_batch_size=4", *words]))


def test_the_signal_leaves_the_time_that_a_resume_point_takes_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: 8,030,261,248 parameters, fp32 weights and two moments, at 1 GB/s; 156 s are rounded to 60 x 1.25^5."""
    monkeypatch.setattr(slurm_tasks, "write_speed", lambda folder: 1e9)
    full = slurm_tasks.resources_of(
        of_8b(tmp_path, "sft.processes=4", "sft.micro_batch_size=1"), Launcher(name="slurm")
    )
    assert full == slurm_tasks.Resources(gpus=4, cpus=None, lead=183)
    with pytest.raises(PipelineError, match=r"^launcher.time=4:00 is 240 s: a job of math-full-s0-\w+ needs 303 s to"):
        slurm_tasks.resources_of(of_8b(tmp_path), Launcher(name="slurm", time="4:00"))
    lora = slurm_tasks.resources_of(of_8b(tmp_path, "sft=lora", "threads=8"), Launcher(name="slurm", time="4:00"))
    assert lora == slurm_tasks.Resources(gpus=1, cpus=8, lead=75)  # 12 bytes x rank 64 x 2,621,440


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("2:30", 150), ("4:00", None), ("1-02:03:04", None), ("0:00", 0),
        ("UNLIMITED", None), ("INVALID", None), ("NOT_SET", None), ("", None),
    ],
)  # fmt: skip
def test_the_limit_of_a_submitted_job_is_asked_for(
    answer: str, refused: int | None, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its partition, for one. By hand: 120 s to start, 60 s for the signal and 34 s to write 96 GB at 2.8 GB/s,
    rounded to 60 x 1.25^3."""
    monkeypatch.setattr(slurm_tasks, "write_speed", lambda folder: 2.8e9)
    (tools / "squeue").write_text(
        f"#!/bin/sh\necho squeue $@ >> {tools}/calls; echo 12:00\ncase $* in *%L*) echo 'pipeline:{answer}' ;; esac\n"
    )
    run = of_8b(tmp_path)
    data = run.parents["data"]
    assert isinstance(data, Run)
    told = rf"^the time limit of job 2 is {refused} s: a job of {run.name} needs 237 s to start and to write one resume"
    with pytest.raises(Held if refused is None else PipelineError, match="^2 runs" if refused is None else told):
        slurm_arrays.execute(Launcher(name="slurm"), None, [run])
    asked = [words for words in calls(tools, "squeue") if "--format=pipeline:%L" in words]
    assert [words[1] for words in asked] == ["--jobs=2"]  # of the training alone
    assert calls(tools, "scancel") == ([] if refused is None else [["2"]])
    assert ("job" in state.read_state(run.workplace)) == (refused is None) and state.read_state(data.workplace)[
        "job"
    ] == "1_0"


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("30", 1800), ("2:30", 150), ("01:00:00", 3600), ("2-0", 172800), ("1-02:30", 95400), ("1-00:00:05", 86405)],
)
def test_time_limits_are_read_as_sbatch_does(limit: str, seconds: float) -> None:
    assert slurm_commands.parse_time_limit(limit) == seconds


# ---------------------------------------------------------------------------------------------------- a task


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Make the runs of one line as a task of an array does; `restarts` times it was asked for again."""

    def make(*runs: Run, requeues: int = 20, restarts: int = 0) -> int:
        file = tmp_path / "elements.jsonl"
        file.write_text(
            "{}\n" + json.dumps({"requeues": requeues, "elements": [element_of(run) for run in runs]}) + "\n"
        )
        for key, value in (("ARRAY_JOB_ID", 7), ("ARRAY_TASK_ID", 1), ("JOB_ID", 8), ("RESTART_COUNT", restarts)):
            monkeypatch.setenv(f"SLURM_{key}", str(value))
        return worker.run_array_task(file)

    return make


def test_a_task_checks_the_manifests_of_parents(tools: Path, task: Callable[..., int], tmp_path: Path) -> None:
    """One that is still to come asks for the task again; one that failed fails what depends on it alone."""
    parent, other = a_run(tmp_path / "runs", label="parent", seed=1), a_run(tmp_path / "runs", label="other", seed=2)
    child = a_run(tmp_path / "runs", {"data_root": parent}, label="child")
    make_once(other, writes())
    parent.workplace.mkdir(parents=True)
    state.update_state(parent.workplace, state="waiting", job="5_0")
    (tools / "queue").write_text("5_0\n")
    assert task(child, other) == 75
    assert state.read_state(child.workplace)["last_line"] == f"its parent {parent.name} is not finished yet"
    assert task(parent) == 1  # of a source that is nowhere
    assert "is on no hub" in state.read_state(parent.workplace)["last_line"]
    assert task(child, other) == 1
    told = state.read_state(child.workplace)
    assert (told["state"], told["last_line"]) == ("blocked", f"its parent {parent.name} was not made")
    state.update_state(
        parent.workplace, state="running", job="5_0"
    )  # of a job that was killed, and is not in the queue
    (tools / "queue").write_text("")
    assert task(child, other) == 1
    assert (tmp_path / f"runs/.logs/child-{child.hash[:12]}.log").is_file()


def asked_to_stop(number: signal.Signals) -> Any:
    """A stage that Slurm asks to stop before it has done anything."""

    def stage(*_: Any) -> dict[str, Any]:
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")

    return stage


def test_a_task_that_gets_no_further_is_not_requeued(
    tools: Path,
    task: Callable[..., int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three attempts that the time limit ended. A preemption is none; nor is one that got further."""
    run = a_run(tmp_path / "runs")
    monkeypatch.setattr(in_process, "stage_function", lambda run: asked_to_stop(signal.SIGTERM))
    assert [task(run, restarts=restarts) for restarts in range(5)] == [75] * 5
    monkeypatch.setattr(in_process, "stage_function", lambda run: asked_to_stop(signal.SIGUSR1))
    assert [task(run, restarts=restarts) for restarts in (5, 6)] == [75, 75]
    assert state.read_state(run.workplace)["stops"] == [None, None]
    with pytest.raises(SystemExit) as ended:
        task(run, restarts=7)
    assert ended.value.code == 1
    assert "3 attempts ended before its end without getting further: give a longer time limit" in capfd.readouterr().err
    told = state.read_state(run.workplace)
    assert told["state"] == "failed" and told["last_line"].endswith("it is not requeued")
    further = iter(range(9))
    monkeypatch.setattr(attempts, "last_step", lambda run: next(further))
    state.update_state(run.workplace, stops=[1, 1], state="stopped")
    assert task(run, restarts=3) == 75
    assert task(run, restarts=3, requeues=3) == 1
    assert "launcher.requeues=3 are used up" in capfd.readouterr().err


def test_a_training_whose_limit_comes_before_its_first_step_is_reported_once(
    tools: Path,
    task: Callable[..., int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As slurm/one_gpu.sbatch with --time=2, whose signal comes 15 minutes before the limit: while it imports."""
    run = of_8b(tmp_path)
    (tools / "squeue").write_text("#!/bin/sh\necho a banner of 3:00; echo pipeline:1:15\n")
    monkeypatch.setenv("PIPELINE_SIGNALLED", "SIGUSR1")
    monkeypatch.setattr(worker, "folder_of", lambda *_: tmp_path)
    monkeypatch.setattr(worker, "run_of", lambda element: run)
    with pytest.raises(SystemExit) as ended:
        task(run)
    assert ended.value.code == 1
    told = "its first resume point was not reached when the job was asked to stop, 75 s before its time limit: give a l"
    assert told in capfd.readouterr().err and state.read_state(run.workplace)["last_line"].startswith(told)
    (run.workplace / "state.json").unlink()
    monkeypatch.setenv("PIPELINE_SIGNALLED", "SIGUSR1")  # the same of a command, whose first run is the data's
    with handle_signals(), pytest.raises(SystemExit) as ended:
        execute_here([run])
    assert ended.value.code == 1 and state.read_state(run.workplace)["last_line"].startswith(told)


# ---------------------------------------------------------------------------------------------------- status


def test_status_tells_of_each_run(tools: Path, tmp_path: Path, call: Callable[..., SimpleNamespace]) -> None:
    runs_dir = tmp_path / "runs"
    done, failing, waits = (a_run(runs_dir, label=label, seed=1) for label in ("done", "failing", "waits"))
    failing, waits = a_run(runs_dir, label="failing", seed=2), a_run(runs_dir, label="waits", seed=3)
    blocked = a_run(runs_dir, {"data_root": failing}, label="blocked")
    make_once(done, writes())
    with pytest.raises(RuntimeError):
        make_once(failing, lambda *_: (_ for _ in ()).throw(RuntimeError("no room")))
    slurm_arrays.plan_files.write_plan("mine", [done, failing, waits, blocked], {waits.hash: "5_1"})
    (tools / "queue").write_text("5_1\n")

    def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        state.update_state(run.workplace, step=30, steps=90, seconds_a_step=2.5)
        told = json.loads(call("stage=status", f"runs_dir={runs_dir}", "status.json=true").out)
        found.update({one["run"]: one for one in told})
        return {}

    found: dict[str, Any] = {}
    running = a_run(runs_dir, label="running", seed=4)
    make_once(running, stage)
    states = {name.rpartition("-")[0]: (one["state"], one["detail"]) for name, one in found.items()}
    assert states["done"][0] == "finished" and states["done"][1].startswith("began 20")
    assert states["failing"] == ("failed", "no room")
    assert states["waits"] == ("waiting", "job 5_1") and states["blocked"] == ("blocked", f"by {failing.name}")
    assert states["running"][0] == "running" and ", step 30 of 90, about 150 s left" in states["running"][1]
    one = found[running.name]
    assert (one["step"], one["steps"]) == (30, 90) and one["seconds_left"] == 150
    (tmp_path / "empty").mkdir()
    none = call("stage=status", f"runs_dir={tmp_path}/empty")
    assert none.out == f"no run was computed or submitted in runs_dir={tmp_path}/empty yet\n"
    shown = call("stage=status", f"runs_dir={runs_dir}").out
    assert "2 finished, 1 failed, 1 waiting, 1 blocked" in shown
    with pytest.raises(SystemExit):
        make_once(waits, lambda *_: (_ for _ in ()).throw(SystemExit(75)))
    (tools / "queue").write_text("")
    shown = call("stage=status", f"runs_dir={runs_dir}").out
    assert (
        "stopped: it received a signal; rerun the same command to resume; stage=clean clean.hours=0 "
        "clean.dry_run=false deletes it and other unfinished work" in shown
    )
    state.update_state(waits.workplace, state="waiting", job="5_1")
    (tools / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert "waiting: job 5_1 as submitted; squeue does" in call("stage=status", f"runs_dir={runs_dir}").out


@pytest.mark.parametrize(
    "text", ["", '{"name": "x", "runs": {"a": ', '{"name": "x"}', '{"runs": {"a": {"name": "x"}}}']
)
def test_a_plan_that_cannot_be_read_is_an_error(
    text: str, tools: Path, tmp_path: Path, call: Callable[..., SimpleNamespace]
) -> None:
    """Without it, jobs that are queued would be submitted twice."""
    targets, launcher = plan(tmp_path), Launcher(name="slurm", batch_minutes=0.2)
    with pytest.raises(Held):
        slurm_arrays.execute(launcher, None, targets)
    (file,) = (tmp_path / "runs/.plans").glob("*.json")
    file.write_text(text)
    with pytest.raises(PipelineError, match=r"\.json is not readable \(.*cancel them, then remove the file and rerun"):
        slurm_arrays.execute(launcher, None, targets)
    assert len(calls(tools)) == 3
    assert "is not readable" in call("stage=status", f"runs_dir={tmp_path}/runs").err
