"""A score that is not a finite number, as of a model whose logits overflow, is missing: not compared, never best."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import finish, lines_of

from pipeline.config.compose import compose
from pipeline.report.collect import gather_results
from pipeline.report.load.contents import Results
from pipeline.report.write import write_report
from pipeline.runs.graph import order_runs
from pipeline.stats.ranks import holm
from pipeline.tables.planned_runs import Planning

TABLE = """
name: overflow
axes: {bottom: [1, 3]}
every: {model: sandbox, data_root: world}
runs:
  world: {stage: data, expert: sandbox}
  base: {}
  math: {stage: sft, expert: math, recipe: sandbox_math}
  language: {stage: sft, expert: qac, recipe: sandbox_language}
  swap: {merge: layer_swap, merge.math: math, merge.language: language, merge.bottom_layers: "{bottom}"}
score: {eval: held_out_0shot, in: qac}
columns: {bits: {}}
rows:
  base: {run: base}
  math: {run: math}
  language: {run: language}
  swap: {run: swap, bottom: 1}
  best swap: {run: swap, best: [bottom]}
compare: {math: [base, swap], language: [base, math, swap]}
"""


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_not_finite_is_missing(value: float, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TABLE)
    words = ["stage=table", f"table={tmp_path}/t.yaml", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]

    def gathered() -> Results:
        return gather_results(Planning.of(compose(words)), {})  # type: ignore[arg-type]

    runs: list[Any] = order_runs(Planning.of(compose(words)).targets())  # type: ignore[arg-type]
    finish(runs, 30)
    before = {line["left"] + line["right"]: line for line in gathered().contrasts}
    (run,) = [run for run in runs if run.config.stage == "eval" and "layer_swap-1-" in run.name]
    (file,) = (run.folder / "samples").glob("*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    samples[7]["scores"]["bits"] = value
    file.write_text(lines_of(samples))
    scores = json.loads((run.folder / "scores.json").read_text())
    for row in scores["rows"]:
        row["value"] = value if row["metric"] == "bits" else row["value"]
    (run.folder / "scores.json").write_text(json.dumps(scores))

    results = gathered()
    cells, lines = results.by_place, {line["left"] + line["right"]: line for line in results.contrasts}
    assert cells["swap", "bits"].value is None and cells["best swap", "bits"].value is None
    assert "no finite score" in cells["swap", "bits"].missing
    assert [choice["chosen"] for choice in results.choices.values()] == [None]
    assert all(lines[pair]["p"] is None and "finite" in lines[pair]["missing"] for pair in ("mathswap", "languageswap"))
    finite = ["mathbase", "languagebase", "languagemath"]
    for key in ("difference", "low", "high", "p"):
        assert [lines[pair][key] for pair in finite] == [before[pair][key] for pair in finite]
    assert [lines[pair]["p_holm"] for pair in finite] == holm([before[pair]["p"] for pair in finite])
    page = write_report(results, tmp_path / "report")
    assert not any(word in page.with_name("cells.md").read_text() for word in ("nan", "inf,", "-inf"))
