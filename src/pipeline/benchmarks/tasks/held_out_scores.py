"""Scores of held_out.yaml; read by the harness, also by its own command line, without this package."""

import math


def score_text(doc, results):
    """bits: the log2 probability of the text."""
    ((likelihood, _),) = results
    return {"bits": likelihood / math.log(2)}
