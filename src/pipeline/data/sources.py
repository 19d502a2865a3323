"""The datasets: templates, or a short function, turn a row into a prompt and a completion, or into text.

Schemas are those of the published repositories; a file below data_root holds the same columns. For a row that cannot be
used a function gives the reason, a key of UNUSABLE: the data card counts it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import cache
from itertools import chain
from string import Formatter
from typing import Any, Literal
from zlib import crc32

from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.languages import Language, language, shipped_languages

Row = dict[str, Any]
Message = dict[str, Any]  # role, content, and what else its turn holds, for the chat template
Example = dict[str, Any]  # prompt and completion, and messages where a conversation holds more; or text
Unusable = Literal[
    "empty", "not_text", "not_turns", "broken", "low_score", "tool_turns", "not_trained",
    "no_calculation", "too_long",
]  # fmt: skip
UNUSABLE: dict[Unusable, str] = {
    "empty": "null or blank, or a conversation without an answer",
    "not_text": "neither text nor a number: a list, an object, a date or NaN",
    "not_turns": "text or an object where turns belong, or turns with more than text, such as images",
    "broken": "a line of bitext without a score and two texts",
    "low_score": "below min_score",
    "tool_turns": "a conversation with a tool in it",
    "not_trained": "a conversation of which each answer is marked by weight: 0 or train: false",
    "no_calculation": "a solution without an annotated calculation",
    "too_long": "calculations of more than 64 characters",
}
IN_PART = (  # of a conversation that is kept
    "turns are left out: before the first question, from an empty turn on, or after the last answer to train on"
)
MOST_CHARACTERS = 64  # of the calculations of a solution

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
    "bn": "[\u0980-\u09ff]", "te": "[\u0c00-\u0c7f]", "th": "[\u0e00-\u0e7f]",
    "ja": "[\u3040-\u30ff\u4e00-\u9fff]", "zh": "[\u4e00-\u9fff]", "ru": "[\u0400-\u04ff]",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the datasets


def gsm8k_calculations(row: Row, _: Source) -> Example | Unusable:
    """openai/gsm8k, its annotated calculations alone, a line each, as solutions of mgsm_steps are: math without English
    prose. At most 64 characters, and so at most 64 tokens of any tokenizer with single digits and signs."""
    calculations = calculations_of(row["answer"])
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    solution = "\n".join([*calculations, f"#### {answer}"])
    if not calculations:
        return "no_calculation"
    if len(solution) > MOST_CHARACTERS:
        return "too_long"
    return pair(f"Question: {row['question'].strip()}\nAnswer:", solution)


def calculations_of(answer: str) -> list[str]:
    """GSM8K's annotated calculations of a solution, without spaces, $ and thousands separators: 48/2=24."""
    return [re.sub(r"[ $,]", "", annotation) for annotation in re.findall(r"<<([^<>]*)>>", answer)]


def gsm8k_text(row: Row, _: Source) -> Example | Unusable:
    """openai/gsm8k as plain text, for a base made from nothing."""
    return {"text": f"{row['question']}\n{row['answer']}"}


