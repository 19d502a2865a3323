"""Evaluation settings, and the selection of the best snapshot by scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omegaconf import MISSING
from pydantic import PositiveInt

from pipeline.config.knob import Knobs, knob
from pipeline.errors import PipelineError


def below_float32(config: Eval) -> bool:
    """Whether rounding makes answers depend on which prompts are computed together: in bfloat16 it changes up to
    half of them, in float32 none (results/README.md). For an unresolved eval.dtype=auto the dtype is unknown."""
    return config.dtype != "float32"


def settle_products(settings: Eval) -> Eval:
    """The settings with eval.products=auto resolved, once the dtype is. Raises PipelineError for bf16x3 of what is not
    computed in float32 by eval.backend=hf."""
    possible = settings.dtype == "float32" and settings.backend == "hf"
    if settings.products == "ieee" or settings.dtype == "auto":
        return settings
    if settings.products == "bf16x3" and not possible:
        raise PipelineError(
            f"eval.products=bf16x3 is of eval.dtype=float32 and eval.backend=hf, not of {settings.dtype} and "
            f"{settings.backend}: give eval.products=ieee"
        )
    return replace(settings, products="bf16x3" if possible else "ieee")


def is_sampled(config: Eval) -> bool:
    return config.temperature > 0


def with_exemplars(config: Eval) -> bool:
    return any(task.num_fewshot for task in config.tasks)


def is_flores(config: Eval) -> bool:
    return any(task.task == "flores" for task in config.tasks)


def runs_programs(config: Eval) -> bool:
    return any(task.task == "mbpp" for task in config.tasks)


SAMPLED = (is_sampled, "eval.temperature above 0")


@dataclass
class EvalTask(Knobs):
    task: str = MISSING
    num_fewshot: int = knob(MISSING, ge=0)
    where_possible: bool = False  # in a bundle: missing data is reported as missing, not as an error


@dataclass
class Eval(Knobs):
    name: str = knob(hashed=False)
    tasks: list[EvalTask] = MISSING  # [{task: mgsm, num_fewshot: 2}], with lm-eval's names
    # folder of task files in lm-eval's format; the files enter as a parent
    include_path: str | None = knob(None, hashed=False)
    # the base of checkpoint=, an adapter that PEFT saved; null: the one that its adapter_config.json names
    base: str | None = knob(None, run=True)
    split: str = knob("test", options=("test", "dev"))
    limit: int | None = knob(None, ge=1)  # questions per task; null: all
    max_gen_toks: int | None = knob(None, ge=1)  # null: the task's own
    max_gen_toks_of: dict[str, PositiveInt] = knob({})  # language -> overrides max_gen_toks: scripts differ in tokens
    # of MGSM; random: drawn by the harness for each question
    exemplars: str = knob(
        "first_n", options=("first_n", "random"), read=(with_exemplars, "a task with exemplars, eval=TASK_Nshot")
    )
    dtype: str = knob("auto", options=("auto", "float32", "bfloat16", "float16"))  # auto: as the weights are stored
    # float32's products of matrices on a GPU; bf16x3: each as three of bfloat16, the numbers of float32 to a few bits
    # (models/products.py); auto: bf16x3 for float32 computed by eval.backend=hf, else ieee
    products: str = knob("ieee", options=("ieee", "bf16x3", "auto"))
    backend: str = knob("hf", options=("hf", "vllm"))  # vllm: of the extra vllm, merges loaded live
    # vLLM's drafts from all answers of its process (arctic-inference); hashed where they change answers
    vllm_suffix: bool = knob(False, hashed=lambda config: config.vllm_suffix and below_float32(config))
    chat_template: bool = False  # the exemplars as turns of a conversation
    system_instruction: str | None = None  # before the exemplars; a turn of its own with eval.chat_template=true
    # false: the exemplars stand in the question's turn
    fewshot_as_multiturn: bool = knob(True, read=(lambda config: config.chat_template, "eval.chat_template=true"))
    # the date printed by chat templates that print today's date
    template_date: str = knob("2024-07-26", read=(lambda config: config.chat_template, "eval.chat_template=true"))
    # Belebele, Global MMLU: options listed with letters and answered by one, or unlisted and answered by their text
    options: str = knob("letters", options=("letters", "text"))
    run_code: bool = knob(False, hashed=runs_programs)  # mbpp runs programs written by the model, each in a sandbox
    # SentencePiece model of spBLEU; its content enters as a parent
    spm_model: str | None = knob(None, hashed=False, read=(is_flores, "eval=flores_Nshot"))
    temperature: float = knob(0.0, ge=0)  # 0: greedy; above: tokens are drawn
    top_p: float = knob(1.0, gt=0, le=1, read=SAMPLED)  # drawn among the likeliest tokens of this share
    answers: int = knob(1, ge=1, read=SAMPLED)  # drawn for each question
    sample_seed: int = knob(0, read=SAMPLED)
    think_end: str | None = None  # ends the model's thoughts, which are not scored: 'eval.think_end="</think>"'
    # These two are hashed only below float32, where they change answers
    # prompts at once, halved where memory runs out; null: on a GPU what its free memory holds, at most 512, else 32
    batch_size: int | None = knob(None, ge=1, hashed=below_float32, hash_default=32)
    share_prefix: bool = knob(True, hashed=below_float32)  # exemplars are computed once, not once per question

    @property
    def label(self) -> str:
        """The name in those of runs and reports: the option's, but that of the task where there is one, as eval.tasks
        may have replaced the option's."""
        (first, *more) = self.tasks
        return self.name if more or self.name == first.task else f"{first.task}_{first.num_fewshot}shot"


@dataclass
class Measure(Knobs):
    """One number of a model: its score on a task, in its primary metric, over the questions in one language."""

    task: str = MISSING
    language: str | None = None  # null: the mean over `languages`


@dataclass
class Select(Knobs):
    """Which snapshot of which run is selected: the best in the primary measures among those that satisfy the guards."""

    name: str = knob(hashed=False)
    by: str = knob("scores", options=("scores", "validation_loss"))
    snapshots: str = knob("all", options=("all", "last"))  # last: only each run's final weights
    primary: list[Measure] | None = None  # ordered by the mean of the ranks in these
    guards: list[Measure] | None = None  # not below the base's score
    guard_slack: float = knob(0.0, ge=0)  # by more than this
    place: int = knob(1, ge=1)  # 2: the second best run's best, and so on: one snapshot a run
    eval: Eval | None = None  # what scores the snapshots; it holds the measures' tasks
