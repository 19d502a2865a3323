"""From benchmarks and a data_root to task files of the harness: what is asked, of which rows, with which exemplars.

Each task is the harness' stock file, included by its path, with only the place of the data, the order of the exemplars
and the length of answers changed, so that a prompt equals the stock task's byte for byte. FLORES and MBPP are ours: no
stock FLORES task reads any source that can still be had, and the stock MBPP asks the Hub for a metric when it is read;
its prompt is kept. Constructed languages take the English stock file: the prompt's words (`Question:`, `Step-by-Step
Answer:`) are English, question and answer are not.

Everything that can be wrong with the data is found here, before any weights load. Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from pipeline.data.benchmark_files import BENCHMARKS, place
from pipeline.data.benchmark_files import files as files_of
from pipeline.errors import PipelineError, meant
from pipeline.evaluate.local_data import Missing, Row, check_worked, joined, rows_of, sentences
from pipeline.languages import Language, language

OURS = Path(__file__).parent / "tasks"


class AskedTask(Protocol):
    """`EvalTask` of the configuration: a benchmark, a number of exemplars, and whether it may be left out."""

    task: str
    num_fewshot: int
    where_possible: bool


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

    @property
    def where(self) -> str:
        return self.pair or self.language


@dataclass(frozen=True)
class LeftOut:
    """A task that a bundle wants where possible and could not have, and why."""

    task: str
    language: str
    num_fewshot: int
    reason: str


@dataclass(frozen=True)
class Ask:
    """What one task definition is made from."""

    task: str
    language: Language
    num_fewshot: int
    data_root: Path | None
    split: str
    max_gen_toks: int | None
    run_code: bool
    folder: Path
    exemplars: str = "first_n"
    options: str = "letters"


def task_definitions(
    tasks: Sequence[AskedTask],
    languages: Sequence[str],
    data_root: Path | None,
    folder: Path,
    *,
    split: str = "test",
    max_gen_toks: int | None = None,
    max_gen_toks_of: Mapping[str, int] | None = None,
    exemplars: str = "first_n",
    run_code: bool = False,
    options: str = "letters",
    left_out: list[LeftOut] | None = None,
) -> list[Definition]:
    """Check the data of each task in each language and write a task file of the harness for each into `folder`.

    `data_root`: the folder with the data, None for the Hub. `split`: test, or dev (development items). `max_gen_toks`:
    the longest answer in tokens, None for the task's own. `run_code`: MBPP may run programs. `options`: a four-way
    question is answered by a letter, or by the text of an option. `left_out`: takes the tasks that are wanted
    `where_possible` and are not. FLORES gives two tasks a language, from and into English.
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
        raise PipelineError(f"eval.split={split} has no items on the Hub: set data_root to a folder that has them")
    if exemplars == "random" and (other := [task for task in counts if _TASKS[task] is not _mgsm]):
        raise PipelineError(f"eval.exemplars=random is for MGSM: {other[0]} has its exemplars in the order of its file")
    known = [language(code) for code in dict.fromkeys(languages)]
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Definition] = []
    for asked in tasks:
        spoken = [one for one in known if asked.task != "flores" or one.code != "en"]
        if not spoken:
            raise PipelineError("flores translates between English and another language: add one to languages")
        for one in spoken:
            room = (max_gen_toks_of or {}).get(one.code, max_gen_toks)
            ask = Ask(asked.task, one, asked.num_fewshot, data_root, split, room, run_code, folder, exemplars, options)
            try:
                if data_root and one.constructed:
                    refuse_unspoken(data_root, one.code)
                found += _TASKS[asked.task](ask)
            except Missing as error:
                if not asked.where_possible or left_out is None:
                    raise
                left_out.append(LeftOut(asked.task, one.code, asked.num_fewshot, str(error)))
    return found


def refuse_unspoken(data_root: Path, code: str) -> None:
    """Any private-use code is a constructed language, but not one of a data_root that has nothing in it."""
    if not any(files_of(data_root, benchmark, code) for benchmark in BENCHMARKS):
        spoken = sorted({path.parent.name for benchmark in BENCHMARKS for path in files_of(data_root, benchmark)})
        raise Missing(f"languages=[{code}] is unknown, data_root={data_root} has none of it: {meant(code, spoken)}")


# ------------------------------------------------------------------------------------------------- the tasks


