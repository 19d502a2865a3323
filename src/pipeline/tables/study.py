"""The study form: experts, merge methods, languages and benchmarks, written out in the table
language.

    base: ./base                        # a folder, hub:org/name, or an option of model=
    experts:
      math: ./math                      # a folder, whole or an adapter, a run, or hub:org/name
      sw: {run: ./swahili, side: language}
      te: {expert: te, recipe: default} # trained: words of stage=sft
      bn: {train: mine.csv, prompt: "{q}", completion: " {a}", language: bn, sft: lora} # on rows of
          one's own
    methods: [layer_swap, soup]         # or with knobs and names: {wide: {merge: layer_swap,
        bottom_layers: 8}}
    languages: [en, sw]
    benchmarks: [mgsm_2shot]            # {eval: gsm8k_5shot, data_root: null} where its items are
                                        elsewhere, and # {mine: {en: mine_en, sw: mine_sw}} with a
                                        task of its own for each language
    controls: true
    every: {data_root: ./data}

A math expert meets each language expert in each method, and each merge is compared with both and
with the base. These comparisons are tested on the first benchmark in the languages other than
English, and exploratory elsewhere. Where language experts are of several of the study's languages,
a merge is scored in its own and in English. A file of mergekit is a method, {merge: mergekit, file:
./recipe.yaml}, whose models 0 and 1 are the math and the language expert. Whatever the form cannot
say, the table language can (tables/schema.py): stage=plan plan.expand=true prints the table that a
study is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.benchmarks import find_benchmark
from pipeline.config import conf
from pipeline.config.defaults import option_of
from pipeline.config.harness_tasks import include, tasks_of_option
from pipeline.data.sources import are_columns
from pipeline.errors import Mistakes, PipelineError, close_matches, suggest
from pipeline.runs.lineage import is_adapter_of_elsewhere
from pipeline.tables.words import Words, as_list, as_mapping, table_error

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
EXAMPLES = {
    "languages": "sw, te",
    "benchmarks": (
        "mgsm_8shot, {eval: gsm8k_5shot, data_root: null}, {mine: {sw: mine_sw, te: mine_te}}"
    ),
}
SEEDS = "every: {seed: [0, 1, 2]}"
OWN_ITEMS = {"eval", "data_root"}  # a benchmark whose items are not in the data_root of every
SIDES = ("math", "language")
OWN_FILE = "expert.sources.own.url"  # of a training on own rows
OF_ROWS = {
    "rows",
    "prompt",
    "completion",
    "column",
    "language",
    "language_column",
    "licence",
}  # words of own rows
EXAMPLE = "{math: ./FOLDER, sw: {run: ./FOLDER, side: language}}"

Refuse = Callable[[str, str], PipelineError]  # (key, problem)


def expand_study(study: Words, file: str) -> Words:
    """Write a study out as a table.

    Raises:
        PipelineError: the mistakes of the study, each with the file and the key.
    """
    mistakes, refuse = Mistakes(), partial(table_error, file)
    for key in study:
        if key == "seeds":
            mistakes.found.append(
                str(refuse(key, f"write {SEEDS}: each cell is then the mean over them"))
            )
        elif key not in KEYS:
            problem = f"not a key of a study, which has experts: {suggest(key, KEYS)}"
            mistakes.found.append(str(refuse(key, problem)))
    base, every = study.get("base"), dict[str, Any]()
    base_row = ["base"] if base else []
    languages, benchmarks = list[str](), list[Benchmark]()
    with mistakes.collected():
        every = as_mapping(file, "every", study.get("every"))
    with mistakes.collected():
        languages = names_in(study, "languages", refuse)
    with mistakes.collected():
        include_tasks(every)
        benchmarks = benchmarks_of(study, languages, refuse)
    if study.get("controls") and not base:
        mistakes.found.append(
            str(
                refuse(
                    "controls", "a control has the base in the language expert's place: give base"
                )
            )
        )
    count = len(mistakes.found)
    experts, sides = experts_of(
        study.get("experts"), bool(base or "model" in every), refuse, mistakes
    )
    if len(mistakes.found) > count:  # which would make mistakes of its merges
        mistakes.report()
    merges: dict[str, Words] = {}
    compare: dict[str, list[str]] = {}
    methods = study.get("methods") or {}
    if isinstance(methods, dict):
        knobs_of_methods = methods
    else:
        knobs_of_methods = dict.fromkeys(map(str, as_list(methods)))
    for title, given in as_mapping(file, "methods", knobs_of_methods).items():
        with mistakes.collected():
            knobs = as_mapping(file, f"methods: {title}", given)
            method = str(knobs.pop("merge", title))
            for name, pair in pairs(title, sides, refuse):
                elsewhere = (
                    base
                    and method != "mergekit"
                    and any("checkpoint" in experts[expert] for expert in pair)
                )
                merges[name] = {
                    **merge_words(method, pair, "file" in knobs, refuse),
                    **({"merge.base": "base"} if elsewhere else {}),
                    **{f"merge.{knob}": value for knob, value in knobs.items()},
                }
                compare[name] = [*pair, *base_row]
    for settings in experts.values():
        if (
            base
            and "checkpoint" in settings
            and is_adapter_of_elsewhere(Path(str(settings["checkpoint"])))
        ):
            settings["eval.base"] = "base"
    taken = {"base", *experts}.intersection(merges) or {"base"}.intersection(experts)
    if taken:
        problem = "the base or an expert has this name already: rename the expert or the method"
        mistakes.found.append(str(refuse(min(taken), problem)))
    mistakes.report()
    runs = {**dict.fromkeys(base_row, {}), **experts, **merges}
    columns = dict(columns_of(benchmarks))
    first_column = next((name for name, column in columns.items() if column["in"] != "en"), None)
    spoken = {  # the language of own rows, or of an option by that name, else the expert's name
        name: str(
            experts[name].get("expert.sources.own.language") or experts[name].get("expert", name)
        )
        for name in sides["language"]
    }
    several = len({*spoken.values()} & {*languages}) > 1
    own_language = {name: spoken[pair[1]] for name, pair in compare.items() if several}
    optional: Words = {}
    for key in ("note", "controls"):
        if key in study:
            optional[key] = study[key]
    if compare:
        primary_column = first_column or next(iter(columns))
        optional["family"] = tested_columns(columns, primary_column)
        optional["baselines"] = {
            **dict.fromkeys(sides["math"], "†"),
            **dict.fromkeys(base_row, "‡"),
        }
    if compare and first_column:
        first = next(iter(compare))
        in_own = (
            name for name, column in columns.items() if column["in"] == own_language.get(first)
        )
        optional["primary"] = [first, compare[first][0], next(in_own, first_column)]
    rows: dict[str, Words] = {name: {"run": name} for name in runs}
    for name, language in own_language.items():
        if language in languages:
            rows[name]["columns"] = [
                column for column, words in columns.items() if words["in"] in (language, "en")
            ]
    return {
        "name": study.get("name", Path(file).stem),
        "title": study.get("title", "Merges of experts"),
        **optional,
        "every": {**({"model": base} if base else {}), **every},
        "runs": runs,
        "columns": columns,
        "compare": compare,
        "rows": rows,
    }


def tested_columns(columns: Words, primary: str) -> list[str]:
    """The columns of the primary column's benchmark in the target languages; comparisons elsewhere
    are exploratory.
    """
    benchmark = primary.rpartition(" ")[0]
    targets = [name for name, words in columns.items() if words["in"] != "en"]
    return [name for name in targets if name.rpartition(" ")[0] == benchmark] or [primary]


def names_in(study: Words, key: str, refuse: Refuse) -> list[Any]:
    """Return the list of a study's languages or benchmarks, whose items are not checked if they are
    mappings.
    """
    items = as_list(study.get(key) or [])
    if not items:
        raise refuse(key, "a study names at least one")
    for item in items:
        if not isinstance(item, str) and not (key == "benchmarks" and isinstance(item, dict)):
            quoted = ", and quote no, yes and on" * isinstance(
                item, bool
            )  # which YAML reads as truth values
            raise refuse(key, f"{item!r} is no name: write {key}: [{EXAMPLES[key]}]{quoted}")
    return items


@dataclass(frozen=True)
class Benchmark:
    """One benchmark of a study.

    tasks: language -> what eval= is; words: those of its columns besides.
    """

    name: str
    tasks: dict[str, str]
    words: Words
    by_language: bool = True  # the names of its columns have the language


def benchmarks_of(study: Words, languages: list[str], refuse: Refuse) -> list[Benchmark]:
    """Return the benchmarks of a study: a name, {eval:

    NAME, data_root: ROOT}, or {NAME: {LANGUAGE: TASK}}.
    """
    benchmarks = []
    for item in names_in(study, "benchmarks", refuse):
        if isinstance(item, str) or {*item} == OWN_ITEMS:
            if isinstance(item, str):
                words = {"eval": item}
            else:
                words = dict(item)
            benchmarks.append(benchmark_of_name(str(words.pop("eval")), languages, words))
            continue
        name, tasks = next(iter(item.items()), ("", None))
        if len(item) != 1 or not isinstance(tasks, dict):
            raise refuse(
                "benchmarks", f"{item!r} is no name: write benchmarks: [{EXAMPLES['benchmarks']}]"
            )
        unlisted = [code for code in tasks if code not in languages]
        if unlisted:
            raise refuse(
                "benchmarks",
                f"{name} has a task for {unlisted[0]}, which is not in languages: add it there",
            )
        benchmarks.append(
            Benchmark(str(name), {str(code): str(task) for code, task in tasks.items()}, {})
        )
    scored = set()
    for benchmark in benchmarks:
        for code in benchmark.tasks:
            scored.add(code)
    unscored = [code for code in languages if code not in scored]
    if unscored and all(benchmark.by_language for benchmark in benchmarks):
        raise refuse(
            "languages",
            f"no benchmark has a task for {unscored[0]}: leave it out, or name a task for it",
        )
    return benchmarks


def benchmark_of_name(name: str, languages: list[str], words: Words) -> Benchmark:
    """Return a benchmark in all languages, or, for a task of the harness with one test set, in the
    language that the task's name ends with; otherwise its columns have no language in their names.
    """
    if not has_one_set(name):
        return Benchmark(name, dict.fromkeys(languages, name), words)
    task = re.sub(r"_\d+shot$", "", name)
    own = [code for code in languages if task.endswith(f"_{code}")] or (
        languages if len(languages) == 1 else []
    )
    if own:
        code = own[0]
    else:
        code = "en" if "en" in languages else languages[0]
    return Benchmark(name, {code: name}, words, by_language=bool(own))


def include_tasks(every: Words) -> None:
    """Make the tasks of eval.include_path known."""
    nested = every.get("eval")
    folder = every.get("eval.include_path") or (
        nested.get("include_path") if isinstance(nested, dict) else None
    )
    if isinstance(folder, str):
        include(folder)


def has_one_set(name: str) -> bool:
    """Return True if what eval= names is a task of the harness, which scores one test set in
    whatever language.
    """
    if conf.option_file("eval", name):
        tasks = [str(task["task"]) for task in tasks_of_option(name)]
    else:
        tasks = [re.sub(r"_\d+shot$", "", name)]
    found = [find_benchmark(task) for task in tasks]
    return all(benchmark is not None and benchmark.one_set for benchmark in found)


def experts_of(
    experts: Any, trainable: bool, refuse: Refuse, mistakes: Mistakes
) -> tuple[dict[str, Words], dict[str, list[str]]]:
    """Return the experts as runs of a table, and side -> their names.

    trainable: the study names a model to train.
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
    if isinstance(expert, dict):
        settings = dict(expert)
    else:
        settings = {"run": expert}
    if isinstance(settings.get("seed"), list):
        raise refuse(
            where, f"seed={settings['seed']}: write {SEEDS}, for all trainings that set no seed"
        )
    if "train" in settings:
        settings = of_own_rows(name, settings, refuse)
    side = settings.pop("side", None) or side_of(name, settings)
    if side not in SIDES:
        raise refuse(where, f"side={side} is neither {' nor '.join(SIDES)}: write one of them")
    if set(settings) == {"run"}:
        run = {"checkpoint": settings["run"]}
    else:
        run = {"stage": "sft", **settings}
    if "run" in run:
        raise refuse(where, "give run alone, or the words of a training without run")
    if "stage" in run and not trainable and "model" not in settings:
        raise refuse(where, "no base to train it from: give base, a folder or a name on the Hub")
    return side, run


