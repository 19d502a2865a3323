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
    """One dataset: where it is on the hub, or below data_root, which rows are taken, and how many.

    How many: `count` rows, or a `share` of what data.size leaves to shares, or neither: all there are.
    """

    hub: str | None = None  # id of the repository, or a folder that is a copy of one
    hub_config: str | None = None
    split: str = "train"
    revision: str | None = None  # null: what stage=prefetch locked, until then the newest
    files: str | None = None  # a pattern of files inside the repository, read as they are: around a script, or a part
    url: str | None = None  # one file that is on no hub
    format: str | None = knob(None, options=("json", "csv", "parquet", "text"))  # of files and url; null: by their name
    licence: str = knob("", hashed=False)
    paper: str = knob("", hashed=False)  # where the papers name it
    file: str = MISSING  # below data_root: JSONL, CSV or parquet, or raw bitext
    rows: str = MISSING  # the function of data/sources.py that reads a row
    language: str | None = None  # our code; only rows of it
    side: str | None = knob(None, options=("math", "language"))  # which of the two, in an expert of both
    column: str | None = None  # rows=text, conversation: the column; null: text, the language's FLORES code
    prompt: str | None = None  # rows=template, bitext (the English side): text with {column}s
    completion: str | None = None  # rows=template, bitext (the other side)
    turns: int | None = knob(None, low=1)  # rows=conversation: turns kept from its beginning; null: all
    min_score: float | None = None  # rows=nllb: LASER margin
    without: list[str] | None = None  # benchmarks whose items are dropped even where data.decontaminate=count
    stream: bool = False  # read only as far as `candidates`, in an order shuffled by the seed, without fetching all
    candidates: int | None = knob(None, low=1)  # rows that are looked at; null: all, 10 million at most
    count: int | None = knob(None, low=1)
    share: float | None = knob(None, above=0)


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
    text: dict[str, Source] = knob({}, hashed=False)  # what stage=cpt reads in place of sources, where there is any
    size: int | None = knob(None, low=1)  # training rows where data.size does not say
    world: World | None = None  # set: the data run writes the small world instead of a training set


