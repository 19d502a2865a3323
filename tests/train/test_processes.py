"""Two processes on the CPU (gloo) against one with the same global batch.

Every way to train runs under DDP and FSDP2.
"""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from refusing import refuses
from safetensors.torch import load_file
from test_simultaneous import pure_loss
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeline.errors import PipelineError
from pipeline.files import sha256
from pipeline.runs.tracking import Tracker
from pipeline.train import trainer as trainers
from pipeline.train.processes import check_launch, launched_count, start_processes, train_together
from pipeline.train.save import save_model
from pipeline.train.trainer import Trainer

WAYS: dict[str, dict[str, Any]] = {
    "full, two passes": {"epochs": 2},
    "partial": {"method": "partial", "side": "math"},
    "simultaneous, checkpointing": {
        "method": "simultaneous",
        "gradient_checkpointing": True,
        "steps_per_switch": 2,
    },
    "mixed_lora": {"method": "mixed", "adapter": "lora"},
    "simultaneous_lora": {"method": "simultaneous", "adapter": "lora"},
}


DTYPES: dict[str, dict[str, Any]] = {
    "float32 weights, tied": {"weights": "float32", "precision": "bf16"},
    "float32 weights, no autocast": {
        "weights": "float32",
        "precision": "fp32",
        "method": "partial",
        "side": "math",
    },
    "bfloat16 weights, 8 bits": {
        "weights": "bfloat16",
        "precision": "bf16",
        "optimizer": "adamw_8bit",
    },
    "adapters of bfloat16 weights": {
        "weights": "bfloat16",
        "precision": "bf16",
        "adapter": "lora",
        "lora_rank": 4,
    },
    "two sides in turns": {
        "weights": "float32",
        "precision": "bf16",
        "method": "simultaneous",
        "gradient_checkpointing": True,
    },
    "adapters in turns": {
        "weights": "float32",
        "precision": "bf16",
        "method": "simultaneous",
        "adapter": "lora",
        "lora_rank": 4,
    },
}


