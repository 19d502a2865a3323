"""What a training recorded, as columns of a table; what it warned of.

And what scores keep in memory when it begins.
"""

import json
import re
from pathlib import Path

import pytest
from fixture_types import Call, Make, Patch
from tiny_words import FEW

from pipeline.commands.table import make_table
from pipeline.config.compose import compose
from pipeline.data.rows import read_jsonl
from pipeline.merge import resident
from pipeline.report.cells import cell_result
from pipeline.report.stored import StoredAnswers
from pipeline.tables.planned_runs import Planning

SFT = (
    "model: trained, sft.seq_length: 96, sft.batch_size: 4, sft.steps: 4, sft.warmup_steps: 0,"
    " sft.precision: fp32"
)


@pytest.mark.parametrize(("expert", "sft"), [("math", "full"), ("math_qac", "mixed")])
def test_validation_losses_at_both_ends_of_it(
    expert: str, sft: str, world: Path, base: Path, tmp_path: Path
) -> None:
    table = tmp_path / "losses.yaml"
    table.write_text(
        f"name: losses\nevery: {{data_root: {world}, model.path: {base}, {SFT}}}\nruns: {{trained:"
        f" {{stage: sft, expert: {expert}, sft: {sft}, data.size: 20, data.validation: 4,\n "
        " sft.validate_at_start: true, sft.learning_rate: 1e-3}}\nscore: {run: trained, eval:"
        " mgsm_0shot, eval.limit: 1, eval.max_gen_toks: 2, in: en}\ncolumns:\n  start: {fact:"
        " starting_validation_loss}\n  end: {fact: ending_validation_loss}\n  mgsm: {}\n"
    )
    words = ["stage=table", f"table={table}", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    make_table(compose(words))  # type: ignore[arg-type]
    table = Planning.of(compose(words))  # type: ignore[arg-type]
    (log,) = (tmp_path / "runs").glob("math*/log.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert sorted(losses) == [0, 1, 2, 3, 4] and losses[0] != losses[4]
    start, end = (
        cell_result(StoredAnswers(table), table.plan.cells["all", column])
        for column in ("start", "end")
    )
    assert (start.value, end.value) == (losses[0], losses[4])
    cells = (tmp_path / "runs/reports/losses/cells.md").read_text(encoding="utf-8")
    assert f"{losses[0]:.3f}" in cells and f"{losses[4]:.3f}" in cells


def test_a_training_takes_memory_that_scores_kept(
    make_run: Make, world: Path, base: Path, monkeypatch: Patch
) -> None:
    held: list[int] = []
    real = resident.release_models
    monkeypatch.setattr(
        "pipeline.train.stage.release_models",
        lambda: (held.append(len(resident.LIVE_MODELS)), real()),
    )
    with resident.keep_models_resident():
        make_run(
            "stage=eval",
            f"checkpoint={base}",
            f"data_root={world}",
            "eval=belebele_0shot",
            "eval.limit=2",
            "languages=[en]",
            "redo=true",
        )
        assert len(resident.LIVE_MODELS) == 1
        words = [
            "model=trained",
            f"model.path={base}",
            f"data_root={world}",
            "sft.steps=1",
            "sft.seq_length=64",
        ]
        make_run(
            "stage=sft", "expert=math", "seed=77", "sft.precision=fp32", "sft.batch_size=2", *words
        )
        assert held == [1] and not resident.LIVE_MODELS


def test_warnings_of_trainings_are_on_a_tables_page(
    world: Path, base: Path, tmp_path: Path, call: Call
) -> None:
    every = {"data_root": str(world), "model": "trained", "model.path": str(base), "threads": 1}
    table = {
        "name": "warned",
        "axes": {"seed": [0, 1]},
        "runs": {"math": {"stage": "sft", "expert": "math", "seed": "{seed}"}},
        "every": {
            **every,
            **dict(word.split("=") for word in FEW),
            "sft.seq_length": 56,
            "sft.warmup_steps": 5,
        },
        "columns": {"math": {"run": "math", "fact": "loss", "mean": ["seed"]}},
    }
    (tmp_path / "warned.yaml").write_text(json.dumps(table))
    words = [f"table={tmp_path}/warned.yaml", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    made = call("stage=table", *words, "launcher.workers=1", status=0)
    counted = re.search(r"sft.seq_length=56 truncates \d+ of \d+ rows\n", made.err)
    assert counted and counted.start() < made.err.index(": loading ")
    page = Path(made.out.strip()).read_text()
    facts = [
        json.loads(file.read_text())["facts"]
        for file in sorted((tmp_path / "runs").glob("math-*/manifest.json"))
    ]
    rows = len(list(read_jsonl(next((tmp_path / "runs").glob("data-math-*")) / "train.jsonl")))
    assert 0 < facts[0]["truncated"] <= rows
    for fact in facts:
        first, *_ = fact["warnings"]
        assert first == f"sft.seq_length=56 truncates {fact['truncated']} of {rows} rows"
    after = made.err[made.err.rindex(" done in ") :]
    (line,) = re.findall(
        r"^warning: (sft.warmup_steps=5 of 2 steps: .*) \((math-\S+) and 1 more\)$", after, re.M
    )
    assert "Training warnings" in page and line[0] in page and "sft.seq_length=56 truncates" in page
    again = call("stage=report", *words)  # from what is stored
    assert again.status == 0 and f"warning: {line[0]}" in again.err
