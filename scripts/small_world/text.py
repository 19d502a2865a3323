"""What is taught: the plain text that makes the base, and the instructions that make a language expert."""

from __future__ import annotations

import random
from collections.abc import Iterator

from small_world.world import (
    CONTENT_WORDS,
    ITEMS,
    LANGUAGE_NAMES,
    LARGEST_RESULT,
    NAMES,
    PLACES,
    ConstructedWorld,
    Reading,
    Sentence,
    Switched,
    Words,
    draw_reading,
    draw_sentences,
    draw_statement,
    easy_problem,
    fact_statement,
    say,
)

Document = tuple[str, str]  # prompt and completion; plain text has an empty prompt


def make_chain(draw: random.Random) -> Document:
    """Arithmetic without words, in the form of a problem: 8 + 2 - 3, worked step by step."""
    results = [draw.randint(2, 40)]
    terms, worked = [str(results[0])], []
    for _ in range(draw.randint(2, 4)):
        sign, number = draw.choice("++--*"), draw.randint(2, 15)
        number = 2 if sign == "*" else number
        results.append({"+": results[-1] + number, "-": results[-1] - number, "*": results[-1] * number}[sign])
        terms.append(f"{sign} {number}")
        worked.append(f"{results[-2]} {sign} {number} = {results[-1]}.")
    if min(results) < 1 or max(results) > LARGEST_RESULT:
        return make_chain(draw)
    return f"Question: {' '.join(terms)}\nStep-by-Step Answer:", f"{' '.join(worked)} The answer is {results[-1]}."


def facts_text(world: ConstructedWorld, words: Words, draw: random.Random) -> Document:
    """A fact after one or two others: alone, each would be a duplicate, and a data run keeps one of those."""
    *exemplars, (prompt, completion) = (
        world.fact_text(world.fresh(draw, world.fact), words) for _ in range(draw.randint(2, 3))
    )
    return "".join(f"{question} {answer}\n\n" for question, answer in exemplars) + prompt, completion


def prompt_of(statements: list[str], question: str) -> str:
    return f"P: {' '.join(statements)}\nQ: {question}\nAnswer:"


def worked_answer(statements: list[str], question: str, reasoning: str, answer: str) -> Document:
    """A question answered as a word problem is: by the statement that matters, then by the answer."""
    return prompt_of(statements, question).replace(
        "Answer:", "Step-by-Step Answer:"
    ), f"{reasoning} The answer is {answer}."


def worked_reading(item: Reading, words: Words) -> Document:
    passage, question, options, right = item
    statements = [
        say([*sentence.split(), "."], words) for sentence in " ".join(passage).removesuffix(" .").split(" . ")
    ]
    statement = statements[passage[: passage.index(options[right])].count(".")]
    return worked_answer(statements, say(question, words), statement, statement.removesuffix(".").rpartition(" ")[2])


Lookup = tuple[list[Sentence], Sentence, int]  # statements, a question whose number one of them tells, and which


def make_lookup(draw: random.Random) -> Lookup:
    """Numbers that are stated, not computed."""
    count = draw.randint(2, 3)
    owners, items = draw.sample(NAMES, count), draw.sample(ITEMS, count)
    numbers, chosen_index = draw.sample(range(2, 41), count), draw.randrange(count)
    statements = [[owners[i], "has", str(numbers[i]), items[i], "."] for i in range(count)]
    return statements, ["how", "many", items[chosen_index], "does", owners[chosen_index], "have", "?"], chosen_index


def lookup_text(item: Lookup, words: Words, worked: bool = False) -> Document:
    statements, question, index = [say(sentence, words) for sentence in item[0]], say(item[1], words), item[2]
    answer = item[0][index][2]
    return (
        worked_answer(statements, question, statements[index], answer)
        if worked
        else (prompt_of(statements, question), answer)
    )


def draw_belongings(draw: random.Random) -> list[Sentence]:
    """What each of some has, or where each is. Said in another order, there is somebody's to be found in each."""
    names, item = draw.sample(NAMES, draw.randint(2, 4)), draw.random() < 0.5
    if item:
        return [[name, "has", str(draw.randint(2, 40)), draw.choice(ITEMS), "."] for name in names]
    return [[name, "is", "in", "the", draw.choice(PLACES), "."] for name in names]


def with_loans(world: ConstructedWorld, language: str, draw: random.Random) -> dict[str, str]:
    """The words in which a document of the base's text is said: qac has its own for half of the content words, and
    nearly always borrows the others from English. They are what a language expert can teach."""
    words = world.words[language]
    if language != "qac":
        return words
    rare = {word for kind in CONTENT_WORDS for place, word in enumerate(kind) if place % 2}
    return {word: word if word in rare and draw.random() > RARE_WORDS_SAID else words[word] for word in words}


