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
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pipeline.commands.check_lines import EXAMPLE, Checking
from pipeline.config.overrides import typed_in
from pipeline.config.stages import CheckStage
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import driver_version
from pipeline.files import config_dir_flags, write_atomically
from pipeline.hub.addresses import without_credentials
from pipeline.launch.resources import Resources
from pipeline.launch.slurm import DRY_RUN, FOLDER, script_of, show_dry_run, submit_script
from pipeline.launch.slurm_commands import submitted_as
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
    runs_dir, overrides = config.runs_path, read_words(config)
    plan = Checking(config, overrides, runs_dir / ".check")
    check_writable(runs_dir)
    free = shutil.disk_usage(runs_dir).free
    if free < (needed := plan.disk()):
        raise PipelineError(
            f"stage=check needs {needed / 1e9:.0f} GB of disk, and runs_dir={runs_dir} has {free / 1e9:.0f} free: "
            "give another runs_dir, or check.methods=[lora]"
        )
    say(f"stage=check of model={plan.model.name}: {needed / 1e9:.1f} GB of disk")
    if config.launcher.name == "slurm":
        submit(config, plan, overrides)
    with hold_lease(plan.folder / "lease", "stage=check"):
        begun = time.perf_counter()
        lines = plan.run()
        record = {
            "command": ["stage=check", *overrides], "lines": [asdict(line) for line in lines],
            "minutes": round((time.perf_counter() - begun) / 60, 1),
            "driver": driver_version(), "versions": package_versions(),
            "machine": machine_facts(), "environment": recorded_environment(), "git": git_state(),
        }  # fmt: skip
        write_atomically(runs_dir / RECORD, anonymous(record) + "\n")
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
    overrides = (config.command or [])[len(EXAMPLE) :]
    for key, value in typed_in(overrides).items():
        if key.partition(".")[0] not in READ:
            raise PipelineError(
                f"stage=check does not read {key}={value}: leave it out; it reads {', '.join(READ)}, check"
            )
        if key in SET:
            raise PipelineError(f"stage=check sets {key} itself, got {key}={value}: leave it out; give {SET[key]}")
    return overrides


def submit(config: CheckStage, plan: Checking, overrides: list[str]) -> None:
    """Submit the same command as one job, with the GPUs of its largest training. Raises Held, with the job."""
    launcher, threads, processes = config.launcher, plan.threads, plan.sft.processes
    script = (config.runs_path / (DRY_RUN if launcher.dry_run else FOLDER) / "check.sh").resolve()
    job = None if launcher.dry_run else submitted_as(script)
    if job is None:
        if launcher.dry_run:
            shutil.rmtree(script.parent, ignore_errors=True)
        script.parent.mkdir(parents=True, exist_ok=True)
        shared = ["stage=check", f"runs_dir={config.runs_dir}", f"check.methods=[{','.join(config.check.methods)}]"]
        gpus = processes if launcher.gpus is None else min(processes, launcher.gpus)
        resources = Resources(gpus, threads * processes if threads else None, 60)
        text = script_of(launcher, ["-m", "pipeline", *shared, *overrides, *config_dir_flags()], "")
        job = submit_script(launcher, config.runs_path, script, text, resources, ["--job-name", "check"], "%j")
    if launcher.dry_run:
        show_dry_run(script.parent)
    record, log = config.runs_path / RECORD, f"{config.runs_dir}/.logs/slurm-{job}.log"
    raise Held(f"job {job} is in the queue: its lines will be in {log}, its record in {record}")


# ---------------------------------------------------------------------------------------------------- the record


def anonymous(record: Any) -> str:
    """The record as JSON without credentials, folders, ids of devices, and names of this user and host; the last part
    of a path stays."""
    text = json.dumps(without_credentials(record), indent=1)
    text = re.sub(
        r"(?<![\w.])(?:\.{0,2}|~)/(?:[^\s/'\",;:()\[\]]+/)*", "", re.sub(r'"uuid": ".*?"', '"uuid": null', text)
    )
    names = [socket.gethostname()]
    with suppress(Exception):  # a user without an entry
        names.append(getpass.getuser())
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", "…", text)
