"""How a tokenizer cuts the items of mgsm_steps: shared by the tests of several tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mgsm_steps.items import write_items


def with_items(data_root: Path, folder: Path, *codes: str) -> Path:
    """Return a data_root with the files of another, and the items of mgsm_steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in data_root.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    for code in codes:
        write_items(folder, code)
    return folder


def check_tokens(
    data_root: Path, folder: Path, code: str, load: Callable[[list[str]], Any]
) -> None:
    """Check that a calculation leaves the tokens of its prompt unchanged, in all items.

    Then a calculation's probability is that of its own tokens. `load` returns the tokenizer, with
    texts to make one from.
    """
    file = with_items(data_root, folder, code) / "mgsm_steps" / code / "mgsm_steps.jsonl"
    items = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    tokenizer = load([item["prompt"] for item in items])
    prompts = tokenizer([item["prompt"] for item in items]).input_ids
    for choice in range(4):
        wholes = tokenizer([item["prompt"] + item["choices"][choice] for item in items]).input_ids
        for item, prompt, whole in zip(items, prompts, wholes, strict=True):
            assert whole[: len(prompt)] == prompt, item
            rest = "".join(tokenizer.convert_ids_to_tokens(whole[len(prompt) :]))
            plain = (
                rest.replace("<0x0A>", "\n").replace("▁", " ").replace("Ċ", "\n").replace("Ġ", " ")
            )
            assert plain == item["choices"][choice], item
    assert len(items) > 500
