"""Every setting with its unit, bounds and default: one dataclass per stage.

Defaults are set only here. The files under conf/ only choose.

This module also decides which fields affect a run's hash (`identity` in knob.py). Each field does,
unless it is declared with `hashed=False` (paths, labels, batch sizes of evaluation in float32) or
names a RUN, because parents enter by their own hashes. A field at its declared default adds
nothing, so a new field leaves old runs valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING

from pipeline.config.data import Data, Expert, default_separator
from pipeline.config.evaluation import Eval, Select
from pipeline.config.knob import Knobs, knob, part
from pipeline.config.merging import Analyze, Merge
from pipeline.config.training import Model, Partition, Sft, default_rate

MOST_SEED = 2**32 - 1  # numpy's bound

OF_ALL_STAGES = {"tracking": "wandb", "launcher": "local"}
# A group that compose merges after the others: the parts of its file that the stage has.
HARDWARE = "hardware"
CARDS = (
    "a100_80",
    "h100_80",
    "h200_141",
    "a100_40",
    "gpu_24",
    "gpu_48",
)  # names in conf/cards.yaml
RUN_STAGES = ("data", "cpt", "sft", "merge", "eval", "select", "analyze")


@dataclass
class Tracking(Knobs):
    """W&B. mode auto: online if a key is configured, otherwise offline, without a prompt."""

    project: str = "cross-lingual-merging"  # where runs are listed
    entity: str | None = None  # user or team; null: the key's default
    mode: str = knob("auto", options=("auto", "online", "offline", "disabled"))
    weights: bool = False  # log the weights of each model as an artifact
    timeout: float = knob(30.0, ge=1)  # seconds that W&B has to start and to finish a run


# a setting that only launcher=slurm reads
of_slurm = partial(
    knob, default=None, read=(lambda launcher: launcher.name == "slurm", "launcher=slurm")
)


@dataclass
class Launcher(Knobs):
    """Where a plan is computed: by processes of this machine, or by Slurm as job arrays."""

    name: str = knob("local", options=("local", "slurm"))
    # number of processes; null: one for each GPU, otherwise cores // threads. With Slurm: maximum
    # of tasks of an array; null: one for each five minutes of work, up to 64
    workers: int | None = knob(None, ge=1)
    partition: str | None = of_slurm()  # sbatch --partition
    # for jobs without GPUs, which then request one GPU's share of cores and memory; null: partition
    cpu_partition: str | None = of_slurm()
    account: str | None = of_slurm()  # sbatch --account
    qos: str | None = of_slurm()  # sbatch --qos
    gpus: int | None = of_slurm(ge=0)  # maximum per job; null: as many as its runs request
    # the nodes' GPU, for the hours of arrays; set by hardware=; null: a100_80
    gpu: str | None = of_slurm(options=CARDS)
    # cores of a job for each of its GPUs, or in cpu_partition, unless threads= sets them; null: the
    # site's default
    cpus_per_gpu: int | None = of_slurm(default=8, ge=1)
    # the time limit of a job, in sbatch's format; null: the partition's limit
    time: str | None = of_slurm(
        form=(r"(\d+-)?\d+(:\d+){0,2}", "24:00:00 or 2-12, two and a half days")
    )
    memory: str | None = of_slurm(form=(r"\d+[KMGT]?", "64G, of a job, as sbatch reads it"))
    # memory of a job for each of its GPUs, or in cpu_partition, unless memory is set
    memory_per_gpu: str | None = of_slurm(form=(r"\d+[KMGT]?", "48G, as sbatch reads it"))
    # lines of bash that run before the program: module load, source activate
    setup: list[str] | None = of_slurm()
    wrap: str | None = of_slurm()  # command that starts the program: apptainer exec --nv IMAGE
    scratch: str | None = of_slurm()  # TMPDIR of a job, on the node: $SLURM_TMPDIR
    hf_home: str | None = of_slurm()  # HF_HOME of a job: the cache of the Hub's files
    options: list[str] | None = of_slurm()  # further options of sbatch: '["--constraint=a100"]'
    dry_run: bool = of_slurm(
        default=False
    )  # only write the jobs' scripts and print how they would be submitted


@dataclass
class Clean(Knobs):
    """Settings of stage=clean."""

    dry_run: bool = True  # only list
    hours: float = knob(24.0, ge=0)  # keep work that has changed within this time
    resume_points: bool = False  # also delete resume points of interrupted trainings


@dataclass
class Stage(Knobs):
    """A stage. `groups` maps each group that it reads to the default option.

    MISSING: an option is required. None: no option is chosen.
    """

    groups: ClassVar[dict[str, str | None]] = {}

    stage: str = MISSING
    runs_dir: str = knob("runs", hashed=False)  # the folder of all runs and reports
    tracking: Tracking = part(Tracking, hashed=False)
    launcher: Launcher = part(Launcher, hashed=False)

    @property
    def runs_path(self) -> Path:
        return Path(self.runs_dir)


def draws(config: RunStage) -> bool:
    """Return True if the seed affects results.

    Data are drawn and trainings shuffled; other stages draw nothing at random.
    """
    return config.stage in ("data", "sft", "cpt")


def trains(config: RunStage) -> bool:
    return config.stage in ("sft", "cpt")


@dataclass
class RunStage(Stage):
    """A stage that computes one run."""

    redo: bool = knob(False, hashed=False)  # compute the run again, but not its parents
    seed: int = knob(0, ge=0, le=MOST_SEED, hashed=draws)
    deterministic: bool = knob(
        False, hashed=trains
    )  # torch's deterministic algorithms in training, relevant on a GPU
    # CPU threads; null: torch's default. The same bits need the same number
    threads: int | None = knob(None, ge=1, hashed=False)
    group: str | None = knob(None, hashed=False)  # the table of the run, which is W&B's group


@dataclass
class DataStage(RunStage):
    groups = {"expert": MISSING, "mixture": "all", HARDWARE: None}

    expert: Expert = MISSING
    data: Data = part(Data)
    data_root: str | None = knob(
        None, run=True
    )  # a folder or data run with the data; null: the Hub


@dataclass
class TrainStage(RunStage):
    """sft and cpt. The data run, a parent, hashes expert and data."""

    groups = {
        "model": "llama3.1_8b",
        "expert": MISSING,
        "sft": "full",
        "partition": None,
        "recipe": "default",
        "mixture": "all",
        HARDWARE: None,
    }

    model: Model = MISSING
    expert: Expert = field(default=MISSING, metadata={"hashed": False})
    data: Data = part(Data, hashed=False)
    data_root: str | None = knob(
        None, run=True
    )  # a folder or data run with the data; null: the Hub
    sft: Sft = MISSING
    partition: Partition | None = None  # required by partial and simultaneous training

    def settled(self) -> TrainStage:
        """Fill in defaults that depend on others: learning rate, separator, and partial's side."""
        sft = self.sft
        if sft.learning_rate is None:
            sft = replace(sft, learning_rate=default_rate(sft.adapter))
        if sft.separator is None and sft.template == "plain" and isinstance(self.expert, Expert):
            sft = replace(sft, separator=default_separator(self.expert))
        if sft.method == "partial" and sft.side is None and isinstance(self.expert, Expert):
            sft = replace(sft, side=self.expert.side)
        return replace(self, sft=sft)


