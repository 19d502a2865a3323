"""The answers behind a table, from samples files: scores by question, answers.parquet, and the data of the page."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.benchmarks import answer_language, is_measure, kind_of, primary_metric
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import INVALID, share_in, value_per_question
from pipeline.evaluate.records import Sample
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.languages import language
from pipeline.report.load.contents import Evaluation, Place

LONGEST = 4000  # characters of a prompt's end or an answer's beginning that the page includes
AT_ONCE = 20_000  # rows per row group of answers.parquet
CONSTANT = ("run", "task", "language", "num_fewshot")  # columns of answers.parquet; the pair, for translations
TEXTS = ("prompt", "target", "response", "extracted")


@dataclass
class Answers:
    """Data for the page on one model's answers to one task in one language (or pair).

    `text`: digest of all responses, empty if there are none. `first`: the first questions, as the page shows them.
    """

    n: int = 0
    unparsed: int = 0
    cut_off: int = 0
    strange: int = 0  # answers mostly in letters of another script, counted only if most answers are
    text: str = ""
    first: list[list[Any]] = field(default_factory=list)


def read_samples(path: Path) -> list[Sample]:
    """The answers in a samples file, by question; parsed at once, which is twice as fast as line by line.

    Unpaired surrogates, which JSON can write and UTF-8 cannot, become question marks. Raises PipelineError for a line
    that is not JSON.
    """
    content = path.read_bytes()
    lines = content.splitlines()  # bytes split only at \n and \r, which JSON escapes
    rows: list[Sample] = []
    with suppress(ValueError):
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    if len(rows) != len(lines):
        rows = read_jsonl(path)  # it names the line
    if b"\\ud" in content.lower():
        rows = json.loads(json.dumps(rows, ensure_ascii=False).encode(errors="replace"))
    return sorted(rows, key=lambda sample: sample["doc_id"])


def question_scores(path: Path, metric: str) -> dict[Any, float]:
    """doc_id -> score of one samples file. Scores of the parts of a question, stored as [question, value], are joined
    (`value_per_question`). Raises PipelineError for a broken line, or one without the metric."""
    with one_sentence(f"samples/{path.name} of {path.parents[1].name}", metric):
        scores = {sample["doc_id"]: sample["scores"][metric] for sample in read_samples(path)}
        parts = [(int(score[0]), float(score[1])) for score in scores.values() if isinstance(score, list)]
        return value_per_question(parts, is_measure(metric)) if parts else {at: float(scores[at]) for at in scores}


@contextmanager
def one_sentence(where: str, metric: str = "") -> Iterator[None]:
    try:
        yield
    except PipelineError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        what = f"an answer without {metric}" if metric else "something other than answers"
        raise PipelineError(f"{where} contains {what}: rerun it with redo=true") from error


@dataclass(frozen=True)
class SampleFiles:
    """(task, language or pair, answers by question) of each samples file of an evaluation, read one by one."""

    folder: Path
    name: str

    def __iter__(self) -> Iterator[tuple[str, str, Sequence[Sample]]]:
        for path in sorted((self.folder / "samples").glob("*.jsonl")):
            task, _, language = path.name.removesuffix(".jsonl").partition(".")
            with one_sentence(f"samples/{path.name} of {self.name}"):
                yield task, language, read_samples(path)


def read_answers(
    evaluations: Mapping[str, Evaluation], keep: Mapping[Place, int], parquet: Path
) -> dict[Place, Answers]:
    """Write all answers of `evaluations` to `parquet`; return the page's data for the places in `keep`, each with that
    number of its first questions.

    Raises PipelineError if a samples file is truncated or contains anything other than answers.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    answers: dict[Place, Answers] = {}
    schema = answer_schema()
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    with pq.ParquetWriter(parquet, schema, compression="zstd") as writer:

        def write_rows() -> None:
            writer.write_table(pa.Table.from_pydict(columns, schema=schema))
            for values in columns.values():
                values.clear()

        for name, evaluation in sorted(evaluations.items()):
            shots = {(row.task, row.where): row.num_fewshot for row in evaluation.rows}
            for task, language, samples in evaluation.samples:
                place = name, task, language
                with one_sentence(f"samples/{task}.{language}.jsonl of {name}"):
                    for column, values in answer_columns(task, samples).items():
                        columns[column] += values
                    for column, value in zip(CONSTANT, (*place, shots.get((task, language))), strict=True):
                        columns[column] += [value] * len(samples)
                    if place in keep:
                        answers[place] = page_answers(task, language, samples, keep[place])
                if len(columns["run"]) >= AT_ONCE:
                    write_rows()
        write_rows()
    return answers


