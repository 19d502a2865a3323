"""The contrasts of a table as its page shows them: Holm's correction over all of them, and the headline.

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
    """The lines with p_holm, p after Holm's correction over all that have one and are not exploratory, and `primary`.
    primary: left, right and place of the primary comparison."""
    is_first = [is_primary(line, primary) for line in lines]
    ps_of_lines = [None if line["exploratory"] else p_of_chosen(line) for line in lines]
    tested = {index: p for index, p in enumerate(ps_of_lines) if p is not None}
    ps, firsts = list(tested.values()), [is_first[index] for index in tested]
    if primary and ps and not any(firsts):  # a missing primary comparison keeps its half of the error rate
        ps, firsts = [*ps, 1.0], [*firsts, True]
    corrected = holm(ps, [max(1, len(ps) - 1) if first else 1 for first in firsts])
    p_holm = dict(zip(tested, corrected, strict=False))
    return [{**line, "p_holm": p_holm.get(index), "primary": is_first[index]} for index, line in enumerate(lines)]


def is_primary(line: Line, primary: Sequence[str]) -> bool:
    return [line[name] for name in PAIR] == [*primary]


def is_significant(line: Line) -> bool:
    return line["p_holm"] is not None and line["p_holm"] < LEVEL


def p_of_chosen(line: Line) -> float | None:
    """p of a line. Below a model that is the best of several on these questions, it is Bonferroni-corrected over them:
    the best of eight equal experts is often above a merge."""
    p, models = line["p"], line.get("chosen_of") or 1
    return p if p is None or line["difference"] > 0 else min(1.0, models * p)


def holm_level(count: int, is_first: bool, has_first: bool) -> float:
    """The level at which one of `count` comparisons is tested while none is significant: by Holm's correction, in which
    the primary one, if there is one, has half of the error rate."""
    if is_first:
        return LEVEL / 2 if count > 1 else LEVEL
    return LEVEL / 2 / max(1, count - 1) if has_first else LEVEL / max(1, count)


def headline_sentences(lines: Sequence[Line], primary: Sequence[str] = (), places: Collection[str] = ()) -> list[str]:
    """The primary comparison in a sentence, or that it is missing, the same two models in other places, then each
    significant other one, then what the others could have shown. primary: left, right and place of the primary
    comparison; places: the others, those of its task in other languages."""
    tested = [line for line in lines if line["p_holm"] is not None]
    pair = [line for line in tested if line["primary"]]
    missing = [missing_sentence(lines, primary)] if primary and not pair else []
    if not tested:
        return [*missing, "No two models have answers to compare.", *exploratory_sentence(lines)]
    same_pair = [line for line in tested if [line["left"], line["right"]] == [*primary[:2]] and line not in pair]
    pair += [line for line in same_pair if line["place"] in places][: MOST_SENTENCES - 1]
    further = [line for line in tested if line not in pair]
    significant = sorted(filter(is_significant, further), key=lambda line: -abs(line["difference"]))
    sentences = missing + [primary_sentence(line, tested) + warning_of_zero(line) for line in pair]
    sentences += [difference_sentence(line) for line in significant[:MOST_SENTENCES]]
    omitted = len(significant) - MOST_SENTENCES
    if omitted > 0:
        sentences += [f"{omitted} more {'differences are' if omitted > 1 else 'difference is'} significant."]
    insignificant = [line for line in further if not is_significant(line)]
    sentences += others_sentence(insignificant, "other " if sentences else "")
    return sentences + exploratory_sentence(lines)


def exploratory_sentence(lines: Sequence[Line]) -> list[str]:
    """Say how many differences are not tested."""
    count = sum(bool(line["exploratory"] and line["n"]) for line in lines)
    return (
        [f"Exploratory, with intervals and no test: {pluralize(count, 'difference')} in other places."] if count else []
    )


def missing_sentence(lines: Sequence[Line], primary: Sequence[str]) -> str:
    left, right, place = primary
    reason = next((line["missing"] for line in lines if line["primary"]), None)
    return f"The primary comparison, “{left}” with “{right}” in “{place}”, is missing: {reason or 'it has no answers'}."


def primary_sentence(line: Line, lines: Sequence[Line]) -> str:
    """What the primary comparison found; if it is a gain, above which other models of `lines` it is none there, else
    whether another model gains there."""
    here = [other for other in lines if other["place"] == line["place"]]
    if is_gain_shown(line):
        level = [other for other in here if other["left"] == line["left"] and not is_gain_shown(other)]
        names = " or ".join(f"“{other['right']}” ({other['difference']:+.1f})" for other in level)
        return difference_sentence(line) + (f" It is not significantly better there than {names}." if level else "")
    unit = line.get("unit", "points")
    rival_place = f"“{line['right']}” in “{line['place']}”"
    rivals = [rival for rival in here if rival["right"] == line["right"]]
    none = f" None of the {len(rivals)} models compared with {rival_place} is significantly better."
    if len(rivals) == 1 or any(map(is_gain_shown, rivals)):
        none = ""
    if is_significant(line):
        return f"{difference_sentence(line)}{none}"
    size = f"{line['difference']:+.1f} {unit} ({certainty(line, line['low'], line['high'], '+')})"
    detectable = f"a difference of {line['detectable']:.1f} would be detectable"
    if line.get("spread") is not None:
        detectable += f" where it varies by {line['spread']:.1f} from training to training (standard deviation)"
    if unit == "points" and line["detectable"] >= 100:
        detectable = "no difference could be shown with so few answers"
    return (
        f"“{line['left']}” is not significantly different from {rival_place}{scope(line)}: {size}; {detectable}.{none}"
    )


def warning_of_zero(line: Line) -> str:
    """A warning about a comparison with a score of 0, which is rather an error than an effect; empty for others."""
    models = [f"“{line[side]}”" for side in ("left", "right") if line.get(f"{side}_value") == 0]
    return f" Read the answers first: {' and '.join(models)} scored exactly 0." if models else ""


def certainty(line: Line, low: float, high: float, sign: str = "") -> str:
    """The interval with its own p, and p after the correction."""
    alone = "" if line["p"] == line["p_holm"] else f", p {p_text(line['p'])}"
    return f"95 % interval {low:{sign}.1f} to {high:{sign}.1f}{alone}; corrected p {p_text(line['p_holm'])}"


def scope(line: Line) -> str:
    """What a sentence is about where seeds are no sample of three or more."""
    return " for these trainings (other seeds may differ)" if line.get("trainings") == "these" else ""


def is_gain(line: Line) -> bool:
    """Whether the left side is better: above the right one, or below it in a metric of which less is better."""
    return (line["difference"] > 0) != bool(line.get("lower_is_better"))


def is_gain_shown(line: Line) -> bool:
    return is_significant(line) and is_gain(line)


def difference_sentence(line: Line) -> str:
    """“swap” is better than “base” in “qac” by 4.0 points (95 % interval 1.2 to 6.9, p = 0.005; corrected p = 0.01)."""
    low, high = sorted((abs(line["low"]), abs(line["high"])))
    sides = f"“{line['left']}” is {'better' if is_gain(line) else 'worse'} than “{line['right']}” in “{line['place']}”"
    size = f"{abs(line['difference']):.1f} {line.get('unit', 'points')}"
    return f"{sides} by {size} ({certainty(line, low, high)}){scope(line)}."


def p_text(p: float | None) -> str:
    return "< 0.001" if p is not None and p < 0.001 else f"= {p:.3f}"


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
    return [f"{none}; with {questions} questions only differences above {detectable} would have been found."]


def interval_text(values: Collection[float], form: str = ".0f") -> str:
    """The least and the largest of some numbers, once where they read the same: "2 to 3"."""
    return " to ".join(dict.fromkeys(format(end, form) for end in (min(values), max(values))))
