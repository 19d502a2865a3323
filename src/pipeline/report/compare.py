"""The contrasts of a table as its page shows them:

Holm's correction over all of them, and the headline.

A table's primary comparison has as much weight in the correction as all others together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipeline.stats.ranks import holm
from pipeline.stats.statistics import LEVEL
from pipeline.text import pluralize

MOST_SENTENCES = 4  # on significant differences

Line = Mapping[str, Any]  # of contrasts.csv
PAIR = ("left", "right", "place")  # of a line: what it compares


def correct_contrasts(lines: Sequence[Line], primary: Sequence[str] = ()) -> list[Line]:
    """Return the lines with p_holm and `primary`.

    p_holm is p after Holm's correction over all that have a p and are not exploratory.

    Args: primary: left, right and place of the primary comparison.
    """
    is_first = [is_primary(line, primary) for line in lines]
    ps_of_lines = [None if line["exploratory"] else p_of_chosen(line) for line in lines]
    tested = {}
    for index, p in enumerate(ps_of_lines):
        if p is not None:
            tested[index] = p
    ps, firsts = list(tested.values()), [is_first[index] for index in tested]
    if (
        primary and ps and not any(firsts)
    ):  # a missing primary comparison keeps its half of the error rate
        ps, firsts = [*ps, 1.0], [*firsts, True]
    corrected = holm(ps, [max(1, len(ps) - 1) if first else 1 for first in firsts])
    p_holm = dict(zip(tested, corrected, strict=False))
    return [
        {**line, "p_holm": p_holm.get(index), "primary": is_first[index]}
        for index, line in enumerate(lines)
    ]


def is_primary(line: Line, primary: Sequence[str]) -> bool:
    return [line[name] for name in PAIR] == [*primary]


def is_significant(line: Line) -> bool:
    return line["p_holm"] is not None and line["p_holm"] < LEVEL


def p_of_chosen(line: Line) -> float | None:
    """p of a line. Below a model that is the best of several on these questions, it is
    Bonferroni-corrected over them: the best of eight equal experts is often above a merge.
    """
    p, models = line["p"], line.get("chosen_of") or 1
    if p is None or line["difference"] > 0:
        return p
    return min(1.0, models * p)


def holm_level(count: int, is_first: bool, has_first: bool) -> float:
    """Return the level at which one of `count` comparisons is tested while none is significant.

    It is that of Holm's correction, in which the primary comparison, if there is one, has half of
    the error rate.
    """
    if is_first:
        if count > 1:
            return LEVEL / 2
        return LEVEL
    if has_first:
        return LEVEL / 2 / max(1, count - 1)
    return LEVEL / max(1, count)


def headline_sentences(
    lines: Sequence[Line], primary: Sequence[str] = (), places: Collection[str] = ()
) -> list[str]:
    """Return what a table found, in sentences.

    First comes the primary comparison, or that it is missing, and the same two models in `places`.
    Then come the other significant differences, and what the rest could have shown.

    Args:
        primary: left, right and place of the primary comparison.
        places: the places of its task in other languages.
    """
    tested = [line for line in lines if line["p_holm"] is not None]
    first = [line for line in tested if line["primary"]]
    sentences = []
    if primary and not first:
        sentences.append(missing_sentence(lines, primary))
    if not tested:
        return [*sentences, "No two models have answers to compare.", *exploratory_sentence(lines)]
    elsewhere = [
        line
        for line in tested
        if has_models(line, primary) and line["place"] in places and line not in first
    ]
    first += elsewhere[: MOST_SENTENCES - 1]
    for line in first:
        sentences.append(primary_sentence(line, tested) + warning_of_zero(line))
    further = [line for line in tested if line not in first]
    significant = sorted(filter(is_significant, further), key=lambda line: -abs(line["difference"]))
    sentences += [difference_sentence(line) for line in significant[:MOST_SENTENCES]]
    omitted = len(significant) - MOST_SENTENCES
    if omitted > 0:
        sentences.append(
            f"{omitted} more {'differences are' if omitted > 1 else 'difference is'} significant."
        )
    insignificant = [line for line in further if not is_significant(line)]
    sentences += others_sentence(insignificant, "other " if sentences else "")
    return sentences + exploratory_sentence(lines)


def has_models(line: Line, primary: Sequence[str]) -> bool:
    """Return True for a comparison of the two models of the primary one."""
    return [line["left"], line["right"]] == [*primary[:2]]


def exploratory_sentence(lines: Sequence[Line]) -> list[str]:
    """Say how many differences are not tested."""
    count = sum(bool(line["exploratory"] and line["n"]) for line in lines)
    if count:
        return [
            f"Exploratory, with intervals and no test: {pluralize(count, 'difference')} in other"
            " places."
        ]
    return []


def missing_sentence(lines: Sequence[Line], primary: Sequence[str]) -> str:
    left, right, place = primary
    reason = next((line["missing"] for line in lines if line["primary"]), None)
    return (
        f"The primary comparison, “{left}” with “{right}” in “{place}”, is missing:"
        f" {reason or 'it has no answers'}."
    )


def primary_sentence(line: Line, lines: Sequence[Line]) -> str:
    """Return what the primary comparison found, beside the other models of `lines` in its place.

    A gain is followed by the models above which it is none. Where there is no gain, the sentence
    says whether no other model gains either.
    """
    sentence = difference_sentence(line)
    here = []
    for other in lines:
        if other["place"] == line["place"]:
            here.append(other)
    if is_gain_shown(line):
        level = []
        for other in here:
            if other["left"] == line["left"] and not is_gain_shown(other):
                level.append(other)
        names = " or ".join(f"“{other['right']}” ({other['difference']:+.1f})" for other in level)
        if level:
            return f"{sentence} It is not significantly better there than {names}."
        return sentence
    rivals = []
    for rival in here:
        if rival["right"] == line["right"]:
            rivals.append(rival)
    if len(rivals) == 1 or any(map(is_gain_shown, rivals)):
        return sentence
    none = (
        f"None of the {len(rivals)} models compared with “{line['right']}” in “{line['place']}” is"
    )
    return f"{sentence} {none} significantly better."


def warning_of_zero(line: Line) -> str:
    """Return a warning about a comparison with a score of 0, which is rather an error than an
    effect, or "".
    """
    models = []
    for side in ("left", "right"):
        if line.get(f"{side}_value") == 0:
            models.append(f"“{line[side]}”")
    if models:
        return f" Read the answers first: {' and '.join(models)} scored exactly 0."
    return ""


def is_gain(line: Line) -> bool:
    """Whether the left side is better: above the right one, or below it in a metric of which less
    is better.
    """
    return (line["difference"] > 0) != bool(line.get("lower_is_better"))


def is_gain_shown(line: Line) -> bool:
    return is_significant(line) and is_gain(line)


def difference_sentence(line: Line) -> str:
    """Return what a comparison found.

    “swap” is better than “base” in “qac”: +4.0 points (95 % CI +1.2 to +6.9, Holm-corrected p =
    0.010).
    """
    unit = line.get("unit", "points")
    left, right, place = (f"“{line[name]}”" for name in PAIR)
    numbers = (
        f"95 % CI {line['low']:+.1f} to {line['high']:+.1f}, Holm-corrected p"
        f" {p_text(line['p_holm'])}"
    )
    size = f"{line['difference']:+.1f} {unit} ({numbers})"
    trainings = ""
    if line.get("trainings") == "these":
        trainings = " These trainings alone: other seeds may differ."
    if is_significant(line):
        word = "better" if is_gain(line) else "worse"
        return f"{left} is {word} than {right} in {place}: {size}.{trainings}"
    none = f"No significant difference between {left} and {right} in {place}: {size}."
    return f"{none} {detectable_sentence(line, unit)}{trainings}"


def detectable_sentence(line: Line, unit: str) -> str:
    """Return how large a difference this comparison would have found."""
    if unit == "points" and line["detectable"] >= 100:
        return "So few answers cannot show any difference."
    spread = ""
    if line.get("spread") is not None:
        spread = (
            f", as it varies by {line['spread']:.1f} from training to training (standard deviation)"
        )
    return f"Detectable with 80 % power: {line['detectable']:.1f} {unit}{spread}."


def p_text(p: float | None) -> str:
    if p is not None and p < 0.001:
        return "< 0.001"
    return f"= {p:.3f}"


def others_sentence(lines: Sequence[Line], adjective: str) -> list[str]:
    """Say how large a difference would have been detectable where none is significant."""
    if not lines:
        return []
    by_unit: dict[str, list[float]] = {}
    for line in lines:
        by_unit.setdefault(line.get("unit", "points"), []).append(line["detectable"])
    detectable = " and ".join(f"{interval_text(values)} {unit}" for unit, values in by_unit.items())
    questions = interval_text([line["n"] for line in lines])
    none = f"The {adjective or 'only '}difference is not significant"
    if len(lines) > 1:
        none = f"None of the {len(lines)} {adjective}differences is significant"
    return [f"{none}. Detectable with {questions} questions and 80 % power: {detectable}."]


def interval_text(values: Collection[float], form: str = ".0f") -> str:
    """Write the least and the largest of some numbers, once where they read the same: "2 to 3"."""
    return " to ".join(dict.fromkeys(format(end, form) for end in (min(values), max(values))))
