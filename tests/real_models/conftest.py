"""A real pretrained model for tests, and real data."""

import os
import runpy
from pathlib import Path

import pytest

from pipeline.errors import PipelineError

SCRIPT = Path(__file__).parents[2] / "scripts/get_smollm2.py"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, downloaded on first use.

    Tests are skipped with the reason if it is not available.
    """
    try:
        return Path(runpy.run_path(str(SCRIPT))["smollm2"]())
    except PipelineError as error:
        pytest.skip(f"real_models: {error}")


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder with real MGSM and GSM8K for tests marked real_data."""
    return Path(os.environ["PIPELINE_TEST_DATA"]).absolute()
