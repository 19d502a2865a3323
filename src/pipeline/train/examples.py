"""Training examples in the trainer's columns, and checks before and after TRL tokenizes them."""

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

SHOWN = 100  # tokenized rows of each set that are kept for stage=show
ROWS = "rows.jsonl"
ADDED = 8  # most tokens without a byte of text, such as a beginning of sequence


def trainer_columns(row: Example, sft: Sft) -> dict[str, Any]:
    """Return an example in the trainer's columns.

    The separator belongs to the completion. If a tokenizer joins it to the end of the prompt
    (`?\\n`), that token is trained on.
    """
    if "text" in row:
        return {"text": row["text"]}
    if sft.template == "plain":
        completion = row["completion"]
        if row["prompt"] and sft.separator:
            completion = sft.separator + completion
        return {"prompt": row["prompt"], "completion": completion}
    messages = row.get("messages") or [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]
    if sft.loss_on == "assistant_turns":
        return {"messages": messages}
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def datasets_of(examples: Sequence[Example], sft: Sft, parts: Sequence[str]) -> dict[str, Any]:
    """Return the training set of each part, in the data run's order.

    A single part is trained on all rows. Several parts are trained on the rows of their sides.

    Raises:
        PipelineError: the rows have other sides than the parts.
    """
    from datasets import Dataset

    if len(parts) == 1:
        examples = [row | {"side": parts[0]} for row in examples]
    sides = {row.get("side", "none") for row in examples}
    if sides != set(parts):
        raise PipelineError(
            f"sft={sft.name} needs rows of both sides, but the rows are of"
            f" {' and '.join(sorted(sides))}. Create the data with a joint expert, such as"
            " expert=math_sw, and with data.size for both sets."
        )
    rows: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    for row in examples:
        rows[row["side"]].append(trainer_columns(row, sft))
    sets = {}
    for part, of_part in rows.items():
        # Other types would give a message the keys of other messages, as nulls
        sets[part] = Dataset.from_list(of_part, on_mixed_types="use_json")
    return sets


def check_rows(
    examples: Sequence[Example],
    tokenizer: Any,
    sft: Sft,
    base: Path | None = None,
    of: str = "train.jsonl",
) -> tuple[int, list[int]]:
    """Check that the template can express each row, and find rows that sft.seq_length cuts.

    A chat template must write the prompt as in generation, then the response, then its end. After
    the response only whitespace and special tokens are allowed, and the last special token must be
    an end. Text that the template puts before the response is trained on, because the model must
    write it (Qwen 3's empty thought, gpt-oss' channel). Spaces around a message may be missing,
    because many templates strip them. Packing cuts joined rows, and loses no row.

    Args:
        examples: the rows.
        tokenizer: the tokenizer, with its chat template.
        sft: the recipe.
        base: the folder of the base. Its generation config may name more ends of a response than
            the tokenizer.
        of: the file of the rows, for messages.

    Returns:
        The number of rows that are cut, and the indices of rows that keep no token with a loss.

    Raises:
        PipelineError: the template cannot express a row. The error names the row's number.
    """
    if not examples:
        return 0, []
    is_plain = "text" in examples[0] or sft.template == "plain"
    template: str | None = None
    ends: tuple[str, ...] = ()
    if is_plain:
        check_roles(examples)
    else:
        template = check_template(tokenizer, sft)
        ends = ends_of_response(tokenizer, base)
    encode = partial(tokenizer.encode, add_special_tokens=is_plain)
    limit = sft.seq_length
    cut, lost = 0, []
    unwritten = Counter[str]()
    for index, example in enumerate(examples):
        row = trainer_columns(example, sft)
        try:
            refuse_marked(example, sft)
            before, text = as_text(row, tokenizer, template)
            if not is_plain:
                check_row(row, before, text, tokenizer, sft, ends)
        except PipelineError as error:
            raise PipelineError(f"row {index + 1:,} of {of}: {error}") from error
        unwritten.update(unwritten_keys(example, text))
        # A token has at least one byte, so shorter texts need not be tokenized
        if sft.packing or len(text.encode()) + ADDED <= limit:
            continue
        ids = encode(text)
        if len(ids) <= limit:
            continue
        cut += 1
        if sft.loss_on != "all" and ids[:limit] == encode(before)[:limit]:
            lost.append(index)
    for key, count in unwritten.items():
        warn(
            f"sft.template={sft.template} does not write {key} of {count:,} turns, so it is not"
            " trained on."
        )
    return cut, lost


