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
from pipeline.train.chat import assistant_turns, render_rows, response_start, tokenize_chats


def trainer_columns(row: Example, sft: Sft) -> dict[str, Any]:
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


def make_dataset(examples: list[Example], sft: Sft) -> Any:
    from datasets import Dataset

    rows = [trainer_columns(row, sft) for row in examples]
    return Dataset.from_list(rows, on_mixed_types="use_json")  # else messages get the keys of others, as nulls


def datasets_by_side(examples: list[Example], sft: Sft) -> dict[str, Any]:
    """Side -> its set of a joint expert, in the data run's order. Raises PipelineError where a row has no side."""
    examples_by_side: dict[str, list[Example]] = {"math": [], "language": []}
    for number, row in enumerate(examples, 1):
        if row.get("side") not in examples_by_side:
            raise PipelineError(
                f"sft={sft.name} needs rows with a side, and row {number} has none: create the data again with a "
                "joint expert, such as expert=math_sw"
            )
        examples_by_side[row["side"]].append(row)
    for side, rows in examples_by_side.items():
        if not rows:
            raise PipelineError(f"sft={sft.name} found no row of side {side}: give data.size room for both sets")
    return {side: make_dataset(rows, sft) for side, rows in examples_by_side.items()}


def validation_sets(validation: list[Example], sft: Sft) -> dict[str, Any]:
    """Side -> its validation set. Raises PipelineError where the two have different numbers of rows."""
    counts = Counter(row.get("side") for row in validation)
    if counts["math"] != counts["language"]:  # a data run from before they were halved keeps its hash
        raise PipelineError(
            f"sft={sft.name} validates on equally many rows of each side, and the data run holds {counts['math']} of "
            f"math and {counts['language']} of language: rerun it with stage=data redo=true"
        )
    return datasets_by_side(validation, sft)


def measure_lengths(
    examples: list[Example], tokenizer: Any, sft: Sft, base: Path | None = None, validation: Sequence[Example] = ()
) -> dict[str, Any]:
    """Tokens of the set, and how many rows seq_length cuts (truncated) or leaves without any loss (dropped).

    For chats also the faults of their template in some rows; on `validation` it is only checked not to raise.
    `base`: the folder of the base.
    """
    if sft.prompt_weight and "text" in examples[0]:
        raise PipelineError(f"sft.prompt_weight={sft.prompt_weight}: plain text has no prompts; leave it at 0")
    rows, faults = tokens_of(examples, tokenizer, sft, base, validation)
    lengths = [len(ids) for ids, _ in rows]
    if sft.packing and "text" in examples[0]:  # cuts what it has strung together, and loses none
        return {"dataset_tokens": sum(lengths), "truncated": 0, "dropped": 0}
    lost = [not sft.prompt_weight and not any(mask[: sft.seq_length]) for _, mask in rows]
    for side in dict.fromkeys(row.get("side") for row in examples):
        if all(is_lost for is_lost, row in zip(lost, examples, strict=True) if row.get("side") == side):
            of = f" of side {side}" if side else ""
            raise PipelineError(
                f"sft.seq_length={sft.seq_length} leaves no row{of} with a loss: raise it above the prompts"
            )
    return count_tokens(lengths, sum(lost), sft) | ({"template_faults": faults} if faults else {})


def tokens_of(
    examples: list[Example], tokenizer: Any, sft: Sft, base: Path | None = None, validation: Sequence[Example] = ()
) -> tuple[list[tuple[list[int], bytes]], dict[str, int]]:
    """(tokens, loss mask of a byte per token, 1 where the loss is) of each row before truncation, and the number of
    rows with each fault of a chat template. The trainer's rule, applied to all rows before a step."""
    if "text" in examples[0]:
        texts = tokenizer([row["text"] for row in examples]).input_ids
        return [([*ids, tokenizer.eos_token_id], b"\1" * (len(ids) + 1)) for ids in texts], {}
    if sft.template == "plain":
        warn_of_messages(examples)
    rows, held_out = ([trainer_columns(row, sft) for row in part] for part in (examples, validation))
    if sft.loss_on == "assistant_turns":
        return assistant_turns([*rows, *held_out], tokenizer)[: len(rows)], {}
    faults: dict[str, int] = {}
    if sft.template == "chat":
        prompts, conversations, faults = tokenize_chats(rows, tokenizer, sft, base)
        render_rows(held_out, 0, tokenizer)
    else:
        prompts = tokenizer([row["prompt"] for row in rows]).input_ids
        joined = tokenizer([row["prompt"] + row["completion"] for row in rows]).input_ids
        conversations = [[*ids, tokenizer.eos_token_id] for ids in joined]
    starts = [0] * len(conversations) if sft.loss_on == "all" else map(response_start, prompts, conversations)
    pairs = zip(conversations, starts, strict=True)
    return [(ids, bytes(start) + b"\1" * (len(ids) - start)) for ids, start in pairs], faults


def warn_of_messages(examples: Sequence[Example]) -> None:
    """Warn of system messages, which text without turns omits; raise PipelineError for tool turns."""
    roles = Counter(message["role"] for row in examples for message in row.get("messages", ()))
    if roles["tool"]:
        raise PipelineError(
            "sft.template=plain: rows hold tool turns, which plain text cannot express: use sft.template=chat"
        )
    if roles["system"]:
        warn(f"sft.template=plain omits {roles['system']:,} system messages, which sft.template=chat keeps")


def count_tokens(lengths: list[int], dropped: int, sft: Sft) -> dict[str, int]:
    """Tokens of rows of these lengths after truncation, and the numbers of rows cut, and dropped for lack of a loss."""
    truncated = sum(length > sft.seq_length for length in lengths)
    if truncated:
        without_loss = f", {dropped:,} of them before any response: these are dropped" if dropped else ""
        warn(f"sft.seq_length={sft.seq_length} truncates {truncated:,} of {len(lengths):,} rows{without_loss}")
    tokens = sum(min(length, sft.seq_length) for length in lengths)
    return {"dataset_tokens": tokens, "truncated": truncated, "dropped": dropped}
