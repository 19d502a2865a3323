"""scripts/get_laptop_data.py: what it writes is what table=laptop_real reads."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import repositories

from pipeline.__main__ import main

SCRIPT = Path(__file__).parents[2] / "scripts/get_laptop_data.py"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.real_data
def test_the_laptop_table_is_planned_on_what_the_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    real, hub, root = Path(os.environ["PIPELINE_TEST_DATA"]), tmp_path / "hub", tmp_path / "data"
    splits = ("train", "test")
    for code in ("en", "te", "sw", "bn"):
        for split in splits:
            repositories.jsonl(
                hub / f"mgsm/{code}/{split}.jsonl", read(real / f"mgsm/{code}/{split}.jsonl")
            )
    repositories.readme(
        hub / "mgsm",
        {code: {s: f"{code}/{s}.jsonl" for s in splits} for code in ("en", "te", "sw", "bn")},
    )
    for split in splits:
        repositories.jsonl(hub / f"gsm8k/main/{split}.jsonl", read(real / f"gsm8k/{split}.jsonl"))
    repositories.readme(hub / "gsm8k", {"main": {split: f"main/{split}.jsonl" for split in splits}})
    repositories.aya(hub / "aya")
    names = runpy.run_path(str(SCRIPT))
    copies = {name.upper(): str(hub / name) for name in ("mgsm", "gsm8k", "aya")}
    download = names["main"]
    download.__globals__.update(copies)
    download(root)
    for file in (
        "gsm8k/test.jsonl",
        "gsm8k/train.jsonl",
        "mgsm/te/test.jsonl",
        "mgsm/sw/train.jsonl",
    ):
        assert read(root / file) == read(real / file)
    assert {row["language"] for row in read(root / "aya/train.jsonl")} <= {
        "Telugu",
        "Swahili",
        "Bengali",
        "English",
    }
    few = read(root / "aya/train.jsonl")  # Aya has more
    more = [
        row | {name: f"{number} {row[name]}" for name in ("inputs", "targets")}
        for row in few
        for number in range(400)
    ]
    repositories.jsonl(root / "aya/train.jsonl", more)
    words = [
        "every.model.path=package:data/sandbox_base",
        f"data_root={root}",
        f"runs_dir={tmp_path}/runs",
    ]
    assert main(["stage=plan", "table=laptop_real", *words]) == 0
