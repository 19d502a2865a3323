"""Models compared on the questions that both answered: which differences are significant, and which best is a best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.evaluate.metrics import mean
from pipeline.report.answers import Answers, Place
from pipeline.report.contents import Score
from pipeline.report.ranks import holm
from pipeline.report.statistics import LEVEL, contrast, corpus_contrast, mcnemar
from pipeline.report.translations import CORPUS_METRICS, drawn_scores

Questions = Mapping[Any, float]  # doc_id -> the mean over seeds (and languages) of its scores, as parts of one


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
class Translated:
    """What a corpus metric is computed from: (pair, doc_id -> reference and response) of each seed and language."""

    metric: str
    sets: tuple[tuple[str, Mapping[Any, tuple[str, str]]], ...]


Kept = Questions | Translated


def questions_of(scores: Iterable[Score], answers: Mapping[Place, Answers]) -> Kept:
    """A model's score on each question of a task in a language, the mean over those of its seeds that have it all; of
    translations their texts.

    Empty where the answers of one are not kept: half of the seeds would be compared with the whole of another model's.
    """
    places = {(one.eval, one.task, one.where): one.metric for one in scores}
    kept = {place: answers.get(place) for place in places}
    if not kept or any(one is None or not one.scores for one in kept.values()):
        return {}
    if (metric := next(iter(places.values()))) in CORPUS_METRICS:
        return Translated(metric, tuple((where, one.translations) for (_, _, where), one in kept.items() if one))
    return averaged([one.scores for one in kept.values() if one is not None])


def averaged(found: Sequence[Kept]) -> Kept:
    """The mean of several on each question that all have; of translations, those of all."""
    translated = [one for one in found if isinstance(one, Translated)]
    if translated:
        alike = len(translated) == len(found)
        return Translated(translated[0].metric, sum((one.sets for one in translated), ())) if alike else {}
    return mean_of([one for one in found if not isinstance(one, Translated)])


def mean_of(found: Sequence[Questions]) -> Questions:
    if len(found) == 1:
        return found[0]
    shared = [doc for doc in found[0] if all(doc in one for one in found[1:])] if found else []
    return {doc: mean([one[doc] for one in found]) for doc in shared}


def difference(left: str, right: str, mine: Kept, theirs: Kept) -> Difference:
    """One contrast, its p not corrected."""
    if isinstance(mine, Translated) and isinstance(theirs, Translated):
        return of_translations(left, right, mine, theirs)
    if isinstance(mine, Translated) or isinstance(theirs, Translated):
        return Difference(left, right, 0)
    shared = [doc for doc in mine if doc in theirs]
    if not shared:
        return Difference(left, right, 0)
    both = [[answers[doc] for doc in shared] for answers in (mine, theirs)]
    found = contrast([one - other for one, other in zip(*both, strict=True)])
    points, low, high, could_see = (100 * x for x in (found.difference, found.low, found.high, found.could_see))
    mid_p = mcnemar(*both).p if {*both[0], *both[1]} <= {0, 1} else None
    return Difference(left, right, len(shared), points, low, high, found.p, could_see, mid_p)


def of_translations(left: str, right: str, mine: Translated, theirs: Translated) -> Difference:
    """The same of corpus metrics, by draws of the sentences that all have."""
    import numpy as np

    shared = set.intersection(*(set(texts) for _, texts in mine.sets + theirs.sets))
    if not shared:
        return Difference(left, right, 0)
    ids = sorted(shared)
    one, other = (
        np.mean(
            [drawn_scores(side.metric, pair, tuple(texts[doc] for doc in ids)) for pair, texts in side.sets], axis=0
        )
        for side in (mine, theirs)
    )
    found = corpus_contrast(one[0] - other[0], one[1:] - other[1:], len(ids))
    points, low, high, could_see = (100 * x for x in (found.difference, found.low, found.high, found.could_see))
    return Difference(left, right, len(ids), points, low, high, found.p, could_see)


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