def refuse_marked(example: Example, sft: Sft) -> None:
    """Raise PipelineError if the loss would include an answer that is marked as not to train on."""
    if sft.loss_on == "response":
        return
    if not all(map(is_trained, example.get("messages", ()))):
        raise PipelineError(
            f"A turn has weight: 0 or train: false, but sft.loss_on={sft.loss_on} trains on it."
            " Set sft.loss_on=response."
        )


def unwritten_keys(example: Example, text: str) -> list[str]:
    """Return the keys of a row's turns whose texts the chat template has not written."""
    unwritten = []
    for turn in example.get("messages", ()):
        for key, value in other_keys(turn).items():
            if key in MARKS or not isinstance(value, str):
                continue
            if value.strip() not in text:
                unwritten.append(key)
    return unwritten


def check_roles(examples: Sequence[Example]) -> None:
    """Raise PipelineError for tool turns in plain text, and warn of omitted system messages."""
    roles = Counter[str]()
    for row in examples:
        roles.update(message["role"] for message in row.get("messages", ()))
    if roles["tool"]:
        raise PipelineError(
            "sft.template=plain cannot express tool turns, which the rows hold. Use"
            " sft.template=chat."
        )
    if roles["system"]:
        warn(
            f"sft.template=plain omits {roles['system']:,} system messages. sft.template=chat keeps"
            " them."
        )


def ends_of_response(tokenizer: Any, base: Path | None) -> tuple[str, ...]:
    """Return the tokens that end a response, of the tokenizer and of the base's configuration."""
    stops = None
    for name in ("generation_config.json", "config.json"):
        if base and (base / name).is_file():
            stops = read_json(base / name).get("eos_token_id")
            break
    ids = [tokenizer.eos_token_id]
    if isinstance(stops, list):
        ids += stops
    elif stops is not None:
        ids.append(stops)
    return tuple(sorted({tokenizer.convert_ids_to_tokens(token) for token in ids}))


def check_row(
    row: dict[str, Any], prompt: str, text: str, tokenizer: Any, sft: Sft, ends: tuple[str, ...]
) -> None:
    """Check that a chat template writes all of a row, in the form that generation uses.

    The form is not checked if the template itself marks what is trained on.

    Args:
        row: the row in the trainer's columns.
        prompt: the text before the first response (`as_text`).
        text: the whole text (`as_text`).
        tokenizer: the tokenizer.
        sft: the recipe.
        ends: the tokens that end a response.

    Raises:
        PipelineError: the template drops a part of the row, or writes it in another form.
    """
    turns = row.get("messages") or row["prompt"] + row["completion"]
    messages = [message["content"].strip() for message in turns]
    for message in messages:
        if message not in text:
            fault = f"does not write all of {shorten(message, 80)!r}, which would not be trained on"
            raise template_error(tokenizer, fault)
    if "messages" in row:
        return
    if sft.loss_on == "all":
        prompt = ""
    after = text.rpartition(messages[-1])[2]
    has_response = len(text) - len(after) > len(prompt)
    if not (text.startswith(prompt) and has_response):
        raise template_error(
            tokenizer,
            "does not write the prompt as in generation before the response, so other tokens would"
            " be trained on",
        )
    if after.rstrip().endswith(ends) and not words_in(after, tokenizer):
        return
    remedy = "sft.template=plain"
    last = next(filter(after.rstrip().endswith, tokenizer.get_added_vocab()), None)
    if last:
        remedy = f"sft.eos_token='{last}'"
    fault = f"does not end a response with {' or '.join(ends)} alone, where the model should stop"
    raise template_error(tokenizer, fault, remedy)


