"""From the harness' records to what is kept: score rows, and one record a question."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.evaluate import metrics
from pipeline.evaluate.model import key
from pipeline.evaluate.task_files import Definition
from pipeline.languages import TEN

Row = dict[str, Any]
MGSM = ("mgsm", "mgsm_en_cot", "mgsm_direct")
CHOICES = ("belebele", "global_mmlu")
AVERAGE_OF_TEN = "ten languages"  # stands where a language does


@dataclass
class Scored:
    """One task of one model: `rows` of scores, the harness' and what belongs to them, `samples` a question each."""

    rows: list[Row]
    samples: list[Row]
    task_hash: str
    version: Any
    too_long: int = 0  # prompts that did not fit and were left out


@dataclass
class Scores:
    """All tasks of one evaluation. `beside`: rows that are ours alone; `harness`: what scored them, and how."""

    rows: list[Row]
    samples: dict[str, list[Row]]  # by a definition's name
    harness: Row
    beside: list[Row] = field(default_factory=list)


def score_row(
    definition: Definition, metric: str, chosen: str, value: float | None, each: Sequence[Any], **changes: Any
) -> Row:
    """One score. `each`: a value a question, of which the standard error comes where they are numbers."""
    single = all(isinstance(one, int | float) for one in each)  # not so for corpus scores
    return {
        "task": definition.task, "language": definition.language, "pair": definition.pair, "subject": None,
        "num_fewshot": definition.num_fewshot, "metric": metric, "filter": chosen,
        "value": None if value is None else float(value),
        "stderr": metrics.mean_stderr(each) if single else None, "n": len(each), **changes,
    }  # fmt: skip


def rows_of(definition: Definition, results: Mapping[str, Any], records: list[Row], samples: list[Row]) -> list[Row]:
    """The score rows of one task: the harness' metrics, the primary one first, then shares and subjects."""
    primary = metrics.PRIMARY[definition.task]
    found = []
    for name, value in results.items():
        metric, _, chosen = name.partition(",")
        if chosen and not metric.endswith("_stderr"):
            each = [record[metric] for record in records if record["filter"] == chosen]
            found.append(score_row(definition, metric, chosen, value, each))
    found.sort(key=lambda one: (one["metric"], one["filter"]) != primary)
    if definition.task in MGSM:
        lost = [metrics.is_unparsed(sample["extracted"]) for sample in samples]
        found.append(score_row(definition, "unparsed", primary[1], metrics.mean(lost), lost))
    cut_off = [sample["cut_off"] for sample in samples if "cut_off" in sample]
    if cut_off:
        found.append(score_row(definition, "cut_off", primary[1], metrics.mean(cut_off), cut_off))
    if definition.task == "global_mmlu":
        for subject in sorted({sample["subject"] for sample in samples}):
            each = [sample["scores"]["acc"] for sample in samples if sample["subject"] == subject]
            found.append(score_row(definition, "acc", "none", metrics.mean(each), each, subject=subject))
    return found


def sample_of(definition: Definition, record: Row, ran_out: Mapping[tuple[str, str], bool]) -> Row:
    """One question as it is kept: what was asked, what came back, what was read from it, whether it is right."""
    request, answer = record["arguments"][0], record["filtered_resps"]
    sample: Row = {"doc_id": record["doc_id"], "prompt": request[0]}
    scores = {name: record[name] for name in record["metrics"]}
    if definition.task in CHOICES:
        letters = [continuation.strip() for _, continuation in record["arguments"]]
        likelihoods = [float(likelihood) for likelihood, _ in answer]
        best = letters[likelihoods.index(max(likelihoods))]
        target = record["target"]
        sample |= {
            "target": letters[target] if isinstance(target, int) else target,
            "response": best,
            "extracted": best,
        }
        sample |= {
            "correct": bool(scores["acc"]),
            "loglikelihoods": dict(zip(letters, likelihoods, strict=True)),
        }
        if definition.task == "global_mmlu":
            sample["subject"] = record["doc"]["subject"]
    else:
        sample |= {"target": str(record["target"]), "response": record["resps"][0][0], "extracted": answer[0]}
        if definition.task in MGSM:
            sample["correct"] = bool(scores["exact_match"])
            meant = metrics.last_number(sample["response"])
            scores["numeric_match"] = metrics.numeric_match(sample["response"], record["doc"]["answer_number"])
            sample["number"] = None if meant is None else str(meant)
        elif definition.task == "mbpp":
            sample["extracted"] = str(answer[0])  # an Outcome
            sample["correct"] = bool(scores["pass_at_1"])
        else:
            sample |= {"extracted": answer[0].strip(), "correct": None}
            scores = {"chrf++": metrics.sentence_chrf(record["target"], answer[0])}
        if key(request) in ran_out:
            sample["cut_off"] = ran_out[key(request)]
    return sample | {"filter": record["filter"], "prompt_hash": record["prompt_hash"], "scores": scores}


