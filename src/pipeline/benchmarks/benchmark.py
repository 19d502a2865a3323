"""The records of a benchmark, of what is asked of one, and of the task that comes of it.

Each file of this folder that holds a benchmark names it BENCHMARK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from pipeline.benchmarks.local_files import Row
from pipeline.config.data import Source
from pipeline.config.harness_tasks import included_folder
from pipeline.config.task_yaml import read_task
from pipeline.errors import PipelineError
from pipeline.languages import Language

Kind = Literal["choice", "number", "translation", "program", "text", "answer"]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: how it is scored, what it is called, where its data lies, and what its prompts
    cost.

    kind: what an answer is: one of several options, weighed by likelihood; text that ends in a
        number, also scored by its last number; a translation between English and another language,
        scored over the whole corpus; a program; text, of which the probability is scored; an answer
        that is scored as the harness' task file says.
    metric, filter: the harness' names of the primary metric, the one number that stands for the
        benchmark.
    define: checks the data of one task in one language and writes its task files
        (task_files.write).
    texts: what of a row of its data must not stand in training data.
    sources: its sets on the Hub in one language, exemplars aside.
    questions: scored in one language (and direction), by its publication; of local data the rows
        are counted.
    tokens: of a question in English with its options, of a translation one sentence, of a program
        the task's text alone; assumed, with Llama 3.1's tokenizer. Questions that end in a number
        count as MGSM's, which are measured.
    continuation_tokens: those of `tokens`, the same in every language, that each need logits:
        choices scored by text.
    """

    name: str  # its folder below data_root, and the first task
    title: str
    kind: Kind
    metric: str
    define: Callable[[Ask], list[TaskSpec]]
    texts: Callable[[Row], list[str]]
    sources: Callable[[Language], Sequence[Source]]
    questions: int
    tokens: float
    filter: str = "none"
    lower_is_better: bool = False  # less of the primary metric, as of a perplexity
    variants: tuple[str, ...] = ()  # further tasks on the same data, such as mgsm_direct
    in_english: tuple[
        str, ...
    ] = ()  # those of its tasks whose answers are in English whatever the question is in
    choices: int = 0  # options of a question
    continuation_tokens: float = 0
    letters: bool = False  # whether a choice is answered by its letter, unless eval.options=text
    measures: tuple[
        str, ...
    ] = ()  # further metrics of a question, in a unit of their own and without bounds: bits
    # metric -> the task whose first measure is subtracted from that of this task, question by
    # question
    differences: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()  # whose text is a question, options included
    group: str | None = None  # the column by which scores are also given apart, such as subject
    # of rows that are parts of a question: the column that numbers the questions, by which
    # eval.limit counts, and how many parts one has on average
    question_column: str = ""
    parts: float = 1.0
    passage: str | None = (
        None  # the column of a text that several questions are about: these are one cluster
    )
    exemplar_file: str | None = None  # of a language's folder: shown in prompts, never scored
    exemplar_sets: int = 1  # such as one a subject
    exemplars_drawn: bool = (
        False  # whether eval.exemplars=random is possible: exemplars drawn anew for each question
    )
    text_files: tuple[
        str, ...
    ] = ()  # patterns below its folder of data that is no JSON lines, a text a line
    built_from: tuple[
        str, ...
    ] = ()  # files below data_root, {code} a language, where it has no folder of its own
    # of `built_from`: file -> how many of its first rows are compared with training data for this
    # benchmark
    compared: Mapping[str, int] = field(default_factory=dict)
    package: str = (
        ""  # name and version of another package that it is from, part of an evaluation's hash
    )
    of_harness: bool = False  # defined by a task file of the harness alone
    one_set: bool = False  # one test set, whatever the language
    gated: str = ""  # the data on the Hub whose conditions must be accepted

    def __post_init__(self) -> None:
        if (self.kind == "choice") != (self.choices > 1) and not self.of_harness:
            raise PipelineError(
                f"benchmark {self.name}: choices={self.choices} with kind={self.kind}: give 2 or"
                " more"
            )

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names that eval.tasks takes."""
        return self.name, *self.variants

    @property
    def chance(self) -> float | None:
        """The share of right answers by guessing; None where nothing can be guessed."""
        if self.choices:
            return 1 / self.choices
        return None

    def files(self, data_root: Path, code: str = "*") -> list[Path]:
        """Its files that are there, in one language or in all (those of `text_files` always in
        all).
        """
        if self.built_from:
            return sorted(
                {
                    path
                    for pattern in self.built_from
                    for path in data_root.glob(pattern.format(code=code))
                }
            )
        patterns = (f"{code}/*.jsonl", *self.text_files)
        return sorted(
            {path for pattern in patterns for path in (data_root / self.name).glob(pattern)}
        )


@dataclass(frozen=True)
class TaskSpec:
    """One task in one language as the harness will run it.

    It is made where the task's data is checked (evaluate/tasks.py), and everything after that reads
    it.
    """

    name: str
    file: Path  # its YAML
    task: str
    language: str  # of a translation pair: the one that is not English
    pair: str | None
    num_fewshot: int
    benchmark: Benchmark = field(compare=False)
    first: int = 0  # the first row that is scored: Belebele's exemplars are its own first rows
    group: str = ""  # the harness' group that is scored as one task, of which this is a part
    part: str = ""  # its task in the group
    aggregates: tuple[Row, ...] = field(default=(), compare=False)  # the metrics of the group

    @property
    def where(self) -> str:
        return self.pair or self.language

    @property
    def kind(self) -> Kind:
        return self.benchmark.kind

    @property
    def primary(self) -> tuple[str, str]:
        """The metric and the filter that stand for the task if one number is wanted."""
        return self.benchmark.metric, self.benchmark.filter

    @property
    def answers_in(self) -> str:
        """The language of the answers, whatever the language of the questions is."""
        if self.task in self.benchmark.in_english:
            return "en"
        return self.language

    @property
    def own_folder(self) -> Path | None:
        """The folder of eval.include_path that defines the task, or None for any other task."""
        return included_folder(self.part or self.task)

    @cached_property
    def body(self) -> Row:
        """The content of the task's file, with the files that it includes."""
        return read_task(self.file).body


@dataclass(frozen=True)
class Ask:
    """What one task definition is made from."""

    task: str
    benchmark: Benchmark
    language: Language
    num_fewshot: int
    data_root: Path | None
    split: str
    max_gen_toks: int | None
    run_code: bool
    folder: Path
    exemplars: str = "first_n"
    options: str = "letters"


def on_hub(hub: str, config: str | None, split: str = "test") -> Source:
    """Return a set of questions on the Hub."""
    return Source(hub=hub, hub_config=config, split=split, rows="text", file="")
