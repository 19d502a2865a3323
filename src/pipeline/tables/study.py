"""The study form: experts, merge methods, languages and benchmarks, written out in the table language.

    base: ./base                        # a folder, hub:org/name, or an option of model=
    experts:
      math: ./math                      # a folder, whole or an adapter, a run, or hub:org/name
      sw: {run: ./swahili, side: language}
      te: {expert: te, recipe: default} # trained: words of stage=sft
    methods: [layer_swap, soup]         # or with knobs: {layer_swap: {bottom_layers: 2}, ties: {density: 0.3}}
    languages: [en, sw]
    benchmarks: [mgsm_2shot]
    controls: true
    every: {data_root: ./data}

A math expert meets each language expert in each method. Whatever the form cannot say, the table language can
(tables/schema.py): stage=plan plan.expand=true prints the table that a study is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import conf
from pipeline.errors import PipelineError, suggest

KEYS = ("name", "title", "note", "base", "experts", "methods", "languages", "benchmarks", "controls", "every")
LISTS = ("languages", "benchmarks")
SIDES = ("math", "language")
EXAMPLE = "{math: ./FOLDER, sw: {run: ./FOLDER, side: language}}"

Words = dict[str, Any]


def expand_study(study: Words, file: str) -> Words:
    """The table that a study is. Raises PipelineError, naming the file and the key, for what is no study."""

    def refuse(place: str, problem: str) -> PipelineError:
        return PipelineError(f"{file}, {place}: {problem}")

    for key in study:
        if key not in KEYS:
            raise refuse(str(key), f"not a key of a study, which has experts: {suggest(str(key), KEYS)}")
    if missing := next((key for key in LISTS if not study.get(key)), None):
        raise refuse(missing, "a study names at least one")
    study = study | {key: study[key] if isinstance(study[key], list) else [study[key]] for key in LISTS}
    if not isinstance(study["experts"], dict):
        raise refuse("experts", f"expected names and experts, {EXAMPLE}")
    runs: Words = {"base": {}} if study.get("base") else {}
    if study.get("controls") and not runs:
        raise refuse("controls", "a control has the base in the language expert's place: give base=")
    sides: dict[str, list[str]] = {side: [] for side in SIDES}
    for name, expert in study["experts"].items():
        words = dict(expert) if isinstance(expert, dict) else {"run": expert}
        side = words.pop("side", None) or side_of(str(name), words.get("expert"))
        if side not in SIDES:
            raise refuse(f"experts: {name}", f"side={side} is neither {' nor '.join(SIDES)}: give side=")
        sides[side].append(name)
        runs[name] = {"checkpoint": words["run"]} if set(words) == {"run"} else {"stage": "sft", **words}
        if "run" in runs[name]:
            raise refuse(f"experts: {name}", "give run alone, or the words of a training without run")
        if "stage" in runs[name] and not (study.get("base") or "model" in {*(study.get("every") or {}), *words}):
            raise refuse(f"experts: {name}", "no base to train it from: give base, a folder or a name on the Hub")
    methods = study.get("methods") or []
    methods = [methods] if isinstance(methods, str) else methods
    if methods and (empty := next((side for side in SIDES if not sides[side]), None)):
        raise refuse("experts", f"no expert of side {empty}: give one its side, as in {EXAMPLE}")
    compare: dict[str, list[str]] = {}
    for method in methods:
        knobs = methods[method] if isinstance(methods, dict) else {}
        for name, pair in pairs(str(method), sides["math"], sides["language"]):
            made = merge_words(str(method), pair)
            if made is None:
                two = [one for one in conf.options("merge") if merge_words(one, pair)]
                raise refuse("methods", f"{method} is not a merge of two experts: {suggest(str(method), two)}")
            elsewhere = runs.get("base") is not None and any("checkpoint" in runs[expert] for expert in pair)
            base = {"merge.base": "base"} if elsewhere else {}
            runs[name] = {**made, **base, **{f"merge.{knob}": value for knob, value in (knobs or {}).items()}}
            compare[name] = list(pair)
    columns = dict(columns_of(study["benchmarks"], study["languages"]))
    first = next(iter(compare), None)
    place = next((name for name, column in columns.items() if column["in"] != "en"), None)
    optional: Words = {key: study[key] for key in ("note", "controls") if key in study}
    if first and place:
        optional["primary"] = [first, compare[first][0], place]
    return {
        "name": study.get("name", Path(file).stem), "title": study.get("title", "Merges of experts"), **optional,
        "every": {**({"model": study["base"]} if "base" in runs else {}), **(study.get("every") or {})},
        "runs": runs, "columns": columns, "rows": {name: {"run": name} for name in runs}, "compare": compare,
    }  # fmt: skip


def side_of(name: str, expert: Any) -> str:
    """The side of an expert that says none: that of its option, else by its name, which of a math expert begins so."""
    file = conf.option_file("expert", str(expert)) if expert else None
    declared = yaml.safe_load(file.read_text(encoding="utf-8")).get("side") if file else None
    return declared or ("math" if name.startswith("math") else "language")


def pairs(method: str, math: list[str], language: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name of the merge, its experts): of each math expert with each language expert; the name says what differs."""
    for one in math:
        for other in language:
            said = [name for name, among in ((one, math), (other, language)) if len(among) > 1]
            yield " ".join([method, *said]), (one, other)


def merge_words(method: str, pair: tuple[str, str]) -> Words | None:
    """A merge of two experts in the table language; None where the method is of other sources."""
    knobs = {knob.name for knob in fields(kind)} if (kind := conf.method_of(method)) else set()
    if {"math", "language"} <= knobs:
        return {"merge": method, "merge.math": pair[0], "merge.language": pair[1]}
    return {"merge": method, "merge.experts": list(pair)} if "experts" in knobs and "file" not in knobs else None


def columns_of(benchmarks: list[str], languages: list[str]) -> Iterator[tuple[str, Words]]:
    """A column for each benchmark and language; of translations two, from and to English."""
    tasks = {benchmark: re.sub(r"_\d+shot$", "", benchmark) for benchmark in benchmarks}
    often = Counter(tasks.values())
    for benchmark, task in tasks.items():
        name = task if often[task] == 1 else benchmark
        for language in languages:
            if task != "flores":
                yield f"{name} {language}", {"eval": benchmark, "in": language}
            elif language != "en":
                for pair in (f"en-{language}", f"{language}-en"):
                    yield f"{name} {pair}", {"eval": benchmark, "in": language, "pair": pair}