@dataclass
class Data:
    """The mixture drawn from an expert's sources. Dropping departs from the papers' letter; the card counts either."""

    size: int | None = knob(None, low=1)  # training rows; null: the expert's own, else all there are
    validation: int = knob(0, low=0)  # rows kept apart, besides `size`
    shuffle: bool = True  # false: the sources' own order, for a set that is a curriculum
    allow_fewer: bool = False  # take what there is where a source has fewer rows than asked
    decontaminate: str = knob("drop", options=("drop", "count"))  # rows that share an n-gram with a benchmark
    ngram: int = knob(13, low=4)  # words; twice as many characters where a script has no spaces
    benchmarks: str | None = knob(None, run=True)  # a folder laid out as data_root; null: data_root, else the hub
    word_problems: str = knob("drop", options=("drop", "count"))  # of language sets


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
    method: str = knob("full", options=("full", "partial", "mixed", "simultaneous"))
    adapter: str = knob("none", options=("none", "lora"))
    side: str | None = knob(None, options=("math", "language"))  # partial: what is trained; null: the expert's side
    steps_per_switch: int = knob(1, low=1)  # simultaneous: optimizer steps on one side before the other's turn
    learning_rate: float = knob(1e-5, above=0)
    batch_size: int = knob(32, low=1)  # over all processes and accumulated micro-batches
    micro_batch_size: int | None = knob(None, low=1)  # a process and pass; null: all at once
    processes: int = knob(1, low=1)  # one a GPU
    parallel: str = knob("ddp", options=("ddp", "fsdp2"))  # with processes > 1: whole copies, or shards
    seq_length: int = knob(1024, low=8)
    packing: bool = False  # cpt: string plain text together and cut it into rows of seq_length
    epochs: int = knob(1, low=1)  # passes over the set
    steps: int | None = knob(
        None, low=1
    )  # optimizer steps, both sides counted; null: all that the passes give, a last incomplete batch left out
    optimizer: str = knob("adamw", options=("adamw", "muon_adamw", "adamw_bf16", "adamw_8bit"))
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
    precision: str = knob("fp32", options=("fp32", "bf16"))  # bf16: matrix products by autocast
    weights: str = knob("float32", options=("float32", "bfloat16"))  # the dtype that weights and gradients have
    gradient_checkpointing: bool = False
    save_dtype: str | None = knob(None, options=("float32", "bfloat16"))  # null: as trained
    lora_rank: int = knob(64, low=1)
    lora_alpha: float = knob(16.0, above=0)  # adapters are scaled by alpha / sqrt(rank)
    lora_dropout: float = knob(0.0, low=0, high=1)
    lora_targets: list[str] = knob(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    snapshot_every: int | None = knob(None, low=1)  # samples; weights kept at the first step at or after each so many
    snapshot_keep: int | None = knob(None, low=1)  # snapshots that stay; null: all
    snapshot_keep_by: str = knob("last", options=("last", "validation_loss"))  # which: the last, or the lowest
    resume_minutes: float | None = knob(30.0, low=0, hashed=False)  # between resume points; null: only when stopped
    stall_minutes: float | None = knob(30.0, above=0, hashed=False)  # no step for so long ends it; null: never
    check_saved: bool = knob(True, hashed=False)  # after the first step: save, reload, compare


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
    where_possible: bool = False  # of a bundle: where its data is not there it is shown as missing, not refused


@dataclass
class Eval:
    name: str = knob(hashed=False)
    tasks: list[EvalTask] = MISSING
    split: str = knob("test", options=("test", "dev"))
    limit: int | None = knob(None, low=1)  # questions a task; null: all
    max_gen_toks: int | None = knob(None, low=1)  # null: the task's own
    dtype: str = knob("auto", options=("auto", "float32", "bfloat16", "float16"))  # auto: as stored
    backend: str = knob("hf", options=("hf", "vllm"))  # vllm: handed to the harness' own model class
    chat_template: bool = False  # the exemplars as turns of a conversation
    run_code: bool = False  # mbpp runs programs that the model writes, each confined
    too_long: int = knob(0, low=0)  # prompts a task that may not fit: they leave the score; more are refused
    spm_model: str | None = knob(None, hashed=False)  # SentencePiece model of spBLEU; its content enters as a parent
    batch_size: int = knob(32, low=1, hashed=False)  # prompts at once; halved where memory runs out
    share_prefix: bool = knob(True, hashed=False)  # exemplars are computed once, not once a question
    shards: int = knob(1, low=1, hashed=False)  # GPUs that share the questions of a task, a process each


@dataclass
class Measure:
    """One number of a model: its score on a task, in its primary metric, over the questions in one language."""

    task: str = MISSING
    language: str | None = None  # null: the mean over `languages`


@dataclass
class Select:
    """Which snapshot of which run stands for all: the best in primary measures among those that keep to the guards."""

    name: str = knob(hashed=False)
    by: str = knob("scores", options=("scores", "validation_loss"))
    snapshots: str = knob("all", options=("all", "last"))  # last: each run's final weights alone
    primary: list[Measure] | None = None  # ordered by the mean of the ranks in these
    guards: list[Measure] | None = None  # not below the base's score
    guard_slack: float = knob(0.0, low=0)  # by more than this
    place: int = knob(1, low=1)  # 2: the second best run's best, and so on: one snapshot a run
    eval: Eval | None = None  # what scores the snapshots; it holds the measures' tasks


@dataclass
class Clean:
    """What stage=clean frees, and what it leaves."""

    dry_run: bool = True  # only tell
    hours: float = knob(24.0, low=0)  # work untouched for less is left
    resume_points: bool = False  # free also what an interrupted training would go on from


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
    partition: Partition | None = None  # partial and simultaneous training need one


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
class SelectStage(RunStage):
    checkpoints: list[str] = knob(run=True)  # finished trainings, or rows of a table
    select: Select = MISSING
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
class Prefetch:
    update: bool = False  # take what the hub has now in place of what is locked: the hashes of runs change with it


@dataclass
class PrefetchStage(TableStage):
    prefetch: Prefetch = part(Prefetch)


@dataclass
class StatusStage(Stage):
    pass


@dataclass
class CleanStage(Stage):
    clean: Clean = part(Clean)


STAGES: dict[str, type[Stage]] = {
    "data": DataStage, "cpt": TrainStage, "sft": TrainStage, "merge": MergeStage, "eval": EvalStage,
    "select": SelectStage, "analyze": AnalyzeStage, "sweep": SweepStage,
    "plan": TableStage, "table": TableStage, "report": TableStage, "status": StatusStage,
    "prefetch": PrefetchStage, "clean": CleanStage,
}  # fmt: skip

# Raised when the stage's code changes its results; a test holds a tiny run of each to its values.
VERSIONS = {"data": 1, "cpt": 1, "sft": 1, "merge": 1, "eval": 1, "select": 1, "analyze": 1}
