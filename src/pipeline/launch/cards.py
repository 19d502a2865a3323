"""The cards of this machine, shared among the workers of a command: one a worker, and more for a
training of several.

Locks of files count them, which end with their process. A worker holds its card's lock while it
computes, and as long as a model stays in its memory. For a training of several cards, it first
closes the gates of its neighbours, so that they begin nothing else and give back their memory, and
then waits until their cards are free.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.merge.resident import release_models
from pipeline.runs import stop

LOOK = 0.1  # seconds between two looks at cards that are waited for
VISIBLE = "CUDA_VISIBLE_DEVICES"


def places_of(cards: Sequence[str], workers: int) -> list[list[str]]:
    """Return the cards of each place.

    With fewer workers than cards a place has several; with more workers, several share a place.
    """
    size = max(1, len(cards) // workers)
    return [list(cards[first : first + size]) for first in range(0, len(cards) - size + 1, size)]


class Cards:
    """The cards as one worker sees them.

    folder: of the locks; places: those of `places_of`; number: the worker's.
    """

    def __init__(self, folder: Path, places: Sequence[Sequence[str]], number: int) -> None:
        self.places, self.own = places, number % len(places)
        self._gates = [
            os.open(folder / f"gate-{index}", os.O_CREAT) for index in range(len(places))
        ]
        self._cards = [
            os.open(folder / f"card-{index}", os.O_CREAT) for index in range(len(places))
        ]

    def give_way(self) -> bool:
        """Whether another worker waits for this one's card, which is then free."""
        if _lock(self._gates[self.own], fcntl.LOCK_SH):
            fcntl.flock(self._gates[self.own], fcntl.LOCK_UN)
            return False
        self._give_back()
        return True

    @contextmanager
    def taken(self, gpus: int, still_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Inside, this process has that many cards, its own the first that it sees; False: it could
        not get them.

        still_wanted: asked while it waits for neighbours.
        """
        count = -(-gpus // len(self.places[self.own]))
        first = min(self.own // count * count, len(self.places) - count)
        group = [self.own, *(place for place in range(first, first + count) if place != self.own)]
        visible_before, taken = os.environ.get(VISIBLE), self._take(group, still_wanted)
        os.environ[VISIBLE] = ",".join(card for place in group for card in self.places[place])
        try:
            yield taken
        finally:
            (
                os.environ.pop(VISIBLE)
                if visible_before is None
                else os.environ.update({VISIBLE: visible_before})
            )
            for place in (
                group if taken and count > 1 else ()
            ):  # its own alone it keeps: a model may be in its memory
                fcntl.flock(self._cards[place], fcntl.LOCK_UN)

    def _take(self, group: Sequence[int], still_wanted: Callable[[], bool]) -> bool:
        if len(group) > 1:
            how = fcntl.LOCK_EX
        else:
            how = fcntl.LOCK_SH
        try:
            if not all(_lock(self._gates[place], how) for place in group):
                return False
            if len(group) > 1:
                self._give_back()
            # A list, not a generator: each card is tried.
            while not all([_lock(self._cards[place], how) for place in group]):  # noqa: C419
                if len(group) == 1 or not still_wanted():
                    for place in group:
                        fcntl.flock(self._cards[place], fcntl.LOCK_UN)
                    return False
                stop.raise_if_signalled()
                time.sleep(LOOK)
            return True
        finally:
            for place in group:
                fcntl.flock(self._gates[place], fcntl.LOCK_UN)

    def _give_back(self) -> None:
        """Free the card, and all memory that this process has of it: one that has used CUDA keeps
        its context, some hundred MB, so that it starts anew.
        """
        release_models()
        torch = sys.modules.get("torch")
        if torch and torch.cuda.is_initialized():
            os.execv(
                sys.executable, [sys.executable, "-m", "pipeline.launch.worker", *sys.argv[1:]]
            )
        fcntl.flock(self._cards[self.own], fcntl.LOCK_UN)


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
