"""The study form: experts, merge methods, languages and benchmarks, written out as a table.

    base: ./base                        # a folder, hub:org/name, or an option of model=
    experts:
      math: ./math                      # a folder (a model or an adapter), a run, or hub:org/name
      sw: {run: ./swahili, side: language}
      te: {expert: te, recipe: default} # trained: words of stage=sft
      bn: {train: mine.csv, prompt: "{q}", completion: " {a}", language: bn, sft: lora} # own rows
    methods: [layer_swap, soup]         # or with names and settings:
                                        # {wide: {merge: layer_swap, bottom_layers: 8}}
    languages: [en, sw]
    benchmarks: [mgsm_2shot]            # {eval: gsm8k_5shot, data_root: null}: another data_root
                                        # {mine: {en: mine_en, sw: mine_sw}}: a task per language
    controls: true
    every: {data_root: ./data}

Each method merges each math expert with each language expert. Each merge is compared with both of
its experts and with the base. These comparisons are tested on the first benchmark in the languages
other than English, and exploratory elsewhere. If the language experts have several languages of the
study, each merge is scored in its language and in English.

A mergekit file is a method, {merge: mergekit, file: ./recipe.yaml}. Its models 0 and 1 are the math
and the language expert. The table language (tables/schema.py) can express more than this form.
stage=plan plan.expand=true prints the table of a study.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.config import conf
from pipeline.config.defaults import option_of
from pipeline.data.sources import are_columns
from pipeline.errors import Mistakes, close_matches, suggest
from pipeline.models.checkpoint import is_adapter
from pipeline.runs.manifest import MANIFEST
from pipeline.tables.study_benchmarks import (
    Benchmark,
    benchmarks_of,
    columns_of,
    include_tasks,
    names_in,
)
from pipeline.tables.words import Refuse, Words, as_list, as_mapping, table_error

KEYS = (
    "name",
    "title",
    "note",
    "base",
    "experts",
    "methods",
    "languages",
    "benchmarks",
    "controls",
    "every",
)
SEEDS = "every: {seed: [0, 1, 2]}"
SIDES = ("math", "language")
OWN_FILE = "expert.sources.own.url"  # the file of a training on own rows
# words of own rows
OF_ROWS = {
    "rows",
    "prompt",
    "completion",
    "column",
    "language",
    "language_column",
    "licence",
}
EXAMPLE = "{math: ./FOLDER, sw: {run: ./FOLDER, side: language}}"


def expand_study(study: Words, file: str) -> Words:
    """Write a study out as a table.

    Raises:
        PipelineError: For the mistakes of the study, each with the file and the key.
    """
    mistakes = Mistakes()
    refuse = partial(table_error, file)
    for key in study:
        if key == "seeds":
            problem = f"write {SEEDS}: each cell is then the mean over them"
            mistakes.found.append(str(refuse(key, problem)))
        elif key not in KEYS:
            problem = f"not a key of a study, which has experts: {suggest(key, KEYS)}"
            mistakes.found.append(str(refuse(key, problem)))
    base, every = study.get("base"), dict[str, Any]()
    languages, benchmarks = list[str](), list[Benchmark]()
    with mistakes.collected():
        every = as_mapping(file, "every", study.get("every"))
    with mistakes.collected():
        languages = names_in(study, "languages", refuse)
    with mistakes.collected():
        include_tasks(every)
        benchmarks = benchmarks_of(study, languages, refuse)
    if study.get("controls") and not base:
        problem = "a control has the base in the language expert's place. Give base."
        mistakes.found.append(str(refuse("controls", problem)))
    count = len(mistakes.found)
    is_trainable = bool(base or "model" in every)
    experts, sides = experts_of(study.get("experts"), is_trainable, refuse, mistakes)
    if len(mistakes.found) > count:
        mistakes.report()  # a wrong expert would cause mistakes of its merges
    merges, pair_of = merges_of(study, file, experts, sides, mistakes)
    for settings in experts.values():
        if base and "checkpoint" in settings:
            folder = Path(str(settings["checkpoint"]))
            if is_adapter(folder) and not (folder / MANIFEST).is_file():  # no run made it
                settings["eval.base"] = "base"
    taken = {"base", *experts}.intersection(merges) or {"base"}.intersection(experts)
    if taken:
        problem = "the base or an expert has this name already. Rename the expert or the method."
        mistakes.found.append(str(refuse(min(taken), problem)))
    mistakes.report()
    bases: list[str] = []
    if base:
        bases = ["base"]
        every = {"model": base, **every}
    runs = {**dict.fromkeys(bases, {}), **experts, **merges}
    columns = dict(columns_of(benchmarks))
    language_of = languages_of_merges(experts, sides["language"], pair_of, languages)
    optional: Words = {}
    for key in ("note", "controls"):
        if key in study:
            optional[key] = study[key]
    if pair_of:
        targets = [name for name, words in columns.items() if words["in"] != "en"]
        optional["family"] = tested_columns(columns, targets)
        marks = {**dict.fromkeys(sides["math"], "†"), **dict.fromkeys(bases, "‡")}
        optional["baselines"] = marks
        if targets:
            optional["primary"] = primary_comparison(columns, targets[0], pair_of, language_of)
    return {
        "name": study.get("name", Path(file).stem),
        "title": study.get("title", "Merges of experts"),
        **optional,
        "every": every,
        "runs": runs,
        "columns": columns,
        "compare": {name: [*pair, *bases] for name, pair in pair_of.items()},
        "rows": rows_of(runs, columns, language_of, languages),
    }


def merges_of(
    study: Words,
    file: str,
    experts: dict[str, Words],
    sides: dict[str, list[str]],
    mistakes: Mistakes,
) -> tuple[dict[str, Words], dict[str, tuple[str, str]]]:
    """Return the merges of a study as runs of a table, and the two experts of each."""
    refuse = partial(table_error, file)
    merges: dict[str, Words] = {}
    pair_of: dict[str, tuple[str, str]] = {}
    methods = study.get("methods") or {}
    if not isinstance(methods, dict):
        methods = dict.fromkeys(map(str, as_list(methods)))
    for title, written in as_mapping(file, "methods", methods).items():
        with mistakes.collected():
            knobs = as_mapping(file, f"methods: {title}", written)
            method = str(knobs.pop("merge", title))
            for name, pair in pairs(title, sides, refuse):
                words = merge_words(method, pair, "file" in knobs, refuse)
                is_external = any("checkpoint" in experts[expert] for expert in pair)
                if study.get("base") and is_external and method != "mergekit":
                    words["merge.base"] = "base"
                for knob, value in knobs.items():
                    words[f"merge.{knob}"] = value
                merges[name] = words
                pair_of[name] = pair
    return merges, pair_of


def languages_of_merges(
    experts: dict[str, Words],
    names: list[str],
    pair_of: dict[str, tuple[str, str]],
    languages: list[str],
) -> dict[str, str]:
    """Return the language of each merge if the experts have at least two of the languages.

    Otherwise the result is empty.
    An expert's language is that of its own rows, otherwise its option or name.
    """
    spoken = {}
    for name in names:
        own = experts[name].get("expert.sources.own.language")
        spoken[name] = str(own or experts[name].get("expert", name))
    if len(set(spoken.values()) & set(languages)) < 2:
        return {}
    return {merge: spoken[language] for merge, (_, language) in pair_of.items()}


def primary_comparison(
    columns: Words, target: str, pair_of: dict[str, tuple[str, str]], language_of: dict[str, str]
) -> list[str]:
    """Return the first merge, its math expert, and a column.

    The column is the first in the language of the merge, or `target` if there is none.
    """
    merge, (math, _) = next(iter(pair_of.items()))
    for name, words in columns.items():
        if words["in"] == language_of.get(merge):
            return [merge, math, name]
    return [merge, math, target]


def rows_of(
    runs: Words, columns: Words, language_of: dict[str, str], languages: list[str]
) -> dict[str, Words]:
    """Return a row for each run; a merge with a language has columns in it and in English."""
    rows: dict[str, Words] = {}
    for run in runs:
        rows[run] = {"run": run}
        language = language_of.get(run)
        if language in languages:
            listed = [name for name, words in columns.items() if words["in"] in (language, "en")]
            rows[run]["columns"] = listed
    return rows


def tested_columns(columns: Words, targets: list[str]) -> list[str]:
    """Return the target columns of the first target's benchmark, or the first column.

    Comparisons in other columns are exploratory.
    """
    if not targets:
        return [next(iter(columns))]
    benchmark = targets[0].rpartition(" ")[0]
    return [name for name in targets if name.rpartition(" ")[0] == benchmark]


def experts_of(
    experts: Any, trainable: bool, refuse: Refuse, mistakes: Mistakes
) -> tuple[dict[str, Words], dict[str, list[str]]]:
    """Return the experts as runs of a table, and side -> their names.

    `trainable` is True if the study names a model to train. `mistakes` collects the mistakes.
    """
    if not isinstance(experts, dict):
        raise refuse("experts", f"a study needs names and experts, {EXAMPLE}")
    runs: dict[str, Words] = {}
    sides: dict[str, list[str]] = {side: [] for side in SIDES}
    for key, expert in experts.items():
        name = str(key)
        with mistakes.collected():
            side, runs[name] = expert_of(name, expert, trainable, refuse)
            sides[side].append(name)
    return runs, sides


def expert_of(name: str, expert: Any, trainable: bool, refuse: Refuse) -> tuple[str, Words]:
    """Return the side of an expert, and the expert as a run of a table."""
    where = f"experts: {name}"
    settings = {"run": expert}
    if isinstance(expert, dict):
        settings = dict(expert)
    if isinstance(settings.get("seed"), list):
        raise refuse(
            where, f"seed={settings['seed']}: write {SEEDS}, for all trainings that set no seed."
        )
    if "train" in settings:
        settings = of_own_rows(name, settings, refuse)
    side = settings.pop("side", None) or side_of(name, settings)
    if side not in SIDES:
        raise refuse(
            where, f"side={side} is neither {' nor '.join(SIDES)}. Write math or language."
        )
    if settings.keys() == {"run"}:
        return side, {"checkpoint": settings["run"]}
    if "run" in settings:
        raise refuse(where, "give only run, or the words of a training without run")
    if not trainable and "model" not in settings:
        raise refuse(where, "no base to train it from. Give base, a folder or a name on the Hub.")
    return side, {"stage": "sft", **settings}


def of_own_rows(name: str, settings: Words, refuse: Refuse) -> Words:
    """Return the words of a training on the file `train`.

    prompt and completion are templates with {column}s.
    """
    where = f"experts: {name}"
    file = Path(str(settings.pop("train")))
    if not file.is_file():
        raise refuse(
            where,
            f"train={file} is not a file of {Path.cwd()}. Give one file, not a list, of JSONL, CSV"
            " or parquet.",
        )
    rows = {"rows": "template" if "prompt" in settings else "text"}
    for key in OF_ROWS & settings.keys():
        rows[key] = settings.pop(key)
    if "prompt" in rows:
        for key in ("prompt", "completion"):
            # the command refuses a misspelt key as unknown
            is_misspelt = close_matches(key, map(str, settings))
            if not is_misspelt and not are_columns(str(rows.get(key))):
                problem = f"{key}={rows.get(key)!r} names no column of {file}"
                if key not in rows:
                    problem = f"{key} is missing"
                remedy = f'write {key}: "{{COLUMN}}", with its columns in braces'
                raise refuse(where, f"{problem}: {remedy}")
    side = settings.setdefault("side", side_of(name, settings))
    words = {"expert": "own", "expert.name": name, "expert.side": side, OWN_FILE: f"./{file}"}
    for key in sorted(rows):
        words[f"expert.sources.own.{key}"] = rows[key]
    return words | settings


def side_of(name: str, settings: Words) -> str:
    """Return the side of an expert that does not set it: from its option, otherwise its name."""
    by_name = "math" if name.startswith("math") else "language"
    return option_of("expert", settings, "side", by_name)


def pairs(
    method: str, sides: dict[str, list[str]], refuse: Refuse
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the name and the two experts of each merge.

    Each math expert is merged with each language expert. The name has the experts that differ.
    """
    for side, names in sides.items():
        if not names:
            raise refuse(
                "experts", f"no expert of side {side}. Give one its side, as in {EXAMPLE}."
            )
    for math, language in product(sides["math"], sides["language"]):
        words = [method]
        if len(sides["math"]) > 1:
            words.append(math)
        if len(sides["language"]) > 1:
            words.append(language)
        yield " ".join(words), (math, language)


def merge_words(method: str, pair: tuple[str, str], has_file: bool, refuse: Refuse) -> Words:
    """Write a merge of two experts in the table language."""
    if reads_sides(method):
        return {"merge": method, "merge.math": pair[0], "merge.language": pair[1]}
    if not reads_experts(method) and not has_file:
        two = []
        for option in conf.options("merge"):
            if reads_sides(option) or reads_experts(option):
                two.append(option)
        raise refuse("methods", f"{method} is not a merge of two experts: {suggest(method, two)}")
    return {"merge": method, "merge.experts": list(pair)}


def reads_sides(method: str) -> bool:
    return {"math", "language"} <= knobs_of(method)


def reads_experts(method: str) -> bool:
    knobs = knobs_of(method)
    return "experts" in knobs and "file" not in knobs  # a mergekit file names its experts


def knobs_of(method: str) -> set[str]:
    kind = conf.method_of(method)
    if kind:
        return {knob.name for knob in fields(kind)}
    return set()
