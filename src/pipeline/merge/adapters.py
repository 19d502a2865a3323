"""LoRA experts: a base and its adapter as one checkpoint of float32 tensors, and merges that are
adapters themselves.

`base + scale x B A`, row by row, as PEFT adds it (tuners/lora/layer.py): neither the model nor a
product of factors is ever whole in memory. Choosing layers keeps factors as they are; a weighted
sum of adapters concatenates their ranks, with weight and scale in B alone. PEFT's
add_weighted_adapter (0.21) does not give it: `linear` multiplies sums of factors, and `cat` of
rsLoRA adapters scales their sum once more.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

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
    with_rows,
)
from pipeline.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from pipeline.models.names import HEAD, has_row_per_token, plain_name, tensor_names
from pipeline.runs.lineage import adapter_settings, base_folder
from pipeline.runs.manifest import read_manifest

# keys of adapter_config.json that say where, how large and how trained factors are: they may say
# anything
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
    "fan_in_fan_out",  # PEFT sets it itself, by the class of the layer
}
PATTERN_SECONDS = 2  # of processor time for the patterns of an adapter
MERGE_FIRST = "only plain LoRA of linear layers is read; merge it into its base first"
OTHER_BASE = "it is of another base; give the one that it was trained from"
ON_THE_BASE = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
)  # init_lora_weights that leave the base as it is


@dataclass(frozen=True)
class Factors:
    """LoRA factors of one parameter, whose change is scale x B A: those of `parts` side by side,
    then zeros.

    parts: (weight multiplied into B, adapter, its name of A, its name of B); rank: rows of A,
        columns of B.
    shape: of the parameter, (outputs, inputs); transposed: it is stored as (inputs, outputs), as
    GPT-2's, so that its change is the transpose of B A.
    """

    parts: tuple[tuple[float, Checkpoint, str, str], ...]
    rank: int
    shape: tuple[int, ...]
    scale: float = 1.0
    transposed: bool = False

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return A (rank, inputs) and B (outputs, rank) in float32."""
        if self.transposed:
            outputs, inputs = reversed(self.shape)
        else:
            outputs, inputs = self.shape
        a, b, place = (
            np.zeros((self.rank, inputs), np.float32),
            np.zeros((outputs, self.rank), np.float32),
            0,
        )
        for weight, adapter, name_of_a, name_of_b in self.parts:
            own = all_rows(adapter, name_of_a)
            a[place : place + len(own)] = own
            b[:, place : place + len(own)] = all_rows(adapter, name_of_b) * np.float32(weight)
            place += len(own)
        return a, b

    def scaled(self, weight: float) -> tuple[tuple[float, Checkpoint, str, str], ...]:
        """Return the parts with weight and scale multiplied into B."""
        return tuple((own * weight * self.scale, *names) for own, *names in self.parts)  # type: ignore[misc]


def all_rows(adapter: Checkpoint, name: str) -> np.ndarray:
    return adapter.rows(name, 0, adapter.info(name).shape[0])


def is_transposed(base: Checkpoint, name: str) -> bool:
    """Whether a matrix is stored as (inputs, outputs): those of GPT-2's Conv1D."""
    return base.config.get("model_type") in ("gpt2", "openai-gpt") and bool(
        re.search(r"\.c_(attn|proj|fc)\.", name)
    )


