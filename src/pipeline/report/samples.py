"""What the report reads question by question: paired comparisons, sanity marks, and generations to browse.

A record is a primary score as scores.py loads it; `folders` leads from an evaluation's name to its folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.data.rows import read_jsonl
from pipeline.evaluate.metrics import share_in
from pipeline.languages import language as language_of
from pipeline.report.scores import Record
from pipeline.report.statistics import mean, paired_bootstrap, standard_error

FOUR_WAY = ("belebele", "global_mmlu")
CHANCE = 0.25
GENERATIONS = 30  # shown a cell
LONGEST = 4000  # characters of a prompt's end or an answer's beginning that the page carries


def read_samples(folder: Path, task: str, where: str) -> list[dict[str, Any]] | None:
    """The questions of one task and language (or pair) in order of doc_id; None where none were kept."""
    path = folder / "samples" / f"{task}.{where}.jsonl"
    if not path.is_file():
        return None
    return sorted(read_jsonl(path), key=lambda sample: sample["doc_id"])


# ------------------------------------------------------------------------------------------- paired comparisons


def comparisons(
    primary: Sequence[Record], folders: Mapping[str, Path], roles: Mapping[str, str], languages: Sequence[str]
):
    """For each target language and MGSM task: every merge minus the base and minus the best expert, same questions.

    roles: row -> base, expert, or anything else (compared). The best expert is the one with the highest score on these
    very questions, which favours it. Seeds: a question's score is its mean over seeds, and questions are resampled, so
    the interval says nothing about the spread over seeds. Returns a list of blocks
    {language, task, num_fewshot, expert, lines: [{row, against, n, difference, low, high}]}, in percentage points.
    """
    blocks = []
    for language in languages:
        here = [
            r for r in primary if r["target"] == language and r["where"] == language and r["task"].startswith("mgsm")
        ]
        for task, shots in sorted({(r["task"], r["num_fewshot"]) for r in here}):
            scored: dict[str, list[Record]] = {}
            for record in here:
                if (record["task"], record["num_fewshot"]) == (task, shots):
                    scored.setdefault(record["row"], []).append(record)
            answers = {row: _correct(records, folders) for row, records in scored.items()}
            experts = {
                row: mean([r["value"] for r in scored[row] if r["value"] is not None])
                for row in scored
                if roles[row] == "expert" and any(r["value"] is not None for r in scored[row])
            }
            best = max(experts, key=lambda row: experts[row], default=None)
            rivals = [row for row in scored if roles[row] == "base"] + ([best] if best else [])
            lines = [
                {"row": row, "against": rival, **_difference(answers[row], answers[rival])}
                for row in scored
                if roles[row] not in ("base", "expert")
                for rival in rivals
            ]
            if lines:
                blocks.append(
                    {"language": language, "task": task, "num_fewshot": shots, "expert": best, "lines": lines}
                )
    return blocks


def _correct(records: Sequence[Record], folders: Mapping[str, Path]) -> dict[Any, float]:
    """doc_id -> share of seeds that answer it correctly, for the questions that every seed has."""
    seeds = []
    for name in sorted({record["eval"] for record in records}):
        samples = read_samples(folders[name], records[0]["task"], records[0]["where"]) or []
        seeds.append({s["doc_id"]: float(s["correct"]) for s in samples if s.get("correct") is not None})
    shared = set.intersection(*(set(seed) for seed in seeds))
    return {doc: mean([seed[doc] for seed in seeds]) for doc in shared}


def _difference(first: Mapping[Any, float], second: Mapping[Any, float]) -> dict[str, Any]:
    shared = sorted(set(first) & set(second))
    if not shared:
        return {"n": 0, "difference": None, "low": None, "high": None}
    difference, low, high = paired_bootstrap([first[doc] for doc in shared], [second[doc] for doc in shared])
    return {"n": len(shared), "difference": 100 * difference, "low": 100 * low, "high": 100 * high}


# ------------------------------------------------------------------------------------------------- sanity marks


def sanity(primary: Sequence[Record], folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Scores that deserve a look, as {mark, row, label, seed, detail}.

    Exactly 0, at chance, mostly unparsed, cut off, in the wrong script, identical to another row's.
    """
    marks = []
    answers: dict[tuple, dict[str, list[Record]]] = {}
    seen: dict[tuple, Record] = {}  # the base serves every seed, its English every language: one mark
    for record in primary:
        seen.setdefault(tuple(record[key] for key in ("row", "eval", "task", "where", "num_fewshot")), record)
    for record in seen.values():
        for mark, detail in _marks(record, folders):
            marks.append(
                {
                    "mark": mark,
                    "row": record["row"],
                    "label": record["label"],
                    "seed": record["seed"],
                    "detail": detail,
                }
            )
        samples = read_samples(folders[record["eval"]], record["task"], record["where"]) or []
        responses = json.dumps([[s["doc_id"], s.get("response")] for s in samples])
        if any(s.get("response") for s in samples):
            place = (record["task"], record["where"], record["num_fewshot"], record["target"])
            answers.setdefault((place, responses), {}).setdefault(record["row"], []).append(record)
    for same in answers.values():
        for row, records in same.items():
            others = ", ".join(other for other in same if other != row)
            for record in records if others else ():
                detail = f"every response is the same as of: {others}"
                marks.append(
                    {
                        "mark": "identical",
                        "row": row,
                        "label": record["label"],
                        "seed": record["seed"],
                        "detail": detail,
                    }
                )
    return marks


