"""Samples files, each read once: the scores of questions, the columns of answers.parquet, and what
the page shows.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.benchmarks import answer_language, find_benchmark, is_measure, kind_of, primary_metric
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import INVALID, finite_or_none, share_in
from pipeline.evaluate.records import Sample, ScoreRow
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.languages import is_known, language
from pipeline.stats.statistics import value_per_question

LONGEST = 4000  # characters of a prompt's end or an answer's beginning that the page includes
AT_ONCE = 20_000  # rows per row group of answers.parquet
CONSTANT = (
    "run",
    "task",
    "language",
    "num_fewshot",
)  # columns of answers.parquet; the pair, for translations
TEXTS = ("prompt", "target", "response", "extracted")

Place = tuple[str, str, str]  # an evaluation, a task, a language or pair
Vector = dict[Any, float]  # doc_id -> score


@dataclass(frozen=True)
class Evaluation:
    """What a finished evaluation stored: its scores, its harness' settings, and (place, answers by
    question) of each of its tasks.
    """

    rows: Sequence[ScoreRow]
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: Iterable[tuple[Place, Sequence[Sample]]] = ()


@dataclass
class Answers:
    """One model's answers to one task in one language (or pair).

    file: for errors; scores: metric -> doc_id -> what is stored; texts: doc_id -> (reference,
    translation); groups: doc_id -> passage, of tasks that have them; chance: the share of right
    answers by guessing among stored options;
    first: the first questions, as the page shows them.
    """

    file: str = ""
    n: int = 0
    unparsed: int = 0
    cut_off: int = 0
    chance: float | None = None
    strange: int = (
        0  # answers mostly in letters of another script, counted only if most answers are
    )
    first: list[list[Any]] = field(default_factory=list)
    scores: dict[str, dict[Any, Any]] = field(default_factory=dict)
    texts: dict[Any, tuple[str, str]] = field(default_factory=dict)
    groups: dict[Any, Any] = field(default_factory=dict)

    def has_numbers(self, metric: str) -> bool:
        """Return True if each answer has a number of a metric."""
        stored = self.scores.get(metric, {})
        return len(stored) == self.n and all(
            isinstance(value, int | float) for value in stored.values()
        )

    def by_question(self, metric: str) -> Vector:
        """doc_id -> score.

        Scores of the parts of a question, stored as [question, value], are joined
        (`value_per_question`). Raises PipelineError, naming the file, for an answer without the
        metric.
        """
        with one_sentence(self.file, metric):
            stored = self.scores[metric]
            parts = []
            for score in stored.values():
                if isinstance(score, list):
                    parts.append((int(score[0]), float(score[1])))
            if len(stored) < self.n:
                raise KeyError(metric)
            if parts:
                return value_per_question(parts, is_measure(metric))
            return {at: float(stored[at]) for at in stored}


def read_samples(path: Path) -> list[Sample]:
    """Read the answers in a samples file, by question.

    The file is parsed at once, which is twice as fast as line by line. Unpaired surrogates, which
    JSON can write and UTF-8 cannot, become question marks.

    Raises: PipelineError: a line is not JSON.
    """
    content = path.read_bytes().strip()
    rows: list[Sample] = []
    with suppress(ValueError):
        rows = json.loads(b"[" + content.replace(b"\n", b",") + b"]")
    if len(rows) != content.count(b"\n") + bool(content):
        rows = read_jsonl(path)  # it names the line
    if b"\\ud" in content or b"\\uD" in content:
        rows = json.loads(json.dumps(rows, ensure_ascii=False).encode(errors="replace"))
    return sorted(rows, key=lambda sample: sample["doc_id"])


@contextmanager
def one_sentence(where: str, metric: str = "") -> Iterator[None]:
    try:
        yield
    except PipelineError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        what = "something other than answers"
        if metric:
            what = f"an answer without {metric}"
        raise PipelineError(f"{where} contains {what}: rerun it with redo=true") from error


def sample_files(folder: Path) -> Iterator[tuple[Place, Sequence[Sample]]]:
    """(place, answers by question) of each samples file of an evaluation."""
    for path in sorted((folder / "samples").glob("*.jsonl")):
        task, _, language = path.name.removesuffix(".jsonl").partition(".")
        place = folder.name, task, language
        with one_sentence(file_of(*place)):
            yield place, read_samples(path)


def file_of(run: str, task: str, language: str) -> str:
    return f"samples/{task}.{language}.jsonl of {run}"


def read_answers(
    evaluations: Mapping[str, Evaluation], keep: Mapping[Place, int]
) -> tuple[dict[Place, Answers], bytes]:
    """Read (the answers of each place, answers.parquet) of these evaluations.

    Args: keep: how many of the first questions of a place the page shows.

    Raises: PipelineError: a samples file is truncated, or contains anything other than answers.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = [*[pa.dictionary(pa.int32(), pa.string())] * 3, pa.int32()]
    names = [
        ("doc_id", pa.string()),
        ("correct", pa.bool_()),
        ("score", pa.float64()),
        ("cut_off", pa.bool_()),
    ]
    schema = pa.schema(
        [*zip(CONSTANT, types, strict=True), *names, *((name, pa.string()) for name in TEXTS)]
    )
    rows: list[dict[str, Any]] = []
    answers: dict[Place, Answers] = {}
    file = io.BytesIO()
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:

        def write_rows() -> None:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            rows.clear()

        for _, evaluation in sorted(evaluations.items()):
            shots = {(row.task, row.where): row.num_fewshot for row in evaluation.rows}
            for place, samples in evaluation.samples:
                with one_sentence(file_of(*place)):
                    answers[place] = answers_of(place, samples, keep.get(place, 0))
                    constant = dict(zip(CONSTANT, (*place, shots.get(place[1:])), strict=True))
                    rows += [constant | row for row in answer_rows(place[1], samples)]
                if len(rows) >= AT_ONCE:
                    write_rows()
        write_rows()
    return answers, file.getvalue()


