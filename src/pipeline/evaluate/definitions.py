"""From benchmarks and a data_root to task files of the harness: what is asked, of which rows, with which exemplars.

Each task is the harness' stock file, included by its path, with only the place of the data, the order of the exemplars
and the length of answers changed, so that a prompt equals the stock task's byte for byte. FLORES alone is ours, as no
stock task reads any source that can still be had. Constructed languages take the English stock file: the prompt's words
(`Question:`, `Step-by-Step Answer:`) are English, question and answer are not.

Everything that can be wrong with the data is found here, before any weights load. Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from pipeline.knobs import PipelineError
from pipeline.languages import Language, language

OURS = Path(__file__).parent / "tasks"
Row = dict[str, Any]


class AskedTask(Protocol):
    """`EvalTask` of the configuration: a benchmark and a number of exemplars."""

    task: str
    num_fewshot: int


@dataclass(frozen=True)
class Definition:
    """One task as the harness will run it: `file` is its YAML, `first` the first row that is scored."""

    name: str
    file: Path
    task: str
    language: str  # of a translation pair: the one that is not English
    pair: str | None
    num_fewshot: int
    first: int = 0  # Belebele's exemplars are its own first rows, which leave the score


@dataclass(frozen=True)
class _Ask:
    """What one task definition is made from."""

    language: Language
    num_fewshot: int
    data_root: Path | None
    split: str
    max_gen_toks: int | None
    folder: Path


def task_definitions(
    tasks: Sequence[AskedTask],
    languages: Sequence[str],
    data_root: Path | None,
    folder: Path,
    *,
    split: str = "test",
    max_gen_toks: int | None = None,
) -> list[Definition]:
    """Check the data of each task in each language and write a task file of the harness for each into `folder`.

    `data_root`: the folder with the data, None for the hub. `split`: test, or dev (development items). `max_gen_toks`:
    the longest answer in tokens, None for the task's own. FLORES gives two tasks a language, from and into English.
    Raises PipelineError for an unknown task or language, missing or broken data, and more exemplars than there are.
    """
    if not languages:
        raise PipelineError("languages is empty: name at least one, such as languages=[en]")
    counts = Counter(asked.task for asked in tasks)
    for task, count in counts.items():
        if task not in _TASKS:
            near = difflib.get_close_matches(task, _TASKS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PipelineError(f"unknown task {task!r}: {hint}Known are {', '.join(_TASKS)}")
        if count > 1:
            raise PipelineError(f"{task} stands {count} times in one evaluation: give each number of shots its own")
    if data_root is None and split != "test":
        raise PipelineError(f"eval.split={split} has no items on the hub: set data_root to a folder that has them")
    known = [language(code) for code in dict.fromkeys(languages)]
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Definition] = []
    for asked in tasks:
        spoken = [one for one in known if asked.task != "flores" or one.code != "en"]
        if not spoken:
            raise PipelineError("flores translates between English and another language: add one to languages")
        for one in spoken:
            ask = _Ask(one, asked.num_fewshot, data_root, split, max_gen_toks, folder)
            found += _TASKS[asked.task](ask)
    return found


# ------------------------------------------------------------------------------------------------- the four tasks


def _mgsm(ask: _Ask) -> list[Definition]:
    stock = _stock(ask, "mgsm", f"mgsm/native_cot/mgsm_native_cot_{ask.language.stock}.yaml")
    body: Row = {"include": [str(stock), str(OURS / "mgsm.yaml")]}
    if ask.data_root:
        columns = {"question": str, "answer_number": int}
        train, test = _files(ask, "mgsm", "train", "test" if ask.split == "test" else "dev")
        exemplars = _rows(train, columns | {"answer": str})
        _enough(ask, "mgsm", len(exemplars), train)
        _check_worked(train, exemplars, yaml.safe_load(stock.read_text()))
        _rows(test, columns | {"answer": type(None)})
        _read_from(body, train=train, test=test)
    generation = {
        **yaml.safe_load(stock.read_text())["generation_kwargs"],
        **_ours("mgsm")["generation_kwargs"],
    }
    return [_write(ask, "mgsm", body | _limited(ask, generation))]


def _belebele(ask: _Ask) -> list[Definition]:
    code = "eng_Latn" if ask.language.constructed else ask.language.flores
    body: Row = {"include": [str(_stock(ask, "belebele", f"belebele/belebele_{code}.yaml"))]}
    if ask.data_root:
        (test,) = _files(ask, "belebele", "test" if ask.split == "test" else "dev")
        names = ("flores_passage", "question", "mc_answer1", "mc_answer2", "mc_answer3", "mc_answer4")
        rows = _rows(test, dict.fromkeys(names, str), {"correct_answer_num": ("1", "2", "3", "4")})
        _enough(ask, "belebele", len(rows) - 1, test)  # one question at least is to be left
        _read_from(body, test=test)
    return [_write(ask, "belebele", body, first=ask.num_fewshot)]


def _global_mmlu(ask: _Ask) -> list[Definition]:
    code = ask.language.stock
    stock = _stock(ask, "global_mmlu", f"global_mmlu/full/{code}/_{code}_template_yaml")
    body: Row = {"include": [str(stock), str(OURS / "global_mmlu.yaml")]}
    if ask.data_root:
        dev, test = _files(ask, "global_mmlu", "dev", "test" if ask.split == "test" else "development")
        names = ("subject", "question", "option_a", "option_b", "option_c", "option_d")
        exemplars, rows = (
            _rows(file, dict.fromkeys(names, str), {"answer": ("A", "B", "C", "D")}) for file in (dev, test)
        )
        shots = Counter(row["subject"] for row in exemplars)
        for subject in dict.fromkeys(row["subject"] for row in rows):
            _enough(ask, f"global_mmlu, {subject}", shots[subject], dev)
        _read_from(body, dev=dev, test=test)
    return [_write(ask, "global_mmlu", body)]


def _flores(ask: _Ask) -> list[Definition]:
    if not ask.data_root:
        raise PipelineError(
            "flores is gated on the hub: set data_root to a folder with flores/{language}/devtest.jsonl"
        )
    english, other = language("en"), ask.language
    found = []
    for source, target in ((english, other), (other, english)):
        pair = f"{source.code}-{target.code}"
        if target.code == "ja" and not importlib.util.find_spec("MeCab"):
            raise PipelineError(f"flores {pair}: BLEU of Japanese needs a word list, pip install 'sacrebleu[ja]'")
        # Where the scored rows are the exemplars' own file (development items), the exemplars leave the score.
        first = ask.num_fewshot if ask.split == "dev" else 0
        files = {}
        for name, split in (("dev", "dev"), ("test", "devtest" if ask.split == "test" else "dev")):
            rows = _joined(ask, source, target, split)
            if name == "dev":
                _enough(ask, "flores", len(rows) - min(first, 1), _place(ask.data_root, "flores", other, split))
            files[name] = ask.folder / f"flores.{pair}.{name}.jsonl"
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            files[name].write_text("".join(lines), encoding="utf-8")
        body: Row = {"include": [str(OURS / ("flores_ja.yaml" if target.code == "ja" else "flores.yaml"))]}
        _read_from(body, **files)
        body |= _limited(ask, _ours("flores")["generation_kwargs"])
        found.append(_write(ask, "flores", body, pair=pair, first=first))
    return found


_TASKS = {"mgsm": _mgsm, "belebele": _belebele, "global_mmlu": _global_mmlu, "flores": _flores}


# ------------------------------------------------------------------------------------------------- task files


def _stock(ask: _Ask, task: str, name: str) -> Path:
    """The harness' own file. Found without importing the harness, which takes seconds."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise PipelineError("lm_eval is not installed: install the package with its requirements")
    if ask.language.constructed and not ask.data_root:
        raise PipelineError(f"{ask.language.code} is a constructed language and not on the hub: set data_root")
    file = Path(spec.submodule_search_locations[0]) / "tasks" / name
    if not file.is_file():
        raise PipelineError(
            f"the harness has no {task} in {ask.language.name}: leave {ask.language.code} out of languages"
        )
    return file


