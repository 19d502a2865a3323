"""The long table of a report: the answers to each score, aligned by question, and comparisons of
cells over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.report.expression import Key, Plan, evaluate, is_plain_mean, lines_of
from pipeline.stats.contrast import Contrast, contrast, corpus_contrast
from pipeline.stats.statistics import DRAWS, NormalTest, half_weights, halved_means, share_interval
from pipeline.stats.translations import copies_of, corpus_scores, counts_of, drawn_scores
from pipeline.tables.plan import Cell

if TYPE_CHECKING:
    import numpy as np

Weights = Sequence[tuple[float, Cell]]  # cells that are summed


class NoScore(PipelineError):
    """A missing number, with the reason."""


@dataclass
class Frame:
    """The answers under some cells: a row for each line's score, a column for each question.

    rows: the row of each score; answers: shares of 1, or numbers without bounds such as bits
        (`bounded` is False).
    """

    plan: Plan
    cells: Sequence[Cell]
    rows: dict[Key, int]
    answers: np.ndarray
    bounded: bool = True

    @property
    def size(self) -> int:
        """The number of questions."""
        return int(self.answers.shape[1])

    @cached_property
    def means(self) -> np.ndarray:
        return self.answers.mean(axis=1, keepdims=True)

    def halves(self) -> np.ndarray:
        """Return (scores, 2): the mean of each score on the odd and on the even questions."""
        return self.answers @ half_weights(self.size).T

    def halved_draws(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores, draws) of draws of the odd questions, and of draws of the even ones."""
        odd, even = halved_means(self.answers)
        return odd.T, even.T

    def summary(self, row: np.ndarray) -> tuple[float, float]:
        """Return the value of a row of answers, and its variance over draws of questions."""
        lost = 0 if self.bounded or len(row) < 2 else 1
        return float(row.mean()), float(row.var(ddof=lost)) / len(row)

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        if self.bounded:
            return share_interval(value, self.size, variance)
        if self.size < 2 or variance == 0:
            raise NoScore("one value, or the same of all questions, shows no variance")
        return NormalTest(value, math.sqrt(variance), self.size - 1, math.inf).interval()

    def contrast(
        self,
        differences: np.ndarray,
        bound: float,
        estimate: float | None = None,
        draws: np.ndarray | None = None,
    ) -> Contrast:
        """Return the contrast of differences by question (levels ..., N), none of which is above
        `bound`.
        """
        try:
            return contrast(differences, estimate, draws, bound=bound if self.bounded else math.inf)
        except ValueError:
            raise NoScore(
                "one question, or the same difference on all, shows no variance"
            ) from None

    # --- the same for all ---

    def cell(
        self, cell: Cell, choose: np.ndarray, show: np.ndarray, keep: Sequence[str] = ()
    ) -> np.ndarray:
        """Return a cell in the rows of `show`, with the choices that `choose` makes."""

        def row_in(table: np.ndarray, leaf: Cell, score: Any) -> np.ndarray:
            row: np.ndarray = table[self.rows[score, leaf.pair]]
            return row

        return evaluate(self.plan, cell, partial(row_in, choose), partial(row_in, show), keep)

    def split_half(
        self, statistic: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> tuple[float, np.ndarray]:
        """Return the value, on one half of the questions, of what is chosen on the other half.

        As observed, and (draws,) over draws of questions. Both are means of the two directions.

        statistic: (rows that choices use, rows that are shown) -> values, one per column. Raises
        NoScore for a single question, which has no halves.
        """
        if self.size < 2:
            raise NoScore("one question cannot both choose the best and score it")
        halves, (odd, even) = self.halves(), self.halved_draws()
        observed = statistic(halves, halves[:, ::-1])
        return float(observed.mean()), (statistic(odd, even) + statistic(even, odd)) / 2

    def estimate(self, cell: Cell) -> tuple[float, float, float]:
        """Return a cell and its 95 % interval over draws of questions.

        What is chosen (the best configuration, a maximum) is scored on the half of the questions
        that it was not chosen on, and chosen again in each draw. Seeds and experts are treated as
        fixed.
        """
        import numpy as np

        value, variance = self.summary(self.cell(cell, self.means, self.answers))
        if not is_plain_mean(self.plan, cell):
            value, draws = self.split_half(partial(self.cell, cell))
            variance = float(np.var(draws, ddof=1))
        return value, *self.interval(value, variance)


Sentences = list[tuple[str, tuple[tuple[str, str], ...]]]  # (pair, its references and responses)


@dataclass
class CorpusFrame(Frame):
    """A frame of corpus metrics, which are not means over questions.

    The columns of `answers` are the observed value and then one value per draw of sentences. texts:
    the sentences of each row.
    """

    metric: str = ""
    texts: Sequence[Sentences] = ()

    @classmethod
    def of(
        cls, plan: Plan, cells: Sequence[Cell], metric: str, texts: Mapping[Key, Sentences]
    ) -> CorpusFrame:
        import numpy as np

        rows = {key: row for row, key in enumerate(texts)}
        answers = []
        for pairs in texts.values():
            answers.append(
                np.mean(
                    [drawn_scores(metric, pair, sentences) for pair, sentences in pairs], axis=0
                )
            )
        return cls(plan, cells, rows, np.array(answers), metric=metric, texts=list(texts.values()))

    @property
    def size(self) -> int:
        return len(self.texts[0][0][1])

    @cached_property
    def means(self) -> np.ndarray:
        return self.answers[:, :1]

    def resampled(self, copies: np.ndarray) -> np.ndarray:
        """Return (scores, draws) of sentences that occur `copies` (draws, N) times."""
        import numpy as np

        rows = []
        for pairs in self.texts:
            of_pairs = [
                corpus_scores(*counts_of(self.metric, pair, texts), copies) for pair, texts in pairs
            ]
            rows.append(np.mean(of_pairs, axis=0))
        return np.array(rows)

    def halves(self) -> np.ndarray:
        return self.resampled((half_weights(self.size) > 0).astype(float))

    def halved_draws(self) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        draws = []
        for half in (0, 1):
            copies = np.zeros((DRAWS, self.size))
            copies[:, half::2] = copies_of(len(range(half, self.size, 2)), half * DRAWS)
            draws.append(self.resampled(copies))
        return draws[0], draws[1]

    def summary(self, row: np.ndarray) -> tuple[float, float]:
        return float(row[0]), float(row[1:].var(ddof=1))

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        """Return a normal interval.

        The standard error is at least that of one sentence, as in contrasts.
        """
        low, high = NormalTest(value, max(math.sqrt(variance), 1 / self.size)).interval()
        return max(0.0, low), high

    def contrast(
        self,
        differences: np.ndarray,
        bound: float,
        estimate: float | None = None,
        draws: np.ndarray | None = None,
    ) -> Contrast:
        return corpus_contrast(
            differences[..., 0], differences[..., 1:], self.size, estimate, draws
        )


def shared_questions(answers: Iterable[Mapping[Any, Any]]) -> list[Any]:
    """Return the ids that all of these have, sorted. Raises NoScore if there are none."""
    shared = set.intersection(*map(set, answers))
    if not shared:
        raise NoScore("its scores share no question")
    return sorted(shared)


def answers_frame(
    plan: Plan,
    cells: Sequence[Cell],
    answers: Mapping[Key, Mapping[Any, float]],
    bounded: bool = True,
    groups: Mapping[Any, Any] | None = None,
) -> Frame:
    """Return the frame of answers by question, on the questions that all scores of a language
    share.

    groups: question -> what it is about. The questions about one passage are not independent: their
    sum counts as one question, scaled so that the mean stays.
    """
    import numpy as np

    by_language: dict[str, list[Mapping[Any, float]]] = {}
    for (score, pair), of_score in answers.items():
        by_language.setdefault(pair or score.language, []).append(of_score)
    shared = {language: shared_questions(several) for language, several in by_language.items()}
    ids = sorted(set().union(*shared.values()))
    rows = []
    for (score, pair), of_score in answers.items():
        own = shared[pair or score.language]
        rows.append(on_all([of_score[question] for question in own], own, ids))
    matrix = np.array(rows)
    named = [(groups or {}).get(question, question) for question in ids]
    clusters = {group: number for number, group in enumerate(dict.fromkeys(named))}
    if len(clusters) < len(ids):
        places, scale = [clusters[group] for group in named], len(clusters) / len(ids)
        matrix = np.array([scale * np.bincount(places, row, len(clusters)) for row in matrix])
    return Frame(plan, cells, {key: row for row, key in enumerate(answers)}, matrix, bounded)


def on_all(answers: Sequence[float], answered: Sequence[Any], ids: Sequence[Any]) -> np.ndarray:
    """Return answers to some questions as answers to all of `ids`, with the same mean and variance
    of the mean.

    A question that a language lacks counts as its mean. The other answers differ from the mean by
    so much more.
    """
    import numpy as np

    values, index_of = (
        np.array(answers, dtype=float),
        {question: index for index, question in enumerate(ids)},
    )
    if len(answered) == len(ids):
        return values
    row = np.full(len(ids), values.mean())
    row[[index_of[question] for question in answered]] += (
        len(ids) / len(answered) * (values - values.mean())
    )
    return row


# --- comparisons ---


@dataclass
class Comparison:
    """Left minus `factor` times right, each a weighted sum of cells, over the same questions.

    axes: those that are a sample.
    """

    frame: Frame
    left: Weights
    right: Weights
    axes: Sequence[str] = ()
    factor: float = 1.0

    @property
    def bound(self) -> float:
        """The largest possible difference; 2 for a gain, the difference of two differences."""
        weights = [weight for weight, _ in self.left] + [
            -self.factor * weight for weight, _ in self.right
        ]
        gained = math.fsum(weight for weight in weights if weight > 0)
        lost = math.fsum(-weight for weight in weights if weight < 0)
        return round(max(gained, lost), 12)

    def side(
        self, weights: Weights, choose: np.ndarray, show: np.ndarray, keep: Sequence[str] = ()
    ) -> Any:
        return sum(weight * self.frame.cell(cell, choose, show, keep) for weight, cell in weights)

    def difference(
        self, choose: np.ndarray, show: np.ndarray, keep: Sequence[str] = ()
    ) -> np.ndarray:
        left, right = (
            self.side(self.left, choose, show, keep),
            self.side(self.right, choose, show, keep),
        )
        difference: np.ndarray = left - self.factor * right
        return difference

    @property
    def values(self) -> tuple[float, float]:
        """(left, right) as observed."""
        means = self.frame.means
        return float(self.side(self.left, means, means)[0]), float(
            self.side(self.right, means, means)[0]
        )

    def differences(self) -> np.ndarray:
        """Return left minus right by question, (levels of each sampled axis ..., N), without axes
        of one value.
        """
        difference = self.difference(self.frame.means, self.frame.answers, self.axes)
        levels = [size for size in difference.shape[:-1] if size > 1]
        return difference.reshape([*levels, difference.shape[-1]])

    def contrast(self) -> Contrast:
        """Return the contrast of left minus right.

        What is chosen is scored on the half that it was not chosen on.
        """
        estimate, draws = None, None
        if not all(is_plain_mean(self.frame.plan, cell) for cell in self.frame.cells):
            estimate, draws = self.frame.split_half(self.difference)
        return self.frame.contrast(self.differences(), self.bound, estimate, draws)


def varied_axes(plan: Plan, cells: Sequence[Cell], axes: Sequence[str]) -> list[str]:
    """Return those of some axes of which a cell has several values: `Comparison.differences` keeps
    them.
    """
    varied = []
    for axis in axes:
        levels: dict[int, set[Any]] = {}
        for line in lines_of(plan, cells):
            levels.setdefault(id(line.leaf), set()).add(line.item.at.get(axis))
        if any(len(values - {None}) > 1 for values in levels.values()):
            varied.append(axis)
    return varied
