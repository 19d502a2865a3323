"""Every knob: its unit, its bounds, its default; a dataclass a stage.

The defaults stand here and nowhere else; the files under conf/ only choose.

What enters a run's hash (design: identity) is decided here too: each field does, unless it is declared with
`hashed=False` (paths, labels, batch sizes of evaluation) or names a RUN (parents enter by their own hashes), and a
field at its declared default adds nothing, so a new knob leaves old runs valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from omegaconf import MISSING

from pipeline.knobs import knob, part

# ---------------------------------------------------------------------------------------------------- groups


@dataclass
class Tracking:
    """W&B. mode auto: online where a key is configured, offline otherwise; nothing ever asks."""

    project: str = "cross-lingual-merging"
    entity: str | None = None
    mode: str = knob("auto", options=("auto", "online", "offline", "disabled"))


@dataclass
class Model:
    """The base. `path`: RUN, a folder, hub:org/name, or package:folder for one shipped with the wheel."""

    name: str = knob(hashed=False)
    path: str | None = knob(None, run=True)
    revision: str | None = None  # of a hub model
    init: str = knob("pretrained", options=("pretrained", "random"))
    architecture: dict[str, Any] = knob({})  # init=random: fields of transformers' config; model_type is one of them
    tokenizer: str = knob(
        "own", options=("own", "bpe", "data_root")
    )  # own: beside the weights; data_root: data_root/tokenizer
    vocab_size: int = knob(4096, low=257)  # tokenizer=bpe: pieces, the 256 bytes included
    attn_implementation: str = knob("sdpa", options=("sdpa", "eager"))


@dataclass
class Source:
    """One dataset: where it is on the hub, or below data_root, and which rows are taken."""

    hub: str | None = None
    hub_config: str | None = None
    split: str = "train"
    revision: str | None = None
    licence: str = knob("", hashed=False)
    paper: str = knob("", hashed=False)  # where the papers name it
    file: str = MISSING  # below data_root
    rows: str = MISSING  # the function of data/sources.py that reads a row
    language: str | None = None  # our code; only rows of it
    side: str | None = knob(None, options=("math", "language"))  # which of the two, in an expert of both


@dataclass
class World:
    """The small world (data/sandbox.py): sizes in items or rows."""

    seed: int = knob(0, low=0)  # lexicons and facts; the shipped base knows those of seed 0
    items: int = knob(100, low=1, high=2000)  # test items a benchmark and language
    dev_items: int = knob(250, low=1, high=2000)
    math_rows: int = knob(6000, low=1)
    language_rows: int = knob(16000, low=1)  # a clone language
    documents: int = knob(0, low=0)  # plain text to make a base from; 0: none is written


@dataclass
class Expert:
    """What is taught, and from which sets.

    side: whose layers it gives to a swap; both: a joint set, whose rows say their side; none: text that makes a base.
    """

    name: str = knob(hashed=False)
    side: str = knob(MISSING, options=("math", "language", "both", "none"), hashed=False)
    sources: dict[str, Source] = field(default_factory=dict)
    world: World | None = None  # set: the data run writes the small world instead of a training set


@dataclass
class Data:
    """The mixture drawn from an expert's sources."""

    size: int | None = knob(None, low=1)  # training rows; null: all there are
    validation: int = knob(0, low=0)  # rows kept apart, besides `size`
    shuffle: bool = True  # false: the sources' own order, for a set that is a curriculum


@dataclass
class Partition:
    """A split of the transformer layers into a language and a math side.

    The first `bottom_layers` and the last `top_layers` are language, the rest math. `all_attention` (A) or `all_mlp`
    gives that part of every layer to language too; `inverse` exchanges the sides (Z). `outside` is the side of
    embeddings, final norm and head; frozen: trained on neither.
    """

    name: str = knob(hashed=False)
    bottom_layers: int = knob(low=0)
    top_layers: int = knob(low=0)
    all_attention: bool = False
    all_mlp: bool = False
    inverse: bool = False
    outside: str = knob("frozen", options=("frozen", "math", "language"))
    scale_to_depth: bool = False  # counts as of 32 layers: max(1, floor(count x layers / 32))


@dataclass
class Sft:
    """A way to train, and its recipe. Batch sizes are sequences an optimizer step; lengths are tokens."""

    name: str = knob(hashed=False)
    method: str = knob("full", options=("full",))
    learning_rate: float = knob(1e-5, above=0)
    batch_size: int = knob(32, low=1)
    micro_batch_size: int | None = knob(None, low=1)  # null: all at once; else batch_size is accumulated from these
    seq_length: int = knob(1024, low=8)
    packing: bool = False  # cpt: string plain text together and cut it into rows of seq_length
    epochs: int = knob(1, low=1)  # passes over the set
    steps: int | None = knob(
        None, low=1
    )  # optimizer steps; null: all that the passes give, a last incomplete batch left out
    optimizer: str = knob("adamw", options=("adamw", "muon"))
    schedule: str = knob("linear", options=("linear", "wsd", "constant"))  # warm-up first, in each
    warmup_steps: int = knob(0, low=0)  # optimizer steps
    decay_share: float = knob(0.1, low=0, high=1)  # wsd: the share of steps that decays, linearly
    weight_decay: float = knob(0.1, low=0)
    adam_beta1: float = knob(0.9, low=0, high=1)
    adam_beta2: float = knob(0.99, low=0, high=1)
    max_grad_norm: float = knob(1.0, above=0)
    shuffle: bool = True  # false: the data run's order, once
    loss_on: str = knob("response", options=("response", "all"))
    template: str = knob("plain", options=("plain", "chat"))  # plain: prompt, separator, completion
    separator: str = "\n"
    precision: str = knob("fp32", options=("fp32", "bf16"))  # bf16: autocast over fp32 master weights
    gradient_checkpointing: bool = False
    save_dtype: str | None = knob(None, options=("float32", "bfloat16"))  # null: as trained, float32


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
class EvalTask:
    task: str = MISSING
    num_fewshot: int = knob(MISSING, low=0)