def of_own_rows(name: str, settings: Words, refuse: Refuse) -> Words:
    """Return the words of a training on the file `train`, of which prompt and completion are
    templates with {column}s.
    """
    file = Path(str(settings.pop("train")))
    if not file.is_file():
        raise refuse(
            f"experts: {name}",
            f"train={file} is not a file of {Path.cwd()}: give one file, not a list, of JSONL, CSV"
            " or parquet",
        )
    rows = {
        "rows": "template" if "prompt" in settings else "text",
        **{key: settings.pop(key) for key in OF_ROWS & settings.keys()},
    }
    for key in ("prompt", "completion") if "prompt" in rows else ():
        misspelt = close_matches(key, map(str, settings))  # which the command refuses as unknown
        if not misspelt and not are_columns(str(rows.get(key))):
            problem = f"{key}={rows.get(key)!r} names no column of {file}"
            raise refuse(
                f"experts: {name}",
                f'{problem}: write {key}: "{{COLUMN}}", with its columns in braces',
            )
    side = settings.setdefault("side", side_of(name, settings))
    training = {"expert": "own", "expert.name": name, "expert.side": side, OWN_FILE: f"./{file}"}
    return {
        **training,
        **{f"expert.sources.own.{key}": rows[key] for key in sorted(rows)},
        **settings,
    }


