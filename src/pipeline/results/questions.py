"""A table's cells question by question, from stored answers: what the cells' numbers are when problems are drawn again.

One draw of problem ids goes through all that a contrast is made of: every language, seed and model, and every
candidate of a choice, which is made again in each draw.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.report.stats.statistics import (
    DRAWS,
    NormalTest,
    half_weights,
    halved_means,
    resampled_means,
    share_interval,
)
from pipeline.report.stats.translations import CORPUS_METRICS, copies_of, corpus_scores, counts_of, drawn_scores
from pipeline.results.cell_values import NoScore, Outcome
from pipeline.runs.manifest import read_manifest
from pipeline.tables.bound import BoundTable
from pipeline.tables.plan import Cell, Item, ScoreRef, TablePlan, Values, fold, levels

if TYPE_CHECKING:
    import numpy as np

Vector = dict[Any, float]  # doc_id -> score
Translations = dict[Any, tuple[str, str]]  # doc_id -> (reference, response)
Both = tuple["np.ndarray", "np.ndarray"]  # (what choices are made by, what is shown), a value a draw
TAIL = re.compile(r'"scores": (\{[^{}]*\})\}\s*$')
HEAD = re.compile(r'\{"doc_id": (\d+),')


@dataclass
class StoredAnswers:
    """The stored answers under a table's scores. draws: of each bootstrap over their questions."""

    table: BoundTable
    draws: int = DRAWS
    _kept: dict[tuple[ScoreRef, str, str | None], Vector] = field(default_factory=dict)
    _texts: dict[tuple[ScoreRef, str | None], dict[str, Translations]] = field(default_factory=dict)

    def of(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        """doc_id -> score of each question. NoScore where it is not made, or kept no such answers."""
        if (score, metric, pair) not in self._kept:
            self._kept[score, metric, pair] = self.read(score, metric, pair)
        return self._kept[score, metric, pair]

    def read(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        (path,) = self.files(score, pair or score.language)
        return answers_of(path, metric)

    def facts(self, cell: Cell) -> Values:
        """What gives the number that each run under a cell of a fact recorded. NoScore where one is not made."""
        return Outcome(self.table).values(cell, {})

    def files(self, score: ScoreRef, language: str) -> list[Path]:
        """Its samples files; where: a language, a pair, or * for all of them."""
        run = self.table.evaluations.get(score)
        if run is None:
            raise NoScore(self.table.problems.get(score, "a choice waits for its candidates' scores"))
        if read_manifest(run.folder) is None:
            raise NoScore(f"{run.name} is not made yet")
        task = run.config.eval.tasks[0].task
        paths = sorted((run.folder / "samples").glob(f"{task}.{language}.jsonl"))
        if not paths:
            raise NoScore(f"{run.name} kept no answers of {task}.{language}")
        return paths

    def translations(self, score: ScoreRef, pair: str | None) -> dict[str, Translations]:
        """Pair -> doc_id -> (reference, response): of one pair, or of all that it was scored on."""
        if (score, pair) not in self._texts:
            self._texts[score, pair] = {
                path.stem.partition(".")[2]: {
                    sample["doc_id"]: (sample["target"], sample["extracted"]) for sample in read_jsonl(path)
                }
                for path in self.files(score, pair or "*")
            }
        return self._texts[score, pair]


def answers_of(path: Path, metric: str) -> Vector:
    """doc_id -> score of one samples file. Raises PipelineError for a broken line, or one without the metric.

    Of a line as evaluations write it only the ends are parsed: the prompt between them is nearly all of it.
    """
    scores: Vector = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            head, tail = HEAD.match(line), TAIL.search(line[-4000:])
            try:
                if head and tail:
                    scores[int(head[1])] = float(json.loads(tail[1])[metric])
                else:
                    sample = json.loads(line)
                    scores[sample["doc_id"]] = float(sample["scores"][metric])
            except (ValueError, KeyError, TypeError):
                place = f"{path.parents[1].name}/samples/{path.name}, line {number}"
                raise PipelineError(
                    f"{place} is cut off or has no {metric}: make the run again with redo=true"
                ) from None
    return scores


@dataclass
class Questions:
    """Some cells of a table and the answers under them, of the questions that all of them were asked."""

    plan: TablePlan
    answers: StoredAnswers
    cells: Sequence[Cell]
    metric: str

    @cached_property
    def scores(self) -> list[tuple[ScoreRef, str | None]]:
        """All that is shown, and all that choices among shown candidates are made by."""
        found: dict[tuple[ScoreRef, str | None], None] = {}
        for cell in (leaf for cell_ in self.cells for leaf in leaves(self.plan, cell_)):
            for item in cell.items:
                found |= dict.fromkeys((score, cell.pair) for reading in item.readings for score in reading.values())
                if chooses(item):
                    candidates = self.plan.choices[item.choice or ""].candidates.values()
                    found |= dict.fromkeys((score, cell.pair) for scores in candidates for score in scores)
        return list(found)

    @cached_property
    def vectors(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        """Each score's answers (N,), aligned by problem id over languages and models. NoScore: one is missing."""
        import numpy as np

        answers = {key: self.answers.of(key[0], self.metric, key[1]) for key in self.scores}
        shared = set.intersection(*(set(vector) for vector in answers.values()))
        if not shared:
            raise NoScore("its scores share no question")
        ids = sorted(shared)
        return {key: np.array([vector[doc_id] for doc_id in ids]) for key, vector in answers.items()}

    def values(self, weigh: Callable[[np.ndarray], np.ndarray]) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        """The mean of each score in each draw; weigh: (S, N) answers -> (draws, S) means."""
        import numpy as np

        means = weigh(np.stack(list(self.vectors.values())))
        return {key: means[:, at] for at, key in enumerate(self.vectors)}

    @cached_property
    def observed(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        return self.values(lambda stacked: stacked.mean(axis=1)[None])

    @cached_property
    def draws(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        return self.values(lambda stacked: resampled_means(stacked, self.answers.draws))

    @cached_property
    def by_half(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        """Of the odd and of the even problems."""
        if self.size < 2:
            raise NoScore("one question cannot both choose the best and score it")
        return self.values(lambda stacked: half_weights(stacked.shape[1]) @ stacked.T)

    @cached_property
    def draws_by_half(self) -> tuple[dict[tuple[ScoreRef, str | None], np.ndarray], ...]:
        """Draws of the odd problems, and draws of the even ones."""
        odd, even = halved_means(list(self.vectors.values()), self.answers.draws)
        return tuple({key: means[:, at] for at, key in enumerate(self.vectors)} for means in (odd, even))

    @property
    def size(self) -> int:
        return len(next(iter(self.vectors.values())))

    def plain(self, cell: Cell) -> tuple[float, float]:
        """A cell, what is chosen in it as observed, and its variance over draws of problems."""
        vector = by_question(self, cell, ())
        return float(vector.mean()), float(vector.var()) / len(vector)

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        return share_interval(value, self.size, variance)

    def halved(self, of: Callable[[dict, dict], np.ndarray]) -> tuple[float, np.ndarray]:
        """What is chosen on one half of the problems is worth on the other, the mean of both ways: as observed, and
        (draws,) over draws of problems. of: by what is chosen, and what is shown -> a value a draw. NoScore: one
        problem has no halves."""
        half = self.by_half
        observed = of(half, {key: means[::-1] for key, means in half.items()})
        odd, even = self.draws_by_half
        return float(observed.mean()), (of(odd, even) + of(even, odd)) / 2


Sentences = list[tuple[str, tuple[tuple[str, str], ...]]]  # (pair, its references and responses)


class Corpora(Questions):
    """The same of corpus metrics, which are no means over questions: `vectors` are what is observed, and then draws."""

    @cached_property
    def texts(self) -> dict[tuple[ScoreRef, str | None], Sentences]:
        """Each score's sentences, of each of its pairs, aligned by problem id over all of them."""
        translations = {key: self.answers.translations(*key) for key in self.scores}
        shared = set.intersection(*(set(texts) for pairs in translations.values() for texts in pairs.values()))
        if not shared:
            raise NoScore("its scores share no question")
        ids = sorted(shared)
        return {
            key: [(pair, tuple(texts[doc_id] for doc_id in ids)) for pair, texts in pairs.items()]
            for key, pairs in translations.items()
        }

    @property
    def size(self) -> int:
        return len(next(iter(self.texts.values()))[0][1])

    def plain(self, cell: Cell) -> tuple[float, float]:
        import numpy as np

        observed, *draws = by_question(self, cell, ())
        return float(observed), float(np.var(draws, ddof=1))

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        """Normal; the standard error is that of one sentence at least, as in contrasts."""
        low, high = NormalTest(value, max(math.sqrt(variance), 1 / self.size)).interval()
        return max(0.0, low), high

    def of(self, copies: np.ndarray) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        """The score of each in sets that hold each sentence so many times. copies: (draws, N)."""
        import numpy as np

        return {
            key: np.mean([corpus_scores(*counts_of(self.metric, *pair), copies) for pair in pairs], axis=0)
            for key, pairs in self.texts.items()
        }

    @cached_property
    def vectors(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        import numpy as np

        return {
            key: np.mean([drawn_scores(self.metric, *pair) for pair in pairs], axis=0)
            for key, pairs in self.texts.items()
        }

    @cached_property
    def observed(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        return {key: vector[:1] for key, vector in self.vectors.items()}

    @cached_property
    def draws(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        return {key: vector[1:] for key, vector in self.vectors.items()}

    @cached_property
    def by_half(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        if self.size < 2:
            raise NoScore("one question cannot both choose the best and score it")
        return self.of((half_weights(self.size) > 0).astype(float))

    @cached_property
    def draws_by_half(self) -> tuple[dict[tuple[ScoreRef, str | None], np.ndarray], ...]:
        import numpy as np

        by_half = []
        for half in (0, 1):
            copies = np.zeros((DRAWS, self.size))
            copies[:, half::2] = copies_of(len(range(half, self.size, 2)), half * DRAWS)
            by_half.append(self.of(copies))
        return tuple(by_half)


def questions_of(plan: TablePlan, answers: StoredAnswers, cells: Sequence[Cell], metric: str) -> Questions:
    return (Corpora if metric in CORPUS_METRICS else Questions)(plan, answers, cells, metric)


def leaves(plan: TablePlan, cell: Cell) -> Iterator[Cell]:
    """The cells that hold items: a row that averages rows stands for those."""
    if not cell.of:
        yield cell
    for row in cell.of:
        yield from leaves(plan, plan.cells[row, cell.column])


def chooses(item: Item) -> bool:
    """Whether an item's candidates are all shown, so that their choice can be made again; one made elsewhere stands."""
    return item.choice is not None and any(() not in reading for reading in item.readings)


def linear(plan: TablePlan, cell: Cell) -> bool:
    """Whether a cell is a plain mean of its answers."""
    steps = [how for leaf in leaves(plan, cell) for how, _ in leaf.reduce] + [how for how, _ in cell.reduce]
    return all(how == "mean" for how in steps) and not any(
        chooses(item) for leaf in leaves(plan, cell) for item in leaf.items
    )


# ---------------------------------------------------------------------------------------------------- in draws


def pick(parts: Sequence[Both]) -> Both:
    """The largest of several in each draw, by what choices are made by."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    choosing, shown = (np.stack(side, axis=1) for side in zip(*parts, strict=True))
    at = np.arange(len(choosing)), np.argmax(choosing, axis=1)
    return choosing[at], shown[at]


def average(parts: Sequence[Both]) -> Both:
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    choosing, shown = (np.mean(side, axis=0) for side in zip(*parts, strict=True))
    return choosing, shown


def lowest(parts: Sequence[Both]) -> Both:
    choosing, shown = pick([(-choosing, -shown) for choosing, shown in parts])
    return -choosing, -shown


REDUCERS: dict[str, Callable[[Sequence[Both]], Both]] = {"mean": average, "max": pick, "min": lowest}


def drawn(plan: TablePlan, cell: Cell, choosing: dict, shown: dict) -> Both:
    """A cell in each draw, as cells.value has it in one: choices, maxima and minima by `choosing`, numbers of `shown`.

    Both the same: a bootstrap that chooses again in each draw. The halves the other way round: split-half.
    """
    import numpy as np

    winners: dict[str | None, np.ndarray] = {}  # the winner of each choice, which many items share

    def one(cell: Cell, item: Item) -> Both:
        if not chooses(item):
            winner = next(iter(item.readings[0]))
            return average([(choosing[r[winner], cell.pair], shown[r[winner], cell.pair]) for r in item.readings])
        candidates = plan.choices[item.choice or ""].candidates
        if item.choice not in winners:
            means = [np.mean([choosing[s, cell.pair] for s in of], axis=0) for of in candidates.values()]
            winners[item.choice] = np.argmax(np.stack(means, axis=1), axis=1)
        at = np.arange(len(winners[item.choice])), winners[item.choice]

        def of_winner(values: dict, reading: dict) -> np.ndarray:
            if () in reading:
                return values[reading[()], cell.pair]
            return np.stack([values[reading[name], cell.pair] for name in candidates], axis=1)[at]

        return average([(of_winner(choosing, reading), of_winner(shown, reading)) for reading in item.readings])

    return fold(plan, cell, one, lambda how, parts: REDUCERS[how](parts))


# ---------------------------------------------------------------------------------------------------- by question


def by_question(questions: Questions, cell: Cell, axes: Sequence[str]) -> np.ndarray:
    """A cell's answers (levels of each axis ..., N): what it is reduced over is reduced, but for `axes`.

    An axis that the cell does not have, or has one value of, is of length 1. Choices and maxima are those observed.
    """
    import numpy as np

    plan = questions.plan
    if cell.of:
        parts = [by_question(questions, plan.cells[row, cell.column], axes) for row in cell.of]
        return reduced(cell.reduce[0][0], parts)

    def one(item: Item) -> np.ndarray:
        key: Any = next(iter(item.readings[0]))
        if chooses(item):
            candidates = plan.choices[item.choice or ""].candidates
            means = {k: np.mean([questions.observed[s, cell.pair] for s in of]) for k, of in candidates.items()}
            key = max(means, key=means.__getitem__)
        vectors = [questions.vectors[reading[() if () in reading else key], cell.pair] for reading in item.readings]
        return vectors[0] if len(vectors) == 1 else np.mean(vectors, axis=0)

    return by_level(cell, axes, one)


def by_level(cell: Cell, axes: Sequence[str], one: Callable[[Item], np.ndarray]) -> np.ndarray:
    """(levels of each axis ..., N) of the vectors (N,) of a cell's items, reduced over all but `axes`."""
    import numpy as np

    left = levels(cell, lambda _, item: one(item), reduced, axes)
    places = [list(dict.fromkeys(at[axis] for at, _ in left if axis in at)) or [None] for axis in axes]
    array = np.full((*map(len, places), len(left[0][1])), np.nan)
    for at, vector in left:
        array[tuple(of.index(at.get(axis)) for axis, of in zip(axes, places, strict=True))] = vector
    return array


def reduced(how: str, vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of several vectors; or the one whose mean is the largest (max) or the least (min)."""
    import numpy as np

    if len(vectors) == 1:
        return vectors[0]
    if how == "mean":
        return np.mean(np.broadcast_arrays(*vectors), axis=0)
    return (max if how == "max" else min)(vectors, key=np.mean)
