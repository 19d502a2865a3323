"""The scoring runs of an evaluation with several tasks or languages, and their joint result.

A scoring run evaluates one model on one task in one language. Tables, selections and stage=eval
share scoring runs. Plans use this module, so its imports are light.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import benchmark_of
from pipeline.evaluate.records import EvaluationResult, ScoreRow, write_scores
from pipeline.files import link_or_copy

if TYPE_CHECKING:
    from pipeline.config.evaluation import Eval, EvalTask
    from pipeline.config.stages import EvalStage
    from pipeline.runs.run import Parent


SAMPLED = ("number", "program", "answer")  # kinds of benchmarks whose answers can be sampled
WRITTEN = (*SAMPLED, "translation")
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "answers": 1, "sample_seed": 0}


def scoring_runs(config: EvalStage) -> dict[str, EvalStage]:
    """Return the scoring run's configuration for each task in each language, by role.

    FLORES translates between English and another language. A task of the harness is listed under
    the first language.
    """
    configs = {}
    for task in config.eval.tasks:
        benchmark = benchmark_of(task.task)
        languages = config.languages[:1] if benchmark.of_harness else config.languages
        for language in dict.fromkeys(languages):
            to_itself = benchmark.kind == "translation" and language == "en"
            if to_itself and len(set(config.languages)) > 1:
                continue
            part = _settings_of(config.eval, task, language)
            configs[f"{task.label}.{language}"] = replace(config, eval=part, languages=[language])
    return configs


def _settings_of(settings: Eval, task: EvalTask, language: str) -> Eval:
    """Return an evaluation's settings for one task, with defaults for settings that do not apply.

    So a scoring run is the same whatever else is requested with it. `max_gen_toks_of` is resolved
    for the language. Only FLORES has a spBLEU model, only letters can be shown as texts, only
    numbers, programs and answers are sampled, and only written answers contain thoughts.
    """
    benchmark = benchmark_of(task.task)
    changes: dict[str, Any] = {
        "max_gen_toks_of": {},
        "max_gen_toks": settings.max_gen_toks_of.get(language, settings.max_gen_toks),
    }
    if benchmark.kind != "translation":
        changes["spm_model"] = None
    if not benchmark.letters:
        changes["options"] = "letters"
    if benchmark.kind not in WRITTEN:
        changes["think_end"] = None
    if benchmark.kind not in SAMPLED:
        changes |= GREEDY
    return replace(settings, name=task.label, tasks=[task], **changes)


def gather_scores(scored: Mapping[str, Parent], work: Path) -> dict[str, Any]:
    """Join the rows of finished scoring runs and their averages over languages in scores.json.

    samples/ gets their questions as hard links. Returns the same facts as scoring does.
    """
    rows: list[ScoreRow] = []
    beside: list[ScoreRow] = []
    parts: dict[str, dict[str, Any]] = {}
    (work / "samples").mkdir()
    for role, part in scored.items():
        written = json.loads((part.folder / "scores.json").read_text(encoding="utf-8"))
        rows += [ScoreRow(**row) for row in written["rows"]]
        beside += [ScoreRow(**row) for row in written["beside"]]
        parts[role] = written["harness"]
        for path in sorted((part.folder / "samples").iterdir()):
            link_or_copy(path, work / "samples" / path.name)
    averages = over_languages([*rows, *beside])
    facts = list(parts.values())
    harness: dict[str, Any] = {}
    for key, fact in facts[0].items():
        if all(part.get(key) == fact for part in facts):
            harness[key] = fact
    harness["parts"] = parts
    result = EvaluationResult(rows, {}, harness, beside + averages)
    return {"scores": write_scores(result, work), "harness": harness}


def over_languages(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Return the mean of each metric of a task over its languages, each with the same weight.

    FLORES has two means, from and into English. Means have no standard error, because languages
    share their questions. If a language has no score, there is no mean.
    """
    groups: dict[tuple[Any, ...], dict[str, ScoreRow]] = {}
    for row in rows:
        if row.subject is None:
            pair = row.pair
            if pair:
                pair = "mean-en" if pair.endswith("-en") else "en-mean"
            place = (row.task, row.num_fewshot, row.metric, row.filter, pair)
            groups.setdefault(place, {})[row.language] = row
    means = []
    for (*_, pair), by_language in groups.items():
        of_languages = list(by_language.values())
        values = [row.value for row in of_languages if row.value is not None]
        if 1 < len(by_language) == len(values):
            mean = replace(of_languages[0], language="mean", pair=pair, stderr=None)
            questions = sum(row.n for row in of_languages)
            means.append(replace(mean, value=fmean(values), n=questions))
    return means
