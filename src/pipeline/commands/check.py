"""Stage check: whether this node can do what a study needs, by short runs of the stages themselves.

Each line is a command that a user could type, in a process of its own, so that a crash, a hang or exhausted memory is
the failure of one line. Rows are made up, and weights are random at the model's true shape unless the model is on this
disk: nothing is fetched. The record, runs_dir/check.json, has no paths and no names of users and hosts.
"""

from __future__ import annotations

import getpass
import json
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.commands.check_lines import EXAMPLE, Checking
from pipeline.config.stages import CheckStage
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import driver_version
from pipeline.files import added_conf, write_atomically
from pipeline.hub.addresses import without_credentials
from pipeline.launch.slurm_arrays import DRY_RUN, FOLDER, script_of, show_dry_run, submit_script
from pipeline.launch.slurm_commands import check_installed, queued_jobs
from pipeline.launch.slurm_tasks import Resources
from pipeline.progress import say
from pipeline.runs.disk import check_writable
from pipeline.runs.lease import hold_lease
from pipeline.runs.provenance import git_state, machine_facts, package_versions, recorded_environment
from pipeline.text import align_columns, pluralize

RECORD = "check.json"
READ = ("model", "sft", "recipe", "partition", "eval", "hardware", "seed", "threads")  # of the command's words
SET = {  # what the check sets itself -> what may be given
    "sft": "check.methods=[full,lora]", "eval": "eval.backend and other knobs of eval", "eval.limit": "nothing",
    "sft.steps": "nothing", "sft.warmup_steps": "nothing", "sft.packing": "nothing", "sft.epochs": "nothing",
    "sft.resume_minutes": "nothing",
}  # fmt: skip


def check(config: CheckStage) -> str:
    """Check this node, or with launcher=slurm the node of a job. Returns the lines and the record's path as text.

    Raises:
        PipelineError: a key that the check does not read, or lines that are wrong (with the text).
        Held: launcher=slurm: the job is in the queue.
    """
    runs_dir = Path(config.runs_dir)
    words = read_words(config)
    plan = Checking(config, words, runs_dir / ".check")
    plan.compose_all()
    check_writable(runs_dir)
    if (free := shutil.disk_usage(runs_dir).free) < plan.disk():
        raise PipelineError(
            f"stage=check needs {plan.disk() / 1e9:.0f} GB of disk, and runs_dir={runs_dir} has {free / 1e9:.0f} free: "
            "give another runs_dir, or check.methods=[lora]"
        )
    minutes = sum(plan.estimate().values()) / 60
    say(f"stage=check of model={plan.model.name}: about {minutes:.0f} minutes and {plan.disk() / 1e9:.1f} GB of disk")
    for name, seconds in plan.estimate().items():
        say(f"  {name}: about {seconds:.0f} s")
    if config.launcher.name == "slurm":
        submit(config, plan)
    with hold_lease(plan.folder / "lease", "stage=check"):
        begun = time.perf_counter()
        lines = plan.run()
        record = {
            "command": ["stage=check", *words], "lines": [asdict(line) for line in lines],
            "estimated_minutes": round(minutes, 1), "minutes": round((time.perf_counter() - begun) / 60, 1),
            "driver": driver_version(), "versions": package_versions(),
            "machine": machine_facts(), "environment": recorded_environment(), "git": git_state(),
        }  # fmt: skip
        write_atomically(runs_dir / RECORD, json.dumps(anonymous(record), indent=1) + "\n")
    text = "\n".join([*align_columns([(line.name, line.state, line.text) for line in lines]), str(runs_dir / RECORD)])
    if wrong := [line.name for line in lines if line.state == "wrong"]:
        raise PipelineError(
            f"{pluralize(len(wrong), 'line')} of {len(lines)} wrong: {', '.join(wrong)}; {runs_dir / RECORD} has the "
            "details, without paths or names, to attach to a report",
            output=text,
        )
    return text


def read_words(config: CheckStage) -> list[str]:
    """The command's words for its trainings and its evaluation. Raises PipelineError for one that is not read."""
    words = (config.command or [])[len(EXAMPLE) :]
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key.partition(".")[0] not in READ:
            raise PipelineError(f"stage=check does not read {word}: leave it out; it reads {', '.join(READ)}, check")
        if key in SET:
            raise PipelineError(f"stage=check sets {key} itself, got {word}: leave it out; give {SET[key]}")
    return words


def submit(config: CheckStage, plan: Checking) -> None:
    """Submit the same command as one job, with the GPUs of its largest training. Raises Held, with the job."""
    dry_run = config.launcher.dry_run
    folder = Path(config.runs_dir) / (DRY_RUN if dry_run else FOLDER)
    if dry_run:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        check_installed("squeue", "sbatch")
    folder.mkdir(parents=True, exist_ok=True)
    scripts = {Path(script): job for job, script in queued_jobs().items()} if not dry_run else {}
    own = (job for script, job in scripts.items() if script.parent == folder.resolve() and script.match("check-*.sh"))
    job = next(own, None)
    if job is None:
        words = ["stage=check", f"runs_dir={config.runs_dir}", f"check.methods=[{','.join(config.check.methods)}]"]
        processes, threads = plan.sft.processes, plan.threads
        gpus = processes if config.launcher.gpus is None else min(processes, config.launcher.gpus)
        resources = Resources(gpus, threads * processes if threads else None, 60)
        folders = [f"--config-dir={path}" for path in added_conf()]
        script = script_of(config.launcher, ["-m", "pipeline", *words, *plan.words, *folders], "")
        file = folder / f"check-{time.time_ns()}.sh"
        job = submit_script(config.launcher, file, script, resources, ["--job-name", "check"], "%j")
    if dry_run:
        show_dry_run(folder)
    raise Held(
        f"job {job} is in the queue: its lines will be in {config.runs_dir}/.logs/slurm-{job}.log, its record in "
        f"{Path(config.runs_dir) / RECORD}"
    )


# ---------------------------------------------------------------------------------------------------- the record


def anonymous(value: Any) -> Any:
    """The record without credentials, folders, and names of this user and host; the last part of a path stays."""
    if isinstance(value, dict):
        return {key: anonymous(inner) for key, inner in value.items() if key != "uuid"}
    if isinstance(value, list):
        return [anonymous(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = re.sub(r"(?<![\w.])(?:\.{0,2}|~)/(?:[^\s/'\",;:()\[\]]+/)*", "", without_credentials(value))
    for name in personal_names():
        text = re.sub(rf"\b{re.escape(name)}\b", "…", text)
    return text


def personal_names() -> Iterator[str]:
    """This user and this host, as far as they are names."""
    yield socket.gethostname()
    with suppress(Exception):  # a user without an entry
        yield getpass.getuser()
