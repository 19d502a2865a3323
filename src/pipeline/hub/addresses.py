"""Addresses of repositories on the Hub, and the only place that masks credentials in output and
records.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from pipeline.text import printable

REPOSITORY = r"[\w-][\w.-]*/[\w.-]+"  # org/name on the Hub

MASK = "***"
SECRET_PARTS = "key token secret password pat".split()
SECRET_ENDS = "apikey passwd password credential credentials secret authorization".split()
_SECRET = rf"(?:{'|'.join(SECRET_PARTS)}|[a-z0-9]*?(?:{'|'.join(SECRET_ENDS)}))"
_ADDRESS = re.compile(r"\b\w+:/\S*")  # Path makes one slash of two
_USER = re.compile(r"(\b\w+:/{1,2})[^/\s]+@")
# NAME=VALUE, NAME: VALUE and "NAME": "VALUE"; what is in quotes or brackets is masked as a whole.
# The time is linear in the length of a text, by possessive quantifiers (++) and limits of length.
_NAMED = re.compile(
    rf"""(?<![\w.])(?=(?:[a-z0-9]*+[_.])*?{_SECRET}(?![a-z0-9]))(?P<name>[a-z0-9_.]++)"""
    r"""(?P<sign>\\?["']?\s?(?:=|:(?=\s))\s?)"""
    r"""(?P<value>"[^"\n]{0,4000}"|'[^'\n]{0,4000}'|\[[^]\n]{0,4000}\]|(?:(?:bearer|basic|token)\ )?\S++)""",  # noqa: E501
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(rf"(?:[a-z0-9]*+[_.])*?{_SECRET}(?![a-z0-9])", re.IGNORECASE)
_FORMS = re.compile(  # of the Hub, W&B, GitHub, GitLab, OpenAI and AWS
    r"\b(?:hf_[A-Za-z0-9]{16,}|wandb_v1_\w{16,}|(?<=login"
    r" )[0-9a-f]{40}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16})\b"
)
_NUMBER = re.compile(
    r"-?\d{1,9}(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE
)  # num_key_value_heads=8, eos_token_id: 128001
_NO_SECRET = "eos_token"  # which is of a tokenizer
_EXAMPLES = {"", "value", "none", "null"}  # of a message that explains: key=..., every.KEY=VALUE


def is_secret_name(name: str) -> bool:
    """Return True if a part of a name, split at _ and ., names a secret:

    HF_TOKEN and MYAPIKEY, but not tokenizer.
    """
    return _SECRET_NAME.match(name) is not None and not name.lower().endswith(_NO_SECRET)


@cache
def _secret_values() -> list[str]:
    """Return the values of this process's environment variables that are secrets: with 12
    characters and a digit.
    """
    values = (value for name, value in os.environ.items() if is_secret_name(name))
    found = []
    for value in values:
        if len(value) >= 12 and re.search(r"\d", value):
            found.append(value)
    return found


def plain_addresses(text: str) -> str:
    """Remove user:password@, and the text after ? or #, from each address in a text."""
    return _ADDRESS.sub(
        lambda match: re.split(r"[?#]", _USER.sub(r"\1", match[0]), maxsplit=1)[0], text
    )


def without_credentials(value: Any) -> Any:
    """Remove credentials from a structure.

    In addresses, user:password@ and the text after ? or # (often a token) are removed. Values of
    secret names (`is_secret_name`) become ***, in text such as HF_TOKEN=... and in dicts. Tokens of
    known forms and the values of secret environment variables become ***, too.
    """
    if isinstance(value, dict):
        return {
            key: (
                MASK
                if isinstance(part, str) and part and is_secret_name(str(key))
                else without_credentials(part)
            )
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_credentials(part) for part in value]
    if not isinstance(value, str):
        return value
    for secret in _secret_values():
        value = value.replace(secret, MASK)
    return _FORMS.sub(MASK, _NAMED.sub(_mask_match, plain_addresses(value)))


def _mask_match(match: re.Match[str]) -> str:
    name, sign, value = match["name"], match["sign"], match["value"]
    quote = value[0] if value[0] in "\"'" else ""
    if quote or value[0] == "[":
        closers = ""
    else:
        closers = value[len(value.rstrip("]'\"),;}")) :]
    bare = value.strip("\"'.:,[](){};").lower()
    last_word = name.lower().rpartition(".")[2]
    is_prose = sign.lstrip() == ": " and last_word in ("key", "token")  # "unknown key sft.key: ..."
    is_number = _NUMBER.fullmatch(bare) and last_word.rpartition("_")[2] not in SECRET_PARTS
    if is_prose or is_number or bare in _EXAMPLES or name.lower().endswith(_NO_SECRET):
        return match[0]
    return f"{name}{sign}{quote}{MASK}{quote}{closers}"


class Masked:
    """A text stream that masks credentials and control characters in what it writes.

    Progress bars need carriage returns, which stay. Every other attribute is the wrapped stream's.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write("\r".join(map(printable, without_credentials(text).split("\r"))))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def masked_output() -> Iterator[None]:
    """Context in which everything that Python writes to standard output and error, libraries
    included, is masked.

    Stays in force after an exception: the interpreter prints its traceback.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and Masked(stream) for stream in streams)
    yield
    sys.stdout, sys.stderr = streams
