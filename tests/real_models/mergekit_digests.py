"""Two experts made of SmolLM2, and the digests of their merges by mergekit.

    make mergekit-digests

The command writes mergekit_digests.json in an environment with mergekit 0.1.5. The experts are made
without training, so their bits do not depend on the processor.
"""

import hashlib
import json
import re
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FILE = Path(__file__).with_name("mergekit_digests.json")
DENSITY, WEIGHTS, LAMBDA, T = 0.3, [0.3, 0.7], 0.9, 0.3
BOTTOM, TOP, LAYERS = 5, 2, 30
SWAP = (  # the swap in this project's words
    f"merge.math={{math}} merge.language={{language}} merge.bottom_layers={BOTTOM}"
    f" merge.top_layers={TOP} merge.embeddings=language merge.final_norm=language"
)
STEPS = {
    "math": 1_000_003,
    "language": 2_000_003,
}  # primes, which no tensor's size is a multiple of
# entries of each tensor that stand for a merge which computes angles, whose last bits processors
# round
SLICE = 8


def make_experts(base: Path, folder: Path) -> dict[str, Path]:
    """Write folders of float32 weights that TIES can split without ties.

    In each tensor of a layer int(DENSITY x n) entries move by 2^-7 to 2^-6, and the others by less
    than 2^-9. The embedding does not move.
    """
    folders = {}
    for role, step in STEPS.items():
        generator, tensors = np.random.default_rng(step), {}
        for name, tensor in sorted(load_file(base / "model.safetensors").items()):
            tensors[name] = tensor.float()
            if ".layers." not in name:
                continue
            entries = tensor.numel()
            large = np.arange(entries) * step % entries < max(1, int(DENSITY * entries))
            size = generator.integers(2**16, 2**17, entries, dtype=np.int32).astype(
                np.float32
            ) * np.float32(2**-23)
            size[~large] *= np.float32(2**-3)
            size[generator.integers(0, 2, entries, dtype=np.int8) == 0] *= np.float32(-1)
            tensors[name] += torch.from_numpy(size).view(tensor.shape)
        folders[role] = folder / role
        shutil.copytree(base, folders[role], ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, folders[role] / "model.safetensors", {"format": "pt"})
        config = json.loads((base / "config.json").read_text()) | {"dtype": "float32"}
        (folders[role] / "config.json").write_text(json.dumps(config))
    return folders


def mergekit_configs(base: Path, experts: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Return the merges in mergekit's configuration.

    Slices take embedding and final norm of a swap from the first and the last model, here the
    language expert.
    """

    def listed(*parameters: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"model": str(folder), "parameters": each}
            for folder, each in zip(experts.values(), parameters, strict=True)
        ]

    first, second = WEIGHTS
    ranges = [
        ("language", 0, BOTTOM),
        ("math", BOTTOM, LAYERS - TOP),
        ("language", LAYERS - TOP, LAYERS),
    ]
    of_base = {"base_model": str(base), "dtype": "float32"}
    return {
        "layer_swap": {
            "merge_method": "passthrough",
            "dtype": "float32",
            "slices": [
                {"sources": [{"model": str(experts[role]), "layer_range": [a, b]}]}
                for role, a, b in ranges
            ],
        },
        "soup": {
            "merge_method": "linear",
            "dtype": "float32",
            "parameters": {"normalize": True},
            "models": listed({"weight": first}, {"weight": second}),
        },
        "task_arithmetic": (
            of_base
            | {
                "merge_method": "task_arithmetic",
                "parameters": {"lambda": LAMBDA, "normalize": False},
                "models": listed({"weight": first}, {"weight": second}),
            }
        ),
        "slerp": {
            "merge_method": "slerp",
            "dtype": "float32",
            "base_model": str(experts["math"]),
            "parameters": {"t": T},
            "models": [{"model": str(folder)} for folder in experts.values()],
        },
    }


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """16 digits of the sha256 of each tensor's bytes."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()[:16]
        for name, tensor in sorted(tensors.items())
    }


def slices(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """SLICE entries of each tensor, evenly spaced."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        flat = tensor.flatten()
        found[name] = [
            float(f"{value:.7g}") for value in flat[:: flat.numel() // SLICE][:SLICE].tolist()
        ]
    return found


def whole(file: Path) -> str:
    """One digest of all tensors."""
    return hashlib.sha256(json.dumps(digests(load_file(file))).encode()).hexdigest()


def record(base: Path) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    found: dict[str, Any] = {
        "mergekit": version("mergekit"),
        "base": whole(base / "model.safetensors"),
    }
    with tempfile.TemporaryDirectory() as temporary:
        experts = make_experts(base, Path(temporary))
        found |= {role: whole(folder / "model.safetensors") for role, folder in experts.items()}
        for name, config in mergekit_configs(base, experts).items():
            out = Path(temporary) / name
            options = MergeOptions(quiet=True, copy_tokenizer=False)
            run_merge(MergeConfiguration.model_validate(config), str(out), options=options)
            (file,) = out.glob("*.safetensors")
            found[name] = slices(load_file(file)) if name == "slerp" else digests(load_file(file))
            shutil.rmtree(out)
    text = json.dumps(found, indent=0, sort_keys=True)
    FILE.write_text(re.sub(r",\n(?=[-\d])", ", ", text) + "\n")  # a slice on a line


if __name__ == "__main__":
    record(Path(sys.argv[1]))
