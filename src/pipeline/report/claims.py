"""Claims about a table and their verdicts.

A claim file is YAML: table -> its claims, each with exactly the keys of KEYS;
conf/claims/layer_swapping.yaml documents them. A claim is shown if an interval (or a test at 5 %)
lies on its side of the threshold, and contradicted if it lies on the other side. Otherwise it is
undecided, with the minimum detectable difference. This module reads no runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from pipeline.errors import PipelineError, suggest
from pipeline.files import readable_yaml

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
