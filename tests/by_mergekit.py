"""What mergekit itself makes, in a Python of its own: PIPELINE_TEST_MERGEKIT."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

SCRIPT = """
import json, sys, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
for name, config in json.load(open(sys.argv[1])).items():
    config = yaml.safe_load(config) if isinstance(config, str) else config
    run_merge(MergeConfiguration.model_validate(config), sys.argv[2] + "/" + name,
              options=MergeOptions(quiet=True, copy_tokenizer=False))
"""


def environment() -> dict[str, str]:
    """Without the way to this program, whose packages are of other versions."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def made_by_mergekit(asked: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the weights of each merge by its name, made by mergekit in one process.

    `asked` is YAML, or its content.
    """
    (folder / "asked.json").write_text(json.dumps(asked))
    words = [
        os.environ["PIPELINE_TEST_MERGEKIT"],
        "-c",
        SCRIPT,
        str(folder / "asked.json"),
        str(folder),
    ]
    subprocess.run(words, check=True, env=environment())
    return {name: load_file(next((folder / name).glob("*.safetensors"))) for name in asked}
