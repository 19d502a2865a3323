"""An evaluation of several tasks or languages: the scoring runs that it is made of, and what they
come to together.

A scoring run is one model, one task with its shots, one language, whoever asks for it: a table, a
selection and stage=eval share it. Imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import benchmark_of, kind_of
from pipeline.evaluate.records import EvaluationResult, ScoreRow, write_scores
from pipeline.files import link_or_copy
from pipeline.languages import TEN

if TYPE_CHECKING:
    from pipeline.config.stages import EvalStage
    from pipeline.runs.run import Parent


SAMPLED = (
    "number",
    "program",
    "answer",
)  # kinds of benchmarks of which several answers can be drawn
AVERAGE_OF_TEN = "ten languages"  # stands where a language does
WRITTEN = (*SAMPLED, "translation")
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "answers": 1, "sample_seed": 0}


def scoring_runs(config: EvalStage) -> dict[str, EvalStage]:
    """Role -> the scoring run's configuration, for each task in each language.

    FLORES goes between English and others.

    The longest answer of a language stands where that of all did, only FLORES has a model for
    spBLEU, only answers that are letters can be texts, only numbers and programs are sampled, and
    only what is written has thoughts, so that a scoring run is the same whatever else is requested
    with it. A task of the harness stands under the first language.
    """
    settings, configs = config.eval, {}
    for task in settings.tasks:
        name, benchmark = f"{task.task}_{task.num_fewshot}shot", benchmark_of(task.task)
        for language in dict.fromkeys(
            config.languages[:1] if benchmark.one_set else config.languages
        ):
            is_translation = benchmark.kind == "translation"
            if is_translation and language == "en" and len(set(config.languages)) > 1:
                continue
            part = replace(
                settings,
                name=name,
                tasks=[task],
                max_gen_toks_of={},
                max_gen_toks=settings.max_gen_toks_of.get(language, settings.max_gen_toks),
                spm_model=settings.spm_model if is_translation else None,
                options=settings.options if benchmark.letters else "letters",
                think_end=settings.think_end if benchmark.kind in WRITTEN else None,
                **({} if benchmark.kind in SAMPLED else GREEDY),
            )
            configs[f"{name}.{language}"] = replace(config, eval=part, languages=[language])
    return configs


def gather_scores(scored: Mapping[str, Parent], work: Path) -> dict[str, Any]:
    """Join what finished scoring runs found: all their rows, and the averages over languages, in
    scores.json.

    samples/ has their questions, as hard links. Returns the facts of a run, as scoring does.
    """
    written = {
        role: json.loads((part.folder / "scores.json").read_text(encoding="utf-8"))
        for role, part in scored.items()
    }
    rows, further = (
        [ScoreRow(**row) for scores in written.values() for row in scores[side]]
        for side in ("rows", "beside")
    )
    averages = over_languages([*rows, *further])
    parts = {role: scores["harness"] for role, scores in written.items()}
    first, *further_parts = parts.values()
    same = {}
    for key, fact in first.items():
        if all(facts.get(key) == fact for facts in further_parts):
            same[key] = fact
    harness = {**same, "parts": parts}
    result = EvaluationResult(rows, {}, harness, further + averages)
    scores = write_scores(result, work)
    (work / "samples").mkdir()
    for part in scored.values():
        for path in sorted((part.folder / "samples").iterdir()):
            link_or_copy(path, work / "samples" / path.name)
    return {"scores": scores, "harness": harness}


def over_languages(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Each metric of a task over its languages, each of the same weight; of FLORES from and into
    English apart. Then MGSM over all its languages but Thai, where all ten are there: Layer
    Swapping's average.

    They have no standard error, as languages share their questions. None where a language has no
    score.
    """
    groups: dict[tuple[Any, ...], dict[str, ScoreRow]] = {}
    for row in rows:
        if row.subject is None:
            pair = row.pair and ("mean-en" if row.pair.endswith("-en") else "en-mean")
            place = (row.task, row.num_fewshot, row.metric, row.filter, pair)
            groups.setdefault(place, {})[row.language] = row
    means, tens = [], []
    for (task, *_, pair), by_language in groups.items():
        scored = {}
        for code, row in by_language.items():
            if row.value is not None:
                scored[code] = row
        if 1 < len(by_language) == len(scored):
            means.append(mean_of(list(scored.values()), "mean", pair))
        if kind_of(task) == "number" and {*TEN} <= scored.keys():
            tens.append(mean_of([scored[code] for code in TEN], AVERAGE_OF_TEN))
    return means + tens


def mean_of(rows: Sequence[ScoreRow], language: str, pair: str | None = None) -> ScoreRow:
    """One row for several languages, each of the same weight."""
    value = fmean([row.value for row in rows if row.value is not None])
    return replace(
        rows[0],
        language=language,
        pair=pair,
        value=value,
        stderr=None,
        n=sum(row.n for row in rows),
    )
