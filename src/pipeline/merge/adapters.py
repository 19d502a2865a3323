"""LoRA experts read as whole models.

A base and its adapter are one checkpoint of float32 tensors: `base + scale x B A`, as PEFT adds it
(tuners/lora/layer.py). Rows are computed on demand, so memory holds neither the model nor a whole
product of factors.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.hub.lock import hub_cache
from pipeline.hub.models import local_folder
from pipeline.limits import time_limit
from pipeline.models.checkpoint import (
    Checkpoint,
    TensorInfo,
    digest_tensors,
    is_adapter,
    read_header,
    weights_root,
    with_values,
)
from pipeline.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from pipeline.models.names import HEAD, has_row_per_token, plain_name, tensor_names
from pipeline.runs.lineage import adapter_settings, base_folder
from pipeline.runs.manifest import read_manifest

# Keys of adapter_config.json that may have any value: they do not change base + scale x B A
PLAIN = {
    "peft_type",
    "peft_version",
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "lora_dropout",
    "bias",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "runtime_config",
    "eva_config",
    "ensure_weight_tying",
    "megatron_core",
    "qalora_group_size",
    "init_lora_weights",
    "fan_in_fan_out",  # PEFT sets it by the class of the layer
}
PATTERN_SECONDS = 2  # processor time for matching alpha_pattern
MERGE_FIRST = (
    "Only plain LoRA of linear layers is supported. Merge the adapter into its base first."
)
OTHER_BASE = "It was trained on another base. Give that base."
# Values of init_lora_weights that leave the base unchanged
ON_THE_BASE = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
)
FACTOR = re.compile(r"\.lora_([AB])(?:\.\w+)?\.weight$")


class Part(NamedTuple):
    """The factors of one adapter for one parameter, with a weight that is multiplied into B."""

    weight: float
    adapter: Checkpoint
    name_of_a: str
    name_of_b: str


@dataclass(frozen=True)
class Factors:
    """The LoRA factors of one parameter, whose change is scale x B A.

    Args:
        parts: factors that are placed side by side. Zeros fill the remaining ranks.
        rank: rows of A and columns of B.
        shape: the parameter's shape.
        scale: the factor of B A.
        transposed: the parameter is stored as (inputs, outputs), as in GPT-2, so its change is the
            transpose of B A.
    """

    parts: tuple[Part, ...]
    rank: int
    shape: tuple[int, ...]
    scale: float = 1.0
    transposed: bool = False

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return A (rank, inputs) and B (outputs, rank) in float32."""
        outputs, inputs = features(self.shape, self.transposed)
        a = np.zeros((self.rank, inputs), np.float32)
        b = np.zeros((outputs, self.rank), np.float32)
        start = 0
        for part in self.parts:
            own_a = all_rows(part.adapter, part.name_of_a)
            own_b = all_rows(part.adapter, part.name_of_b)
            stop = start + len(own_a)
            a[start:stop] = own_a
            b[:, start:stop] = own_b * np.float32(part.weight)
            start = stop
        return a, b

    def scaled(self, weight: float) -> tuple[Part, ...]:
        """Return the parts with `weight` and the scale multiplied into B."""
        return tuple(part._replace(weight=part.weight * weight * self.scale) for part in self.parts)


def features(shape: tuple[int, ...], transposed: bool) -> tuple[int, int]:
    """Return the output and input features of a matrix."""
    if transposed:
        inputs, outputs = shape
    else:
        outputs, inputs = shape
    return outputs, inputs


def all_rows(adapter: Checkpoint, name: str) -> np.ndarray:
    return adapter.rows(name, 0, adapter.info(name).shape[0])


def is_transposed(base: Checkpoint, name: str) -> bool:
    """Return True if a matrix is stored as (inputs, outputs), as in GPT-2's Conv1D."""
    if base.config.get("model_type") not in ("gpt2", "openai-gpt"):
        return False
    return re.search(r"\.c_(attn|proj|fc)\.", name) is not None


@dataclass
class Adapted(Checkpoint):
    """A base and an adapter, read as one checkpoint of float32 tensors with the base's layout.

    `replaced` holds the tensors that the adapter stores whole. `uniform` marks factors made by
    `with_uniform_rank`.
    """

    _: KW_ONLY
    base: Checkpoint
    factors: dict[str, Factors]
    replaced: Checkpoint
    settings: dict[str, Any]  # adapter_config.json
    uniform: bool = False

    @property
    def model(self) -> Checkpoint:
        return self.base

    @cached_property
    def state(self) -> str:
        stat = (self.folder / ADAPTER_WEIGHTS).stat()
        return f"{self.folder} {stat.st_size} {stat.st_mtime_ns} on {self.base.state}"

    def stored(self, name: str) -> TensorInfo | None:
        """Return where the base stores a float32 tensor that the adapter leaves alone, or None."""
        info = self.base.info(name)
        if name in self.factors or name in self.replaced.infos or info.dtype != "F32":
            return None
        return info

    def stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name in self.replaced.infos:
            holder = self.replaced
        else:
            holder = self.base
        # An adapter of the head stores the base's head in addition to the factors
        rows = holder.rows(name, start, stop)
        factors = self.factors.get(name)
        if factors:
            a, b = self._matrices(name)
            left, right = b, a
            if factors.transposed:
                left, right = a.T, b.T
            rows += left[start:stop] @ right * np.float32(factors.scale)
        return rows

    @cached_property
    def _matrices(self) -> Callable[[str], tuple[np.ndarray, np.ndarray]]:
        """Return a function that caches the matrices of the last few parameters."""
        return lru_cache(maxsize=16)(lambda name: self.factors[name].matrices())


