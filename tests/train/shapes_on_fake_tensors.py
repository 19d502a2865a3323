#!/usr/bin/env python
"""Memory of the papers' trainings at their true shapes, against the plan's estimate, without a GPU.

    python tests/train/shapes_on_fake_tensors.py     # all: six minutes of a core
    python tests/train/shapes_on_fake_tensors.py --only NAME [NAME ...] --record ''

The first command writes results/bench/shapes.json. The pipeline's own Trainer takes two optimizer
steps of at most two micro-batches on fake tensors, which have shapes and dtypes but no data. It is
the first process of a fake group of sft.processes. Every row has the recipe's seq_length. Live
memory is added up whenever a tensor is made, resized or freed. Gigabytes are 10^9 bytes.

`states` are weights, gradients and moments that a GPU holds when the optimizer steps. `peak` is the
maximum of the second step, by kind. `copies` are casts of weights, gathered weights of fsdp2, and
gradients before they are reduced.

Differences from a GPU: attention is the CPU's, which keeps the same tensors. The kernels of TRL's
loss, which work in place, and torchao's compiled step are left out. Unused memory of the allocator
and CUDA's context are not counted.
"""

import argparse
import json
import os
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # small_world

import torch
import trl.kernels.chunked_logprob
from small_world.tokenizer import make_tokenizer
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import pipeline.stages.rows  # noqa: F401  # registers the stages
from pipeline.config.compose import compose
from pipeline.config.stages import TrainStage
from pipeline.models.shape import SHAPES, Shape, shape_of
from pipeline.runs.provenance import machine_facts, package_versions
from pipeline.train import trainer as trainers
from pipeline.train.load import choose_parameters
from pipeline.train.memory import micro_batches, trained_parts, training_memory

aten = torch.ops.aten
RECORD = Path(__file__).parents[2] / "results/bench/shapes.json"

HARDWARE: dict[str, dict[str, Any]] = {  # as conf/hardware; of one A100 or H100 of 80 GB alike
    "a100_80x1": {
        "processes": 1,
        "micro_batch_size": 4,
        "gradient_checkpointing": True,
        "weights": "bfloat16",
        "optimizer": "adamw_8bit",
    },
    "a100_80x8": {"processes": 4, "parallel": "fsdp2", "gradient_checkpointing": True},
    "a100_80x8, sft.processes=8": {
        "processes": 8,
        "parallel": "fsdp2",
        "gradient_checkpointing": True,
    },
    "h100_80x8": {"processes": 2, "parallel": "fsdp2", "gradient_checkpointing": True},
}
OF_ADAPTERS = {"weights": "float32", "optimizer": "adamw"}  # which stay as everywhere
UNREASONABLE = {
    "full": ["sft=full", "expert=math", "recipe=unreasonable_full"],
    "partial B": ["sft=partial", "partition=B", "expert=math", "recipe=unreasonable_full"],
    "simultaneous B": [
        "sft=simultaneous",
        "partition=B",
        "expert=math_sw",
        "recipe=unreasonable_simultaneous",
    ],
    "lora": ["sft=lora", "expert=math", "recipe=unreasonable_lora"],
    "simultaneous_lora B": [
        "sft=simultaneous_lora",
        "partition=B",
        "expert=math_sw",
        "recipe=unreasonable_simultaneous_lora",
    ],
}
EIGHT_LAYERS: dict[str, dict[str, Any]] = {  # other choices, of a Llama 3.1 8B of eight layers
    "one pass": {},
    "two passes": {"batch_size": 8},
    "no autocast": {"precision": "fp32"},
    "no checkpointing": {"gradient_checkpointing": False},
    "no checkpointing, two passes": {"gradient_checkpointing": False, "batch_size": 8},
    "bfloat16, no checkpointing": {"weights": "bfloat16", "gradient_checkpointing": False},
    "fsdp2, two passes": {"parallel": "fsdp2", "processes": 8, "batch_size": 64},
    "fsdp2, no checkpointing": {
        "parallel": "fsdp2",
        "processes": 8,
        "batch_size": 32,
        "gradient_checkpointing": False,
    },
    "fsdp2, no autocast": {
        "parallel": "fsdp2",
        "processes": 8,
        "batch_size": 32,
        "precision": "fp32",
    },
    "fsdp2, bfloat16": {
        "parallel": "fsdp2",
        "processes": 8,
        "batch_size": 32,
        "weights": "bfloat16",
    },
    "fsdp2, bfloat16, eight bits": {
        "parallel": "fsdp2",
        "processes": 8,
        "batch_size": 32,
        "weights": "bfloat16",
        "optimizer": "adamw_8bit",
    },
    "lora, no checkpointing": {"gradient_checkpointing": False},
    "fsdp2, simultaneous": {"parallel": "fsdp2", "processes": 8, "batch_size": 32},
}
SIMULTANEOUS = (
    "sft=simultaneous expert=math_sw partition=own partition.bottom_layers=2 partition.top_layers=1"
)
MODELS: dict[
    str, dict[str, Any]
] = {  # what shapes of pipeline.models.shape are called in transformers
    "llama3.1_8b": {"model_type": "llama"},
    "llama3.1_8b_instruct": {"model_type": "llama"},
    "qwen2.5_7b_instruct": {"model_type": "qwen2"},
    "aya_expanse_8b": {"model_type": "cohere", "logit_scale": 0.125},
    "falcon3_7b_instruct": {"model_type": "llama"},
}


