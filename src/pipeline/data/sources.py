"""The datasets: a short function a dataset turns a row into a prompt and a completion, or into text.

Schemas are those of the published repositories; a file below data_root holds the same columns. For a row that cannot be
used a function gives the reason, a key of UNUSABLE: the data card counts it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import dropwhile, groupby
from string import Formatter
from typing import Any, Literal
from zlib import crc32

from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.languages import language

Row = dict[str, Any]
Example = dict[str, str]  # prompt and completion, or text
Unusable = Literal["empty", "not_text", "broken", "low_score", "tool_turns"]
UNUSABLE: dict[Unusable, str] = {
    "empty": "null or blank, or a conversation without an answer",
    "not_text": "a list, an object or NaN where text belongs",
    "broken": "a line of bitext without a score and two texts",
    "low_score": "below min_score",
    "tool_turns": "a conversation with a tool in it",
}

# Ours: one is drawn for each pair of sentences, so that translation is not tied to one wording.
INSTRUCTIONS = (
    "Translate from {source} to {target}.\n{text}",
    "Translate this {source} text into {target}: {text}",
    "{text}\nSay this in {target}.",
    "How would you put this in {target}?\n{text}",
    "Give the {target} translation of the {source} sentence.\n{text}",
    "{source}: {text}\nWrite it in {target}.",
)
SCRIPTS = {  # letters that text in the language must hold; the others here are written in Latin letters
    "bn": re.compile("[\u0980-\u09ff]"), "te": re.compile("[\u0c00-\u0c7f]"), "th": re.compile("[\u0e00-\u0e7f]"),
    "ja": re.compile("[\u3040-\u30ff\u4e00-\u9fff]"), "zh": re.compile("[\u4e00-\u9fff]"),
    "ru": re.compile("[\u0400-\u04ff]"),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the datasets


def orca_math(row: Row, _: Source) -> Example | Unusable:
    """microsoft/orca-math-word-problems-200k: question, answer (a worked solution in prose)."""
    return pair(row["question"], row["answer"])


def gsm8k(row: Row, _: Source) -> Example | Unusable:
    """openai/gsm8k: question, answer with <<a*b=c>> marks and a last line '#### n'. The papers do not use it."""
    return pair(row["question"], row["answer"])


def gsm8k_text(row: Row, _: Source) -> Example | Unusable:
    """The same as plain text, for a base made from nothing."""
    return {"text": f"{row['question']}\n{row['answer']}"}


def aya(row: Row, _: Source) -> Example | Unusable:
    """CohereLabs/aya_dataset: inputs, targets, language (the English name), language_code."""
    return pair(row["inputs"], row["targets"])


def alpaca(row: Row, _: Source) -> Example | Unusable:
    """instruction, input (may be empty), output: BongChat, llm-japanese-dataset, Dolly in Japanese."""
    return pair(joined(row["instruction"], row["input"]), row["output"])


def telugu_alpaca(row: Row, _: Source) -> Example | Unusable:
    """Telugu-LLM-Labs' sets: nine columns, of which instruction, input and output are the English originals."""
    return pair(joined(row["telugu_instruction"], row["telugu_input"]), row["telugu_output"])


def inkuba(row: Row, _: Source) -> Example | Unusable:
    """lelapa/Inkuba-instruct: instruction, inputs, targets; its splits are language and part, as swahili_train."""
    return pair(joined(row["instruction"], row["inputs"], "\n\n"), row["targets"])


def xp3mt(row: Row, _: Source) -> Example | Unusable:
    """bigscience/xP3mt: inputs, targets."""
    return pair(row["inputs"], row["targets"])


def ichikara(row: Row, _: Source) -> Example | Unusable:
    """p1atdev/ichikara-instruction: ID, text (the instruction), output."""
    return pair(row["text"], row["output"])


def nllb(row: Row, source: Source) -> Example | Unusable:
    """Raw bitext of allenai/nllb, a line a pair, tabs between: AllenAI's 9 columns (text, text, score, language scores,
    sources) or CCMatrix' 3 (score, text, text). The languages stand in the order of their codes. The score is LASER's
    margin.
    """
    parts, code = (row["text"] or "").split("\t"), source.language or ""
    if len(parts) not in (3, 9):
        return "broken"
    first, second, score = parts[:3] if len(parts) == 9 else (parts[1], parts[2], parts[0])
    try:
        margin = float(score)
    except ValueError:
        return "broken"
    if source.min_score is not None and not margin >= source.min_score:
        return "low_score"
    return translation(first, second, code) if code > "en" else translation(second, first, code)