@dataclass
class MergeStage(RunStage):
    groups = {"merge": MISSING, "partition": None, HARDWARE: None}

    merge: Merge = MISSING
    partition: Partition | None = (
        None  # layer_swap: instead of counts of layers; reset: the partition of merge.side
    )


@dataclass
class EvalStage(RunStage):
    """The scores of `checkpoint`, or of `merge`, which is scored in memory."""

    groups = {"merge": None, "partition": None, "eval": MISSING, HARDWARE: None}

    checkpoint: str | None = knob(None, run=True)  # RUN, a folder with a model, or package:folder
    merge: Merge | None = None
    partition: Partition | None = None
    eval: Eval = MISSING
    languages: list[str] = knob(["en"])  # codes of conf/languages.yaml, [en,sw]
    data_root: str | None = knob(
        None, run=True
    )  # a folder or data run with the data; null: the Hub
    chosen_by: str | None = knob(
        None, hashed=False
    )  # the choice in a table that selected this model
    as_stored: bool = knob(
        False, hashed=False
    )  # internal: eval.dtype was auto and is now the dtype of the weights


@dataclass
class SelectStage(RunStage):
    groups = {"select": MISSING, HARDWARE: None}

    checkpoints: list[str] = knob(run=True)  # finished trainings, or rows of a table
    select: Select = MISSING
    languages: list[str] = knob(["en"])  # codes of conf/languages.yaml, [en,sw]
    data_root: str | None = knob(
        None, run=True
    )  # a folder or data run with the data; null: the Hub


