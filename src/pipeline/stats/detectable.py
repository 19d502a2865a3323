"""The minimum detectable differences of a comparison, with more questions or more seeds: pure
functions of numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.stats.contrast import Contrast
from pipeline.stats.statistics import PairedScore

# assumed share of questions that only one of two models answers correctly, until scores are known
DISCORDANT = 0.2
CORRELATION = (
    0.5  # assumed correlation of a problem's differences in two languages, or of two models
)
SPREAD = 0.02  # assumed standard deviation of a difference from seed to seed
MORE_SEEDS = (3, 5, 8)  # fewer are no sample


class Detectable(NamedTuple):
    """The minimum detectable differences of a comparison, in points: of these trainings (0 seeds)
    and of trainings in general, by the number of questions.
    """

    name: str
    seeds: int  # of the table's trainings; 0 if these are no sample
    level: float  # of p, after the correction for a table's other comparisons
    points: dict[int, dict[int, float]]  # questions -> seeds -> points
    assumed: str = ""  # about means of several scores a question
    is_all: bool = False  # whether the benchmark is known to have no more questions

    @classmethod
    def of(
        cls,
        name: str,
        questions: int,
        level: float,
        seeds: int = 0,
        trains: bool = True,
        discordant: float = DISCORDANT,
        spread: float = SPREAD,
        most: int = 0,
        scores: int = 1,
    ) -> Detectable:
        """Compute the differences for the asked questions, and for up to twice as many if the
        benchmark has more.

        trains: whether the models are trained here, so that there can be more seeds. discordant,
        spread: assumed, or measured. most: the number of questions of the benchmark. scores: how
        many are averaged on each question.
        """
        of_seeds = sorted({0, seeds, *(MORE_SEEDS if trains else ())})
        share = discordant * variance_of_mean(scores)
        points: dict[int, dict[int, float]] = {}
        for count in sorted({questions, max(questions, min(2 * questions, most))}):
            points[count] = {
                n: 100 * planned_difference(count, level, n, spread, share) for n in of_seeds
            }
        return cls(name, seeds, level, points, describe_mean(scores), most == questions)

    def rows(self) -> list[list[str]]:
        """Return a small table: a line for each number of questions, a column for each number of
        seeds.
        """
        (first, of_first), *_ = self.points.items()
        heads = ["these trainings" if not seeds else f"{seeds} seeds" for seeds in of_first]
        lines = [
            [f"{count:,} questions", *(f"{points:.1f}" for points in points_by_seeds.values())]
            for count, points_by_seeds in self.points.items()
        ]
        return [[f"points detectable at p < {self.level:.2g}", *heads], *lines]

    def advice(self) -> str:
        """Say what is detectable now, whether more questions or seeds help most, and what three
        seeds are for.
        """
        (count, now), *larger = self.points.items()
        choices = {}
        for seeds, points in now.items():
            if seeds > self.seeds:
                choices[f"{seeds} seeds help"] = points
        for questions, points_by_seeds in larger:
            if questions == 2 * count:
                more = "twice the questions helps"
            else:
                more = f"all {questions:,} questions help"
            choices[more] = points_by_seeds[self.seeds]
        best = min(choices, key=lambda name: choices[name], default="")
        text = f"{now[self.seeds]:.1f} points are detectable on {count:,} questions{self.assumed}"
        text += "; there are no more questions" * self.is_all
        if best and choices[best] < now[self.seeds]:
            text += f"; {best} most ({choices[best]:.1f})"
        elif choices:
            text += "; more seeds do not help"
        if not self.seeds and len(now) > 1:
            text += (
                f"; trainings in general need 3 seeds or more ({now[3]:.1f}, with 8 {now[8]:.1f})"
            )
        return text


def variance_of_mean(scores: int) -> float:
    """Return the variance of the mean of several equally correlated differences, as a share of that
    of a single one.
    """
    return (1 + (scores - 1) * CORRELATION) / scores


def describe_mean(scores: int) -> str:
    if scores < 2:
        return ""
    return (
        f", in the mean of {scores} scores each (languages or models; assumed correlation"
        f" {CORRELATION:g})"
    )


def planned_difference(
    questions: int,
    level: float,
    seeds: int = 0,
    spread: float = SPREAD,
    discordant: float = DISCORDANT,
) -> float:
    """Return the minimum detectable difference (a share) of a test whose error is assumed.

    seeds: 0 if trainings are no sample.
    """
    won = questions * discordant / 2
    within = (
        discordant / questions / max(1, seeds)
    )  # the answers of two seeds differ as those of two models do
    parts = [(within, within, seeds)] if seeds else []
    return Contrast(PairedScore(won, won, questions), parts, questions).detectable(level, spread)