def side_of(name: str, settings: Words) -> str:
    """Return the side of an expert that names none: that of its option, else by its name."""
    return option_of("expert", settings, "side", "math" if name.startswith("math") else "language")


def pairs(
    method: str, sides: dict[str, list[str]], refuse: Refuse
) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name of the merge, its experts): of each math expert with each language expert; the name
    says what differs.
    """
    empty = next((side for side, names in sides.items() if not names), None)
    if empty:
        raise refuse("experts", f"no expert of side {empty}: give one its side, as in {EXAMPLE}")
    for pair in product(*(sides[side] for side in SIDES)):
        multiple = [name for name, side in zip(pair, SIDES, strict=True) if len(sides[side]) > 1]
        yield " ".join([method, *multiple]), pair  # type: ignore[misc]


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
    return "experts" in knobs_of(method) and "file" not in knobs_of(
        method
    )  # mergekit's file says what it is of


def knobs_of(method: str) -> set[str]:
    kind = conf.method_of(method)
    if kind:
        return {knob.name for knob in fields(kind)}
    return set()


def columns_of(benchmarks: list[Benchmark]) -> Iterator[tuple[str, Words]]:
    """Yield a column for each benchmark and language; for translations two, from and to English."""
    stems = [re.sub(r"_\d+shot$", "", benchmark.name) for benchmark in benchmarks]
    often = Counter(stems)
    for benchmark, stem in zip(benchmarks, stems, strict=True):
        title = stem if often[stem] == 1 else benchmark.name
        for language, task in benchmark.tasks.items():
            words = {"eval": task, **benchmark.words, "in": language}
            if stem != "flores":
                yield f"{title} {language}" if benchmark.by_language else title, words
            elif language != "en":
                for pair in (f"en-{language}", f"{language}-en"):
                    yield f"{title} {pair}", {**words, "pair": pair}