@dataclass
class Eval:
    name: str = knob(hashed=False)
    tasks: list[EvalTask] = MISSING
    split: str = knob("test", options=("test", "dev"))
    limit: int | None = knob(None, low=1)  # questions a task; null: all
    max_gen_toks: int | None = knob(None, low=1)  # null: the task's own
    dtype: str = knob("auto", options=("auto", "float32", "bfloat16", "float16"))  # auto: as stored
    batch_size: int = knob(32, low=1, hashed=False)


@dataclass
class Table:
    """A table: rows that are command lines.

    In a row, `{language}` and `{seed}` are filled in, and a RUN may name a row above it. An empty row is the model of
    `base`.
    """

    name: str = MISSING
    title: str = MISSING
    note: str = ""
    languages: list[str] = MISSING  # the targets
    seeds: list[int] = knob([0])
    data_root: dict[str, Any] | None = None  # a data run laid out as a data_root; null: the root key data_root
    base: dict[str, Any] | None = None  # the model that an empty row scores
    rows: dict[str, dict[str, Any]] = MISSING
    eval: dict[str, Any] = MISSING


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


# ---------------------------------------------------------------------------------------------------- stages


@dataclass
class Stage:
    stage: str = MISSING
    runs_dir: str = knob("runs", hashed=False)
    tracking: Tracking = part(Tracking, hashed=False)
    launcher: str = knob("local", options=("local",), hashed=False)


@dataclass
class RunStage(Stage):
    """A stage that makes one run. `deterministic`: torch's deterministic algorithms, wanted on a GPU."""

    redo: bool = knob(False, hashed=False)  # make it again, as a new attempt; its parents are left as they are
    seed: int = knob(0, low=0)
    deterministic: bool = knob(False)
    threads: int | None = knob(
        None, low=1, hashed=False
    )  # CPU threads; null: torch's choice. Same bits need the same count
    group: str | None = knob(None, hashed=False)  # the table it is made for; W&B's group


@dataclass
class DataStage(RunStage):
    expert: Expert = MISSING
    data: Data = part(Data)
    data_root: str | None = knob(None, run=True)


@dataclass
class TrainStage(RunStage):
    """sft and cpt. Expert and data are decided by the data run, which is the parent."""

    model: Model = MISSING
    expert: Expert = field(default=MISSING, metadata={"hashed": False})
    data: Data = part(Data, hashed=False)
    data_root: str | None = knob(None, run=True)
    sft: Sft = MISSING


@dataclass
class MergeStage(RunStage):
    merge: Merge = MISSING
    partition: Partition | None = None  # layer_swap: in place of counts; reset: what merge.side is of


@dataclass
class EvalStage(RunStage):
    """One of `checkpoint` and `merge`: a merge is scored in memory, without being written."""

    checkpoint: str | None = knob(None, run=True)  # RUN, a folder with a model, or package:folder
    merge: Merge | None = None
    partition: Partition | None = None
    eval: Eval = MISSING
    languages: list[str] = knob(["en"])
    data_root: str | None = knob(None, run=True)


@dataclass
class AnalyzeStage(RunStage):
    checkpoint: Any = knob(run=True)  # an expert, or a list of experts of one base
    base: str | None = knob(None, run=True)  # null: from the experts' manifests
    analyze: Analyze = part(Analyze)


@dataclass
class SweepStage(Stage):
    """One merge over a grid of its knobs, scored on one loaded model. Each point is a run of stage=eval merge=..."""

    merge: Merge = MISSING
    partition: Partition | None = None
    sweep: Sweep = part(Sweep)
    eval: Eval = MISSING
    languages: list[str] = knob(["en"])
    data_root: str | None = knob(None, run=True)
    seed: int = knob(0, low=0)
    deterministic: bool = False
    threads: int | None = knob(None, low=1, hashed=False)
    redo: bool = knob(False, hashed=False)


@dataclass
class TableStage(Stage):
    """plan, table and report: many runs."""

    table: Table = MISSING
    data_root: str | None = knob(None, run=True)
    threads: int | None = knob(None, low=1, hashed=False)


@dataclass
class StatusStage(Stage):
    pass


STAGES: dict[str, type[Stage]] = {
    "data": DataStage, "cpt": TrainStage, "sft": TrainStage, "merge": MergeStage, "eval": EvalStage,
    "analyze": AnalyzeStage, "sweep": SweepStage,
    "plan": TableStage, "table": TableStage, "report": TableStage, "status": StatusStage,
}  # fmt: skip

# Raised when the stage's code changes its results; a test holds a tiny run of each to its values.
VERSIONS = {"data": 1, "cpt": 1, "sft": 1, "merge": 1, "eval": 1, "analyze": 1}
