"""Conversations: a cell or two of turns, in the forms of several tools, as messages of a chat
template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pipeline.data.rows import Unusable, is_text
from pipeline.errors import PipelineError

Message = dict[str, Any]  # role, content, and what else its turn holds, for the chat template
SPEAKERS = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(
        ("tool", "function", "function_call", "tool_call", "tool_response", "observation"), "tool"
    ),
    "ipython": "tool",
}
OF_TURNS = ("role", "from", "content", "value")
MARKS = ("weight", "train")  # say whether a turn is to be trained on: OpenAI's, and axolotl's


def other_keys(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a turn holds besides its speaker and text; parquet fills keys that it lacks with
    nulls.
    """
    found = {}
    for key, value in turn.items():
        if key not in OF_TURNS and value is not None:
            found[key] = value
    return found


def is_trained(turn: Mapping[str, Any]) -> bool:
    """Return False if a turn is marked as one not to train on."""
    return str(turn.get("weight")) not in ("0", "0.0") and str(turn.get("train")).lower() != "false"


def turns_in(cell: Any) -> Any:
    """Return the list of turns in a cell, parsed where CSV or parquet holds it as JSON text."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        with suppress(ValueError):
            return json.loads(cell)
    if isinstance(cell, list):
        return cell
    if cell:
        return [cell]
    return []


def text_of_parts(content: Any) -> Any:
    """Content as parts of text (TRL's and OpenAI's form) as one text; anything else, images among
    it, as it is.
    """
    parts = content if isinstance(content, list) else []
    if parts and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        return "".join(part["text"] for part in parts)
    return content


def messages_of(cell: Any) -> list[Message] | Unusable:
    """Messages of user, assistant and system, each with role and content, or from and value, and
    with all other keys of its turn. Several in a row of one speaker are joined, unless they have
    other keys. Lists, of questions and answers or of pairs of these, alternate. Raises
    PipelineError for another speaker.
    """
    given, cell = cell, turns_in(cell)
    if cell == [given]:
        return "not_turns"
    if cell and all(isinstance(turn, list) for turn in cell):
        cell = [text for turn in cell for text in (*turn[:2], *[None] * (2 - len(turn)))]
    by_speaker = all(isinstance(turn, dict) for turn in cell)
    messages: list[Message] = []
    for at, turn in enumerate(cell):
        role = ("user", "assistant")[at % 2]
        others: dict[str, Any] = {}
        if by_speaker:
            name = str(turn.get("role") or turn.get("from"))
            role = SPEAKERS.get(name.lower(), "")
            if role == "":
                raise PipelineError(
                    f"a conversation has a turn of {name!r}: name its speakers"
                    f" {', '.join(SPEAKERS)}"
                )
            if role == "tool" or turn.get("tool_calls") or turn.get("function_call"):
                return "tool_turns"
            others = other_keys(turn)
            turn = text_of_parts(
                turn.get("value") if turn.get("content") is None else turn["content"]
            )
        if not is_text(turn):
            return "not_turns"
        text = "" if turn is None else str(turn)
        if (
            messages
            and messages[-1]["role"] == role
            and not others
            and not other_keys(messages[-1])
        ):
            text = f"{messages.pop()['content']}\n\n{text}"
        messages.append({"role": role, "content": text, **others})
    return messages


def whole_turns(messages: list[Message], limit: int | None) -> list[Message]:
    """Return the messages of whole turns, from the first user message to the last answer.

    System messages before it are included. Turns end before the first empty message, or answer
    without a question, and after `limit` answers. The last answer is the one to train on.
    """
    start = next(
        (at for at, message in enumerate(messages) if message["role"] == "user"), len(messages)
    )
    turns = []
    for message in messages[:start]:
        if message["role"] == "system" and message["content"].strip():
            turns.append(message)
    answers, end, last_role = 0, 0, ""
    for message in messages[start:]:
        if not message["content"].strip() or (
            message["role"] == "assistant" and last_role not in ("user", "system")
        ):
            break
        turns.append(message)
        last_role = message["role"]
        if message["role"] == "assistant":
            answers, end = answers + 1, len(turns) if is_trained(message) else end
            if answers == limit:
                break
    return turns[:end]
