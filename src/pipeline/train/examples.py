"""Examples in the trainer's columns, and what is checked of them before and after TRL has tokenized
them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pipeline.config.training import Sft
from pipeline.data.conversations import MARKS, is_trained, other_keys
from pipeline.data.sources import Example
from pipeline.errors import PipelineError
from pipeline.models.checkpoint import read_json
from pipeline.progress import warn
from pipeline.text import one_line, shorten

SHOWN = 100  # rows of each set that are kept as they were trained on, for stage=show
ROWS = "rows.jsonl"
ADDED = 8  # tokens without a byte of text, as a beginning: at most so many


def trainer_columns(row: Example, sft: Sft) -> dict[str, Any]:
    """Return an example in the trainer's columns.

    The separator belongs to the completion. If a tokenizer joins it to the end of the prompt
    (`?\\n`), that token is trained on.
    """
    if "text" in row:
        return {"text": row["text"]}
    if sft.template == "plain":
        separator = sft.separator if row["prompt"] else None
        return {"prompt": row["prompt"], "completion": (separator or "") + row["completion"]}
    turns = {"user": "prompt", "assistant": "completion"}
    messages = row.get("messages") or [
        {"role": role, "content": row[key]} for role, key in turns.items()
    ]
    if sft.loss_on == "assistant_turns":
        return {"messages": messages}
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def datasets_of(examples: Sequence[Example], sft: Sft, parts: Sequence[str]) -> dict[str, Any]:
    """Part -> the set that it is trained on, in the data run's order: of several that of its side.

    Raises PipelineError where these are not the sides of the rows.
    """
    from datasets import Dataset

    if len(parts) == 1:
        examples = [row | {"side": parts[0]} for row in examples]
    sides = {row.get("side", "none") for row in examples}
    if sides != set(parts):
        raise PipelineError(
            f"sft={sft.name} needs rows of both sides, and these are of"
            f" {' and '.join(sorted(sides))}: create the data with a joint expert, such as"
            " expert=math_sw, and data.size with room for both sets"
        )
    rows = {
        part: [trainer_columns(row, sft) for row in examples if row["side"] == part]
        for part in parts
    }
    # else messages get the keys of others, as nulls
    return {
        part: Dataset.from_list(of_part, on_mixed_types="use_json")
        for part, of_part in rows.items()
    }


def check_rows(
    examples: Sequence[Example],
    tokenizer: Any,
    sft: Sft,
    base: Path | None = None,
    of: str = "train.jsonl",
) -> tuple[int, list[int]]:
    """(rows that sft.seq_length cuts, numbers of those that keep no token with a loss), each
    rendered once, as TRL will tokenize it. Raises PipelineError for the first row that the template
    cannot express, with its number.

    A chat template must write a row as its prompt, which generation begins with, the response, and
    its end. After the response only special tokens, the last one of the ends, and whitespace are
    allowed. What the template writes before it (Qwen 3's empty thought, gpt-oss' channel) the model
    must write too, and learns. Spaces around a message may be missing, as many templates strip
    them. Packing cuts what it has strung together, and loses no row.

    Args:
        base: the folder of the base, whose generation config may name more ends of a response than
            the tokenizer.
        of: where the rows are.
    """
    if not examples:
        return 0, []
    is_plain = "text" in examples[0] or sft.template == "plain"
    if is_plain:
        check_roles(examples)
    if is_plain:
        template = None
    else:
        template = check_template(tokenizer, sft)
    ends, cut, lost = () if is_plain else ends_of_response(tokenizer, base), 0, []
    tokens = partial(tokenizer.encode, add_special_tokens=is_plain)
    unwritten = Counter[str]()
    for number, example in enumerate(examples):
        row = trainer_columns(example, sft)
        try:
            refuse_marked(example, sft)
            before, text = as_text(row, tokenizer, template)
            if not is_plain:
                check_row(row, before, text, tokenizer, sft, ends)
            unwritten.update(unwritten_keys(example, text))
        except PipelineError as error:
            raise PipelineError(f"row {number + 1:,} of {of}: {error}") from error
        # only rows with as many bytes are tokenized, as a token has at least one
        if not sft.packing and len(text.encode()) + ADDED > sft.seq_length < len(
            ids := tokens(text)
        ):
            cut += 1
            if sft.loss_on != "all" and ids[: sft.seq_length] == tokens(before)[: sft.seq_length]:
                lost.append(number)
    for key, count in unwritten.items():
        warn(
            f"sft.template={sft.template} does not write {key} of {count:,} turns, so that it is"
            " not trained on"
        )
    return cut, lost


def refuse_marked(example: Example, sft: Sft) -> None:
    """Raise PipelineError if the loss would be on an answer that is marked as one not to train
    on.
    """
    if sft.loss_on != "response" and not all(map(is_trained, example.get("messages", ()))):
        raise PipelineError(
            f"it has a turn with weight: 0 or train: false, and sft.loss_on={sft.loss_on} trains on"
            " it. Give sft.loss_on=response"
        )


def unwritten_keys(example: Example, text: str) -> list[str]:
    """Return the keys of a row's turns whose texts the chat template has not written."""
    keys = []
    for turn in example.get("messages", ()):
        for key, value in other_keys(turn).items():
            keys.append((key, value))
    found = []
    for key, value in keys:
        if isinstance(value, str) and key not in MARKS and value.strip() not in text:
            found.append(key)
    return found