def loss(self: Any, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
    return (
        pure_loss(model, inputs, num_items_in_batch) * self.accelerator.num_processes
    )  # DDP takes the mean


class PureTrainer(Trainer):
    compute_loss = loss


def all_ways(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Train each way in float64 in these processes; rank 0 writes weights and returns logs."""
    trainers.Trainer = PureTrainer  # type: ignore[misc]
    logs: dict[str, Any] = {}
    for way, words in WAYS.items():
        processes = run.config.sft.processes
        knobs = {"micro_batch_size": 2, "processes": processes, "lora_rank": 4, **words}
        recipe = tiny.recipe(batch_size=8, learning_rate=1e-3, max_grad_norm=0.2, **knobs)
        partition = tiny.B if recipe.method in ("partial", "simultaneous") else None
        rows = tiny.joint(16) if recipe.method in ("mixed", "simultaneous") else tiny.rows(32)
        rows = rows[:18] if recipe.epochs > 1 else rows  # no batch of 8 ends with a pass
        made = tiny.trainer(
            work / "t", recipe, rows, partition, of=tiny.model(dtype=torch.float64).double()
        )
        made.model.double()  # adapters too
        made.train()
        logs[way] = [row for row in made.state.log_history if "loss" in row]
        there = dict(made.model.named_parameters())
        assert made.is_fsdp_enabled == any(hasattr(p, "to_local") for p in there.values())
        whole = made.accelerator.get_state_dict(made.model) if made.is_fsdp_enabled else there
        if made.is_world_process_zero():
            torch.save({name: whole[name].detach() for name in there}, work / f"{way}.pt")
    if made.is_world_process_zero():
        tracker.log({"ways": len(logs)}, 1)
    return {"logs": logs, "world": made.args.world_size}


SHARDED = ("partial", "simultaneous, checkpointing", "simultaneous_lora")


def shard_on_cpu() -> None:
    """On a CPU accelerate uses whole copies instead of FSDP2, unless it takes the CPU for GPUs."""
    real = PartialState.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init  # type: ignore[method-assign]


def sharded(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Train some of the ways under FSDP2."""
    shard_on_cpu()
    for way in WAYS.keys() - set(SHARDED):
        del WAYS[way]
    for knobs in WAYS.values():
        knobs["parallel"] = "fsdp2"
    return all_ways(run, work, tracker)


def in_two(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Train all ways and dtypes in two processes, then some under FSDP2.

    All use the same processes, because each takes seconds to start.
    """
    gc.freeze()  # what is imported is not searched for garbage before each training
    facts: dict[str, Any] = {}
    steps = {"copies": all_ways, "ddp": dtypes, "shards": sharded, "fsdp2": dtypes}
    for name, train in steps.items():
        (work / name).mkdir(exist_ok=True)
        facts[name] = train(run, work / name, tracker)
        AcceleratorState._reset_state(reset_partial_state=True)
    return facts


def run_of(processes: int) -> Any:
    return SimpleNamespace(
        name="run", config=SimpleNamespace(sft=SimpleNamespace(processes=processes), threads=1)
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> Any:
    """Return folders and logs of one process, two, and two with shards, and the dtypes of two."""
    folder = tmp_path_factory.mktemp("ways")
    told: list[Any] = []
    tracker: Any = SimpleNamespace(log=lambda numbers, step=None: told.append((numbers, step)))
    (folder / "one").mkdir()
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr(trainers, "Trainer", trainers.Trainer)
        one = train_together(all_ways, run_of(1), folder / "one", tracker)
    assert one["world"] == 1
    told.clear()
    two = train_together(in_two, run_of(2), folder, tracker)
    found = {name: two.pop(name) for name in ("ddp", "fsdp2")}
    assert [facts["world"] for facts in two.values()] == [2, 2]
    # what a child tells reaches the tracker of its parent
    assert told == [({"ways": len(WAYS)}, 1), ({"ways": len(SHARDED)}, 1)]
    return *((folder / name, facts["logs"]) for name, facts in {"one": one, **two}.items()), found


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_equal_one(both: Any, way: str) -> None:
    (one, one_logs), (two, two_logs), *_ = both
    same(way, one, one_logs, two, two_logs)


@pytest.mark.parametrize("way", SHARDED)
def test_shards_in_two_processes_equal_one(both: Any, way: str) -> None:
    (one, one_logs), _, (two, two_logs), *_ = both
    same(way, one, one_logs, two, two_logs)


def same(way: str, one: Path, one_logs: Any, two: Path, two_logs: Any) -> None:
    first, second = torch.load(one / f"{way}.pt"), torch.load(two / f"{way}.pt")
    start = tiny.model(dtype=torch.float64).state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=1e-10, rtol=0)
    assert any(
        name in start and not torch.equal(start[name], p) or ".lora_B" in name and p.any()
        for name, p in first.items()
    )
    assert len(one_logs[way]) == 4
    for row, other in zip(one_logs[way], two_logs[way], strict=True):
        for key, value in row.items():
            if key in ("loss", "grad_norm"):
                assert other[key] == pytest.approx(value, rel=1e-6), key


def dtypes(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Return what each recipe stores, computes, reduces and saves in two processes.

    Work is named by how the processes share weights.
    """
    trainers.Trainer = Trainer  # type: ignore[misc]  # the pure one's loss has a dtype of its own
    facts: dict[str, Any] = {}
    for name, knobs in DTYPES.items():
        shared = {
            "batch_size": 8,
            "micro_batch_size": 2,
            "processes": 2,
            "learning_rate": 1e-3,
            "steps": 2,
        }
        recipe = tiny.recipe(parallel=work.name, **shared, **knobs)
        start = tiny.model(dtype=getattr(torch, recipe.weights), tie_word_embeddings="tied" in name)
        joint = recipe.method == "simultaneous"
        rows, held_out = (tiny.joint(16), tiny.joint(4)) if joint else (tiny.rows(32), tiny.rows(8))
        partition = tiny.B if recipe.method in ("partial", "simultaneous") else None
        made = tiny.trainer(work / "t", recipe, rows, partition, of=start, validation=held_out)
        facts[name] = dtypes_of(made, work / name)
        AcceleratorState._reset_state(reset_partial_state=True)
    return facts


def dtypes_of(made: Any, folder: Path) -> dict[str, Any]:
    """Train and save; return the dtypes of each step, and the losses."""
    seen: dict[str, set[str]] = {"layer output": set(), "reduced": set(), "gradient": set()}

    def name(tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def on_forward(module: Any, given: Any, output: Any) -> None:
        rounded = output.dtype == torch.float32 and bool((output.bfloat16() == output).all())
        if module.training:
            seen["layer output"].add(name(output) + ", all of bfloat16" * rounded)

    def on_step(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            seen["gradient"].update(name(p.grad) for p in group["params"] if p.grad is not None)

    def on_reduce(
        comm: Any, output_tensor: Any, input_tensor: Any, *args: Any, **named: Any
    ) -> Any:
        seen["reduced"].add(name(input_tensor))
        return reduce(comm, output_tensor, input_tensor, *args, **named)

    [layer] = [module for path, module in made.model.named_modules() if path.endswith("layers.1")]
    layer.register_forward_hook(on_forward)
    reduce = DefaultReduceScatter.__call__
    hook = register_optimizer_step_pre_hook(on_step)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DefaultReduceScatter, "__call__", on_reduce)
        made.train()
    hook.remove()
    weights = made.accelerator.get_state_dict(made.model) if made.is_fsdp_enabled else None
    first, log = made.is_world_process_zero(), made.state.log_history
    if first:
        save_model(made.model, made.processing_class, folder, None, weights)
    stored = [p for p in made.model.parameters() if p.requires_grad]
    moments = [t for state in made.optimizer.state.values() for t in state.values() if t.ndim]
    return {
        **{key: sorted(values) for key, values in seen.items()},
        "stored": sorted({name(p) for p in stored}),
        "in shards": all(hasattr(p, "to_local") for p in stored),
        "moments": sorted({name(t) for t in moments}),
        "saved": sorted(
            {name(t) for path in folder.glob("*.safetensors") for t in load_file(path).values()}
        ),
        "digests": [sha256(path) for path in folder.glob("*.safetensors")],
        "views": getattr(made.model_wrapped, "gradient_as_bucket_view", None),
        "reduced each pass": made.accelerator.gradient_state.plugin_kwargs.get(
            "sync_each_batch", False
        ),
        "losses": [row[key] for row in log for key in ("loss", "eval_loss") if key in row],
        "gradient norms": [row["grad_norm"] for row in log if "grad_norm" in row],
    }


def test_shards_have_the_dtypes_of_the_recipe(both: Any) -> None:
    """accelerate sets its own dtypes unless this is prevented, which may change."""
    *_, facts = both
    for name, knobs in DTYPES.items():
        copies, shards = facts["ddp"][name], facts["fsdp2"][name]
        kept_dtype(knobs, copies, shards)
        assert (copies["reduced"], shards["reduced"]) == ([], ["float32"]), (name, shards)
        assert copies["views"] and shards["reduced each pass"]  # each gradient is held once
        for found in (copies, shards):
            assert found["moments"] == found["stored"], (name, found)
            assert found["layer output"] == [knobs["weights"]], (name, found)
        assert (len(copies["losses"]), len(copies["gradient norms"])) == (2 + 2, 2)
        exact = name == "float32 weights, no autocast"
        assert shards["losses"] == pytest.approx(copies["losses"], rel=1e-5 if exact else 1e-3), (
            name
        )
        assert shards["gradient norms"] == pytest.approx(
            copies["gradient norms"], rel=1e-4 if exact else 2e-2
        ), name


def kept_dtype(knobs: dict[str, Any], *ways: dict[str, Any]) -> None:
    """Of copies, then of shards: all that is stored has the dtype of what is trained."""
    kept = ["float32" if "adapter" in knobs else knobs["weights"]]
    assert [found["in shards"] for found in ways] == [False, True]
    for found in ways:
        assert found["stored"] == found["gradient"] == found["saved"] == kept, found


def shards_of_one(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Return the dtypes of one NCCL process, without and with FSDP2."""
    facts: dict[str, Any] = {}
    for name in ("ddp", "fsdp2"):
        (work / name).mkdir()
        facts[name] = dtypes(run, work / name, tracker)
    return facts


@pytest.mark.gpu
def test_shards_on_a_gpu_have_the_losses_of_a_whole_model(tmp_path: Path) -> None:
    """FSDP2 itself, which a CPU cannot run without being taken for a GPU.

    The shard of one process is the model.
    """
    tracker: Any = SimpleNamespace(log=lambda numbers, step=None: None)
    facts = start_processes(1, shards_of_one, run_of(1), tmp_path, tracker)
    for name, knobs in DTYPES.items():
        whole, shard = facts["ddp"][name], facts["fsdp2"][name]
        kept_dtype(knobs, whole, shard)
        exact = name == "float32 weights, no autocast"
        assert shard["losses"] == pytest.approx(whole["losses"], rel=1e-5 if exact else 1e-2), name
        assert shard["gradient norms"] == pytest.approx(
            whole["gradient norms"], rel=1e-4 if exact else 5e-2
        ), name


def test_a_refusal_in_any_process_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"^sft.learning_rate=9: lower it$"):
        train_together(refuses, run_of(2), tmp_path, Tracker(None))


def test_a_launcher_must_start_as_many_as_the_hash_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4"), monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(
        PipelineError, match="sft.processes=2, but 4 processes were launched. Give sft.processes=4"
    ):
        train_together(refuses, run_of(2), tmp_path, Tracker(None))


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_world_size_without_what_goes_with_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Otherwise torch waits half an hour for missing processes, or accelerate gives a traceback."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert launched_count() == 2
    monkeypatch.delenv(missing)
    with pytest.raises(
        PipelineError,
        match=f"WORLD_SIZE=2 is set without {missing}. Unset WORLD_SIZE, or start with ",
    ):
        check_launch(1)
    monkeypatch.setenv("WORLD_SIZE", "1"), monkeypatch.delenv("RANK", raising=False)
    assert launched_count() is None
