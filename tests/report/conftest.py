"""A report of made-up results."""

from pathlib import Path

import pytest
from made_up_report import made_up

from pipeline.report.load.contents import Results


@pytest.fixture
def one_language(tmp_path: Path) -> Results:
    return made_up(tmp_path / "runs")


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "reports" / "sandbox"
