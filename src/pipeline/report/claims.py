"""Claims about a table and their verdicts: shown, contradicted, or undecided with the minimum
detectable difference.

A claim file is YAML: table -> its claims, each with exactly the keys of KEYS;
conf/claims/layer_swapping.yaml documents them. Code alone decides: a claim is shown if an interval
(or a test at 5 %) lies on its side of the threshold, contradicted if it lies on the other side,
else undecided. Nothing here reads files or runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
UNITS = (
    "",
    "each",
    "count",
)  # of a difference: the mean over all places, each place apart, how many are on its side
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

    left, right: columns or rows of the table; of several, each one counts. threshold: in points; in
    percent of the right side if `relative`; for friedman a significance level. than: the places
    whose difference is subtracted (which languages gain most); units: one of UNITS. family: claims
    of a table with the same family are Holm-corrected together; "" for none.
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
        """The threshold for left minus right, as a share; negative if the claim is that left is
        lower.
        """
        if self.relative:
            points = 0.0
        else:
            points = self.threshold / 100
        if self.direction == "lower":
            return -points
        return points

    def excess(self, difference: float) -> float:
        """How far left minus right is on the claim's side of its threshold."""
        if self.direction == "within":
            return self.threshold / 100 - abs(difference)
        if self.direction == "lower":
            return self.margin - difference
        return difference - self.margin

    @property
    def texts(self) -> dict[str, str]:
        """The claim as claims.csv and the page show it."""
        return {
            **{name: getattr(self, name) for name in ("id", "text", "table", "section")},
            "left": " or ".join(self.left),
            "right": " or ".join(self.right),
            "test": " of ".join(filter(None, [self.test, self.units])),
            "direction": self.direction,
            "threshold": f"{self.threshold:g}{'%' * self.relative}",
        }


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim. Values, difference, interval and detectable are in points.

    p: at the claim's threshold, two-sided but for `alike`; detectable: the minimum detectable
        difference at power 80 %;
    detail: further statistics.
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
        """The verdict; if undecided, with the minimum detectable difference; if it has no result,
        with the reason.
        """
        if self.verdict == UNDECIDED and self.detectable is not None:
            return (
                f"{UNDECIDED} (minimum detectable difference {format_points(self.detectable)}"
                " points)"
            )
        why = {NOT_MADE: self.detail, NOT_TESTABLE: self.detail.partition(";")[0]}.get(self.verdict)
        if why:
            return f"{self.verdict}: {why}"
        return self.verdict

    @property
    def line(self) -> dict[str, Any]:
        """The line of claims.csv."""
        numbers = {}
        for name, value in vars(self).items():
            if name != "claim":
                numbers[name] = value
        return {**self.claim.texts, **numbers, "sentence": self.sentence}


# --- files ---


@lru_cache(maxsize=8)
def read_claims(text: str, file: str) -> tuple[Claim, ...]:
    """Read the claims of one file. Cached, as each plan and report of a process reads all of them.

    Raises: PipelineError: a claim is invalid; in one line.
    """
    with readable_yaml(file):
        content = yaml.safe_load(text)
    if not isinstance(content, dict) or not all(
        isinstance(item, list) for item in content.values()
    ):
        raise PipelineError(f"{file}: a claim file maps each table to a list of claims")
    return tuple(
        claim_of(keys, table, file) for table, listed in content.items() for keys in listed
    )


