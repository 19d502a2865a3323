"""A real pretrained model for tests, and the count of each test's comparisons with the CPU seconds that they took."""

import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_model import SCRIPT, cpu_seconds

from pipeline.errors import PipelineError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, downloaded on first use; where it cannot be had, the tests
    that need it are skipped with the reason."""
    try:
        return Path(runpy.run_path(str(SCRIPT))["smollm2"]())
    except PipelineError as error:
        pytest.skip(f"real_models: {error}")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with real MGSM and GSM8K; tests that read it are marked real_data."""
    return Path(os.environ["PIPELINE_TEST_DATA"]).absolute()


@pytest.fixture
def compared(smollm2: Path, record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """To be called at a test's end with the number of its comparisons, and a note. The terminal summary prints them
    with the CPU seconds of the test and of the processes that it started."""
    before = cpu_seconds()

    def record(count: int, note: str = "") -> None:
        seconds = f"{count} in {cpu_seconds() - before:.0f} CPU s"
        record_property("compared", f"{seconds}; {note}" if note else seconds)

    return record
