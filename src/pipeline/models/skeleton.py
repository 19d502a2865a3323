"""Models without weights, which check that a folder holds the tensors of its config.json."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.checkpoint import Checkpoint, read_json
from pipeline.models.load import load_config
from pipeline.text import one_line

REMEDY = "Copy the model again, or correct its config.json."
PROBLEMS = {
    "unexpected": "holds {}, which transformers would not load with its config.json",
    "missing": "lacks {}, which its config.json requires",
}


def check_shapes(folder: Path, key: str) -> None:
    """Raise PipelineError unless a folder holds the tensors that its config.json requires.

    Names and shapes are checked. Types that transformers does not have are not checked.
    """
    _check_shapes(folder, key, folder.stat().st_mtime_ns)


@lru_cache(maxsize=256)  # each merge of a table calls it
def _check_shapes(folder: Path, key: str, _: int) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if read_json(folder / "config.json").get("model_type") in CONFIG_MAPPING_NAMES:
        build_skeleton(folder, key)


def build_skeleton(folder: Path, key: str) -> Any:
    """Build the model of a folder on the meta device as from_pretrained does, without weights.

    Tied heads, and names that transformers changes or ignores, are handled as in from_pretrained.
    The tensors of a quantized model are its quantizer's, and are not compared.

    Args:
        folder: the model.
        key: the configuration key that names the folder.

    Raises:
        PipelineError: config.json is not of a model of transformers, or a tensor is missing,
            unexpected or of another shape. from_pretrained would draw it at random or ignore it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(folder)
    stored = {}
    for name, info in checkpoint.infos.items():
        stored[checkpoint.written_name(name)] = torch.empty(info.shape, device="meta")
    try:
        config = load_config(folder)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            return model
        model, loading_info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=stored,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except PipelineError:
        raise
    except Exception as error:  # a model's class can raise anything for values in config.json
        reason = one_line(str(error))[:300] or type(error).__name__
        raise PipelineError(
            f"{key}={folder}: transformers cannot build a model from its config.json ({reason})."
            f" {REMEDY}"
        ) from error
    _refuse_different_tensors(f"{key}={folder}", loading_info)
    return model


def _refuse_different_tensors(model: str, loading_info: dict[str, Any]) -> None:
    """Raise PipelineError if transformers found missing, unexpected or reshaped tensors."""
    for kind, problem in PROBLEMS.items():
        names = sorted(loading_info[f"{kind}_keys"])
        if names:
            more = ""
            if names[1:]:
                more = f" and {len(names) - 1} more tensors"
            raise PipelineError(f"{model} {problem.format(names[0] + more)}. {REMEDY}")
    for name, stored, expected in loading_info["mismatched_keys"]:
        raise PipelineError(
            f"{model} holds {name} of shape {list(stored)}, but its config.json requires"
            f" {list(expected)}. {REMEDY}"
        )