@dataclass
class Adapted(Checkpoint):
    """A base and an adapter, read as one checkpoint of float32 tensors, laid out as the base.

    `replaced`: the tensors that the adapter holds whole. `uniform`: the factors are those of
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

    @property
    def later_heads(self) -> bool:
        return self.base.later_heads

    def stored(self, name: str) -> TensorInfo | None:
        """Return the base's bytes, of a float32 base's tensor that the adapter leaves alone."""
        info = self.base.info(name)
        if name in self.factors or name in self.replaced.infos or info.dtype != "F32":
            return None
        return info

    def stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name in self.replaced.infos:
            holder = self.replaced
        else:
            holder = self.base
        rows = holder.rows(
            name, start, stop
        )  # an adapter of the head holds its base's head beside the factors
        factors = self.factors.get(name)
        if factors:
            a, b = self._matrices(name)
            if factors.transposed:
                left, right = (a.T, b.T)
            else:
                left, right = (b, a)
            rows += left[start:stop] @ right * np.float32(factors.scale)
        return rows

    @cached_property
    def _matrices(self) -> Callable[[str], tuple[np.ndarray, np.ndarray]]:
        """The factors of a parameter; of the last few, one for each thread."""
        return lru_cache(maxsize=16)(lambda name: self.factors[name].matrices())


Source = Checkpoint  # or Adapted


def open_source(folder: str | Path, base: Path | None = None) -> Source:
    """Open a checkpoint, or an adapter on its base, by headers alone.

    A name on the Hub is looked up there.

    Args: base: stands in place of what the adapter_config.json of an adapter from elsewhere names.
    One that a run made has the base of its manifest.
    """
    folder = local_folder(Path(folder))
    if not is_adapter(folder):
        return Checkpoint.open(folder)
    if base is None or read_manifest(folder) is not None:
        return open_adapter(folder, local_folder(base_folder(folder)))
    adapted = open_adapter(folder, local_folder(base))
    folder_of_base = adapted.base.folder.resolve()
    if (
        hub_cache().resolve() not in folder_of_base.parents
    ):  # files written elsewhere name the base that was used
        adapted.settings["base_model_name_or_path"] = str(folder_of_base)
    return adapted


def open_adapter(folder: Path, base: Path) -> Adapted:
    """Open a PEFT LoRA adapter on its base, by headers.

    Raises: PipelineError: it is no plain LoRA, or does not fit.
    """
    settings = adapter_settings(folder)
    refuse_other_arithmetic(folder, settings)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise PipelineError(
            f"{folder} has no {ADAPTER_WEIGHTS}: only safetensors are read; save it again"
        )
    full, adapter = (
        Checkpoint.open(base),
        Checkpoint(folder, settings, read_header(folder / ADAPTER_WEIGHTS)),
    )
    pairs, whole = defaultdict[str, dict[str, str]](dict), dict[str, TensorInfo]()
    plain = {stored: plain_name(stored) for stored in adapter.infos}
    names = tensor_names(
        [*full.infos, *plain.values()]
    )  # the whole model's: an adapter may be of its decoder alone
    # PEFT stores the head of a base that ties it as well, where the vocabulary grew
    ends = []
    for stored, info in adapter.infos.items():
        if names[plain[stored]] in (HEAD, full.embedding):
            ends.append(info)
    is_copied = full.tied_head and len(ends) == 2 and ends[0].digest() == ends[1].digest()
    for stored, info in adapter.infos.items():
        name = names[plain[stored]]
        if is_copied and name == HEAD:
            continue
        part = re.search(r"\.lora_([AB])(?:\.\w+)?\.weight$", stored)
        resized = has_row_per_token(name)  # a vocabulary may have grown in training
        problem = ""
        if "lora_" in stored and not part:
            problem = f"is no factor of a linear layer: {MERGE_FIRST}"
        elif name == HEAD and full.tied_head:
            problem = f"is of an output head, and {base} has a tied one: {MERGE_FIRST}"
        elif name not in full.infos:
            problem = f"changes no parameter of {base}: {OTHER_BASE}"
        elif not part and info.shape[resized:] != full.infos[name].shape[resized:]:
            problem = (
                f"is {list(info.shape)}, its base's is {list(full.infos[name].shape)}: {OTHER_BASE}"
            )
        if problem:
            raise PipelineError(f"{folder}: {stored} {problem}")
        if part:
            pairs[name][part[1]] = stored
        else:
            whole[name] = info
    embedding = whole.get(full.embedding or "")
    if full.tied_head and embedding and not (is_copied or settings.get("ensure_weight_tying")):
        raise PipelineError(
            f"{folder} has modules_to_save={settings.get('modules_to_save')} and a base with a tied"
            " head, which PEFT then leaves as it was: train it with ensure_weight_tying, or merge"
            " it into its base first"
        )
    config = {key: value for key, value in full.config.items() if key != "torch_dtype"} | {
        "dtype": "float32"
    }
    if embedding:
        config = with_rows(config, embedding.shape[0])
    infos = {
        name: replace(info, dtype="F32", shape=shape, nbytes=4 * math.prod(shape))
        for name, info in full.infos.items()
        for shape in [whole.get(name, info).shape]
    }
    problem = f"{folder / ADAPTER_CONFIG}: a pattern of alpha_pattern"
    try:
        with time_limit(
            PATTERN_SECONDS, f"{problem} takes too long to match: name the modules without * and +"
        ):
            factors = {
                name: _read_factors(adapter, full, name, pair, settings)
                for name, pair in pairs.items()
            }
    except re.error as error:
        raise PipelineError(f"{problem} is no regular expression ({error}): correct it") from error
    return Adapted(
        folder,
        config,
        infos,
        base=full,
        factors=factors,
        replaced=Checkpoint(folder, {}, whole),
        settings=settings,
    )


def refuse_other_arithmetic(folder: Path, settings: dict[str, Any]) -> None:
    """Raise PipelineError, naming the key of adapter_config.json, unless the weights are base +
    scale x B A.
    """
    if settings.get("peft_type") != "LORA":
        raise PipelineError(
            f"{folder} is an adapter with peft_type={settings.get('peft_type')}: {MERGE_FIRST}"
        )
    start = settings.get("init_lora_weights")
    if isinstance(start, str):
        start = start.lower()
    if (
        start not in ON_THE_BASE
    ):  # PiSSA, OLoRA and others take factors out of the base, and train what is left
        raise PipelineError(
            f"{folder} has init_lora_weights={start}: it belongs to a base that its initialization"
            " changed. Save it with PEFT's path_initial_model_for_weight_conversion, or merge it"
            " into that base first"
        )
    unsupported = next((key for key, value in settings.items() if value and key not in PLAIN), None)
    if unsupported:
        raise PipelineError(
            f"{folder} is an adapter with {unsupported}={settings[unsupported]}: {MERGE_FIRST}"
        )


def _read_factors(
    adapter: Checkpoint, base: Checkpoint, name: str, pair: dict[str, str], settings: dict[str, Any]
) -> Factors:
    if set(pair) != {"A", "B"}:
        raise PipelineError(
            f"{adapter.folder} holds one factor of {name} without the other: copy it again"
        )
    a, b = adapter.infos[pair["A"]], adapter.infos[pair["B"]]
    shape, transposed = base.info(name).shape, is_transposed(base, name)
    if transposed:
        outputs, inputs = reversed(shape)
    else:
        outputs, inputs = shape
    if (*b.shape, *a.shape) != (outputs, *a.shape[:1], *a.shape[:1], inputs):
        raise PipelineError(
            f"{adapter.folder}: factors of {name} are {list(b.shape)} and {list(a.shape)}, "
            f"its base's is {list(shape)}: {OTHER_BASE}"
        )
    rank, module = a.shape[0], name.removesuffix(".weight")
    alpha = _pattern_value(
        settings.get("alpha_pattern") or {}, module, settings.get("lora_alpha", rank)
    )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return Factors(((1.0, adapter, pair["A"], pair["B"]),), rank, shape, scale, transposed)


def _pattern_value(patterns: Mapping[str, float], module: str, default: float) -> float:
    """PEFT's rule: the first pattern that matches the end of the module's name."""
    return next(
        (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default
    )


def recorded_key(folder: Path) -> str | None:
    """Return the key of a merge, else the root over its tensors, of a run; None of no run."""
    manifest = read_manifest(folder)
    if manifest:
        return manifest.weights.get("made_of") or manifest.weights_root
    return None


def root_of(folder: Path) -> str:
    """Return what was recorded when a model was written: of a merge its key, else the root over its
    tensors.

    Of an adapter it is the root over its own tensors.
    """
    return recorded_key(folder) or weights_root(digest_tensors(folder))


# --- adapter out ---


def combine_adapters(
    sources: Mapping[str, Source], changes: Mapping[str, Mapping[str, float]]
) -> Adapted:
    """Return the weighted sum of adapters on one base as an adapter: each parameter's ranks side by
    side.

    A single adapter with weight 1 keeps its factors as they are, whatever its rank.
    """
    adapted = {}
    for role, source in sources.items():
        if isinstance(source, Adapted):
            adapted[role] = source
    first = next(iter(adapted.values()))
    factors = {}
    for name, weights in changes.items():
        found = (
            (weight, adapted[role].factors.get(name))
            for role, weight in weights.items()
            if role in adapted
        )
        parts = []
        for weight, part in found:
            if weight and part:
                parts.append((weight, part))
        if [weight for weight, _ in parts] == [1]:
            _, only = parts[0]
            factors[name] = replace(
                only, scale=only.scale * only.rank / only.rank
            )  # rounded as on disk: alpha / rank
        elif parts:
            joined = tuple(piece for weight, part in parts for piece in part.scaled(weight))
            factors[name] = replace(
                parts[0][1], parts=joined, rank=sum(part.rank for _, part in parts), scale=1.0
            )
    return replace(first, factors=factors)


def with_uniform_rank(adapter: Adapted) -> Adapted:
    """The same adapter with the largest rank and scale 1 everywhere, and with all modules of a name
    (q_proj) or none.

    Scales are multiplied into B, ranks filled up with zeros; a module that the adapter leaves alone
    gets zeros. vLLM reads r, lora_alpha and use_rslora of adapter_config.json
    (vllm/lora/peft_helper.py) and ignores rank_pattern and
    alpha_pattern: it would scale modules wrongly without an error.
    """
    rank = max(part.rank for part in adapter.factors.values())
    targets = {module_name(name) for name in adapter.factors}
    factors = {}
    for name in adapter.base.names:
        if name.endswith(".weight") and module_name(name) in targets:
            for part in [adapter.factors.get(name)]:
                factors[name] = Factors(
                    part.scaled(1.0) if part else (),
                    rank,
                    adapter.base.info(name).shape,
                    transposed=is_transposed(adapter.base, name),
                )
    return replace(adapter, factors=factors, uniform=True)


def module_name(name: str) -> str:
    """Return the last part of the name of a weight's module: q_proj."""
    return name.removesuffix(".weight").rpartition(".")[2]


