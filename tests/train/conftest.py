"""Trainings in several processes, which begin with torch imported."""

from collections.abc import Iterator
from functools import partial

import forked
import pytest


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Make torch elastic fork its processes instead of starting interpreters.

    test_narrow.py does not use it.
    """
    from torch.distributed.launcher import api

    forked.start_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "LaunchConfig", partial(api.LaunchConfig, start_method="forkserver"))
        yield
