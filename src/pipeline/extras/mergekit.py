"""The merge method mergekit (Goddard et al., 2024), which runs mergekit on a YAML file."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered_references
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.files import read_yaml
from pipeline.models.checkpoint import is_adapter
from pipeline.runs.provenance import environment_for
from pipeline.text import one_line

NOT_READ = ("dtype", "files_from", "form")  # keys of other merges
GENERATION_CONFIG = "generation_config.json"  # mergekit copies it only next to a tokenizer
VERSION = "import importlib.metadata as metadata; print(metadata.version('mergekit'))"


@dataclass
class Mergekit(Merge):
    """The checkpoint that mergekit writes for a YAML `file`.

    The file names its models by their place in merge.experts (0, 1, ...) and `base`.
    """

    method: str = "mergekit"
    file: str = knob(hashed=False)  # its content is hashed
    experts: list[str] = knob(run=True)
    seed: int = knob(0, ge=0)  # for random methods, as mergekit-yaml --random-seed
    # path of a Python with mergekit; null: the running Python
    mergekit_python: str | None = knob(None, hashed=False)

    fewest = 1
    writes_folder = True

    @property
    def config(self) -> dict[str, Any]:
        """The current content of the file."""
        return read_config(Path(self.file), len(self.experts))

    def references(self) -> References:
        return numbered_references(self.experts)

    def needs_base(self) -> bool:
        return "base" in models_of(self.config)

    def exact_for_adapters(self) -> bool:
        return False

    def result_dtype(self) -> str | None:
        return self.config.get("out_dtype") or self.config.get("dtype")

    def beyond_knobs(self) -> dict[str, Any]:
        """Return the content of the file and mergekit's version."""
        version = mergekit_version(self.mergekit_python)
        return {"file": self.config, "packages": {self.method: f"mergekit {version}"}}

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        for key in NOT_READ:
            value = getattr(self, key)
            if value not in (None, "auto"):
                raise PipelineError(
                    f"merge.{key}={value} is not read by merge=mergekit. Leave it out, and set"
                    " out_dtype or tokenizer_source in merge.file."
                )
        mergekit_version(self.mergekit_python)

    def label(self, partition: Partition | None, layers: int | None) -> str:
        return f"mergekit-{self.config['merge_method']}"

    def described(self, partition: Partition | None, layers: int | None) -> str:
        return f"mergekit's {self.config['merge_method']} by {Path(self.file).name}"

    def write_folder(self, sources: Mapping[str, Path], folder: Path, threads: int | None) -> None:
        """Run mergekit-yaml on the file.

        Its module is run, because the command may be installed elsewhere than its Python.
        """
        config = self.config
        donor = sources[config.get("base_model") or models_of(config)[0]]
        python = self.mergekit_python
        executable = os.path.abspath(shutil.which(python or sys.executable) or "")
        with TemporaryDirectory(prefix="mergekit-") as name:
            place = Path(name)
            names = {}
            for role, source in sources.items():
                # mergekit reads + and @ in a path as an adapter and a revision
                (place / role).symlink_to(source.resolve(), target_is_directory=True)
                names[role] = f"./base+./{role}" if is_adapter(source) else f"./{role}"
            for node, key in model_entries(config):
                node[key] = names[node[key]]
            (place / "merge.json").write_text(json.dumps(config))  # JSON is YAML
            words = [executable, "-m", "mergekit.scripts.run_yaml", "merge.json"]
            words += [str(folder.resolve()), "--quiet", "--no-write-model-card"]
            words += ["--random-seed", str(self.seed), "--device", "cpu"]
            words += ["--lora-merge-cache", "adapted", "--lora-merge-dtype", "float32"]
            if threads:
                words += ["--num-threads", str(threads)]
            process = subprocess.run(
                words, env=environment_for(python), cwd=place, capture_output=True, text=True
            )
        if process.returncode:
            reason = one_line(process.stderr)[-300:] or f"exit status {process.returncode}"
            raise PipelineError(
                f"merge.file={self.file}: mergekit stopped ({reason}). Correct the file."
            )
        for source in (donor, sources.get("base", donor)):  # an adapter lacks files of its base
            file = source / GENERATION_CONFIG
            if file.is_file() and not (folder / file.name).exists():
                shutil.copy(file, folder)


# --- configuration ---


def read_config(file: Path, experts: int) -> dict[str, Any]:
    """Return mergekit's configuration as plain data, with the names of its models as text.

    Args:
        file: the YAML file.
        experts: the number of experts.

    Raises:
        PipelineError: the file cannot be read, is not a configuration, or names other models than
            the experts and base.
    """
    place = f"merge.file={file}"
    try:
        config = read_yaml(file, place)
    except OSError as error:
        raise PipelineError(
            f"{place} cannot be read ({error.strerror}). Give a YAML file."
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("merge_method"), str):
        raise PipelineError(
            f"{place} is not a configuration of mergekit, because it has no merge_method. Add it."
        )
    roles = [*map(str, range(experts)), "base"]
    for node, key in model_entries(config):
        node[key] = str(node[key])
        if node[key] not in roles:
            raise PipelineError(
                f"{place}: the model {node[key]} is not among {', '.join(roles)}. Name the models"
                " by their place in merge.experts."
            )
    return config


def model_entries(node: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the mapping and the key of each model in a configuration, in their order."""
    if isinstance(node, list):
        for inner in node:
            yield from model_entries(inner)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("model", "base_model") and value is not None:
                yield node, key
            elif key != "parameters":
                yield from model_entries(value)


def models_of(config: dict[str, Any]) -> list[str]:
    return [node[key] for node, key in model_entries(config)]


# --- version ---


@functools.cache
def mergekit_version(python: str | None) -> str:
    """Return the version of mergekit in a Python, by default the running one.

    Raises:
        PipelineError: the Python cannot be run, or has no mergekit.
    """
    executable = python or sys.executable
    try:
        process = subprocess.run(
            [executable, "-c", VERSION],
            env=environment_for(python),
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise PipelineError(
            f"merge=mergekit needs mergekit, which {executable} does not have. Run pip install"
            " 'cross-lingual-merging[mergekit]', or set merge.mergekit_python=PATH of a Python with"
            " mergekit."
        ) from error
    return process.stdout.strip()
