"""The datasets: templates, or a short function, turn a row into a prompt and a completion, or into
text.

Schemas are those of the published repositories; a file below data_root holds the same columns. For
a row that cannot be used a function gives the reason, a key of UNUSABLE: the data card counts it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import chain
from string import Formatter
from typing import Any
from zlib import crc32

from pipeline.config.data import Source
from pipeline.data.conversations import (
    Message,
    is_trained,
    messages_of,
    other_keys,
    turns_in,
    whole_turns,
)
from pipeline.data.rows import Unusable, is_blank
from pipeline.errors import PipelineError
from pipeline.languages import Language, language, named_language, shipped_languages

Row = dict[str, Any]
Example = dict[
    str, Any
]  # prompt and completion, and messages where a conversation holds more; or text
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
# letters that text in the language must hold; the others here are written in Latin letters
SCRIPTS = {
    "bn": "[\u0980-\u09ff]",
    "te": "[\u0c00-\u0c7f]",
    "th": "[\u0e00-\u0e7f]",
    "ja": "[\u3040-\u30ff\u4e00-\u9fff]",
    "zh": "[\u4e00-\u9fff]",
    "ru": "[\u0400-\u04ff]",
}


# --- the datasets ---


def gsm8k_calculations(row: Row, _: Source) -> Example | Unusable:
    """openai/gsm8k, its annotated calculations alone, a line each, as solutions of mgsm_steps are:
    math without English prose. At most 64 characters, and so at most 64 tokens of any tokenizer
    with single digits and signs.
    """
    calculations = calculations_of(row["answer"])
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    solution = "\n".join([*calculations, f"#### {answer}"])
    if not calculations:
        return "no_calculation"
    if len(solution) > MOST_CHARACTERS:
        return "too_long"
    return pair(f"Question: {row['question'].strip()}\nAnswer:", solution)


def calculations_of(answer: str) -> list[str]:
    """GSM8K's annotated calculations of a solution, without spaces, $ and thousands separators:
    48/2=24.
    """
    return [re.sub(r"[ $,]", "", annotation) for annotation in re.findall(r"<<([^<>]*)>>", answer)]


def gsm8k_text(row: Row, _: Source) -> Example | Unusable:
    """openai/gsm8k as plain text, for a base made from nothing."""
    return {"text": f"{row['question']}\n{row['answer']}"}


def nllb(row: Row, source: Source) -> Example | Unusable:
    """Raw bitext of allenai/nllb, a line a pair, tabs between:

    AllenAI's 9 columns (text, text, score, language scores, sources) or CCMatrix' 3 (score, text,
    text). The languages stand in the order of their codes: FLORES' (als_Latn before eng_Latn), or
    those of two letters (en before sq). The score is LASER's margin.
    """
    parts, code = (row["text"] or "").split("\t"), source.language or ""
    if len(parts) not in (3, 9):
        return "broken"
    if len(parts) == 9:
        first, second, score = parts[:3]
    else:
        first, second, score = (parts[1], parts[2], parts[0])
    try:
        margin = float(score)
    except ValueError:
        return "broken"
    if source.min_score is not None and not margin >= source.min_score:
        return "low_score"
    if len(parts) == 9:
        english_first = language(code).flores > "eng_Latn"
    else:
        english_first = code > "en"
    return translation_example(*((first, second) if english_first else (second, first)), code)


def conversation(row: Row, source: Source) -> Example | Unusable:
    """Read a column of turns: [[prompt, response], ...], a flat list, or messages with role and
    content.

    Each conversation is one example, up to the last answer that is kept. `prompt` and `completion`
    are plain text without system messages. `messages` is what a chat template takes, where there is
    more than one question and its answer.
    """
    messages = messages_in(row, source)
    if isinstance(messages, str):
        return messages
    turns = whole_turns(messages, source.turns)
    if not turns:
        if all(map(is_trained, messages)):
            return "empty"
        return "not_trained"
    texts = []
    for turn in turns:
        if turn["role"] in ("user", "assistant") and turn["content"]:
            texts.append(turn["content"])
    example = pair("\n\n".join(texts[:-1]), texts[-1])
    roles = [turn["role"] for turn in turns]
    if roles != ["user", "assistant"] or any(map(other_keys, turns)):
        example["messages"] = turns
    return example


def messages_in(row: Row, source: Source) -> list[Message] | Unusable:
    """Return the messages of a row, of one column or of two."""
    cells = [row[column] for column in turn_columns(source)]
    return messages_of(
        cells[0] if len(cells) == 1 else list(chain.from_iterable(map(turns_in, cells)))
    )


def is_kept_in_part(row: Row, source: Source) -> bool:
    """Return True if a conversation is kept without some of its turns, as `IN_PART` says."""
    messages = messages_in(row, source)
    if isinstance(messages, str):
        return False
    turns = whole_turns(messages, source.turns)
    written = []
    for message in messages:
        if message["content"].strip():
            written.append(message)
    answers = sum(turn["role"] == "assistant" for turn in turns)
    all_wanted = answers == source.turns or len(written) == len(turns)
    return bool(turns) and (written[: len(turns)] != turns or not all_wanted)


def pairs(row: Row, _: Source) -> Example | Unusable:
    """Prompts and completions as they are.

    An empty prompt is plain text: the loss is on all of it; null is none.
    """
    if row["prompt"] is None:
        return "empty"
    # of another data run
    conversation = {}
    if row.get("messages"):
        conversation = {"messages": row["messages"]}
    return pair(row["prompt"], row["completion"]) | conversation


def text(row: Row, source: Source) -> Example | Unusable:
    """Plain text: OpenWebMath, Wikisource."""
    return {"text": str(row[source.column or "text"])}


def bitext(row: Row, source: Source) -> Example | Unusable:
    """Anyone's sentence pairs: `prompt` names the English side, `completion` the other."""
    english, other = (fill_template(words, row) for words in templates_of(source))
    return translation_example(english, other, source.language or "")


