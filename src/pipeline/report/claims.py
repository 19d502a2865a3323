"""Claims about a table and their verdicts.

A claim file is YAML: table -> its claims, each with exactly the keys of KEYS;
conf/claims/layer_swapping.yaml documents them. A claim is shown if an interval (or a test at 5 %)
lies on its side of the threshold, and contradicted if it lies on the other side. Otherwise it is
undecided, with the minimum detectable difference. This module reads no runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import yaml

from pipeline.errors import PipelineError, suggest
from pipeline.files import readable_yaml
from pipeline.stats.contrast import Contrast
from pipeline.stats.ranks import Alike, Correlations, Friedman, holm
from pipeline.stats.statistics import LEVEL

OPTIONAL = ("family", "than", "units")
KEYS = (
    "id",
    "text",
    "section",
    "left",
    "right",
    "metric",
    "over",
    "test",
    "threshold",
    "direction",
)
# the mean difference over all places, each place separately, or the number of places on its side
UNITS = ("", "each", "count")
TEXT_KEYS = ("id", "text", "section", "metric", "test", "direction")
# test -> its directions, and whether its threshold is 0
RULES = {
    "difference": (("higher", "lower", "within"), False),
    "alike": (("higher", "lower"), True),
    "friedman": (("differ",), False),
    "wilcoxon": (("higher", "lower"), True),
    "spearman": (("higher", "lower"), True),
}
FACT = "fact"  # a metric: values that runs recorded, instead of answers
DIRECTIONS = ("higher", "lower", "within", "differ")
SHOWN, CONTRADICTED, UNDECIDED, NOT_MADE = "shown", "contradicted", "undecided", "not made"
NOT_TESTABLE = "cannot be tested"
VERDICTS = (SHOWN, CONTRADICTED, UNDECIDED, NOT_TESTABLE, NOT_MADE)


@dataclass(frozen=True)
class Claim:
    """A claim of a claim file.

    Attributes:
        left: Columns or rows of the table. If there are several, each is compared.
        right: The same for the other side.
        threshold: In points, or in percent of the right side if `relative`. For friedman it is a
            significance level.
        than: The places whose difference is subtracted, to compare the gains at two sets of places.
        units: One of UNITS.
        family: Signed-rank tests of a table with the same family are Holm-corrected together; ""
            for none.
    """

    file: str
    table: str
    id: str
    text: str
    section: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    metric: str
    over: tuple[str, ...]
    test: str
    threshold: float
    relative: bool
    direction: str
    family: str = ""
    than: tuple[str, ...] = ()
    units: str = ""

    def refuse(self, problem: str) -> PipelineError:
        return PipelineError(f"{self.file}, claim {self.id}: {problem}")

    @property
    def margin(self) -> float:
        """The threshold for left minus right, as a share.

        It is negative if the claim is that left is lower.
        """
        if self.relative:
            return 0.0
        if self.direction == "lower":
            return -self.threshold / 100
        return self.threshold / 100

    def excess(self, difference: float) -> float:
        """Return the distance of left minus right from the threshold.

        It is positive on the claim's side and negative on the other side.
        """
        if self.direction == "within":
            return self.threshold / 100 - abs(difference)
        if self.direction == "lower":
            return self.margin - difference
        return difference - self.margin

    @property
    def texts(self) -> dict[str, str]:
        """The claim as claims.csv and the page show it."""
        threshold = f"{self.threshold:g}"
        if self.relative:
            threshold += "%"
        test = self.test
        if self.units:
            test += f" of {self.units}"
        return {
            "id": self.id,
            "text": self.text,
            "table": self.table,
            "section": self.section,
            "left": " or ".join(self.left),
            "right": " or ".join(self.right),
            "test": test,
            "direction": self.direction,
            "threshold": threshold,
        }


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim; values, difference, interval and `detectable` are in points.

    Attributes:
        p: At the claim's threshold. It is two-sided, except for `alike`.
        detectable: The minimum detectable difference with power 80 %.
        detail: Further statistics.
    """

    claim: Claim
    verdict: str
    left_value: float | None = None
    right_value: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int | None = None
    detectable: float | None = None
    detail: str = ""

    @property
    def sentence(self) -> str:
        """The verdict, with the minimum detectable difference or the reason for no result."""
        if self.verdict == UNDECIDED and self.detectable is not None:
            points = format_points(self.detectable)
            return f"{UNDECIDED} (minimum detectable difference {points} points)"
        reason = ""
        if self.verdict == NOT_MADE:
            reason = self.detail
        elif self.verdict == NOT_TESTABLE:
            reason = self.detail.partition(";")[0]
        if reason:
            return f"{self.verdict}: {reason}"
        return self.verdict

    @property
    def line(self) -> dict[str, Any]:
        """The line of claims.csv."""
        line: dict[str, Any] = {**self.claim.texts, **vars(self), "sentence": self.sentence}
        del line["claim"]
        return line


# --- files ---