def check_roles(examples: Sequence[Example]) -> None:
    """Raise PipelineError for turns of tools in rows of plain text; warn of system messages, which
    it omits.
    """
    roles = Counter(message["role"] for row in examples for message in row.get("messages", ()))
    if roles["tool"]:
        raise PipelineError(
            "sft.template=plain: rows hold tool turns, which plain text cannot express: use"
            " sft.template=chat"
        )
    if roles["system"]:
        warn(
            f"sft.template=plain omits {roles['system']:,} system messages, which sft.template=chat"
            " keeps"
        )


def ends_of_response(tokenizer: Any, base: Path | None) -> tuple[str, ...]:
    """Return the tokens that end a response: the tokenizer's own, and those of the base's
    generation.
    """
    files = []
    if base:
        files = [base / name for name in ("generation_config.json", "config.json")]
    file = next((file for file in files if file.is_file()), None)
    stops = None
    if file:
        stops = read_json(file).get("eos_token_id")
    if not isinstance(stops, list):
        stops = [stops] if stops is not None else []
    return tuple(
        sorted(
            {tokenizer.convert_ids_to_tokens(token) for token in (tokenizer.eos_token_id, *stops)}
        )
    )


def check_row(
    row: dict[str, Any], prompt: str, text: str, tokenizer: Any, sft: Sft, ends: tuple[str, ...]
) -> None:
    """Raise PipelineError where the template has dropped part of a row, and, where the loss is not
    by its own marks, written it otherwise than generation does. prompt, text: `as_text` of the row.
    """
    turns = row.get("messages") or row["prompt"] + row["completion"]
    messages = [message["content"].strip() for message in turns]
    dropped = next((message for message in messages if message not in text), "")
    if dropped:
        raise template_error(
            tokenizer,
            f"does not write all of {shorten(dropped, 80)!r}: what it drops would not be"
            " trained on",
        )
    if "messages" in row:
        return
    prompt, after = "" if sft.loss_on == "all" else prompt, text.rpartition(messages[-1])[2]
    if not (text.startswith(prompt) and len(text) - len(after) > len(prompt)):
        fault = (
            "does not write the prompt as in generation, then the response: other tokens would be"
            " trained on"
        )
        raise template_error(tokenizer, fault)
    if not after.rstrip().endswith(ends) or words_in(after, tokenizer):
        fault = (
            f"does not end a response with {' or '.join(ends)} alone, where the model is to stop"
        )
        last = next(filter(after.rstrip().endswith, tokenizer.get_added_vocab()), None)
        raise template_error(
            tokenizer, fault, f"sft.eos_token='{last}'" if last else "sft.template=plain"
        )