def _ours(task: str) -> Row:
    return yaml.safe_load((OURS / f"{task}.yaml").read_text())


def _read_from(body: Row, **files: Path) -> None:
    """Point a task at local files, a split each."""
    body["include"].append(str(OURS / "local.yaml"))
    body["dataset_kwargs"] = {"data_files": {split: str(file.resolve()) for split, file in files.items()}}


def _limited(ask: _Ask, generation: Row) -> Row:
    """Whole, since the harness replaces nested keys where it merges files."""
    longest = {} if ask.max_gen_toks is None else {"max_gen_toks": ask.max_gen_toks}
    return {"generation_kwargs": generation | longest}


def _write(ask: _Ask, task: str, body: Row, pair: str | None = None, first: int = 0) -> Definition:
    where = pair or ask.language.code
    name = f"{task}_{where}_{ask.num_fewshot}shot"
    file = ask.folder / f"{task}.{where}.yaml"
    body = {"task": name, "num_fewshot": ask.num_fewshot, **body}
    file.write_text(yaml.safe_dump(body, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return Definition(name, file, task, ask.language.code, pair, ask.num_fewshot, first)


# ------------------------------------------------------------------------------------------------- data


def _place(data_root: Path, task: str, spoken: Language, split: str) -> Path:
    return data_root / task / spoken.code / f"{split}.jsonl"


def _files(ask: _Ask, task: str, *splits: str) -> list[Path]:
    assert ask.data_root
    return [_place(ask.data_root, task, ask.language, split) for split in splits]


def _rows(file: Path, columns: dict[str, type], options: dict[str, tuple[str, ...]] | None = None) -> list[Row]:
    """All rows of a JSON-lines file, each with `columns` of these types and `options` of these values."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PipelineError(
            f"data_root has no readable {file}: put it there, point data_root elsewhere, "
            f"or leave the task or language out"
        ) from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"{file} is not UTF-8: write it again as JSON lines in UTF-8") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines also splits at U+2028, which JSON allows
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PipelineError(f"{file}, line {number} is not JSON ({error.msg}): write the file again") from error
        for column, kind in columns.items():
            if not isinstance(row, dict) or column not in row:
                raise PipelineError(f"{file}, line {number} has no column {column!r}: the hub's columns are needed")
            if not isinstance(row[column], kind) or isinstance(row[column], bool):
                want = "null" if kind is type(None) else f"of type {kind.__name__}"
                raise PipelineError(f"{file}, line {number}: {column} must be {want}, got {row[column]!r}")
        for column, values in (options or {}).items():
            if row.get(column) not in values:
                got = repr(row[column]) if column in row else "no such column"
                raise PipelineError(f"{file}, line {number}: {column} must be one of {', '.join(values)}, got {got}")
        rows.append(row)
    if not rows:
        raise PipelineError(f"{file} is empty: put the data there, or point data_root elsewhere")
    return rows


def _enough(ask: _Ask, what: str, have: int, file: Path) -> None:
    if ask.num_fewshot > have:
        raise PipelineError(
            f"{what}: num_fewshot={ask.num_fewshot}, but {file} has {have} exemplars: ask for at most {have}"
        )


def _check_worked(file: Path, exemplars: list[Row], stock: Row) -> None:
    """The stock task cuts a fixed count of characters off an exemplar's answer: its first words must stand there."""
    found = re.search(r'question\+"\\n(.+?)"', stock["doc_to_text"])
    if not found:
        return
    # Some of the harness' phrases differ from MGSM's own in spaces and in the width of the colon.
    plain = [re.sub(r"\s", "", text).replace("：", ":") for text in (found[1], *(row["answer"] for row in exemplars))]
    for number, answer in enumerate(plain[1:], start=1):
        if not answer.startswith(plain[0]):
            raise PipelineError(f"{file}: the answer of exemplar {number} must begin with {found[1]!r}, as MGSM's do")


def _joined(ask: _Ask, source: Language, target: Language, split: str) -> list[Row]:
    """The rows of two languages, joined by id, in the order of the source."""
    assert ask.data_root
    sides = []
    for one in (source, target):
        file = _place(ask.data_root, "flores", one, split)
        rows = _rows(file, {"id": int, "sentence": str})
        sides.append({row["id"]: row["sentence"] for row in rows})
        if len(sides[-1]) != len(rows):
            raise PipelineError(f"{file} has an id twice: the sentences of two languages are joined by id")
    if sides[0].keys() != sides[1].keys():
        odd = sorted(sides[0].keys() ^ sides[1].keys())
        raise PipelineError(
            f"flores {split} of {source.code} and {target.code} have different ids, {odd[0]} for one: "
            f"take both files from the same release"
        )
    names = {"source_name": source.name, "target_name": target.name}
    return [{"id": key, **names, "source": text, "target": sides[1][key]} for key, text in sides[0].items()]
