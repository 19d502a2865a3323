"""What is computed beside the harness' own scores: standard errors, shares, and BLEU for Japanese."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

INVALID = "[invalid]"  # what the harness' regex filters give back when they find nothing

# The metric and filter that stand for a task where one number is wanted.
PRIMARY = {
    "mgsm": ("exact_match", "flexible-extract"),
    "belebele": ("acc", "none"),
    "global_mmlu": ("acc", "none"),
    "flores": ("chrf++", "none"),
}


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def mean_stderr(values: Sequence[float]) -> float | None:
    """Standard error of a mean, with the sample's deviation (n - 1) as the harness has it; None for a single value."""
    if len(values) < 2:
        return None
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def is_unparsed(extracted: str) -> bool:
    """Whether the filter found no answer in the response."""
    return extracted == INVALID


def ran_out(tokens: Sequence[int], text: str, max_gen_toks: int, stop: Iterable[str], eos: int | None) -> bool:
    """Whether an answer ended because its tokens were used up: no end token and no stop string among them.

    `tokens` are the generated ones, which a batch may carry on past the answer's end; `text` is all of them decoded.
    """
    return len(tokens) >= max_gen_toks and eos not in tokens and not any(word and word in text for word in stop)


def bleu_ja_mecab(items: Iterable[tuple[str, str]]) -> float:
    """Corpus BLEU (0-100) of (reference, response) pairs in Japanese words. Needs `sacrebleu[ja]`."""
    from sacrebleu.metrics import BLEU

    references, responses = zip(*items, strict=True)
    return BLEU(tokenize="ja-mecab").corpus_score(list(responses), [list(references)]).score


def sentence_chrf(reference: str, response: str) -> float:
    """chrF++ (0-100) of one sentence, for looking at samples; the score of a set is the corpus', not their mean."""
    import sacrebleu

    return sacrebleu.sentence_chrf(response, [reference], word_order=2).score
