"""The minimum detectable differences of a comparison, with more questions or more seeds."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.stats.contrast import Contrast, ExpertPart
from pipeline.stats.statistics import PairedScore

# assumed share of questions that only one model answers correctly, until scores are known
DISCORDANT = 0.2
# assumed correlation of a problem's differences in two languages, or of two models
CORRELATION = 0.5
SPREAD = 0.02  # assumed standard deviation of a difference from seed to seed
MORE_SEEDS = (3, 5, 8)  # fewer are no sample


class Detectable(NamedTuple):
    """The minimum detectable differences of a comparison, in points, by the number of questions.

    With 0 seeds, the comparison is about these trainings; otherwise about trainings in general.
    """

    name: str
    seeds: int  # the number of the table's trainings; 0 if these are no sample
    level: float  # significance level, corrected for a table's other comparisons
    points: dict[int, dict[int, float]]  # questions -> seeds -> points
    assumed: str = ""  # about means of several scores a question
    is_all: bool = False  # True if the benchmark is known to have no more questions

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
        """Compute the differences for `questions`, and for up to twice as many if there are more.

        Args:
            name: The two models that are compared.
            questions: The number of questions.
            level: The significance level, after the correction.
            seeds: The number of the table's trainings; 0 if these are no sample.
            trains: True if the models are trained here, so that there can be more seeds.
            discordant: The share of discordant answers, assumed or measured.
            spread: The standard deviation from seed to seed, assumed or measured.
            most: The number of questions of the benchmark.
            scores: The number of scores that are averaged on each question.
        """
        shown_seeds = {0, seeds}
        if trains:
            shown_seeds.update(MORE_SEEDS)
        more_questions = max(questions, min(2 * questions, most))
        share = discordant * variance_of_mean(scores)
        points: dict[int, dict[int, float]] = {}
        for count in sorted({questions, more_questions}):
            points[count] = {}
            for n in sorted(shown_seeds):
                points[count][n] = 100 * planned_difference(count, level, n, spread, share)
        return cls(name, seeds, level, points, describe_mean(scores), most == questions)

    def rows(self) -> list[list[str]]:
        """Return a table: a row for each number of questions, a column for each number of seeds."""
        heads = [f"points detectable at p < {self.level:.2g}"]
        for seeds in next(iter(self.points.values())):
            heads.append(f"{seeds} seeds" if seeds else "these trainings")
        rows = [heads]
        for count, points_by_seeds in self.points.items():
            numbers = [f"{points:.1f}" for points in points_by_seeds.values()]
            rows.append([f"{count:,} questions", *numbers])
        return rows

    def advice(self) -> str:
        """Return what is detectable now, and whether more questions or more seeds help most."""
        count, now = next(iter(self.points.items()))
        current = now[self.seeds]
        choices = self._choices()
        best = min(choices, key=lambda name: choices[name], default="")
        text = f"{current:.1f} points are detectable on {count:,} questions{self.assumed}"
        if self.is_all:
            text += "; there are no more questions"
        if best and choices[best] < current:
            text += f"; {best} most ({choices[best]:.1f})"
        elif choices:
            text += "; more seeds do not help"
        if not self.seeds and len(now) > 1:
            three, eight = now[3], now[8]
            text += f"; trainings in general need 3 seeds or more ({three:.1f}, with 8 {eight:.1f})"
        return text

    def _choices(self) -> dict[str, float]:
        (count, now), *larger = self.points.items()
        choices = {}
        for seeds, points in now.items():
            if seeds > self.seeds:
                choices[f"{seeds} seeds help"] = points
        for questions, points_by_seeds in larger:
            more = f"all {questions:,} questions help"
            if questions == 2 * count:
                more = "twice the questions helps"
            choices[more] = points_by_seeds[self.seeds]
        return choices


def variance_of_mean(scores: int) -> float:
    """Return the variance of a mean of equally correlated differences, relative to a single one."""
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
    """Return the minimum detectable difference (a share) of a test with an assumed error.

    The answers of two seeds are assumed to differ like the answers of two models.

    Args:
        questions: The number of questions.
        level: The significance level of the test.
        seeds: The number of trainings; 0 if trainings are no sample.
        spread: The assumed standard deviation of a difference from seed to seed.
        discordant: The assumed share of discordant answers.
    """
    won = questions * discordant / 2
    parts = []
    if seeds:
        within = discordant / questions / seeds
        parts.append(ExpertPart(within, within, seeds))
    return Contrast(PairedScore(won, won, questions), parts, questions).detectable(level, spread)
