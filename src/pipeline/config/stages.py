"""Every knob: its unit, its bounds, its default; a dataclass a stage.

The defaults stand here and nowhere else; the files under conf/ only choose.

What enters a run's hash (design: identity) is decided here too: each field does, unless it is declared with
`hashed=False` (paths, labels, batch sizes of evaluation in float32) or names a RUN (parents enter by their own hashes),
and a field at its declared default adds nothing, so a new knob leaves old runs valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from pipeline.config.data import Data, Expert, Source, World
from pipeline.config.evaluation import Eval, EvalTask, Measure, Select
from pipeline.config.knob import knob, part
from pipeline.config.merging import Analyze, Merge
from pipeline.config.training import Model, Partition, Sft

__all__ = [
    "Analyze",
    "AnalyzeStage",
    "Clean",
    "CleanStage",
    "Data",
    "DataStage",
    "Eval",
    "EvalStage",
    "EvalTask",
    "Expert",
    "Export",
    "ExportStage",
    "Launcher",
    "Measure",
    "Merge",
    "MergeStage",
    "Model",
    "Partition",
    "Plan",
    "PlanStage",
    "Prefetch",
    "PrefetchStage",
    "Report",
    "ReportStage",
    "RunStage",
    "Select",
    "SelectStage",
    "Sft",
    "Show",
    "ShowStage",
    "Source",
    "Stage",
    "Status",
    "StatusStage",
    "SweepStage",
    "TableStage",
    "Tracking",
    "TrainStage",
    "World",
]

MOST_SEED = 2**32 - 1  # numpy's bound


@dataclass
class Tracking:
    """W&B. mode auto: online where a key is configured, offline otherwise; nothing ever asks."""

    project: str = "cross-lingual-merging"  # where its runs are listed
    entity: str | None = None  # user or team; null: the key's own
    mode: str = knob("auto", options=("auto", "online", "offline", "disabled"))
    timeout: float = knob(30.0, low=1)  # seconds after which a call of W&B counts as failed and W&B is ended


@dataclass
class Launcher:
    """Where the runs of a plan are made: by processes of this machine, or by Slurm as arrays of jobs."""

    name: str = knob("local", options=("local", "slurm"))
    workers: int | None = knob(None, low=1)  # processes; null: cores // threads, one a GPU where there are some
    partition: str | None = None  # sbatch --partition
    account: str | None = None  # sbatch --account
    qos: str | None = None  # sbatch --qos
    gpus: int | None = knob(None, low=0)  # a job's at most; null: what its runs ask for
    time: str | None = None  # a job's limit, as sbatch takes it; null: the partition's
    memory: str | None = None  # a job's, as sbatch takes it, 64G
    setup: list[str] | None = None  # lines of bash before the program: module load, source activate
    wrap: str | None = None  # what the program is started with: apptainer exec --nv IMAGE
    scratch: str | None = None  # TMPDIR of a job, on the node: $SLURM_TMPDIR
    hf_home: str | None = None  # HF_HOME of a job: where the Hub's files are cached
    options: list[str] | None = None  # more of sbatch: '["--constraint=a100"]'
    batch_minutes: float = knob(60.0, low=0)  # runs of a class are put into one job up to this
    requeues: int = knob(20, low=0)  # of a job, at most
    retry_failed: bool = True  # whether what failed is submitted again


@dataclass
class Clean:
    """What stage=clean frees, and what it leaves."""

    dry_run: bool = True  # only tell
    hours: float = knob(24.0, low=0)  # work untouched for less is left
    resume_points: bool = False  # free also what an interrupted training would go on from


@dataclass
class Stage:
    stage: str = MISSING
    runs_dir: str = knob("runs", hashed=False)  # the folder of all runs and reports
    tracking: Tracking = part(Tracking, hashed=False)
    launcher: Launcher = part(Launcher, hashed=False)


def draws(config: RunStage) -> bool:
    """Whether the seed decides anything: data are drawn and trainings shuffled; other stages draw nothing."""
    return config.stage in ("data", "sft", "cpt")


def trains(config: RunStage) -> bool:
    return config.stage in ("sft", "cpt")


@dataclass
class RunStage(Stage):
    """A stage that makes one run."""

    redo: bool = knob(False, hashed=False)  # make it again, as a new attempt; its parents are left as they are
    seed: int = knob(0, low=0, high=MOST_SEED, hashed=draws)
    deterministic: bool = knob(False, hashed=trains)  # torch's deterministic algorithms in training, wanted on a GPU
    threads: int | None = knob(
        None, low=1, hashed=False
    )  # CPU threads; null: torch's choice. Same bits need the same count
    group: str | None = knob(None, hashed=False)  # the table it is made for; W&B's group


@dataclass
class DataStage(RunStage):
    expert: Expert = MISSING
    data: Data = part(Data)
    data_root: str | None = knob(None, run=True)  # a folder or data run with the data; null: the Hub


@dataclass
class TrainStage(RunStage):
    """sft and cpt. Expert and data are decided by the data run, which is the parent."""

    model: Model = MISSING
    expert: Expert = field(default=MISSING, metadata={"hashed": False})
    data: Data = part(Data, hashed=False)
    data_root: str | None = knob(None, run=True)  # a folder or data run with the data; null: the Hub
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
    languages: list[str] = knob(["en"])  # codes of conf/language, [en,sw]
    data_root: str | None = knob(None, run=True)  # a folder or data run with the data; null: the Hub
    chosen_by: str | None = knob(None, hashed=False)  # the choice of a table that this model won
    as_stored: bool = knob(False, hashed=False)  # set with the dtype of the weights where eval.dtype=auto is resolved


@dataclass
class SelectStage(RunStage):
    checkpoints: list[str] = knob(run=True)  # finished trainings, or rows of a table
    select: Select = MISSING
    languages: list[str] = knob(["en"])  # codes of conf/language, [en,sw]
    data_root: str | None = knob(None, run=True)  # a folder or data run with the data; null: the Hub


@dataclass
class AnalyzeStage(RunStage):
    checkpoint: Any = knob(run=True)  # an expert, or a list of experts of one base
    base: str | None = knob(None, run=True)  # null: from the experts' manifests
    analyze: Analyze = part(Analyze)


@dataclass
class SweepStage(Stage):
    """One merge over a grid of its knobs, scored on one loaded model. Each point is a run of stage=eval merge=...

    What can be swept is added where the methods are known (stages/rows.py).
    """

    merge: Merge = MISSING
    partition: Partition | None = None
    sweep: Any = MISSING
    eval: Eval = MISSING
    languages: list[str] = knob(["en"])  # codes of conf/language, [en,sw]
    data_root: str | None = knob(None, run=True)  # a folder or data run with the data; null: the Hub
    seed: int = knob(0, low=0, high=MOST_SEED)
    deterministic: bool = False  # torch's deterministic algorithms, wanted on a GPU
    threads: int | None = knob(None, low=1, hashed=False)
    redo: bool = knob(False, hashed=False)  # score again what is finished


@dataclass
class TableStage(Stage):
    """plan, table, report and prefetch: the many runs of a table."""

    table: str = "sandbox"  # conf/tables/NAME.yaml, or a file: with a / or .yaml in its name
    free_snapshots: bool | None = None  # table.free_snapshots=true: those that a select run ranked go; null: as it says
    every: dict[str, Any] = field(default_factory=dict)  # every.KEY=VALUE: laid over the table's own `every`
    data_root: str | None = knob(None, run=True)  # the same as every.data_root
    threads: int | None = knob(None, low=1, hashed=False)


@dataclass
class Report:
    fewer: bool = False  # replace a page by one with fewer finished cells
    # points by which an untrained model may differ from its published score; assumed (3 of MGSM's 250 questions) until
    # the differences between scoring programs are measured on a GPU
    base_tolerance: float = knob(1.2, low=0, high=100)


@dataclass
class ReportStage(TableStage):
    """The page of a table, or of what stage=export packed: table=FILE."""

    report: Report = part(Report)


@dataclass
class Export:
    """What stage=export writes, and where. All but `to` is read with checkpoint=."""

    to: str | None = None  # of a table the file; of a checkpoint a folder, new or empty, or hub:org/name
    dtype: str | None = knob(None, options=("float32", "bfloat16", "float16"))  # of the weights; null: as they are
    licence: str | None = None  # for the card, as the Hub spells it; null: that of the experts, who must have one
    private: bool = True  # on the Hub: whether only its owners see it


@dataclass
class ExportStage(TableStage):
    """A table's results as one file (configuration, manifests, scores and answers), or a checkpoint to take away."""

    table: str = ""  # a table whose results are packed; or checkpoint=
    checkpoint: str | None = knob(None, run=True)  # RUN, RUN@STEP, a folder with a model, or hub:org/name
    export: Export = part(Export)


