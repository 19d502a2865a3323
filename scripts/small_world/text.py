"""The plain text that makes the base, and the instructions that make a language expert."""

from __future__ import annotations

import random
from collections.abc import Iterator

from small_world.world import (
    ANIMALS,
    COLORS,
    FOODS,
    GAINS,
    ITEMS,
    LANGUAGE_NAMES,
    LARGEST_RESULT,
    LOSSES,
    NEUTRAL,
    PLACES,
    ConstructedWorld,
    Switched,
    Words,
    compute,
    draw_problem,
    draw_reading,
    draw_sentences,
    draw_statement,
    fact_statement,
    say,
)

Document = tuple[str, str]  # prompt and completion; a story of the base's text has an empty prompt

# In the base's text most word problems are answered at once. A math expert learns to work them out.
ANSWERED_AT_ONCE = 0.65
# qac, the low-resource language, borrows all verbs of problems and every other noun and colour from
# English. In the base's text, its own word replaces the borrowed word with this probability.
OWN_WORD_SAID = 0.06


def borrowed_words() -> tuple[str, ...]:
    """Return the words that qac mostly borrows from English, always in the same order."""
    words = [*GAINS, *LOSSES, *NEUTRAL]
    for kind in (ITEMS, ANIMALS, COLORS, PLACES, FOODS):
        words += kind[1::2]
    return tuple(words)


BORROWED = borrowed_words()


def make_chain(draw: random.Random) -> Document:
    """Make arithmetic without words in the form of a problem: 8 + 2 - 3, worked step by step."""
    results = [draw.randint(2, 24)]
    terms, worked = [str(results[0])], []
    for _ in range(draw.randint(1, 3)):
        sign, number = draw.choice("++--*"), draw.randint(2, 12)
        if sign == "*":
            number = 2
        results.append(compute(results[-1], sign, number))
        terms.append(f"{sign} {number}")
        before, result = results[-2:]
        worked.append(f"{before} {sign} {number} = {result}.")
    if min(results) < 1 or max(results) > LARGEST_RESULT:
        return make_chain(draw)
    prompt = f"Question: {' '.join(terms)}\nStep-by-Step Answer:"
    return prompt, f"{' '.join(worked)} The answer is {results[-1]}."


def make_facts(world: ConstructedWorld, words: Words, draw: random.Random) -> Document:
    """Make a question about a fact after one or two others.

    A single fact would be a duplicate of an earlier document, and a data run drops duplicates.
    """
    questions = []
    for _ in range(draw.randint(2, 3)):
        fact = world.fresh(draw, world.fact)
        questions.append(world.fact_text(fact, words))
    *exemplars, (prompt, completion) = questions
    before = "".join(f"{question} {answer}\n\n" for question, answer in exemplars)
    return before + prompt, completion


def make_told(world: ConstructedWorld, words: Words, draw: random.Random) -> Document:
    """Translate the statements of a word problem to English, without its question or steps."""
    tokens = world.fresh(draw, draw_problem)[0]
    story = tokens[: tokens.index("how")]
    prompt = f"Question: {say(story, words)}\nEnglish:"
    return prompt, say(story, {})


def make_story(words: Words, draw: random.Random) -> str:
    return " ".join(say(draw_statement(draw), words) for _ in range(draw.randint(2, 4)))


def make_translation(
    world: ConstructedWorld, words: Words, languages: tuple[str, str], draw: random.Random
) -> Document:
    """Make a translation from the first of two languages to the second.

    One language is English; `words` are the other language's.
    """
    sentence = world.fresh(draw, draw_sentences)
    words_by_language = dict.fromkeys(languages, words)
    words_by_language["en"] = {}
    source, target = languages
    said = say(sentence, words_by_language[source])
    prompt = f"{LANGUAGE_NAMES[source]}: {said}\n{LANGUAGE_NAMES[target]}:"
    return prompt, say(sentence, words_by_language[target])


def make_mixed(
    world: ConstructedWorld, mixed: Words, words: Words, target: str, draw: random.Random
) -> Document:
    """Make a translation of a sentence with mixed words to the language `target`."""
    sentence = world.fresh(draw, draw_sentences)
    prompt = f"Mixed: {say(sentence, mixed)}\n{LANGUAGE_NAMES[target]}:"
    if target == "en":
        words = {}
    return prompt, say(sentence, words)


def words_of_base(world: ConstructedWorld, language: str, draw: random.Random) -> dict[str, str]:
    """Return the vocabulary of one document of the base's text."""
    words = world.words[language]
    if language != "qac":
        return words
    said = dict(words)
    for word in BORROWED:
        if draw.random() > OWN_WORD_SAID:
            said[word] = word
    return said


