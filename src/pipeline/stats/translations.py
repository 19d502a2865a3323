"""Corpus metrics of translations, recomputed from sums of per-sentence counts in each draw of sentences.

BLEU and chrF++ of a set are not means over its sentences, but functions of sums: of matching and of all n-grams, and of
lengths. The counts of each sentence are extracted once; sacrebleu extracts them and computes the metric.
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
    """The sacrebleu metric that evaluations use: chrF++, or BLEU tokenized by 13a (ja-mecab into Japanese)."""
    from sacrebleu.metrics import BLEU, CHRF

    if name == "chrf++":
        return CHRF(word_order=2)
    return BLEU(tokenize="ja-mecab") if pair.endswith("-ja") else BLEU()


def sentence_counts(metric: Any, references: Sequence[str], responses: Sequence[str]) -> np.ndarray:
    """(N, S): contribution of each sentence to the S sums that the metric is a function of."""
    import numpy as np

    return np.array(metric._extract_corpus_statistics(list(responses), [list(references)]), dtype=float)


@lru_cache(maxsize=256)  # 0.2 MB each for a thousand sentences; extracting them takes a second
def counts_of(name: str, pair: str, texts: tuple[tuple[str, str], ...]) -> tuple[Any, np.ndarray]:
    """(metric, counts) of (reference, response) pairs."""
    metric = metric_of(name, pair)
    references, responses = zip(*texts, strict=True)
    return metric, sentence_counts(metric, references, responses)


@lru_cache(maxsize=1024)
def drawn_scores(name: str, pair: str, texts: tuple[tuple[str, str], ...]) -> np.ndarray:
    """(1 + draws,): the metric of (reference, response) pairs and of draws of them; equal sizes share the draws."""
    import numpy as np

    metric, counts = counts_of(name, pair, texts)
    return corpus_scores(metric, counts, np.concatenate([np.ones((1, len(counts))), copies_of(len(counts))]))


def copies_of(n: int, seed: int = 0) -> np.ndarray:
    """(draws, n): number of copies of each of n problems in a draw of n."""
    import numpy as np

    return np.rint(n * resample_weights(n, DRAWS, seed))


def corpus_scores(metric: Any, counts: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """(draws,): the metric from 0 to 1 of sets with `copies` (draws, N) copies of each of N sentences.

    sacrebleu's formulas, vectorized over draws."""
    sums = copies @ counts
    return chrf(sums, metric.beta) if hasattr(metric, "beta") else bleu(sums)


def chrf(sums: np.ndarray, beta: int) -> np.ndarray:
    """(draws,): chrF from sums (draws, 3 orders) of the n-grams of responses, of references, and of both: F of the mean
    precision and recall over the non-empty orders (Popovic 2017)."""
    import numpy as np

    orders = sums.reshape(len(sums), -1, 3)
    usable = orders[..., :2].min(axis=-1) > 0
    shares = np.where(usable[..., None], orders[..., 2:] / np.maximum(orders[..., :2], 1), 0)  # (draws, orders, 2)
    precision, recall = shares.sum(axis=1).T / np.maximum(usable.sum(axis=1), 1)
    below = beta**2 * precision + recall
    return np.where(below > 0, (1 + beta**2) * precision * recall / np.where(below > 0, below, 1), 0)


def bleu(sums: np.ndarray) -> np.ndarray:
    """(draws,): BLEU from sums (draws, 10): lengths of responses and references, matching and total n-grams of four
    orders. The first order without a match counts as 1/2 match, the next as 1/4 ... ("exp" smoothing)."""
    import numpy as np

    length, reference, matches, totals = sums[:, 0], sums[:, 1], sums[:, 2:6], sums[:, 6:]
    unmatched = matches == 0
    precisions = np.where(unmatched, 0.5 ** np.cumsum(unmatched, axis=1), matches) / np.maximum(totals, 1)
    brief = np.exp(np.minimum(0, 1 - reference / np.maximum(length, 1)))
    usable = (totals > 0).all(axis=1) & ~unmatched.all(axis=1)
    return np.where(usable, brief * np.exp(np.log(precisions).mean(axis=1)), 0)