def cases() -> dict[str, tuple[str, list[str], dict[str, Any]]]:
    """Name -> (model, words of the recipe, knobs of the hardware).

    Recipes of the same sizes stand for one another: math_1 is of 4 x 2,048 tokens, sw_1 of 8 x
    1,024, joint_1 of 8 x 2,048; mixed and cpt are full. Adapters of two sides are as large as those
    of one method on all layers.
    """
    recipes = {
        f"layer_swapping {name}": (
            "llama3.1_8b",
            [f"sft={way}", f"expert={expert}", f"recipe=layer_swapping_{name}"],
        )
        for name, way, expert in (
            ("math_1", "full", "math"),
            ("sw_1", "full", "sw"),
            ("joint_1", "mixed", "math_sw"),
        )
    }
    recipes |= {
        f"unreasonable {way}, {model}": (model, words)
        for model in list(MODELS)[1:]
        for way, words in UNREASONABLE.items()
        if way != "simultaneous_lora B" or model == "llama3.1_8b_instruct"
    }
    found = {}
    for hardware, knobs in HARDWARE.items():
        for name, (model, words) in recipes.items():
            largest = "full," in name or "simultaneous B, llama" in name or "joint" in name
            if knobs["processes"] in (2, 8) and not largest:
                continue  # as with four, but of twice or half the size
            found[f"{hardware}: {name}"] = (
                model,
                words,
                knobs | (OF_ADAPTERS if "lora" in name else {}),
            )
    shared = {
        "processes": 1,
        "batch_size": 4,
        "micro_batch_size": 4,
        "gradient_checkpointing": True,
    }
    for name, knobs in EIGHT_LAYERS.items():
        way = (
            SIMULTANEOUS
            if "simultaneous" in name
            else f"sft={'lora' if 'lora' in name else 'full'} expert=math"
        )
        found[f"eight layers: {name}"] = (
            "llama3.1_8b",
            [*way.split(), "recipe=unreasonable_full"],
            shared | knobs,
        )
    return found


# --- what lives ---


