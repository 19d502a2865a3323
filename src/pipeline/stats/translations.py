"""Corpus metrics of translations, recomputed from sums of per-sentence counts in each draw of
sentences.

BLEU and chrF++ of a set are not means over its sentences, but functions of sums: of matching and of
all n-grams, and of lengths. sacrebleu extracts the counts of each sentence, once, and computes the
metric of each draw's sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.stats.statistics import DRAWS, resample_weights

if TYPE_CHECKING:
    import numpy as np

CORPUS_METRICS = ("chrf++", "bleu")


def metric_of(name: str, pair: str) -> Any:
    """Return the sacrebleu metric that evaluations use: chrF++, or BLEU tokenized by 13a (ja-mecab
    into Japanese).
    """
    from sacrebleu.metrics import BLEU, CHRF

    if name == "chrf++":
        return CHRF(word_order=2)
    if pair.endswith("-ja"):
        return BLEU(tokenize="ja-mecab")
    return BLEU()


def sentence_counts(metric: Any, references: Sequence[str], responses: Sequence[str]) -> np.ndarray:
    """(N, S): contribution of each sentence to the S sums that the metric is a function of."""
    import numpy as np

    return np.array(
        metric._extract_corpus_statistics(list(responses), [list(references)]), dtype=float
    )


@lru_cache(maxsize=256)  # 0.2 MB each for a thousand sentences; extracting them takes a second
def counts_of(name: str, pair: str, texts: tuple[tuple[str, str], ...]) -> tuple[Any, np.ndarray]:
    """(metric, counts) of (reference, response) pairs."""
    metric = metric_of(name, pair)
    references, responses = zip(*texts, strict=True)
    return metric, sentence_counts(metric, references, responses)


@lru_cache(maxsize=1024)
def drawn_scores(name: str, pair: str, texts: tuple[tuple[str, str], ...]) -> np.ndarray:
    """(1 + draws,): the metric of (reference, response) pairs and of draws of them; equal sizes
    share the draws.
    """
    import numpy as np

    metric, counts = counts_of(name, pair, texts)
    return corpus_scores(
        metric, counts, np.concatenate([np.ones((1, len(counts))), copies_of(len(counts))])
    )


def copies_of(n: int, seed: int = 0) -> np.ndarray:
    """(draws, n): number of copies of each of n problems in a draw of n."""
    import numpy as np

    return np.rint(n * resample_weights(n, DRAWS, seed))


def corpus_scores(metric: Any, counts: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """(draws,): the metric from 0 to 1 of sets with `copies` (draws, N) copies of each of N
    sentences.
    """
    import numpy as np

    scores = [metric._compute_score_from_stats(sums).score for sums in (copies @ counts).tolist()]
    return np.round(np.array(scores) / 100, 12)  # equal translations differ by nothing
