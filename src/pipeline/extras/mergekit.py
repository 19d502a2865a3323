"""Any method of mergekit (Goddard et al., 2024): run mergekit on a YAML file, and use the folder
that it writes.
"""

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

NOT_READ = {
    "dtype": "set out_dtype in merge.file",
    "files_from": "set tokenizer_source in merge.file",
    "form": "",
}
NOT_COPIED = (
    "generation_config.json",
    "chat_template.jinja",
)  # files of a model that mergekit leaves out
VERSION = "import importlib.metadata as metadata; print(metadata.version('mergekit'))"


@dataclass
class Mergekit(Merge):
    """The checkpoint that mergekit writes for its YAML `file`.

    The models in the file are the places in merge.experts (0, 1, ...) and `base`.
    """

    method: str = "mergekit"
    file: str = knob(hashed=False)  # its content is hashed
    experts: list[str] = knob(run=True)
    seed: int = knob(0, ge=0)  # of its random methods, as mergekit-yaml --random-seed
    mergekit_python: str | None = knob(
        None, hashed=False
    )  # path of a Python that has mergekit; null: this one

    fewest = 1
    writes_folder = True

    @property
    def config(self) -> dict[str, Any]:
        """The content of the file, as it is now."""
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
                raise PipelineError(
                    f"merge.{key}={value} is not read by merge=mergekit."
                    f" {instead or 'Leave it out'}."
                )
        mergekit_version(self.mergekit_python)

    def label(self, partition: Partition | None, layers: int | None) -> str:
        return f"mergekit-{self.config['merge_method']}"

    def described(self, partition: Partition | None, layers: int | None) -> str:
        return f"mergekit's {self.config['merge_method']} by {Path(self.file).name}"

    def write_folder(self, sources: Mapping[str, Path], folder: Path, threads: int | None) -> None:
        """Run `mergekit-yaml` on the file.

        The command's module is used, because the command may be installed elsewhere than beside its
        Python.
        """
        config = self.config
        python = self.mergekit_python
        executable = os.path.abspath((shutil.which(python) or python) if python else sys.executable)
        with TemporaryDirectory(prefix="mergekit-") as name:
            place = Path(name)
            names = {role: link_source(role, sources, place) for role in sources}
            named = replace_models(config, lambda model: names[model])
            (place / "merge.json").write_text(json.dumps(named))  # JSON is YAML
            words = [
                executable,
                "-m",
                "mergekit.scripts.run_yaml",
                "merge.json",
                str(folder.resolve()),
                "--quiet",
            ]
            words += ["--no-write-model-card", "--random-seed", str(self.seed), "--device", "cpu"]
            words += ["--lora-merge-cache", "adapted", "--lora-merge-dtype", "float32"]
            if threads:
                words += ["--num-threads", str(threads)]
            process = subprocess.run(
                words, env=environment_for(python), cwd=place, capture_output=True, text=True
            )
        if process.returncode:
            reason = one_line(process.stderr)[-300:] or f"exit status {process.returncode}"
            raise PipelineError(f"merge.file={self.file}: mergekit stopped ({reason})")
        donor = sources[config.get("base_model") or models_in(config)[0]]
        for source in (
            donor,
            sources.get("base", donor),
        ):  # an adapter has not all files of its base
            for file in NOT_COPIED:
                if (
                    (source / file).is_file()
                    and not (folder / file).exists()
                    and "chat_template" not in config
                ):
                    shutil.copyfile(source / file, folder / file)


def link_source(role: str, sources: Mapping[str, Path], place: Path) -> str:
    """Link a model into the folder where mergekit runs, and return its name in mergekit's words.

    mergekit reads + and @ in a path as an adapter and a revision, so the model's own path cannot be
    used.
    """
    (place / f"model_{role}").symlink_to(sources[role].resolve(), target_is_directory=True)
    if is_adapter(sources[role]):
        return f"./model_base+./model_{role}"
    return f"./model_{role}"


# --- its configuration ---


def read_config(file: Path, experts: int) -> dict[str, Any]:
    """Return mergekit's configuration as plain data, with the names of its models as text.

    Raises:
        PipelineError: the file cannot be read, is no configuration, or names other models than the
            experts and base.
    """
    place = f"merge.file={file}"
    try:
        config = read_yaml(file, place)
    except OSError as error:
        raise PipelineError(
            f"{place} cannot be read ({error.strerror}): give a YAML file"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("merge_method"), str):
        raise PipelineError(f"{place} is not a configuration of mergekit: it has no merge_method")
    named: dict[str, Any] = replace_models(config, str)
    places = [*map(str, range(experts)), "base"]
    for model in models_in(named):
        if model not in places:
            raise PipelineError(
                f"{place}: the model {model} is not one of {', '.join(places)}. Name the models by"
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
    """Return the models of plain data, in their order, as often as they are named."""
    models: list[Any] = []
    replace_models(node, models.append)
    return models


# --- its version ---


@functools.cache
def mergekit_version(python: str | None) -> str:
    """Return the version of mergekit in the Python of merge.mergekit_python (None: this one).

    Raises:
        PipelineError: that Python cannot be run, or has no mergekit.
    """
    words = [python or sys.executable, "-c", VERSION]
    try:
        process = subprocess.run(words, env=environment_for(python), capture_output=True, text=True)
    except OSError as error:
        raise PipelineError(
            f"merge.mergekit_python={python} cannot be run ({error.strerror}): give the path of a"
            " Python with mergekit"
        ) from error
    if process.returncode:
        raise PipelineError(
            f"merge=mergekit needs mergekit, which {words[0]} does not have: pip install"
            " 'cross-lingual-merging[mergekit]', or name a Python that has it,"
            " merge.mergekit_python=PATH"
        )
    return process.stdout.strip()
