"""Claims about a table, and what results make of them: shown, contradicted, or undecided and what could have been seen.

A claim file is YAML: table -> its claims, each with exactly the keys of KEYS; conf/claims/layer_swapping.yaml says what
they mean. Code alone decides: a claim is shown where an interval (or a test at 5 %) lies on its side of the threshold,
contradicted where it lies on the other, else undecided. Nothing here looks at a file or a run.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import yaml

from pipeline.errors import PipelineError, meant
from pipeline.report.ranks import Correlations, Friedman, holm
from pipeline.report.sheets import comma_separated
from pipeline.report.statistics import LEVEL, Contrast, McNemar

KEYS = ("id", "text", "section", "left", "right", "metric", "over", "test", "threshold", "direction")
TESTS = ("difference", "every", "wins", "mcnemar", "friedman", "wilcoxon", "spearman")
DIRECTIONS = ("higher", "lower", "within", "differ")
SHOWN, CONTRADICTED, UNDECIDED, NOT_MADE = "shown", "contradicted", "undecided", "not made"


@dataclass(frozen=True)
class Claim:
    """left, right: columns or rows of the table; of several the best counts. threshold: points, where `relative`
    percent of the right side, of friedman a level."""

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

    @classmethod
    def plain(cls, table: str, left: str, right: str, metric: str, place: str) -> Claim:
        """That left is higher than right at one place: what a table's own comparisons ask."""
        return cls("", table, f"{left} against {right}", "", "", (left,), (right,), metric, (place,), "difference", 0,
                   False, "higher")  # fmt: skip

    def refuse(self, problem: str) -> PipelineError:
        return PipelineError(f"{self.file}, claim {self.id}: {problem}")

    @property
    def margin(self) -> float:
        """What left minus right is held against, as a share; a lower left side has it below 0."""
        points = 0.0 if self.relative else self.threshold / 100
        return -points if self.direction == "lower" else points


@dataclass(frozen=True)
class Verdict:
    """What results make of a claim, a line of claims.csv. Values, difference, interval and could_see in points.

    could_see: the smallest difference that 80 % of such tables would show; detail: what else was computed, in words.
    """

    id: str
    text: str
    table: str
    section: str
    left: str
    right: str
    test: str
    direction: str
    threshold: str
    verdict: str
    left_value: float | None = None
    right_value: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int | None = None
    could_see: float | None = None
    detail: str = ""

    @property
    def sentence(self) -> str:
        """shown; contradicted; undecided (could have seen 4.6 points); not made: why."""
        if self.verdict == UNDECIDED and self.could_see is not None:
            return f"{UNDECIDED} (could have seen {self.could_see:.1f} points)"
        return f"{NOT_MADE}: {self.detail}" if self.verdict == NOT_MADE else self.verdict


# ---------------------------------------------------------------------------------------------------- files


def read_claims(text: str, file: str) -> list[Claim]:
    """The claims of one file. Raises PipelineError, in one sentence, for what is no claim."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PipelineError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(one, list) for one in found.values()):
        raise PipelineError(f"{file}: a claim file gives each table a list of claims")
    claims = [claim_of(words, table, file) for table, listed in found.items() for words in listed]
    names = [claim.id for claim in claims]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise PipelineError(f"{file}: two claims have the id {twice[0]}")
    return claims


def claim_of(words: Any, table: str, file: str) -> Claim:
    where = f"{file}, claim {words.get('id', '?') if isinstance(words, dict) else words}"
    if not isinstance(words, dict):
        raise PipelineError(f"{where}: a claim is a mapping with {', '.join(KEYS)}")
    for key in words:
        if key not in KEYS:
            raise PipelineError(f"{where}: unknown key {key}: {meant(key, KEYS)}")
    if missing := [key for key in KEYS if key not in words]:
        raise PipelineError(f"{where}: {missing[0]} is missing")
    for key, known in (("test", TESTS), ("direction", DIRECTIONS)):
        if words[key] not in known:
            raise PipelineError(f"{where}: {key} {words[key]!r}: {meant(words[key], known)}")
    threshold, relative = str(words["threshold"]), str(words["threshold"]).endswith("%")
    try:
        number = float(threshold.removesuffix("%"))
    except ValueError:
        raise PipelineError(f"{where}: threshold {threshold} is neither points nor N%") from None
    left, right, over = (_names(words[key]) for key in ("left", "right", "over"))
    test, direction = words["test"], words["direction"]
    problem = (
        "left is empty"
        if not left
        else "over names no row or column"
        if not over
        else "friedman ranks the columns of left, right is null and direction differ"
        if test == "friedman" and (right or direction != "differ")
        else "only friedman goes without a right side, and with direction differ"
        if test != "friedman" and (not right or direction == "differ")
        else f"{test} is about higher and lower"
        if test in ("every", "wins", "mcnemar", "wilcoxon", "spearman") and direction == "within"
        else f"{test} knows no threshold but 0"
        if test in ("wins", "mcnemar", "wilcoxon", "spearman") and number
        else "within needs a threshold above 0, in points"
        if direction == "within" and (relative or number <= 0)
        else ""
    )
    if problem:
        raise PipelineError(f"{where}: {problem}")
    named = {key: str(words[key]) for key in ("id", "text", "section", "metric", "test", "direction")}
    return Claim(
        file=file, table=str(table), left=left, right=right, over=over, threshold=number, relative=relative, **named
    )


def _names(value: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in (value if isinstance(value, list) else [] if value is None else [value]))


def claims_csv(verdicts: Sequence[Verdict]) -> str:
    """claims.csv: a line a claim, in the files' order; numbers with three decimals of a point."""
    lines: list[list[Any]] = [[*(item.name for item in fields(Verdict)), "sentence"]]
    for verdict in verdicts:
        values = [
            round(one, 5 if name == "p" else 3) if isinstance(one, float) else one
            for name, one in asdict(verdict).items()
        ]
        lines.append([*values, verdict.sentence])
    return comma_separated(lines)


