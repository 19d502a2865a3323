"""Corpus metrics of translations, recomputed in each draw of sentences.

BLEU and chrF++ of a set are not means over its sentences. They are functions of sums: of matching
n-grams, of all n-grams, and of lengths. sacrebleu extracts the counts of each sentence once, and
computes the metric from each draw's sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.stats.statistics import resample_weights

if TYPE_CHECKING:
    import numpy as np

CORPUS_METRICS = ("chrf++", "bleu")


def metric_of(name: str, pair: str) -> Any:
    """Return the sacrebleu metric that evaluations use.

    This is chrF++, or BLEU with the tokenizer 13a (ja-mecab for translations into Japanese).
    """
    from sacrebleu.metrics import BLEU, CHRF

    if name == "chrf++":
        return CHRF(word_order=2)
    if pair.endswith("-ja"):
        return BLEU(tokenize="ja-mecab")
    return BLEU()


def sentence_counts(metric: Any, references: Sequence[str], responses: Sequence[str]) -> np.ndarray:
    """Return (N, S): what each sentence adds to the S sums that determine the metric."""
    import numpy as np

    counts = metric._extract_corpus_statistics(list(responses), [list(references)])
    return np.array(counts, dtype=float)


@lru_cache(maxsize=1024)
def drawn_scores(name: str, pair: str, texts: tuple[tuple[str, str], ...]) -> np.ndarray:
    """Return (1 + draws,): the metric of (reference, response) pairs, and of draws of them.

    Sets of equal size share the draws.
    """
    import numpy as np

    metric = metric_of(name, pair)
    references, responses = zip(*texts, strict=True)
    n = len(texts)
    copies = np.rint(n * resample_weights(n))
    copies = np.concatenate([np.ones((1, n)), copies])
    return corpus_scores(metric, sentence_counts(metric, references, responses), copies)


def corpus_scores(metric: Any, counts: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """Return (draws,): the metric from 0 to 1 of sets with `copies` (draws, N) of N sentences."""
    import numpy as np

    sums_of_draws = (copies @ counts).tolist()
    scores = [metric._compute_score_from_stats(sums).score for sums in sums_of_draws]
    return np.round(np.array(scores) / 100, 12)  # equal translations have equal scores
