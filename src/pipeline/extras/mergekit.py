"""Any method of mergekit (Goddard et al., 2024), computed by mergekit itself from its YAML."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.knob import knob
from pipeline.config.merging import Merge, References, numbered_references
from pipeline.config.training import Partition
from pipeline.errors import PipelineError, suggest
from pipeline.files import read_yaml
from pipeline.runs.provenance import environment_for, package_version

if TYPE_CHECKING:
    from pipeline.merge.adapters import Source
    from pipeline.merge.merge import Computed

KEYS = ("modules", "slices", "models", "merge_method", "base_model", "dtype", "out_dtype", "parameters")
OWN_CHOICES = {  # keys of mergekit's that change the tokenizer
    "tokenizer": "experts of one base have one tokenizer, merge.files_from=ROLE chooses whose files are copied",
    "tokenizer_source": "experts of one base have one tokenizer, merge.files_from=ROLE chooses whose files are copied",
    "chat_template": "merge.files_from=ROLE chooses whose template is copied",
}
DTYPES = ("float32", "bfloat16", "float16")
IN_FLOAT32 = ("arcee_fusion", "ramplus_tl")  # methods whose result is float32 whatever the models are
OLDEST = (0, 1, 5)  # whose results were compared with those here


@dataclass
class Mergekit(Merge):
    """What mergekit makes of its YAML `file`. Its models are RUNs, or, with `experts`, their places 0, 1, ... and
    `base`.
    """

    method: str = "mergekit"
    file: str = knob(hashed=False)  # its content is hashed
    experts: list[str] | None = knob(None, run=True)  # null: the models that the file names
    seed: int = knob(0, ge=0)  # of its random methods, as mergekit-yaml --random-seed
    mergekit_python: str | None = knob(None, hashed=False)  # path of a Python that has mergekit; null: this one

    reads_adapters = False
    fewest = 1

    @property
    def config(self) -> dict[str, Any]:
        """The content of the file, as it is now."""
        return read_config(Path(self.file))

    def roles(self) -> dict[str, str]:
        """Model in the file -> its role: 0, 1, ... or base."""
        base = self.config.get("base_model")
        models = list(dict.fromkeys(models_in({**self.config, "base_model": None})))
        if self.experts is None:
            roles = {model: str(number) for number, model in enumerate(model for model in models if model != "base")}
            return {**roles, **({base: "base"} if base not in (None, *roles) else {}), "base": "base"}
        roles = {role: role for role in (*map(str, range(len(self.experts))), "base")}
        if unknown := [model for model in (*models, base) if model not in (*roles, None)]:
            raise PipelineError(
                f"merge.file={self.file}: {unknown[0]} is not a model of it: with merge.experts they are "
                f"{', '.join(roles)}"
            )
        if unused := [role for role in roles if role not in (*models, base, "base")]:
            raise PipelineError(f"merge.file={self.file} does not use merge.experts[{unused[0]}]: leave it out")
        return roles

    def references(self) -> References:
        if self.experts is not None:
            return numbered_references(self.experts)
        return {role: ("merge.file", model) for model, role in self.roles().items() if role != "base"}

    def base_reference(self) -> str | None:
        named = next((model for model, role in self.roles().items() if role == "base"), "base")
        return self.base or (None if named == "base" else named)

    def needs_base(self) -> bool:
        roles = self.roles()
        return "base" in [roles[model] for model in models_in(self.config)]

    def exact_for_adapters(self) -> bool:
        return False

    def result_dtype(self) -> str | None:
        return self.config.get("out_dtype") or self.config.get("dtype")

    def beyond_knobs(self) -> dict[str, Any]:
        """The content of the file by roles, and mergekit's version."""
        version = mergekit_version(self.mergekit_python)
        return {"file": self.with_models(self.roles()), "packages": {self.method: f"mergekit {version}"}}

    def with_models(self, names: dict[str, str]) -> dict[str, Any]:
        """The content of the file with other names of its models."""
        return replace_models(self.config, lambda model: names[model])

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        if self.dtype is not None:
            raise PipelineError(
                f"merge.dtype={self.dtype} is not read by merge=mergekit: give out_dtype in {self.file}"
            )
        if (wrong := self.result_dtype()) not in (*DTYPES, None):
            raise PipelineError(f"merge.file={self.file}: dtype {wrong} is not one of {', '.join(DTYPES)}")
        if self.config["merge_method"] in IN_FLOAT32 and not self.config.get("out_dtype"):
            raise PipelineError(
                f"merge.file={self.file}: mergekit's {self.config['merge_method']} gives float32 unless the file sets "
                "out_dtype: set it, out_dtype: bfloat16"
            )
        for count in map(depth_of, slices_in(self.config)):
            if count is None:
                raise PipelineError(
                    f"merge.file={self.file}: each source of slices needs layer_range: [first, last + 1]"
                )
            if layers not in (None, count):
                raise PipelineError(
                    f"merge.file={self.file}: its slices have {count} layers, the models {layers}: give as many; for "
                    "another depth run mergekit-yaml, and give its output as checkpoint=FOLDER"
                )
        mergekit_version(self.mergekit_python)

    def label(self, partition: Partition | None, layers: int | None) -> str:
        return f"mergekit-{self.config['merge_method']}"

    def described(self, partition: Partition | None, layers: int | None) -> str:
        return f"{self.config['merge_method']} of {Path(self.file).name}"

    def decide(
        self, sources: dict[str, Source], base: Source | None, partition: Partition | None, threads: int | None
    ) -> Computed:
        from pipeline.extras.by_mergekit import Result
        from pipeline.merge.merge import Computed

        result = Result(self, {**sources, **({"base": base} if base is not None and self.needs_base() else {})})
        text = f"mergekit's {self.config['merge_method']}, by {Path(self.file).name}"
        return Computed(result.formula, text, prepare=result.compute)


