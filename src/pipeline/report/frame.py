"""The answers to a table's scores, aligned by question, and comparisons of cells over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.report.expression import Key, evaluate, is_plain_mean
from pipeline.stats.contrast import Contrast, contrast, corpus_contrast
from pipeline.stats.statistics import NormalTest, half_weights, halved_means, share_interval
from pipeline.stats.translations import drawn_scores
from pipeline.tables.plan import Cell, TablePlan

if TYPE_CHECKING:
    import numpy as np

NO_HALVES = "the best of several has no split-half estimate in BLEU and chrF++"
Weights = Sequence[tuple[float, Cell]]  # cells that are summed
Translations = Mapping[Any, tuple[str, str]]  # doc_id -> (reference, response)


class NoScore(PipelineError):
    """A missing number, with the reason."""


@dataclass
class Frame:
    """The answers under some cells: a row for each line's score, a column for each question.

    Attributes:
        rows: The row of each score.
        answers: Shares of 1, or numbers without bounds such as bits (`bounded` is False).
    """

    plan: TablePlan
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

    def contrast(
        self,
        differences: np.ndarray,
        bound: float,
        estimate: float | None = None,
        draws: np.ndarray | None = None,
    ) -> Contrast:
        """Return the contrast of differences by question.

        Args:
            differences: (levels ..., N)
            bound: The largest possible difference.
            estimate: As in `stats.contrast.contrast`.
            draws: As `drawn` in `stats.contrast.contrast`.
        """
        if not self.bounded:
            bound = math.inf
        try:
            return contrast(differences, estimate, draws, bound=bound)
        except ValueError:
            raise NoScore(
                "one question, or the same difference on all questions, shows no variance"
            ) from None

    # --- the same for all ---

    def cell(
        self, cell: Cell, choose: np.ndarray, show: np.ndarray, keep: Sequence[str] = ()
    ) -> np.ndarray:
        """Return a cell computed from the rows `show`, with choices made on the rows `choose`."""

        def row_in(table: np.ndarray, score: Any) -> np.ndarray:
            row: np.ndarray = table[self.rows[score, cell.pair]]
            return row

        return evaluate(self.plan, cell, partial(row_in, choose), partial(row_in, show), keep)

    def split_half(
        self, statistic: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> tuple[float, np.ndarray]:
        """Choose on one half of the questions, and return the value on the other half.

        Returns the observed value, and its values in draws of questions (draws,). Both are means of
        the two directions.

        Args:
            statistic: (rows that choices use, rows that are shown) -> values, one per column.

        Raises:
            NoScore: For a single question, which has no halves.
        """
        if self.size < 2:
            raise NoScore("one question cannot both choose the best candidate and score it")
        halves = self.answers @ half_weights(self.size).T  # means of the odd and of the even ones
        odd, even = (draws.T for draws in halved_means(self.answers))
        observed = statistic(halves, halves[:, ::-1])
        return float(observed.mean()), (statistic(odd, even) + statistic(even, odd)) / 2

    def estimate(self, cell: Cell) -> tuple[float, float, float]:
        """Return a cell and its 95 % interval over draws of questions.

        A choice (the best configuration, a maximum) is scored on the half of the questions that it
        was not made on, and repeated in each draw. Seeds and experts are treated as fixed.
        """
        import numpy as np

        row = self.cell(cell, self.means, self.answers)
        value = float(row.mean())
        ddof = 0 if self.bounded or self.size < 2 else 1
        variance = float(row.var(ddof=ddof)) / self.size
        if not is_plain_mean(cell):
            value, draws = self.split_half(partial(self.cell, cell))
            variance = float(np.var(draws, ddof=1))
        if self.bounded:
            return value, *share_interval(value, self.size, variance)
        if self.size < 2 or variance == 0:
            raise NoScore("one question, or the same value on all questions, shows no variance")
        test = NormalTest(value, math.sqrt(variance), self.size - 1, math.inf)
        return value, *test.interval()


@dataclass
class CorpusFrame(Frame):
    """A frame of corpus metrics, which are not means over questions.

    The columns of `answers` are the observed value, and then one value per draw of sentences.

    Attributes:
        sentences: The number of sentences.
    """

    sentences: int = 0

    @property
    def size(self) -> int:
        return self.sentences

    @cached_property
    def means(self) -> np.ndarray:
        return self.answers[:, :1]

    def split_half(
        self, statistic: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> tuple[float, np.ndarray]:
        raise NoScore(NO_HALVES)

    def estimate(self, cell: Cell) -> tuple[float, float, float]:
        """Return a cell and its normal interval.

        The standard error is at least one sentence's, as in contrasts.
        """
        if not is_plain_mean(cell):
            raise NoScore(NO_HALVES)
        row = self.cell(cell, self.means, self.answers)
        value = float(row[0])
        error = max(math.sqrt(float(row[1:].var(ddof=1))), 1 / self.size)
        low, high = NormalTest(value, error).interval()
        return value, max(0.0, low), high

    def contrast(
        self,
        differences: np.ndarray,
        bound: float,
        estimate: float | None = None,
        draws: np.ndarray | None = None,
    ) -> Contrast:
        observed, drawn = differences[..., 0], differences[..., 1:]
        return corpus_contrast(observed, drawn, self.size)


def shared_questions(answers: Iterable[Mapping[Any, Any]]) -> list[Any]:
    """Return the sorted ids that all of these answers have.

    Raises:
        NoScore: If they share no id.
    """
    shared = set.intersection(*map(set, answers))
    if not shared:
        raise NoScore("its scores share no question")
    return sorted(shared)


def corpus_matrix(
    metric: str, translations: Mapping[Key, Mapping[str, Translations]]
) -> tuple[np.ndarray, int]:
    """Return the rows of a `CorpusFrame`, and the number of sentences that all scores share.

    `translations` has the sentences of each score, by pair of languages.
    """
    import numpy as np

    ids = shared_questions(chain.from_iterable(pairs.values() for pairs in translations.values()))
    rows = []
    for pairs in translations.values():
        of_pairs = []
        for pair, texts in pairs.items():
            sentences = tuple(texts[question] for question in ids)
            of_pairs.append(drawn_scores(metric, pair, sentences))
        rows.append(np.mean(of_pairs, axis=0))
    return np.array(rows), len(ids)


def answer_matrix(
    answers: Mapping[Key, Mapping[Any, float]], groups: Mapping[Any, Any]
) -> np.ndarray:
    """Return the rows of a `Frame`, on the questions that all scores of a language share.

    Args:
        answers: The answers of each score, by question.
        groups: question -> the passage that it is about. Questions about one passage are not
            independent: their sum counts as one question, scaled so that the mean is unchanged.
    """
    import numpy as np

    by_language: dict[str, list[Mapping[Any, float]]] = {}
    for (score, pair), of_score in answers.items():
        by_language.setdefault(pair or score.language, []).append(of_score)
    shared = {}
    for language, of_language in by_language.items():
        shared[language] = shared_questions(of_language)
    ids = sorted(set().union(*shared.values()))
    rows = []
    for (score, pair), of_score in answers.items():
        answered = shared[pair or score.language]
        rows.append(on_all([of_score[question] for question in answered], answered, ids))
    matrix = np.array(rows)
    if groups:
        matrix = sum_groups(matrix, [groups.get(question, question) for question in ids])
    return matrix


def sum_groups(answers: np.ndarray, groups: Sequence[Any]) -> np.ndarray:
    """Return the sum of the answers to each group of questions, scaled to the same mean."""
    import numpy as np

    number_of = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    n = len(number_of)
    if n == len(groups):
        return answers
    numbers = [number_of[group] for group in groups]
    scale = n / len(groups)
    return np.array([scale * np.bincount(numbers, row, n) for row in answers])


def on_all(answers: Sequence[float], answered: Sequence[Any], ids: Sequence[Any]) -> np.ndarray:
    """Return answers to some questions as answers to all of `ids`.

    The mean and the variance of the mean are unchanged. A question without an answer gets the mean.
    To keep the variance, the distances of the other answers from the mean are scaled up.
    """
    import numpy as np

    values = np.array(answers, dtype=float)
    if len(answered) == len(ids):
        return values
    index_of = {question: index for index, question in enumerate(ids)}
    indices = [index_of[question] for question in answered]
    mean = values.mean()
    row = np.full(len(ids), mean)
    row[indices] += len(ids) / len(answered) * (values - mean)
    return row


# --- comparisons ---


@dataclass
class Comparison:
    """Left minus `factor` times right, each a weighted sum of cells, over the same questions.

    Attributes:
        axes: The sampled axes.
        bound: The largest possible difference; 2 for the difference of two differences.
    """

    frame: Frame
    left: Weights
    right: Weights
    axes: Sequence[str] = ()
    factor: float = 1.0
    bound: float = 1.0

    def side(
        self, weights: Weights, choose: np.ndarray, show: np.ndarray, keep: Sequence[str] = ()
    ) -> Any:
        parts = [weight * self.frame.cell(cell, choose, show, keep) for weight, cell in weights]
        return sum(parts)

    def difference(
        self, choose: np.ndarray, show: np.ndarray, keep: Sequence[str] = ()
    ) -> np.ndarray:
        left = self.side(self.left, choose, show, keep)
        right = self.side(self.right, choose, show, keep)
        difference: np.ndarray = left - self.factor * right
        return difference

    @property
    def values(self) -> tuple[float, float]:
        """The observed values of left and right."""
        means = self.frame.means
        left = self.side(self.left, means, means)
        right = self.side(self.right, means, means)
        return float(left[0]), float(right[0])

    @cached_property
    def by_level(self) -> np.ndarray:
        """Left minus right by question: (levels of each axis ..., N)."""
        return self.difference(self.frame.means, self.frame.answers, self.axes)

    @property
    def varied(self) -> list[str]:
        """The sampled axes that have several values in a cell."""
        levels = zip(self.axes, self.by_level.shape, strict=False)
        return [axis for axis, size in levels if size > 1]

    def differences(self) -> np.ndarray:
        """Return left minus right by question: (levels of each varied axis ..., N)."""
        levels = [size for size in self.by_level.shape[:-1] if size > 1]
        return self.by_level.reshape([*levels, -1])

    def contrast(self) -> Contrast:
        """Return the contrast of left minus right.

        A choice is scored on the half of the questions that it was not made on.
        """
        estimate, draws = None, None
        if not all(is_plain_mean(cell) for cell in self.frame.cells):
            estimate, draws = self.frame.split_half(self.difference)
        return self.frame.contrast(self.differences(), self.bound, estimate, draws)