def read_verdicts(text: str) -> list[Verdict]:
    """The verdicts of a claims.csv: what a page shows, wherever it is made."""
    numbers = ("left_value", "right_value", "difference", "low", "high", "p", "could_see")
    verdicts = []
    for row in csv.DictReader(io.StringIO(text)):
        row.pop("sentence")
        values: dict[str, Any] = {name: (float(row[name]) if row[name] else None) for name in numbers}
        verdicts.append(Verdict(**{**row, **values, "n": int(row["n"]) if row["n"] else None}))
    return verdicts


# ---------------------------------------------------------------------------------------------------- verdicts


def verdict(claim: Claim, word: str = UNDECIDED, **numbers: Any) -> Verdict:
    """The line of a claim. Values and differences are given as shares, and told in points."""
    points = ("left_value", "right_value", "difference", "low", "high", "could_see")
    told = {name: 100 * one if name in points and one is not None else one for name, one in numbers.items()}
    threshold = f"{claim.threshold:g}{'%' if claim.relative else ''}"
    return Verdict(
        id=claim.id, text=claim.text, table=claim.table, section=claim.section, left=" or ".join(claim.left),
        right=" or ".join(claim.right), test=claim.test, direction=claim.direction, threshold=threshold, verdict=word,
        **told,
    )  # fmt: skip


def not_made(claim: Claim, reason: str) -> Verdict:
    return verdict(claim, NOT_MADE, detail=reason)


def word_of(claim: Claim, low: float, high: float) -> str:
    """Where the interval of left minus right (of a relative claim, left minus so much of right) lies, as shares."""
    if claim.direction == "within":
        reach = claim.threshold / 100
        return SHOWN if -reach < low and high < reach else CONTRADICTED if low > reach or high < -reach else UNDECIDED
    above, below = low > claim.margin, high < claim.margin
    shown, contradicted = (above, below) if claim.direction == "higher" else (below, above)
    return SHOWN if shown else CONTRADICTED if contradicted else UNDECIDED


def judge_difference(claim: Claim, found: Contrast, left: float, right: float, detail: str = "") -> Verdict:
    return verdict(
        claim, word_of(claim, found.low, found.high), left_value=left, right_value=right,
        difference=found.difference, low=found.low, high=found.high, p=found.p, n=found.n, could_see=found.could_see,
        detail=detail,
    )  # fmt: skip


def judge_every(claim: Claim, found: Sequence[tuple[str, Contrast, Contrast]], left: float, right: float) -> Verdict:
    """Each unit on its own (name, contrast, contrast less the margin): shown where all are, which needs no correction;
    contradicted where one lies on the other side, at 5 % by Holm over all units."""
    words = [word_of(claim, one.low, one.high) for _, one, _ in found]
    against = [held.difference < 0 if claim.direction == "higher" else held.difference > 0 for _, _, held in found]
    opposed = [p < LEVEL and bad for p, bad in zip(holm([held.p for _, _, held in found]), against, strict=True)]
    word = SHOWN if all(one == SHOWN for one in words) else CONTRADICTED if any(opposed) else UNDECIDED
    sign = 1 if claim.direction == "higher" else -1
    worst = min((one for _, one, _ in found), key=lambda one: sign * one.difference)
    on_side = sum(not bad and held.difference != 0 for bad, (_, _, held) in zip(against, found, strict=True))
    told = ", ".join(f"{name} {100 * one.difference:+.1f}" for name, one, _ in found)
    return verdict(
        claim, word, left_value=left, right_value=right, difference=worst.difference, low=worst.low, high=worst.high,
        p=worst.p, n=worst.n, could_see=max(one.could_see for _, one, _ in found),
        detail=f"{on_side} of {len(found)} on its side, {words.count(SHOWN)} shown; here the least of them: {told}",
    )  # fmt: skip


