"""A real pretrained model for tests, and real data."""

import os
import runpy
from pathlib import Path

import pytest

from pipeline.errors import PipelineError

SCRIPT = Path(__file__).parents[2] / "scripts/get_smollm2.py"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, downloaded on first use; where it cannot be
    had, the tests that need it are skipped with the reason.
    """
    try:
        return Path(runpy.run_path(str(SCRIPT))["smollm2"]())
    except PipelineError as error:
        pytest.skip(f"real_models: {error}")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with real MGSM and GSM8K; tests that read it are marked real_data."""
    return Path(os.environ["PIPELINE_TEST_DATA"]).absolute()
