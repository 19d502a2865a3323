"""The data sets: a template or function turns a row into a prompt and completion, or into text.

The schemas are the published repositories'; a file below data_root has the same columns. For a
row that cannot be used, a function returns the reason, a key of UNUSABLE, which the data card
counts.
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
# prompt and completion, and messages if a conversation has more turns; or text
Example = dict[str, Any]
MOST_CHARACTERS = 64  # in the calculations of a solution

# Our wordings: one is drawn for each pair of sentences.
INSTRUCTIONS = (
    "Translate from {source} to {target}.\n{text}",
    "Translate this {source} text into {target}: {text}",
    "{text}\nSay this in {target}.",
    "How would you put this in {target}?\n{text}",
    "Give the {target} translation of the {source} sentence.\n{text}",
    "{source}: {text}\nWrite it in {target}.",
)


# --- the datasets ---


def gsm8k_calculations(row: Row, _: Source) -> Example | Unusable:
    """Read the annotated calculations of openai/gsm8k, a line each: math without English prose.

    The solutions have the form of mgsm_steps. They have at most 64 characters, and so at most 64
    tokens of any tokenizer with single digits and signs.
    """
    calculations = calculations_of(row["answer"])
    _, _, answer = row["answer"].rpartition("####")
    solution = "\n".join([*calculations, f"#### {answer.strip().replace(',', '')}"])
    if not calculations:
        return "no_calculation"
    if len(solution) > MOST_CHARACTERS:
        return "too_long"
    return pair(f"Question: {row['question'].strip()}\nAnswer:", solution)


def calculations_of(answer: str) -> list[str]:
    """Return GSM8K's annotated calculations (48/2=24), without spaces, $ and thousands marks."""
    annotations = re.findall(r"<<([^<>]*)>>", answer)
    return [re.sub(r"[ $,]", "", annotation) for annotation in annotations]


def gsm8k_text(row: Row, _: Source) -> Example | Unusable:
    """Read openai/gsm8k as plain text, for a base with random weights."""
    return {"text": f"{row['question']}\n{row['answer']}"}


def nllb(row: Row, source: Source) -> Example | Unusable:
    """Read raw bitext of allenai/nllb: a pair a line, separated by tabs.

    A line has AllenAI's 9 columns (text, text, score, language scores, sources) or CCMatrix' 3
    (score, text, text). The languages are in the order of their codes: FLORES' codes (als_Latn
    before eng_Latn), or codes of two letters (en before sq). The score is LASER's margin.
    """
    parts = (row["text"] or "").split("\t")
    code = source.language or ""
    if len(parts) == 9:
        first, second, score, *_ = parts
        english_first = language(code).flores > "eng_Latn"
    elif len(parts) == 3:
        score, first, second = parts
        english_first = code > "en"
    else:
        return "broken"
    try:
        margin = float(score)
    except ValueError:
        return "broken"
    if source.min_score is not None and not margin >= source.min_score:
        return "low_score"
    if english_first:
        return translation_example(first, second, code)
    return translation_example(second, first, code)


def conversation(row: Row, source: Source) -> Example | Unusable:
    """Read a column of turns as one conversation.

    A cell has [[prompt, response], ...], a flat list, or messages with role and content.
    Each conversation is one example, up to the last answer that is kept. `prompt` and `completion`
    are plain text without system messages. `messages` are for a chat template, if there is more
    than one question and answer.
    """
    cells = [row[column] for column in turn_columns(source)]
    if len(cells) == 1:
        messages = messages_of(cells[0])
    else:
        messages = messages_of(list(chain.from_iterable(map(turns_in, cells))))
    if isinstance(messages, str):
        return messages
    turns = whole_turns(messages, source.turns)
    if not turns:
        if all(map(is_trained, messages)):
            return "empty"
        return "not_trained"
    spoken = [turn["content"] for turn in turns if turn["role"] in ("user", "assistant")]
    texts = list(filter(None, spoken))
    example = pair("\n\n".join(texts[:-1]), texts[-1])
    roles = [turn["role"] for turn in turns]
    if roles != ["user", "assistant"] or any(map(other_keys, turns)):
        example["messages"] = turns
    return example


def pairs(row: Row, _: Source) -> Example | Unusable:
    """Read prompts and completions.

    An empty prompt means plain text, with the loss on all of it. A null prompt is unusable.
    """
    if row["prompt"] is None:
        return "empty"
    example = pair(row["prompt"], row["completion"])
    if row.get("messages"):  # from another data run
        example["messages"] = row["messages"]
    return example


def text(row: Row, source: Source) -> Example | Unusable:
    """Read plain text, such as OpenWebMath or Wikisource."""
    return {"text": str(row[source.column or "text"])}


def bitext(row: Row, source: Source) -> Example | Unusable:
    """Read pairs of sentences: `prompt` names the English side, `completion` the other side."""
    english, other = (fill_template(words, row) for words in templates_of(source))
    return translation_example(english, other, source.language or "")


def filled(row: Row, source: Source) -> Example | Unusable:
    """Fill templates that name columns in braces, of a published set or a user's."""
    return pair(*(fill_template(words, row) for words in templates_of(source)))


