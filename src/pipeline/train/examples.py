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
from pipeline.train.chat import assistant_turns, chats, rendered, response_start


def columns(row: Example, sft: Sft) -> dict[str, Any]:
    """An example in the trainer's columns. The separator belongs to the completion; where a tokenizer joins it to the
    end of the prompt (`?\\n`), that token is trained on."""
    if "text" in row:
        return {"text": row["text"]}
    if sft.template == "plain":
        separator = sft.separator if row["prompt"] else ""
        return {"prompt": row["prompt"], "completion": separator + row["completion"]}
    messages = row.get("messages") or [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]
    if sft.loss_on == "assistant_turns":
        return {"messages": messages}
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def dataset(examples: list[Example], sft: Sft) -> Any:
    from datasets import Dataset

    rows = [columns(row, sft) for row in examples]
    return Dataset.from_list(rows, on_mixed_types="use_json")  # else messages get the keys of others, as nulls


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
    if sft.prompt_weight and ("text" in examples[0] or sft.loss_on != "response"):
        why = f"sft.loss_on={sft.loss_on} says what is trained on"
        why = "plain text has no prompts" if "text" in examples[0] else why
        raise PipelineError(f"sft.prompt_weight={sft.prompt_weight}: {why}; leave it at 0")
    rows, faults = tokens_of(examples, tokenizer, sft, base, validation)
    lengths = [len(ids) for ids, _ in rows]
    if sft.packing and "text" in examples[0]:  # cuts what it has strung together, and loses none
        return {"dataset_tokens": sum(lengths), "truncated": 0, "dropped": 0}
    lost = [not sft.prompt_weight and not any(mask[: sft.seq_length]) for _, mask in rows]
    for side in dict.fromkeys(row.get("side") for row in examples):
        if all(gone for gone, row in zip(lost, examples, strict=True) if row.get("side") == side):
            of = f" of side {side}" if side else ""
            raise PipelineError(
                f"sft.seq_length={sft.seq_length} leaves no row{of} with a loss: raise it above the prompts"
            )
    return counted(lengths, sum(lost), sft) | ({"template_faults": faults} if faults else {})


def tokens_of(
    examples: list[Example], tokenizer: Any, sft: Sft, base: Path | None = None, validation: Sequence[Example] = ()
) -> tuple[list[tuple[list[int], bytes]], dict[str, int]]:
    """Of each row, before it is truncated, the tokens and where the loss is: a byte a token, 1 for yes. Further, in how
    many rows a chat template has each fault. It is the trainer's rule, put to all rows before a step."""
    if "text" in examples[0]:
        texts = tokenizer([row["text"] for row in examples]).input_ids
        return [([*ids, tokenizer.eos_token_id], b"\1" * (len(ids) + 1)) for ids in texts], {}
    if sft.template == "plain":
        warn_of_messages(examples)
    rows, held_out = ([columns(row, sft) for row in some] for some in (examples, validation))
    if sft.loss_on == "assistant_turns":
        return assistant_turns([*rows, *held_out], tokenizer)[: len(rows)], {}
    faults: dict[str, int] = {}
    if sft.template == "chat":
        prompts, whole, faults = chats(rows, tokenizer, sft, base)
        rendered(held_out, 0, tokenizer)
    else:
        prompts = tokenizer([row["prompt"] for row in rows]).input_ids
        joined = tokenizer([row["prompt"] + row["completion"] for row in rows]).input_ids
        whole = [[*ids, tokenizer.eos_token_id] for ids in joined]
    starts = [0] * len(whole) if sft.loss_on == "all" else map(response_start, prompts, whole)
    return [(ids, bytes(start) + b"\1" * (len(ids) - start)) for ids, start in zip(whole, starts, strict=True)], faults


def warn_of_messages(examples: Sequence[Example]) -> None:
    """What text without turns cannot say: a warning of system messages, and a refusal of tools."""
    roles = Counter(one["role"] for row in examples for one in row.get("messages", ()))
    if roles["tool"]:
        raise PipelineError(
            "sft.template=plain: rows hold tool turns, which plain text cannot say: use sft.template=chat"
        )
    if roles["system"]:
        warn(f"sft.template=plain leaves out {roles['system']:,} system messages, which sft.template=chat keeps")


def counted(lengths: list[int], dropped: int, sft: Sft) -> dict[str, int]:
    """Tokens that are left of rows of these lengths, and the rows that are cut, or dropped for want of a loss."""
    truncated = sum(length > sft.seq_length for length in lengths)
    if truncated:
        none = f", {dropped:,} of them before any response: these are dropped" if dropped else ""
        warn(f"sft.seq_length={sft.seq_length} truncates {truncated:,} of {len(lengths):,} rows{none}")
    tokens = sum(min(length, sft.seq_length) for length in lengths)
    return {"dataset_tokens": tokens, "truncated": truncated, "dropped": dropped}