def filled(row: Row, source: Source) -> Example | Unusable:
    """Fill templates that name columns in braces: those of a published set, or a user's own."""
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
    **dict.fromkeys(PAIRS, filled),
    "gsm8k_calculations": gsm8k_calculations,
    "gsm8k_text": gsm8k_text,
    "nllb": nllb,
    "conversation": conversation,
    "pairs": pairs,
    "text": text,
    "template": filled,
    "bitext": bitext,
}
COLUMNS = {  # of readers without templates, as in one
    **dict.fromkeys(("gsm8k_calculations", "gsm8k_text"), "{question}{answer}"),
    "nllb": "{text?}",
    "pairs": "{prompt?}{completion}",  # without a prompt it is plain text
}


def templates_of(source: Source) -> tuple[str, str]:
    return PAIRS.get(source.rows) or (source.prompt or "", source.completion or "")


# --- their parts ---


def words_of(example: Example) -> str:
    """All text of an example, as it is compared with benchmarks."""
    if "messages" in example:
        values = (
            value
            for message in example["messages"]
            for key, value in message.items()
            if key != "role"
        )
        return "\n".join(value for value in values if isinstance(value, str))
    return "\n".join(example.values())


def pair(prompt: Any, completion: Any) -> Example:
    return {"prompt": str(prompt), "completion": str(completion)}


def translation_example(english: str, target_text: str, code: str) -> Example | Unusable:
    """One direction of a pair and one wording, both drawn by the pair itself: half of the pairs go
    each way.
    """
    english, target_text = english.strip(), target_text.strip()
    if not english or not target_text:
        return "empty"
    drawn = crc32(f"{english}\t{target_text}".encode("utf-8", "replace"))
    names, texts = ("English", language(code).name), (english, target_text)
    source, target = (0, 1) if drawn & 1 else (1, 0)
    wording = INSTRUCTIONS[(drawn >> 1) % len(INSTRUCTIONS)]
    prompt = wording.format(source=names[source], target=names[target], text=texts[source])
    return {"prompt": prompt, "completion": texts[target]}


def turn_columns(source: Source) -> list[str]:
    """Return the columns that hold the turns of a conversation.

    There is one, or TRL's prompt and completion, where `completion` of the source names the second.
    """
    first = source.column or language(source.language or "").flores
    return [first, *template_columns(source.completion or "")]