class Memory(TorchDispatchMode):
    """Bytes of all live fake tensors, and their maximum while `on`.

    `kind_of(storage, shape)` names the kinds at the maximum. Values that depend on data are
    answered: a number is 1, a mask selects everything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[
            int, tuple[Any, int, tuple[int, ...]]
        ] = {}  # storage -> (reference, bytes, shape when made)
        self.now = self.peak = self.seen = 0
        self.on = False
        self.phase = self.peak_phase = ""
        self.kinds: dict[str, int] = {}
        self.list_kinds: Callable[[], dict[int, str]] = dict
        self.is_copy: Callable[[tuple[int, ...]], bool] = lambda shape: False

    def see(self, tensor: Any) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if type(tensor).__name__ != "FakeTensor":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.live:
            self.live[key] = (
                weakref.ref(storage, lambda _: self.forget(key)),
                0,
                tuple(tensor.shape),
            )
        self.resize(key, size)

    def forget(self, key: int) -> None:
        self.now -= self.live.pop(key)[1]

    def resize(self, key: int, size: int) -> None:
        if key not in self.live:
            return
        reference, before, shape = self.live[key]
        self.live[key] = reference, size, shape
        self.now += size - before
        if self.on and self.now > self.peak:
            self.peak, self.peak_phase = self.now, self.phase
            if self.peak > 1.003 * self.seen:
                self.seen, self.kinds = self.peak, self.by_kind()

    def by_kind(self) -> dict[str, int]:
        known, found = self.list_kinds(), defaultdict(int)
        for key, (_, size, shape) in self.live.items():
            found[known.get(key) or ("copies" if self.is_copy(shape) else "activations")] += size
        return dict(found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # the same memory
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        masked = func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool
        if masked:
            [mask] = args[1]
            out = args[0].new_empty((mask.numel(), *args[0].shape[mask.ndim :]))
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            self.see(tensor)
        return out


def storages(tensor: Any) -> Iterator[int]:
    """Of a tensor, a shard of one, or one of torchao's, which holds several."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if hasattr(tensor, "__tensor_flatten__") and type(tensor).__name__ != "FakeTensor":
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield tensor.untyped_storage()._cdata