Source = Checkpoint  # or Adapted


@dataclass(frozen=True)
class Opened:
    """The inputs of a merge, which were checked to match.

    Args:
        experts: the experts by role.
        any_base: the base, if the merge has one.
        partition: the layers of the sides.
        threads: the number of threads.
    """

    experts: dict[str, Source]
    any_base: Source | None
    partition: Partition | None
    threads: int | None

    @property
    def base(self) -> Source:
        """The base of a merge that needs one."""
        assert self.any_base is not None
        return self.any_base


def open_source(folder: str | Path, base: Path | None = None) -> Source:
    """Open a checkpoint, or an adapter on its base, by reading headers only.

    Args:
        folder: a folder, or a name on the Hub.
        base: replaces the base that adapter_config.json names. An adapter that a run trained always
            uses the base of its manifest.
    """
    folder = local_folder(Path(folder))
    if not is_adapter(folder):
        return Checkpoint.open(folder)
    if base is None or read_manifest(folder) is not None:
        return open_adapter(folder, local_folder(base_folder(folder)))
    adapted = open_adapter(folder, local_folder(base))
    base_used = adapted.base.folder.resolve()
    # Adapters that a merge writes name the base that it used
    if hub_cache().resolve() not in base_used.parents:
        adapted.settings["base_model_name_or_path"] = str(base_used)
    return adapted


def open_adapter(folder: Path, base: Path) -> Adapted:
    """Open a PEFT LoRA adapter on its base by reading headers only.

    Raises:
        PipelineError: the adapter is not plain LoRA, or does not fit the base.
    """
    settings = adapter_settings(folder)
    refuse_other_arithmetic(folder, settings)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise PipelineError(
            f"{folder} has no {ADAPTER_WEIGHTS}. Save the adapter again as safetensors."
        )
    full = Checkpoint.open(base)
    adapter = Checkpoint(folder, settings, read_header(folder / ADAPTER_WEIGHTS))
    pairs, whole = _sort_tensors(adapter, full, base)
    embedding = whole.get(full.embedding or "")
    config = {**full.config, "dtype": "float32"}
    config.pop("torch_dtype", None)
    if embedding:
        config = with_values(config, {"vocab_size": embedding.shape[0]})
    infos = {}
    for name, info in full.infos.items():
        shape = whole.get(name, info).shape
        infos[name] = replace(info, dtype="F32", shape=shape, nbytes=4 * math.prod(shape))
    return Adapted(
        folder,
        config,
        infos,
        base=full,
        factors=_read_all_factors(adapter, full, pairs),
        replaced=Checkpoint(folder, {}, whole),
        settings=settings,
    )


def _sort_tensors(
    adapter: Checkpoint, full: Checkpoint, base: Path
) -> tuple[dict[str, dict[str, str]], dict[str, TensorInfo]]:
    """Sort an adapter's tensors into pairs of factors and whole tensors, by the base's names.

    Raises:
        PipelineError: a tensor does not fit the base.
    """
    plain = {stored: plain_name(stored) for stored in adapter.infos}
    # Names of the whole model: the adapter may be of its decoder only
    names = tensor_names([*full.infos, *plain.values()])
    stored_names = {stored: names[name] for stored, name in plain.items()}
    # If the vocabulary grew, PEFT stores a tied head next to the embedding
    ends = []
    for stored, info in adapter.infos.items():
        if stored_names[stored] in (HEAD, full.embedding):
            ends.append(info)
    has_copied_head = False
    if full.tied_head and len(ends) == 2:
        has_copied_head = ends[0].digest() == ends[1].digest()
    pairs = defaultdict[str, dict[str, str]](dict)
    whole: dict[str, TensorInfo] = {}
    for stored, info in adapter.infos.items():
        name = stored_names[stored]
        if has_copied_head and name == HEAD:
            continue
        problem = _why_unfit(stored, name, info, full, base)
        if problem:
            raise PipelineError(f"{adapter.folder}: {stored} {problem}")
        factor = FACTOR.search(stored)
        if factor:
            pairs[name][factor[1]] = stored
        else:
            whole[name] = info
    settings = adapter.config
    is_tied = has_copied_head or settings.get("ensure_weight_tying")
    if full.tied_head and full.embedding in whole and not is_tied:
        raise PipelineError(
            f"{adapter.folder} has modules_to_save={settings.get('modules_to_save')}, but its base"
            " has a tied head, which PEFT does not train with it. Train it with"
            " ensure_weight_tying, or merge it into its base first."
        )
    return pairs, whole


