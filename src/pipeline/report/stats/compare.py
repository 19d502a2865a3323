"""The contrasts of a table as its page shows them: Holm's correction over all of them, and the headline."""

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

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


def correct_contrasts(lines: Sequence[Mapping[str, Any]]) -> list[CorrectedContrast]:
    ps, mid_ps = (adjust_p_values([line.get(key) for line in lines]) for key in ("p", "mcnemar_p"))
    return [CorrectedContrast(line, p, mid_p) for line, p, mid_p in zip(lines, ps, mid_ps, strict=True)]


def adjust_p_values(ps: Sequence[float | None]) -> list[float | None]:
    corrected_ps = iter(holm([p for p in ps if p is not None]))
    return [None if p is None else next(corrected_ps) for p in ps]


def headline_sentence(contrasts: Sequence[CorrectedContrast]) -> str:
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
    about += f"differences {'are' if len(significant) > 1 else 'is'} significant"
    if not significant:
        return f"{about}{unseen}."
    return f"{about}, {join_parts(sentences)}{'; the others are not' if unseen else ''}{unseen}."


def contrast_sentence(line: Mapping[str, Any]) -> str:
    """swap over base in qac math by 4.0 points (1.2 to 6.9)"""
    low, high = sorted((abs(line["low"]), abs(line["high"])))
    side = "over" if line["difference"] > 0 else "under"
    size = f"{abs(line['difference']):.1f} {line.get('unit', 'points')} ({low:.1f} to {high:.1f})"
    return f"{line['left']} {side} {line['right']} in {line['place']} by {size}"


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