@lru_cache(maxsize=8)
def read_claims(text: str, file: str) -> tuple[Claim, ...]:
    """Read the claims of one file.

    Cached, because each plan and report of a process reads all of them.

    `file` is the name of the file, for errors.

    Raises:
        PipelineError: If a claim is invalid.
    """
    with readable_yaml(file):
        content = yaml.safe_load(text)
    is_mapping = isinstance(content, dict)
    if not is_mapping or not all(isinstance(entries, list) for entries in content.values()):
        raise PipelineError(f"{file}: a claim file maps each table to a list of claims.")
    claims = []
    for table, entries in content.items():
        for entry in entries:
            claims.append(claim_of(entry, table, file))
    return tuple(claims)


def claim_of(entry: Any, table: str, file: str) -> Claim:
    """Return the claim of a claim file's entry.

    Raises:
        PipelineError: If the entry is invalid.
    """
    if not isinstance(entry, dict):
        raise PipelineError(f"{file}, claim {entry}: a claim is a mapping with {', '.join(KEYS)}.")
    where = f"{file}, claim {entry.get('id', '?')}"
    check_entry(entry, where)
    threshold = str(entry["threshold"])
    try:
        number = float(threshold.removesuffix("%"))
    except ValueError:
        raise PipelineError(f"{where}: threshold {threshold} is neither points nor N%.") from None
    texts = {key: str(entry[key]) for key in TEXT_KEYS}
    claim = Claim(
        file=file,
        table=str(table),
        threshold=number,
        relative=threshold.endswith("%"),
        family=str(entry.get("family") or ""),
        units=str(entry.get("units") or ""),
        left=_names(entry["left"]),
        right=_names(entry["right"]),
        over=_names(entry["over"]),
        than=_names(entry.get("than")),
        **texts,
    )
    problem = problem_of(claim)
    if problem:
        raise claim.refuse(problem)
    return claim


def check_entry(entry: Mapping[str, Any], where: str) -> None:
    """Raise PipelineError for unknown or missing keys, and for unknown values."""
    for key in entry:
        if key not in KEYS + OPTIONAL:
            suggestion = suggest(key, KEYS + OPTIONAL)
            raise PipelineError(f"{where}: unknown key {key}: {suggestion}")
    for key in KEYS:
        if key not in entry:
            raise PipelineError(f"{where}: {key} is missing")
    for key, names in (("test", tuple(RULES)), ("direction", DIRECTIONS), ("units", UNITS)):
        value = str(entry.get(key) or "")
        if value not in names:
            raise PipelineError(f"{where}: {key} {value!r}: {suggest(value, names)}")


def problem_of(claim: Claim) -> str:
    """Return why the keys of a claim do not fit together, or ""."""
    is_count = claim.units == "count"
    name, rule = claim.test, claim.test
    if is_count:
        name, rule = f"{claim.test} with units: count", "wilcoxon"
    directions, only_zero = RULES[rule]
    several = len(claim.left) + len(claim.right) > 2
    if not claim.left:
        return "left is empty"
    if not claim.over:
        return "over names no row or column"
    if bool(claim.right) == (claim.test == "friedman"):
        return "right names the other side, and is null for friedman only"
    if claim.family and claim.test != "wilcoxon":
        return "family needs test wilcoxon"
    if claim.than and claim.units:
        return "than and units exclude each other"
    if (claim.than or claim.units) and claim.test != "difference":
        return "than and units need test difference"
    if claim.direction not in directions:
        return f"{name} needs direction {' or '.join(directions)}"
    if only_zero and claim.threshold != 0:
        return f"{name} only accepts threshold 0"
    if claim.than and (claim.relative or several):
        return "than needs one left and one right side, and a threshold in points"
    if claim.metric == FACT and (several or claim.test not in ("difference", "alike")):
        return "metric fact needs one left and one right side, and test difference or alike"
    if claim.test == "alike" and claim.metric != FACT:
        return "alike needs metric fact"
    if claim.direction == "within" and (claim.relative or claim.threshold <= 0):
        return "within needs a threshold above 0, in points"
    return ""


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(map(str, value))
    return (str(value),)


def format_points(value: float, sign: str = "") -> str:
    """Write a number in points with one decimal.

    Below 0.05, such as a difference of losses, it has one significant digit.
    """
    if not round(value, 9):
        return "0"
    form = "1g" if abs(value) < 0.05 else "1f"
    return f"{value:{sign}.{form}}"


# --- verdicts ---


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
    verdict = word_of(claim, contrast.low, contrast.high)
    return Verdict(
        claim,
        verdict,
        left_value=100 * left,
        right_value=100 * right,
        difference=100 * contrast.difference,
        low=100 * contrast.low,
        high=100 * contrast.high,
        p=p_of(claim, contrast),
        n=contrast.n,
        detectable=100 * contrast.detectable(),
        detail=detail,
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
    return max(range(len(ps)), key=lambda index: ps[index])


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