def _mgsm(ask: Ask) -> list[Definition]:
    """MGSM with worked answers in the question's language (the papers'), worked in English, or bare answers.

    A language that the harness has no file for is asked with the words of its exemplars (`prompt_words`).
    """
    kind = {"mgsm": "native_cot", "mgsm_en_cot": "en_cot", "mgsm_direct": "direct"}[ask.task]
    code = ask.language.mgsm or ask.language.stock
    english = f"mgsm/{kind}/mgsm_{kind}_en.yaml"
    theirs = stock(ask, f"mgsm/{kind}/mgsm_{kind}_{code}.yaml", english)
    body: Row = {"include": [str(theirs), str(ours("mgsm"))], **generation_kwargs(ask, theirs, ours("mgsm"))}
    if ask.data_root:
        train, test = local_files(ask, "mgsm", "train", "test" if ask.split == "test" else "dev")
        items = rows_of(test, {"question": str, "answer_number": int}, optional={"answer": type(None)})
        worked: dict[str, type] = {"answer_number": int} if kind == "direct" else {"answer": str}
        exemplars = rows_of(train, {"question": str} | worked) if ask.num_fewshot or train.is_file() else []
        enough(ask, ask.task, len(exemplars), train)
        if theirs.name == Path(english).name and code != "en":
            question, answer = prompt_words(exemplars)
            exemplars = [with_words(row, question, answer) for row in exemplars]
            body |= worded(whole(theirs), question, answer, native=ask.task == "mgsm")
            body["generation_kwargs"]["until"] = [question, *body["generation_kwargs"]["until"][1:]]
        elif ask.task == "mgsm":
            check_worked(train, exemplars, yaml.safe_load(theirs.read_text()))
        read_from(body, **with_all_columns(ask, {train: exemplars, test: items}))
        if not exemplars:
            body["training_split"] = None
    if ask.exemplars == "random":
        body["fewshot_config"] = {"sampler": "default"}
    return [write(ask, body)]


COLUMNS = ("question", "answer", "answer_number", "equation_solution")
QUESTION, STEPS = "Question:", "Step-by-Step Answer:"  # MGSM's words in English
_WORDS = re.compile(r"""\s*([^:：{}"\\\n]{1,60}[:：])""")


def prompt_words(exemplars: Sequence[Row]) -> tuple[str, str]:
    """What stands before each question and each worked answer, colon included, as in MGSM's own exemplars (`Swali:`,
    `Jibu la Hatua kwa Hatua:`); English's where they do not all begin alike, or are fewer than two."""
    found = []
    for column, english in (("question", QUESTION), ("answer", STEPS)):
        words = {match[1] if (match := _WORDS.match(str(row.get(column, "")))) else "" for row in exemplars}
        found.append(words.pop() if len(words) == 1 and len(exemplars) > 1 else "")
        found[-1] = found[-1] or english
    return found[0], found[1]


def with_words(row: Row, question: str, answer: str) -> Row:
    """An exemplar that begins with these words, one space after each, whether it had them or not."""
    told = {"question": f"{question} {row['question'].strip().removeprefix(question).lstrip()}"}
    if isinstance(row.get("answer"), str):
        told["answer"] = f"{answer} {row['answer'].strip().removeprefix(answer).lstrip()}"
    return row | told


def worded(english: Row, question: str, answer: str, native: bool) -> Row:
    """The prompt of MGSM's English file with other words before question and answer; native: an answer is asked for
    in these words, not English's."""
    text, target = english["doc_to_text"].replace(f"{QUESTION} ", f"{question} "), english["doc_to_target"]
    return {
        "doc_to_text": text.replace(STEPS, answer) if native else text,
        "doc_to_target": target.replace(f"[{len(STEPS) + 1}:]", f"[{len(answer) + 1}:]"),
    }


def with_all_columns(ask: Ask, splits: Mapping[Path, Sequence[Row]]) -> dict[str, Path]:
    """Split -> file: those of `splits` where they hold these rows with MGSM's four columns, else files beside the task.

    The templates tell an exemplar by its answer, and datasets takes the types of all splits from the first one.
    """
    names = {file: "train" if file.stem == "train" else "test" for file, rows in splits.items() if rows}
    if all(row.keys() == set(COLUMNS) for file in names for row in splits[file]) and all(
        splits[file] == rows_of(file, {}) for file in names
    ):
        return {name: file for file, name in names.items()}
    found = {name: ask.folder / f"{ask.task}.{ask.language.code}.{name}.jsonl" for name in names.values()}
    for file, name in names.items():
        default = {"answer": "-" if name == "train" else None, "answer_number": 0, "equation_solution": ""}
        told = ({**default, **{key: row[key] for key in COLUMNS if row.get(key) is not None}} for row in splits[file])
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in told]
        found[name].write_text("".join(lines), encoding="utf-8")
    return found


