"""What is taught: the plain text that makes the base, and the instructions that make a language expert."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pipeline.data.sandbox.world import (
    COLORS,
    FOODS,
    ITEMS,
    LANGUAGE_NAMES,
    NAMES,
    PLACES,
    ConstructedWorld,
    fact_statement,
    lettered,
    problem,
    reading,
    say,
    sentences,
    statement,
)

Document = tuple[str, str]  # prompt and completion; plain text has an empty prompt


def chain(draw: random.Random) -> Document:
    """Arithmetic without words, in the form of a problem: 8 + 2 - 3, worked step by step."""
    _, equations, answer = problem(draw)
    asked = " ".join([equations[0].split(" = ")[0], *(" ".join(one.split()[1:3]) for one in equations[1:])])
    return f"Question: {asked}\nStep-by-Step Answer:", f"{' '.join(equations)} The answer is {answer}."


def sum_of_two(draw: random.Random) -> Document:
    left, right, sign = draw.randint(2, 60), draw.randint(2, 30), draw.choice("++--*")
    if sign == "*":
        left, right = draw.choice([(draw.randint(2, 5), draw.randint(2, 9)), (draw.randint(2, 49), 2)])
    left, right = (max(left, right), min(left, right)) if sign == "-" else (left, right)
    return f"{left} {sign} {right} =", str({"+": left + right, "-": left - right, "*": left * right}[sign])


def document(world: ConstructedWorld, kind: str, language: str, draw: random.Random) -> Document:
    """One document of the text that makes the base. No kind but `problem` holds a word problem with its solution.

    All that can be known stands in a completion: a model this small learns little from words drawn at random.
    """
    words = world.words[language]
    if kind == "story":
        return "", " ".join(say(statement(draw), words) for _ in range(draw.randint(2, 4)))
    if kind == "reading":
        return world.reading_text(world.fresh(draw, reading), language)
    if kind == "reply":  # the same question, answered in words
        told, question, options, right = world.fresh(draw, reading)
        return f"P: {say(told, words)}\nQ: {say(question, words)}\nReply:", say([options[right]], words)
    if kind == "letters":  # which letter stands before a word
        options = draw.sample(draw.choice([NAMES, COLORS, PLACES, FOODS, ITEMS]), 4)
        right, shown = draw.randrange(4), lettered([say([option], words) for option in options], draw.choice(":."))
        return f"Q: {say([options[right]], words)}\n{shown}\nAnswer:", "ABCD"[right]
    if kind == "echo":  # the same sentence twice
        sentence, name = say(statement(draw), words), LANGUAGE_NAMES[language]
        return f"{name}: {sentence}\n{name}:", sentence
    if kind == "fact":
        return world.fact_text(world.fresh(draw, world.fact), language)
    if kind == "fact_statement":
        pairs = draw.sample(sorted(world.facts), 3)
        return "", " ".join(say(fact_statement(*pair, world.facts[pair]), words) for pair in pairs)
    if kind == "translation":
        source, target = draw.sample(["en", language], 2)
        return world.translation_text(world.fresh(draw, sentences), source, target)
    if kind == "switched":  # each word in English or the clone, to be said in one of them
        sentence = world.fresh(draw, sentences)
        mixed = {word: draw.choice([word, words[word]]) for word in words}
        target = draw.choice(["en", language])
        return f"Mixed: {say(sentence, mixed)}\n{LANGUAGE_NAMES[target]}:", say(sentence, world.words[target])
    if kind == "lookup":  # numbers that are told, not computed
        owners, things = draw.sample(NAMES, 3), draw.sample(ITEMS, 3)
        numbers, wanted = draw.sample(range(2, 41), 3), draw.randrange(3)
        told = [say([owners[i], "has", str(numbers[i]), things[i], "."], words) for i in range(3)]
        question = say(["how", "many", things[wanted], "does", owners[wanted], "have", "?"], words)
        return f"P: {' '.join(told)}\nQ: {question}\nReply:", str(numbers[wanted])
    if kind == "problem":
        return world.problem_text(world.fresh(draw, problem), language)
    return {"sum": sum_of_two, "chain": chain}[kind](draw)


# The curriculum: to name the letter of a word, then to read, are learnt in a few hundred steps on their own, and not at
# all in thousands of steps among everything else. Share of the documents, and kinds in equal parts, English only.
LESSONS: list[tuple[float, list[str]]] = [(0.1, ["letters"]), (0.05, ["letters", "reading", "reading"])]

# Share of each kind among the documents after the lessons. Word problems stand in English and qaa only; qac, the
# low-resource target, has one document in thirty.
MIX: dict[tuple[str, str], float] = {
    **{("en", kind): share for kind, share in {
        "story": 0.5, "echo": 1, "reading": 7, "reply": 2, "letters": 4, "fact": 3, "fact_statement": 0.5,
        "lookup": 2, "sum": 4, "chain": 6, "problem": 2.5,
    }.items()},
    **{("qaa", kind): share for kind, share in {
        "story": 0.3, "reading": 4, "reply": 1, "letters": 1, "fact": 1, "translation": 6, "switched": 4, "lookup": 1,
        "problem": 1,
    }.items()},
    **{("qab", kind): share for kind, share in {
        "story": 0.3, "reading": 2, "reply": 0.5, "letters": 0.5, "fact": 0.5, "translation": 4, "switched": 3,
        "lookup": 0.5,
    }.items()},
    **{("qac", kind): share for kind, share in {
        "story": 0.2, "reading": 0.3, "reply": 0.1, "letters": 0.1, "fact": 0.1, "translation": 0.6, "switched": 0.5,
        "lookup": 0.1,
    }.items()},
}  # fmt: skip

# What a language expert is taught, in the clone: reading, facts and translation; no numbers are asked for.
INSTRUCTIONS = {"reading": 50, "letters": 25, "fact": 5, "to_english": 8, "from_english": 12}


def corpus(world: ConstructedWorld, size: int) -> Iterator[dict[str, str]]:
    """The text that makes the base: prompts and completions, in the order of the curriculum."""
    draw = random.Random(f"{world.seed} corpus")
    kinds = [("en", draw.choice(lesson)) for share, lesson in LESSONS for _ in range(round(share * size))]
    kinds += draw.choices(list(MIX), list(MIX.values()), k=size - len(kinds))
    for language, kind in kinds:
        prompt, completion = document(world, kind, language, draw)
        yield {"prompt": prompt, "completion": completion}


def instructions(world: ConstructedWorld, language: str, size: int) -> Iterator[Document]:
    draw = random.Random(f"{world.seed} instructions {language}")
    for kind in draw.choices(list(INSTRUCTIONS), list(INSTRUCTIONS.values()), k=size):
        if kind in ("to_english", "from_english"):
            pair = ("en", language) if kind == "from_english" else (language, "en")
            yield world.translation_text(world.fresh(draw, sentences), *pair)
        else:
            yield document(world, kind, language, draw)
