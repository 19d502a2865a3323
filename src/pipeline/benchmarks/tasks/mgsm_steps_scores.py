"""Scores of mgsm_steps.yaml; read by the harness, also by its own command line, without this
package.
"""

import math


def score_step(doc, results):
    """(question, value) of a step: acc, whether the gold calculation is the likeliest of the four;
    bits, the log2 of its probability.
    """
    likelihoods = [likelihood for likelihood, _ in results]
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    right, bits = float(best == doc["label"]), likelihoods[doc["label"]] / math.log(2)
    return {"acc": (doc["index"], right), "bits": (doc["index"], bits)}


def mean_per_step(items):
    """Return the mean over steps."""
    return math.fsum(right for _, right in items) / len(items)


def mean_per_question(items):
    """Return the mean over questions of the sum over a question's steps."""
    return math.fsum(bits for _, bits in items) / len({question for question, _ in items})
