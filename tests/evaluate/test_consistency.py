"""The choice by agreement with neighbours, by hand, without right answers; and the negative control, by norms."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planned import plan

from pipeline.config.stages import EvalStage
from pipeline.errors import PipelineError
from pipeline.evaluate.consistency import agreement, consistencies, neighbours, read_answers
from pipeline.merge import norms
from pipeline.merge.merge import open_merge
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.soup import Soup
from pipeline.models.checkpoint import Checkpoint
from pipeline.tables import planned_runs
from pipeline.tables.planned_runs import Planning


def answers(text: str) -> dict[tuple[str, int], str]:
    return {("mgsm.sw", index): answer for index, answer in enumerate(text.split())}


def test_agreement_by_hand() -> None:
    assert agreement(answers("7 8 9 1"), answers("7 8 0 1 5")) == 0.75  # of the four shared questions
    assert agreement(answers("[invalid] 8"), answers("[invalid] 8")) == 0.5  # nothing extracted agrees with nothing
    with pytest.raises(PipelineError, match="share no question"):
        agreement(answers("7"), {("mgsm.te", 0): "7"})


def test_neighbours_differ_by_one_place_on_one_axis() -> None:
    points = [(bottom, top) for bottom in (2, 4, 8) for top in ("a", "b")]
    near = neighbours(points)
    assert near[2, "a"] == [(4, "a"), (2, "b")] and near[4, "b"] == [(2, "b"), (8, "b"), (4, "a")]
    assert near[8, "b"] == [(4, "b"), (8, "a")]


def test_the_most_consistent_by_hand() -> None:
    """Agreements 2/4, 3/4 and 4/4 along the axis: means 0.5, 0.625, 0.875, 1."""
    four = {(0.2,): ["1 1 1 1"], (0.4,): ["1 1 2 2"], (0.6,): ["1 2 2 2"], (0.8,): ["1 2 2 2"]}
    found = consistencies({point: [answers(text) for text in texts] for point, texts in four.items()})
    assert found == {(0.2,): 0.5, (0.4,): 0.625, (0.6,): 0.875, (0.8,): 1.0}
    two = {(1,): ["1 1", "5 5"], (2,): ["1 2", "5 5"]}  # two evaluations a point: their mean
    assert set(consistencies({k: [answers(text) for text in v] for k, v in two.items()}).values()) == {0.75}
    with pytest.raises(PipelineError, match=r"\(1,\) has no neighbour: give the axis two values"):
        consistencies({(1,): [answers("1")]})


def test_targets_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    rows = [{"doc_id": 3, "extracted": "7"}, {"doc_id": 5, "extracted": ""}]  # no target, no score
    (tmp_path / "samples/mgsm.sw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_answers(tmp_path) == {("mgsm.sw", 3): "7", ("mgsm.sw", 5): ""}
    (tmp_path / "samples/mgsm.sw.jsonl").write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(PipelineError, match="has no answers"):
        read_answers(tmp_path)


# ---------------------------------------------------------------------------------------------------- in a table

TABLE = """
name: mine
axes: {b: [2, 4, 6]}
runs:
  math: {stage: sft, expert: math}
  language: {stage: sft, expert: sw}
  swap: {merge: layer_swap, merge.math: math, merge.language: language, merge.bottom_layers: "{b}"}
score: {eval: mgsm_2shot, in: sw}
columns: {acc: {}}
rows:
  best: {run: swap, best: [b]}
  consistent: {run: swap, best: [b], choose: consistency, by: {eval.split: dev}}
  norms: {run: swap, best: [b], choose: norms}