def page_answers(task: str, language: str, samples: Sequence[Sample], keep: int) -> Answers:
    responses = [str(sample.get("response") or "") for sample in samples]
    digest_input = json.dumps([[sample["doc_id"], text] for sample, text in zip(samples, responses, strict=True)])
    lost = [sample.get("extracted") in (None, "", INVALID) for sample in samples]
    return Answers(
        n=len(samples),
        unparsed=0 if kind_of(task) in ("choice", "text") else sum(lost),
        cut_off=sum(bool(sample.get("cut_off")) for sample in samples),
        strange=in_another_script(task, language, responses),
        text=hashlib.sha256(digest_input.encode()).hexdigest() if any(responses) else "",
        first=[page_item(sample) for sample in samples[:keep]],
    )


def score_of(task: str, sample: Sample) -> float | None:
    """One question's score as a share of 1: right or wrong, else the task's own metric. None if it is neither, such as
    bits."""
    if sample.get("correct") is not None:
        return float(sample["correct"])
    metric, scale = own_metric(task)
    value = (sample.get("scores") or {}).get(metric) if scale else None
    return scale * value if isinstance(value, int | float) and math.isfinite(value) else None


@lru_cache(maxsize=256)  # asked for each answer
def own_metric(task: str) -> tuple[str, float]:
    """A task's metric and its factor to a share of 1; 0 if it is none, such as bits."""
    metric, _ = primary_metric(task)
    return metric, 0.0 if is_measure(metric) else percent_factor(metric) / 100


def in_another_script(task: str, place: str, responses: Sequence[str]) -> int:
    """Number of answers mostly in letters of another script than their language's, if more than half are; else 0.

    Detects another script only; English instead of Swahili goes unnoticed.
    """
    if kind_of(task) in (None, "program", "choice", "text") or not responses:
        return 0
    scripts = language(answer_language(task, place)).scripts
    if "LATIN" in scripts and all(map(str.isascii, responses)):
        return 0
    strange = sum(share is not None and share < 0.5 for share in (share_in(scripts, text) for text in responses))
    return strange if strange > len(responses) / 2 else 0


def page_item(sample: Sample) -> list[Any]:
    """[doc_id, correct, prompt, target, response, extracted, further scores] as the page shows them."""
    scores = {k: v for k, v in (sample.get("scores") or {}).items() if isinstance(v, int | float) and math.isfinite(v)}
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in sorted(scores.items()))
    prompt, response = text_of(sample.get("prompt")), text_of(sample.get("response"))
    over = len(prompt) - LONGEST
    return [
        sample["doc_id"],
        sample.get("correct"),
        prompt if over <= 0 else f"[{over} characters cut] …{prompt[-LONGEST:]}",
        text_of(sample.get("target")),
        response if len(response) <= LONGEST else f"{response[:LONGEST]}… [{len(response) - LONGEST} characters cut]",
        text_of(sample.get("extracted")),
        numbers + (", cut off" if sample.get("cut_off") else ""),
    ]


def text_of(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------ answers.parquet


def answer_schema() -> Any:
    import pyarrow as pa

    types = [*[pa.dictionary(pa.int32(), pa.string())] * 3, pa.int32()]
    columns = [("doc_id", pa.string()), ("correct", pa.bool_()), ("score", pa.float64()), ("cut_off", pa.bool_())]
    return pa.schema([*zip(CONSTANT, types, strict=True), *columns, *((name, pa.string()) for name in TEXTS)])


def answer_columns(task: str, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The columns of answers.parquet that differ from answer to answer."""
    flags = {name: [row.get(name) for row in samples] for name in ("correct", "cut_off")}
    return {
        "doc_id": [str(row["doc_id"]) for row in samples], "score": [score_of(task, row) for row in samples],
        **{name: [None if value is None else bool(value) for value in values] for name, values in flags.items()},
        **{name: [text_of(row.get(name)) for row in samples] for name in TEXTS},
    }  # fmt: skip