def claim_of(keys: Any, table: str, file: str) -> Claim:
    """Return the claim of a claim file's entry. Raises PipelineError if it is invalid."""
    if not isinstance(keys, dict):
        raise PipelineError(f"{file}, claim {keys}: a claim is a mapping with {', '.join(KEYS)}")
    where = f"{file}, claim {keys.get('id', '?')}"
    for key in keys:
        if key not in KEYS + OPTIONAL:
            raise PipelineError(f"{where}: unknown key {key}: {suggest(key, KEYS + OPTIONAL)}")
    missing = [key for key in KEYS if key not in keys]
    if missing:
        raise PipelineError(f"{where}: {missing[0]} is missing")
    for key, names in (("test", tuple(RULES)), ("direction", DIRECTIONS), ("units", UNITS)):
        value = str(keys.get(key) or "")
        if value not in names:
            raise PipelineError(f"{where}: {key} {value!r}: {suggest(value, names)}")
    threshold = str(keys["threshold"])
    try:
        number = float(threshold.removesuffix("%"))
    except ValueError:
        raise PipelineError(f"{where}: threshold {threshold} is neither points nor N%") from None
    texts = {
        key: str(keys[key]) for key in ("id", "text", "section", "metric", "test", "direction")
    }
    claim = Claim(
        file=file,
        table=str(table),
        threshold=number,
        relative=threshold.endswith("%"),
        family=str(keys.get("family") or ""),
        units=str(keys.get("units") or ""),
        left=_names(keys["left"]),
        right=_names(keys["right"]),
        over=_names(keys["over"]),
        than=_names(keys.get("than")),
        **texts,
    )
    problem = problem_of(claim)
    if problem:
        raise claim.refuse(problem)
    return claim


def problem_of(claim: Claim) -> str:
    """Return why the keys of a claim do not go together, or an empty text."""
    is_count = claim.units == "count"
    directions, only_zero = RULES["wilcoxon" if is_count else claim.test]
    if is_count:
        name = f"{claim.test} with units: count"
    else:
        name = claim.test
    several = len(claim.left) + len(claim.right) > 2
    if not claim.left:
        return "left is empty"
    if not claim.over:
        return "over names no row or column"
    if bool(claim.right) == (claim.test == "friedman"):
        return "right is the other side, null for friedman alone"
    if (claim.than or claim.units) and (claim.test != "difference" or (claim.than and claim.units)):
        return "than and units are keys of test difference, one of them at a time"
    if claim.direction not in directions:
        return f"{name} needs direction {' or '.join(directions)}"
    if only_zero and claim.threshold != 0:
        return f"{name} only accepts threshold 0"
    if claim.than and (claim.relative or several):
        return (
            "with than, one left and one right side are compared at `over` and at `than`, in points"
        )
    if claim.metric == FACT and (several or claim.test not in ("difference", "alike")):
        return "metric fact needs one left and one right side, and test difference or alike"
    if claim.test == "alike" and claim.metric != FACT:
        return "alike needs metric fact"
    if claim.direction == "within" and (claim.relative or claim.threshold <= 0):
        return "within needs a threshold above 0, in points"
    return ""


def _names(value: Any) -> tuple[str, ...]:
    """Return a list of names; of one name, a list of it."""
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(map(str, value))
    return (str(value),)


def format_points(value: float, sign: str = "") -> str:
    """Write a number in points with one decimal; below 0.05, as differences of losses are, with one
    significant digit.
    """
    if round(value, 9):
        return f"{value:{sign}.{'1g' if abs(value) < 0.05 else '1f'}}"
    return "0"


# --- verdicts ---


def word_of(claim: Claim, low: float, high: float) -> str:
    """Return the verdict by the interval of left minus right, in shares (for a relative claim: left
    minus scaled right).
    """
    sides, around = (
        [claim.excess(end) for end in (low, high)],
        claim.direction == "within" and low <= 0 <= high,
    )
    if min(sides) > 0:
        return SHOWN
    if max(sides) < 0 and not around:
        return CONTRADICTED
    return UNDECIDED


def word_of_all(verdicts: Iterable[str]) -> str:
    """Return the verdict of several parts: shown if all are, which needs no correction;
    contradicted if one is.
    """
    distinct = set(verdicts)
    if distinct == {SHOWN}:
        return SHOWN
    if CONTRADICTED in distinct:
        return CONTRADICTED
    return UNDECIDED


def p_of(claim: Claim, contrast: Contrast) -> float:
    """Two-sided p at the claim's threshold: below 5 % if the interval lies on one side of it; for
    `within`, at the nearer of its two thresholds.
    """
    if claim.direction == "within":
        return max(contrast.p_of(-claim.threshold / 100), contrast.p_of(claim.threshold / 100))
    return contrast.p_of(claim.margin)


def judge_difference(
    claim: Claim, contrast: Contrast, left: float, right: float, detail: str = ""
) -> Verdict:
    return Verdict(
        claim,
        word_of(claim, contrast.low, contrast.high),
        100 * left,
        100 * right,
        100 * contrast.difference,
        100 * contrast.low,
        100 * contrast.high,
        p_of(claim, contrast),
        contrast.n,
        100 * contrast.detectable(),
        detail,
    )


