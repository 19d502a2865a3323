"""What the report reads question by question: paired comparisons, sanity marks, and generations to browse.

`primary`: the scores that the table shows; `folders` leads from an evaluation's name to its folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.rows import read_jsonl
from pipeline.evaluate.metrics import INVALID, mean, share_in
from pipeline.evaluate.records import CHOICES, Sample
from pipeline.languages import language
from pipeline.report.results import Score
from pipeline.report.statistics import paired_bootstrap, standard_error

CHANCE = 0.25  # of four choices
GENERATIONS = 30  # shown a cell
LONGEST = 4000  # characters of a prompt's end or an answer's beginning that the page carries


def read_samples(folder: Path, task: str, where: str) -> list[Sample] | None:
    """The questions of one task and language (or pair) in order of doc_id; None where none were kept."""
    path = folder / "samples" / f"{task}.{where}.jsonl"
    if not path.is_file():
        return None
    return sorted(read_jsonl(path), key=lambda sample: sample["doc_id"])


# ------------------------------------------------------------------------------------------- paired comparisons


@dataclass(frozen=True)
class Difference:
    """`row` minus `against` on the `n` questions that both answered, with its interval, in percentage points."""

    row: str
    against: str
    n: int
    difference: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """Every merge of one task and language against the base and the best expert."""

    language: str
    task: str
    num_fewshot: int
    expert: str | None
    lines: list[Difference]


def comparisons(
    primary: Sequence[Score], folders: Mapping[str, Path], roles: Mapping[str, str], languages: Sequence[str]
) -> list[Comparison]:
    """For each target language and MGSM task: every merge minus the base and minus the best expert, same questions.

    roles: row -> base, expert, or anything else (compared). The best expert is the one with the highest score on these
    very questions, which favours it. Seeds: a question's score is its mean over seeds, and questions are resampled, so
    the interval says nothing about the spread over seeds.
    """
    blocks = []
    for target in languages:
        here = [one for one in primary if one.target == one.where == target and one.task.startswith("mgsm")]
        for task, shots in sorted({(one.task, one.num_fewshot) for one in here}):
            scored: dict[str, list[Score]] = {}
            for one in here:
                if (one.task, one.num_fewshot) == (task, shots):
                    scored.setdefault(one.row, []).append(one)
            answers = {row: _correct(scores, folders) for row, scores in scored.items()}
            values = {row: [one.value for one in scores if one.value is not None] for row, scores in scored.items()}
            experts = {row: mean(values[row]) for row in scored if roles[row] == "expert" and values[row]}
            best = max(experts, key=lambda row: experts[row], default=None)
            rivals = [row for row in scored if roles[row] == "base"] + ([best] if best else [])
            lines = [
                _difference(row, rival, answers)
                for row in scored
                if roles[row] not in ("base", "expert")
                for rival in rivals
            ]
            if lines:
                blocks.append(Comparison(target, task, shots, best, lines))
    return blocks


def _correct(scores: Sequence[Score], folders: Mapping[str, Path]) -> dict[Any, float]:
    """doc_id -> share of seeds that answer it correctly, for the questions that every seed has."""
    seeds = []
    for name in sorted({one.eval for one in scores}):
        samples = read_samples(folders[name], scores[0].task, scores[0].where) or []
        seeds.append({s["doc_id"]: float(s["correct"]) for s in samples if s.get("correct") is not None})
    shared = set.intersection(*(set(seed) for seed in seeds))
    return {doc: mean([seed[doc] for seed in seeds]) for doc in shared}


def _difference(row: str, against: str, answers: Mapping[str, Mapping[Any, float]]) -> Difference:
    first, second = answers[row], answers[against]
    shared = sorted(set(first) & set(second))
    if not shared:
        return Difference(row, against, 0, None, None, None)
    difference, low, high = paired_bootstrap([first[doc] for doc in shared], [second[doc] for doc in shared])
    return Difference(row, against, len(shared), 100 * difference, 100 * low, 100 * high)


# ------------------------------------------------------------------------------------------------- sanity marks


@dataclass(frozen=True)
class Mark:
    """A score that deserves a look: `mark` names what is odd, `label` its column."""

    mark: str
    row: str
    label: str
    seed: int
    detail: str


def sanity(primary: Sequence[Score], folders: Mapping[str, Path]) -> list[Mark]:
    """Scores that deserve a look.

    Exactly 0, at chance, mostly unparsed, cut off, in the wrong script, identical to another row's.
    """
    marks = []
    answers: dict[tuple, dict[str, list[Score]]] = {}
    seen: dict[tuple, Score] = {}  # the base serves every seed, its English every language: one mark
    for score in primary:
        seen.setdefault((score.row, score.eval, score.task, score.where, score.num_fewshot), score)
    for score in seen.values():
        marks += [Mark(mark, score.row, score.label, score.seed, detail) for mark, detail in _marks(score, folders)]
        samples = read_samples(folders[score.eval], score.task, score.where) or []
        responses = json.dumps([[one["doc_id"], one.get("response")] for one in samples])
        if any(one.get("response") for one in samples):
            place = (score.task, score.where, score.num_fewshot, score.target)
            answers.setdefault((place, responses), {}).setdefault(score.row, []).append(score)
    for same in answers.values():
        for row, scores in same.items():
            others = ", ".join(other for other in same if other != row)
            detail = f"every response is the same as of: {others}"
            marks += [Mark("identical", row, one.label, one.seed, detail) for one in scores if others]
    return marks


def _marks(score: Score, folders: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    value, n = score.value, score.n
    if score.reason:
        return  # never asked: the table says why
    if value is None:
        yield "no number", "the score is not a finite number"
    elif value == 0:
        yield "exactly 0", "not one answer counted"
    elif score.task in CHOICES and n:
        error = standard_error(CHANCE, n)
        if value <= CHANCE + 2 * error:
            place = "below chance" if value < CHANCE - 2 * error else "at chance"
            yield (
                place,
                f"{100 * value:.1f} of 100, where guessing gives {100 * CHANCE:.0f} ± {100 * 2 * error:.1f}",
            )
    if score.task not in CHOICES:  # a choice among four is always parsed
        samples = read_samples(folders[score.eval], score.task, score.where) or []
        unparsed = sum(sample.get("extracted") in (None, "", INVALID) for sample in samples)
        if samples and unparsed / len(samples) > 0.5:
            yield "mostly unparsed", f"nothing extracted from {unparsed} of {len(samples)} answers"
        if cut_off := sum(bool(sample.get("cut_off")) for sample in samples):
            yield "cut off", f"{cut_off} of {len(samples)} answers ran out of tokens (eval.max_gen_toks)"
        if strange := _in_another_script(score, samples):
            yield "wrong script", f"{strange} of {len(samples)} answers are mostly in letters of another script"


def _in_another_script(score: Score, samples: Sequence[Sample]) -> int:
    """How many answers are mostly not in the letters of their language, where these are more than half; else 0.

    Seen between scripts only: English where Swahili is asked for is not.
    """
    if score.task == "mbpp" or not samples:
        return 0
    spoken = language("en" if score.task == "mgsm_en_cot" else score.where.split("-")[-1])
    shares = [share_in(spoken.scripts, str(sample.get("response") or "")) for sample in samples]
    strange = sum(share is not None and share < 0.5 for share in shares)
    return strange if strange > len(samples) / 2 else 0


# -------------------------------------------------------------------------------------------------- generations


def generations(primary: Sequence[Score], folders: Mapping[str, Path]) -> dict[str, Any]:
    """The first questions of each cell, for the page's browser.

    {"strings": [...], "cells": [{row, language, task, seed, total, items: [[doc_id, prompt, target, response,
    extracted, correct, scores]]}]}; prompt and target are places in `strings`, since rows share their questions.
    A row's first seed is shown.
    """
    strings: dict[str, int] = {}
    cells: dict[tuple, dict[str, Any]] = {}
    for score in primary:
        place = (score.row, score.target, score.label)
        if place in cells:
            continue
        samples = read_samples(folders[score.eval], score.task, score.where)
        items = [
            [
                sample["doc_id"],
                strings.setdefault(_end(_text(sample.get("prompt"))), len(strings)),
                strings.setdefault(_text(sample.get("target")), len(strings)),
                _beginning(_text(sample.get("response"))),
                _text(sample.get("extracted")),
                sample.get("correct"),
                _numbers(sample.get("scores") or {}) + (", cut off" if sample.get("cut_off") else ""),
            ]
            for sample in (samples or [])[:GENERATIONS]
        ]
        cells[place] = {
            "row": score.row,
            "language": score.target,
            "task": score.label,
            "seed": score.seed,
            "total": len(samples or []),
            "items": items,
        }
    return {"strings": list(strings), "cells": list(cells.values())}


def _numbers(scores: Mapping[str, Any]) -> str:
    finite = {k: v for k, v in scores.items() if isinstance(v, int | float) and math.isfinite(v)}
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(finite.items()))


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _end(text: str) -> str:
    return text if len(text) <= LONGEST else f"[{len(text) - LONGEST} characters cut] …" + text[-LONGEST:]


def _beginning(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + f"… [{len(text) - LONGEST} characters cut]"
