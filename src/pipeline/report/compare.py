"""A table's contrasts as its page shows them: Holm's correction over all of them, and the headline.

A table's primary comparison has as much weight in the correction as all others together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        p = None if line["exploratory"] else p_of_chosen(line)
        if p is not None:
            ps[index] = p
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
        added = {"p_holm": p_holm.get(index), "primary": is_primary(line, primary)}
        with_p.append({**line, **added})
    return with_p


def is_primary(line: Line, primary: Sequence[str]) -> bool:
    return [line[name] for name in PAIR] == [*primary]


def is_significant(line: Line) -> bool:
    return line["p_holm"] is not None and line["p_holm"] < LEVEL


def p_of_chosen(line: Line) -> float | None:
    """Return p of a line, corrected if its right side is the best of several models.

    If the left side is lower, p is Bonferroni-corrected over these models: the best of eight equal
    experts is often above a merge.
    """
    p, models = line["p"], line.get("chosen_of") or 1
    if p is None or line["difference"] > 0:
        return p
    return min(1.0, models * p)


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


def headline_sentences(
    lines: Sequence[Line], primary: Sequence[str] = (), places: Collection[str] = ()
) -> list[str]:
    """Return the result of a table, in sentences.

    The first sentences are about the primary comparison, and about the same two models in `places`.
    Then come other significant differences, and the detectable difference of the comparisons
    without a significant one.

    Args:
        lines: The lines of contrasts.csv.
        primary: Left, right and place of the primary comparison.
        places: The places of its task in other languages.
    """
    tested = [line for line in lines if line["p_holm"] is not None]
    first = [line for line in tested if line["primary"]]
    sentences = []
    if primary and not first:
        sentences.append(missing_sentence(lines, primary))
    if not tested:
        return [*sentences, "No two models have answers to compare.", *exploratory_sentence(lines)]
    elsewhere = []
    for line in tested:
        if has_models(line, primary) and line["place"] in places and line not in first:
            elsewhere.append(line)
    first += elsewhere[: MOST_SENTENCES - 1]
    for line in first:
        sentences.append(primary_sentence(line, tested) + warning_of_zero(line))
    significant, insignificant = [], []
    for line in tested:
        if line in first:
            continue
        if is_significant(line):
            significant.append(line)
        else:
            insignificant.append(line)
    significant.sort(key=lambda line: -abs(line["difference"]))
    for line in significant[:MOST_SENTENCES]:
        sentences.append(difference_sentence(line))
    omitted = len(significant) - MOST_SENTENCES
    if omitted == 1:
        sentences.append("1 more difference is significant.")
    elif omitted > 1:
        sentences.append(f"{omitted} more differences are significant.")
    adjective = "other " if sentences else ""
    sentences += others_sentence(insignificant, adjective)
    return sentences + exploratory_sentence(lines)


def has_models(line: Line, primary: Sequence[str]) -> bool:
    """Return True if a comparison is of the same two models as the primary one."""
    return [line["left"], line["right"]] == [*primary[:2]]


def exploratory_sentence(lines: Sequence[Line]) -> list[str]:
    """Return a sentence with the number of differences that are not tested, if there are any."""
    count = sum(bool(line["exploratory"] and line["n"]) for line in lines)
    if not count:
        return []
    differences = pluralize(count, "difference")
    return [f"Exploratory, with intervals and no test: {differences} in other places."]


def missing_sentence(lines: Sequence[Line], primary: Sequence[str]) -> str:
    left, right, place = primary
    reason = None
    for line in lines:
        if line["primary"]:
            reason = line["missing"]
            break
    compared = f"“{left}” with “{right}” in “{place}”"
    return f"The primary comparison, {compared}, is missing: {reason or 'it has no answers'}."


def primary_sentence(line: Line, lines: Sequence[Line]) -> str:
    """Return the result of the primary comparison, with the other models of `lines` in its place.

    After a gain, the text also names the models that it does not significantly exceed. Otherwise it
    says if no other model is significantly better either.
    """
    sentence = difference_sentence(line)
    here = [other for other in lines if other["place"] == line["place"]]
    if is_gain_shown(line):
        names = []
        for other in here:
            if other["left"] == line["left"] and not is_gain_shown(other):
                names.append(f"“{other['right']}” ({other['difference']:+.1f})")
        if names:
            return f"{sentence} It is not significantly better there than {' or '.join(names)}."
        return sentence
    rivals = [other for other in here if other["right"] == line["right"]]
    if len(rivals) == 1 or any(map(is_gain_shown, rivals)):
        return sentence
    compared = f"compared with “{line['right']}” in “{line['place']}”"
    return f"{sentence} None of the {len(rivals)} models {compared} is significantly better."


def warning_of_zero(line: Line) -> str:
    """Return a warning about a comparison with a score of 0, or "".

    Such a score is more likely an error than an effect.
    """
    models = []
    for side in ("left", "right"):
        if line.get(f"{side}_value") == 0:
            models.append(f"“{line[side]}”")
    if models:
        return f" Read the answers first: {' and '.join(models)} scored exactly 0."
    return ""


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
        return f"{none} {detectable_sentence(line, unit)}{trainings}"
    word = "better" if is_gain(line) else "worse"
    return f"{left} is {word} than {right} in {place}: {size}.{trainings}"


def detectable_sentence(line: Line, unit: str) -> str:
    """Return the difference that this comparison would have detected."""
    detectable, spread = line["detectable"], line.get("spread")
    if unit == "points" and detectable >= 100:
        return "So few answers cannot show any difference."
    varies = ""
    if spread is not None:
        varies = f", as it varies by {spread:.1f} from training to training (standard deviation)"
    return f"Detectable with 80 % power: {detectable:.1f} {unit}{varies}."


def p_text(p: float | None) -> str:
    if p is not None and p < 0.001:
        return "< 0.001"
    return f"= {p:.3f}"


def others_sentence(lines: Sequence[Line], adjective: str) -> list[str]:
    """Return the difference that insignificant comparisons would have detected, if there are any.

    Args:
        lines: Comparisons that are not significant.
        adjective: "other ", or "" if these are all comparisons.
    """
    if not lines:
        return []
    by_unit: dict[str, list[float]] = {}
    for line in lines:
        by_unit.setdefault(line.get("unit", "points"), []).append(line["detectable"])
    sizes = [f"{interval_text(values)} {unit}" for unit, values in by_unit.items()]
    questions = interval_text([line["n"] for line in lines])
    none = f"The {adjective or 'only '}difference is not significant"
    if len(lines) > 1:
        none = f"None of the {len(lines)} {adjective}differences is significant"
    power = f"Detectable with {questions} questions and 80 % power"
    return [f"{none}. {power}: {' and '.join(sizes)}."]


def interval_text(values: Collection[float], form: str = ".0f") -> str:
    """Return the smallest and the largest number, such as "2 to 3"; once if they read the same."""
    low, high = format(min(values), form), format(max(values), form)
    if low == high:
        return low
    return f"{low} to {high}"
