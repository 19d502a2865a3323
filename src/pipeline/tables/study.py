"""The study form: experts, merge methods, languages and benchmarks, written out in the table language.

    base: ./base                        # a folder, hub:org/name, or an option of model=
    experts:
      math: ./math                      # a folder, whole or an adapter, a run, or hub:org/name
      sw: {run: ./swahili, side: language}
      te: {expert: te, recipe: default} # trained: words of stage=sft
      bn: {train: mine.csv, prompt: "{q}", completion: " {a}", language: bn, sft: lora} # on rows of one's own
    methods: [layer_swap, soup]         # or with knobs and names: {wide: {merge: layer_swap, bottom_layers: 8}}
    languages: [en, sw]
    benchmarks: [mgsm_2shot]            # {eval: gsm8k_5shot, data_root: null} where its items are elsewhere
    controls: true
    every: {data_root: ./data}

A math expert meets each language expert in each method, and each merge is compared with both and with the base. Where
language experts are of several of the study's languages, a merge is scored in its own and in English. A file of
mergekit is a method, {merge: mergekit, file: ./recipe.yaml}, whose models 0 and 1 are the math and the language expert.
Whatever the form cannot say, the table language can (tables/schema.py): stage=plan plan.expand=true prints the table
that a study is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.config import conf
from pipeline.config.defaults import option_of
from pipeline.data.sources import are_columns
from pipeline.errors import PipelineError, close_matches, suggest
from pipeline.progress import say
from pipeline.runs.lineage import another_base, is_adapter_of_elsewhere
from pipeline.tables.words import Words, as_list, as_mapping, table_error

KEYS = ("name", "title", "note", "base", "experts", "methods", "languages", "benchmarks", "controls", "every")
EXAMPLES = {"languages": "sw, te", "benchmarks": "mgsm_8shot, belebele_5shot, {eval: gsm8k_5shot, data_root: null}"}
LISTS = tuple(EXAMPLES)
OWN_ITEMS = {"eval", "data_root"}  # a benchmark whose items are not in the data_root of every
SIDES = ("math", "language")
OWN_FILE = "expert.sources.own.url"  # of a training on own rows
OF_ROWS = {"rows", "prompt", "completion", "column", "language", "language_column", "licence"}  # words of own rows
EXAMPLE = "{math: ./FOLDER, sw: {run: ./FOLDER, side: language}}"

Refuse = Callable[[str, str], PipelineError]  # (key, problem)


def expand_study(study: Words, file: str) -> Words:
    """The table that a study is. Raises PipelineError, naming the file and the key, for what is no study."""

    refuse = partial(table_error, file)
    for key in study:
        if key not in KEYS:
            raise refuse(key, f"not a key of a study, which has experts: {suggest(key, KEYS)}")
    lists = {key: as_list(study.get(key) or []) for key in LISTS}
    for key, names in lists.items():
        if not names:
            raise refuse(key, "a study names at least one")
        own_items = [name for name in names if key == "benchmarks" and isinstance(name, dict) and {*name} == OWN_ITEMS]
        if wrong := [name for name in names if not isinstance(name, str) and name not in own_items]:
            quoted = ", and quote no, yes and on" * isinstance(wrong[0], bool)  # which YAML reads as truth values
            raise refuse(key, f"{wrong[0]!r} is no name: write {key}: [{EXAMPLES[key]}]{quoted}")
    base = study.get("base")
    base_row = ["base"] if base else []
    every = as_mapping(file, "every", study.get("every"))
    if study.get("controls") and not base:
        raise refuse("controls", "a control has the base in the language expert's place: give base")
    experts, sides = experts_of(study.get("experts"), bool(base or "model" in every), refuse)
    merges: dict[str, Words] = {}
    compare: dict[str, list[str]] = {}
    methods = study.get("methods") or {}
    knobs_of_methods = methods if isinstance(methods, dict) else dict.fromkeys(map(str, as_list(methods)))
    for title, given in as_mapping(file, "methods", knobs_of_methods).items():
        knobs = as_mapping(file, f"methods: {title}", given)
        method = str(knobs.pop("merge", title))
        for name, pair in pairs(title, sides, refuse):
            elsewhere = base and method != "mergekit" and any("checkpoint" in experts[expert] for expert in pair)
            merges[name] = {
                **merge_words(method, pair, "file" in knobs, refuse),
                **({"merge.base": "base"} if elsewhere else {}),
                **{f"merge.{knob}": value for knob, value in knobs.items()},
            }
            compare[name] = [*pair, *base_row]
    for name, settings in experts.items():
        if base and "checkpoint" in settings and is_adapter_of_elsewhere(Path(str(settings["checkpoint"]))):
            settings["eval.base"] = "base"
            tell_base(name, str(settings["checkpoint"]), str(base))
    if taken := {"base", *experts}.intersection(merges) or {"base"}.intersection(experts):
        raise refuse(min(taken), "the base or an expert has this name already: rename the expert or the method")
    runs = {**dict.fromkeys(base_row, {}), **experts, **merges}
    columns = dict(columns_of(lists["benchmarks"], lists["languages"]))
    first_column = next((name for name, column in columns.items() if column["in"] != "en"), None)
    spoken = {  # the language of own rows, or of an option by that name, else the expert's name
        name: str(experts[name].get("expert.sources.own.language") or experts[name].get("expert", name))
        for name in sides["language"]
    }
    several = len({*spoken.values()} & {*lists["languages"]}) > 1
    own_language = {name: spoken[pair[1]] for name, pair in compare.items() if several}
    optional: Words = {key: study[key] for key in ("note", "controls") if key in study}
    if compare and first_column:
        first = next(iter(compare))
        in_own = (name for name, column in columns.items() if column["in"] == own_language.get(first))
        optional["primary"] = [first, compare[first][0], next(in_own, first_column)]
    rows: dict[str, Words] = {name: {"run": name} for name in runs}
    for name, language in own_language.items():
        if language in lists["languages"]:
            rows[name]["columns"] = [column for column, words in columns.items() if words["in"] in (language, "en")]
    return {
        "name": study.get("name", Path(file).stem), "title": study.get("title", "Merges of experts"), **optional,
        "every": {**({"model": base} if base else {}), **every},
        "runs": runs, "columns": columns, "compare": compare, "rows": rows,
    }  # fmt: skip


@cache
def tell_base(expert: str, folder: str, base: str) -> None:
    """Say once where an adapter names another base than the study's."""
    if named := another_base(Path(folder), base):
        say(f"experts: {expert} is an adapter of {named}: it is merged with and scored on the study's base, {base}")


