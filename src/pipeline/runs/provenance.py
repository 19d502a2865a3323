"""The environment of a run: versions, machine, commit. Recorded in manifests, not hashed."""

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

DISTRIBUTION = (  # its name for pip; the imported package and the command are `pipeline`
    "cross-lingual-merging"
)
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
    """Version of an installed distribution; "absent" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def environment_for(python: str | None) -> dict[str, str]:
    """Environment variables of a process in another Python (None: this one): without this one's
    packages there.
    """
    found = {}
    for name, value in os.environ.items():
        if not (python and name == "PYTHONPATH"):
            found[name] = value
    return found


def machine_facts(earlier: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """System, processor, cores, threads and device of this process; a fact that differed in the
    attempts of a run before, which it resumed from, as "1, then 2".
    """
    facts: dict[str, Any] = {
        "system": platform.system(),
        "processor": processor_model(),
        "cores": os.cpu_count(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts["device"] = torch.cuda.get_device_name()
        else:
            facts["device"] = "cpu"
    for key in facts:
        values = dict.fromkeys(attempt[key] for attempt in (*earlier, facts) if key in attempt)
        if len(values) > 1:
            facts[key] = ", then ".join(map(str, values))
    return facts


def processor_model() -> str:
    """Return the processor's model, as rounding differs between models; the architecture if the
    model is unknown.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def recorded_environment() -> dict[str, str]:
    """Environment variables that affect results, by an allow list: others may hold secrets."""
    found = {}
    for key in ENVIRONMENT:
        if key in os.environ:
            found[key] = os.environ[key]
    return found


@cache
def git_state() -> dict[str, Any]:
    """Return the commit, and whether anything but results/ differs from it; null outside a
    checkout.

    Asked once: a process computes with the code that it has imported, and git takes as long as a
    small score.
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
