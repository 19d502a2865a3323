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
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from pipeline.errors import PipelineError
from pipeline.files import readable_yaml

# test -> its directions, the keys that it reads besides those of all claims
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "difference": (("higher", "lower", "within"), ("right", "than", "units")),
    "alike": (("higher", "lower"), ("right",)),
    "friedman": (("differ",), ()),
    "wilcoxon": (("higher", "lower"), ("right", "family")),
    "spearman": (("higher", "lower"), ("right",)),
}
FACT = "fact"  # a metric: values that runs recorded, instead of answers
SHOWN, CONTRADICTED, UNDECIDED, NOT_MADE = "shown", "contradicted", "undecided", "not made"
NOT_TESTABLE = "cannot be tested"
VERDICTS = (SHOWN, CONTRADICTED, UNDECIDED, NOT_TESTABLE, NOT_MADE)


def as_names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return (str(value),)


Names = Annotated[tuple[str, ...], BeforeValidator(as_names)]


@dataclass(frozen=True)
class Claim:
    """A claim of a claim file.

    Attributes:
        left: Columns or rows of the table. If there are several, each is compared.
        right: The same for the other side.
        threshold: In points, or in percent of the right side if `relative`. For friedman it is a
            significance level.
        than: The places whose difference is subtracted, to compare the gains at two sets of places.
        units: What is tested: the mean difference over all places, each place separately, or also
            the number of places on the claim's side.
        family: Signed-rank tests of a table with the same family are Holm-corrected together; ""
            for none.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    file: str
    table: str
    id: str
    text: str
    section: str
    left: Names
    right: Names
    metric: str
    over: Names
    test: Literal["difference", "alike", "friedman", "wilcoxon", "spearman"]
    threshold: float
    relative: bool
    direction: Literal["higher", "lower", "within", "differ"]
    family: str = ""
    than: Names = ()
    units: Literal["", "each", "count"] = ""

    def refuse(self, problem: str) -> PipelineError:
        return PipelineError(f"{self.file}, claim {self.id}: {problem}")

    @property
    def factor(self) -> float:
        """The weight of the right side, above 1 for a relative claim."""
        if self.relative:
            return 1 + self.threshold / 100
        return 1.0

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
        test: str = self.test
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
    def line(self) -> dict[str, Any]:
        """The line of claims.csv."""
        line: dict[str, Any] = {**self.claim.texts, **vars(self)}
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
        raise PipelineError(f"{file}, claim {entry}: a claim is a mapping, as in conf/claims.")
    threshold = str(entry.get("threshold"))
    fixed: Mapping[str, Any] = {
        "file": file,
        "table": str(table),
        "threshold": threshold.removesuffix("%"),
        "relative": threshold.endswith("%"),
    }
    try:
        claim = TypeAdapter(Claim).validate_python({**entry, **fixed})
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        value = entry.get(key, "")
        raise PipelineError(
            f"{file}, claim {entry.get('id', '?')}: {key}={value}: {first['msg']}."
        ) from None
    problem = problem_of(claim)
    if problem:
        raise claim.refuse(problem)
    return claim


def problem_of(claim: Claim) -> str:
    """Return why the keys of a claim do not fit together, or ""."""
    directions, read = RULES[claim.test]
    for key in ("right", "family", "than", "units"):
        if getattr(claim, key) and key not in read:
            return f"test {claim.test} does not read {key}"
    if not claim.left or ("right" in read and not claim.right):
        return "a side is empty"
    if claim.direction not in directions:
        return f"{claim.test} needs direction {' or '.join(directions)}"
    one_each = len(claim.left) == len(claim.right) == 1
    if (claim.than or claim.metric == FACT) and not one_each:
        return "than and metric fact need one left and one right side"
    if claim.than and (claim.units or claim.relative):
        return "than excludes units, and needs a threshold in points"
    if claim.direction == "within" and (claim.relative or claim.threshold <= 0):
        return "within needs a threshold above 0, in points"
    if claim.test in ("alike", "wilcoxon", "spearman") and claim.threshold:
        return f"{claim.test} needs threshold 0"
    return ""


def format_points(value: float, sign: str = "") -> str:
    """Write a number in points with one decimal.

    Below 0.05, such as a difference of losses, it has one significant digit.
    """
    if not round(value, 9):
        return "0"
    form = "1g" if abs(value) < 0.05 else "1f"
    return f"{value:{sign}.{form}}"
