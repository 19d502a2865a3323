"""The records of a benchmark, of a request for a task, and of the resulting task.

Each module of this folder that holds a benchmark names it BENCHMARK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal

from pipeline.benchmarks.local_files import Row
from pipeline.config.data import Source
from pipeline.config.task_yaml import read_task
from pipeline.errors import PipelineError
from pipeline.languages import Language

Kind = Literal["choice", "number", "translation", "program", "text", "answer"]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its scores, its data, and the cost of its prompts.

    Args:
        name: its folder below data_root, and its first task.
        kind: the kind of its answers. choice: one of several options, by likelihood. number: text
            that ends in a number. translation: scored over the whole corpus. program: a program.
            text: scored by its probability. answer: scored as the harness' task file says.
        metric: the harness' name of the primary metric, the benchmark's main number.
        define: checks the data of a task in a language and writes its task files
            (task_files.write_task).
        texts: returns the texts of a row that training data must not contain.
        sources: returns its sets on the Hub in a language, without few-shot examples.
        questions: the published number of questions in a language (and direction). Local rows are
            counted.
        tokens: assumed tokens of an English question with its options, with Llama 3.1's tokenizer.
            For a translation, of a sentence; for a program, of the task's text. Questions that end
            in a number count as MGSM's, which are measured.
        filter: the harness' name of the primary metric's filter.
        lower_is_better: a lower primary metric is better, such as a perplexity.
        variants: further tasks on the same data, such as mgsm_direct.
        in_english: tasks whose answers are in English for questions in any language.
        choices: options of a question.
        continuation_tokens: the part of `tokens` that needs logits each, in every language: choices
            scored by text.
        letters: a choice is answered by its letter, unless eval.options=text.
        measures: further metrics of a question, with a unit and without bounds, such as bits.
        differences: metric -> the task whose first measure is subtracted from this task's, question
            by question.
        group: the column by which scores are also given separately, such as subject.
        question_column: if rows are parts of questions, the column that numbers the questions.
            eval.limit counts questions.
        parts: the mean number of parts of a question.
        passage: the column of a text that several questions are about, which form a cluster.
        exemplar_file: the file of few-shot examples in a language's folder, which is never scored.
        exemplar_sets: the number of sets of few-shot examples, such as one per subject.
        exemplars_drawn: eval.exemplars=random is possible: few-shot examples drawn anew for each
            question.
        text_files: patterns of plain-text files below its folder, with a text a line.
        built_from: files below data_root, {code} a language, if it has no folder.
        compared: for `built_from`, file -> the number of first rows that are compared with training
            data.
        of_harness: only a task file of the harness defines it. It has one test set for all
            languages.
    """

    name: str
    kind: Kind
    metric: str
    define: Callable[[Ask], list[TaskSpec]]
    texts: Callable[[Row], list[str]]
    sources: Callable[[Language], Sequence[Source]]
    questions: int
    tokens: float
    filter: str = "none"
    lower_is_better: bool = False
    variants: tuple[str, ...] = ()
    in_english: tuple[str, ...] = ()
    choices: int = 0
    continuation_tokens: float = 0
    letters: bool = False
    measures: tuple[str, ...] = ()
    differences: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None
    question_column: str = ""
    parts: float = 1.0
    passage: str | None = None
    exemplar_file: str | None = None
    exemplar_sets: int = 1
    exemplars_drawn: bool = False
    text_files: tuple[str, ...] = ()
    built_from: tuple[str, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict)
    of_harness: bool = False

    def __post_init__(self) -> None:
        if self.of_harness:
            return
        if (self.kind == "choice") != (self.choices > 1):
            raise PipelineError(
                f"benchmark {self.name}: kind={self.kind} has choices={self.choices}. Give 2 or"
                " more for kind=choice, and 0 for other kinds."
            )

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names that eval.tasks takes."""
        return self.name, *self.variants

    def files(self, data_root: Path, code: str = "*") -> list[Path]:
        """Return the existing files in a language, or in all languages.

        Files of `text_files` are always of all languages.
        """
        folder = data_root / self.name
        patterns = [f"{code}/*.jsonl", *self.text_files]
        if self.built_from:
            folder = data_root
            patterns = [pattern.format(code=code) for pattern in self.built_from]
        return sorted(set(chain.from_iterable(map(folder.glob, patterns))))


@dataclass(frozen=True)
class TaskSpec:
    """A task in a language as the harness will run it.

    It is created when the task's data is checked (evaluate/tasks.py). All later steps read it.
    """

    name: str
    file: Path  # its YAML
    task: str
    language: str  # for a translation pair, the language that is not English
    pair: str | None
    num_fewshot: int
    benchmark: Benchmark = field(compare=False)
    first: int = 0  # the first scored row: Belebele's first rows are few-shot examples
    part: str = ""  # its task in the group, if `task` is a group of the harness

    @property
    def where(self) -> str:
        return self.pair or self.language

    @property
    def kind(self) -> Kind:
        return self.benchmark.kind

    @property
    def primary(self) -> tuple[str, str]:
        """The metric and the filter of the task's main number."""
        return self.benchmark.metric, self.benchmark.filter

    @property
    def answers_in(self) -> str:
        """The language of the answers, which may differ from the questions' language."""
        if self.task in self.benchmark.in_english:
            return "en"
        return self.language

    @cached_property
    def body(self) -> Row:
        """The content of the task's file, with the files that it includes."""
        return read_task(self.file).body


@dataclass(frozen=True)
class Ask:
    """A request for the task files of a task."""

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
