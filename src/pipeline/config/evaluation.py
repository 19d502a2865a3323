"""What is scored and how, and how the best of many is chosen by it."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from pipeline.config.knob import knob


def below_float32(config: Eval) -> bool:
    """Whether rounding makes answers depend on which prompts are computed together: in bfloat16 it changes up to
    half of them, in float32 none (results/README.md). Of an unresolved eval.dtype=auto the dtype is not known."""
    return config.dtype != "float32"


def with_exemplars(config: Eval) -> bool:
    return any(task.num_fewshot for task in config.tasks)


def runs_programs(config: Eval) -> bool:
    return any(task.task == "mbpp" for task in config.tasks)


@dataclass
class EvalTask:
    task: str = MISSING
    num_fewshot: int = knob(MISSING, low=0)
    where_possible: bool = False  # of a bundle: where its data is not there it is shown as missing, not refused


@dataclass
class Eval:
    name: str = knob(hashed=False)
    tasks: list[EvalTask] = MISSING  # [{task: mgsm, num_fewshot: 2}], as the harness spells them
    split: str = knob("test", options=("test", "dev"))
    limit: int | None = knob(None, low=1)  # questions a task; null: all
    max_gen_toks: int | None = knob(None, low=1)  # null: the task's own
    max_gen_toks_of: dict[str, int] = knob({}, low=1)  # language -> in place of max_gen_toks: scripts cost tokens
    # of MGSM; random: the harness' draw a question
    exemplars: str = knob("first_n", options=("first_n", "random"), hashed=with_exemplars)
    dtype: str = knob("auto", options=("auto", "float32", "bfloat16", "float16"))  # auto: as the weights are stored
    backend: str = knob("hf", options=("hf", "vllm"))  # vllm: handed to the harness' own model class
    chat_template: bool = False  # the exemplars as turns of a conversation
    # what a chat template that prints today's date prints
    template_date: str = knob("2024-07-26", hashed=lambda asked: asked.chat_template)
    # Belebele and Global MMLU: options shown with letters and answered by one, or answered by their text, none shown
    options: str = knob("letters", options=("letters", "text"))
    run_code: bool = knob(False, hashed=runs_programs)  # mbpp runs programs that the model writes, each confined
    too_long: int = knob(0, low=0)  # prompts a task that may not fit: they leave the score; more are refused
    spm_model: str | None = knob(None, hashed=False)  # SentencePiece model of spBLEU; its content enters as a parent
    # These three are hashed below float32 alone, where they change answers
    batch_size: int = knob(32, low=1, hashed=below_float32)  # prompts at once; halved where memory runs out
    share_prefix: bool = knob(True, hashed=below_float32)  # exemplars are computed once, not once a question
    shards: int = knob(1, low=1, hashed=below_float32)  # GPUs that share the questions of a task, a process each


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
