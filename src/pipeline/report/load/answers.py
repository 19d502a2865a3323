"""The answers behind a table: each samples file is read once, into answers.parquet and the data of the page."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import answer_language, is_measure, kind_of, primary_metric
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import INVALID, share_in
from pipeline.evaluate.records import Sample
from pipeline.languages import language
from pipeline.report.load.contents import Results
from pipeline.report.load.scores import Written, percent_factor

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetWriter

LONGEST = 4000  # characters of a prompt's end or an answer's beginning that the page includes
AT_ONCE = 20_000  # rows per row group of answers.parquet
TEXTS = ("prompt", "target", "response", "extracted")

Place = tuple[str, str, str]  # an evaluation, a task, a language or pair


@dataclass
class Answers:
    """Data for the page on one model's answers to one task in one language (or pair).

    `scores`: doc_id -> 1 or 0; the question's own score as a share of 1 if the task has no right and wrong. `text`:
    digest of all responses, empty if there are none. `translations`: doc_id -> (reference, response). `first`: the
    first questions, as the page shows them.
    """

    n: int = 0
    scores: dict[Any, float] = field(default_factory=dict)
    unparsed: int = 0
    cut_off: int = 0
    strange: int = 0  # answers mostly in letters of another script, counted only if most answers are
    text: str = ""
    translations: dict[Any, tuple[str, str]] = field(default_factory=dict)
    first: list[list[Any]] = field(default_factory=list)


def stored_answers(results: Results) -> dict[str, Iterable[tuple[str, str, Sequence[Sample]]]]:
    """Name of each evaluation -> (task, language or pair, answers) of its files, read one by one."""
    return {
        name: [(*place, found) for place, found in results.logged[name].samples.items()]
        if name in results.logged else samples_in(run.folder, name)
        for name, run in sorted(results.evaluations.items())
    }  # fmt: skip


def samples_in(folder: Path, name: str) -> Iterator[tuple[str, str, Sequence[Sample]]]:
    """(task, language or pair, answers by question) of each samples file of an evaluation."""
    for path in sorted((folder / "samples").glob("*.jsonl")):
        task, _, language = path.name.removesuffix(".jsonl").partition(".")
        with one_sentence(f"samples/{path.name} of {name}"):
            yield task, language, sorted(read_samples(path), key=lambda sample: sample["doc_id"])


@contextmanager
def one_sentence(where: str) -> Iterator[None]:
    try:
        yield
    except PipelineError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise PipelineError(f"{where} contains something other than answers: rerun it with redo=true") from error


def read_answers(
    evaluations: Mapping[str, Iterable[tuple[str, str, Sequence[Sample]]]], written: Written,
    keep: Mapping[Place, int], parquet: Path,
) -> dict[Place, Answers]:  # fmt: skip
    """Write all answers of `evaluations` (`stored_answers`) to `parquet`; return the page's data for the places in
    `keep`, each with that number of its first questions.

    Raises PipelineError if a samples file is truncated or contains anything other than answers.
    """
    import pyarrow.parquet as pq

    answers: dict[Place, Answers] = {}
    with pq.ParquetWriter(parquet, answer_schema(), compression="zstd") as writer:
        rows = AnswerRows(writer)
        for name, files in evaluations.items():
            shots = {(row.task, row.where): row.num_fewshot for row in written[name][0]}
            for task, language, samples in files:
                with one_sentence(f"samples/{task}.{language}.jsonl of {name}"):
                    rows.add(name, task, language, shots.get((task, language)), samples)
                    place = name, task, language
                    if place in keep:
                        answers[place] = page_answers(task, language, samples, keep[place])
        rows.flush()
    return answers


def read_samples(path: Path) -> list[Sample]:
    """The lines of a file as `read_jsonl` reads them, parsed at once: twice as fast. Falls back to it on an error.

    Unpaired surrogates, which JSON can write and UTF-8 cannot, become question marks.
    """
    content = path.read_bytes()
    lines = content.splitlines()  # bytes split only at \n and \r, which JSON escapes
    with suppress(ValueError):
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        if b"\\ud" in content.lower():
            rows = json.loads(json.dumps(rows, ensure_ascii=False).encode(errors="replace"))
        if len(rows) == len(lines):
            return rows
    return read_jsonl(path)


def page_answers(task: str, language: str, samples: Sequence[Sample], keep: int) -> Answers:
    kind, responses = kind_of(task), [str(sample.get("response") or "") for sample in samples]
    digest_input = json.dumps([[sample["doc_id"], text] for sample, text in zip(samples, responses, strict=True)])
    return Answers(
        n=len(samples),
        scores={sample["doc_id"]: score for sample in samples if (score := score_of(task, sample)) is not None},
        unparsed=0
        if kind in ("choice", "text")
        else sum(sample.get("extracted") in (None, "", INVALID) for sample in samples),
        cut_off=sum(bool(sample.get("cut_off")) for sample in samples),
        strange=in_another_script(task, language, responses),
        text=hashlib.sha256(digest_input.encode()).hexdigest() if any(responses) else "",
        translations={
            sample["doc_id"]: (text_of(sample.get("target")), text_of(sample.get("extracted"))) for sample in samples
        }
        if kind == "translation"
        else {},
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

    category = pa.dictionary(pa.int32(), pa.string())
    columns: list[tuple[str, Any]] = [
        ("run", category),
        ("task", category),
        ("language", category),
        ("num_fewshot", pa.int32()),
    ]
    columns += [("doc_id", pa.string()), ("correct", pa.bool_()), ("score", pa.float64()), ("cut_off", pa.bool_())]
    return pa.schema([*columns, *((name, pa.string()) for name in TEXTS)])


@dataclass
class AnswerRows:
    """Buffered rows of answers.parquet, by column. `language` is the pair, for translations."""

    writer: ParquetWriter
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, run: str, task: str, language: str, shots: int | None, samples: Sequence[Sample]) -> None:
        constants = {"run": run, "task": task, "language": language, "num_fewshot": shots}
        for name, value in constants.items():
            self.columns.setdefault(name, []).extend([value] * len(samples))
        values_of: dict[str, list[Any]] = {
            "doc_id": [str(sample["doc_id"]) for sample in samples],
            "correct": [None if row.get("correct") is None else bool(row["correct"]) for row in samples],
            "score": [score_of(task, sample) for sample in samples],
            "cut_off": [None if row.get("cut_off") is None else bool(row["cut_off"]) for row in samples],
        }
        values_of |= {name: [text_of(sample.get(name)) for sample in samples] for name in TEXTS}
        for name, values in values_of.items():
            self.columns.setdefault(name, []).extend(values)
        if len(self.columns["run"]) >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa

        if self.columns:
            self.writer.write_table(pa.Table.from_pydict(self.columns, schema=answer_schema()))
            self.columns = {}