def nllb(row: Row, source: Source) -> Example | Unusable:
    """Raw bitext of allenai/nllb, a line a pair, tabs between: AllenAI's 9 columns (text, text, score, language scores,
    sources) or CCMatrix' 3 (score, text, text). The languages stand in the order of their codes: FLORES' (als_Latn
    before eng_Latn), or those of two letters (en before sq). The score is LASER's margin.
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
    english_first = language(code).flores > "eng_Latn" if len(parts) == 9 else code > "en"
    return translation_example(*((first, second) if english_first else (second, first)), code)


def conversation(row: Row, source: Source) -> Example | Unusable:
    """A column of turns: [[prompt, response], ...], a flat list of them, or messages with role and content.

    One example a conversation, up to the last answer that is kept: `prompt` and `completion` in plain text, without
    system messages, and `messages` as a chat template takes them, where that is more than one question and its answer.
    """
    messages = messages_in(row, source)
    if isinstance(messages, str):
        return messages
    turns = whole_turns(messages, source.turns)
    if not turns:
        return "empty" if all(map(is_trained, messages)) else "not_trained"
    texts = [turn["content"] for turn in turns if turn["role"] in ("user", "assistant") and turn["content"]]
    example = pair("\n\n".join(texts[:-1]), texts[-1])
    roles = [turn["role"] for turn in turns]
    if roles != ["user", "assistant"] or any(map(other_keys, turns)):
        example["messages"] = turns
    return example


def messages_in(row: Row, source: Source) -> list[Message] | Unusable:
    """Return the messages of a row, of one column or of two."""
    cells = [row[column] for column in turn_columns(source)]
    return messages_of(cells[0] if len(cells) == 1 else list(chain.from_iterable(map(turns_in, cells))))


def is_kept_in_part(row: Row, source: Source) -> bool:
    """Return True if a conversation is kept without some of its turns, as `IN_PART` says."""
    messages = messages_in(row, source)
    if isinstance(messages, str):
        return False
    turns = whole_turns(messages, source.turns)
    written = [message for message in messages if message["content"].strip()]
    answers = sum(turn["role"] == "assistant" for turn in turns)
    all_wanted = answers == source.turns or len(written) == len(turns)
    return bool(turns) and (written[: len(turns)] != turns or not all_wanted)


def pairs(row: Row, _: Source) -> Example | Unusable:
    """Prompts and completions as they are. An empty prompt is plain text: the loss is on all of it; null is none."""
    if row["prompt"] is None:
        return "empty"
    conversation = {"messages": row["messages"]} if row.get("messages") else {}  # of another data run
    return pair(row["prompt"], row["completion"]) | conversation


def text(row: Row, source: Source) -> Example | Unusable:
    """Plain text: OpenWebMath, Wikisource."""
    return {"text": str(row[source.column or "text"])}


def bitext(row: Row, source: Source) -> Example | Unusable:
    """Anyone's sentence pairs: `prompt` names the English side, `completion` the other."""
    english, other = (fill_template(words, row) for words in templates_of(source))
    return translation_example(english, other, source.language or "")


def filled(row: Row, source: Source) -> Example | Unusable:
    """A published set's pair, or anyone's data: templates with the names of columns in braces."""
    return pair(*(fill_template(words, row) for words in templates_of(source)))


PAIRS = {  # templates of prompt and completion
    "orca_math": ("{question}", "{answer}"),  # microsoft/orca-math-word-problems-200k
    "gsm8k": ("{question}", "{answer}"),  # openai/gsm8k: <<a*b=c>> marks, and a last line '#### n'
    "aya": ("{inputs}", "{targets}"),  # CohereLabs/aya_dataset
    # BongChat, llm-japanese-dataset, Dolly in Japanese
    "alpaca": ("{instruction}\n{input?}", "{output}"),
    # Telugu-LLM-Labs: of its nine columns instruction, input and output are the English originals
    "telugu_alpaca": ("{telugu_instruction}\n{telugu_input?}", "{telugu_output}"),
    "inkuba": ("{instruction}\n\n{inputs?}", "{targets}"),  # lelapa/Inkuba-instruct
    "xp3mt": ("{inputs}", "{targets}"),  # bigscience/xP3mt
    "ichikara": ("{text}", "{output}"),  # p1atdev/ichikara-instruction
}
READERS: dict[str, Callable[[Row, Source], Example | Unusable]] = {
    **dict.fromkeys(PAIRS, filled), "gsm8k_calculations": gsm8k_calculations, "gsm8k_text": gsm8k_text, "nllb": nllb,
    "conversation": conversation, "pairs": pairs, "text": text, "template": filled, "bitext": bitext,
}  # fmt: skip
COLUMNS = {  # of readers without templates, as in one
    **dict.fromkeys(("gsm8k_calculations", "gsm8k_text"), "{question}{answer}"), "nllb": "{text?}",
    "pairs": "{prompt?}{completion}",  # without a prompt it is plain text
}  # fmt: skip


def templates_of(source: Source) -> tuple[str, str]:
    return PAIRS.get(source.rows) or (source.prompt or "", source.completion or "")


# ---------------------------------------------------------------------------------------------------- their parts


def words_of(example: Example) -> str:
    """All text of an example, as it is compared with benchmarks."""
    if "messages" in example:
        values = (value for message in example["messages"] for key, value in message.items() if key != "role")
        return "\n".join(value for value in values if isinstance(value, str))
    return "\n".join(example.values())


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def is_text(value: Any) -> bool:
    """Whether a cell is text, nothing, or a number that stands for itself: lists, objects, dates and NaN are not."""
    is_number = isinstance(value, float | Decimal) and math.isfinite(value)
    return value is None or isinstance(value, str | int) or is_number