def _belebele(ask: Ask) -> list[Definition]:
    code = "eng_Latn" if ask.language.constructed else ask.language.flores
    theirs = stock(ask, f"belebele/belebele_{code}.yaml", "belebele/belebele_eng_Latn.yaml")
    body: Row = {"include": [str(theirs), *by_text(ask)]}
    if ask.data_root:
        (test,) = local_files(ask, "belebele", "test" if ask.split == "test" else "dev")
        names = ("flores_passage", "question", "mc_answer1", "mc_answer2", "mc_answer3", "mc_answer4")
        rows = rows_of(test, dict.fromkeys(names, str), {"correct_answer_num": ("1", "2", "3", "4")})
        enough(ask, "belebele", len(rows) - 1, test)  # one question at least is to be left
        read_from(body, test=test)
    return [write(ask, body, first=ask.num_fewshot)]


def _global_mmlu(ask: Ask) -> list[Definition]:
    code = ask.language.global_mmlu or ask.language.stock
    theirs = stock(ask, f"global_mmlu/full/{code}/_{code}_template_yaml", "global_mmlu/full/en/_en_template_yaml")
    body: Row = {"include": [str(theirs), str(ours("global_mmlu")), *by_text(ask)]}
    if ask.data_root:
        dev, test = local_files(ask, "global_mmlu", "dev", "test" if ask.split == "test" else "development")
        names = ("subject", "question", "option_a", "option_b", "option_c", "option_d")
        rows, exemplars = (
            rows_of(file, dict.fromkeys(names, str), {"answer": ("A", "B", "C", "D")}) for file in (test, dev)
        )
        shots = Counter(row["subject"] for row in exemplars)
        for subject in dict.fromkeys(row["subject"] for row in rows):
            enough(ask, f"global_mmlu, {subject}", shots[subject], dev)
        read_from(body, dev=dev, test=test)
    return [write(ask, body)]


def _flores(ask: Ask) -> list[Definition]:
    if ask.language.constructed and not ask.data_root:
        raise PipelineError(f"{ask.language.code} is a constructed language and not on the Hub: set data_root")
    english, other = language("en"), ask.language
    found = []
    for source, target in ((english, other), (other, english)):
        pair = f"{source.code}-{target.code}"
        if target.code == "ja" and not importlib.util.find_spec("MeCab"):
            raise PipelineError(f"flores {pair}: BLEU of Japanese needs a word list, pip install 'sacrebleu[ja]'")
        body: Row = {"include": [str(ours("flores_ja" if target.code == "ja" else "flores"))]}
        # Where the scored rows are the exemplars' own file (development items), the exemplars leave the score.
        first = ask.num_fewshot if ask.split == "dev" else 0
        if ask.data_root:
            files = {}
            for name, split in (("dev", "dev"), ("test", "devtest" if ask.split == "test" else "dev")):
                if name == "dev" and not ask.num_fewshot:
                    continue
                sides = [sentences(ask.data_root, one, split) for one in (source, target)]
                if name == "dev":
                    enough(ask, "flores", len(sides[0][1]) - min(first, 1), sides[0][0])
                what = f"flores {split} of {source.code} and {target.code}"
                rows = joined([side for _, side in sides], [source.name, target.name], what)
                files[name] = ask.folder / f"flores.{pair}.{name}.jsonl"
                lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
                files[name].write_text("".join(lines), encoding="utf-8")
            read_from(body, **files)
            if "dev" not in files:
                body["fewshot_split"] = None
        else:
            body["include"].append(str(ours("flores_hub")))
            body["dataset_kwargs"] = {"source": source.code, "target": target.code}
        found.append(write(ask, body | generation_kwargs(ask, ours("flores")), pair, first))
    return found