def experts_of(experts: Any, trainable: bool, refuse: Refuse) -> tuple[dict[str, Words], dict[str, list[str]]]:
    """(the experts as runs of a table, side -> their names). trainable: the study names a model to train."""
    if not isinstance(experts, dict):
        raise refuse("experts", f"a study needs names and experts, {EXAMPLE}")
    runs: dict[str, Words] = {}
    sides: dict[str, list[str]] = {side: [] for side in SIDES}
    for key, expert in experts.items():
        name = str(key)
        settings = dict(expert) if isinstance(expert, dict) else {"run": expert}
        if "train" in settings:
            settings = of_own_rows(name, settings, refuse)
        side = settings.pop("side", None) or side_of(name, settings)
        if side not in SIDES:
            raise refuse(f"experts: {name}", f"side={side} is neither {' nor '.join(SIDES)}: write one of them")
        sides[side].append(name)
        runs[name] = {"checkpoint": settings["run"]} if set(settings) == {"run"} else {"stage": "sft", **settings}
        if "run" in runs[name]:
            raise refuse(f"experts: {name}", "give run alone, or the words of a training without run")
        if "stage" in runs[name] and not trainable and "model" not in settings:
            raise refuse(f"experts: {name}", "no base to train it from: give base, a folder or a name on the Hub")
    return runs, sides


