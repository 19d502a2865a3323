"""Trainings in several processes, which begin with torch imported."""

from collections.abc import Iterator
from functools import partial

import forked
import pytest


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """torch elastic forks its processes, where it starts new interpreters elsewhere (test_narrow.py
    leaves it so).
    """
    from torch.distributed.launcher import api

    forked.start_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "LaunchConfig", partial(api.LaunchConfig, start_method="forkserver"))
        yield
