"""What trainings warn of is kept: printed at the end of their table, and shown on its page."""

import json
import re
from pathlib import Path

from fixture_types import Call
from tiny_words import FEW

from pipeline.data.rows import read_jsonl


def test_warnings_of_trainings_are_on_a_tables_page(world: Path, base: Path, tmp_path: Path, call: Call) -> None:
    every = {"data_root": str(world), "model": "trained", "model.path": str(base), "threads": 1}
    table = {
        "name": "warned", "axes": {"seed": [0, 1]},
        "runs": {"math": {"stage": "sft", "expert": "math", "seed": "{seed}"}},
        "every": {**every, **dict(word.split("=") for word in FEW), "sft.seq_length": 56, "sft.warmup_steps": 5},
        "columns": {"math": {"run": "math", "fact": "loss", "mean": ["seed"]}},
    }  # fmt: skip
    (tmp_path / "warned.yaml").write_text(json.dumps(table))
    words = [f"table={tmp_path}/warned.yaml", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    made = call("stage=table", *words, "launcher.workers=1", status=0)
    counted = re.search(r"sft.seq_length=56 truncates \d+ of \d+ rows\n", made.err)
    assert counted and counted.start() < made.err.index(": loading ")
    page = Path(made.out.strip()).read_text()
    facts = [json.loads(file.read_text())["facts"] for file in sorted((tmp_path / "runs").glob("math-*/manifest.json"))]
    rows = len(list(read_jsonl(next((tmp_path / "runs").glob("data-math-*")) / "train.jsonl")))
    assert 0 < facts[0]["truncated"] <= rows
    for fact in facts:
        first, *_ = fact["warnings"]
        assert first == f"sft.seq_length=56 truncates {fact['truncated']} of {rows} rows"
    after = made.err[made.err.rindex(" done in ") :]
    (line,) = re.findall(r"^warning: (sft.warmup_steps=5 of 2 steps: .*) \((math-\S+) and 1 more\)$", after, re.M)
    assert "Training warnings" in page and line[0] in page and "sft.seq_length=56 truncates" in page
    again = call("stage=report", *words)  # from what is stored
    assert again.status == 0 and f"warning: {line[0]}" in again.err