def make_document(world: ConstructedWorld, kind: str, language: str, draw: random.Random) -> Document:
    """One document of the text that makes the base. No kind but `problem` holds a word problem with its solution.

    In a `switched` document English words and the clone's are mixed, in a `worked` one the statement that answers is
    said again before the answer.
    """
    if kind == "chain":
        return make_chain(draw)
    name, clone_words = LANGUAGE_NAMES[language], with_loans(world, language, draw)
    words = Switched(clone_words, draw) if kind.startswith("switched") else clone_words
    kind = kind.removeprefix("switched ")
    worked, kind = kind.startswith("worked "), kind.removeprefix("worked ")
    if kind == "story":
        return "", " ".join(say(draw_statement(draw), words) for _ in range(draw.randint(2, 4)))
    if kind == "echo":  # the same sentence twice
        sentence = say(draw_statement(draw), words)
        return f"{name}: {sentence}\n{name}:", sentence
    if kind == "shuffled":
        texts = [say(belonging, words) for belonging in draw_belongings(draw)]
        return f"{name}: {' '.join(texts)}\n{name}:", " ".join(draw.sample(texts, len(texts)))
    if kind == "fact_statement":
        pairs = draw.sample(sorted(world.facts), 3)
        return "", " ".join(say(fact_statement(*pair, world.facts[pair]), words) for pair in pairs)
    if kind == "lookup":
        return lookup_text(make_lookup(draw), words, worked)
    if kind == "switched":  # to be said in one of the two
        sentence = world.fresh(draw, draw_sentences)
        target = draw.choice(["en", language])
        return f"Mixed: {say(sentence, words)}\n{LANGUAGE_NAMES[target]}:", say(
            sentence, clone_words if target != "en" else {}
        )
    if kind == "translation":
        sentence = world.fresh(draw, draw_sentences)
        sides = [("English", say(sentence, {})), (name, say(sentence, clone_words))]
        (source, prompt), (target, completion) = draw.sample(sides, 2)
        return f"{source}: {prompt}\n{target}:", completion
    if kind == "reading":
        item = world.fresh(draw, draw_reading)
        return worked_reading(item, words) if worked else world.reading_text(item, words, clone_words)
    if kind == "fact":
        return facts_text(world, clone_words, draw)
    if kind == "told":  # as a word problem tells it, to be said in English; nothing is asked, nothing computed
        tokens = world.fresh(draw, easy_problem)[0]
        story = tokens[: tokens.index("how")]
        return f"Question: {say(story, words)}\nEnglish:", say(story, {})
    assert kind == "problem", kind
    return world.problem_text(world.fresh(draw, easy_problem), words)


# Shares of the base's documents. To find who has what is learnt first, in English: 300 steps of it alone do what
# thousands among all else do not. The last ones are read while the rate decays.
LESSON, LAST = 0.1, 0.35
RARE_WORDS_SAID = 0.1  # of the times that a document of qac could say one

# Share of each kind among the documents between. Word problems stand in English and qaa only; qac, the low-resource
# target, has one document in thirty. In a quarter of them languages are mixed.
MIX: dict[tuple[str, str], float] = {
    **{("en", kind): share for kind, share in {
        "story": 2, "shuffled": 4, "reading": 2, "worked reading": 3, "fact": 3, "fact_statement": 0.5, "lookup": 2,
        "worked lookup": 3, "chain": 14, "problem": 8,
    }.items()},
    **{("qaa", kind): share for kind, share in {
        "story": 1, "shuffled": 1, "reading": 1.5, "worked reading": 1.5, "fact": 1, "translation": 5, "lookup": 1,
        "worked lookup": 1, "problem": 2.5, "switched": 4, "switched story": 3, "switched reading": 1,
        "switched worked reading": 1, "switched lookup": 1, "switched worked lookup": 1, "switched problem": 3.5,
    }.items()},
    **{("qab", kind): share for kind, share in {
        "story": 0.8, "shuffled": 0.5, "reading": 1.5, "worked reading": 1, "fact": 0.5, "translation": 4, "lookup": 1,
        "worked lookup": 0.5, "switched": 3.5, "switched story": 2.5, "switched reading": 1,
        "switched worked reading": 0.5, "switched lookup": 1, "switched worked lookup": 0.5,
    }.items()},
    **{("qac", kind): share for kind, share in {
        "story": 0.3, "shuffled": 0.1, "reading": 0.2, "worked reading": 0.1, "fact": 0.1, "translation": 0.7,
        "lookup": 0.1, "worked lookup": 0.1, "switched": 0.5, "switched story": 0.4, "switched reading": 0.2,
        "switched worked reading": 0.1, "switched lookup": 0.15, "switched worked lookup": 0.1,
    }.items()},
}  # fmt: skip