def conversation(row: Row, source: Source) -> Example | Unusable:
    """A column of turns: [[prompt, response], ...], a flat list of them, or messages with role and content.

    One example a conversation: the last answer that is kept, after all that was said before. Cut at the first turn
    that has no answer. What a system message says is left out.
    """
    said = turns(row[source.column or language(source.language or "").flores])
    if isinstance(said, str):
        return said
    said = said[: source.turns]
    if not said:
        return "empty"
    before = [text for turn in said[:-1] for text in turn]
    return pair("\n\n".join([*before, said[-1][0]]), said[-1][1])


def pairs(row: Row, _: Source) -> Example | Unusable:
    """Prompts and completions as they are. An empty prompt is plain text: the loss is on all of it; null is none."""
    return "empty" if row["prompt"] is None else pair(row["prompt"], row["completion"])


def text(row: Row, source: Source) -> Example | Unusable:
    """Plain text: OpenWebMath, Wikisource."""
    return {"text": str(row[source.column or "text"])}


def template(row: Row, source: Source) -> Example | Unusable:
    """Anyone's data: a prompt and a completion with the names of columns in braces."""
    return pair(fill(source.prompt or "", row), fill(source.completion or "", row))


def bitext(row: Row, source: Source) -> Example | Unusable:
    """Anyone's sentence pairs: `prompt` names the English side, `completion` the other."""
    return translation(fill(source.prompt or "", row), fill(source.completion or "", row), source.language or "")


READERS: dict[str, Callable[[Row, Source], Example | Unusable]] = {
    "orca_math": orca_math, "gsm8k": gsm8k, "gsm8k_text": gsm8k_text, "aya": aya, "alpaca": alpaca,
    "telugu_alpaca": telugu_alpaca, "inkuba": inkuba, "xp3mt": xp3mt, "ichikara": ichikara, "nllb": nllb,
    "conversation": conversation, "pairs": pairs, "text": text, "template": template, "bitext": bitext,
}  # fmt: skip
COLUMNS = {
    "orca_math": ("question", "answer"), "gsm8k": ("question", "answer"), "gsm8k_text": ("question", "answer"),
    "aya": ("inputs", "targets", "language"), "alpaca": ("instruction", "input", "output"),
    "telugu_alpaca": ("telugu_instruction", "telugu_input", "telugu_output"),
    "inkuba": ("instruction", "inputs", "targets"), "xp3mt": ("inputs", "targets"), "ichikara": ("text", "output"),
    "nllb": ("text",), "pairs": ("prompt", "completion"),
}  # fmt: skip
MAY_BE_BLANK = {  # columns that a row may leave blank: further input, the prompt of plain text, what is not taught
    "alpaca": ("input",), "telugu_alpaca": ("telugu_input",), "inkuba": ("inputs",), "aya": ("language",),
    "nllb": ("text",), "pairs": ("prompt",),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- their parts


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def is_text(value: Any) -> bool:
    """Whether a cell is text, nothing, or a number that stands for itself: lists, objects, dates and NaN are not."""
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def pair(prompt: Any, completion: Any) -> Example:
    return {"prompt": str(prompt), "completion": str(completion)}


def joined(instruction: Any, more: Any, between: str = "\n") -> str:
    return str(instruction) if is_blank(more) else f"{instruction}{between}{more}"


def translation(english: str, other: str, code: str) -> Example | Unusable:
    """One direction of a pair and one wording, both drawn by the pair itself: half of the pairs go each way."""
    english, other = english.strip(), other.strip()
    if not english or not other:
        return "empty"
    drawn = crc32(f"{english}\t{other}".encode("utf-8", "replace"))
    names, texts = ("English", language(code).name), (english, other)
    source, target = (0, 1) if drawn & 1 else (1, 0)
    wording = INSTRUCTIONS[(drawn >> 1) % len(INSTRUCTIONS)]
    prompt = wording.format(source=names[source], target=names[target], text=texts[source])
    return {"prompt": prompt, "completion": texts[target]}


def turns(cell: Any) -> list[tuple[str, str]] | Unusable:
    """Whole turns from the beginning, as far as each has a prompt and an answer. Lists without roles alternate."""
    if not cell:
        return []
    if not isinstance(cell, list):
        return "not_text"
    if all(isinstance(said, dict) for said in cell):
        spoken = by_speaker(cell)
        if isinstance(spoken, str):
            return spoken
        cell = spoken
    elif any(isinstance(said, dict) for turn in cell for said in (turn if isinstance(turn, list) else [turn])):
        return "not_text"
    if cell and isinstance(cell[0], str):
        cell = [cell[at : at + 2] for at in range(0, len(cell), 2)]
    found = []
    for turn in cell:
        if not turn or len(turn) < 2 or not all(isinstance(said, str) and said.strip() for said in turn[:2]):
            break
        found.append((turn[0], turn[1]))
    return found


SPEAKERS = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "function_call": "tool", "tool_call": "tool", "tool_response": "tool",
    "observation": "tool", "ipython": "tool",
}  # fmt: skip