# ---------------------------------------------------------------------------------------------- its configuration


def read_config(file: Path) -> dict[str, Any]:
    """mergekit's configuration as plain data. Raises PipelineError for what it would ignore or this program refuses."""
    place = f"merge.file={file}"
    try:
        config = read_yaml(file, place)
    except OSError as error:
        raise PipelineError(f"{place} cannot be read ({error.strerror}): give a YAML file") from error
    if not isinstance(config, dict) or not isinstance(config.get("merge_method"), str):
        raise PipelineError(f"{place} is not a configuration of mergekit: it has no merge_method")
    for key in config:
        if key in OWN_CHOICES:
            raise PipelineError(f"{place}: {key} is not possible here ({OWN_CHOICES[key]}): leave it out")
        if key not in KEYS:
            raise PipelineError(f"{place}: {key} is not a key of mergekit's: {suggest(key, KEYS)}")
    named = replace_models(config, str)
    for model in models_in(config):
        if not isinstance(model, str | int):
            raise PipelineError(f"{place}: model {json.dumps(model)} is not a RUN: give the name of a run or a folder")
        if "+" in str(model):
            raise PipelineError(f"{place}: {model} is an adapter on a model: stage=export writes whole models")
    if not any(models_in({**named, "base_model": None})):
        raise PipelineError(f"{place} names no models: give models, slices or modules")
    return named


def replace_models(node: Any, name: Callable[[Any], Any]) -> Any:
    """Plain data with name(model) in place of each model."""
    if isinstance(node, list):
        return [replace_models(inner, name) for inner in node]
    if not isinstance(node, dict):
        return node
    return {
        key: value if key == "parameters" or value is None
        else name(value) if key in ("model", "base_model")
        else replace_models(value, name)
        for key, value in node.items()
    }  # fmt: skip


def models_in(node: Any) -> list[Any]:
    """The models of plain data, in their order, as often as they are named."""
    models: list[Any] = []
    replace_models(node, models.append)
    return models


def slices_in(node: Any) -> list[list[dict[str, Any]]]:
    if not isinstance(node, dict):
        return []
    here = [node["slices"]] if node.get("slices") else []
    return sum(map(slices_in, node.values()), here)


def depth_of(slices: Any) -> int | None:
    """Layers of stacked slices together; None where they are malformed."""
    try:
        return sum(last - first for first, last in (piece["sources"][0]["layer_range"] for piece in slices))
    except (KeyError, IndexError, TypeError, ValueError):
        return None


VERSION = "import importlib.metadata as metadata; print(metadata.version('mergekit'))"


@functools.cache
def mergekit_version(python: str | None) -> str:
    """The version of mergekit in the Python of merge.mergekit_python (None: this one).

    Raises PipelineError where there is none, or one that is too old.
    """
    named = f"merge.mergekit_python={python}" if python else "this Python"
    version = version_in(python) if python else package_version("mergekit")
    if version == "absent":
        raise PipelineError(
            f"merge=mergekit needs mergekit, which {named} does not have: "
            "pip install 'cross-lingual-merging[mergekit]', or name a Python that has it, merge.mergekit_python=PATH"
        )
    if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < OLDEST:
        raise PipelineError(f"merge=mergekit: {named} has mergekit {version}, too old: install 0.1.5 or later")
    return version


def version_in(python: str) -> str:
    """The version in another Python; "absent" if it has none."""
    try:
        process = subprocess.run([python, "-c", VERSION], env=environment_for(python), capture_output=True, text=True)
    except OSError as error:
        raise PipelineError(
            f"merge.mergekit_python={python} cannot be run ({error.strerror}): give the path of a Python with mergekit"
        ) from error
    return "absent" if process.returncode else process.stdout.strip()
