"""Questions about one passage count as one: Belebele asks some 900 questions about 488 passages."""

from typing import Any

import numpy as np
import pytest
from planned import plan

from pipeline.evaluate.records import passage_group
from pipeline.report.contrasts import compared_pairs, measure_pairs
from pipeline.report.load.answers import answers_of
from pipeline.report.stored import StoredAnswers
from pipeline.tables.plan import ScoreRef, TablePlan

TABLE = """
name: mine
runs: {one: {checkpoint: hub:a/one}, two: {checkpoint: hub:a/two}}
score: {eval: belebele_0shot, in: sw}
columns: {one: one, two: two}
compare: {one: [two]}
"""


class Answers(StoredAnswers):
    """Of two equal models, each of which is better or worse on all questions about a passage."""

    def __init__(
        self, plan: TablePlan, world: int, grouped: bool, passages: int = 40, each: int = 4
    ) -> None:
        self.grouped, self.shape = grouped, (passages, each)
        self.rng = np.random.default_rng(world)

    def scores_by_question(
        self, score: ScoreRef, metric: str, pair: str | None
    ) -> dict[Any, float]:
        rates = self.rng.uniform(0.1, 0.9, (self.shape[0], 1))
        return dict(enumerate((self.rng.random(self.shape) < rates).astype(float).ravel().tolist()))

    def groups_of(self, score: ScoreRef, pair: str | None) -> dict[Any, Any]:
        return (
            {doc: doc // self.shape[1] for doc in range(self.shape[0] * self.shape[1])}
            if self.grouped
            else {}
        )


def test_the_difference_stays_and_its_level_is_kept() -> None:
    there, lines = plan(TABLE), {}
    pairs = compared_pairs(there)
    for grouped in (True, False):
        lines[grouped] = [
            measure_pairs(there, Answers(there, world, grouped), pairs)[0] for world in range(150)
        ]
    for grouped, alone in zip(lines[True], lines[False], strict=True):
        assert grouped["difference"] == pytest.approx(alone["difference"]) and grouped["n"] == 40
    false = {grouped: sum(line["p"] < 0.05 for line in found) for grouped, found in lines.items()}
    assert false[True] <= 15 and false[False] > 20  # of 150


def test_a_passage_is_its_text_without_blanks_around_it() -> None:
    lines = [
        {"doc_id": at, "prompt": "", "group": passage_group(f"Passage {at // 2}.")}
        for at in range(4)
    ]
    groups = answers_of(("run", "belebele", "sw"), lines).groups
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert (
        passage_group("The dog ran. ")
        == passage_group("The dog ran.")
        != passage_group("The cat sat.")
    )