def answers_of(place: Place, samples: Sequence[Sample], keep: int = 0) -> Answers:
    """Return the answers in one samples file.

    Args: keep: how many of them the page shows.
    """
    _, task, language = place
    benchmark = find_benchmark(task)
    responses = [str(sample.get("response") or "") for sample in samples]
    lost = [sample.get("extracted") in (None, "", INVALID) for sample in samples]
    answers = Answers(
        file=file_of(*place),
        n=len(samples),
        unparsed=0 if kind_of(task) in ("choice", "text") else sum(lost),
        cut_off=sum(bool(sample.get("cut_off")) for sample in samples),
        chance=chance_by_options(samples),
        strange=in_another_script(task, language, responses),
        first=list(map(page_item, samples[:keep])),
    )
    for sample in samples:
        for metric, value in (sample.get("scores") or {}).items():
            answers.scores.setdefault(metric, {})[sample["doc_id"]] = value
    if benchmark and benchmark.kind == "translation":
        answers.texts = {
            sample["doc_id"]: (sample["target"], sample["extracted"]) for sample in samples
        }
    if benchmark and benchmark.passage:
        answers.groups = {sample["doc_id"]: sample["group"] for sample in samples}
    return answers


def chance_by_options(samples: Sequence[Sample]) -> float | None:
    """Return the share of right answers by guessing among the options that were weighed; None
    without options, and for answers that are neither right nor wrong.
    """
    counts = []
    for sample in samples:
        if sample.get("correct") is not None:
            counts.append(len(sample.get("loglikelihoods") or ()))
    if counts and min(counts) > 1:
        return fmean(1 / count for count in counts)
    return None


def in_another_script(task: str, where: str, responses: Sequence[str]) -> int:
    """Count the answers mostly in letters of another script than their language's, if more than
    half are; else 0.

    Only another script is detected: English instead of Swahili goes unnoticed. A language of which
    only the code is known has 0.
    """
    if kind_of(task) in (None, "program", "choice", "text") or not responses:
        return 0
    code = answer_language(task, where)
    if not is_known(code):
        return 0
    scripts = language(code).scripts
    if "LATIN" in scripts and all(map(str.isascii, responses)):
        return 0
    strange = sum(
        share is not None and share < 0.5
        for share in (share_in(scripts, text) for text in responses)
    )
    if strange > len(responses) / 2:
        return strange
    return 0


def page_item(sample: Sample) -> list[Any]:
    """[doc_id, correct, prompt, target, response, extracted, further scores] as the page shows
    them.
    """
    scores = {}
    for k, v in (sample.get("scores") or {}).items():
        if isinstance(v, int | float) and math.isfinite(v):
            scores[k] = v
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in sorted(scores.items()))
    prompt, response = text_of(sample.get("prompt")), text_of(sample.get("response"))
    if len(prompt) > LONGEST:
        prompt = f"[{len(prompt) - LONGEST} characters cut] …{prompt[-LONGEST:]}"
    if len(response) > LONGEST:
        response = f"{response[:LONGEST]}… [{len(response) - LONGEST} characters cut]"
    if sample.get("cut_off"):
        numbers += ", cut off"
    target, extracted = text_of(sample.get("target")), text_of(sample.get("extracted"))
    return [sample["doc_id"], sample.get("correct"), prompt, target, response, extracted, numbers]


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def answer_rows(task: str, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Return the columns of answers.parquet that differ from answer to answer.

    score is a share of 1, right or wrong, else the task's own metric, or None if it is neither,
    such as bits.
    """
    metric, _ = primary_metric(task)
    if is_measure(metric):
        factor = None
    else:
        factor = percent_factor(metric) / 100
    for sample in samples:
        right, cut_off = sample.get("correct"), sample.get("cut_off")
        number = None
        if factor:
            number = finite_or_none((sample.get("scores") or {}).get(metric))
        if number is None:
            score = number
        else:
            score = (factor or 1) * number
        yield {
            "doc_id": str(sample["doc_id"]),
            "correct": None if right is None else bool(right),
            "score": score if right is None else float(right),
            "cut_off": None if cut_off is None else bool(cut_off),
            **{name: text_of(sample.get(name)) for name in TEXTS},
        }
