"""FLORES+ from the Hub, whose rows of one language the harness cannot join. Named by tasks/flores_hub.yaml."""

from __future__ import annotations

from typing import Any

from pipeline.evaluate.local_data import joined
from pipeline.languages import Language, language

FLORES_PLUS = "openlanguagedata/flores_plus"
FLORES_SPLITS = {"dev": "dev", "test": "devtest"}  # the task's, and FLORES+'s
_RENAMED = {"zho_Hans": "cmn_Hans"}  # FLORES+ has ISO 639-3 codes of single languages


def flores_plus(source: str, target: str, **_: Any) -> dict[str, Any]:
    """The splits dev and test (devtest) of a translation pair as local files would give them: rows joined by id."""
    import datasets

    found = {}
    for name, split in FLORES_SPLITS.items():
        sides, names = [], []
        for spoken in (language(source), language(target)):
            rows = datasets.load_dataset(FLORES_PLUS, configuration(spoken), split=split)
            sides.append({int(row["id"]): row["text"] for row in rows})
            names.append(spoken.name)
        found[name] = datasets.Dataset.from_list(joined(sides, names, f"flores {split} of {source} and {target}"))
    return found


def configuration(spoken: Language) -> str:
    """The code of a language as FLORES+ has it."""
    return _RENAMED.get(spoken.flores, spoken.flores)
