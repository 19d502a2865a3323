"""Examples as the trainer takes them: columns, chat template, sides; and their lengths, counted before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.training import Sft
from pipeline.data.sources import Example
from pipeline.errors import PipelineError
from pipeline.progress import warn
from pipeline.train.chat import chats, rendered, response_start


def columns(row: Example, sft: Sft) -> dict[str, Any]:
    """An example in the trainer's columns. The separator belongs to the completion: no token spans the two."""
    if "text" in row:
        return {"text": row["text"]}
    if sft.template == "plain":
        separator = sft.separator if row["prompt"] else ""
        return {"prompt": row["prompt"], "completion": separator + row["completion"]}
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    }


def dataset(examples: list[Example], sft: Sft) -> Any:
    from datasets import Dataset

    return Dataset.from_list([columns(row, sft) for row in examples])


def by_side(examples: list[Example], sft: Sft) -> dict[str, Any]:
    """The sets of a joint expert, each in the data run's order. PipelineError where a row does not say its side."""
    found: dict[str, list[Example]] = {"math": [], "language": []}
    for number, row in enumerate(examples, 1):
        if row.get("side") not in found:
            raise PipelineError(
                f"sft={sft.name} needs rows that say their side, and row {number} does not: make the data again with a "
                "joint expert, such as expert=math_sw"
            )
        found[row["side"]].append(row)
    for side, rows in found.items():
        if not rows:
            raise PipelineError(f"sft={sft.name} found no row of side {side}: give data.size room for both sets")
    return {side: dataset(rows, sft) for side, rows in found.items()}


def validation_sets(validation: list[Example], sft: Sft) -> dict[str, Any]:
    """The validation rows of each side. PipelineError where they are not as many of one as of the other."""
    counts = Counter(row.get("side") for row in validation)
    if counts["math"] != counts["language"]:  # a data run from before they were halved keeps its hash
        raise PipelineError(
            f"sft={sft.name} validates on as many rows of each side, and the data run holds {counts['math']} of math "
            f"and {counts['language']} of language: make it again with stage=data redo=true"
        )
    return by_side(validation, sft)


def measure(
    examples: list[Example], tokenizer: Any, sft: Sft, base: Path | None = None, validation: Sequence[Example] = ()
) -> dict[str, Any]:
    """Tokens of the set, and how many rows seq_length cuts (truncated) or leaves without any loss (dropped).

    Of chats also what their template gets wrong in some rows; that it raises on none of `validation` is only seen to.
    `base`: the folder of the base.
    """
    if sft.prompt_weight and ("text" in examples[0] or sft.loss_on == "all"):
        why = "plain text has no prompts" if "text" in examples[0] else "with sft.loss_on=all a prompt's token weighs 1"
        raise PipelineError(f"sft.prompt_weight={sft.prompt_weight}: {why}; leave it at 0")
    if "text" in examples[0]:
        ids = tokenizer([row["text"] for row in examples]).input_ids
        lengths = [len(row) + 1 for row in ids]  # and the end
        if sft.packing:  # cuts what it has strung together, and loses none
            return {"dataset_tokens": sum(lengths), "truncated": 0, "dropped": 0}
        return counted(lengths, 0, sft)
    rows = [columns(row, sft) for row in examples]
    faults: dict[str, int] = {}
    if sft.template == "chat":
        prompts, whole, faults = chats(rows, tokenizer, sft, base)
        rendered([columns(row, sft) for row in validation], 0, tokenizer)
    else:
        prompts = tokenizer([row["prompt"] for row in rows]).input_ids
        joined = tokenizer([row["prompt"] + row["completion"] for row in rows]).input_ids
        whole = [[*ids, tokenizer.eos_token_id] for ids in joined]
    starts = map(response_start, prompts, whole)
    lost = [start >= min(len(ids), sft.seq_length) for start, ids in zip(starts, whole, strict=True)]
    responses_only = sft.loss_on == "response" and not sft.prompt_weight
    for side in dict.fromkeys(row.get("side") for row in examples) if responses_only else ():
        if all(gone for gone, row in zip(lost, examples, strict=True) if row.get("side") == side):
            of = f" of side {side}" if side else ""
            raise PipelineError(
                f"sft.seq_length={sft.seq_length} leaves no row{of} with a loss: raise it above the prompts"
            )
    found = counted([len(ids) for ids in whole], sum(lost) if responses_only else 0, sft)
    return found | ({"template_faults": faults} if faults else {})


def counted(lengths: list[int], dropped: int, sft: Sft) -> dict[str, int]:
    """Tokens that are left of rows of these lengths, and the rows that are cut, or dropped for want of a loss."""
    truncated = sum(length > sft.seq_length for length in lengths)
    if truncated:
        none = f", {dropped:,} of them before any response: these are dropped" if dropped else ""
        warn(f"sft.seq_length={sft.seq_length} truncates {truncated:,} of {len(lengths):,} rows{none}")
    tokens = sum(min(length, sft.seq_length) for length in lengths)
    return {"dataset_tokens": tokens, "truncated": truncated, "dropped": dropped}