def _marks(record: Record, folders: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    value, n = record["value"], record["n"]
    if record.get("reason"):
        return  # never asked: the table says why
    if value is None:
        yield "no number", "the score is not a finite number"
    elif value == 0:
        yield "exactly 0", "not one answer counted"
    elif record["task"] in FOUR_WAY and n:
        error = standard_error(CHANCE, n)
        if value <= CHANCE + 2 * error:
            place = "below chance" if value < CHANCE - 2 * error else "at chance"
            yield (
                place,
                f"{100 * value:.1f} of 100, where guessing gives {100 * CHANCE:.0f} ± {100 * 2 * error:.1f}",
            )
    if record["task"] not in FOUR_WAY:  # a choice among four is always parsed
        samples = read_samples(folders[record["eval"]], record["task"], record["where"]) or []
        unparsed = sum(sample.get("extracted") in (None, "", "[invalid]") for sample in samples)
        if samples and unparsed / len(samples) > 0.5:
            yield "mostly unparsed", f"nothing extracted from {unparsed} of {len(samples)} answers"
        if cut_off := sum(bool(sample.get("cut_off")) for sample in samples):
            yield "cut off", f"{cut_off} of {len(samples)} answers ran out of tokens (eval.max_gen_toks)"
        if strange := _in_another_script(record, samples):
            yield "wrong script", f"{strange} of {len(samples)} answers are mostly in letters of another script"


def _in_another_script(record: Record, samples: Sequence[Mapping[str, Any]]) -> int:
    """How many answers are mostly not in the letters of their language, where these are more than half; else 0.

    Seen between scripts only: English where Swahili is asked for is not.
    """
    if record["task"] == "mbpp" or not samples:
        return 0
    spoken = language_of("en" if record["task"] == "mgsm_en_cot" else record["where"].split("-")[-1])
    shares = [share_in(spoken.scripts, str(sample.get("response") or "")) for sample in samples]
    strange = sum(share is not None and share < 0.5 for share in shares)
    return strange if strange > len(samples) / 2 else 0


# -------------------------------------------------------------------------------------------------- generations


def generations(primary: Sequence[Record], folders: Mapping[str, Path]) -> dict[str, Any]:
    """The first questions of each cell, for the page's browser.

    {"strings": [...], "cells": [{row, language, task, seed, total, items: [[doc_id, prompt, target, response,
    extracted, correct, scores]]}]}; prompt and target are places in `strings`, since rows share their questions.
    A row's first seed is shown.
    """
    strings: dict[str, int] = {}
    cells: dict[tuple, dict[str, Any]] = {}
    for record in primary:
        place = (record["row"], record["target"], record["label"])
        if place in cells:
            continue
        samples = read_samples(folders[record["eval"]], record["task"], record["where"])
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
            "row": record["row"],
            "language": record["target"],
            "task": record["label"],
            "seed": record["seed"],
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