def type_of(tensor: Any) -> str:
    """Dtype of a tensor, of the numbers in one of torchao's, which appears to be of another."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return str(getattr(tensor, "codes", tensor).dtype).removeprefix("torch.")


def sharded_parameters(trainer: Any) -> list[Any]:
    groups = [
        group
        for module in trainer.model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    return [parameter for group in groups for parameter in group.fsdp_params]


def states_of(trainer: Any) -> dict[str, list[Any]]:
    """Kind -> tensors of this process: its shards, or the whole."""
    shards = [parameter.sharded_param for parameter in sharded_parameters(trainer)]
    parameters = shards or list(trainer.model.parameters())
    moments = [
        t
        for state in trainer.optimizer.state.values()
        for name, t in state.items()
        if name != "step"
    ]
    return {
        "weights": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "moments": moments,
    }


def kinds_of(trainer: Any) -> dict[int, str]:
    """Storage -> kind, of what is known by its owner."""
    if trainer.optimizer is None:
        return {}
    found = {
        key: kind
        for kind, tensors in states_of(trainer).items()
        for t in tensors
        for key in storages(t)
    }
    for parameter in sharded_parameters(trainer):
        found |= dict.fromkeys(storages(parameter._sharded_param_data), "weights")
        found |= {key: "copies" for out in parameter.all_gather_outputs for key in storages(out)}
    return found


# --- a fake training ---


@contextmanager
def fake_processes(count: int) -> Iterator[None]:
    """Make this process the first of `count`, with collectives that do nothing.

    accelerate takes them for GPUs.
    """
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if count == 1:
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
        return
    real = PartialState.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    mesh = init_device_mesh("cpu", (count,))
    with (
        patch.dict(os.environ, variables),
        patch.object(PartialState, "__init__", init),
        patch.object(_fully_shard, "_init_default_mesh", lambda: mesh),
    ):
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
    dist.destroy_process_group()


@contextmanager
def stand_ins(memory: Memory) -> Iterator[None]:
    """Fake tensors have no address and stay where they are; kernels of GPUs hold nothing."""
    import torchao.optim.adam
    from accelerate.optimizer import AcceleratedOptimizer
    from torch._subclasses.fake_tensor import FakeTensor

    resize, init = torch.UntypedStorage.resize_, AcceleratedOptimizer.__init__

    def resize_storage(storage: Any, size: int) -> Any:
        found = resize(storage, size)
        memory.resize(storage._cdata, storage.nbytes())
        return found

    def init_optimizer(self: Any, *given: Any, **named: Any) -> None:
        with _disable_current_modes():  # it copies the learning rate
            init(self, *given, **named)

    nothing = lambda *given, **named: None  # noqa: E731
    with (
        patch.object(torch.UntypedStorage, "resize_", resize_storage),
        patch.object(torch.nn.Module, "to", lambda self, *given, **named: self),
        patch.object(FakeTensor, "data_ptr", lambda self: self.untyped_storage()._cdata),
        patch.object(AcceleratedOptimizer, "__init__", init_optimizer),
        patch.object(trl.kernels.chunked_logprob, "_forward_tile", nothing),
        patch.object(trl.kernels.chunked_logprob, "_backward_tile", nothing),
        patch.object(trl.kernels.chunked_logprob, "_addmm_fp32", nothing),
        patch.object(torchao.optim.adam, "single_param_adam", nothing),
    ):
        yield


def config_of(shape: Shape, model: str) -> Any:
    from transformers import AutoConfig

    fields = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    fields |= (
        {"head_dim": shape.head_width} if shape.head_width * shape.heads != shape.width else {}
    )
    return AutoConfig.for_model(**fields | MODELS[model])


def outside_modes(owner: Any, name: str) -> None:
    """Prepare data outside of fake modes, because its order and lengths are numbers."""
    real = getattr(owner, name)

    def prepare(*given: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return real(*given, **named)

    setattr(owner, name, prepare)


def measure(config: TrainStage, shape: Shape) -> dict[str, Any]:
    """Run two steps of a training on fake tensors; return bytes by kind, and dtypes."""
    import datasets
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from transformers import AutoModelForCausalLM

    datasets.disable_progress_bars()
    sft, memory, fake = config.sft, Memory(), FakeTensorMode(allow_non_fake_inputs=True)
    dtypes: dict[str, set[str]] = defaultdict(set)
    states: dict[str, int] = {}
    rows: list[dict[str, str]] = [
        {"prompt": "a", "completion": "Mia has 3 cups. " * (sft.seq_length // 4)}
    ]
    rows *= 2 * sft.batch_size
    if sft.method in ("mixed", "simultaneous"):
        rows = [row | {"side": side} for row in rows for side in ("math", "language")]

    def on_step(*_: Any) -> None:
        for kind, tensors in states_of(trainer).items():
            keys = {key for tensor in tensors for key in storages(tensor)}
            states[kind] = max(
                states.get(kind, 0), sum(memory.live[key][1] for key in keys if key in memory.live)
            )
            dtypes[kind] |= {type_of(tensor) for tensor in tensors}

    def in_phase(owner: Any, name: str, phase: str) -> None:
        real = getattr(owner, name)

        def run(*given: Any, **named: Any) -> Any:
            before, memory.phase = memory.phase, phase
            memory.on = (
                trainer.state.global_step >= sft.steps // 2
            )  # of both sides, where they take turns
            try:
                return real(*given, **named)
            finally:
                memory.phase = before

        setattr(owner, name, run)

    def reduce(comm: Any, output_tensor: Any, input_tensor: Any, *given: Any, **named: Any) -> Any:
        dtypes["reduced"].add(type_of(input_tensor))
        return real_reduce(comm, output_tensor, input_tensor, *given, **named)

    real_reduce = DefaultReduceScatter.__call__
    with (
        TemporaryDirectory() as folder,
        stand_ins(memory),
        fake_processes(sft.processes),
    ):
        with fake, memory:
            model = AutoModelForCausalLM.from_config(
                config_of(shape, config.model.name),
                dtype=getattr(torch, sft.weights),
                attn_implementation="sdpa",
            )
            model, parts = choose_parameters(model, sft, config.partition)
        trainer, _ = trainers.trainer_of(
            config, model, parts, make_tokenizer(), rows, [], Path(folder)
        )
        sizes = {tuple(p.shape) for p in model.parameters()}
        memory.is_copy = lambda shape: shape in sizes or (len(shape) == 1 and shape[0] > 10**6)
        memory.list_kinds = lambda: kinds_of(trainer)
        outside_modes(trainer, "get_train_dataloader")
        outside_modes(trainer, "data_collator")
        outside_modes(trainer, "create_optimizer")
        in_phase(trainer, "training_step", "forward")
        in_phase(trainer.accelerator, "backward", "backward")
        [last] = [
            m for name, m in model.named_modules() if name.endswith(f"layers.{shape.layers - 1}")
        ]
        last.register_forward_hook(
            lambda module, given, out: dtypes["layer output"].add(type_of(out))
        )
        hook = register_optimizer_step_pre_hook(on_step)
        with fake, memory, patch.object(DefaultReduceScatter, "__call__", reduce):
            trainer.train()
        hook.remove()
    return {
        "dtypes": {kind: sorted(found) for kind, found in dtypes.items()},
        "states": states,
        "peak": memory.peak,
        "of_peak": memory.kinds,
        "at": memory.peak_phase,
    }


def row_of(name: str) -> dict[str, Any]:
    """One row of the record."""
    model, words, knobs = cases()[name]
    given = [f"sft.{key}={str(value).lower()}" for key, value in knobs.items()]
    config: Any = compose(["stage=sft", f"model={model}", *words, *given])
    micro, passes = micro_batches(config.sft)
    rows = micro * config.sft.processes * min(passes, 2)
    # a row of another length than any matrix is wide, so that activations are not taken for
    # gradients
    side = config.expert.side if config.sft.method == "partial" else None
    sft = replace(
        config.sft,
        batch_size=rows,
        micro_batch_size=micro,
        seq_length=config.sft.seq_length - 1,
        steps=4 if config.sft.method == "simultaneous" else 2,
        template="plain",
        snapshot_every=None,
        warmup_steps=0,
        side=side,
    )
    config = replace(config, sft=sft)
    shape = replace(SHAPES[model], layers=8) if name.startswith("eight layers") else SHAPES[model]
    assert shape_of(config_of(shape, model).to_dict()) == shape
    begun = time.perf_counter()
    measured = measure(config, shape)
    estimate = training_memory(shape, trained_parts(config, shape).values(), sft.seq_length, sft)
    total = sum(estimate.values()) - estimate.pop("context")
    return {
        "name": name,
        "rows a pass": micro,
        "tokens a row": sft.seq_length,
        "passes": passes,
        "measured_gb": (
            {kind: round(size / 1e9, 3) for kind, size in measured["states"].items()}
            | {"peak": round(measured["peak"] / 1e9, 3)}
        ),
        "of_peak_gb": {
            kind: round(size / 1e9, 3) for kind, size in sorted(measured["of_peak"].items())
        },
        "peak_in": measured["at"],
        "estimated_gb": (
            {kind: round(size / 1e9, 3) for kind, size in estimate.items()}
            | {"peak": round(total / 1e9, 3)}
        ),
        "error": round(total / measured["peak"] - 1, 4),
        "dtypes": measured["dtypes"],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", help="names, or parts of them; all others are left out"
    )
    parser.add_argument("--record", default=str(RECORD), help="the file to write; empty for none")
    options = parser.parse_args()
    names = [
        name for name in cases() if not options.only or any(part in name for part in options.only)
    ]
    rows = []
    for name in names:
        row = row_of(name)
        rows.append(row)
        print(
            f"{name}: measured {row['measured_gb']['peak']:.1f} GB, estimated"
            f" {row['estimated_gb']['peak']:.1f}, {row['error']:+.1%} ({row['seconds']:.0f} s)",
            flush=True,
        )
        if options.record:
            record = {"machine": machine_facts(), "versions": package_versions(), "rows": rows}
            Path(options.record).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
