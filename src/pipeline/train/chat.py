"""Chat templates, tried on the rows before training: what a template gets wrong is refused by the name of its file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_stop_token_trained,
)

from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.progress import warn

NO_TEMPLATE = "sft.template=chat: the model's tokenizer has no chat template; use sft.template=plain"
PIECE = 200  # rows at a time: a template that fails on all of the first piece is refused before the rest is rendered
FAULTS = {  # what can go wrong in a row -> the words for it, and the remedy
    "left_out": ("leaves out the prompt or the response", "let it write both"),
    "prompt_differs": (
        "writes a prompt that its conversation does not begin with, so that the loss falls on other tokens than the "
        "response",
        "let it begin the response as its generation prompt does",
    ),
    "without_end": (
        "ends a response without {ends}, so that the model never learns to stop",
        "let it write that, or name its own end as eos_token in tokenizer_config.json",
    ),
    "other_text": (
        "writes other text after a response than its end, which would be trained on",
        "let it write nothing there",
    ),
}


@dataclass
class Chat:
    """A row as the template writes it, and its token ids: the prompt alone, and the whole conversation."""

    prompt_text: str
    text: str
    prompt: list[int]
    whole: list[int]


def chats(
    rows: list[dict[str, Any]], tokenizer: Any, sft: Sft, base: Path | None
) -> tuple[list[list[int]], list[list[int]], dict[str, int]]:
    """Token ids of the prompts and of the conversations, as the trainer has them, and in how many rows each fault is.

    Args:
        rows: conversations of one prompt and one response, as the trainer takes them (examples.columns).
        base: the folder of the base, whose generation config may name more ends of a response than the tokenizer.

    Raises:
        PipelineError: the tokenizer has no template, or one that raises, or one that fails on all rows.
    """
    if not tokenizer.chat_template:
        raise PipelineError(NO_TEMPLATE)
    file = file_of(tokenizer)
    ends = set(tokenizer.convert_ids_to_tokens(sorted(ends_of(tokenizer, base))))
    marks = sorted({*ends, *tokenizer.added_tokens_encoder}, key=len, reverse=True)
    prompts: list[list[int]] = []
    whole: list[list[int]] = []
    faults: Counter[str] = Counter()
    for start in range(0, len(rows), PIECE):
        part = rows[start : start + PIECE]
        for row, chat in zip(part, rendered(part, start, tokenizer), strict=True):
            faults.update(faults_of(row, chat, sft, ends, marks))
            prompts.append(chat.prompt)
            whole.append(chat.whole)
        for fault in (fault for fault, count in faults.items() if count == len(whole)):
            words, remedy = FAULTS[fault]
            words = words.format(ends=" or ".join(sorted(ends)))
            raise PipelineError(f"the chat template of {file} {words}: {remedy}, or use sft.template=plain")
    for fault, count in faults.items():
        words = FAULTS[fault][0].format(ends="an end of sequence")
        warn(f"the chat template of {file} {words}, in {count} of {len(rows)} rows")
    return prompts, whole, dict(faults)


def faults_of(row: dict[str, Any], chat: Chat, sft: Sft, ends: set[str], marks: Sequence[str]) -> list[str]:
    """What the template gets wrong in a row, keys of FAULTS.

    After the response stand marks of which the last is one of `ends`, and whitespace, nothing else. What the template
    writes before it (Qwen 3's empty thought, gpt-oss' channel) the model must write too, and learns. Spaces around a
    message may go, as many templates strip them. A token may span prompt and response where the text of the one begins
    the other: the loss is on it.
    """
    texts = [message["content"].strip() for message in row["prompt"] + row["completion"]]
    if any(text not in chat.text for text in texts) or response_start(chat.prompt, chat.whole) >= len(chat.whole):
        return ["left_out"]
    trained = chat.text
    if sft.loss_on == "response":
        if not chat.text.startswith(chat.prompt_text):
            return ["prompt_differs"]
        trained = chat.text[len(chat.prompt_text) :]
    _, response, after = trained.rpartition(texts[-1])
    if not response:
        return ["left_out"]
    if not any(end in after for end in ends):
        return ["without_end"]
    words = after
    for mark in marks:
        words = words.replace(mark, "")
    return ["other_text"] if words.strip() or not after.rstrip().endswith(tuple(ends)) else []


def assistant_turns(rows: list[dict[str, Any]], tokenizer: Any) -> list[tuple[list[int], bytes]]:
    """Of each row of messages the tokens and a mask, 1 where the trainer puts the loss: words and end of each answer.

    A template without marks of what is generated stands in TRL with them, for the models that TRL knows.

    Raises:
        PipelineError: TRL does not know the template, or the mask leaves out the end of a turn.
    """
    template, file = None, file_of(tokenizer)
    if not tokenizer.chat_template:
        raise PipelineError(NO_TEMPLATE)
    try:
        if not has_generation_markers(tokenizer.chat_template):
            template = get_training_chat_template(tokenizer)
        ends_trained = is_chat_template_stop_token_trained(tokenizer, chat_template=template)
    except ValueError as error:
        raise PipelineError(
            f"sft.loss_on=assistant_turns: the chat template of {file} does not mark what the assistant says: put it "
            "between {% generation %} and {% endgeneration %}, or use sft.loss_on=response"
        ) from error
    if not ends_trained:
        raise PipelineError(
            f"sft.loss_on=assistant_turns: the chat template of {file} leaves the end of a turn out of "
            "{% generation %}, so that the model never learns to stop: put it inside, or use sft.loss_on=response"
        )
    found = []
    for number, row in enumerate(rows, 1):
        try:
            ids = tokenizer.apply_chat_template(
                row["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # a template is a program, and raises what it likes
            raise PipelineError(raised(tokenizer, number, error)) from error
        found.append((ids["input_ids"], bytes(ids["assistant_masks"])))
    return found


def response_start(prompt: list[int], whole: list[int]) -> int:
    """The first token with a loss, as TRL has it: where the row parts from its prompt."""
    if whole[: len(prompt)] == prompt:
        return len(prompt)
    return next(index for index, token in enumerate(prompt) if index == len(whole) or token != whole[index])


def rendered(rows: list[dict[str, Any]], number: int, tokenizer: Any) -> list[Chat]:
    """Rows, the first of them row `number` from 0, through the template, then through the tokenizer all at once."""
    prompts, texts = [], []
    for row in rows:
        number += 1
        try:
            prompts.append(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False))
            texts.append(tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False))
        except Exception as error:  # a template is a program, and raises what it likes
            raise PipelineError(raised(tokenizer, number, error)) from error
    ids = tokenizer(prompts + texts, add_special_tokens=False).input_ids if rows else []
    return [Chat(*one) for one in zip(prompts, texts, ids[: len(rows)], ids[len(rows) :], strict=True)]


def raised(tokenizer: Any, number: int, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"the chat template of {file_of(tokenizer)} raises on row {number} ({reason}): correct it, or use "
        "sft.template=plain"
    )


def ends_of(tokenizer: Any, base: Path | None) -> set[int]:
    """Tokens that generation stops at: the tokenizer's end of sequence, and those of the base's generation config, for
    which its config stands where it has none."""
    files = [base / name for name in ("generation_config.json", "config.json")] if base else []
    file = next((file for file in files if file.is_file()), None)
    try:
        named = json.loads(file.read_bytes()).get("eos_token_id") if file else None
    except (ValueError, AttributeError) as error:
        raise PipelineError(f"{file} is not a JSON object ({error}): copy it again") from error
    return {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named] if named is not None else [])}


def file_of(tokenizer: Any) -> Path | str:
    """The file that holds the template."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = Path(tokenizer.name_or_path) / name
        if file.is_file():
            return file
    return "the tokenizer"