@dataclass
class AnalyzeStage(RunStage):
    groups = {HARDWARE: None}

    checkpoint: Any = knob(run=True)  # an expert, or a list of experts of one base
    base: str | None = knob(None, run=True)  # null: from the experts' manifests
    analyze: Analyze = part(Analyze)


@dataclass
class TableStage(Stage):
    """plan, table, report and prefetch: the many runs of a table."""

    groups = {HARDWARE: None}

    table: str = "sandbox"  # conf/tables/NAME.yaml, or a file with a / or .yaml in its name
    free_snapshots: bool | None = (
        None  # delete snapshots once a selection has ranked them; null: as the table says
    )
    every: dict[str, Any] = field(
        default_factory=dict
    )  # every.KEY=VALUE: overrides the table's own `every`
    data_root: str | None = knob(None, run=True)  # the same as every.data_root
    threads: int | None = knob(None, ge=1, hashed=False)
    given: dict[str, Any] = field(default_factory=dict)  # internal: keys and values of the command


@dataclass
class Export(Knobs):
    """Settings of stage=export.

    `format` applies to table=. The other fields except `to` apply to checkpoint=.
    """

    # a file for a table; a new folder for a checkpoint
    to: str | None = None
    # archive: the report's folder as a zip; latex: the cells
    format: str = knob("archive", options=("archive", "latex"))
    dtype: str | None = knob(
        None, options=("float32", "bfloat16", "float16")
    )  # dtype of the weights; null: unchanged
    adapter: bool = (
        False  # write a LoRA run, or a merge of LoRA experts, as a PEFT adapter in float32
    )
    # the base of an external adapter; null: the base that the adapter names
    base: str | None = knob(None, run=True)
    licence: str | None = (
        None  # for the model card, as spelled on the Hub; null: the experts' licence
    )


@dataclass
class ExportStage(TableStage):
    """A table's report as one file, its cells, figures or logs, or a standalone checkpoint."""

    table: str = ""  # a table whose results are packed; or checkpoint=
    checkpoint: str | None = knob(
        None, run=True
    )  # RUN, RUN@STEP, a folder with a model, or hub:org/name
    export: Export = part(Export)


@dataclass
class Plan(Knobs):
    """Settings of stage=plan.

    `gpu` is the GPU of the estimates of hours and memory; null: this machine.
    """

    # stage of the single command given instead of a table; null: guessed from its groups
    stage: str | None = knob(None, options=RUN_STAGES)
    gpu: str | None = knob(None, options=CARDS)
    gpus: int = knob(1, ge=1)
    lines: int = knob(0, ge=0)  # list this many runs, and each note on one line
    expand: bool = (
        False  # only print the full table as YAML: inherited keys filled in, a study expanded
    )


@dataclass
class PlanStage(TableStage):
    """The plan of a table, or of a single command: stage=plan expert=math."""

    plan: Plan = part(Plan)
    command: list[str] | None = None  # internal: words of the single command


@dataclass
class Prefetch(Knobs):
    # stage of the single command given instead of a table; null: guessed from its groups
    stage: str | None = knob(None, options=RUN_STAGES)
    update: bool = False  # lock the Hub's current revisions instead: this changes run hashes


@dataclass
class PrefetchStage(TableStage):
    """Fetches the inputs of a table, or of a single command, from the Hub."""

    prefetch: Prefetch = part(Prefetch)
    command: list[str] | None = None  # internal: words of the single command


@dataclass
class Status(Knobs):
    """Output of stage=status."""

    json: bool = False  # as JSON, a list of runs


@dataclass
class StatusStage(TableStage):
    table: str = ""  # only the runs of this table; empty: all of runs_dir
    status: Status = part(Status)


@dataclass
class Show(Knobs):
    rows: int = knob(
        0, ge=0
    )  # print this many rows of a training set, with the trained tokens marked


@dataclass
class ShowStage(Stage):
    run: str = knob(run=True)  # the run to show
    show: Show = part(Show)


@dataclass
class CleanStage(Stage):
    clean: Clean = part(Clean)