def pair(prompt: Any, completion: Any) -> Example:
    return {"prompt": str(prompt), "completion": str(completion)}


def translation_example(english: str, target_text: str, code: str) -> Example | Unusable:
    """One direction of a pair and one wording, both drawn by the pair itself: half of the pairs go each way."""
    english, target_text = english.strip(), target_text.strip()
    if not english or not target_text:
        return "empty"
    drawn = crc32(f"{english}\t{target_text}".encode("utf-8", "replace"))
    names, texts = ("English", language(code).name), (english, target_text)
    source, target = (0, 1) if drawn & 1 else (1, 0)
    wording = INSTRUCTIONS[(drawn >> 1) % len(INSTRUCTIONS)]
    prompt = wording.format(source=names[source], target=names[target], text=texts[source])
    return {"prompt": prompt, "completion": texts[target]}


SPEAKERS = {
    **dict.fromkeys(("user", "human", "prompter"), "user"), **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_call", "tool_call", "tool_response", "observation"), "tool"),
    "ipython": "tool",
}  # fmt: skip


OF_TURNS = ("role", "from", "content", "value")
MARKS = ("weight", "train")  # say whether a turn is to be trained on: OpenAI's, and axolotl's


def other_keys(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a turn holds besides its speaker and text; parquet fills keys that it lacks with nulls."""
    return {key: value for key, value in turn.items() if key not in OF_TURNS and value is not None}


def is_trained(turn: Mapping[str, Any]) -> bool:
    """Return False if a turn is marked as one not to train on."""
    return str(turn.get("weight")) not in ("0", "0.0") and str(turn.get("train")).lower() != "false"


def turn_columns(source: Source) -> list[str]:
    """The columns that hold the turns of a conversation: one, or TRL's prompt and completion, `completion` of the
    source naming the second."""
    first = source.column or language(source.language or "").flores
    return [first, *template_columns(source.completion or "")]


def turns_in(cell: Any) -> Any:
    """A list of turns, from its JSON text where a cell of CSV or parquet holds that; what else it holds as a list."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        with suppress(ValueError):
            return json.loads(cell)
    return cell if isinstance(cell, list) else [cell] if cell else []


def text_of_parts(content: Any) -> Any:
    """Content as parts of text (TRL's and OpenAI's form) as one text; anything else, images among it, as it is."""
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return content


def messages_of(cell: Any) -> list[Message] | Unusable:
    """Messages of user, assistant and system, each with role and content, or from and value, and with all other keys of
    its turn. Several in a row of one speaker are joined, unless they have other keys. Lists, of questions and answers
    or of pairs of these, alternate. Raises PipelineError for another speaker."""
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
            if (role := SPEAKERS.get(name.lower(), "")) == "":
                raise PipelineError(f"a conversation has a turn of {name!r}: name its speakers {', '.join(SPEAKERS)}")
            if role == "tool" or turn.get("tool_calls") or turn.get("function_call"):
                return "tool_turns"
            others = other_keys(turn)
            turn = text_of_parts(turn.get("value") if turn.get("content") is None else turn["content"])
        if not is_text(turn):
            return "not_turns"
        text = "" if turn is None else str(turn)
        if messages and messages[-1]["role"] == role and not others and not other_keys(messages[-1]):
            text = f"{messages.pop()['content']}\n\n{text}"
        messages.append({"role": role, "content": text, **others})
    return messages


def whole_turns(messages: list[Message], limit: int | None) -> list[Message]:
    """The messages from the first of a user, system messages before it included, to the last answer of whole turns:
    up to the first empty message, or answer without a question before it; `limit` answers, the last one of those to
    train on."""
    start = next((at for at, message in enumerate(messages) if message["role"] == "user"), len(messages))
    turns = [message for message in messages[:start] if message["role"] == "system" and message["content"].strip()]
    answers, end, last_role = 0, 0, ""
    for message in messages[start:]:
        if not message["content"].strip() or (message["role"] == "assistant" and last_role not in ("user", "system")):
            break
        turns.append(message)
        last_role = message["role"]
        if message["role"] == "assistant":
            answers, end = answers + 1, len(turns) if is_trained(message) else end
            if answers == limit:
                break
    return turns[:end]


def fill_template(words: str, row: Row) -> str:
    """A template with its columns filled in; one that may be blank, and is, goes with the text between it and the
    column before it."""
    filled = ""
    for text, name in template_parts(words):
        value = "" if name is None else row[name.removesuffix("?")]
        if not (is_blank(value) and str(name).endswith("?")):
            filled += f"{text}{value}"
    return filled


@cache
def template_parts(words: str) -> list[tuple[str, str | None]]:
    """A template as (text, name in the braces after it): {column}, or {column?}, which may be blank; {{ is a brace."""
    parts = Formatter().parse(words)
    return [(text, f"{name}:{more}" if more else name) for text, name, more, _ in parts]


@cache
def template_columns(words: str) -> dict[str, bool]:
    """Column of a template -> whether a row must fill it."""
    names = [name for _, name in template_parts(words) if name is not None]
    return {name.removesuffix("?"): name.removesuffix("?") in names for name in names}


def source_columns(name: str, source: Source) -> dict[str, bool]:
    """Column that a source's function reads -> whether a row must fill it.

    Raises:
        PipelineError: an unknown function, or one that lacks a knob.
    """
    knob_prefix = f"expert.sources.{name}"
    if source.language is not None:
        language(source.language)  # refuses an unknown one
    if source.rows not in READERS:
        raise PipelineError(f"{knob_prefix}.rows must be one of {', '.join(READERS)}, got {source.rows!r}")
    if source.rows in ("nllb", "bitext") and source.language is None:
        raise PipelineError(f"{knob_prefix}.rows={source.rows} needs {knob_prefix}.language, such as sw")
    if source.language_column and source.language is None:
        raise PipelineError(f"{knob_prefix}.language_column needs {knob_prefix}.language, such as sw")
    if source.candidates and not source.stream:
        raise PipelineError(f"{knob_prefix}.candidates is of streams: give {knob_prefix}.stream=true with it")
    if source.rows == "text":
        return {source.column or "text": True}
    if source.rows == "conversation":
        if source.column is None and source.language is None:
            raise PipelineError(
                f"{knob_prefix}.rows=conversation needs {knob_prefix}.column, the column that holds the turns"
            )
        return dict.fromkeys(turn_columns(source), True)
    for knob, example in (("prompt", "'Swali: {question}'"), ("completion", "'{answer}'")):
        template = getattr(source, knob)
        if source.rows in ("template", "bitext") and not are_columns(template):
            raise PipelineError(
                f"{knob_prefix}.{knob}={template!r} names no columns: give {knob_prefix}.{knob}={example}, text with "
                "your file's columns in braces; {{ stands for a brace, {column?} for one that may be blank"
            )
    return template_columns(COLUMNS.get(source.rows) or "".join(templates_of(source)))


def are_columns(template: str | None) -> bool:
    """Whether a template has columns in its braces, one at least that may not be blank."""
    try:
        return any(template_columns(template or "").values())
    except ValueError:
        return False


def language_column(source: Source) -> str | None:
    """The column that names each row's language, of a source that takes the rows of one."""
    column = "language" if source.rows == "aya" else source.language_column
    return column if source.language else None


def is_wanted(row: Row, source: Source) -> bool:
    """Whether a row is in the source's language; others are not counted as rows. Its column names it by our code, that
    of another benchmark, one of these with a region (sw-KE), or its English name."""
    if (column := language_column(source)) is None:
        return True
    of, (names, codes), name = language(source.language or ""), owners_in_aya(), row[column]
    if source.rows != "aya":
        return str(name).partition("-")[0] in (of.code, of.name, of.flores, *of.aya_codes)
    code = row.get("language_code")
    is_code = name not in names and code in of.aya_codes and (of.constructed or codes.get(code, of) == of)
    return name == of.aya or is_code


@cache
def owners_in_aya() -> tuple[set[str], dict[str, Language]]:
    """The names that Aya has of shipped languages, and its code -> language: of one in several scripts, whose code is
    the same, the first."""
    shipped = list(shipped_languages().values())
    return {one.aya for one in shipped}, {code: one for one in reversed(shipped) for code in one.aya_codes}
