"""A table's cells question by question, from stored answers: the cells' numbers in each bootstrap draw of problems.

One draw of problem ids is shared by all parts of a contrast: every language, seed and model, and every candidate of a
choice, which is repeated in each draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import find_benchmark, kind_of, measures_of, primary_metric
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.report.expression import evaluate, is_open_choice, leaf_cells, scores_under
from pipeline.report.stored import NoScore, StoredAnswers
from pipeline.stats.contrast import Contrast, contrast, corpus_contrast
from pipeline.stats.statistics import DRAWS, NormalTest, half_weights, halved_means, share_interval
from pipeline.stats.translations import CORPUS_METRICS, copies_of, corpus_scores, counts_of, drawn_scores
from pipeline.tables.plan import Cell, ScoreRef, TablePlan, task_of

if TYPE_CHECKING:
    import numpy as np

Key = tuple[ScoreRef, str | None]  # a score, and a pair of languages


@dataclass
class Questions:
    """Some cells of a table and the answers under them, in each language on the questions that all of them share.

    Each property maps a score (with its pair) to its answers (N,), its mean, or its means in draws of problems (draws,)
    or on both halves (2,), from which `evaluate` makes the same of a cell.
    """

    plan: TablePlan
    answers: StoredAnswers
    cells: Sequence[Cell]
    metric: str

    @cached_property
    def needed_scores(self) -> list[Key]:
        """The scores that are shown, and those that choices among shown candidates use."""
        scores: dict[Key, None] = {}
        for cell in self.cells:
            scores |= {(score, leaf.pair): None for leaf, score in scores_under(self.plan, cell)}
            for leaf in leaf_cells(self.plan, cell):
                for choice in {item.choice or "" for item in leaf.items if is_open_choice(item)}:
                    candidates = self.plan.choices[choice].candidates.values()
                    scores |= {(score, leaf.pair): None for members in candidates for score in members}
        return list(scores)

    @cached_property
    def vectors(self) -> dict[Key, np.ndarray]:
        """Each score's answers, aligned by problem id over languages and models. NoScore: one is missing.

        Questions about one passage are not independent: their sum, scaled so that the mean stays, counts as one."""
        import numpy as np

        stored = {key: self.answers.scores_by_question(key[0], self.metric, key[1]) for key in self.needed_scores}
        by_place: dict[str, list[Mapping[Any, Any]]] = {}
        for (score, pair), answers in stored.items():
            by_place.setdefault(pair or score.language, []).append(answers)
        shared = {place: shared_questions(of_place) for place, of_place in by_place.items()}
        ids = sorted(set().union(*shared.values()))
        vectors = {
            (score, pair): on_all([answers[doc_id] for doc_id in own], own, ids)
            for (score, pair), answers in stored.items() for own in [shared[pair or score.language]]
        }  # fmt: skip
        groups = self.groups_of_questions(ids)
        if len(set(groups)) == len(ids):
            return vectors
        cluster = {group: place for place, group in enumerate(dict.fromkeys(groups))}
        places, scale = [cluster[group] for group in groups], len(cluster) / len(ids)
        return {key: scale * np.bincount(places, vector, len(cluster)) for key, vector in vectors.items()}

    def groups_of_questions(self, ids: Sequence[Any]) -> Sequence[Any]:
        """What each question is in one cluster with: those about its passage, or itself alone."""
        benchmark = find_benchmark(task_of(self.needed_scores[0][0]))
        if benchmark is None or benchmark.passage is None:
            return ids
        groups = {doc_id: group for key in self.needed_scores for doc_id, group in self.answers.groups_of(*key).items()}
        return [groups.get(doc_id, doc_id) for doc_id in ids]

    @cached_property
    def means(self) -> dict[Key, float]:
        return {key: float(vector.mean()) for key, vector in self.vectors.items()}

    @cached_property
    def halves(self) -> dict[Key, np.ndarray]:
        """The mean of each score on the odd and on the even problems."""
        import numpy as np

        means = np.stack(list(self.vectors.values())) @ half_weights(self.size).T
        return dict(zip(self.vectors, means, strict=True))

    @cached_property
    def halved_draws(self) -> Sequence[dict[Key, np.ndarray]]:
        """Draws of the odd problems, and draws of the even ones."""
        halves = halved_means(list(self.vectors.values()), self.answers.draws)
        return [dict(zip(self.vectors, means.T, strict=True)) for means in halves]

    @property
    def size(self) -> int:
        return len(next(iter(self.vectors.values())))

    def cell(self, cell: Cell, choose: Mapping[Key, Any], show: Mapping[Key, Any], axes: Sequence[str] = ()) -> Any:
        """A cell in `show`, with the choices that `choose` makes."""
        return evaluate(
            self.plan, cell, lambda at, score: choose[score, at.pair], lambda at, score: show[score, at.pair], axes
        )[1]

    def split_half(self, statistic: Callable[[Mapping, Mapping], np.ndarray]) -> tuple[float, np.ndarray]:
        """The value, on one half of the problems, of what is chosen on the other half, the mean of both directions: as
        observed, and (draws,) over draws of problems. statistic: (means that choices use, means that are shown) ->
        values, one per draw. Raises NoScore for a single problem, which has no halves."""
        if self.size < 2:
            raise NoScore("one question cannot both choose the best and score it")
        observed = statistic(self.halves, {key: means[::-1] for key, means in self.halves.items()})
        odd, even = self.halved_draws
        return float(observed.mean()), (statistic(odd, even) + statistic(even, odd)) / 2

    @cached_property
    def bounded(self) -> bool:
        """Whether answers are shares; numbers such as bits have no bounds, and Student's t in place of Wilson's. Of
        what a metric of the harness gives, the answers tell."""
        benchmark = find_benchmark(task_of(self.needed_scores[0][0]))
        if benchmark is None or not benchmark.of_harness:
            return self.answers.is_share(self.metric)
        stored = (self.answers.scores_by_question(score, self.metric, pair) for score, pair in self.needed_scores)
        is_percent = percent_factor(self.metric) == 100
        return is_percent and all(0 <= value <= 1 for vector in stored for value in vector.values())

    def mean_and_variance(self, cell: Cell) -> tuple[float, float]:
        """The value of a cell, with choices as observed, and its variance over draws of problems."""
        vector = self.cell(cell, self.means, self.vectors)
        lost = 0 if self.bounded or len(vector) < 2 else 1
        return float(vector.mean()), float(vector.var(ddof=lost)) / len(vector)

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        if self.bounded:
            return share_interval(value, self.size, variance)
        if self.size < 2 or variance == 0:
            raise NoScore("one value, or the same of all questions, shows no variance")
        return NormalTest(value, math.sqrt(variance), self.size - 1, math.inf).interval()

    def contrast(self, array: np.ndarray, estimate: float | None, draws: np.ndarray | None, reach: float) -> Contrast:
        """The contrast of differences by question (levels ..., N), none of which is above `reach`."""
        try:
            return contrast(array, estimate, draws, reach=reach if self.bounded else math.inf)
        except ValueError:
            raise NoScore("one question, or the same difference on all, shows no variance") from None


Sentences = list[tuple[str, tuple[tuple[str, str], ...]]]  # (pair, its references and responses)


class Corpora(Questions):
    """Questions for corpus metrics, which are not means over questions: `vectors` holds the observed value and then one
    value per draw of sentences."""

    @cached_property
    def texts(self) -> dict[Key, Sentences]:
        """Each score's sentences in each of its pairs, aligned by problem id across all of them."""
        translations = {key: self.answers.read_translations(*key) for key in self.needed_scores}
        ids = shared_questions(texts for pairs in translations.values() for texts in pairs.values())
        return {
            key: [(pair, tuple(texts[doc_id] for doc_id in ids)) for pair, texts in pairs.items()]
            for key, pairs in translations.items()
        }

    @property
    def size(self) -> int:
        return len(next(iter(self.texts.values()))[0][1])

    def resampled(self, copies: np.ndarray | None = None) -> dict[Key, np.ndarray]:
        """The value of each score on resampled sentences. copies: (draws, N), how often each sentence occurs; None: all
        once, and then as `drawn_scores` draws them."""
        import numpy as np

        def values(pair: str, texts: Any) -> np.ndarray:
            if copies is None:
                return drawn_scores(self.metric, pair, texts)
            return corpus_scores(*counts_of(self.metric, pair, texts), copies)

        return {key: np.mean([values(*pair) for pair in pairs], axis=0) for key, pairs in self.texts.items()}

    @cached_property
    def vectors(self) -> dict[Key, np.ndarray]:
        return self.resampled()

    @cached_property
    def means(self) -> dict[Key, float]:
        return {key: float(vector[0]) for key, vector in self.vectors.items()}

    @cached_property
    def halves(self) -> dict[Key, np.ndarray]:
        return self.resampled((half_weights(self.size) > 0).astype(float))

    @cached_property
    def halved_draws(self) -> Sequence[dict[Key, np.ndarray]]:
        import numpy as np

        draws = []
        for half in (0, 1):
            copies = np.zeros((DRAWS, self.size))
            copies[:, half::2] = copies_of(len(range(half, self.size, 2)), half * DRAWS)
            draws.append(self.resampled(copies))
        return draws

    def mean_and_variance(self, cell: Cell) -> tuple[float, float]:
        import numpy as np

        observed, *draws = self.cell(cell, self.means, self.vectors)
        return float(observed), float(np.var(draws, ddof=1))

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        """A normal interval; the standard error is at least that of one sentence, as in contrasts."""
        low, high = NormalTest(value, max(math.sqrt(variance), 1 / self.size)).interval()
        return max(0.0, low), high

    def contrast(self, array: np.ndarray, estimate: float | None, draws: np.ndarray | None, reach: float) -> Contrast:
        return corpus_contrast(array[..., 0], array[..., 1:], self.size, estimate, draws)