@lru_cache(maxsize=64)
def words_in(text: str, tokenizer: Any) -> str:
    """Return what a text holds besides special tokens and whitespace."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def side_without_loss(examples: Sequence[Example], lost: Sequence[int], sft: Sft) -> str:
    """Return what is wrong if the rows `lost` are all of a side, else nothing."""
    sides = [row.get("side", "") if sft.method == "simultaneous" else "" for row in examples]
    for side, count in sorted(Counter(sides).items()):
        if count == sum(sides[number] == side for number in lost):
            of = f" of side {side}" if side else ""
            return (
                f"sft.seq_length={sft.seq_length} leaves no row{of} with a loss: raise it above the"
                " prompts"
            )
    return ""


def cut_words(sft: Sft, cut: int, lost: int, rows: str) -> str:
    """How many of some rows are truncated, and how many of these are `lost`; empty where none
    is.
    """
    if not cut:
        return ""
    without_loss = ""
    if lost:
        without_loss = f", {lost:,} of them before any response: these are dropped"
    return f"sft.seq_length={sft.seq_length} truncates {cut:,} of {rows}{without_loss}"


def as_text(row: dict[str, Any], tokenizer: Any, template: str | None) -> tuple[str, str]:
    """Return (what stands before the first response, all of it) of a row, as TRL tokenizes it.

    The text has the end of sequence, or is as the chat template writes it.

    Raises: PipelineError: the template raises.
    """
    before, whole = row.get("prompt", ""), row.get("messages")
    if whole:
        before = whole[: [message["role"] for message in whole].index("assistant")]
    if isinstance(before, str):
        text = row.get("text", "") + before + row.get("completion", "")
        return before, text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token
    write = partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False)
    try:
        return write(before, add_generation_prompt=True), write(whole or before + row["completion"])
    except Exception as error:  # a template is a program, and raises what it likes
        reason = one_line(str(error)) or type(error).__name__
        raise template_error(
            tokenizer, f"raises on {shorten(str(before), 80)} ({reason})"
        ) from error


def check_template(tokenizer: Any, sft: Sft) -> str | None:
    """Return the chat template to train with, None for the tokenizer's own.

    If the loss is on the assistant's turns and the template does not mark them, it is TRL's copy
    that does.

    Raises: PipelineError: there is no template, or none that marks the turns with their ends.
    """
    from trl import chat_template_utils as of_trl

    if not tokenizer.chat_template:
        raise PipelineError(
            "sft.template=chat: the model's tokenizer has no chat template; use sft.template=plain"
        )
    if sft.loss_on != "assistant_turns":
        return None
    with suppress(ValueError):  # TRL has no copy
        own = of_trl.has_generation_markers(tokenizer.chat_template)
        if own:
            template: str | None = None
        else:
            template = of_trl.get_training_chat_template(tokenizer)
        if of_trl.is_chat_template_stop_token_trained(tokenizer, chat_template=template):
            return template
    fault = (
        "does not mark what the assistant says, and its end, by {% generation %} and {%"
        " endgeneration %}"
    )
    raise template_error(tokenizer, fault, "sft.loss_on=response")


def template_error(
    tokenizer: Any, fault: str, instead: str = "sft.template=plain"
) -> PipelineError:
    """Return what is wrong with a chat template, by the file that holds it."""
    files = [
        Path(tokenizer.name_or_path) / name
        for name in ("chat_template.jinja", "tokenizer_config.json")
    ]
    file = next((file for file in files if file.is_file()), "the tokenizer")
    return PipelineError(f"the chat template of {file} {fault}: correct it, or use {instead}")


def write_rows(sets: dict[str, Any], tokenizer: Any, file: Path) -> None:
    """Write the first rows of the trainer's sets: tokens, labels, which are -100 where there is no
    loss, and text.
    """
    with file.open("w", encoding="utf-8") as lines:
        for row in chain.from_iterable(islice(rows, SHOWN) for rows in sets.values()):
            ids = row["input_ids"]
            shown = {"input_ids": ids, "labels": row["labels"], "text": tokenizer.decode(ids)}
            lines.write(json.dumps(shown, ensure_ascii=False) + "\n")
