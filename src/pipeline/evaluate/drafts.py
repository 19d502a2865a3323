"""Drafts: tokens that may come next. The model verifies each, so that they change no answer, only the number of steps.

They follow, where they were seen before, the longest sequence of tokens with which the answer ends so far. It is looked
for in the prompt and the answer (prompt lookup decoding, Saxena 2023), and in the answers of other models to the same
question: neighbouring merges of a sweep answer alike. Where both propose, decode.py takes the one that was right more
often of late. Drafts from earlier answers are known from reinforcement
learning, where the rollouts of the last epochs give them (DAS, arXiv 2511.13841; SPEC-RL, arXiv 2509.23232), and from
serving (suffix decoding, arXiv 2411.04975, in Arctic Inference).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LOOKUP = 2  # tokens that the prompt and the answer give at each step
NEIGHBOURS = 8  # tokens, at most, that an answer of another model gives
LOOKUP_NGRAM = 3  # tokens, at most, that a draft's place has in common with the end of the answer
NEIGHBOUR_NGRAM = 8
BEGIN = -1  # before each answer


class Seen:
    """Tokens so far, and where the token after each short sequence of them is."""

    ngram = LOOKUP_NGRAM

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.place_after: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        for size in range(1, self.ngram + 1):
            self.place_after[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)

    def find(self, recent: Sequence[int]) -> tuple[int, int]:
        """The longest sequence at the end of `recent` that was seen, the last time: its size, 0 for none, and the place
        after it."""
        for size in range(min(self.ngram, len(recent)), 0, -1):
            place = self.place_after.get(tuple(recent[-size:]))
            if place is not None:
                return size, place
        return 0, len(self.tokens)


class Neighbours(Seen):
    """The answers of other models to one question, the newest first. One with a token that is not among the
    `vocabulary` first is another tokenizer's and is left out."""

    ngram = NEIGHBOUR_NGRAM

    def __init__(self, answers: Iterable[Sequence[int]], vocabulary: int) -> None:
        super().__init__()
        known = (tuple(answer) for answer in answers if all(type(t) is int and 0 <= t < vocabulary for t in answer))
        for answer in reversed(dict.fromkeys(known)):
            for token in (BEGIN, *answer):
                self.append(token)

    def draft(self, answer: Sequence[int], count: int) -> list[int]:
        """What followed the longest sequence at the end of `answer`, at most `count` tokens."""
        if not self.tokens:
            return []
        _, place = self.find([BEGIN, *answer][-self.ngram :])
        tokens = self.tokens[place : place + count]
        return tokens[: tokens.index(BEGIN)] if BEGIN in tokens else tokens
