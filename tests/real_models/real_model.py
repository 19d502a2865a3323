"""What conftest.py and the tests on a real model share. No test imports from a conftest.py: there are several."""

import resource
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/get_smollm2.py"


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
