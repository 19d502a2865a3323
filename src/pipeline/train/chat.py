"""Chat templates, applied to all rows before training: an error of a template is reported with the name of its file."""

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
PIECE = 200  # rows at a time: a template that fails on all of the first piece is an error before the rest is rendered
FAULTS = {  # fault of a row -> its description, and the remedy
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
    """A row as the template writes it, and its token ids: the prompt only, and the whole conversation."""

    prompt_text: str
    text: str
    prompt: list[int]
    conversation: list[int]


def tokenize_chats(
    rows: list[dict[str, Any]], tokenizer: Any, sft: Sft, base: Path | None
) -> tuple[list[list[int]], list[list[int]], dict[str, int]]:
    """Token ids of the prompts and of the conversations, as in the trainer, and the number of rows with each fault.

    Args:
        rows: conversations of one prompt and one response, as the trainer takes them (examples.trainer_columns).
        base: the folder of the base, whose generation config may name more ends of a response than the tokenizer.

    Raises:
        PipelineError: the tokenizer has no template, or its template raises, or it has the same fault in all rows.
    """
    if not tokenizer.chat_template:
        raise PipelineError(NO_TEMPLATE)
    file = template_file(tokenizer)
    ends = set(tokenizer.convert_ids_to_tokens(sorted(end_tokens(tokenizer, base))))
    marks = sorted({*ends, *tokenizer.added_tokens_encoder}, key=len, reverse=True)
    prompts: list[list[int]] = []
    conversations: list[list[int]] = []
    faults: Counter[str] = Counter()
    for start in range(0, len(rows), PIECE):
        part = rows[start : start + PIECE]
        for row, chat in zip(part, render_rows(part, start, tokenizer), strict=True):
            faults.update(faults_of(row, chat, sft, ends, marks))
            prompts.append(chat.prompt)
            conversations.append(chat.conversation)
        for fault in (fault for fault, count in faults.items() if count == len(conversations)):
            words, remedy = FAULTS[fault]
            words = words.format(ends=" or ".join(sorted(ends)))
            raise PipelineError(f"the chat template of {file} {words}: {remedy}, or use sft.template=plain")
    for fault, count in faults.items():
        words = FAULTS[fault][0].format(ends="an end of sequence")
        warn(f"the chat template of {file} {words}, in {count} of {len(rows)} rows")
    return prompts, conversations, dict(faults)


def faults_of(row: dict[str, Any], chat: Chat, sft: Sft, ends: set[str], marks: Sequence[str]) -> list[str]:
    """Faults of the template in a row, keys of FAULTS.

    After the response only marks, the last one of `ends`, and whitespace are allowed. What the template writes before
    it (Qwen 3's empty thought, gpt-oss' channel) the model must write too, and learns. Spaces around a message may be
    missing, as many templates strip them. A token may span prompt and response where the text of the first begins the
    second: the loss is on it.
    """
    texts = [message["content"].strip() for message in row["prompt"] + row["completion"]]
    start = response_start(chat.prompt, chat.conversation)
    if any(text not in chat.text for text in texts) or start >= len(chat.conversation):
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
    """(tokens, mask) of each row of messages; the mask is 1 where the loss is: text and end of each answer.

    A template that does not mark what is generated is replaced by TRL's copy with marks, for models that TRL knows.

    Raises:
        PipelineError: TRL does not know the template, or the mask does not cover the end of a turn.
    """
    template, file = None, template_file(tokenizer)
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
    masked_turns = []
    for number, row in enumerate(rows, 1):
        try:
            ids = tokenizer.apply_chat_template(
                row["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # a template is a program, and raises what it likes
            raise PipelineError(template_error(tokenizer, number, error)) from error
        masked_turns.append((ids["input_ids"], bytes(ids["assistant_masks"])))
    return masked_turns


def response_start(prompt: list[int], conversation: list[int]) -> int:
    """Index of the first token with a loss, as in TRL: where the row differs from its prompt."""
    if conversation[: len(prompt)] == prompt:
        return len(prompt)
    return next(
        index for index, token in enumerate(prompt) if index == len(conversation) or token != conversation[index]
    )


def render_rows(rows: list[dict[str, Any]], number: int, tokenizer: Any) -> list[Chat]:
    """Rows rendered by the template, then tokenized together. number: index of the first row, for errors."""
    prompts, texts = [], []
    for row in rows:
        number += 1
        try:
            prompts.append(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False))
            texts.append(tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False))
        except Exception as error:  # a template is a program, and raises what it likes
            raise PipelineError(template_error(tokenizer, number, error)) from error
    ids = tokenizer(prompts + texts, add_special_tokens=False).input_ids if rows else []
    return [Chat(*fields) for fields in zip(prompts, texts, ids[: len(rows)], ids[len(rows) :], strict=True)]


def template_error(tokenizer: Any, number: int, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"the chat template of {template_file(tokenizer)} raises on row {number} ({reason}): correct it, or use "
        "sft.template=plain"
    )


def end_tokens(tokenizer: Any, base: Path | None) -> set[int]:
    """Tokens at which generation stops: the tokenizer's end of sequence, and those of the base's generation config (of
    its config.json if it has none)."""
    files = [base / name for name in ("generation_config.json", "config.json")] if base else []
    file = next((file for file in files if file.is_file()), None)
    try:
        ends = json.loads(file.read_bytes()).get("eos_token_id") if file else None
    except (ValueError, AttributeError) as error:
        raise PipelineError(f"{file} is not a JSON object ({error}): copy it again") from error
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])}


def template_file(tokenizer: Any) -> Path | str:
    """The file that holds the template."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = Path(tokenizer.name_or_path) / name
        if file.is_file():
            return file
    return "the tokenizer"
