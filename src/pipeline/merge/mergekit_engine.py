"""Runs in a Python that has mergekit, which may be another one than this program's: imports nothing of it.

    python -c "$(cat mergekit_engine.py)" ASKED.json

Makes the merge as the command mergekit-yaml does, and prints {"error": ...} where mergekit raises.
"""

from __future__ import annotations

import json
import sys


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        asked = json.load(file)
    try:
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge
        from mergekit.options import MergeOptions

        options = MergeOptions(
            random_seed=asked["seed"], num_threads=asked["threads"], copy_tokenizer=False, write_model_card=False,
            quiet=True, device="cpu",
        )  # fmt: skip
        options.apply_global_options()
        run_merge(MergeConfiguration.model_validate(asked["config"]), asked["out"], options=options)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
