"""SFTTrainer with our optimizers, which logs loss, gradient norm and movement of each side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
import trl.trainer.utils
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback
from trl import SFTTrainer

from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.progress import warn
from pipeline.train.memory import rounds_stochastically
from pipeline.train.optim import MuonWithAdamW, torchao_optimizer
from pipeline.train.trainable import ALL, Parts
from pipeline.train.updates import Sample

# Trainer arguments that its own loss reads and `Trainer.compute_loss` ignores -> the values that change nothing
UNREAD = {"label_smoothing_factor": 0.0, "loss_type": "nll", "parallelism_config": None}

LOOK_EVERY = 10  # steps of a part, from its second: measuring how far it moves costs some milliseconds


class Look(TrainerCallback):
    """Notifies the trainer when the training begins and when the optimizer has stepped."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.stop_backward_at_lowest()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.measure_after_step()


def pass_order(rows: int, sft: Sft, seed: int) -> list[int]:
    """Row numbers of sft.epochs passes, one after the other, each shuffled with the next draws of the seed."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(sft.epochs):
        order += torch.randperm(rows, generator=generator).tolist() if sft.shuffle else range(rows)
    return order


def sort_by_length(order: list[int], lengths: list[int], step: int) -> list[int]:
    """`order` with the rows of each `step` of them sorted by length: micro-batches need hardly any padding, and a
    step's rows, and so its loss, stay the same."""
    steps = (order[start : start + step] for start in range(0, len(order), step))
    return [row for rows in steps for row in sorted(rows, key=lambda row: lengths[row])]


class InOrder(Sampler[list[int]]):
    """Micro-batches of row numbers in a given order.

    Processes take every n-th micro-batch, so a step's are the same rows however many processes share them.
    """

    def __init__(self, order: list[int], micro: int) -> None:
        self.order = order
        self.batch_size, self.drop_last = micro, False  # accelerate reads them

    def __len__(self) -> int:
        return len(self.order) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return (self.order[start : start + self.batch_size] for start in range(0, len(self.order), self.batch_size))


def weigh_only_labels(model: Any) -> None:
    """Compute the output head only at labelled positions, and only the label's log-probability.

    TRL does the first with Triton and computes all positions elsewhere, for devices that compile a kernel per shape
    (`_use_triton` is read for nothing else in that module); it also computes the entropy and whether the label was the
    likeliest, which we do not report.
    """
    trl.trainer.utils._use_triton = lambda device: True
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    trl.trainer.utils.add_fused_lm_head(base, outputs=("log_probs",))


def weighted_collator(collate: Callable[[list[Any]], dict[str, Any]], weight: float) -> Callable[[list[Any]], Any]:
    """Batches of `collate` with the loss weight of each token: 1 in a response, `weight` in a prompt, 0 in padding."""

    def collate_weighted(rows: list[Any]) -> dict[str, Any]:
        batch = collate(rows)
        weights = torch.zeros(batch["input_ids"].shape)
        for row, of_row in zip(rows, weights, strict=True):
            length = len(row["input_ids"])  # the mask is not truncated
            response = torch.tensor(row["completion_mask"][:length])
            of_row[:length] = torch.where(response == 1, 1.0, weight)
        return batch | {"weights": weights}

    return collate_weighted


def refuse_unread(trainer: Any) -> None:
    """Raise PipelineError for arguments of the trainer that our loss would silently ignore."""
    for name, unread in UNREAD.items():
        if (value := getattr(trainer.args, name)) != unread:
            raise PipelineError(f"{name}={value} is not read by this trainer's loss: leave it at {unread}")
    for name in ("compute_loss_func", "compute_metrics"):
        if getattr(trainer, name) is not None:
            raise PipelineError(f"{name} is not called by this trainer's loss: leave it out")


def shard_dtypes(sft: Sft) -> MixedPrecisionPolicy:
    """FSDP2's dtypes: computed as under DDP, and gradients reduced in float32.

    Layers keep a residual stream in the dtype of the weights: their input is not cast, their output is float32 where
    the weights are.
    """
    computed = torch.bfloat16 if sft.precision == "bf16" else None
    reduced = torch.float32 if computed or sft.weights == "bfloat16" else None
    output = torch.float32 if computed and sft.weights == "float32" else None
    return MixedPrecisionPolicy(computed, reduced, output, cast_forward_inputs=False)


