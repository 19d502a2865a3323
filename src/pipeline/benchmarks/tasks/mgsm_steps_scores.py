"""Scores of mgsm_steps.yaml; read by the harness, also by its own command line, without this package."""

import math


def score_step(doc, results):
    """acc: whether the gold calculation is the likeliest of the four. bits: (question, log2 of its probability)."""
    likelihoods = [likelihood for likelihood, _ in results]
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    return {"acc": float(best == doc["label"]), "bits": (doc["index"], likelihoods[doc["label"]] / math.log(2))}


def mean_per_question(items):
    """The mean over questions of the sum over a question's steps."""
    return math.fsum(bits for _, bits in items) / len({question for question, _ in items})
