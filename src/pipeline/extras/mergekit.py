"""The merge method mergekit (Goddard et al., 2024), which runs mergekit on a YAML file."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
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

# Keys that mergekit does not read -> what to do instead
NOT_READ = {
    "dtype": "Set out_dtype in merge.file.",
    "files_from": "Set tokenizer_source in merge.file.",
    "form": "Leave it out.",
}
# Files of a model that mergekit does not copy
NOT_COPIED = ("generation_config.json", "chat_template.jinja")
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
        return "base" in models_in(self.config)

    def exact_for_adapters(self) -> bool:
        return False

    def result_dtype(self) -> str | None:
        return self.config.get("out_dtype") or self.config.get("dtype")

    def beyond_knobs(self) -> dict[str, Any]:
        """Return the content of the file and mergekit's version."""
        version = mergekit_version(self.mergekit_python)
        return {"file": self.config, "packages": {self.method: f"mergekit {version}"}}

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        for key, instead in NOT_READ.items():
            value = getattr(self, key)
            if value not in (None, "auto"):
                raise PipelineError(f"merge.{key}={value} is not read by merge=mergekit. {instead}")
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
        python = self.mergekit_python
        executable = sys.executable
        if python:
            executable = os.path.abspath(shutil.which(python) or python)
        with TemporaryDirectory(prefix="mergekit-") as name:
            place = Path(name)
            names = {role: link_source(role, sources, place) for role in sources}
            named = replace_models(config, lambda model: names[model])
            (place / "merge.json").write_text(json.dumps(named))  # JSON is YAML
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
        if "chat_template" in config:
            return
        donor = sources[config.get("base_model") or models_in(config)[0]]
        for source in (donor, sources.get("base", donor)):  # an adapter lacks files of its base
            for file in NOT_COPIED:
                if (source / file).is_file() and not (folder / file).exists():
                    shutil.copyfile(source / file, folder / file)


def link_source(role: str, sources: Mapping[str, Path], place: Path) -> str:
    """Link a model into the folder where mergekit runs, and return its name for mergekit.

    mergekit reads + and @ in a path as an adapter and a revision, so the model's own path cannot be
    used.
    """
    (place / f"model_{role}").symlink_to(sources[role].resolve(), target_is_directory=True)
    if is_adapter(sources[role]):
        return f"./model_base+./model_{role}"
    return f"./model_{role}"


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
    named: dict[str, Any] = replace_models(config, str)
    places = [*map(str, range(experts)), "base"]
    for model in models_in(named):
        if model not in places:
            raise PipelineError(
                f"{place}: the model {model} is not among {', '.join(places)}. Name the models by"
                " their place in merge.experts."
            )
    return named


def replace_models(node: Any, name: Callable[[Any], Any]) -> Any:
    """Return plain data with name(model) in place of each model."""
    if isinstance(node, list):
        return [replace_models(inner, name) for inner in node]
    if not isinstance(node, dict):
        return node
    replaced = {}
    for key, value in node.items():
        if key == "parameters" or value is None:
            replaced[key] = value
        elif key in ("model", "base_model"):
            replaced[key] = name(value)
        else:
            replaced[key] = replace_models(value, name)
    return replaced


def models_in(node: Any) -> list[Any]:
    """Return the models of plain data in their order, with repetitions."""
    models: list[Any] = []
    replace_models(node, models.append)
    return models


# --- version ---


@functools.cache
def mergekit_version(python: str | None) -> str:
    """Return the version of mergekit in a Python, by default the running one.

    Raises:
        PipelineError: the Python cannot be run, or has no mergekit.
    """
    words = [python or sys.executable, "-c", VERSION]
    try:
        process = subprocess.run(words, env=environment_for(python), capture_output=True, text=True)
    except OSError as error:
        raise PipelineError(
            f"merge.mergekit_python={python} cannot be run ({error.strerror}). Give the path of a"
            " Python with mergekit."
        ) from error
    if process.returncode:
        raise PipelineError(
            f"merge=mergekit needs mergekit, which {words[0]} does not have. Run pip install"
            " 'cross-lingual-merging[mergekit]', or set merge.mergekit_python=PATH of a Python"
            " with mergekit."
        )
    return process.stdout.strip()