def on_all(answers: Sequence[float], answered: Sequence[Any], ids: Sequence[Any]) -> np.ndarray:
    """(N,) answers to the questions `own` as ones to all of `ids`, with the mean and the variance of the mean that they
    have: what a language lacks counts as its mean, and what it has differs from that by so much more."""
    import numpy as np

    values, index_of = np.array(answers, dtype=float), {doc_id: index for index, doc_id in enumerate(ids)}
    if len(answered) == len(ids):
        return values
    vector = np.full(len(ids), values.mean())
    vector[[index_of[doc_id] for doc_id in answered]] += len(ids) / len(answered) * (values - values.mean())
    return vector


def shared_questions(answers: Iterable[Mapping[Any, Any]]) -> list[Any]:
    """The ids that all of these have, sorted. Raises NoScore if there are none."""
    if not (shared := set.intersection(*map(set, answers))):
        raise NoScore("its scores share no question")
    return sorted(shared)


def questions_of(plan: TablePlan, answers: StoredAnswers, cells: Sequence[Cell], metric: str) -> Questions:
    return (Corpora if metric in CORPUS_METRICS else Questions)(plan, answers, cells, metric)


# ---------------------------------------------------------------------------------------------------- metrics


def tasks_of(plan: TablePlan, cells: Iterable[Cell]) -> set[str | None]:
    """The tasks whose answers are under cells; None stands for a fact or a figure."""
    leaves = [leaf for cell in cells for leaf in leaf_cells(plan, cell)]
    facts = {None for leaf in leaves if leaf.fact or any(item.model for item in leaf.items)}
    return facts | {task_of(score) for leaf in leaves for _, score in scores_under(plan, leaf)}


def metrics_of(task: str) -> list[str]:
    """The metrics that are stored for each answer of a task, the primary one first."""
    kind = kind_of(task)
    if kind is None or kind == "translation":
        return list(CORPUS_METRICS) if kind else []
    return [primary_metric(task)[0], *(["numeric_match"] if kind == "number" else []), *measures_of(task)]


def stored_metric(plan: TablePlan, cells: Sequence[Cell]) -> str | None:
    """The one metric that all cells show, if it is stored for each answer, or for each set of translations; None for
    different ones, and for facts, figures and spBLEU."""
    (task, *further_tasks), shown = tasks_of(plan, cells), {cell.metric for cell in cells}
    if further_tasks or task is None:
        return None
    if " " in task:  # a column of stage=compare
        return shown.pop()
    stored = metrics_of(task)
    metrics = {metric or primary_metric(task)[0] for metric in shown}
    return metrics.pop() if len(metrics) == 1 and metrics <= set(stored) else None