def judge_wins(
    claim: Claim, found: Sequence[tuple[str, Contrast, Contrast]], mean: Contrast, left: float, right: float
) -> Verdict:
    """As the papers count: shown where every unit lies on its side and the mean over all of them significantly so (a
    count alone proves nothing, as units share experts and questions); contradicted where `every` is, or the mean lies
    significantly on the other side."""
    whole, each = judge_difference(claim, mean, left, right), judge_every(claim, found, left, right)
    sign = 1 if claim.direction == "higher" else -1
    wins = sum(sign * one.difference > 0 for _, one, _ in found)
    word = whole.verdict if wins == len(found) or whole.verdict == CONTRADICTED else UNDECIDED
    told = ", ".join(f"{name} {100 * one.difference:+.1f}" for name, one, _ in found)
    word = CONTRADICTED if each.verdict == CONTRADICTED else word
    return replace(whole, verdict=word, detail=f"{wins} of {len(found)} on its side: {told}")


def judge_mcnemar(claim: Claim, test: McNemar, found: Contrast, left: float, right: float) -> Verdict:
    on_side = found.difference > 0 if claim.direction == "higher" else found.difference < 0
    word = UNDECIDED if test.p >= LEVEL else SHOWN if on_side else CONTRADICTED
    told = f"{test.first} answers right for the left alone, {test.second} for the right alone"
    return replace(judge_difference(claim, found, left, right, told), verdict=word, p=test.p)


def judge_friedman(claim: Claim, found: Friedman, blocks: int) -> Verdict:
    """Shown where both p are small: blocks of one model share a math expert, so the permuted one has to agree."""
    word = SHOWN if max(found.p, found.permuted) < claim.threshold else UNDECIDED
    ranks = ", ".join(f"{name} {rank:.2f}" for name, rank in zip(claim.left, found.mean_ranks, strict=True))
    names = claim.left

    def pairs(p: Any) -> str:
        apart = [f"{names[i]} and {names[j]}" for i in range(len(names)) for j in range(i) if p[i, j] < LEVEL]
        return ", ".join(apart) or "none"

    told = (
        f"chi-squared {found.statistic:.2f}, p {found.p:.4f}, permuted within models {found.permuted:.4f}; mean ranks: "
        f"{ranks}; critical difference {found.critical_difference:.2f}; apart by Nemenyi: {pairs(found.nemenyi)}; "
        f"by Conover with Holm: {pairs(found.conover)}"
    )
    return verdict(claim, word, p=max(found.p, found.permuted), n=blocks, detail=told)


@dataclass(frozen=True)
class Ranked:
    """A pair of columns over blocks: mean difference (a share), p of the signed-rank test over single blocks and over
    models, and what a t-test of the same blocks could have seen."""

    left: str
    right: str
    difference: float
    p: float
    p_of_clusters: float
    could_see: float
    blocks: int


def judge_wilcoxon(claims: Sequence[tuple[Claim, Sequence[Ranked]]]) -> list[Verdict]:
    """Claims with their pairs; p by Holm within each family: all pairs of a table and section."""
    adjusted: dict[tuple[str, int], float] = {}
    for family in dict.fromkeys((claim.table, claim.section) for claim, _ in claims):
        members = [
            (claim.id, place, pair.p)
            for claim, pairs in claims
            if (claim.table, claim.section) == family
            for place, pair in enumerate(pairs)
        ]
        for (name, place, _), p in zip(members, holm([p for _, _, p in members]), strict=True):
            adjusted[name, place] = p
    found = []
    for claim, pairs in claims:
        sign = 1 if claim.direction == "higher" else -1
        holms = [adjusted[claim.id, place] for place in range(len(pairs))]
        small = [p < LEVEL for p in holms]
        on_side = [sign * pair.difference > 0 for pair in pairs]
        shown = all(one and side for one, side in zip(small, on_side, strict=True))
        opposed = any(one and not side for one, side in zip(small, on_side, strict=True))
        worst = max(range(len(pairs)), key=lambda at: (-sign * pairs[at].difference, holms[at]))
        told = "; ".join(
            f"{pair.left} less {pair.right} {100 * pair.difference:+.1f}, p {p:.4f} by Holm, over models alone "
            f"{pair.p_of_clusters:.3f}"
            for pair, p in zip(pairs, holms, strict=True)
        )
        found.append(verdict(
            claim, SHOWN if shown else CONTRADICTED if opposed else UNDECIDED, difference=pairs[worst].difference,
            p=holms[worst], n=pairs[worst].blocks, could_see=max(pair.could_see for pair in pairs), detail=told,
        ))  # fmt: skip
    return found


def judge_spearman(claim: Claim, found: Correlations, n: int) -> Verdict:
    low, high = (found.low, found.high) if claim.direction == "higher" else (-found.high, -found.low)
    word = SHOWN if low > 0 else CONTRADICTED if high < 0 else UNDECIDED
    told = f"rho {found.left:+.2f} against {found.right:+.2f}; Fisher's z {found.difference:+.2f}"
    told += f" ({found.low:+.2f} to {found.high:+.2f})"
    return verdict(claim, word, p=found.p, n=n, detail=told)
