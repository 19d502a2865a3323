"""The environment of a run: versions, machine, commit. It is recorded in manifests, not hashed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "cross-lingual-merging"  # for pip; the package and the command are `pipeline`
PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "lm-eval",
    "safetensors",
    "tokenizers",
    "numpy",
    "torchao",
)
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "SLURM_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
)


def package_versions() -> dict[str, str]:
    return {"python": platform.python_version(), **_installed_versions()}


@cache
def _installed_versions() -> dict[str, str]:
    return {package: package_version(package) for package in PACKAGES}


def package_version(package: str) -> str:
    """Return the version of an installed distribution, or "absent"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def environment_for(python: str | None) -> dict[str, str]:
    """Return the environment variables of a process in another Python (None: this one).

    In another Python, the packages of this one are left out.
    """
    variables = dict(os.environ)
    if python:
        variables.pop("PYTHONPATH", None)
    return variables


def machine_facts(earlier: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return system, processor, cores, threads and device of this process.

    A fact that differed in an earlier attempt is written as "1, then 2".

    `earlier` has the facts of the attempts that the run resumed from.
    """
    facts: dict[str, Any] = {
        "system": platform.system(),
        "processor": processor_model(),
        "cores": os.cpu_count(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        facts["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for key in facts:
        values: dict[Any, None] = {}
        for attempt in (*earlier, facts):
            if key in attempt:
                values[attempt[key]] = None
        if len(values) > 1:
            facts[key] = ", then ".join(map(str, values))
    return facts


def processor_model() -> str:
    """Return the processor's model, or the architecture if the model is unknown.

    It is recorded because rounding differs between models.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def recorded_environment() -> dict[str, str]:
    """Return environment variables that affect results.

    An allow list decides, because other variables may be secrets.
    """
    return {key: os.environ[key] for key in ENVIRONMENT if key in os.environ}


@cache
def git_state() -> dict[str, Any]:
    """Return the commit, and whether files outside results/ differ; both null without a checkout.

    Cached: a process computes with the code that it has imported, and git takes as long as a small
    score.
    """
    source_folder = Path(__file__).parent

    def run_git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=source_folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        run_git("ls-files", "--error-unmatch", __file__)
        changes = run_git(
            "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)results"
        )
        return {"commit": run_git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