def by_speaker(messages: list[Row]) -> list[str] | Unusable:
    """What user and assistant said in turn, beginning with the user: several messages of one are joined.

    Raises:
        PipelineError: a speaker that is unknown, or messages of another layout.
    """
    said = []
    for message in messages:
        name = message.get("role") or message.get("from")
        if name is None:
            raise PipelineError(
                f"a conversation has messages of {', '.join(message) or 'nothing'}: write each with role and content, "
                "or from and value"
            )
        speaker = SPEAKERS.get(str(name).lower())
        if speaker is None:
            raise PipelineError(f"a conversation has a turn of {name!r}: name its speakers {', '.join(SPEAKERS)}")
        if speaker == "tool" or message.get("tool_calls") or message.get("function_call"):
            return "tool_turns"
        words = plain(message.get("content") if message.get("content") is not None else message.get("value"))
        if words is None:
            return "not_text"
        if speaker != "system":
            said.append((speaker, words))
    heard = dropwhile(lambda one: one[0] == "assistant", said)
    return ["\n\n".join(words for _, words in run) for _, run in groupby(heard, key=lambda one: one[0])]


def plain(content: Any) -> str | None:
    """The text of a message, or of its parts, such as {"type": "text", "text": ...}; None where one is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    kinds = (None, "text", "input_text", "output_text")
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") in kinds and "text" in part]
    return "\n".join(texts) if len(texts) == len(parts) and all(isinstance(one, str) for one in texts) else None


def fill(words: str, row: Row) -> str:
    """A template with its columns filled in."""
    return words.format_map({name: row[name] for name in fields(words)})


def fields(words: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(words) if name is not None]


def columns(name: str, source: Source) -> list[str]:
    """The columns that a source's function reads.

    Raises:
        PipelineError: an unknown function, or one that lacks a knob.
    """
    where = f"expert.sources.{name}"
    if source.language is not None:
        language(source.language)  # refuses an unknown one
    if source.rows not in READERS:
        raise PipelineError(f"{where}.rows must be one of {', '.join(READERS)}, got {source.rows!r}")
    if source.rows in ("nllb", "bitext") and source.language is None:
        raise PipelineError(f"{where}.rows={source.rows} needs {where}.language, such as sw")
    if source.rows == "text":
        return [source.column or "text"]
    if source.rows == "conversation":
        if source.column is None and source.language is None:
            raise PipelineError(f"{where}.rows=conversation needs {where}.column, the column that holds the turns")
        return [source.column or language(source.language or "").flores]
    if source.rows in ("template", "bitext"):
        try:
            names = {knob: fields(getattr(source, knob) or "") for knob in ("prompt", "completion")}
        except ValueError as error:
            raise PipelineError(f"{where}: a template has a stray brace ({error}); write {{{{ for one") from error
        unset = [knob for knob in names if getattr(source, knob) is None]
        if unset:
            example = "'Swali: {question}'" if unset[0] == "prompt" else "'{answer}'"
            raise PipelineError(
                f"{where}.{unset[0]} is missing: give {where}.{unset[0]}={example}, your file's columns in braces"
            )
        empty = [knob for knob in names if not names[knob]]
        if empty:
            raise PipelineError(f"{where}.{empty[0]} names no column: give one in braces, as {{answer}}")
        odd = [one for found in names.values() for one in found if not re.fullmatch(r"[^.\[\]]+", one)]
        if odd:
            raise PipelineError(f"{where}: a template names a column in braces, {{{odd[0]}}} is none")
        return sorted({one for found in names.values() for one in found})
    return list(COLUMNS[source.rows])


def wanted(row: Row, source: Source) -> bool:
    """Whether a row is of the language asked for; the others are not counted as rows."""
    if source.rows != "aya" or source.language is None:
        return True
    of = language(source.language)
    return row["language"] == of.aya or row.get("language_code") in of.aya_codes
