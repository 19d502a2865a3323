"""The repositories on the Hub as local folders.

File layout, configurations, splits and columns as published, with the ways in which real rows fail.
`load_dataset` reads a folder with a README as it reads the repository.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def parquet(path: Path, rows: Rows) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def readme(folder: Path, configs: dict[str, dict[str, str]]) -> None:
    """configs: name -> split -> pattern of files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["---", "configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {json.dumps(name)}", "  data_files:"]
        for split, pattern in splits.items():
            lines += [f"  - split: {split}", f"    path: {pattern}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def orca_math(folder: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(30)]
    parquet(folder / "data/train-00000-of-00001.parquet", rows)


AYA = (
    ("Swahili", "swh", "Mji mkuu wa Kenya ni upi?", "Nairobi."),
    ("Swahili", "swa", "Mji mkuu wa Tanzania ni upi?", "Dodoma."),
    ("Bengali", "ben", "বাংলাদেশের রাজধানী কী?", "ঢাকা।"),
    ("Telugu", "tel", "తెలంగాణ రాజధాని ఏది?", "హైదరాబాద్."),
    ("Japanese", "jpn", "日本の首都はどこですか。", "東京です。"),
    ("German", "deu", "Was ist die Hauptstadt?", "Berlin."),
)


def aya(folder: Path) -> None:
    names = ("language", "language_code", "inputs", "targets")
    more = {"annotation_type": "original-annotations", "user_id": "ab12"}
    parquet(
        folder / "data/train-00000-of-00001.parquet",
        [dict(zip(names, row, strict=True)) | more for row in AYA],
    )
    parquet(
        folder / "data/test-00000-of-00001.parquet", [dict(zip(names, AYA[0], strict=True)) | more]
    )
    parquet(
        folder / "demographics/train-00000-of-00001.parquet",
        [{"user_id": "ab12", "age_range": [20, 30]}],
    )
    default = {"train": "data/train-*", "test": "data/test-*"}
    readme(folder, {"default": default, "demographics": {"train": "demographics/train-*"}})


def telugu(folder: Path) -> None:
    """Write a CSV with English originals beside the translations.

    It has empty cells, and an index column that pandas left.
    """
    import csv

    kinds = ("", "telugu_", "telugu_transliterated_")
    names = [f"{kind}{part}" for kind in kinds for part in ("instruction", "input", "output")]
    rows = [
        [
            "Name a fruit.",
            "",
            "Mango",
            "ఒక పండు పేరు చెప్పండి.",
            "",
            "మామిడి",
            "oka pandu",
            "",
            "mamidi",
        ],
        [
            "Translate.",
            "water",
            "nillu",
            "అనువదించండి.",
            "నీరు",
            "జలం",
            "anuvadinchandi",
            "niru",
            "jalam",
        ],
        ["Say no.", "", "No", "", "", "", "", "", ""],
    ]
    folder.mkdir(parents=True)
    with open(
        folder / "yahma_alpaca_cleaned_telugu_filtered_and_romanized.csv", "w", newline=""
    ) as file:
        csv.writer(file).writerows(
            [["Unnamed: 0", *names], *([at, *row] for at, row in enumerate(rows))]
        )


def indic_align(folder: Path) -> None:
    """Conversations in parallel columns: whole, of two turns, null, without an answer, and flat."""
    turns = [
        [["জল কোথা থেকে আসে?", "মেঘ থেকে।"]],
        [["নাম কী?", "আমি সহায়ক।"], ["বাড়ি কোথায়?", "ঢাকায়।"]],
        None,
        [["কে?"]],
        [["কী?", "এটা।"], ["শেষ প্রশ্ন"]],
    ]
    rows = [
        {
            "doc_id": f"{n}",
            "num_turns": 1.0,
            "eng_Latn": [["Who?", "Me."]],
            "ben_Beng": cell,
            "__index_level_0__": n,
        }
        for n, cell in enumerate(turns)
    ]
    parquet(folder / "indicalign-instruct/indicsharellama/indic_sharellama.parquet", rows)
    parquet(
        folder / "indicalign-instruct/anudesh/anudesh.parquet",
        [{"id": "1", "interactions": [["a", "b"]]}],
    )
    configs = {"Anudesh": "anudesh/anudesh", "Indic_ShareLlama": "indicsharellama/indic_sharellama"}
    readme(
        folder,
        {name: {"train": f"indicalign-instruct/{path}.parquet"} for name, path in configs.items()},
    )


def bongchat(folder: Path) -> None:
    rows = [
        {
            "instruction": "নিচের বাক্যটি ইংরেজিতে অনুবাদ করো",
            "input": "আমি ভাত খাই।",
            "output": "I eat rice.",
        },
        {"instruction": "একটি ফলের নাম বলো", "input": None, "output": "আম"},
    ]
    parquet(folder / "data/train-00000-of-00001.parquet", rows)


def inkuba(folder: Path) -> None:
    """One configuration whose splits are languages and parts."""

    def rows(instruction: str, inputs: str | None) -> Rows:
        more = {"task": "mmt", "data_source": "nllb"}
        return [{"instruction": instruction, "inputs": inputs, "targets": "How are you?", **more}]

    parquet(
        folder / "data/swahili_train-00000-of-00001.parquet",
        rows("Tafsiri kwa Kiingereza.", "Habari yako?"),
    )
    parquet(folder / "data/swahili_dev-00000-of-00001.parquet", rows("Tafsiri.", None))
    parquet(folder / "data/hausa_train-00000-of-00001.parquet", rows("Fassara.", "Sannu"))
    splits = ("swahili_train", "swahili_dev", "hausa_train")
    readme(folder, {"default": {split: f"data/{split}-*" for split in splits}})


def xp3mt(folder: Path) -> None:
    """Write a loading script named after the repository, and its raw files."""
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.py").write_text("")
    for language in ("sw", "bn"):
        name = f"{language}/xp3_GEM_xlsum_{language}_train_docsummary_{language}mt.jsonl"
        jsonl(
            folder / name,
            [{"inputs": f"Andika muhtasari ({language}): rais", "targets": "Rais alisema."}],
        )


def llm_japanese(folder: Path) -> None:
    rows = [
        {
            "instruction": "次の日本語を英語に翻訳してください。",
            "input": "猫が好きです。",
            "output": "I like cats.",
        },
        {"instruction": "首都は？", "input": "", "output": "東京"},
    ]
    jsonl(folder / "data-cc-by-sa.jsonl", rows)


def ichikara(folder: Path) -> None:
    names = ("20231115-1", "20231115-2", "20231115-5", "20231221-002", "20231221-003")
    for name in names:
        row = {
            "ID": f"ichikara-{name}-0000001",
            "text": f"日本で一番高い山は？{name}",
            "output": "富士山です。",
        }
        parquet(folder / f"{name}/train-00000-of-00001.parquet", [row])
    readme(folder, {name: {"train": f"{name}/train-*"} for name in names})


def dolly_ja(folder: Path) -> None:
    """One JSON file that is an array."""
    row = {
        "category": "closed_qa",
        "index": "0",
        "instruction": "いつですか？",
        "input": "航空は",
        "output": "8月31日",
    }
    folder.mkdir(parents=True)
    (folder / "databricks-dolly-15k-ja.json").write_text(
        json.dumps([row], ensure_ascii=False), encoding="utf-8"
    )


def open_web_math(folder: Path) -> None:
    rows = [
        {"url": "u", "text": f"# Proof {n}", "date": "2021-04-13T00:00:00", "metadata": "{}"}
        for n in range(3)
    ]
    parquet(folder / "data/train-00000-of-00002.parquet", rows[:2])
    parquet(folder / "data/train-00001-of-00002.parquet", rows[2:])


def bn_wikisource(folder: Path) -> None:
    parquet(folder / "data/train-00000-of-00001.parquet", [{"text": "আমার সোনার বাংলা", "meta": "{}"}])


def gsm8k(folder: Path) -> None:
    row = {
        "question": "Natalia sold 48 and 24 clips. How many?",
        "answer": "48+24=<<48+24=72>>72\n#### 72",
    }
    for name in ("main", "socratic"):
        for split in ("train", "test"):
            parquet(folder / f"{name}/{split}-00000-of-00001.parquet", [row])
    splits = ("train", "test")
    readme(
        folder,
        {name: {split: f"{name}/{split}-*" for split in splits} for name in ("main", "socratic")},
    )


MADE: dict[str, Callable[[Path], None]] = {
    "orca_math": orca_math,
    "aya": aya,
    "telugu_alpaca": telugu,
    "telugu_gpteacher": telugu,
    "indic_sharellama": indic_align,
    "bongchat": bongchat,
    "inkuba": inkuba,
    "xp3mt": xp3mt,
    "llm_japanese": llm_japanese,
    "ichikara": ichikara,
    "dolly_ja": dolly_ja,
    "open_web_math": open_web_math,
    "bn_wikisource": bn_wikisource,
    "gsm8k": gsm8k,
    "gsm8k_calculations": gsm8k,
    "gsm8k_text": gsm8k,
}


# --- raw bitext ---

PAIRS = {
    "sw": [
        ("Good morning.", "Habari za asubuhi."),
        ('She said "no', "Alisema hapana"),
        ("Water", "Maji"),
    ],
    "bn": [("Good morning.", "সুপ্রভাত।"), ('She said "no', "সে বলল না"), ("Water", "জল")],
    "te": [("Good morning.", "శుభోదయం."), ('She said "no', "ఆమె కాదు అంది"), ("Water", "నీరు")],
    "ja": [("Good morning.", "おはよう。"), ('She said "no', "彼女は断った"), ("Water", "水")],
}
SCORES = (1.25, 1.2149, 1.05)  # the last is below the limit


def raw_bitext(path: Path, code: str, columns: int, more: Sequence[tuple[str, str]] = ()) -> None:
    """Write a file of allenai/nllb with 9 columns, or with CCMatrix' 3.

    It has a quote without an end, and a broken line. `more` are further pairs above the limit,
    English first.
    """
    lines = []
    for (english, other), score in zip(
        [*PAIRS[code], *more], [*SCORES, *[1.2] * len(more)], strict=True
    ):
        texts = [english, other] if code > "en" else [other, english]
        rest = ["0.999", "0.998", "crawl-data/a", "u", "crawl-data/b", "u"]
        lines.append(
            "\t".join([*texts, str(score), *rest] if columns == 9 else [str(score), *texts])
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join([*lines, "half a line"]) + "\n")
