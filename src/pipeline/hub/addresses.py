"""Addresses of repositories on the Hub, and the masking of credentials in output and records.

Only this module masks credentials.
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
_ADDRESS = re.compile(r"\b\w+:/\S*")  # Path turns two slashes into one
_USER = re.compile(r"(\b\w+:/{1,2})[^/\s]+@")
# NAME=VALUE, NAME: VALUE and "NAME": "VALUE". Text in quotes or brackets is masked as a whole.
# Possessive quantifiers (++) and limits of length make the time linear in the length of a text.
_NAMED = re.compile(
    rf"""(?<![\w.])(?=(?:[a-z0-9]*+[_.])*?{_SECRET}(?![a-z0-9]))(?P<name>[a-z0-9_.]++)"""
    r"""(?P<sign>\\?["']?\s?(?:=|:(?=\s))\s?)"""
    r"""(?P<value>"[^"\n]{0,4000}"|'[^'\n]{0,4000}'|\[[^]\n]{0,4000}\]|"""
    r"""(?:(?:bearer|basic|token)\ )?\S++)""",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(rf"(?:[a-z0-9]*+[_.])*?{_SECRET}(?![a-z0-9])", re.IGNORECASE)
_FORMS = re.compile(  # tokens of the Hub, W&B, GitHub, GitLab, OpenAI and AWS
    r"\b(?:hf_[A-Za-z0-9]{16,}|wandb_v1_\w{16,}|(?<=login"
    r" )[0-9a-f]{40}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16})\b"
)
# Such as num_key_value_heads=8 and eos_token_id: 128001
_NUMBER = re.compile(r"-?\d{1,9}(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)
_NO_SECRET = "eos_token"  # a tokenizer's
_EXAMPLES = {"", "value", "none", "null"}  # in messages that explain: key=..., every.KEY=VALUE


def is_secret_name(name: str) -> bool:
    """Return True if a part of a name, split at _ and ., names a secret.

    HF_TOKEN and MYAPIKEY do, but not tokenizer.
    """
    return _SECRET_NAME.match(name) is not None and not name.lower().endswith(_NO_SECRET)


@cache
def _secret_values() -> list[str]:
    """Return the secrets among the environment variables: 12 characters or more, with a digit."""
    secrets = []
    for name, value in os.environ.items():
        if is_secret_name(name) and len(value) >= 12 and re.search(r"\d", value):
            secrets.append(value)
    return secrets


def plain_addresses(text: str) -> str:
    """Remove user:password@, and the text after ? or #, from each address in a text."""

    def plain(match: re.Match[str]) -> str:
        address = _USER.sub(r"\1", match[0])
        return re.split(r"[?#]", address, maxsplit=1)[0]

    return _ADDRESS.sub(plain, text)


def without_credentials(value: Any) -> Any:
    """Remove credentials from a structure.

    In addresses, user:password@ and the text after ? or # (often a token) are removed. Values of
    secret names (`is_secret_name`) become ***, in text such as HF_TOKEN=... and in dicts. Tokens of
    known forms and the values of secret environment variables become ***, too.
    """
    if isinstance(value, dict):
        masked = {}
        for key, part in value.items():
            is_secret = isinstance(part, str) and part and is_secret_name(str(key))
            masked[key] = MASK if is_secret else without_credentials(part)
        return masked
    if isinstance(value, list | tuple):
        return [without_credentials(part) for part in value]
    if not isinstance(value, str):
        return value
    for secret in _secret_values():
        value = value.replace(secret, MASK)
    named = _NAMED.sub(_mask_match, plain_addresses(value))
    return _FORMS.sub(MASK, named)


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
    """A text stream that masks credentials and control characters in written text.

    Progress bars need carriage returns, which stay. Other attributes are the wrapped stream's.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        parts = without_credentials(text).split("\r")
        self._stream.write("\r".join(map(printable, parts)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def masked_output() -> Iterator[None]:
    """Mask everything that Python, with its libraries, writes to standard output and error.

    It stays in force after an exception, because the interpreter prints its traceback.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and Masked(stream) for stream in streams)
    yield
    sys.stdout, sys.stderr = streams
