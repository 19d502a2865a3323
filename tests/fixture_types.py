"""The types of what fixtures give to tests.

By `call` and `make_run` of conftest.py, and those like them.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

Call = Callable[..., SimpleNamespace]  # words of the command line -> its status, out and err
Make = Callable[..., Path]  # words of a run -> its folder
Patch = pytest.MonkeyPatch
