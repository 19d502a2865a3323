"""A table's cells question by question, from stored answers: the cells' numbers in each bootstrap draw of problems.

One draw of problem ids is shared by all parts of a contrast: every language, seed and model, and every candidate of a
choice, which is repeated in each draw.
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

from pipeline.benchmarks import find_benchmark, is_measure
from pipeline.config.harness_tasks import task_of_option
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import value_per_question
from pipeline.evaluate.records import passage_group
from pipeline.report.load.scores import percent_factor
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
from pipeline.tables.plan import Cell, Item, ScoreRef, TablePlan, Values, difference_of, reduce_cell, reduce_items

if TYPE_CHECKING:
    import numpy as np

Vector = dict[Any, float]  # doc_id -> score
Translations = dict[Any, tuple[str, str]]  # doc_id -> (reference, response)
ChosenAndShown = tuple["np.ndarray", "np.ndarray"]  # (values that choices use, values that are shown), one per draw
TAIL = re.compile(r'"scores": (\{[^{}]*\})\}\s*$')
HEAD = re.compile(r'\{"doc_id": (\d+),')


@dataclass
class StoredAnswers:
    """The stored answers under a table's scores. draws: number of draws of each bootstrap over questions."""

    table: BoundTable
    draws: int = DRAWS
    _scores: dict[tuple[ScoreRef, str, str | None], Vector] = field(default_factory=dict)
    _texts: dict[tuple[ScoreRef, str | None], dict[str, Translations]] = field(default_factory=dict)

    def scores_by_question(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        """doc_id -> score of each question. Raises NoScore for an unfinished run, or one without such answers."""
        if (score, metric, pair) not in self._scores:
            self._scores[score, metric, pair] = self.read_answers(score, metric, pair)
        return self._scores[score, metric, pair]

    def read_answers(self, score: ScoreRef, metric: str, pair: str | None) -> Vector:
        if parts := difference_of(score, metric):
            measure, subtracted = parts
            values, others = (self.scores_by_question(part, measure, pair) for part in (score, subtracted))
            return {question: value - others[question] for question, value in values.items() if question in others}
        (path,) = self.sample_files(score, pair or score.language)
        scale = percent_factor(metric) / 100  # as shares, which tables show in percent
        return {key: scale * value for key, value in answers_of(path, metric).items()}

    def fact_numbers(self, cell: Cell) -> Values:
        """Function from each run under a cell of a fact to the number it recorded. It raises NoScore if missing."""
        return Outcome(self.table).score_numbers(cell, {})

    def sample_files(self, score: ScoreRef, language: str) -> list[Path]:
        """The samples files of a score. language: a language, a pair, or * for all of them."""
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

    def groups_of(self, score: ScoreRef, pair: str | None) -> dict[Any, Any]:
        """doc_id -> the passage that the question is about, which samples of earlier versions have in prompts alone."""
        (path,) = self.sample_files(score, pair or score.language)
        return {
            sample["doc_id"]: sample.get("group") or passage_group(passage_of(sample["prompt"]))
            for sample in read_jsonl(path)
        }

    def read_translations(self, score: ScoreRef, pair: str | None) -> dict[str, Translations]:
        """Pair -> doc_id -> (reference, response): of one pair, or of all pairs that were scored."""
        if (score, pair) not in self._texts:
            files = self.sample_files(score, pair or "*")
            self._texts[score, pair] = {path.stem.partition(".")[2]: translations_of(path) for path in files}
        return self._texts[score, pair]


def translations_of(path: Path) -> Translations:
    """doc_id -> (reference, response) of one samples file."""
    return {sample["doc_id"]: (sample["target"], sample["extracted"]) for sample in read_jsonl(path)}


def passage_of(prompt: str) -> str:
    """The passage of the last question of a prompt, as the harness writes it: P: passage, Q: question, A: answer."""
    return prompt.rpartition("\nQ: ")[0].rpartition("P: ")[2]


def answers_of(path: Path, metric: str) -> Vector:
    """doc_id -> score of one samples file. Raises PipelineError for a broken line, or one without the metric.

    Scores of the parts of a question, stored as [question, value], are joined (`value_per_question`).

    Only the ends of a line as evaluations write it are parsed: the prompt between them is nearly all of it.
    """
    scores: Vector = {}
    parts: list[tuple[int, float]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            head, tail = HEAD.match(line), TAIL.search(line[-4000:])
            try:
                if head and tail:
                    question, value = int(head[1]), json.loads(tail[1])[metric]
                else:
                    sample = json.loads(line)
                    question, value = sample["doc_id"], sample["scores"][metric]
                if isinstance(value, list):
                    parts.append((int(value[0]), float(value[1])))
                else:
                    scores[question] = float(value)
            except (ValueError, KeyError, TypeError):
                place = f"{path.parents[1].name}/samples/{path.name}, line {number}"
                raise PipelineError(f"{place} is cut off or has no {metric}: rerun it with redo=true") from None
    return value_per_question(parts, is_measure(metric)) if parts else scores


@dataclass
class Questions:
    """Some cells of a table and the answers under them, on the questions that all of them share."""

    plan: TablePlan
    answers: StoredAnswers
    cells: Sequence[Cell]
    metric: str

    @cached_property
    def needed_scores(self) -> list[tuple[ScoreRef, str | None]]:
        """The scores that are shown, and those that choices among shown candidates use."""
        scores: dict[tuple[ScoreRef, str | None], None] = {}
        for cell in (leaf for shown_cell in self.cells for leaf in leaf_cells(self.plan, shown_cell)):
            for item in cell.items:
                scores |= dict.fromkeys((score, cell.pair) for reading in item.readings for score in reading.values())
                if is_open_choice(item):
                    candidates = self.plan.choices[item.choice or ""].candidates.values()
                    scores |= dict.fromkeys((score, cell.pair) for members in candidates for score in members)
        return list(scores)

    @cached_property
    def answers_by_score(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        """Each score's answers (N,), aligned by problem id over languages and models. NoScore: one is missing.

        Questions about one passage are not independent: their sum, scaled so that the mean stays, counts as one."""
        import numpy as np

        answers = {key: self.answers.scores_by_question(key[0], self.metric, key[1]) for key in self.needed_scores}
        shared = set.intersection(*(set(vector) for vector in answers.values()))
        if not shared:
            raise NoScore("its scores share no question")
        ids = sorted(shared)
        vectors = {key: np.array([vector[doc_id] for doc_id in ids]) for key, vector in answers.items()}
        groups = self.groups_of_questions(ids)
        if len(set(groups)) == len(ids):
            return vectors
        cluster = {group: place for place, group in enumerate(dict.fromkeys(groups))}
        places, scale = [cluster[group] for group in groups], len(cluster) / len(ids)
        return {key: scale * np.bincount(places, vector, len(cluster)) for key, vector in vectors.items()}

    def groups_of_questions(self, ids: Sequence[Any]) -> Sequence[Any]:
        """What each question is in one cluster with: those about its passage, or itself alone."""
        score, pair = self.needed_scores[0]
        words = dict(score.words)
        benchmark = find_benchmark(str(words.get("task") or task_of_option(str(words["eval"]))))
        if benchmark is None or benchmark.passage is None:
            return ids
        groups = self.answers.groups_of(score, pair)
        return [groups.get(doc_id, doc_id) for doc_id in ids]

    def weighted_means(
        self, weigh: Callable[[np.ndarray], np.ndarray]
    ) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        """The mean of each score in each draw; weigh: (S, N) answers -> (draws, S) means."""
        import numpy as np

        means = weigh(np.stack(list(self.answers_by_score.values())))
        return {key: means[:, index] for index, key in enumerate(self.answers_by_score)}

    @cached_property
    def observed_means(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        return self.weighted_means(lambda stacked: stacked.mean(axis=1)[None])

    @cached_property
    def mean_draws(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        return self.weighted_means(lambda stacked: resampled_means(stacked, self.answers.draws))

    @cached_property
    def means_by_half(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        """The mean of each score on the odd and on the even problems."""
        if self.size < 2:
            raise NoScore("one question cannot both choose the best and score it")
        return self.weighted_means(lambda stacked: half_weights(stacked.shape[1]) @ stacked.T)

    @cached_property
    def draws_by_half(self) -> tuple[dict[tuple[ScoreRef, str | None], np.ndarray], ...]:
        """Draws of the odd problems, and draws of the even ones."""
        odd, even = halved_means(list(self.answers_by_score.values()), self.answers.draws)
        return tuple({key: means[:, index] for index, key in enumerate(self.answers_by_score)} for means in (odd, even))

    @property
    def size(self) -> int:
        return len(next(iter(self.answers_by_score.values())))

    def mean_and_variance(self, cell: Cell) -> tuple[float, float]:
        """The value of a cell, with choices as observed, and its variance over draws of problems."""
        vector = by_question(self, cell, ())
        return float(vector.mean()), float(vector.var()) / len(vector)

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        return share_interval(value, self.size, variance)

    def split_half(self, statistic: Callable[[dict, dict], np.ndarray]) -> tuple[float, np.ndarray]:
        """The value, on one half of the problems, of what is chosen on the other half, the mean of both directions: as
        observed, and (draws,) over draws of problems. statistic: (means that choices use, means that are shown) ->
        values, one per draw. Raises NoScore for a single problem, which has no halves."""
        half = self.means_by_half
        observed = statistic(half, {key: means[::-1] for key, means in half.items()})
        odd, even = self.draws_by_half
        return float(observed.mean()), (statistic(odd, even) + statistic(even, odd)) / 2


Sentences = list[tuple[str, tuple[tuple[str, str], ...]]]  # (pair, its references and responses)


class Measures(Questions):
    """Questions for measures such as bits, which have no bounds: Student's t in place of intervals of shares."""

    def mean_and_variance(self, cell: Cell) -> tuple[float, float]:
        value, variance = super().mean_and_variance(cell)
        return value, variance * self.size / max(1, self.size - 1)

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        if self.size < 2 or variance == 0:
            raise NoScore("one value, or the same of all questions, shows no variance")
        return NormalTest(value, math.sqrt(variance), self.size - 1, math.inf).interval()


class Corpora(Questions):
    """Questions for corpus metrics, which are not means over questions: `answers_by_score` holds the observed value and
    then one value per draw."""

    @cached_property
    def aligned_texts(self) -> dict[tuple[ScoreRef, str | None], Sentences]:
        """Each score's sentences in each of its pairs, aligned by problem id across all of them."""
        translations = {key: self.answers.read_translations(*key) for key in self.needed_scores}
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
        return len(next(iter(self.aligned_texts.values()))[0][1])

    def mean_and_variance(self, cell: Cell) -> tuple[float, float]:
        import numpy as np

        observed, *draws = by_question(self, cell, ())
        return float(observed), float(np.var(draws, ddof=1))

    def interval(self, value: float, variance: float) -> tuple[float, float]:
        """A normal interval; the standard error is at least that of one sentence, as in contrasts."""
        low, high = NormalTest(value, max(math.sqrt(variance), 1 / self.size)).interval()
        return max(0.0, low), high

    def scores_of_copies(self, copies: np.ndarray) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        """The value of each score on resampled sentences. copies: (draws, N), how often each sentence occurs."""
        import numpy as np

        return {
            key: np.mean([corpus_scores(*counts_of(self.metric, *pair), copies) for pair in pairs], axis=0)
            for key, pairs in self.aligned_texts.items()
        }

    @cached_property
    def answers_by_score(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        import numpy as np

        return {
            key: np.mean([drawn_scores(self.metric, *pair) for pair in pairs], axis=0)
            for key, pairs in self.aligned_texts.items()
        }

    @cached_property
    def observed_means(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        return {key: vector[:1] for key, vector in self.answers_by_score.items()}

    @cached_property
    def mean_draws(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        return {key: vector[1:] for key, vector in self.answers_by_score.items()}

    @cached_property
    def means_by_half(self) -> dict[tuple[ScoreRef, str | None], np.ndarray]:
        if self.size < 2:
            raise NoScore("one question cannot both choose the best and score it")
        return self.scores_of_copies((half_weights(self.size) > 0).astype(float))

    @cached_property
    def draws_by_half(self) -> tuple[dict[tuple[ScoreRef, str | None], np.ndarray], ...]:
        import numpy as np

        draws = []
        for half in (0, 1):
            copies = np.zeros((DRAWS, self.size))
            copies[:, half::2] = copies_of(len(range(half, self.size, 2)), half * DRAWS)
            draws.append(self.scores_of_copies(copies))
        return tuple(draws)


def questions_of(plan: TablePlan, answers: StoredAnswers, cells: Sequence[Cell], metric: str) -> Questions:
    kind = Corpora if metric in CORPUS_METRICS else Measures if is_measure(metric) else Questions
    return kind(plan, answers, cells, metric)


def leaf_cells(plan: TablePlan, cell: Cell) -> Iterator[Cell]:
    """The cells that hold items: for a row that averages rows, those of the averaged rows."""
    if not cell.of:
        yield cell
    for row in cell.of:
        yield from leaf_cells(plan, plan.cells[row, cell.column])


def is_open_choice(item: Item) -> bool:
    """Whether all candidates were scored here, so that the choice can be repeated in each draw."""
    return item.choice is not None and any(() not in reading for reading in item.readings)


def is_plain_mean(plan: TablePlan, cell: Cell) -> bool:
    """Whether a cell is a plain mean of its answers."""
    steps = [how for leaf in leaf_cells(plan, cell) for how, _ in leaf.reduce] + [how for how, _ in cell.reduce]
    return all(how == "mean" for how in steps) and not any(
        is_open_choice(item) for leaf in leaf_cells(plan, cell) for item in leaf.items
    )


# ---------------------------------------------------------------------------------------------------- in draws


def pick_largest(parts: Sequence[ChosenAndShown]) -> ChosenAndShown:
    """The largest of several in each draw, by the values that choices use."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    choosing, shown = (np.stack(side, axis=1) for side in zip(*parts, strict=True))
    best = np.arange(len(choosing)), np.argmax(choosing, axis=1)
    return choosing[best], shown[best]


def average_draws(parts: Sequence[ChosenAndShown]) -> ChosenAndShown:
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    choosing, shown = (np.mean(side, axis=0) for side in zip(*parts, strict=True))
    return choosing, shown


def pick_lowest(parts: Sequence[ChosenAndShown]) -> ChosenAndShown:
    choosing, shown = pick_largest([(-choosing, -shown) for choosing, shown in parts])
    return -choosing, -shown


REDUCERS: dict[str, Callable[[Sequence[ChosenAndShown]], ChosenAndShown]] = {
    "mean": average_draws,
    "max": pick_largest,
    "min": pick_lowest,
}


def cell_draws(plan: TablePlan, cell: Cell, choosing: dict, shown: dict) -> ChosenAndShown:
    """A cell in each draw, as tables.plan has it in one: choices, maxima and minima use `choosing`, numbers `shown`.

    The same dict twice gives a bootstrap that repeats choices in each draw, two halves of the problems a split-half.
    """
    import numpy as np

    winners: dict[str | None, np.ndarray] = {}  # the winner of each choice, which many items share

    def item_draws(cell: Cell, item: Item) -> ChosenAndShown:
        if not is_open_choice(item):
            winner = next(iter(item.readings[0]))
            keys = [(reading[winner], cell.pair) for reading in item.readings]
            return average_draws([(choosing[key], shown[key]) for key in keys])
        candidates = plan.choices[item.choice or ""].candidates
        if item.choice not in winners:
            means = [
                np.mean([choosing[score, cell.pair] for score in scores], axis=0) for scores in candidates.values()
            ]
            winners[item.choice] = np.argmax(np.stack(means, axis=1), axis=1)
        chosen = np.arange(len(winners[item.choice])), winners[item.choice]

        def of_winner(values: dict, reading: dict) -> np.ndarray:
            if () in reading:
                return values[reading[()], cell.pair]
            return np.stack([values[reading[name], cell.pair] for name in candidates], axis=1)[chosen]

        return average_draws([(of_winner(choosing, reading), of_winner(shown, reading)) for reading in item.readings])

    return reduce_cell(plan, cell, item_draws, lambda how, parts: REDUCERS[how](parts))


# ---------------------------------------------------------------------------------------------------- by question


def by_question(questions: Questions, cell: Cell, axes: Sequence[str]) -> np.ndarray:
    """A cell's answers (levels of each axis ..., N), reduced over all of its axes except `axes`.

    An axis that the cell does not have, or has one value of, is of length 1. Choices and maxima are those observed.
    """
    import numpy as np

    plan = questions.plan
    if cell.of:
        parts = [by_question(questions, plan.cells[row, cell.column], axes) for row in cell.of]
        return reduce_vectors(cell.reduce[0][0], parts)

    def item_vector(item: Item) -> np.ndarray:
        key: Any = next(iter(item.readings[0]))
        if is_open_choice(item):
            candidates = plan.choices[item.choice or ""].candidates
            means = {
                candidate: np.mean([questions.observed_means[score, cell.pair] for score in scores])
                for candidate, scores in candidates.items()
            }
            key = max(means, key=means.__getitem__)
        vectors = [
            questions.answers_by_score[reading[() if () in reading else key], cell.pair] for reading in item.readings
        ]
        return vectors[0] if len(vectors) == 1 else np.mean(vectors, axis=0)

    return by_level(cell, axes, item_vector)


def by_level(cell: Cell, axes: Sequence[str], vector_of: Callable[[Item], np.ndarray]) -> np.ndarray:
    """(levels of each axis ..., N): the vectors (N,) of a cell's items, reduced over all axes except `axes`."""
    import numpy as np

    vectors = reduce_items(cell, lambda _, item: vector_of(item), reduce_vectors, axes)
    axis_values = [list(dict.fromkeys(at[axis] for at, _ in vectors if axis in at)) or [None] for axis in axes]
    array = np.full((*map(len, axis_values), len(vectors[0][1])), np.nan)
    for at, vector in vectors:
        array[tuple(values.index(at.get(axis)) for axis, values in zip(axes, axis_values, strict=True))] = vector
    return array


def reduce_vectors(how: str, vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of several vectors; or the one whose mean is the largest (max) or the least (min)."""
    import numpy as np

    if len(vectors) == 1:
        return vectors[0]
    if how == "mean":
        return np.mean(np.broadcast_arrays(*vectors), axis=0)
    return (max if how == "max" else min)(vectors, key=np.mean)