class Unit(NamedTuple):
    """A part of a claim that is tested on its own: a place, a candidate a side, or a pair of
    experts.
    """

    name: str
    contrast: Contrast
    left: float
    right: float


def count_units(claim: Claim, units: Sequence[Unit]) -> tuple[int, str]:
    """(units on the claim's side, the difference of each as text)."""
    texts = (f"{unit.name} {100 * unit.contrast.difference:+.1f}" for unit in units)
    return sum(claim.excess(unit.contrast.difference) > 0 for unit in units), ", ".join(texts)


def judge_every(claim: Claim, units: Sequence[Unit]) -> Verdict:
    """Return the verdict over separate units: shown if all are, contradicted if one is.

    All of several units is tested at the largest of their p. A contradiction can come from any of
    them, so its p is Holm-corrected over all units. The numbers are those of the unit whose p
    decides.
    """
    verdicts = [judge_difference(claim, *unit[1:]) for unit in units]
    corrected = holm([verdict.p or 0.0 for verdict in verdicts])
    words, ps = [], []
    for verdict, p in zip(verdicts, corrected, strict=True):
        is_against = verdict.verdict == CONTRADICTED
        words.append(UNDECIDED if is_against and p >= LEVEL else verdict.verdict)
        ps.append(p if is_against else verdict.p or 0.0)
    decides = deciding_part(words, ps)
    won, text = count_units(claim, units)
    return replace(
        verdicts[decides],
        verdict=word_of_all(words),
        p=ps[decides],
        detectable=max(verdict.detectable or 0.0 for verdict in verdicts),
        detail=(
            f"{won} of {len(units)} on its side, {words.count(SHOWN)} shown; "
            f"the numbers are those of {units[decides].name}, whose p decides: {text}"
        ),
    )


def deciding_part(words: Sequence[str], ps: Sequence[float]) -> int:
    """Return the index of the part whose p is that of all: the clearest contradiction, otherwise
    the largest p.
    """
    against = [index for index, word in enumerate(words) if word == CONTRADICTED]
    if against:
        return min(against, key=lambda index: ps[index])
    return max(range(len(ps)), key=lambda index: ps[index])


def judge_wins(claim: Claim, units: Sequence[Unit], overall: Verdict, experts: bool) -> Verdict:
    """Return the verdict by the papers' count.

    A claim is shown if every unit lies on its side and their mean does so significantly: a count
    alone proves nothing, as units share experts and questions. It is contradicted if the mean is,
    or if `every` unit of its own is. If units are pairs of experts, only the mean counts how much
    experts differ.
    """
    won, text = count_units(claim, units)
    verdict, p = overall.verdict, overall.p
    if won < len(units) and verdict == SHOWN:
        verdict = UNDECIDED
    if not experts and verdict != CONTRADICTED:
        every = judge_every(claim, units)
        if every.verdict == CONTRADICTED:
            verdict, p = CONTRADICTED, every.p
    return replace(
        overall, verdict=verdict, p=p, detail=f"{won} of {len(units)} on its side: {text}"
    )


def judge_alike(claim: Claim, likeness: Alike) -> Verdict:
    text = (
        f"mean correlation {likeness.within:+.2f} within a kind, {likeness.between:+.2f} between, "
    )
    text += f"{likeness.labellings} labellings"
    if not likeness.least_p < LEVEL:
        return Verdict(
            claim,
            NOT_TESTABLE,
            detail=f"too few trainings, or no profile, for any p below {LEVEL}; {text}",
        )
    side = (likeness.p < LEVEL) - (
        likeness.opposed < LEVEL
    )  # of the difference of the correlations, 0 if it is not significant
    if claim.direction == "higher":
        p = likeness.p
    else:
        p = likeness.opposed
    return Verdict(claim, word_of(claim, side, side), p=p, n=likeness.n, detail=text)


def judge_friedman(claim: Claim, test: Friedman, blocks: int) -> Verdict:
    """Return the verdict: shown if both p are small.

    Blocks of one model share a math expert and are not independent.
    """
    p = max(test.p, test.permuted)
    text = (
        f"chi-squared {test.statistic:.2f}, p {test.p:.4f}, permuted within models"
        f" {test.permuted:.4f}"
    )
    return Verdict(claim, SHOWN if p < claim.threshold else UNDECIDED, p=p, n=blocks, detail=text)


