"""Models compared on the questions that both answered: which differences are significant, and which best is a best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.report.answers import Answers, Place
from pipeline.report.contents import Score
from pipeline.report.ranks import holm
from pipeline.report.statistics import LEVEL, contrast, corpus_contrast, mcnemar
from pipeline.report.translations import CORPUS_METRICS, drawn_scores

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Difference:
    """`left` minus `right` on the `n` questions that both answered, in percentage points, with its 95 % interval.

    `p`: two-sided, after Holm's correction over the block; `mid_p`: of McNemar's exact test, likewise, where each side
    is one model's answers; `could_see`: the minimum detectable difference at power 80 %. None where they share none.
    """

    left: str
    right: str
    n: int
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    could_see: float | None = None
    mid_p: float | None = None

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


@dataclass(frozen=True)
class Comparison:
    """The differences of one column of the table; `expert`: the best one, chosen by these very questions."""

    title: str
    expert: str | None
    lines: list[Difference]


@dataclass(frozen=True)
class Kept:
    """What a model answered. trainings: seed -> (pair or language, doc_id -> score, of translations reference and
    response) of each language, the base's under one seed; metric: of translations, else "". False where nothing is."""

    metric: str = ""
    trainings: Mapping[int, tuple[tuple[str, Mapping[Any, Any]], ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.trainings)

    def values(self, ids: Sequence[Any]) -> np.ndarray:
        """(trainings, N) scores of these questions, the mean over languages; of translations (trainings, 1 + draws)."""
        import numpy as np

        def of(where: str, answers: Mapping[Any, Any]) -> Any:
            found = tuple(answers[one] for one in ids)
            return drawn_scores(self.metric, where, found) if self.metric else found

        return np.array([np.mean([of(*one) for one in sets], axis=0) for sets in self.trainings.values()])


def questions_of(by_seed: Mapping[int, Score], answers: Mapping[Place, Answers], apart: bool = True) -> Kept:
    """What the trainings of a model made of the questions of a task in a language; apart: seed by seed, else as one.

    Empty where the answers of one are not kept: half of the seeds would be compared with the whole of another model's.
    """
    scores = {(one.eval, one.task, one.where): (seed, one) for seed, one in sorted(by_seed.items(), reverse=True)}
    kept = {place: answers.get(place) for place in scores}
    if not kept or any(one is None or not one.scores for one in kept.values()):
        return Kept()
    metric = next(iter(by_seed.values())).metric
    translated = metric in CORPUS_METRICS
    trainings: dict[int, tuple[tuple[str, Any], ...]] = {}
    for place, (seed, score) in reversed(scores.items()):
        if one := kept[place]:
            key = seed if apart else 0
            trainings[key] = (*trainings.get(key, ()), (score.where, one.translations if translated else one.scores))
    return Kept(metric if translated else "", trainings)


def averaged(found: Sequence[Kept]) -> Kept:
    """Several languages together, of the seeds that all have."""
    seeds = [seed for seed in found[0].trainings if all(seed in one.trainings for one in found)]
    return Kept(found[0].metric, {seed: sum((one.trainings[seed] for one in found), ()) for seed in seeds})


def difference(left: str, right: str, mine: Kept, theirs: Kept) -> Difference:
    """One contrast on the questions that both have, its p not corrected: over trainings too where there are three or
    more of the same seeds on both sides (or one model for all of them), else of their means."""
    sets = [set(answers) for side in (mine, theirs) for each in side.trainings.values() for _, answers in each]
    ids = sorted(set.intersection(*sets)) if mine and theirs and mine.metric == theirs.metric else []
    if not ids:
        return Difference(left, right, 0)
    one, other = mine.values(ids), theirs.values(ids)
    paired = mine.trainings.keys() == theirs.trainings.keys() or min(len(one), len(other)) == 1
    array = one - other if paired and max(len(one), len(other)) > 2 else one.mean(axis=0) - other.mean(axis=0)
    found = corpus_contrast(array[..., 0], array[..., 1:], len(ids)) if mine.metric else contrast(array)
    points, low, high, could_see = (100 * x for x in (found.difference, found.low, found.high, found.could_see))
    single = len(one) == len(other) == 1 and {*one.flat, *other.flat} <= {0, 1} and not mine.metric
    mid_p = mcnemar(one[0], other[0]).p if single else None
    return Difference(left, right, len(ids), points, low, high, found.p, could_see, mid_p)


def compared(
    title: str, pairs: Iterable[tuple[str, str]], expert: str | None, by_row: Mapping[str, Kept]
) -> Comparison:
    """The differences of these pairs of rows, Holm's correction over all of them."""
    found = [difference(left, right, by_row[left], by_row[right]) for left, right in dict.fromkeys(pairs)]
    return Comparison(title, expert, corrected(found))


def corrected(found: Sequence[Difference]) -> list[Difference]:
    """Holm's correction over all that have a p, and over all that have a mid-p."""
    ps, mid_ps = (adjusted([getattr(one, name) for one in found]) for name in ("p", "mid_p"))
    return [replace(one, p=p, mid_p=mid_p) for one, p, mid_p in zip(found, ps, mid_ps, strict=True)]


def adjusted(ps: Sequence[float | None]) -> list[float | None]:
    known = iter(holm([p for p in ps if p is not None]))
    return [None if p is None else next(known) for p in ps]


def pairs_of(
    rows: Sequence[str], roles: Mapping[str, str], values: Mapping[str, float]
) -> tuple[list[tuple[str, str]], str | None]:
    """Each merge with the bases and the best expert, which is chosen on these questions, in its own favour."""
    experts = [row for row in rows if roles[row] == "expert" and row in values]
    best = max(experts, key=lambda row: values[row], default=None)
    rivals = [row for row in rows if roles[row] == "base"] + ([best] if best else [])
    merges = [row for row in rows if roles[row] not in ("base", "expert")]
    return [(row, rival) for row in merges for rival in rivals], best


def stands_out(best: str, by_row: Mapping[str, Kept]) -> bool:
    """Whether a row is above each of the others by a difference that is significant after Holm's correction over them.

    False without a rival, and where answers are missing. The first rival that it is not above ends it: those of
    translations take seconds.
    """
    rivals = []
    for row, theirs in by_row.items():
        if row != best:
            rivals.append(difference(best, row, by_row[best], theirs))
            if not rivals[-1].significant or (rivals[-1].difference or 0) <= 0:
                return False
    return bool(rivals) and all(one.significant for one in corrected(rivals))


# ------------------------------------------------------------------------------------------------ the headline


def declared(lines: Sequence[Mapping[str, Any]]) -> Comparison:
    """What the table itself compares (contrasts.csv), Holm's correction over all of it."""
    found = [
        Difference(
            line["left"], f"{line['right']} in {line['place']}", line["n"], line["difference"], line["low"],
            line["high"], line["p"], line["could_see"], line.get("mcnemar_p"),
        )
        for line in lines
        if line.get("p") is not None
    ]  # fmt: skip
    return Comparison("As the table compares", None, corrected(found))


def headline(blocks: Sequence[Comparison]) -> str:
    """What is significant in the first block that has answers, and what is not, in one sentence."""
    found = ((block, [line for line in block.lines if line.p is not None]) for block in blocks)
    block, known = next(((block, known) for block, known in found if known), (None, []))
    if block is None:
        return "No two models have answers to compare."
    sure = sorted((line for line in known if line.significant), key=lambda line: -abs(line.difference or 0))
    least = [line.could_see or 0 for line in known if not line.significant]
    unseen = f" (minimum detectable difference {span(least)} points)" if least else ""
    named = [
        f"{line.left} {'over' if (line.difference or 0) > 0 else 'under'} {line.right} by "
        f"{abs(line.difference or 0):.1f} points ({bounds(line)})"
        for line in sure[:4]
    ]
    named += [f"{len(sure) - 4} more"] if len(sure) > 4 else []
    counted = f"{len(sure) or 'none'} of {len(known)} differences {'are' if len(sure) > 1 else 'is'} significant"
    about = f"{block.title}, {span([line.n for line in known])} questions: {counted}"
    if not sure:
        return f"{about}{unseen}."
    return f"{about}, {joined(named)}{'; the others are not' if least else ''}{unseen}."


def span(values: Sequence[float]) -> str:
    first, last = f"{min(values):.0f}", f"{max(values):.0f}"
    return first if first == last else f"{first} to {last}"


def bounds(line: Difference) -> str:
    low, high = sorted((abs(line.low or 0), abs(line.high or 0)))
    return f"{low:.1f} to {high:.1f}"


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
