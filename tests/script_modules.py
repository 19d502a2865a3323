"""The scripts as modules."""

import importlib.util
from pathlib import Path
from typing import Any


def load_script(name: str) -> Any:
    """scripts/NAME.py as a module of its own, loaded anew."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[1] / f"scripts/{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
