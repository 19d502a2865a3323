"""The shipped table node_check, on a small model.

Every way to train, a merge and eight questions.
"""

import csv
from pathlib import Path

from fixture_types import Call


def test_a_node_is_tried_with_each_way_to_train(tmp_path: Path, call: Call) -> None:
    words = ["every.model=small_bpe", "every.sft.seq_length=64", "every.threads=1"]
    call(
        "stage=table", "table=node_check", *words, f"runs_dir={tmp_path}", "tracking.mode=disabled"
    )
    cells: dict[tuple[str, str], float] = {}
    with open(tmp_path / "reports/node_check/cells.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells[row["row"], row["column"]] = float(row["value"])
    for method in ("full", "partial", "simultaneous", "lora"):
        assert cells[method, "tokens per second"] > 0
        assert cells[method, "peak GB"] > 0.1
        assert cells[method, "bits of weights"] == cells[method, "bits of moments"] == 32
    assert ("layer swap", "mgsm") in cells
