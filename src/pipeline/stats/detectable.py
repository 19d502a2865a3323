"""The minimum detectable difference of a comparison that has no answers yet."""

from __future__ import annotations

from pipeline.stats.contrast import Contrast, ExpertPart
from pipeline.stats.statistics import PairedScore

# assumed share of questions that only one model answers correctly, until scores are known
DISCORDANT = 0.2
# assumed correlation of a problem's differences in two languages, or of two models
CORRELATION = 0.5
SPREAD = 0.02  # assumed standard deviation of a difference from seed to seed


def planned_difference(
    questions: int,
    level: float,
    seeds: int = 0,
    scores: int = 1,
) -> float:
    """Return the minimum detectable difference of a test in points, with an assumed error.

    The answers of two seeds are assumed to differ like the answers of two models.

    Args:
        questions: The number of questions.
        level: The significance level of the test.
        seeds: The number of trainings; 0 if trainings are no sample.
        scores: The number of scores that are averaged on each question.
    """
    # the variance of a mean of equally correlated differences, relative to a single one
    relative = (1 + (scores - 1) * CORRELATION) / scores
    discordant = DISCORDANT * relative
    won = questions * discordant / 2
    parts = []
    if seeds:
        within = discordant / questions / seeds
        parts.append(ExpertPart(within, within, seeds))
    contrast = Contrast(PairedScore(won, won, questions), parts, questions)
    return 100 * contrast.detectable(level, SPREAD)
