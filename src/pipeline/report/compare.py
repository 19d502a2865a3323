"""A table's contrasts as its page shows them: Holm's correction over all of them, and the headline.

A table's primary comparison has as much weight in the correction as all others together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.stats.ranks import holm
from pipeline.stats.statistics import LEVEL
from pipeline.text import pluralize

MOST_SENTENCES = 4  # on significant differences

Line = Mapping[str, Any]  # a line of contrasts.csv
PAIR = ("left", "right", "place")  # the keys of a line that say what it compares


def correct_contrasts(lines: Sequence[Line], primary: Sequence[str] = ()) -> list[Line]:
    """Return the lines with `p_holm` and `primary`.

    `p_holm` is p after Holm's correction over all lines that have a p and are not exploratory.

    Args:
        lines: The lines of contrasts.csv.
        primary: Left, right and place of the primary comparison.
    """
    ps: dict[int, float] = {}
    for index, line in enumerate(lines):
        if line["p"] is not None and not line["exploratory"]:
            ps[index] = line["p"]
    is_first = [is_primary(lines[index], primary) for index in ps]
    tested = list(ps.values())
    if primary and tested and not any(is_first):
        # a missing primary comparison keeps its half of the error rate
        tested.append(1.0)
        is_first.append(True)
    others = max(1, len(tested) - 1)
    corrected = holm(tested, [others if first else 1 for first in is_first])
    p_holm = dict(zip(ps, corrected, strict=False))
    with_p: list[Line] = []
    for index, line in enumerate(lines):
        first = is_primary(line, primary)
        with_p.append({**line, "p_holm": p_holm.get(index), "primary": first})
    return with_p


def is_primary(line: Line, primary: Sequence[str]) -> bool:
    return [line[name] for name in PAIR] == [*primary]


def is_significant(line: Line) -> bool:
    return line["p_holm"] is not None and line["p_holm"] < LEVEL


def holm_level(count: int, is_first: bool, has_first: bool) -> float:
    """Return the level of a comparison in the first step of Holm's correction over `count`.

    The primary comparison, if there is one, has half of the error rate.

    Args:
        count: The number of comparisons.
        is_first: True for the primary comparison.
        has_first: True if there is a primary comparison.
    """
    if has_first and not is_first:
        return LEVEL / 2 / max(1, count - 1)
    if not is_first:
        return LEVEL / max(1, count)
    if count > 1:
        return LEVEL / 2
    return LEVEL


def headline_sentences(lines: Sequence[Line], primary: Sequence[str] = ()) -> list[str]:
    """Return the result of a table, in sentences.

    The first sentence is about the primary comparison. Then come other significant differences, and
    the smallest and largest difference that the other comparisons would have detected.

    Args:
        lines: The lines of contrasts.csv.
        primary: Left, right and place of the primary comparison.
    """
    if not lines and not primary:
        return ["No scores are compared. Name rows or columns in compare: {LEFT: [RIGHT]}."]
    tested = [line for line in lines if line["p_holm"] is not None]
    first = [line for line in tested if line["primary"]]
    others = [line for line in tested if not line["primary"]]
    sentences = []
    if primary and not first:
        left, right, place = primary
        reasons = [line["missing"] for line in lines if line["primary"] and line["missing"]]
        reason = "; ".join(reasons) or "it has no answers"
        compared = f"“{left}” with “{right}” in “{place}”"
        sentences.append(f"The primary comparison, {compared}, is missing: {reason}.")
    if not tested:
        return [*sentences, "No two models have answers to compare."]
    significant = [line for line in others if is_significant(line)]
    insignificant = [line for line in others if not is_significant(line)]
    significant.sort(key=lambda line: -abs(line["difference"]))
    for line in [*first, *significant[:MOST_SENTENCES]]:
        sentences.append(difference_sentence(line))
    omitted = len(significant) - MOST_SENTENCES
    if omitted == 1:
        sentences.append("1 more difference is significant.")
    elif omitted > 1:
        sentences.append(f"{omitted} more differences are significant.")
    if insignificant:
        other = "other " if sentences else ""
        none = f"Not significant: {pluralize(len(insignificant), other + 'difference')}."
        insignificant.sort(key=lambda line: line["detectable"])
        sentences.append(f"{none} {detectable_sentence(insignificant[0], insignificant[-1])}")
    return sentences


def is_gain(line: Line) -> bool:
    """Return True if the left side is better.

    It is better above the right side, or below it in a metric with `lower_is_better`.
    """
    return (line["difference"] > 0) != bool(line.get("lower_is_better"))


def is_gain_shown(line: Line) -> bool:
    return is_significant(line) and is_gain(line)


def difference_sentence(line: Line) -> str:
    """Return the result of a comparison.

    “swap” is better than “base” in “qac”: +4.0 points (95 % CI +1.2 to +6.9, Holm-corrected p =
    0.010).
    """
    unit = line.get("unit", "points")
    left, right, place = (f"“{line[name]}”" for name in PAIR)
    interval = f"95 % CI {line['low']:+.1f} to {line['high']:+.1f}"
    p = f"Holm-corrected p {p_text(line['p_holm'])}"
    size = f"{line['difference']:+.1f} {unit} ({interval}, {p})"
    trainings = ""
    if line.get("trainings") == "these":
        trainings = " These trainings alone: other seeds may differ."
    if not is_significant(line):
        none = f"No significant difference between {left} and {right} in {place}: {size}."
        return f"{none} {detectable_sentence(line)}{trainings}"
    word = "better" if is_gain(line) else "worse"
    return f"{left} is {word} than {right} in {place}: {size}.{trainings}"


def detectable_sentence(line: Line, largest: Line | None = None) -> str:
    """Return the difference that this comparison would have detected.

    With `largest`, it is the range from this comparison to that one.
    """
    unit = line.get("unit", "points")
    least = f"{line['detectable']:.1f}"
    most = f"{(largest or line)['detectable']:.1f}"
    span = least if least == most else f"{least} to {most}"
    return f"Detectable with 80 % power: {span} {unit}."


def p_text(p: float) -> str:
    if p < 0.001:
        return "< 0.001"
    return f"= {p:.3f}"