def _mbpp(ask: Ask) -> list[Definition]:
    if ask.num_fewshot:
        raise PipelineError(f"mbpp is asked without exemplars: num_fewshot=0, not {ask.num_fewshot}")
    if not ask.run_code:
        raise Missing("mbpp runs the programs that a model writes: allow it with eval.run_code=true, or leave mbpp out")
    body: Row = {"include": [str(ours("mbpp"))]}
    if ask.data_root:
        (test,) = local_files(ask, "mbpp", "test" if ask.split == "test" else "dev")
        for number, row in enumerate(rows_of(test, {"text": str, "test_list": list}), start=1):
            if len(row["test_list"]) < 3 or not all(isinstance(one, str) for one in row["test_list"]):
                raise PipelineError(f"{test}, row {number}: test_list must hold three tests, as the prompt shows three")
        read_from(body, test=test)
    elif ask.language.code != "en":
        raise Missing(
            f"mbpp has no translation into {ask.language.name} on the Hub: set data_root to a folder with "
            f"mbpp/{ask.language.code}/test.jsonl"
        )
    return [write(ask, body | generation_kwargs(ask, ours("mbpp")))]


_TASKS: dict[str, Callable[[Ask], list[Definition]]] = {
    "mgsm": _mgsm, "mgsm_en_cot": _mgsm, "mgsm_direct": _mgsm,
    "belebele": _belebele, "global_mmlu": _global_mmlu, "flores": _flores, "mbpp": _mbpp,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- task files


def stock(ask: Ask, name: str, wordless: str | None = None) -> Path:
    """The harness' own file. Found without importing the harness, which takes seconds.

    `wordless`: English's file of a benchmark whose prompts differ in nothing but the rows; with rows of one's own it
    serves each language that the harness has no file for.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise PipelineError("lm_eval is not installed: install the package with its requirements")
    if ask.language.constructed and not ask.data_root:
        raise PipelineError(f"{ask.language.code} is a constructed language and not on the Hub: set data_root")
    tasks = Path(spec.submodule_search_locations[0]) / "tasks"
    file = tasks / name
    if file.is_file():
        return file
    code = ask.language.code
    remedy = f"leave {code} out of languages"
    if wordless and ask.data_root:
        return tasks / wordless
    if wordless:
        remedy += f", or give data_root with {name.partition('/')[0]}/{code}/test.jsonl"
    raise PipelineError(f"the harness has no {ask.task} in {ask.language.name}: {remedy}")


def ours(name: str) -> Path:
    return OURS / f"{name}.yaml"


def by_text(ask: Ask) -> list[str]:
    """What turns a four-way question into one that is answered by the text of its options, where that is asked for."""
    return [str(ours(f"{ask.task}_text"))] if ask.options == "text" else []


def generation_kwargs(ask: Ask, *files: Path) -> Row:
    """The files' settings joined, and eval.max_gen_toks over them; whole, since the harness replaces nested keys."""
    found: Row = {}
    for file in files:
        found |= yaml.load(file.read_text(encoding="utf-8"), _Plain)["generation_kwargs"]
    return {"generation_kwargs": found | ({"max_gen_toks": ask.max_gen_toks} if ask.max_gen_toks else {})}


class _Plain(yaml.SafeLoader):
    """Reads !function as the name of the function, without its module, which may move."""


_Plain.add_constructor("!function", lambda loader, node: node.value.rpartition(".")[2])


def whole(file: Path) -> Row:
    """A task file with what it includes, its own words before those. A !function is the name of the function."""
    body = yaml.load(file.read_text(encoding="utf-8"), _Plain)
    found: Row = {}
    includes = body.pop("include", [])
    for include in [includes] if isinstance(includes, str) else includes:
        found |= whole(file.parent / include)
    return found | body


def local_files(ask: Ask, folder: str, *splits: str) -> list[Path]:
    assert ask.data_root
    return [place(ask.data_root, folder, ask.language, split) for split in splits]


def enough(ask: Ask, what: str, have: int, file: Path) -> None:
    if ask.num_fewshot > have:
        raise PipelineError(
            f"{what}: num_fewshot={ask.num_fewshot}, but {file} has {have} exemplars: ask for at most {have}"
        )


def read_from(body: Row, **files: Path) -> None:
    """Point a task at local files, a split each."""
    body["include"].append(str(ours("local")))
    body["dataset_kwargs"] = {"data_files": {split: str(file.resolve()) for split, file in files.items()}}


def write(ask: Ask, body: Row, pair: str | None = None, first: int = 0) -> Definition:
    where = pair or ask.language.code
    name = f"{ask.task}_{where}_{ask.num_fewshot}shot"
    file = ask.folder / f"{ask.task}.{where}.yaml"
    body = {"task": name, "num_fewshot": ask.num_fewshot, **body}
    file.write_text(yaml.safe_dump(body, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return Definition(name, file, ask.task, ask.language.code, pair, ask.num_fewshot, first)