@dataclass
class Plan:
    """On what hours and memory are reckoned; null: seconds as finished runs took here."""

    gpu: str | None = knob(None, options=("a100_80", "h100_80", "h200_141"))
    gpus: int = knob(1, low=1)
    worlds: int = knob(200, low=0)  # simulated, to tell how often each claim would be accepted; 0: none
    lines: int = knob(150, low=0)  # runs that are listed one by one; of more, their numbers
    prompts: bool = False  # whether the prompts of evaluations fit their models, too: reads data and tokenizers


@dataclass
class PlanStage(TableStage):
    plan: Plan = part(Plan)


@dataclass
class Prefetch:
    update: bool = False  # take what the Hub has now in place of what is locked: the hashes of runs change with it


@dataclass
class PrefetchStage(TableStage):
    prefetch: Prefetch = part(Prefetch)


@dataclass
class Status:
    """How stage=status is printed."""

    json: bool = False  # as JSON, a list of runs


@dataclass
class StatusStage(Stage):
    table: str | None = None  # the runs of this table alone; null: all of runs_dir
    status: Status = part(Status)


@dataclass
class Show:
    samples: int = knob(0, low=0)  # answers of each task and language that are printed
    rows: int = knob(0, low=0)  # rows of a training set that are printed, with what is trained on marked


@dataclass
class ShowStage(Stage):
    run: str = knob(run=True)  # the finished run that is shown
    show: Show = part(Show)


@dataclass
class CleanStage(Stage):
    clean: Clean = part(Clean)