"""


def test_rules_of_a_table() -> None:
    """By scores on the shown questions the choice stays open; the others show the chosen model alone, and norms score
    nothing to choose."""
    made = plan(TABLE)
    items = {row: made.cells[row, "acc"].items[0] for row in made.rows}
    assert [set(item.readings[0]) for item in items.values()] == [{(2,), (4,), (6,)}, {()}, {()}]
    rules = {choice.rule: choice for choice in made.choices.values()}
    assert set(rules) == {"scores", "consistency", "norms"} and len(made.choices) == 3
    asked = {score for scores in rules["consistency"].candidates.values() for score in scores}
    assert asked <= set(made.scores) and all(dict(score.words)["eval.split"] == "dev" for score in asked)
    alone = plan(TABLE.replace("  best: {run: swap, best: [b]}\n", ""))
    assert sum(score.model in alone.specs for score in alone.scores) == 3  # for consistency: norms score none


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("choose: norms", "choose: norm", "choose=norm: give scores, consistency, norms"),
        ("best: [b], choose: norms", "b: 2, choose: norms", "choose is about what best chooses"),
        ("b: [2, 4, 6]", "b: [2]", "choose=consistency compares neighbours: give b two values"),
    ],
)
def test_rules_that_cannot_be_applied(old: str, new: str, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        plan(TABLE.replace(old, new))


def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str = "mgsm") -> tuple[Planning, dict[str, str]]:
    """A planning whose evaluations are folders of made-up answers; their keys by rule."""
    made = plan(TABLE)
    texts = {2: "1 1 1 1", 4: "1 1 2 2", 6: "1 2 2 2"}

    def evaluation(score):
        counts = [b for b in texts if f"b={b}" in score.model]
        folder = tmp_path / f"b{counts[0]}"
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        rows = [{"doc_id": i, "extracted": a, "target": "1"} for i, a in enumerate(texts[counts[0]].split())]
        (folder / "samples/mgsm.sw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = SimpleNamespace(eval=SimpleNamespace(tasks=[SimpleNamespace(task=task)]), merge=object())
        return SimpleNamespace(folder=folder, config=settings, parents={}, hash=str(counts[0]))

    found = object.__new__(Planning)
    found.plan, found._winners, found._values = made, {}, {}
    monkeypatch.setattr(Planning, "evaluation_of", lambda self, score: evaluation(score))
    monkeypatch.setattr(planned_runs, "read_manifest", lambda folder: True)
    return found, {choice.rule: key for key, choice in made.choices.items()}


def test_the_choices_of_a_table_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Answers agree by 2/4 and 3/4: 0.5, 0.625, 0.75. Norms of 0.5, 0.9 and 1.3 times the experts': the second."""
    found, keys = planned(monkeypatch, tmp_path)
    assert found.chosen_candidate(keys["consistency"]) == (6,)
    assert found._values[keys["consistency"]] == {(2,): 0.5, (4,): 0.625, (6,): 0.75}
    monkeypatch.setattr(norms, "relative_norm", lambda run: {"2": 0.5, "4": 0.9, "6": 1.3}[run.hash])
    assert found.chosen_candidate(keys["norms"]) == (4,)


def test_bits_have_no_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, keys = planned(monkeypatch, tmp_path, task="held_out")
    with pytest.raises(PipelineError, match="choose=consistency: held_out has no answers"):
        found.chosen_candidate(keys["consistency"])


def test_the_norm_of_a_merge(models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against whole tensors: of a soup, and of a swap, which is layers of one and layers of the other."""
    base, math, language = (Checkpoint.open(folder) for folder in models["llama"])

    def vector(tensor) -> torch.Tensor:
        return torch.cat([(tensor(name).double() - base.tensor(name).double()).flatten() for name in base.names])

    experts = torch.stack([vector(math.tensor), vector(language.tensor)]).norm(dim=1).mean()
    swap = LayerSwap(math="a", language="b", bottom_layers=1, top_layers=1)
    for config in (Soup(experts=["a", "b"]), swap):
        merge = open_merge(config, dict(zip(config.references(), (math, language), strict=True)))
        monkeypatch.setattr(norms, "merge_of", lambda run, merge=merge: merge)
        parents = {"base": SimpleNamespace(folder=models["llama"][0])}
        config = EvalStage(stage="eval", merge=config)
        run = SimpleNamespace(hash=merge.config.method, config=config, parents=parents, runs_dir=tmp_path)
        expected = vector(merge.merged).norm() / experts
        assert norms.relative_norm(run) == pytest.approx(expected.item(), rel=1e-2)  # merged() is rounded to bfloat16
    monkeypatch.setattr(norms, "merge_of", None)  # measured once, it outlives the weights
    assert norms.relative_norm(run) == pytest.approx(expected.item(), rel=1e-2)
