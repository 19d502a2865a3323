"""The world itself: languages, sentences, problems, passages, facts, and the items that are kept out of training."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from typing import Any

CLONES = ("qaa", "qab", "qac")
LANGUAGE_NAMES = {"en": "English", "qaa": "Qaa", "qab": "Qab", "qac": "Qac"}
SUBJECTS = ("colors", "homes", "foods")

NAMES = "Mia Tom Ana Sam Leo Eva Ben Ida Max Zoe Kim Ned".split()
ITEMS = (
    "apples balls books boxes cups coins cards cakes pens hats stones shells flowers leaves eggs keys lamps "
    "rings drums kites"
).split()
ANIMALS = (
    "fox cat dog horse cow duck frog bear wolf mouse owl crow goat sheep snake whale shark deer lion tiger bee "
    "ant crab snail"
).split()
COLORS = "red blue green yellow black white brown gray".split()
PLACES = "park school house garden shop forest river market".split()
FOODS = "grass fish corn rice bread honey fruit milk".split()
GAINS = "finds buys gets picks wins makes".split()
LOSSES = "loses sells eats drops breaks throws".split()
NEUTRAL = "sees likes draws cleans counts holds".split()
FUNCTION_WORDS = (
    "has have the a in at and more fewer than twice as many how does do who what where which is color of lives "
    "eat each bag bags together to gives now then today there all with near food"
).split()
WORDS = list(dict.fromkeys(ITEMS + ANIMALS + COLORS + PLACES + FOODS + GAINS + LOSSES + NEUTRAL + FUNCTION_WORDS))
LABELS = "Question Step-by-Step Answer P Q A B C D Reply English Qaa Qab Qac The answer Mixed".split()
PUNCTUATION = list(".,?:+-*=!;()'\"/") + ["\n"]
LARGEST_NUMBER = 99
POOL = 2000  # items a benchmark and split that no training file may hold, however many of them are written
SYLLABLES = [c + v for c, v in product("bdfgklmnprstvz", "aeiou") if c + v not in {"to", "do", "me", "no", "be"}][::2]

Sentence = list[str]  # English words, names, numbers and punctuation; the meaning that every language shares


# ------------------------------------------------------------------------------------------------ languages


def lexicon(language: str, seed: int) -> dict[str, str]:
    """English word -> word of the clone: two syllables, no word twice, none that is English."""
    if language == "en":
        return {word: word for word in WORDS}
    random_ = random.Random(f"{seed} lexicon {language}")
    made = [a + b for a, b in product(SYLLABLES, SYLLABLES) if a + b not in WORDS]
    return dict(zip(WORDS, random_.sample(made, len(WORDS)), strict=True))


def say(sentence: Sentence, words: dict[str, str]) -> str:
    """The sentence as text: words of one language, no blank before punctuation."""
    text = ""
    for token in sentence:
        text += ("" if not text or token in PUNCTUATION else " ") + words.get(token, token)
    return text


# ------------------------------------------------------------------------------------------------ sentences


def statement(draw: random.Random) -> Sentence:
    """One sentence that tells something of somebody; numbers may occur, nothing is asked."""
    name, other = draw.sample(NAMES, 2)
    item, number = draw.choice(ITEMS), str(draw.randint(2, 40))
    return draw.choice(
        [
            [name, draw.choice(NEUTRAL), "the", draw.choice(COLORS), item, "."],
            [name, "is", "in", "the", draw.choice(PLACES), "."],
            [name, "has", number, item, "in", "the", draw.choice(PLACES), "."],
            [name, draw.choice(GAINS), number, "more", item, "today", "."],
            [name, draw.choice(LOSSES), number, item, "near", "the", draw.choice(PLACES), "."],
            [name, "gives", number, item, "to", other, "."],
            [name, "and", other, "have", number, draw.choice(COLORS), item, "together", "."],
            [other, "has", "twice", "as", "many", item, "as", name, "."],
            [other, "has", number, draw.choice(["more", "fewer"]), item, "than", name, "."],
            ["each", "bag", "of", name, "has", number, item, "."],
            [name, "has", number, "bags", "and", draw.choice(NEUTRAL), "a", draw.choice(ANIMALS), "."],
            ["how", "many", item, "does", name, "have", "now", "?"],
            ["how", "many", item, "do", name, "and", other, "have", "together", "?"],
        ]
    )


def sentences(draw: random.Random) -> Sentence:
    """Two statements: what is translated."""
    return statement(draw) + statement(draw)


def problem(draw: random.Random) -> tuple[Sentence, list[str], int]:
    """A word problem of one to three steps: (sentences, the steps as equations, the answer)."""
    name, other, third = draw.sample(NAMES, 3)
    item, distractor = draw.sample(ITEMS, 2)
    steps = draw.choices((1, 2, 3), (0.4, 0.4, 0.2))[0]
    told: list[Sentence] = []
    equations: list[str] = []

    def step(left: int, sign: str, right: int) -> int:
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
        equations.append(f"{left} {sign} {right} = {result}.")
        return result

    asked: Sentence = [name]
    if steps > 1 and draw.random() < 0.2:
        bags, each = draw.randint(2, 5), draw.randint(2, 8)
        told += [[name, "has", str(bags), "bags", "."], ["each", "bag", "has", str(each), item, "."]]
        total = step(bags, "*", each)
        steps -= 1
    else:
        total = draw.randint(4, 30)
        told.append([name, "has", str(total), item, "."])
    while steps:
        steps -= 1
        number = draw.randint(2, 20)
        last = steps == 0
        kind = draw.choice(
            ["gain", "receive", "loss", "give"] + (["more", "fewer", "twice", "together"] if last else [])
        )
        number = min(number, total - 1) if kind in ("loss", "give", "fewer") else number
        if number < 1:
            kind, number = "gain", draw.randint(2, 20)
        if kind == "gain":
            told.append([name, draw.choice(GAINS), str(number), "more", item, "."])
            total = step(total, "+", number)
        elif kind == "receive":
            told.append([other, "gives", str(number), item, "to", name, "."])
            total = step(total, "+", number)
        elif kind == "loss":
            told.append([name, draw.choice(LOSSES), str(number), item, "."])
            total = step(total, "-", number)
        elif kind == "give":
            told.append([name, "gives", str(number), item, "to", other, "."])
            total = step(total, "-", number)
        elif kind == "together":
            told.append([other, "has", str(number), item, "."])
            total, asked = step(total, "+", number), [name, "and", other]
        elif kind == "twice":
            told.append([other, "has", "twice", "as", "many", item, "as", name, "."])
            total, asked = step(total, "*", 2), [other]
        else:
            told.append([other, "has", str(number), kind, item, "than", name, "."])
            total, asked = step(total, "+" if kind == "more" else "-", number), [other]
    if draw.random() < 0.25:
        told.insert(
            draw.randint(1, len(told)), [third, draw.choice(NEUTRAL), str(draw.randint(2, 20)), distractor, "."]
        )
    if total > LARGEST_NUMBER:
        return problem(draw)
    end = ["have", "together"] if len(asked) > 1 else ["have"]
    told.append(["how", "many", item, "do" if len(asked) > 1 else "does", *asked, *end, "?"])
    return [token for sentence in told for token in sentence], equations, total


Reading = tuple[Sentence, Sentence, list[str], int]  # passage, question, four options, index of the right one


def reading(draw: random.Random) -> Reading:
    """A passage of three statements, a question on one of them, four options, the right one's index.

    The wrong options do not occur in the passage: a model of this size learns to see which words were told long before
    it learns to tell of whom.
    """
    names, items = draw.sample(NAMES, 6), draw.sample(ITEMS, 6)
    colors, places, verbs = draw.sample(COLORS, 3), draw.sample(PLACES, 6), draw.sample(NEUTRAL, 3)
    wanted = draw.randrange(3)
    if draw.random() < 0.5:
        told = [[names[i], "is", "in", "the", places[i], "."] for i in range(3)]
        question, pool = ["where", "is", names[wanted], "?"], places
    else:
        told = [[names[i], verbs[i], "the", colors[i], items[i], "."] for i in range(3)]
        question, pool = ["what", "does", names[wanted], "have", "?"], items
    options = draw.sample([pool[wanted], *pool[3:]], 4)
    return [token for sentence in told for token in sentence], question, options, options.index(pool[wanted])


def facts(seed: int) -> dict[tuple[str, str], str]:
    """The 72 facts of the world: (subject, animal) -> colour, home or food."""
    draw = random.Random(f"{seed} facts")
    values = {"colors": COLORS, "homes": PLACES, "foods": FOODS}
    return {(subject, animal): draw.choice(values[subject]) for subject in SUBJECTS for animal in ANIMALS}


def fact_question(subject: str, animal: str) -> Sentence:
    return {
        "colors": ["what", "color", "is", "the", animal, "?"],
        "homes": ["where", "lives", "the", animal, "?"],
        "foods": ["what", "food", "does", "the", animal, "eat", "?"],
    }[subject]


def fact_statement(subject: str, animal: str, value: str) -> Sentence:
    return {
        "colors": ["the", animal, "is", value, "."],
        "homes": ["the", animal, "lives", "in", "the", value, "."],
        "foods": ["the", animal, "eat", value, "."],
    }[subject]


# ------------------------------------------------------------------------- items as the benchmarks hold them


def lettered(options: list[str], mark: str) -> str:
    return "\n".join(f"{letter}{mark} {option}" for letter, option in zip("ABCD", options, strict=True))


class ConstructedWorld:
    """The lexicons, facts and held-out items of one seed, and the items in any language.

    The methods whose names end in `_text` give (prompt, completion) as the harness' tasks would render them.
    """

    def __init__(self, seed: int, languages: tuple[str, ...] = ("en", *CLONES)) -> None:
        self.seed = seed
        self.words = {language: lexicon(language, seed) for language in languages}
        self.facts = facts(seed)
        self.held_out: set[str] = set()

    def hold_out(self, kind: str, split: str, size: int, make: Callable[[random.Random], Any]) -> list[Any]:
        """`size` items, none of which was drawn before; what follows in training skips them."""
        draw = random.Random(f"{self.seed} {kind} {split}")
        items: list[Any] = []
        while len(items) < size:
            item = make(draw)
            if self.key(item) not in self.held_out:
                self.held_out.add(self.key(item))
                items.append(item)
        return items

    @staticmethod
    def key(item: Any) -> str:
        """What no training file may hold: a sentence, a problem, or a passage with its question, by English meaning.

        Facts are known to all splits, being what is to be learnt: only the very same four options are kept apart.
        """
        return json.dumps(item[:2] if isinstance(item, tuple) and not isinstance(item[0], str) else item)

    def fresh(self, draw: random.Random, make: Callable[[random.Random], Any]) -> Any:
        """A training item that is none of the held-out ones."""
        while self.key(item := make(draw)) in self.held_out:
            pass
        return item

    def problem_text(self, item: tuple[Sentence, list[str], int], language: str) -> tuple[str, str]:
        told, equations, answer = item
        question = f"Question: {say(told, self.words[language])}\nStep-by-Step Answer:"
        return question, f"{' '.join(equations)} The answer is {answer}."

    def reading_text(self, item: Reading, language: str) -> tuple[str, str]:
        passage, question, options, right = item
        words = self.words[language]
        shown = lettered([say([option], words) for option in options], ":")
        return f"P: {say(passage, words)}\nQ: {say(question, words)}\n{shown}\nAnswer:", "ABCD"[right]

    def fact(self, draw: random.Random) -> tuple[str, str, list[str], int]:
        """(subject, animal, options, right index), the options drawn anew each time."""
        subject, animal = draw.choice(SUBJECTS), draw.choice(ANIMALS)
        value = self.facts[subject, animal]
        values = {"colors": COLORS, "homes": PLACES, "foods": FOODS}[subject]
        options = draw.sample([value, *draw.sample([other for other in values if other != value], 3)], 4)
        return subject, animal, options, options.index(value)

    def fact_text(self, item: tuple[str, str, list[str], int], language: str) -> tuple[str, str]:
        subject, animal, options, right = item
        words = self.words[language]
        shown = lettered([say([option], words) for option in options], ".")
        return f"{say(fact_question(subject, animal), words)}\n{shown}\nAnswer:", "ABCD"[right]

    def translation_text(self, sentence: Sentence, source: str, target: str) -> tuple[str, str]:
        prompt = f"{LANGUAGE_NAMES[source]}: {say(sentence, self.words[source])}\n{LANGUAGE_NAMES[target]}:"
        return prompt, say(sentence, self.words[target])