class Trainer(SFTTrainer):
    """Knows its parts: the names of the parameters trained in a step of each. Here one part, in all steps."""

    def __init__(self, *args: Any, sft: Sft, parts: Parts | None = None, **keywords: Any) -> None:
        self.sft = sft
        super().__init__(*args, **keywords)
        refuse_unread(self)
        self.stop_backward_at_lowest()
        assert self.model is not None
        weigh_only_labels(self.model)
        if sft.prompt_weight:
            self._set_signature_columns_if_needed()
            cast(list[str], self._signature_columns).append("completion_mask")
            self.data_collator = weighted_collator(self.data_collator, sft.prompt_weight)
        self.parts = parts or {ALL: [name for name, p in self.model.named_parameters() if p.requires_grad]}
        self.add_callback(Look(self))
        self.samples: dict[str, Sample] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.measured: dict[str, torch.Tensor] = {}
        self.warned: set[str] = set()

    def _build_accelerator_args(self, **given: Any) -> dict[str, Any]:
        """Accelerate's settings. Shards get our dtypes: told of bf16, it would upcast trained weights to float32 and
        reduce gradients in bf16. Each gradient is held once: shards are reduced after every micro-batch, and those of
        whole copies are views of DDP's buckets."""
        settings = super()._build_accelerator_args(**given)
        if (plugin := given["fsdp_plugin"]) is not None:
            plugin.mixed_precision_policy = shard_dtypes(self.sft)
            settings["mixed_precision"] = "no"
            settings["gradient_accumulation_plugin"].sync_each_batch = True
        for handler in settings["kwargs_handlers"]:
            handler.gradient_as_bucket_view = True
        return settings

    def stop_backward_at_lowest(self) -> None:
        """Let the backward pass end at the lowest trained layer: TRL, and again transformers as the training begins,
        make the embeddings' output require a gradient, which today's checkpointing does not need."""
        if self.args.activation_checkpointing:
            self.model.disable_input_require_grads()  # type: ignore[union-attr,operator]

    # ------------------------------------------------------------------------------------------------ trained parts

    def part_of(self, step: int) -> str:
        """The part that optimizer step `step`, from 0, moves."""
        return next(iter(self.parts))

    def own_step(self, step: int) -> int:
        """How many steps before `step` moved the same part."""
        return step

    def parameters_of(self, part: str) -> list[torch.nn.Parameter]:
        assert self.model is not None
        parameters = dict(self.model.named_parameters())
        return [parameters[name] for name in self.parts[part]]

    def create_optimizer(self, model: Any = None) -> Any:
        sft = self.sft
        if sft.optimizer == "muon_adamw":
            assert self.model is not None
            betas = (sft.adam_beta1, sft.adam_beta2)
            assert sft.learning_rate is not None
            self.optimizer = MuonWithAdamW(self.model, sft.learning_rate, sft.weight_decay, betas)
            return self.optimizer
        if sft.optimizer != "adamw":
            self.optimizer_cls_and_kwargs = torchao_optimizer(sft)
        return super().create_optimizer(model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader over all passes in sequence: a step may span two, and none is short, for any number of processes."""
        rows: Any = self._remove_unused_columns(self.train_dataset)  # type: ignore[arg-type]
        args = self.args
        order = pass_order(len(rows), self.sft, args.seed)[: args.max_steps * self.sft.batch_size]
        return self.make_loader(rows, InOrder(order, args.per_device_train_batch_size))

    def make_loader(self, rows: Any, batches: InOrder) -> DataLoader[Any]:
        if batches.batch_size < self.sft.batch_size:
            ids = (ids for batch in rows.select_columns("input_ids").iter(1000) for ids in batch["input_ids"])
            batches.order = sort_by_length(batches.order, [len(row_ids) for row_ids in ids], self.sft.batch_size)
        return self.accelerator.prepare(DataLoader(rows, batch_sampler=batches, collate_fn=self.data_collator))

    # ------------------------------------------------------------------------------------------------ the loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Mean loss over the labelled tokens of the whole step, weighted where they have weights."""
        assert not return_outputs
        weights = inputs.pop("weights", None)
        routed = {"output_router_logits": True} if self.aux_loss_enabled else {}  # for mixtures of experts
        with (
            torch.autocast(self.args.device.type, torch.bfloat16)
            if self.is_fsdp_enabled and self.args.bf16
            else nullcontext()
        ):
            outputs = model(**inputs, **routed, use_cache=False, fused_lm_head=True)
        weights = inputs["labels"][:, 1:].ne(-100) if weights is None else weights[:, 1:]
        total = weights.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss = -(outputs.log_probs * weights).sum() / total.clamp(min=1e-6)  # 0 where there is no label
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # which DDP divides by
        if self.aux_loss_enabled:  # a mean over the micro-batch
            shares = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / shares
        if self.model.training:  # type: ignore[union-attr]
            tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum().item()
            self._total_train_tokens += tokens
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Number of labels, or the sum of the tokens' weights, over the micro-batches of a step and all processes."""
        if not batch_samples or "weights" not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        total = torch.stack([batch["weights"][:, 1:].sum() for batch in batch_samples]).sum().to(device)
        return self.accelerator.gather(total).sum() if self.args.world_size > 1 else total

    # ------------------------------------------------------------------------------------------------ what is logged

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        loss = super().training_step(*args, **keywords)
        self._add(f"loss_{self.part_of(self.state.global_step)}", loss)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip, and as the step's gradients are complete here, count the step and sample its part now and then."""
        norm = super()._clip_grad_norm(model)
        step = self.state.global_step
        part = self.part_of(step)
        self.counts[part] += 1
        self._add(f"grad_norm_{part}", norm.detach() if isinstance(norm, torch.Tensor) else torch.tensor(norm))
        if self.own_step(step) % LOOK_EVERY == 1 % LOOK_EVERY and self._get_learning_rate() > 0:
            if part not in self.samples:
                self.samples[part] = Sample(self.parameters_of(part))
            self.samples[part].record_before_step()
            self.measured[part] = torch.empty(0)
        return norm

    def measure_after_step(self) -> None:
        """Measure the sampled part after the optimizer has stepped."""
        part = self.part_of(self.state.global_step)
        if part in self.measured and not self.measured[part].numel():
            self.measured[part] = self.samples[part].measure_step()

    def _add(self, key: str, value: torch.Tensor) -> None:
        self.sums[key] = self.sums[key] + value if key in self.sums else value.clone()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.interval_metrics()
        super().log(logs, start_time)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **keywords: Any) -> dict[str, float]:
        """Metrics; for a joint set each side's loss, and their mean as the loss of both."""
        metrics = super().evaluate(eval_dataset, *args, **keywords)
        if eval_dataset is None and isinstance(self.eval_dataset, dict):
            losses = {f"eval_{side}_loss": metrics[f"eval_{side}_loss"] for side in self.eval_dataset}
            metrics["eval_loss"] = sum(losses.values()) / len(losses)
            self.log(losses | {"eval_loss": metrics["eval_loss"]})
        return metrics

    def interval_metrics(self) -> dict[str, float]:
        """Means over the steps since the last log, and the movement in one of them, with the part's name where there
        are two. Called by all processes together."""
        metrics: dict[str, float] = {}
        ends = {part: f"_{part}" if len(self.parts) > 1 else "" for part in self.parts}
        for part, end in ends.items():
            if self.counts[part] and end:
                loss = self.accelerator.gather(self.sums[f"loss_{part}"].reshape(1)).mean()
                metrics[f"loss{end}"] = loss.item() / self.counts[part]
                metrics[f"grad_norm{end}"] = self.sums[f"grad_norm_{part}"].item() / self.counts[part]
            if part in self.measured and self.measured[part].numel():
                sums = self.measured[part]
                if self.is_fsdp_enabled:
                    sums = self.accelerator.reduce(sums, "sum")
                moved, stayed, with_gradient = sums.tolist()
                metrics[f"update_norm{end}"] = moved**0.5
                share = stayed / with_gradient if with_gradient else 0.0
                if rounds_stochastically(self.sft):
                    metrics[f"updates_unchanged{end}"] = share  # at random, right on average: none is lost
                else:
                    metrics[f"updates_lost{end}"] = share
                    self.warn_of_lost_updates(part, share)
        self.sums, self.measured = {}, {}
        self.counts.clear()
        return metrics

    def warn_of_lost_updates(self, part: str, share: float) -> None:
        warming_up = self.state.global_step <= self.sft.warmup_steps  # at small rates most are, whatever the recipe
        if share <= 0.5 or warming_up or part in self.warned or not self.is_world_process_zero():
            return
        self.warned.add(part)
        owner = "the" if part == ALL else f"the {part} side's"
        warn(
            f"{share:.0%} of {owner} updates are lost in rounding (sft.weights={self.sft.weights}, "
            f"sft.learning_rate={self.sft.learning_rate}, step {self.state.global_step}): "
            + (
                "raise sft.learning_rate"
                if self.sft.weights == "float32"
                else "use sft.weights=float32, or sft.optimizer=adamw_bf16 or adamw_8bit with bfloat16"
            )
        )
