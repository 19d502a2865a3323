"""FLORES-200 and FLORES+ (NLLB Team 2024): sentences translated between English and another
language, both ways.

The task file is ours: no stock task reads any source that can still be had.
"""

from __future__ import annotations

import importlib.util
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
    check_exemplars,
    generation_kwargs,
    own_task_file,
    read_from,
    write_task,
)
from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.languages import Language, language

FLORES_PLUS = "openlanguagedata/flores_plus"
SPLITS = {"dev": "dev", "test": "devtest"}  # the task's, and FLORES+'s
# FLORES+ has ISO 639-3 codes of single languages, and no romanized ones but Arabic
RENAMED = {
    "zho_Hans": "cmn_Hans",
    "zho_Hant": "cmn_Hant",
    "est_Latn": "ekk_Latn",
    "grn_Latn": "gug_Latn",
    "tgl_Latn": "fil_Latn",
}
LACKING = ("ben_Latn", "hin_Latn", "npi_Latn", "sin_Latn", "urd_Latn")


def read_sentences(data_root: Path, spoken: Language, split: str) -> tuple[Path, dict[int, str]]:
    """FLORES sentences of one language by id, and their file:

    FLORES or FLORES+ as JSON lines, or plain text.

    `flores/sw/devtest.jsonl` with id and sentence (FLORES) or text (FLORES+), else
    `flores/sw/devtest.txt` or the release's `flores/devtest/swh_Latn.devtest`, a sentence a line,
    whose number is its id.
    """
    file = path_of_split(data_root, "flores", spoken, split)
    plain_text, release = (
        file.with_suffix(".txt"),
        data_root / "flores" / split / f"{spoken.flores}.{split}",
    )
    for text in (plain_text, release):
        if text.is_file() and not file.is_file():
            return text, {number: line.strip() for number, line in lines_of(text)}
    rows = rows_of(file, {"id": int})
    column = "text"
    if "sentence" in rows[0]:
        column = "sentence"
    rows = rows_of(file, {"id": int, column: str})
    by_id = {row["id"]: row[column] for row in rows}
    if len(by_id) != len(rows):
        raise PipelineError(
            f"{file} has an id twice: the sentences of two languages are joined by id"
        )
    return file, by_id


def join_sides(sides: list[dict[int, str]], names: list[str], label: str) -> list[Row]:
    """Join two languages' sentences by id, in the order of the first."""
    if sides[0].keys() != sides[1].keys():
        odd = sorted(sides[0].keys() ^ sides[1].keys())
        raise PipelineError(
            f"{label} have different ids, {odd[0]} for one (of plain text the number of a line that"
            " is not blank): take both files from the same release"
        )
    spoken = {"source_name": names[0], "target_name": names[1]}
    return [
        {"id": key, **spoken, "source": text, "target": sides[1][key]}
        for key, text in sides[0].items()
    ]


def define(ask: Ask) -> list[TaskSpec]:
    if not ask.data_root and not hub_sets(ask.language):
        raise Missing(
            f"flores in {ask.language.name} is not on the Hub: leave {ask.language.code} out of"
            " languages"
        )
    english, spoken = language("en"), ask.language
    definitions = []
    for source, target in ((english, spoken), (spoken, english)):
        pair = f"{source.code}-{target.code}"
        if target.code == "ja" and not importlib.util.find_spec("MeCab"):
            raise PipelineError(
                f"flores {pair}: BLEU of Japanese needs a word list, pip install 'sacrebleu[ja]'"
            )
        body: Row = {
            "include": [str(own_task_file("flores_ja" if target.code == "ja" else "flores"))]
        }
        # Where the scored rows are the exemplars' own file (development items), the exemplars leave
        # the score.
        first = ask.num_fewshot if ask.split == "dev" else 0
        if ask.data_root:
            files = {}
            for name, split in (
                ("dev", "dev"),
                ("test", "devtest" if ask.split == "test" else "dev"),
            ):
                if name == "dev" and not ask.num_fewshot:
                    continue
                sides = [
                    read_sentences(ask.data_root, spoken_side, split)
                    for spoken_side in (source, target)
                ]
                if name == "dev":
                    check_exemplars(ask, "flores", len(sides[0][1]) - min(first, 1), sides[0][0])
                label = f"flores {split} of {source.code} and {target.code}"
                rows = join_sides([side for _, side in sides], [source.name, target.name], label)
                files[name] = write_rows(ask.folder / f"flores.{pair}.{name}.jsonl", rows)
            read_from(body, **files)
            if "dev" not in files:
                body["fewshot_split"] = None
        else:
            body["include"].append(str(own_task_file("flores_hub")))
            body["dataset_kwargs"] = {"source": source.code, "target": target.code}
        definitions.append(
            write_task(ask, body | generation_kwargs(ask, own_task_file("flores")), pair, first)
        )
    return definitions


def flores_plus(source: str, target: str, **_: Any) -> dict[str, Any]:
    """Return the splits dev and test (devtest) of a translation pair from the Hub, as local files
    would give them.

    Rows are joined by id, which the harness cannot do. tasks/flores_hub.yaml names this function.
    """
    import datasets

    splits_of_pair = {}
    for name, split in SPLITS.items():
        sides, names = [], []
        for spoken in (language(source), language(target)):
            rows = datasets.load_dataset(FLORES_PLUS, flores_plus_code(spoken), split=split)
            sides.append({int(row["id"]): row["text"] for row in rows})
            names.append(spoken.name)
        splits_of_pair[name] = datasets.Dataset.from_list(
            join_sides(sides, names, f"flores {split} of {source} and {target}")
        )
    return splits_of_pair


def flores_plus_code(spoken: Language) -> str:
    """Return the code of a language as FLORES+ has it."""
    return RENAMED.get(spoken.flores, spoken.flores)


def hub_sets(spoken: Language) -> list[Source]:
    if spoken.flores in LACKING:
        return []
    return [on_hub(FLORES_PLUS, flores_plus_code(spoken), split) for split in SPLITS.values()]


BENCHMARK = Benchmark(
    name="flores",
    title="FLORES",
    kind="translation",
    metric="chrf++",
    questions=1012,
    tokens=28,
    text_files=("*/dev.txt", "*/devtest.txt", "dev/*.dev", "devtest/*.devtest"),
    gated="FLORES+",
    define=define,
    texts=lambda row: [row["text"] if "text" in row else row["sentence"]],
    sources=hub_sets,
)
