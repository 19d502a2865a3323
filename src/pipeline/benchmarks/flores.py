"""FLORES-200 and FLORES+ (NLLB Team 2024): sentences translated from and to English.

The task file is this package's, because no task file of the harness reads an available source.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.benchmarks.benchmark import Ask, Benchmark, TaskSpec, on_hub
from pipeline.benchmarks.local_files import (
    Missing,
    Row,
    lines_of,
    path_of_split,
    rows_of,
    write_rows,
)
from pipeline.benchmarks.task_files import (
    generation_kwargs,
    own_task_file,
    read_from,
    write_task,
)
from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.languages import Language, language

FLORES_PLUS = "openlanguagedata/flores_plus"
SPLITS = {"dev": "dev", "test": "devtest"}  # the task's split -> FLORES+'s
# FLORES+ has ISO 639-3 codes of single languages, and no romanized languages except Arabic
RENAMED = {
    "zho_Hans": "cmn_Hans",
    "zho_Hant": "cmn_Hant",
    "est_Latn": "ekk_Latn",
    "grn_Latn": "gug_Latn",
    "tgl_Latn": "fil_Latn",
}
LACKING = ("ben_Latn", "hin_Latn", "npi_Latn", "sin_Latn", "urd_Latn")


def read_sentences(data_root: Path, spoken: Language, split: str) -> dict[int, str]:
    """Return the sentences of a language by id.

    The file is JSON lines, `flores/sw/devtest.jsonl`, with id and sentence (FLORES) or text
    (FLORES+). Otherwise it is plain text, `flores/sw/devtest.txt`, with a sentence a line, whose
    number is its id.
    """
    file = path_of_split(data_root, "flores", spoken, split)
    text = file.with_suffix(".txt")
    if text.is_file() and not file.is_file():
        return {number: line.strip() for number, line in lines_of(text)}
    first = rows_of(file, {"id": int})[0]
    column = "sentence" if "sentence" in first else "text"
    rows = rows_of(file, {"id": int, column: str})
    by_id = {row["id"]: row[column] for row in rows}
    if len(by_id) != len(rows):
        raise PipelineError(
            f"{file} has an id twice, but ids join the sentences of two languages. Number its rows"
            " again."
        )
    return by_id


Pair = tuple[Language, Language]  # from, into


def join_sides(pair: Pair, split: str, sides: Sequence[dict[int, str]]) -> list[Row]:
    """Join two languages' sentences by id, in the order of the first language."""
    source, target = pair
    sources, targets = sides
    odd = sources.keys() ^ targets.keys()
    if odd:
        raise PipelineError(
            f"flores {split} of {source.code} and {target.code} have different ids, for example"
            f" {min(odd)} (in plain text an id is the number of a line that is not blank). Take"
            " both files from the same release."
        )
    rows = []
    for key, text in sources.items():
        row = {"id": key, "source_name": source.name, "target_name": target.name}
        rows.append(row | {"source": text, "target": targets[key]})
    return rows


def define(ask: Ask) -> list[TaskSpec]:
    if not ask.data_root and not hub_sets(ask.language):
        raise Missing(
            f"flores in {ask.language.name} is not on the Hub. Leave {ask.language.code} out of"
            " languages."
        )
    english, spoken = language("en"), ask.language
    return [define_pair(ask, (english, spoken)), define_pair(ask, (spoken, english))]


def define_pair(ask: Ask, pair: Pair) -> TaskSpec:
    """Write the task file of a translation pair."""
    source, target = pair
    name = f"{source.code}-{target.code}"
    if target.code == "ja" and not importlib.util.find_spec("MeCab"):
        raise PipelineError(
            f"flores {name}: BLEU of Japanese needs a word list. Run pip install 'sacrebleu[ja]'."
        )
    own_file = own_task_file("flores_ja" if target.code == "ja" else "flores")
    body: Row = {"include": [str(own_file)]}
    # If development items are scored, the few-shot examples among them are not
    first = ask.num_fewshot if ask.split == "dev" else 0
    if ask.data_root:
        splits = ["dev", "test"]
        if not ask.num_fewshot:
            body["fewshot_split"] = None
            splits = ["test"]
        read_from(body, **{split: write_pair(ask, pair, name, split) for split in splits})
    else:
        body["include"].append(str(own_task_file("flores_hub")))
        body["dataset_kwargs"] = {"source": source.code, "target": target.code}
    body |= generation_kwargs(ask, own_task_file("flores"))
    return write_task(ask, body, name, first)


def write_pair(ask: Ask, pair: Pair, name: str, split: str) -> Path:
    """Write the rows of a split of a translation pair, joined by id, to a file."""
    assert ask.data_root
    read_split = "devtest" if split == "test" and ask.split == "test" else "dev"
    sides = [read_sentences(ask.data_root, spoken, read_split) for spoken in pair]
    rows = join_sides(pair, read_split, sides)
    return write_rows(ask.folder / f"flores.{name}.{split}.jsonl", rows)


def flores_plus(source: str, target: str, **_: Any) -> dict[str, Any]:
    """Return the splits dev and test (devtest) of a translation pair from the Hub.

    They have the same form as local files. Rows are joined by id, which the harness cannot do.
    tasks/flores_hub.yaml names this function.
    """
    import datasets

    pair = (language(source), language(target))
    splits_of_pair = {}
    for name, split in SPLITS.items():
        sides = []
        for spoken in pair:
            rows = datasets.load_dataset(FLORES_PLUS, flores_plus_code(spoken), split=split)
            sides.append({int(row["id"]): row["text"] for row in rows})
        joined = join_sides(pair, split, sides)
        splits_of_pair[name] = datasets.Dataset.from_list(joined)
    return splits_of_pair


def flores_plus_code(spoken: Language) -> str:
    """Return FLORES+'s code of a language."""
    return RENAMED.get(spoken.flores, spoken.flores)


def hub_sets(spoken: Language) -> list[Source]:
    if spoken.flores in LACKING:
        return []
    return [on_hub(FLORES_PLUS, flores_plus_code(spoken), split) for split in SPLITS.values()]


BENCHMARK = Benchmark(
    name="flores",
    kind="translation",
    metric="chrf++",
    questions=1012,
    tokens=28,
    text_files=("*/dev.txt", "*/devtest.txt"),
    define=define,
    texts=lambda row: [row["text"] if "text" in row else row["sentence"]],
    sources=hub_sets,
)