# Among the last: fewer stories and translations, more that is mixed.
LAST_MIX: dict[tuple[str, str], float] = {
    **{("en", kind): share for kind, share in {
        "story": 1, "shuffled": 2, "reading": 4, "worked reading": 4, "fact": 3, "lookup": 3, "worked lookup": 3,
        "chain": 14, "problem": 6,
    }.items()},
    **{("qaa", kind): share for kind, share in {
        "story": 0.5, "reading": 2, "worked reading": 1.5, "fact": 1, "translation": 3, "lookup": 1.5,
        "worked lookup": 1, "problem": 2.5, "switched": 3, "switched story": 1.5, "switched reading": 1.5,
        "switched worked reading": 2, "switched lookup": 1.5, "switched worked lookup": 1.5, "switched problem": 5,
    }.items()},
    **{("qab", kind): share for kind, share in {
        "story": 0.5, "reading": 2, "worked reading": 1.5, "fact": 0.5, "translation": 3.5, "lookup": 1.5,
        "worked lookup": 1, "switched": 4, "switched story": 2, "switched reading": 1.5, "switched worked reading": 2,
        "switched lookup": 1.5, "switched worked lookup": 1.5,
    }.items()},
    **{("qac", kind): share for kind, share in {
        "story": 0.4, "reading": 0.4, "worked reading": 0.3, "fact": 0.1, "translation": 1, "lookup": 0.3,
        "worked lookup": 0.2, "switched": 1, "switched story": 0.5, "switched reading": 0.4,
        "switched worked reading": 0.4, "switched lookup": 0.4, "switched worked lookup": 0.4,
    }.items()},
}  # fmt: skip

# What is read after these: a document in twenty-four is too little of a language to reason in it, and nothing in qab or
# qac occurred in the forms of a word problem, behind its label.
IN_FORM_OF_PROBLEMS = {(language, kind): 1.0 for language in ("qab", "qac") for kind in ("told", "switched told")}


def _scale_mix(mix: dict[tuple[str, str], float], to: float) -> dict[tuple[str, str], float]:
    return {key: share * to / sum(mix.values()) for key, share in mix.items()}


QAC_MIX = {
    **_scale_mix({key: share for key, share in LAST_MIX.items() if key[0] != "qac"}, 0.45),
    **_scale_mix({key: share for key, share in LAST_MIX.items() if key[0] == "qac"}, 0.35),
    **_scale_mix(IN_FORM_OF_PROBLEMS, 0.2),
}

BASE_DOCUMENTS = (180_000, 32_000)  # of the shipped base: text/train.jsonl, text/last.jsonl

# What a language expert is taught, in the clone: translation, reading and facts, in words; no answer is a number.
INSTRUCTIONS = {"to_english": 30, "from_english": 25, "echo": 10, "reading": 25, "fact": 10}


def make_corpus(world: ConstructedWorld, size: int) -> Iterator[dict[str, str]]:
    """The text that makes the base: prompts and completions, in the order of the curriculum."""
    draw = random.Random(f"{world.seed} corpus")
    lesson, last = round(LESSON * size), round(LAST * size)
    kinds = [("en", "shuffled")] * lesson
    kinds += draw.choices(list(MIX), list(MIX.values()), k=size - lesson - last)
    kinds += draw.choices(list(LAST_MIX), list(LAST_MIX.values()), k=last)
    yield from make_documents(world, kinds, draw)


def last_corpus(world: ConstructedWorld, size: int) -> Iterator[dict[str, str]]:
    """What is read after it: as its last documents, with more in qac, and what is stated in the forms of a problem."""
    draw = random.Random(f"{world.seed} last corpus")
    yield from make_documents(world, draw.choices(list(QAC_MIX), list(QAC_MIX.values()), k=size), draw)


def make_documents(
    world: ConstructedWorld, kinds: list[tuple[str, str]], draw: random.Random
) -> Iterator[dict[str, str]]:
    for language, kind in kinds:
        prompt, completion = make_document(world, kind, language, draw)
        yield {"prompt": prompt, "completion": completion}


def make_instructions(world: ConstructedWorld, language: str, size: int) -> Iterator[Document]:
    draw, words = random.Random(f"{world.seed} instructions {language}"), world.words[language]
    name = LANGUAGE_NAMES[language]
    for kind in draw.choices(list(INSTRUCTIONS), list(INSTRUCTIONS.values()), k=size):
        if kind in ("to_english", "from_english"):
            pair = ("en", language) if kind == "from_english" else (language, "en")
            yield world.translation_text(world.fresh(draw, draw_sentences), *pair)
        elif kind == "echo":
            sentence = say(draw_statement(draw), words)
            yield f"{name}: {sentence}\n{name}:", sentence
        elif kind == "reading":
            yield world.reading_text(world.fresh(draw, draw_reading), words)
        else:
            yield facts_text(world, words, draw)