@lru_cache(maxsize=64)
def words_in(text: str, tokenizer: Any) -> str:
    """Strip special tokens and surrounding whitespace from a text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def side_without_loss(examples: Sequence[Example], lost: Sequence[int], sft: Sft) -> str:
    """Return what is wrong if all rows of a side are `lost`, otherwise an empty text.

    Args:
        examples: the rows.
        lost: the indices of rows without a loss.
        sft: the recipe. Only simultaneous training has sides.
    """
    sides = [""] * len(examples)
    if sft.method == "simultaneous":
        sides = [row.get("side", "") for row in examples]
    lost_sides = Counter(sides[index] for index in lost)
    for side, count in sorted(Counter(sides).items()):
        if count != lost_sides[side]:
            continue
        of_side = ""
        if side:
            of_side = f" of side {side}"
        return (
            f"sft.seq_length={sft.seq_length} leaves no row{of_side} with a loss. Raise it above"
            " the length of the prompts."
        )
    return ""


def cut_words(sft: Sft, cut: int, lost: int, rows: str) -> str:
    """Return a sentence about truncated rows, or an empty text if no row is truncated.

    `lost` is the number of truncated rows without a response. `rows` describes all rows.
    """
    if not cut:
        return ""
    without_loss = ""
    if lost:
        without_loss = f", {lost:,} of them before any response: these are dropped"
    return f"sft.seq_length={sft.seq_length} truncates {cut:,} of {rows}{without_loss}"


def as_text(row: dict[str, Any], tokenizer: Any, template: str | None) -> tuple[str, str]:
    """Return the text before a row's first response, and its whole text, as TRL tokenizes them.

    Plain text ends with the end of sequence. A conversation is as the chat template writes it.

    Args:
        row: the row in the trainer's columns.
        tokenizer: the tokenizer.
        template: the chat template, or None for the tokenizer's.

    Raises:
        PipelineError: the template raises.
    """
    before, whole = row.get("prompt", ""), row.get("messages")
    if whole:
        roles = [message["role"] for message in whole]
        before = whole[: roles.index("assistant")]
    if isinstance(before, str):
        text = row.get("text", "") + before + row.get("completion", "")
        if not text.endswith(tokenizer.eos_token):
            text += tokenizer.eos_token
        return before, text
    write = partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False)
    try:
        return write(before, add_generation_prompt=True), write(whole or before + row["completion"])
    except Exception as error:  # a template is a program, which can raise anything
        reason = one_line(str(error)) or type(error).__name__
        fault = f"raises on {shorten(str(before), 80)} ({reason})"
        raise template_error(tokenizer, fault) from error


def check_template(tokenizer: Any, sft: Sft) -> str | None:
    """Return the chat template to train with, or None for the tokenizer's own.

    If the loss is on the assistant's turns and the template does not mark them, return TRL's copy
    of the template, which marks them.

    Raises:
        PipelineError: there is no template, or no copy that marks the turns with their ends.
    """
    from trl import chat_template_utils as of_trl

    if not tokenizer.chat_template:
        raise PipelineError(
            "sft.template=chat needs a chat template, which the model's tokenizer does not have."
            " Use sft.template=plain."
        )
    if sft.loss_on != "assistant_turns":
        return None
    with suppress(ValueError):  # TRL has no copy
        template = None
        if not of_trl.has_generation_markers(tokenizer.chat_template):
            template = of_trl.get_training_chat_template(tokenizer)
        if of_trl.is_chat_template_stop_token_trained(tokenizer, chat_template=template):
            return template
    fault = (
        "does not mark the assistant's turns and their ends by {% generation %} and {%"
        " endgeneration %}"
    )
    raise template_error(tokenizer, fault, "sft.loss_on=response")


def template_error(
    tokenizer: Any, fault: str, instead: str = "sft.template=plain"
) -> PipelineError:
    """Return an error about a chat template, with the file that holds it."""
    holder = "the tokenizer"
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = Path(tokenizer.name_or_path) / name
        if file.is_file():
            holder = str(file)
            break
    return PipelineError(f"The chat template of {holder} {fault}. Correct it, or use {instead}.")


def write_rows(sets: dict[str, Any], tokenizer: Any, file: Path) -> None:
    """Write the tokens, labels and text of the first rows of the trainer's sets.

    Labels are -100 for tokens without a loss.
    """
    with file.open("w", encoding="utf-8") as lines:
        for row in chain.from_iterable(islice(rows, SHOWN) for rows in sets.values()):
            ids = row["input_ids"]
            shown = {"input_ids": ids, "labels": row["labels"], "text": tokenizer.decode(ids)}
            lines.write(json.dumps(shown, ensure_ascii=False) + "\n")
