"""The GPUs of this machine, shared among the workers of a command.

A worker uses one GPU, or several for a training of several processes. File locks count the GPUs;
they end with their process. A worker locks its GPU while it computes, and as long as a model stays
in its memory. For a training on several GPUs, a worker first closes its neighbours' gates, so that
they begin no other run and free their memory. It then waits until their GPUs are free.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from pipeline.merge.resident import release_models
from pipeline.runs import stop

LOOK = 0.1  # seconds between two looks at GPUs that a worker waits for
VISIBLE = "CUDA_VISIBLE_DEVICES"


def places_of(cards: Sequence[str], workers: int) -> list[list[str]]:
    """Return the GPUs of each place.

    With fewer workers than GPUs, a place has several GPUs. With more workers, several workers share
    a place.
    """
    size = max(1, len(cards) // workers)
    return [list(cards[first : first + size]) for first in range(0, len(cards) - size + 1, size)]


class Cards:
    """The locks on the GPUs, as one worker uses them.

    Args:
        folder: the folder of the lock files.
        places: the GPUs of each place, from `places_of`.
        number: the number of the worker.
    """

    def __init__(self, folder: Path, places: Sequence[Sequence[str]], number: int) -> None:
        self.places, self.own = places, number % len(places)
        numbers = range(len(places))
        self._gates = [os.open(folder / f"gate-{index}", os.O_CREAT) for index in numbers]
        self._cards = [os.open(folder / f"card-{index}", os.O_CREAT) for index in numbers]

    def give_way(self) -> bool:
        """Free this worker's GPU and return True if another worker waits for it."""
        if _lock(self._gates[self.own], fcntl.LOCK_SH):
            fcntl.flock(self._gates[self.own], fcntl.LOCK_UN)
            return False
        self._give_back()
        return True

    @contextmanager
    def taken(self, gpus: int, still_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Lock GPUs and make them visible, this worker's GPU first.

        Args:
            gpus: the number of GPUs.
            still_wanted: called while waiting for neighbours; False ends the wait.

        Yields:
            False if the GPUs could not be locked.
        """
        count = -(-gpus // len(self.places[self.own]))
        first = min(self.own // count * count, len(self.places) - count)
        neighbours = list(range(first, first + count))
        neighbours.remove(self.own)
        group = [self.own, *neighbours]
        visible_before, taken = os.environ.get(VISIBLE), self._take(group, still_wanted)
        cards = chain.from_iterable(self.places[place] for place in group)
        os.environ[VISIBLE] = ",".join(cards)
        try:
            yield taken
        finally:
            if visible_before is None:
                os.environ.pop(VISIBLE)
            else:
                os.environ[VISIBLE] = visible_before
            for place in (
                group if taken and count > 1 else ()
            ):  # its only GPU stays locked, because a model may be in its memory
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
            # A list, not a generator: each GPU is tried.
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
        """Free this worker's GPU and its memory on it.

        A process that has used CUDA keeps a context of some hundred MB, so it restarts itself.
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
