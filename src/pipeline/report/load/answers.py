"""Reading of samples files, each once.

They contain the scores of questions, the columns of answers.parquet, and the answers on the page.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import find_benchmark, is_measure, kind_of, primary_metric
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import INVALID, finite_or_none
from pipeline.evaluate.records import Sample, ScoreRow
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.report.frame import NoScore
from pipeline.stats.statistics import value_per_question

if TYPE_CHECKING:
    import pyarrow

LONGEST = 4000  # characters of a prompt's end or an answer's beginning that the page includes
MOST_ANSWERS, MOST_QUESTIONS = 10_000, 250  # the page shows no more
AT_ONCE = 20_000  # rows per row group of answers.parquet
# columns of answers.parquet; for translations, `language` is the pair
CONSTANT = ("run", "task", "language", "num_fewshot")
TEXTS = ("prompt", "target", "response", "extracted")

Place = tuple[str, str, str]  # an evaluation, a task, a language or pair
Vector = dict[Any, float]  # doc_id -> score


@dataclass(frozen=True)
class Evaluation:
    """The stored results of a finished evaluation.

    Attributes:
        rows: Its scores.
        settings: The settings of its harness.
        samples: The place and the answers by question of each of its tasks.
    """

    rows: Sequence[ScoreRow]
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: Iterable[tuple[Place, Sequence[Sample]]] = ()


@dataclass
class Answers:
    """One model's answers to one task in one language (or pair).

    Attributes:
        chance: The share of right answers by guessing among stored options.
        first: The first questions, as the page shows them.
        scores: metric -> doc_id -> the stored value.
        texts: doc_id -> (reference, translation).
        groups: doc_id -> passage, for tasks with passages.
    """

    n: int = 0
    unparsed: int = 0
    cut_off: int = 0
    chance: float | None = None
    first: list[list[str]] = field(default_factory=list)
    scores: dict[str, dict[Any, Any]] = field(default_factory=dict)
    texts: dict[Any, tuple[str, str]] = field(default_factory=dict)
    groups: dict[Any, Any] = field(default_factory=dict)

    def by_question(self, metric: str) -> Vector:
        """Return doc_id -> score.

        Scores of the parts of a question, stored as [question, value], are joined
        (`value_per_question`).

        Raises:
            NoScore: If an answer has no number of the metric.
        """
        stored = self.scores.get(metric, {})
        try:
            if len(stored) < self.n:
                raise ValueError
            parts = []
            for score in stored.values():
                if isinstance(score, list):
                    parts.append((int(score[0]), float(score[1])))
            if parts:
                return value_per_question(parts, is_measure(metric))
            return {at: float(stored[at]) for at in stored}
        except (TypeError, ValueError, IndexError):
            raise NoScore(f"{metric} is of all answers together, not of each") from None


def read_samples(path: Path) -> list[Sample]:
    """Read the answers in a samples file, by question.

    Unpaired surrogates, which JSON can write and UTF-8 cannot, become question marks.

    Raises:
        PipelineError: If a line is not JSON.
    """
    rows = read_jsonl(path)
    if b"\\ud" in path.read_bytes().lower():
        rows = json.loads(json.dumps(rows, ensure_ascii=False).encode(errors="replace"))
    return sorted(rows, key=lambda sample: sample["doc_id"])


@contextmanager
def one_sentence(where: str) -> Iterator[None]:
    try:
        yield
    except PipelineError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise PipelineError(
            f"{where} contains something other than answers. Rerun it with redo=true."
        ) from error


def sample_files(folder: Path) -> Iterator[tuple[Place, Sequence[Sample]]]:
    """Yield the place and the answers by question of each samples file of an evaluation."""
    for path in sorted((folder / "samples").glob("*.jsonl")):
        task, _, language = path.name.removesuffix(".jsonl").partition(".")
        place = folder.name, task, language
        with one_sentence(file_of(*place)):
            yield place, read_samples(path)


def file_of(run: str, task: str, language: str) -> str:
    return f"samples/{task}.{language}.jsonl of {run}"


def read_answers(
    evaluations: Mapping[str, Evaluation],
) -> tuple[dict[Place, Answers], bytes]:
    """Read the answers of each place, and answers.parquet, of these evaluations.

    The first questions of each place are kept for the page, up to MOST_QUESTIONS of each and about
    MOST_ANSWERS in total.

    Raises:
        PipelineError: If a samples file is truncated, or contains something other than answers.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = answers_schema()
    rows: list[dict[str, Any]] = []
    answers: dict[Place, Answers] = {}
    file = io.BytesIO()
    keep = min(MOST_QUESTIONS, max(1, MOST_ANSWERS // max(1, len(evaluations))))
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for _, evaluation in sorted(evaluations.items()):
            shots = {(row.task, row.where): row.num_fewshot for row in evaluation.rows}
            for place, samples in evaluation.samples:
                with one_sentence(file_of(*place)):
                    answers[place] = answers_of(place, samples, keep)
                    values = (*place, shots.get(place[1:]))
                    constant = dict(zip(CONSTANT, values, strict=True))
                    rows += [constant | answer_row(place[1], sample) for sample in samples]
                if len(rows) >= AT_ONCE:
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                    rows.clear()
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return answers, file.getvalue()


def answers_schema() -> pyarrow.Schema:
    import pyarrow as pa

    types = [*[pa.dictionary(pa.int32(), pa.string())] * 3, pa.int32()]
    columns = [
        *zip(CONSTANT, types, strict=True),
        ("doc_id", pa.string()),
        ("correct", pa.bool_()),
        ("score", pa.float64()),
        ("cut_off", pa.bool_()),
    ]
    columns += [(name, pa.string()) for name in TEXTS]
    return pa.schema(columns)


def answers_of(place: Place, samples: Sequence[Sample], keep: int = 0) -> Answers:
    """Return the answers in one samples file.

    Args:
        place: The run, task and language of the file.
        samples: Its answers.
        keep: How many of them the page shows.
    """
    task = place[1]
    benchmark = find_benchmark(task)
    unparsed = 0
    if kind_of(task) not in ("choice", "text"):
        unparsed = sum(sample.get("extracted") in (None, "", INVALID) for sample in samples)
    answers = Answers(
        n=len(samples),
        unparsed=unparsed,
        cut_off=sum(bool(sample.get("cut_off")) for sample in samples),
        chance=chance_by_options(samples),
        first=[page_item(task, sample) for sample in samples[:keep]],
    )
    for sample in samples:
        doc_id = sample["doc_id"]
        for metric, value in (sample.get("scores") or {}).items():
            answers.scores.setdefault(metric, {})[doc_id] = value
        if benchmark and benchmark.kind == "translation":
            answers.texts[doc_id] = (sample["target"], sample["extracted"])
        if benchmark and benchmark.passage:
            answers.groups[doc_id] = sample["group"]
    return answers


def chance_by_options(samples: Sequence[Sample]) -> float | None:
    """Return the share of right answers by guessing among the options with log-likelihoods.

    None without options, and for answers that are neither right nor wrong.
    """
    counts = []
    for sample in samples:
        if sample.get("correct") is not None:
            counts.append(len(sample.get("loglikelihoods") or ()))
    if counts and min(counts) > 1:
        return fmean(1 / count for count in counts)
    return None


def page_item(task: str, sample: Sample) -> list[str]:
    """Return an answer as the page shows it.

    [question, prompt, expected, right or wrong, extracted, response, further scores]
    """
    row = answer_row(task, sample)
    numbers = []
    for name, value in sorted((sample.get("scores") or {}).items()):
        if finite_or_none(value) is not None:
            numbers.append(f"{name} {value:.4g}")
    scores = ", ".join(numbers)
    if row["cut_off"]:
        scores += ", cut off"
    prompt, response = row["prompt"], row["response"]
    if len(prompt) > LONGEST:
        prompt = f"[cut] …{prompt[-LONGEST:]}"
    if len(response) > LONGEST:
        response = f"{response[:LONGEST]}… [cut]"
    right = {True: "✓ right", False: "✗ wrong"}.get(row["correct"], "")
    return [row["doc_id"], prompt, row["target"], right, row["extracted"], response, scores]


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def answer_row(task: str, sample: Sample) -> dict[str, Any]:
    """Return the columns of answers.parquet that differ from answer to answer.

    `score` is a share of 1: whether the answer is right, otherwise the task's metric. It is None if
    the metric is no share, such as bits.
    """
    metric, _ = primary_metric(task)
    right, cut_off = sample.get("correct"), sample.get("cut_off")
    score = finite_or_none((sample.get("scores") or {}).get(metric))
    if right is not None:
        right = bool(right)
        score = float(right)
    elif score is not None:
        score = None if is_measure(metric) else percent_factor(metric) / 100 * score
    if cut_off is not None:
        cut_off = bool(cut_off)
    texts = {name: text_of(sample.get(name)) for name in TEXTS}
    answer = {"correct": right, "score": score, "cut_off": cut_off}
    return {"doc_id": str(sample["doc_id"]), **answer, **texts}
