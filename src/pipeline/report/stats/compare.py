"""The contrasts of a table as its page shows them: Holm's correction over all of them, and the sentence on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.report.stats.ranks import holm
from pipeline.report.stats.statistics import LEVEL


@dataclass(frozen=True)
class CorrectedContrast:
    """A line of contrasts.csv; p and McNemar's mid-p by Holm over all lines that have one."""

    line: Mapping[str, Any]
    p: float | None
    mid_p: float | None

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


def corrected(lines: Sequence[Mapping[str, Any]]) -> list[CorrectedContrast]:
    ps, mid_ps = (adjusted([line.get(key) for line in lines]) for key in ("p", "mcnemar_p"))
    return [CorrectedContrast(line, p, mid_p) for line, p, mid_p in zip(lines, ps, mid_ps, strict=True)]


def adjusted(ps: Sequence[float | None]) -> list[float | None]:
    known = iter(holm([p for p in ps if p is not None]))
    return [None if p is None else next(known) for p in ps]


def headline(contrasts: Sequence[CorrectedContrast]) -> str:
    """Which differences are significant, and which could have been detected, in one sentence."""
    known = [one for one in contrasts if one.p is not None]
    if not known:
        return "No two models have answers to compare."
    significant = sorted((one for one in known if one.significant), key=lambda one: -abs(one.line["difference"]))
    detectable = [one.line["could_see"] for one in known if not one.significant]
    unseen = f" (minimum detectable difference {span(detectable)} points)" if detectable else ""
    named = [sentence(one.line) for one in significant[:4]]
    named += [f"{len(significant) - 4} more"] if len(significant) > 4 else []
    about = f"{span([one.line['n'] for one in known])} questions: {len(significant) or 'none'} of {len(known)} "
    about += f"differences {'are' if len(significant) > 1 else 'is'} significant"
    if not significant:
        return f"{about}{unseen}."
    return f"{about}, {joined(named)}{'; the others are not' if detectable else ''}{unseen}."


def sentence(line: Mapping[str, Any]) -> str:
    """swap over base in qac math by 4.0 points (1.2 to 6.9)"""
    low, high = sorted((abs(line["low"]), abs(line["high"])))
    side = "over" if line["difference"] > 0 else "under"
    points = f"{abs(line['difference']):.1f} points ({low:.1f} to {high:.1f})"
    return f"{line['left']} {side} {line['right']} in {line['place']} by {points}"


def span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys((f"{min(values):.0f}", f"{max(values):.0f}")))


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
