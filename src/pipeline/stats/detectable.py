"""The minimum detectable differences of a comparison, with more questions or more seeds: pure functions of numbers."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.stats.contrast import power_over_experts
from pipeline.stats.statistics import least_detected, smallest_difference

DISCORDANT = 0.2  # assumed share of questions that only one of two models answers correctly, until scores are known
SPREAD = 0.02  # assumed standard deviation of a difference from seed to seed
MORE_SEEDS = (3, 5, 8)  # fewer are no sample


class Detectable(NamedTuple):
    """The minimum detectable differences of a comparison, in points: of these trainings (0 seeds) and of trainings in
    general, by the number of questions."""

    name: str
    seeds: int  # of the table's trainings; 0 if these are no sample
    level: float  # of p, after the correction for a table's other comparisons
    points: dict[int, dict[int, float]]  # questions -> seeds -> points

    @classmethod
    def of(
        cls, name: str, questions: int, level: float, seeds: int = 0, trains: bool = True,
        discordant: float = DISCORDANT, spread: float = SPREAD,
    ) -> Detectable:  # fmt: skip
        """trains: whether the models are trained here, so that there can be more seeds. discordant, spread: the shares
        that are assumed, or were measured."""
        of_seeds = sorted({0, seeds, *(MORE_SEEDS if trains else ())})
        return cls(name, seeds, level, {
            count: {number: 100 * planned_difference(count, level, number, spread, discordant) for number in of_seeds}
            for count in (questions, 2 * questions)
        })  # fmt: skip

    def rows(self) -> list[list[str]]:
        """A small table: a line for each number of questions, a column for each number of seeds."""
        (first, of_first), *_ = self.points.items()
        heads = ["these trainings" if not seeds else f"{seeds} seeds" for seeds in of_first]
        lines = [[f"{count:,} questions", *(f"{points:.1f}" for points in points_by_seeds.values())]
                 for count, points_by_seeds in self.points.items()]  # fmt: skip
        return [[f"points detectable at p < {self.level:.2g}", *heads], *lines]

    def advice(self) -> str:
        """What is detectable now, what of more questions or seeds helps most, and what three seeds are for."""
        (count, now), (_, doubled) = self.points.items()
        choices = {"twice the questions": doubled[self.seeds]}
        choices |= {f"{seeds} seeds": points for seeds, points in now.items() if seeds > self.seeds}
        best = min(choices, key=lambda name: choices[name])
        text = f"{now[self.seeds]:.1f} points are detectable on {count:,} questions; "
        helps = choices[best] < now[self.seeds]
        text += f"{best} help{'s' * (best[0] == 't')} most ({choices[best]:.1f})" if helps else "more seeds do not help"
        if not self.seeds and len(now) > 1:
            text += f"; trainings in general need 3 seeds or more ({now[3]:.1f}, with 8 {now[8]:.1f})"
        return text


def planned_difference(
    questions: int, level: float, seeds: int, spread: float, discordant: float = DISCORDANT
) -> float:
    """The minimum detectable difference (a share) before there are answers. seeds: 0 if trainings are no sample."""
    if not seeds:
        return smallest_difference(questions, discordant, level)
    within = discordant / questions / seeds  # the answers of two seeds differ as those of two models do
    return least_detected(power_over_experts(discordant / questions, [(spread**2 / seeds, within, seeds)], level))
