"""Conversations: one or two cells of turns, in the forms of several tools, as chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pipeline.data.rows import Unusable, is_text
from pipeline.errors import PipelineError

Message = dict[str, Any]  # role, content, and the other keys of its turn, for the chat template
SPEAKERS = dict.fromkeys(("user", "human", "prompter"), "user")
SPEAKERS |= dict.fromkeys(("system", "developer"), "system")
SPEAKERS |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant")
SPEAKERS |= dict.fromkeys(("tool", "function", "function_call", "tool_call"), "tool")
SPEAKERS |= dict.fromkeys(("tool_response", "observation", "ipython"), "tool")
OF_TURNS = ("role", "from", "content", "value")
MARKS = ("weight", "train")  # keys that exclude a turn from training: OpenAI's, and axolotl's


def other_keys(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of a turn besides its speaker and text.

    Parquet fills missing keys with nulls, which are dropped.
    """
    others = {}
    for key, value in turn.items():
        if key not in OF_TURNS and value is not None:
            others[key] = value
    return others


def is_trained(turn: Mapping[str, Any]) -> bool:
    """Return False if a turn is excluded from training by its marks."""
    if str(turn.get("weight")) in ("0", "0.0"):
        return False
    return str(turn.get("train")).lower() != "false"


def turns_in(cell: Any) -> Any:
    """Return the list of turns in a cell, parsed if CSV or parquet stores it as JSON text."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        with suppress(ValueError):
            return json.loads(cell)
    if isinstance(cell, list):
        return cell
    if cell:
        return [cell]
    return []


def text_of_parts(content: Any) -> Any:
    """Join content that is a list of text parts (TRL's and OpenAI's form).

    Other content, such as images, is returned unchanged.
    """
    if not content or not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return content
    return "".join(part["text"] for part in content)


def messages_of(cell: Any) -> list[Message] | Unusable:
    """Return the messages of user, assistant and system in a cell.

    A turn has role and content, or from and value; its other keys are kept. Consecutive turns of
    one speaker are joined, unless they have other keys. In a list of texts, or of pairs of texts,
    questions and answers alternate.

    Raises:
        PipelineError: A turn has an unknown speaker.
    """
    turns = turns_in(cell)
    if turns == [cell]:
        return "not_turns"
    if turns and all(isinstance(turn, list) for turn in turns):
        pairs, turns = turns, []
        for texts in pairs:
            turns += [*texts, None, None][:2]
    by_speaker = all(isinstance(turn, dict) for turn in turns)
    messages: list[Message] = []
    for at, turn in enumerate(turns):
        role = ("user", "assistant")[at % 2]
        others: dict[str, Any] = {}
        if by_speaker:
            role = _role_of(turn)
            if role == "tool" or turn.get("tool_calls") or turn.get("function_call"):
                return "tool_turns"
            others = other_keys(turn)
            content = turn.get("content")
            if content is None:
                content = turn.get("value")
            turn = text_of_parts(content)
        if not is_text(turn):
            return "not_turns"
        text = "" if turn is None else str(turn)
        last = messages[-1] if messages else {}
        if last.get("role") == role and not others and not other_keys(last):
            last["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text, **others})
    return messages


def _role_of(turn: Mapping[str, Any]) -> str:
    name = str(turn.get("role") or turn.get("from"))
    if name.lower() not in SPEAKERS:
        raise PipelineError(
            f"A conversation has a turn of {name!r}. Name its speakers user, assistant, system or"
            " tool."
        )
    return SPEAKERS[name.lower()]


def whole_turns(messages: list[Message], limit: int | None) -> list[Message]:
    """Return the messages of whole turns, from the first user message to the last answer.

    System messages before it are included. Turns end before the first empty message or answer
    without a question, and after `limit` answers. The last answer is one to train on.
    """
    roles = [message["role"] for message in messages]
    start = [*roles, "user"].index("user")
    turns = []
    for message in messages[:start]:
        if message["role"] == "system" and message["content"].strip():
            turns.append(message)
    answers, end, last_role = 0, 0, ""
    for message in messages[start:]:
        is_answer = message["role"] == "assistant"
        if not message["content"].strip() or (is_answer and last_role not in ("user", "system")):
            break
        turns.append(message)
        last_role = message["role"]
        if is_answer:
            answers += 1
            if is_trained(message):
                end = len(turns)
            if answers == limit:
                break
    return turns[:end]
