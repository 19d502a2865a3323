"""Evaluation settings, and the selection of the best snapshot by scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from omegaconf import MISSING
from pydantic import PositiveInt

from pipeline.config.knob import Knobs, knob
from pipeline.errors import PipelineError


def below_float32(config: Eval) -> bool:
    """Return True if answers depend on which prompts are computed together.

    In bfloat16 rounding changes up to half of the answers, in float32 none (results/README.md). The
    dtype must be known, so eval.dtype=auto must be resolved before.
    """
    return config.dtype != "float32"


def settle_products(settings: Eval) -> Eval:
    """Return the settings with eval.products=auto resolved, once the dtype is known.

    Raises:
        PipelineError: bf16x3 without eval.dtype=float32 and eval.backend=hf.
    """
    possible = settings.dtype == "float32" and settings.backend == "hf"
    if settings.products == "ieee" or settings.dtype == "auto":
        return settings
    if settings.products == "bf16x3" and not possible:
        raise PipelineError(
            "eval.products=bf16x3 needs eval.dtype=float32 and eval.backend=hf, not"
            f" {settings.dtype} and {settings.backend}. Set eval.products=ieee."
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
    where_possible: bool = False  # in a bundle: report missing data instead of failing

    @property
    def label(self) -> str:
        return f"{self.task}_{self.num_fewshot}shot"


@dataclass
class Eval(Knobs):
    name: str = knob(hashed=False)
    tasks: list[EvalTask] = MISSING  # [{task: mgsm, num_fewshot: 2}], with lm-eval's names
    # folder of task files in lm-eval's format; the files enter as a parent
    include_path: str | None = knob(None, hashed=False)
    # if checkpoint= is a PEFT adapter: its base; null: the base in its adapter_config.json
    base: str | None = knob(None, run=True)
    split: str = knob("test", options=("test", "dev"))
    limit: int | None = knob(None, ge=1)  # questions per task; null: all
    max_gen_toks: int | None = knob(None, ge=1)  # null: the task's own
    # language -> its own max_gen_toks, because scripts need different numbers of tokens
    max_gen_toks_of: dict[str, PositiveInt] = knob({})
    # which exemplars of MGSM; random: the harness draws them for each question
    exemplars: str = knob(
        "first_n",
        options=("first_n", "random"),
        read=(with_exemplars, "a task with exemplars, eval=TASK_Nshot"),
    )
    dtype: str = knob(
        "auto", options=("auto", "float32", "bfloat16", "float16")
    )  # auto: the dtype of the stored weights
    # how a GPU multiplies float32 matrices; bf16x3: by three bfloat16 products, which differ from
    # float32's in the last bits (models/products.py); auto: bf16x3 for float32 with
    # eval.backend=hf, otherwise ieee
    products: str = knob("ieee", options=("ieee", "bf16x3", "auto"))
    # vllm: needs the extra vllm; a merge is written, scored and deleted
    backend: str = knob("hf", options=("hf", "vllm"))
    chat_template: bool = False  # write exemplars and question with the model's chat template
    system_instruction: str | None = (
        None  # text before the exemplars; with eval.chat_template=true a system message
    )
    # false: exemplars and question are one turn
    fewshot_as_multiturn: bool = knob(
        True, read=(lambda config: config.chat_template, "eval.chat_template=true")
    )
    # further variables of the chat template: {enable_thinking: false} of Qwen 3 and SmolLM3
    chat_template_args: dict[str, Any] = knob(
        {}, read=(lambda config: config.chat_template, "eval.chat_template=true")
    )
    # the date for chat templates that print today's date
    template_date: str = knob(
        "2024-07-26", read=(lambda config: config.chat_template, "eval.chat_template=true")
    )
    # Belebele, Global MMLU: list the options and answer by a letter, or leave them out and answer
    # by their text
    options: str = knob("letters", options=("letters", "text"))
    # allow mbpp to run programs that the model wrote, each in a sandbox
    run_code: bool = knob(False, hashed=runs_programs)
    # SentencePiece model of spBLEU; its content enters as a parent
    spm_model: str | None = knob(None, hashed=False, read=(is_flores, "eval=flores_Nshot"))
    temperature: float = knob(0.0, ge=0)  # 0: greedy decoding; above: sampling
    # sample from the likeliest tokens with this share of probability
    top_p: float = knob(1.0, gt=0, le=1, read=SAMPLED)
    answers: int = knob(1, ge=1, read=SAMPLED)  # number of sampled answers per question
    sample_seed: int = knob(0, read=SAMPLED)
    # the token after a reasoning model's thoughts, which are not scored:
    # 'eval.think_end="</think>"'
    think_end: str | None = None
    # prompts at once, halved when memory runs out; null: on a GPU as many as fit in memory, at most
    # 512, otherwise 32. Hashed only below float32, because it changes answers there
    batch_size: int | None = knob(None, ge=1, hashed=below_float32, hash_default=32)
    share_prefix: bool = knob(
        True, hashed=below_float32
    )  # compute exemplars once instead of per question; hashed only below float32

    @property
    def label(self) -> str:
        """Return the name of the scores for runs and reports.

        It is TASK_Nshot for one task, and otherwise the option's name.
        """
        first, *more = self.tasks
        if more or self.name == first.task:
            return self.name
        return first.label


@dataclass
class Measure(Knobs):
    """One number of a model: its score on a task in one language.

    The score is the task's primary metric over the questions.
    """

    task: str = MISSING
    language: str | None = None  # null: the mean over `languages`


@dataclass
class Select(Knobs):
    """The choice of a snapshot: the best by the primary measures that passes the guards."""

    name: str = knob(hashed=False)
    by: str = knob("scores", options=("scores", "validation_loss"))
    snapshots: str = knob("all", options=("all", "last"))  # last: only each run's final weights
    primary: list[Measure] | None = None  # snapshots are ordered by their mean rank over these
    guards: list[Measure] | None = None  # a snapshot may not score below the base in these
    guard_slack: float = knob(0.0, ge=0)  # how far a guard's score may be below the base's
    place: int = knob(1, ge=1)  # 2: the best snapshot of the second best run, and so on
    eval: Eval | None = None  # how snapshots are scored; has the tasks of the measures