def fill_template(words: str, row: Row) -> str:
    """Fill the columns of a template.

    A column that may be blank, and is, goes together with the text between it and the column before
    it.
    """
    filled = ""
    for text, name in template_parts(words):
        if name is None:
            value = ""
        else:
            value = row[name.removesuffix("?")]
        if not (is_blank(value) and str(name).endswith("?")):
            filled += f"{text}{value}"
    return filled


@cache
def template_parts(words: str) -> list[tuple[str, str | None]]:
    """Split a template into (text, name in the braces after it).

    {column?} may be blank; {{ is a brace.
    """
    parts = Formatter().parse(words)
    return [(text, f"{name}:{more}" if more else name) for text, name, more, _ in parts]


@cache
def template_columns(words: str) -> dict[str, bool]:
    """Column of a template -> whether a row must fill it."""
    names = []
    for _, name in template_parts(words):
        if name is not None:
            names.append(name)
    return {name.removesuffix("?"): name.removesuffix("?") in names for name in names}


def source_columns(name: str, source: Source) -> dict[str, bool]:
    """Column that a source's function reads -> whether a row must fill it.

    Raises:
        PipelineError: an unknown function, or one that lacks a knob.
    """
    knob_prefix = f"expert.sources.{name}"
    if source.language is not None:
        named_language(source.language)  # refuses what is no code
    if source.rows not in READERS:
        raise PipelineError(
            f"{knob_prefix}.rows must be one of {', '.join(READERS)}, got {source.rows!r}"
        )
    if source.rows in ("nllb", "bitext") and source.language is None:
        raise PipelineError(
            f"{knob_prefix}.rows={source.rows} needs {knob_prefix}.language, such as sw"
        )
    if source.language_column and source.language is None:
        raise PipelineError(
            f"{knob_prefix}.language_column needs {knob_prefix}.language, such as sw"
        )
    if source.candidates and not source.stream:
        raise PipelineError(
            f"{knob_prefix}.candidates is of streams: give {knob_prefix}.stream=true with it"
        )
    if source.rows == "text":
        return {source.column or "text": True}
    if source.rows == "conversation":
        if source.column is None and source.language is None:
            raise PipelineError(
                f"{knob_prefix}.rows=conversation needs {knob_prefix}.column, the column that holds"
                " the turns"
            )
        return dict.fromkeys(turn_columns(source), True)
    for knob, example in (("prompt", "'Swali: {question}'"), ("completion", "' {answer}'")):
        template = getattr(source, knob)
        if source.rows in ("template", "bitext") and not are_columns(template):
            raise PipelineError(
                f"{knob_prefix}.{knob}={template!r} names no columns: give"
                f" {knob_prefix}.{knob}={example}, text with your file's columns in braces; {{{{"
                " stands for a brace, {column?} for one that may be blank"
            )
    return template_columns(COLUMNS.get(source.rows) or "".join(templates_of(source)))


def are_columns(template: str | None) -> bool:
    """Whether a template has columns in its braces, one at least that may not be blank."""
    try:
        return any(template_columns(template or "").values())
    except ValueError:
        return False


def language_column(source: Source) -> str | None:
    """Return the column that names each row's language, of a source that takes the rows of one
    language.
    """
    column = "language" if source.rows == "aya" else source.language_column
    if source.language:
        return column
    return None


def is_wanted(row: Row, source: Source) -> bool:
    """Whether a row is in the source's language; others are not counted as rows.

    Its column names it by our code, that of another benchmark, one of these with a region (sw-KE),
    or its English name.
    """
    column = language_column(source)
    if column is None:
        return True
    of, (names, codes), name = language(source.language or ""), owners_in_aya(), row[column]
    if source.rows != "aya":
        return str(name).partition("-")[0] in (of.code, of.name, of.flores, *of.aya_codes)
    code = row.get("language_code")
    is_code = (
        name not in names and code in of.aya_codes and (of.constructed or codes.get(code, of) == of)
    )
    return name == of.aya or is_code


@cache
def owners_in_aya() -> tuple[set[str], dict[str, Language]]:
    """Return the names that Aya has of shipped languages, and its code -> language.

    A language in several scripts has one code there: the first script is taken.
    """
    shipped = list(shipped_languages().values())
    return {one.aya for one in shipped}, {
        code: one for one in reversed(shipped) for code in one.aya_codes
    }
