"""Where a run was made: versions, machine, commit. Recorded in manifests, not hashed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "cross-lingual-merging"  # as pip knows it; the package that is imported and the command are `pipeline`
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


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def version(package: str) -> str:
    """That of an installed distribution; "absent" of another."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {"system": platform.system(), "processor": processor(), "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        facts["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return facts


def processor() -> str:
    """Its model, as rounding differs from one to another; where the system tells none, its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def environment() -> dict[str, str]:
    """What of the environment bears on results, by white list: the rest may hold secrets."""
    return {key: os.environ[key] for key in ENVIRONMENT if key in os.environ}


def git_state() -> dict[str, Any]:
    """The commit, and whether anything but results/ differs from it; null outside a checkout."""
    source_folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=source_folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) not in source_folder.parents or not git("ls-files", __file__):
            return {"commit": None, "dirty": None}
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)results")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