@dataclass(frozen=True)
class Ranked:
    """A pair of columns over blocks: mean difference (a share), p of the signed-rank test whose
    signs flip by cluster, and the numbers of blocks and clusters (models, whose blocks share
    experts).
    """

    left: str
    right: str
    difference: float
    p: float
    blocks: int
    clusters: int


def judge_wilcoxon(claims: Sequence[tuple[Claim, Sequence[Ranked]]]) -> list[Verdict]:
    """Return verdicts of claims with their pairs, p Holm-corrected over all pairs of a family.

    A family with too few clusters for any result to be significant (all on one side) cannot be
    tested.
    """
    families: dict[str, list[Ranked]] = {}
    for claim, pairs in claims:
        families.setdefault(family_of(claim), []).extend(pairs)
    adjusted = {
        family: iter(holm([pair.p for pair in members])) for family, members in families.items()
    }
    verdicts = []
    for claim, pairs in claims:
        family = family_of(claim)
        ps = [next(adjusted[family]) for _ in pairs]
        verdicts.append(judge_ranked(claim, pairs, ps, len(families[family])))
    return verdicts


def judge_ranked(claim: Claim, pairs: Sequence[Ranked], ps: Sequence[float], count: int) -> Verdict:
    """Return the verdict on a claim by its signed-rank tests.

    ps: corrected over the family's `count` tests.
    """
    words, texts = [], []
    for pair, p in zip(pairs, ps, strict=True):
        words.append(word_of(claim, pair.difference, pair.difference) if p < LEVEL else UNDECIDED)
        difference = f"{pair.left} minus {pair.right} {100 * pair.difference:+.1f}"
        texts.append(f"{difference}, p {pair.p:.4f}, {p:.4f} by Holm over {count}")
    verdict, text = word_of_all(words), "; ".join(texts)
    clusters = min(pair.clusters for pair in pairs)
    least = count * 2 / 2**clusters
    if least >= LEVEL:
        verdict = NOT_TESTABLE
        text = (
            f"the smallest possible p of {clusters} clusters is {min(1, least):.3g} by Holm over"
            f" {count}; {text}"
        )
    decides = deciding_part(words, ps)
    pair = pairs[decides]
    return Verdict(
        claim, verdict, difference=100 * pair.difference, p=ps[decides], n=pair.blocks, detail=text
    )


def family_of(claim: Claim) -> str:
    return claim.family or f"claim {claim.id}"


def correct_verdicts(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return verdicts with p Holm-corrected over each family of claims.

    Signed-rank tests are already corrected.
    """
    families: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.claim.family and verdict.claim.test != "wilcoxon" and verdict.p is not None:
            families.setdefault(verdict.claim.family, []).append(verdict)
    corrected: dict[str, Verdict] = {}
    for members in families.values():
        ps = holm([verdict.p or 0.0 for verdict in members])
        for verdict, p in zip(members, ps, strict=True):
            details = [verdict.detail] if verdict.detail else []
            details.append(f"p {verdict.p:.4f} before Holm's correction over {len(members)}")
            word = verdict.verdict if p < LEVEL else UNDECIDED
            corrected[verdict.claim.id] = replace(
                verdict, p=p, verdict=word, detail="; ".join(details)
            )
    return [corrected.get(verdict.claim.id, verdict) for verdict in verdicts]


def judge_spearman(claim: Claim, correlations: Correlations, n: int) -> Verdict:
    if math.isnan(correlations.low):
        return Verdict(
            claim,
            NOT_TESTABLE,
            detail="a correlation needs four pairs per group that are not all equal",
        )
    text = (
        f"rho {correlations.left:+.2f} against {correlations.right:+.2f}; Fisher's z"
        f" {correlations.difference:+.2f}"
    )
    text += f" ({correlations.low:+.2f} to {correlations.high:+.2f})"
    return Verdict(
        claim,
        word_of(claim, correlations.low, correlations.high),
        p=correlations.p,
        n=n,
        detail=text,
    )