def beside(
    definitions: Sequence[Definition], rows: Sequence[Row], samples: Mapping[str, list[Row]], spm_model: Path | None
) -> list[Row]:
    """Rows that are ours alone: a numeric match for MGSM, spBLEU where its model is there, the ten-language average."""
    found = []
    for definition in definitions:
        kept = samples[definition.name]
        if definition.task in MGSM:
            right = [sample["scores"]["numeric_match"] for sample in kept]
            lost = [sample["number"] is None for sample in kept]
            found.append(score_row(definition, "numeric_match", "last-number", metrics.mean(right), right))
            found.append(score_row(definition, "unparsed", "last-number", metrics.mean(lost), lost))
        if definition.task == "flores" and spm_model:
            references, responses = ([sample[side] for sample in kept] for side in ("target", "extracted"))
            value = metrics.spbleu(references, responses, spm_model)
            found.append(score_row(definition, "spbleu", "none", value, [None] * len(kept)))
    return found + average_of_ten([*rows, *found])


def average_of_ten(rows: Sequence[Row]) -> list[Row]:
    """MGSM over all its languages but Thai, each of the same weight, where all ten are there: Layer Swapping's average.

    It has no standard error, as languages share their questions.
    """
    alike: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["task"] in MGSM and row["language"] in TEN:
            place = tuple(row[name] for name in ("task", "num_fewshot", "metric", "filter"))
            alike.setdefault(place, {})[row["language"]] = row
    found = []
    for by_language in alike.values():
        if len(by_language) == len(TEN):
            value = metrics.mean([row["value"] for row in by_language.values()])
            ours = {"language": AVERAGE_OF_TEN, "value": value, "stderr": None}
            found.append(by_language[TEN[0]] | ours | {"n": sum(row["n"] for row in by_language.values())})
    return found


def missing_row(left_out: Row) -> Row:
    """A task that a bundle wants and could not have, as a score without a value."""
    metric, chosen = metrics.PRIMARY[left_out["task"]]
    place = {"pair": None, "subject": None, "metric": metric, "filter": chosen}
    return left_out | place | {"value": None, "stderr": None, "n": 0}


def write(scores: Scores, definitions: Sequence[Definition], work: Path) -> Row:
    """scores.json and samples/<task>.<language or pair>.jsonl; gives back the scores by name for the manifest."""
    (work / "samples").mkdir(parents=True, exist_ok=True)
    for definition in definitions:
        lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in scores.samples[definition.name])
        file = work / "samples" / f"{definition.task}.{definition.where}.jsonl"
        file.write_text("".join(lines), encoding="utf-8")
    report = {"rows": scores.rows, "beside": scores.beside, "harness": scores.harness}
    (work / "scores.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    named = {}
    for row in [*scores.rows, *scores.beside]:
        parts = (row["task"], row["pair"] or row["language"], row["subject"], row["metric"])
        name = "/".join(part for part in parts if part)
        plain = row["filter"] in ("none", metrics.PRIMARY[row["task"]][1]) or row["metric"] == "numeric_match"
        if row["value"] is not None:
            named[name if plain else f"{name},{row['filter']}"] = row["value"]
    return named
