"""The verdict on a claim, from contrasts, ranks and correlations. This module reads no runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeline.report.claims import CONTRADICTED, NOT_TESTABLE, SHOWN, UNDECIDED, Claim, Verdict
from pipeline.stats.contrast import Contrast
from pipeline.stats.ranks import Alike, Correlations, Friedman, holm
from pipeline.stats.statistics import LEVEL


def word_of(claim: Claim, low: float, high: float) -> str:
    """Return the verdict by the interval of left minus right, in shares.

    For a relative claim, right is scaled.
    """
    sides = (claim.excess(low), claim.excess(high))
    if min(sides) > 0:
        return SHOWN
    includes_zero = claim.direction == "within" and low <= 0 <= high
    if max(sides) < 0 and not includes_zero:
        return CONTRADICTED
    return UNDECIDED


def word_of_all(verdicts: Iterable[str]) -> str:
    """Return the verdict of several parts.

    It is shown if all parts are, which needs no correction, and contradicted if one part is.
    """
    distinct = set(verdicts)
    if distinct == {SHOWN}:
        return SHOWN
    if CONTRADICTED in distinct:
        return CONTRADICTED
    return UNDECIDED


def p_of(claim: Claim, contrast: Contrast) -> float:
    """Return the two-sided p at the claim's threshold.

    It is below 5 % if the interval lies on one side of the threshold. For `within` it is the larger
    p of the two thresholds.
    """
    if claim.direction != "within":
        return contrast.p_of(claim.margin)
    margin = claim.threshold / 100
    return max(contrast.p_of(-margin), contrast.p_of(margin))


def judge_difference(
    claim: Claim, contrast: Contrast, left: float, right: float, detail: str = ""
) -> Verdict:
    return Verdict(
        claim,
        word_of(claim, contrast.low, contrast.high),
        left_value=100 * left,
        right_value=100 * right,
        p=p_of(claim, contrast),
        detail=detail,
        **contrast.in_points(),
    )


class Unit(NamedTuple):
    """A part of a claim that is tested separately: a place, a candidate, or a pair of experts."""

    name: str
    contrast: Contrast
    left: float
    right: float


def count_units(claim: Claim, units: Sequence[Unit]) -> tuple[int, str]:
    """Return the number of units on the claim's side, and each unit's difference as text."""
    won, texts = 0, []
    for unit in units:
        difference = unit.contrast.difference
        won += claim.excess(difference) > 0
        texts.append(f"{unit.name} {100 * difference:+.1f}")
    return won, ", ".join(texts)


def judge_every(claim: Claim, units: Sequence[Unit]) -> Verdict:
    """Return the verdict over separate units: shown if all are, contradicted if one is.

    To show a claim, the largest p of the units must be small, which needs no correction. One unit
    is enough for a contradiction, so its p is Holm-corrected over all units. The numbers are from
    the unit whose p decides.
    """
    verdicts = [judge_difference(claim, unit.contrast, unit.left, unit.right) for unit in units]
    corrected = holm([verdict.p or 0.0 for verdict in verdicts])
    words, ps = [], []
    for verdict, p in zip(verdicts, corrected, strict=True):
        word = verdict.verdict
        if word != CONTRADICTED:
            p = verdict.p or 0.0
        elif p >= LEVEL:
            word = UNDECIDED
        words.append(word)
        ps.append(p)
    decides = deciding_part(words, ps)
    won, text = count_units(claim, units)
    return replace(
        verdicts[decides],
        verdict=word_of_all(words),
        p=ps[decides],
        detectable=max(verdict.detectable or 0.0 for verdict in verdicts),
        detail=(
            f"{won} of {len(units)} on its side, {words.count(SHOWN)} shown; "
            f"the numbers are from {units[decides].name}, whose p decides: {text}"
        ),
    )


def deciding_part(words: Sequence[str], ps: Sequence[float]) -> int:
    """Return the index of the part that decides.

    It is the contradiction with the smallest p, or the part with the largest p if there is no
    contradiction.
    """
    against = [index for index, word in enumerate(words) if word == CONTRADICTED]
    if against:
        return min(against, key=lambda index: ps[index])
    return ps.index(max(ps))


def judge_wins(claim: Claim, units: Sequence[Unit], overall: Verdict, experts: bool) -> Verdict:
    """Return the verdict by the papers' count.

    A claim is shown if every unit is on its side and the mean of the units shows it. The count
    alone proves little, because units share experts and questions. The claim is contradicted if the
    mean contradicts it, or if `judge_every` does. Pairs of experts are not judged by `judge_every`,
    because only the mean includes the variance between experts.

    Args:
        claim: The claim.
        units: The units to count.
        overall: The verdict on their mean.
        experts: True if units are pairs of experts.
    """
    won, text = count_units(claim, units)
    verdict, p = overall.verdict, overall.p
    if won < len(units) and verdict == SHOWN:
        verdict = UNDECIDED
    if not experts and verdict != CONTRADICTED:
        every = judge_every(claim, units)
        if every.verdict == CONTRADICTED:
            verdict, p = CONTRADICTED, every.p
    detail = f"{won} of {len(units)} on its side: {text}"
    return replace(overall, verdict=verdict, p=p, detail=detail)


def judge_alike(claim: Claim, likeness: Alike) -> Verdict:
    text = (
        f"mean correlation {likeness.within:+.2f} within a kind, {likeness.between:+.2f} between,"
        f" {likeness.labellings} labellings"
    )
    if not likeness.least_p < LEVEL:
        text = f"too few trainings, or no profile, for any p below {LEVEL}; {text}"
        return Verdict(claim, NOT_TESTABLE, detail=text)
    # the sign of the difference of the correlations, 0 if it is not significant
    side = (likeness.p < LEVEL) - (likeness.opposed < LEVEL)
    p = likeness.p if claim.direction == "higher" else likeness.opposed
    return Verdict(claim, word_of(claim, side, side), p=p, n=likeness.n, detail=text)


def judge_friedman(claim: Claim, test: Friedman, blocks: int) -> Verdict:
    """Return the verdict: shown if both p are small.

    Blocks of one model share a math expert and are not independent.
    """
    p = max(test.p, test.permuted)
    verdict = SHOWN if p < claim.threshold else UNDECIDED
    ps = f"p {test.p:.4f}, permuted within models {test.permuted:.4f}"
    detail = f"chi-squared {test.statistic:.2f}, {ps}"
    return Verdict(claim, verdict, p=p, n=blocks, detail=detail)


@dataclass(frozen=True)
class Ranked:
    """A pair of columns, compared over blocks by a signed-rank test.

    Attributes:
        left: The name of the left column.
        right: The name of the right column.
        difference: The mean difference, a share.
        p: Of the signed-rank test, in which the signs of a cluster flip together.
        blocks: The number of blocks.
        clusters: The number of clusters (models, whose blocks share experts).
    """

    left: str
    right: str
    difference: float
    p: float
    blocks: int
    clusters: int


def judge_wilcoxon(claims: Sequence[tuple[Claim, Sequence[Ranked]]]) -> list[Verdict]:
    """Return verdicts of claims with their pairs, p Holm-corrected over all pairs of a family.

    A family cannot be tested if no result could be significant, because it has too few clusters.
    """
    pairs_of_family: dict[str, list[Ranked]] = {}
    for claim, pairs in claims:
        pairs_of_family.setdefault(family_of(claim), []).extend(pairs)
    adjusted = {}
    for family, members in pairs_of_family.items():
        adjusted[family] = iter(holm([pair.p for pair in members]))
    verdicts = []
    for claim, pairs in claims:
        family = family_of(claim)
        ps = [next(adjusted[family]) for _ in pairs]
        verdicts.append(judge_ranked(claim, pairs, ps, len(pairs_of_family[family])))
    return verdicts


def judge_ranked(claim: Claim, pairs: Sequence[Ranked], ps: Sequence[float], count: int) -> Verdict:
    """Return the verdict on a claim by its signed-rank tests.

    `ps` has the p of each pair, corrected over the `count` tests of the family.
    """
    words, texts = [], []
    for pair, p in zip(pairs, ps, strict=True):
        word = UNDECIDED
        if p < LEVEL:
            word = word_of(claim, pair.difference, pair.difference)
        words.append(word)
        compared = f"{pair.left} minus {pair.right} {100 * pair.difference:+.1f}"
        texts.append(f"{compared}, p {pair.p:.4f}, {p:.4f} by Holm over {count}")
    verdict, text = word_of_all(words), "; ".join(texts)
    clusters = min(pair.clusters for pair in pairs)
    least = count * 2 / 2**clusters
    if least >= LEVEL:
        verdict = NOT_TESTABLE
        smallest = f"{min(1, least):.3g} by Holm over {count}"
        text = f"the smallest possible p of {clusters} clusters is {smallest}; {text}"
    decides = deciding_part(words, ps)
    pair = pairs[decides]
    difference = 100 * pair.difference
    return Verdict(claim, verdict, difference=difference, p=ps[decides], n=pair.blocks, detail=text)


def family_of(claim: Claim) -> str:
    return claim.family or f"claim {claim.id}"


def judge_spearman(claim: Claim, correlations: Correlations, n: int) -> Verdict:
    low, high = correlations.low, correlations.high
    if math.isnan(low):
        reason = "a correlation needs four pairs per group that are not all equal"
        return Verdict(claim, NOT_TESTABLE, detail=reason)
    rho = f"rho {correlations.left:+.2f} against {correlations.right:+.2f}"
    z = f"Fisher's z {correlations.difference:+.2f} ({low:+.2f} to {high:+.2f})"
    word = word_of(claim, low, high)
    return Verdict(claim, word, p=correlations.p, n=n, detail=f"{rho}; {z}")
