"""Addresses of repositories on the Hub, and the only place that masks credentials in output and records."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REPOSITORY = r"[\w-][\w.-]*/[\w.-]+"  # org/name on the Hub

MASK = "***"
SECRET_PARTS = ("key", "token", "secret", "password")
_ADDRESS = re.compile(r"\b\w+:/\S*")  # Path makes one slash of two
_USER = re.compile(r"(\b\w+:/{1,2})[^/\s]+@")
# NAME=VALUE, NAME: VALUE and "NAME": "VALUE"; what is in quotes or brackets is masked as a whole
_NAMED = re.compile(
    rf"""(?<![\w.])(?P<name>(?:[a-z0-9]*[_.])*(?:{"|".join(SECRET_PARTS)})(?:[_.][a-z0-9]*)*)"""
    r"""(?P<sign>\\?["']?\s?(?:=|:(?=\s))\s?)"""
    r"""(?P<value>"[^"\n]*"|'[^'\n]*'|\[[^]\n]*\]|\S+?(?=[]'"),;}]*(?:\s|$)))""",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-?\d{1,9}(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)  # num_key_value_heads=8, eos_token_id: 128001
_EXAMPLES = {"", "value", "none", "null"}  # of a message that explains: key=..., every.KEY=VALUE


def is_secret_name(name: str) -> bool:
    """Whether a part of a name, split at _ and ., is KEY, TOKEN, SECRET or PASSWORD: HF_TOKEN, but not tokenizer, nor
    eos_token, which is of a tokenizer."""
    return not name.lower().endswith("eos_token") and any(
        part in SECRET_PARTS for part in re.split(r"[_.]", name.lower())
    )


def plain_addresses(text: str) -> str:
    """The text with each address in it without user:password@ and without what follows a ? or #."""
    return _ADDRESS.sub(lambda match: re.split(r"[?#]", _USER.sub(r"\1", match[0]), maxsplit=1)[0], text)


def without_credentials(value: Any) -> Any:
    """The same structure without credentials.

    user:password@ and what follows a ? or # (as tokens do) are removed from every address; the value of a name as in
    `is_secret_name` becomes ***, in text (HF_TOKEN=..., "api_key": "...") and, where it is text, in a dict.
    """
    if isinstance(value, dict):
        return {
            key: MASK if isinstance(part, str) and part and is_secret_name(str(key)) else without_credentials(part)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_credentials(part) for part in value]
    if not isinstance(value, str):
        return value
    return _NAMED.sub(_mask_match, plain_addresses(value))


def _mask_match(match: re.Match[str]) -> str:
    name, sign, value = match["name"], match["sign"], match["value"]
    prose = sign.lstrip() == ": " and name.lower().rpartition(".")[2] in ("key", "token")  # "unknown key sft.key: ..."
    bare = value.strip("\"'.:,[]").lower()
    number = _NUMBER.fullmatch(bare) and name.lower().rpartition("_")[2] not in SECRET_PARTS
    if prose or number or bare in _EXAMPLES or not is_secret_name(name):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{sign}{quote}{MASK}{quote}"


class Masked:
    """A text stream that masks credentials in what it writes; every other attribute is the wrapped stream's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(without_credentials(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def masked_output() -> Iterator[None]:
    """Context in which everything that Python writes to standard output and error, libraries included, is masked.

    Stays in force after an exception: the interpreter prints its traceback.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and Masked(stream) for stream in streams)
    yield
    sys.stdout, sys.stderr = streams