def of_own_rows(name: str, settings: Words, refuse: Refuse) -> Words:
    """The words of a training on the file `train`, of which prompt and completion are templates with {column}s."""
    file = Path(str(settings.pop("train")))
    if not file.is_file():
        raise refuse(
            f"experts: {name}",
            f"train={file} is not a file of {Path.cwd()}: give one file, not a list, of JSONL, CSV or parquet",
        )
    rows = {
        "rows": "template" if "prompt" in settings else "text",
        **{key: settings.pop(key) for key in OF_ROWS & settings.keys()},
    }
    for key in ("prompt", "completion") if "prompt" in rows else ():
        misspelt = close_matches(key, map(str, settings))  # which the command refuses as unknown
        if not misspelt and not are_columns(str(rows.get(key))):
            problem = f"{key}={rows.get(key)!r} names no column of {file}"
            raise refuse(f"experts: {name}", f'{problem}: write {key}: "{{COLUMN}}", with its columns in braces')
    side = settings.setdefault("side", side_of(name, settings))
    training = {"expert": "own", "expert.name": name, "expert.side": side, OWN_FILE: f"./{file}"}
    return {**training, **{f"expert.sources.own.{key}": rows[key] for key in sorted(rows)}, **settings}


def side_of(name: str, settings: Words) -> str:
    """The side of an expert that says none: that of its option, else by its name, which of a math expert begins so."""
    return option_of("expert", settings, "side", "math" if name.startswith("math") else "language")


def pairs(method: str, sides: dict[str, list[str]], refuse: Refuse) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name of the merge, its experts): of each math expert with each language expert; the name says what differs."""
    if empty := next((side for side, names in sides.items() if not names), None):
        raise refuse("experts", f"no expert of side {empty}: give one its side, as in {EXAMPLE}")
    for pair in product(*(sides[side] for side in SIDES)):
        multiple = [name for name, side in zip(pair, SIDES, strict=True) if len(sides[side]) > 1]
        yield " ".join([method, *multiple]), pair  # type: ignore[misc]


def merge_words(method: str, pair: tuple[str, str], has_file: bool, refuse: Refuse) -> Words:
    """A merge of two experts in the table language."""
    if reads_sides(method):
        return {"merge": method, "merge.math": pair[0], "merge.language": pair[1]}
    if not reads_experts(method) and not has_file:
        two = [option for option in conf.options("merge") if reads_sides(option) or reads_experts(option)]
        raise refuse("methods", f"{method} is not a merge of two experts: {suggest(method, two)}")
    return {"merge": method, "merge.experts": list(pair)}


def reads_sides(method: str) -> bool:
    return {"math", "language"} <= knobs_of(method)


def reads_experts(method: str) -> bool:
    return "experts" in knobs_of(method) and "file" not in knobs_of(method)  # mergekit's file says what it is of


def knobs_of(method: str) -> set[str]:
    kind = conf.method_of(method)
    return {knob.name for knob in fields(kind)} if kind else set()


def columns_of(benchmarks: list[Any], languages: list[str]) -> Iterator[tuple[str, Words]]:
    """A column for each benchmark and language; of translations two, from and to English."""
    each = [{"eval": benchmark} if isinstance(benchmark, str) else benchmark for benchmark in benchmarks]
    settings = {str(words["eval"]): words for words in each}
    tasks = {benchmark: re.sub(r"_\d+shot$", "", benchmark) for benchmark in settings}
    often = Counter(tasks.values())
    for benchmark, task in tasks.items():
        name = task if often[task] == 1 else benchmark
        for language in languages:
            words = {**settings[benchmark], "in": language}
            if task != "flores":
                yield f"{name} {language}", words
            elif language != "en":
                for pair in (f"en-{language}", f"{language}-en"):
                    yield f"{name} {pair}", {**words, "pair": pair}
