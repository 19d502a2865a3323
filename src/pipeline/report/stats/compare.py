"""The contrasts of a table as its page shows them: Holm's correction over all of them, and the headline.

A table's primary comparison has as much weight in the correction as all others together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.report.stats.ranks import holm
from pipeline.report.stats.statistics import LEVEL


@dataclass(frozen=True)
class CorrectedContrast:
    """A line of contrasts.csv, with p and McNemar's mid-p Holm-corrected over all lines that have one."""

    line: Mapping[str, Any]
    p: float | None
    mid_p: float | None
    primary: bool = False

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


def correct_contrasts(lines: Sequence[Mapping[str, Any]], primary: Sequence[str] = ()) -> list[CorrectedContrast]:
    """primary: left, right and place of the primary comparison."""
    first = [bool(primary) and [line["left"], line["right"], line["place"]] == list(primary) for line in lines]
    ps, mid_ps = (adjust_p_values([line.get(key) for line in lines], first) for key in ("p", "mcnemar_p"))
    return [CorrectedContrast(*values) for values in zip(lines, ps, mid_ps, first, strict=True)]


def adjust_p_values(ps: Sequence[float | None], first: Sequence[bool]) -> list[float | None]:
    tested = [(p, is_first) for p, is_first in zip(ps, first, strict=True) if p is not None]
    weights = [max(1, len(tested) - 1) if is_first else 1 for _, is_first in tested]
    corrected_ps = iter(holm([p for p, _ in tested], weights))
    return [None if p is None else next(corrected_ps) for p in ps]


def headline_sentences(contrasts: Sequence[CorrectedContrast]) -> str:
    """The primary comparison in a sentence, then the others."""
    primary = [primary_sentence(contrast) for contrast in contrasts if contrast.primary and contrast.p is not None]
    others = [contrast for contrast in contrasts if not contrast.primary]
    if primary and all(contrast.p is None for contrast in others):
        return primary[0]
    return " ".join([*primary, others_sentence(others, "other " if primary else "")])


def primary_sentence(contrast: CorrectedContrast) -> str:
    line, p = contrast.line, contrast.p
    unit = line.get("unit", "points")
    if contrast.significant:
        verb = "is better than" if line["difference"] > 0 else "is worse than"
        low, high = sorted((abs(line["low"]), abs(line["high"])))
        size = f"by {abs(line['difference']):.1f} {unit} ({low:.1f} to {high:.1f}; corrected p {p_text(p)})"
        return f"“{line['left']}” {verb} “{line['right']}” in “{line['place']}” {size}."
    size = f"{line['difference']:+.1f} {unit} ({line['low']:+.1f} to {line['high']:+.1f}; corrected p {p_text(p)})"
    seen = f"a difference of {line['could_see']:.1f} would be detectable"
    sides = f"“{line['left']}” is not significantly different from “{line['right']}” in “{line['place']}”"
    return f"{sides}: {size}; {seen}."


def p_text(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 0.001 else f"= {p:.3f}"


def others_sentence(contrasts: Sequence[CorrectedContrast], other: str = "") -> str:
    """The significant differences and the minimum detectable ones, in one sentence."""
    tested = [contrast for contrast in contrasts if contrast.p is not None]
    if not tested:
        return "No two models have answers to compare."
    significant = sorted(
        (contrast for contrast in tested if contrast.significant),
        key=lambda contrast: -abs(contrast.line["difference"]),
    )
    unseen = "; ".join(detectable_text(tested, unit) for unit in ("points", "bits") if detectable_text(tested, unit))
    unseen = f" (minimum detectable difference {unseen})" if unseen else ""
    sentences = [contrast_sentence(contrast.line) for contrast in significant[:4]]
    sentences += [f"{len(significant) - 4} more"] if len(significant) > 4 else []
    questions = interval_text([contrast.line["n"] for contrast in tested])
    about = f"{questions} questions: {len(significant) or 'none'} of {len(tested)} "
    about += f"{other}differences {'are' if len(significant) > 1 else 'is'} significant"
    if not significant:
        return f"{about}{unseen}."
    return f"{about}, {join_parts(sentences)}{'; the others are not' if unseen else ''}{unseen}."


def contrast_sentence(line: Mapping[str, Any]) -> str:
    """“swap” over “base” in “qac math” by 4.0 points (1.2 to 6.9)"""
    low, high = sorted((abs(line["low"]), abs(line["high"])))
    side = "over" if line["difference"] > 0 else "under"
    size = f"{abs(line['difference']):.1f} {line.get('unit', 'points')} ({low:.1f} to {high:.1f})"
    return f"“{line['left']}” {side} “{line['right']}” in “{line['place']}” by {size}"


def detectable_text(contrasts: Sequence[CorrectedContrast], unit: str) -> str:
    """The minimum detectable differences in a unit, of what is not significant: "2 to 3 points"."""
    values = [
        contrast.line["could_see"]
        for contrast in contrasts
        if not contrast.significant and contrast.line.get("unit", "points") == unit
    ]
    return f"{interval_text(values)} {unit}" if values else ""


def interval_text(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys((f"{min(values):.0f}", f"{max(values):.0f}")))


def join_parts(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
