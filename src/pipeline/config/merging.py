"""Merges, grids of them, and the map of what training changed."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass
from typing import Any

from omegaconf import MISSING

from pipeline.config.knob import knob


@dataclass
class Merge:
    """What all merges have. A LoRA expert is its base and its adapter, read as float32."""

    method: str = MISSING
    dtype: str | None = knob(None, options=("float32", "bfloat16", "float16"))  # null: the sources' dtype
    base: str | None = knob(None, run=True)  # null: from the experts' manifests, where the merge needs it
    files_from: str | None = None  # whose tokenizer, template and configs: a role of the plan; null: the first
    form: str = knob("auto", options=("auto", "dense", "adapter"))  # auto: of adapters an adapter, where it is exact


OWNERS = ("average", "magnitude", "math", "language")


@dataclass
class LayerSwap(Merge):
    """Layer Swapping, Algorithm 1: the language expert's bottom and top layers in the math expert.

    `math` and `language` are a RUN, or a list that is souped first. With `partition=` its sides replace the counts.
    """

    method: str = "layer_swap"
    math: Any = knob(run=True)
    language: Any = knob(run=True)
    bottom_layers: int = knob(5, low=0)
    top_layers: int = knob(2, low=0)
    bottom_transition: int = knob(0, low=0)
    top_transition: int = knob(0, low=0)
    scale_to_depth: bool = False  # counts as of 32 layers: max(1, floor(count x layers / 32))
    zones: str = knob("average", options=OWNERS)
    embeddings: str = knob("average", options=OWNERS)
    final_norm: str = knob("average", options=OWNERS)
    head: str = knob("average", options=OWNERS)
    layer_norms: str = knob("with_layer", options=("with_layer", *OWNERS))


@dataclass
class Soup(Merge):
    method: str = "soup"
    experts: list[str] = knob(run=True)
    weights: Any = None  # uniform, magnitude, or a number an expert; null: uniform

    def __post_init__(self) -> None:
        if self.weights == "uniform":
            self.weights = None
        if isinstance(self.weights, list) and all(type(weight) is int for weight in self.weights):
            self.weights = [float(weight) for weight in self.weights]


@dataclass
class Ties(Merge):
    """TIES as its paper defines it: trim, elect by the sum of signs, mean of those that agree.

    merge=ties_mergekit and merge=ties_peft set the four switches to the definitions of those programs.
    """

    method: str = "ties"
    experts: list[str] = knob(run=True)
    density: float = knob(0.2, above=0, high=1)
    scale: float = knob(1.0, above=0)
    trim: str = knob("model", options=("model", "tensor"))
    weights: list[float] | None = None  # a number an expert; null: 1 each
    weigh: str = knob("after", options=("before", "after"))  # the election of signs
    divisor: str = knob("count", options=("count", "weights"))  # of the experts that agree
    zero_sum: str = knob("majority", options=("majority", "plus"))  # the sign elected where the sum is exactly 0


@dataclass
class TaskArithmetic(Merge):
    """base + scale x the weighted sum of task vectors."""

    method: str = "task_arithmetic"
    experts: list[str] = knob(run=True)
    scale: float = 1.0
    weights: list[float] | None = None  # a number an expert; null: 1 each


@dataclass
class Reset(Merge):
    """The base's values given back to a side of `partition=`, to layers, or to rows that changed little."""

    method: str = "reset"
    expert: str = knob(run=True)
    side: str | None = knob(None, options=("math", "language"))
    layers: list[int] | None = knob(None, low=0)  # from 0, next to the embeddings
    threshold: float | None = knob(None, low=0)  # mean absolute change of a row
    axis: str = knob("input", options=("input", "output"))  # what a row is, as in analyze.axis
    outside: str | None = knob(None, options=("reset", "keep"))  # null: reset with a side, else keep


@dataclass
class Analyze:
    """The map of what training changed: mean absolute change of a row, a row being an input or an output feature."""

    axis: str = knob("input", options=("input", "output"))  # input: as in the published figures
    threshold: float | None = knob(None, low=0)  # null: the published one of the expert's side, below
    threshold_math: float = knob(1.0e-5, low=0)  # layer_swapping figure 2; which is whose is ours
    threshold_language: float = knob(1.9e-5, low=0)
    compare_unlike: bool = False  # one scale for experts of different dtypes or optimizers: rounding is in them


NOT_SWEPT = ("method", "base", "math", "language", "experts", "expert", "form", "files_from")


MERGES: dict[str, type[Merge]] = {
    "layer_swap": LayerSwap, "soup": Soup, "ties": Ties, "task_arithmetic": TaskArithmetic, "reset": Reset,
}  # fmt: skip


Sweep: Any = make_dataclass(
    "Sweep",
    [
        *(
            (name, list[Any] | None, knob(None))
            for name in sorted({f.name for m in MERGES.values() for f in fields(m)} - set(NOT_SWEPT))
        ),
        ("shard", str, knob("1/1", hashed=False)),
    ],
    namespace={"__doc__": "sweep.<knob of the merge>=[...]: a list each; shard i/n scores each n-th point."},
)