def write_adapter(adapter: Adapted, folder: Path) -> dict[str, str]:
    """adapter_model.safetensors and adapter_config.json as PEFT reads them, in float32; {tensor:
    digest}.
    """
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}
    for name, part in adapter.factors.items():
        module = "base_model.model." + name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = part.matrices()
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    rank = max(part.rank for part in adapter.factors.values())
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "r": rank,
        "lora_alpha": rank,
        "fan_in_fan_out": any(part.transposed for part in adapter.factors.values()),
        "base_model_name_or_path": adapter.settings.get("base_model_name_or_path"),
        **(
            {"revision": revision} if (revision := adapter.settings.get("revision")) else {}
        ),  # of the base
        **_target_settings(adapter),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    return digest_tensors(folder)


def _target_settings(adapter: Adapted) -> dict[str, Any]:
    """Return the keys of adapter_config.json that name the modules, with ranks and scales where
    these differ.
    """
    if adapter.uniform:
        return {"target_modules": sorted({module_name(name) for name in adapter.factors})}
    modules = {name.removesuffix(".weight"): part for name, part in sorted(adapter.factors.items())}
    return {
        "target_modules": list(modules),
        "rank_pattern": {module: part.rank for module, part in modules.items()},
        "alpha_pattern": {module: part.scale * part.rank for module, part in modules.items()},
    }
