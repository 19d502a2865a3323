"""A stage that one of its processes refuses.

Apart from the tests, as each process imports what it runs.
"""

import os
from typing import Any

from pipeline.errors import PipelineError


def refuses(run: Any, work: Any, tracker: Any) -> dict[str, Any]:
    if os.environ["RANK"] == "1":
        raise PipelineError("sft.learning_rate=9: lower it")
    return {}