PAIRS = {  # templates of prompt and completion
    "orca_math": ("{question}", "{answer}"),  # microsoft/orca-math-word-problems-200k
    "gsm8k": ("{question}", "{answer}"),  # openai/gsm8k: <<a*b=c>> marks, and a last line '#### n'
    "aya": ("{inputs}", "{targets}"),  # CohereLabs/aya_dataset
    # BongChat, llm-japanese-dataset, Dolly in Japanese
    "alpaca": ("{instruction}\n{input?}", "{output}"),
    # Telugu-LLM-Labs; its columns instruction, input and output are the English originals
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
COLUMNS = {  # the columns of readers without templates, in the form of a template
    "gsm8k_calculations": "{question}{answer}",
    "gsm8k_text": "{question}{answer}",
    "nllb": "{text?}",
    "pairs": "{prompt?}{completion}",  # without a prompt it is plain text
}


def templates_of(source: Source) -> tuple[str, str]:
    return PAIRS.get(source.rows) or (source.prompt or "", source.completion or "")


# --- parts of examples ---


def words_of(example: Example) -> str:
    """Return all text of an example that is compared with benchmarks."""
    if "messages" not in example:
        return "\n".join(example.values())
    texts = []
    for message in example["messages"]:
        for key, value in message.items():
            if key != "role" and isinstance(value, str):
                texts.append(value)
    return "\n".join(texts)


def pair(prompt: Any, completion: Any) -> Example:
    return {"prompt": str(prompt), "completion": str(completion)}


def translation_example(english: str, target_text: str, code: str) -> Example | Unusable:
    """Return one direction of a pair in one wording, both drawn by the pair's checksum.

    Half of the pairs go each way.
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
    """Return the one or two columns of a conversation's turns.

    TRL has two, prompt and completion. `completion` of the source names the second.
    """
    first = source.column or language(source.language or "").flores
    return [first, *template_columns(source.completion or "")]


def fill_template(words: str, row: Row) -> str:
    """Fill the columns of a template.

    A blank column that may be blank is dropped, with the text between it and the column before it.
    """
    filled = ""
    for text, name in template_parts(words):
        if name is None:
            filled += text
            continue
        value = row[name.removesuffix("?")]
        if not (is_blank(value) and name.endswith("?")):
            filled += f"{text}{value}"
    return filled


@cache
def template_parts(words: str) -> list[tuple[str, str | None]]:
    """Split a template into (text, name in the braces after it).

    {column?} may be blank; {{ is a brace.
    """
    parts = []
    for text, name, more, _ in Formatter().parse(words):
        if more:
            name = f"{name}:{more}"
        parts.append((text, name))
    return parts


@cache
def template_columns(words: str) -> dict[str, bool]:
    """Return for each column of a template whether a row must fill it."""
    names = [name for _, name in template_parts(words) if name is not None]
    columns = [name.removesuffix("?") for name in names]
    return {column: column in names for column in columns}


def source_columns(name: str, source: Source) -> dict[str, bool]:
    """Return for each column that a source's function reads whether a row must fill it.

    Raises:
        PipelineError: The function is unknown, or a key that it needs is missing.
    """
    knob = f"expert.sources.{name}"
    if source.language is not None:
        named_language(source.language)  # raises an error for an unknown code
    if source.rows not in READERS:
        raise PipelineError(f"{knob}.rows must be one of {', '.join(READERS)}, got {source.rows!r}")
    if source.rows in ("nllb", "bitext") and source.language is None:
        raise PipelineError(f"{knob}.rows={source.rows} needs {knob}.language, such as sw")
    if source.language_column and source.language is None:
        raise PipelineError(f"{knob}.language_column needs {knob}.language, such as sw")
    if source.candidates and not source.stream:
        raise PipelineError(f"{knob}.candidates is only for streams. Set {knob}.stream=true.")
    if source.rows == "text":
        return {source.column or "text": True}
    if source.rows == "conversation":
        if source.column is None and source.language is None:
            raise PipelineError(
                f"{knob}.rows=conversation needs {knob}.column, the column of the turns"
            )
        return dict.fromkeys(turn_columns(source), True)
    if source.rows in ("template", "bitext"):
        _check_template(f"{knob}.prompt", source.prompt, "'Swali: {question}'")
        _check_template(f"{knob}.completion", source.completion, "' {answer}'")
    return template_columns(COLUMNS.get(source.rows) or "".join(templates_of(source)))


def _check_template(knob: str, template: str | None, example: str) -> None:
    if not are_columns(template):
        raise PipelineError(
            f"{knob}={template!r} names no columns. Set {knob}={example}, text with your file's"
            " columns in braces. Write {{ for a brace, and {column?} for a column that may be"
            " blank."
        )


def are_columns(template: str | None) -> bool:
    """Return True if a template has a column in braces that may not be blank."""
    try:
        return any(template_columns(template or "").values())
    except ValueError:
        return False


def language_column(source: Source) -> str | None:
    """Return the column of each row's language, if the source uses the rows of one language."""
    if not source.language:
        return None
    return "language" if source.rows == "aya" else source.language_column


def is_wanted(row: Row, source: Source) -> bool:
    """Return True if a row is in the source's language; other rows are not counted.

    The column has the language's code in this program or another benchmark, either with a region
    (sw-KE) or without, or the English name.
    """
    column = language_column(source)
    if column is None:
        return True
    wanted, name = language(source.language or ""), row[column]
    if source.rows != "aya":
        code, _, _ = str(name).partition("-")
        return code in (wanted.code, wanted.name, wanted.flores, *wanted.aya_codes)
    names, codes = owners_in_aya()
    if name == wanted.aya:
        return True
    aya_code = row.get("language_code")
    if name in names or aya_code not in wanted.aya_codes:
        return False
    return wanted.constructed or codes.get(aya_code, wanted) == wanted


@cache
def owners_in_aya() -> tuple[set[str], dict[str, Language]]:
    """Return Aya's names of shipped languages, and the language of each of its codes.

    A language in several scripts has one code in Aya, which gives its first script.
    """
    names, codes = set(), dict[str, Language]()
    for shipped in shipped_languages().values():
        names.add(shipped.aya)
        for code in shipped.aya_codes:
            codes.setdefault(code, shipped)
    return names, codes