def _why_unfit(stored: str, name: str, info: TensorInfo, full: Checkpoint, base: Path) -> str:
    """Return why an adapter's tensor cannot be applied to the base, or an empty text."""
    is_factor = FACTOR.search(stored) is not None
    if "lora_" in stored and not is_factor:
        return f"is not a factor of a linear layer. {MERGE_FIRST}"
    if name == HEAD and full.tied_head:
        return f"belongs to an output head, but the head of {base} is tied. {MERGE_FIRST}"
    if name not in full.infos:
        return f"changes no parameter of {base}. {OTHER_BASE}"
    if is_factor:
        return ""
    first = int(has_row_per_token(name))  # the vocabulary may have grown in training
    shape = full.infos[name].shape
    if info.shape[first:] != shape[first:]:
        return f"has shape {list(info.shape)}, but its base has {list(shape)}. {OTHER_BASE}"
    return ""


def refuse_other_arithmetic(folder: Path, settings: dict[str, Any]) -> None:
    """Raise PipelineError unless an adapter's weights are base + scale x B A.

    The error names the key of adapter_config.json.
    """
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise PipelineError(f"{folder} is an adapter with peft_type={kind}. {MERGE_FIRST}")
    start = settings.get("init_lora_weights")
    if isinstance(start, str):
        start = start.lower()
    # PiSSA, OLoRA and others move part of the base into the factors
    if start not in ON_THE_BASE:
        raise PipelineError(
            f"{folder} has init_lora_weights={start}, which changes the base. Save it with PEFT's"
            " path_initial_model_for_weight_conversion, or merge it into the changed base first."
        )
    for key, value in settings.items():
        if value and key not in PLAIN:
            raise PipelineError(f"{folder} is an adapter with {key}={value}. {MERGE_FIRST}")


def _read_all_factors(
    adapter: Checkpoint, base: Checkpoint, pairs: Mapping[str, dict[str, str]]
) -> dict[str, Factors]:
    problem = f"{adapter.folder / ADAPTER_CONFIG}: a pattern of alpha_pattern"
    too_slow = f"{problem} takes too long to match. Name the modules without * and +."
    try:
        with time_limit(PATTERN_SECONDS, too_slow):
            return {name: _read_factors(adapter, base, name, pair) for name, pair in pairs.items()}
    except re.error as error:
        raise PipelineError(
            f"{problem} is not a regular expression ({error}). Correct it."
        ) from error


def _read_factors(
    adapter: Checkpoint, base: Checkpoint, name: str, pair: dict[str, str]
) -> Factors:
    if set(pair) != {"A", "B"}:
        raise PipelineError(
            f"{adapter.folder} has only one factor of {name}, not A and B. Copy it again."
        )
    a = adapter.infos[pair["A"]].shape
    b = adapter.infos[pair["B"]].shape
    rank = a[0]
    shape = base.info(name).shape
    transposed = is_transposed(base, name)
    expected = shape
    if transposed:
        expected = shape[::-1]
    if len(expected) != 2 or b != (expected[0], rank) or a != (rank, expected[1]):
        raise PipelineError(
            f"{adapter.folder}: the factors of {name} have shapes {list(b)} and {list(a)}, but its"
            f" base has {list(shape)}. {OTHER_BASE}"
        )
    settings = adapter.config
    patterns = settings.get("alpha_pattern") or {}
    module = name.removesuffix(".weight")
    alpha = _pattern_value(patterns, module, settings.get("lora_alpha", rank))
    divisor: float = rank
    if settings.get("use_rslora"):
        divisor = math.sqrt(rank)
    parts = (Part(1.0, adapter, pair["A"], pair["B"]),)
    return Factors(parts, rank, shape, alpha / divisor, transposed)


def _pattern_value(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches a module's end, as PEFT does."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def recorded_key(folder: Path) -> str | None:
    """Return the key of a merge or the weights' root of another run, or None without a manifest."""
    manifest = read_manifest(folder)
    if manifest:
        return manifest.weights.get("made_of") or manifest.weights_root
    return None


def root_of(folder: Path) -> str:
    """Return what identifies a model's weights: a merge's key, or the root over the tensors.

    For an adapter it is the root over the adapter's own tensors.
    """
    return recorded_key(folder) or weights_root(digest_tensors(folder))
