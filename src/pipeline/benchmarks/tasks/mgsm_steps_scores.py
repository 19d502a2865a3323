"""Scores of mgsm_steps.yaml.

The harness reads this file, also from its command line without this package.
"""

import math


def score_step(doc, results):
    """Return (question, value) of a step for two metrics.

    acc is 1 if the gold calculation is the likeliest of the four. bits is the log2 probability of
    the gold calculation.
    """
    likelihoods = [likelihood for likelihood, _ in results]
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    gold = doc["label"]
    bits = likelihoods[gold] / math.log(2)
    return {"acc": (doc["index"], float(best == gold)), "bits": (doc["index"], bits)}


def mean_per_step(items):
    """Return the mean over steps."""
    return math.fsum(right for _, right in items) / len(items)


def mean_per_question(items):
    """Return the mean over questions of the sum over a question's steps."""
    questions = {question for question, _ in items}
    return math.fsum(bits for _, bits in items) / len(questions)