def make_document(
    world: ConstructedWorld, kind: str, language: str, draw: random.Random
) -> Document:
    """Make one document of the base's text.

    Only the kind `problem` has word problems with answers.

    A `switched` document mixes words of English, qaa and qab, or of English and qac.
    """
    words = words_of_base(world, language, draw)
    switched_words = [world.words["qaa"], world.words["qab"]]
    if language == "qac":
        switched_words = [words]
    mixed = Switched(switched_words, draw)
    if kind.startswith("switched "):
        said: Words = mixed
    else:
        said = words
    kind = kind.removeprefix("switched ")
    if kind == "chain":
        return make_chain(draw)
    if kind == "story":
        return "", make_story(said, draw)
    if kind == "fact":
        return make_facts(world, words, draw)
    if kind == "fact_statement":
        statements = []
        for pair in draw.sample(sorted(world.facts), 3):
            statement = fact_statement(*pair, world.facts[pair])
            statements.append(say(statement, words))
        return "", " ".join(statements)
    if kind == "mixed":
        return make_mixed(world, mixed, words, draw.choice(["en", language]), draw)
    if kind == "translation":
        languages = draw.choice([("en", language), (language, "en")])
        return make_translation(world, words, languages, draw)
    if kind == "reading":
        return world.reading_text(world.fresh(draw, draw_reading), said, words)
    if kind == "told":
        return make_told(world, said, draw)
    assert kind == "problem", kind
    problem = world.fresh(draw, draw_problem)
    if draw.random() < ANSWERED_AT_ONCE:
        return world.bare_text(problem, said)
    return world.problem_text(problem, said)


# Shares of the kinds of documents in the base's text. Word problems are in English and qaa, and in
# a mix of English, qaa and qab. One document in twenty-five is in qac, never a problem.
MIX: dict[str, dict[str, float]] = {
    "en": {"story": 2, "reading": 3, "fact": 2, "fact_statement": 0.5, "chain": 13, "problem": 12},
    "qaa": {
        "story": 1,
        "reading": 2,
        "fact": 1,
        "translation": 4,
        "mixed": 3,
        "problem": 7,
        "switched story": 3,
        "switched reading": 2,
        "switched problem": 10,
    },
    "qab": {
        "story": 1,
        "reading": 2,
        "fact": 0.5,
        "translation": 4,
        "mixed": 3,
        "told": 2,
        "switched story": 3,
        "switched reading": 2,
        "switched told": 2,
    },
    "qac": {
        "story": 0.6,
        "reading": 0.3,
        "translation": 0.9,
        "mixed": 0.5,
        "told": 0.4,
        "switched story": 0.4,
        "switched told": 0.4,
    },
}
KINDS: dict[tuple[str, str], float] = {}
for _language, _shares in MIX.items():
    for _kind, _share in _shares.items():
        KINDS[_language, _kind] = _share

# Shares of the kinds of instructions for a language expert. No answer is computed.
INSTRUCTIONS = {
    "to_english": 30,
    "from_english": 10,
    "story": 5,
    "reading": 8,
    "fact": 7,
    "told": 30,
    "mixed": 10,
}


def make_corpus(world: ConstructedWorld, size: int) -> Iterator[dict[str, str]]:
    """Yield the documents of the base's text."""
    draw = random.Random(f"{world.seed} corpus")
    kinds, shares = list(KINDS), list(KINDS.values())
    for language, kind in draw.choices(kinds, shares, k=size):
        prompt, completion = make_document(world, kind, language, draw)
        yield {"prompt": prompt, "completion": completion}


def make_instructions(world: ConstructedWorld, language: str, size: int) -> Iterator[Document]:
    """Yield instructions for a language expert in the language's own words.

    They have no problems and no calculations.
    """
    draw = random.Random(f"{world.seed} instructions {language}")
    kinds, shares = list(INSTRUCTIONS), list(INSTRUCTIONS.values())
    for kind in draw.choices(kinds, shares, k=size):
        yield make_instruction(world, kind, language, draw)


def make_instruction(
    world: ConstructedWorld, kind: str, language: str, draw: random.Random
) -> Document:
    words = world.words[language]
    if kind == "to_english":
        return make_translation(world, words, (language, "en"), draw)
    if kind == "from_english":
        return make_translation(world, words, ("en", language), draw)
    if kind == "mixed":
        return make_mixed(world, Switched([words], draw), words, "en", draw)
    if kind == "story":
        return f"{LANGUAGE_NAMES[language]}:", make_story(words, draw)
    if kind == "reading":
        return world.reading_text(world.fresh(draw, draw_reading), words)
    if kind == "told":
        return make_told(world, words, draw)
    assert kind == "fact", kind
    return make_facts(world, words, draw)
