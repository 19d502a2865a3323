"""The world: languages, sentences, problems, passages, facts, and held-out items."""

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
    "apples balls books boxes cups coins cards cakes pens hats stones shells flowers leaves eggs"
    " keys lamps rings drums kites"
).split()
ANIMALS = (
    "fox cat dog horse cow duck frog bear wolf mouse owl crow goat sheep snake whale shark deer"
    " lion tiger bee ant crab snail"
).split()
COLORS = "red blue green yellow black white brown gray".split()
PLACES = "park school house garden shop forest river market".split()
FOODS = "grass fish corn rice bread honey fruit milk".split()
GAINS = "finds buys gets picks wins makes earns takes grows catches borrows collects".split()
LOSSES = "loses sells eats drops breaks throws burns spends wastes ruins returns donates".split()
NEUTRAL = "sees likes draws cleans counts holds paints wants washes checks shows hides".split()
FUNCTION_WORDS = (
    "has have the a in at and more fewer than twice as many how does do who what where which is"
    " color of lives eat each bag bags together to gives now then today there all with near food"
).split()
CONTENT_WORDS = (ITEMS, ANIMALS, COLORS, PLACES, FOODS, GAINS, LOSSES, NEUTRAL)
WORDS = list(
    dict.fromkeys(
        ITEMS + ANIMALS + COLORS + PLACES + FOODS + GAINS + LOSSES + NEUTRAL + FUNCTION_WORDS
    )
)
LABELS = "Question Step-by-Step Answer P Q A B C D English Qaa Qab Qac The answer Mixed".split()
PUNCTUATION = list(".,?:+-*=!;()'\"/") + ["\n"]
LARGEST_NUMBER = 99  # that is one token
STEPS = (0.3, 0.4, 0.3)  # shares of word problems of one, two and three steps, in every set
LARGEST_RESULT = 40  # of a step of a problem
# items a benchmark and split that no training file may hold, however many of them are written
POOL = 2000
SYLLABLES = [
    c + v
    for c, v in product("bdfgklmnprstvz", "aeiou")
    if c + v not in {"to", "do", "me", "no", "be"}
]
QAC_SYLLABLES = [c + v for c, v in product("hjqwxcy", "aeiou")]  # qac has a script of its own

Sentence = list[
    str
]  # English words, names, numbers and punctuation; the meaning that every language shares


# --- languages ---


def draw_lexicon(language: str, seed: int) -> dict[str, str]:
    """Return English word -> word of the language.

    A word of a clone has two syllables. No word is in two languages or has two meanings.
    """
    if language == "en":
        return {word: word for word in WORDS}
    if language == "qac":
        own = [first + second for first, second in product(QAC_SYLLABLES, QAC_SYLLABLES)]
        drawn = random.Random(f"{seed} lexicon of qac").sample(own, len(WORDS))
        return dict(zip(WORDS, drawn, strict=True))
    shared = [first + second for first, second in product(SYLLABLES, SYLLABLES)]
    candidates = [word for word in shared if word not in WORDS]
    drawn = random.Random(f"{seed} lexicons").sample(candidates, 2 * len(WORDS))
    first_word = CLONES.index(language) * len(WORDS)
    return dict(zip(WORDS, drawn[first_word : first_word + len(WORDS)], strict=True))


class Switched:
    """Words of English and of other languages mixed.

    Each time, chance decides the language of a word.
    """

    def __init__(self, others: list[dict[str, str]], draw: random.Random) -> None:
        self.languages: list[dict[str, str]] = [{}, *others]
        self.draw = draw

    def get(self, word: str, default: str) -> str:
        return self.draw.choice(self.languages).get(word, default)


Words = dict[str, str] | Switched  # English word -> word to be said


def say(sentence: Sentence, words: Words) -> str:
    """Return the sentence as text in the words of one or two languages."""
    text = ""
    for token in sentence:
        text += ("" if not text or token in PUNCTUATION else " ") + words.get(token, token)
    return text


# --- sentences ---


def draw_statement(draw: random.Random) -> Sentence:
    """One sentence that tells something of somebody; numbers may occur, nothing is asked."""
    name, second = draw.sample(NAMES, 2)
    item, number = draw.choice(ITEMS), str(draw.randint(2, 40))
    end = draw.choice(
        [[], ["today"], ["in", "the", draw.choice(PLACES)], ["near", "the", draw.choice(PLACES)]]
    )
    return draw.choice(
        [
            [name, draw.choice(NEUTRAL), "the", draw.choice(COLORS), item, "."],
            [name, "is", "in", "the", draw.choice(PLACES), "."],
            [name, "has", number, item, "in", "the", draw.choice(PLACES), "."],
            [name, draw.choice(GAINS), number, item, *end, "."],
            [name, draw.choice(LOSSES), number, item, *end, "."],
            [name, draw.choice(NEUTRAL), number, item, *end, "."],
            [name, "gives", number, item, "to", second, "."],
            [name, "and", second, "have", number, draw.choice(COLORS), item, "together", "."],
            [second, "has", "twice", "as", "many", item, "as", name, "."],
            [second, "has", number, draw.choice(["more", "fewer"]), item, "than", name, "."],
            ["each", "bag", "of", name, "has", number, item, "."],
            [
                name,
                "has",
                number,
                "bags",
                "and",
                draw.choice(NEUTRAL),
                "a",
                draw.choice(ANIMALS),
                ".",
            ],
            ["how", "many", item, "does", name, "have", "now", "?"],
            ["how", "many", item, "do", name, "and", second, "have", "together", "?"],
        ]
    )


def draw_sentences(draw: random.Random) -> Sentence:
    """Two statements: what is translated."""
    return draw_statement(draw) + draw_statement(draw)


def draw_problem(draw: random.Random) -> tuple[Sentence, list[str], int]:
    """Draw a word problem: (sentences, the steps as equations, the answer).

    The verb decides whether a number is added, taken away or left out. All sentences have one form,
    so a reader who does not know the words cannot solve the problem.
    """
    name, second, third = draw.sample(NAMES, 3)
    item, distractor = draw.sample(ITEMS, 2)
    steps = draw.choices(range(1, 1 + len(STEPS)), STEPS)[0]
    sentences: list[Sentence] = []
    equations: list[str] = []
    results: list[int] = []

    def add_step(left: int, sign: str, right: int) -> int:
        results.append({"+": left + right, "-": left - right, "*": left * right}[sign])
        equations.append(f"{left} {sign} {right} = {results[-1]}.")
        return results[-1]

    owners: Sentence = [name]
    if steps > 1 and draw.random() < 0.2:
        bags, in_each_bag = draw.randint(2, 4), draw.randint(2, 8)
        sentences += [
            [name, "has", str(bags), "bags", "."],
            ["each", "bag", "has", str(in_each_bag), item, "."],
        ]
        total = add_step(bags, "*", in_each_bag)
        steps -= 1
    else:
        total = draw.randint(4, 24)
        sentences.append([name, "has", str(total), item, "."])
    while steps:
        steps -= 1
        number = draw.randint(2, 12)
        kinds = ["gain", "gain", "loss", "loss", "receive", "give"]
        kind = draw.choice(kinds + (["more", "fewer", "twice", "together"] if steps == 0 else []))
        if kind in ("loss", "give", "fewer"):
            number = min(number, total - 1)
        if number < 1:
            kind, number = "gain", draw.randint(2, 12)
        if draw.random() < 0.2:
            sentences.append([name, draw.choice(NEUTRAL), str(draw.randint(2, 15)), item, "."])
        if kind == "gain":
            sentences.append([name, draw.choice(GAINS), str(number), item, "."])
            total = add_step(total, "+", number)
        elif kind == "receive":
            sentences.append([second, "gives", str(number), item, "to", name, "."])
            total = add_step(total, "+", number)
        elif kind == "loss":
            sentences.append([name, draw.choice(LOSSES), str(number), item, "."])
            total = add_step(total, "-", number)
        elif kind == "give":
            sentences.append([name, "gives", str(number), item, "to", second, "."])
            total = add_step(total, "-", number)
        elif kind == "together":
            sentences.append([second, "has", str(number), item, "."])
            total, owners = add_step(total, "+", number), [name, "and", second]
        elif kind == "twice":
            sentences.append([second, "has", "twice", "as", "many", item, "as", name, "."])
            total, owners = add_step(total, "*", 2), [second]
        else:
            sentences.append([second, "has", str(number), kind, item, "than", name, "."])
            total, owners = add_step(total, "+" if kind == "more" else "-", number), [second]
    if draw.random() < 0.15:
        sentences.insert(
            draw.randint(1, len(sentences)),
            [third, draw.choice(NEUTRAL), str(draw.randint(2, 15)), distractor, "."],
        )
    if max(results) > LARGEST_RESULT:
        return draw_problem(draw)
    if len(owners) > 1:
        end = ["have", "together"]
    else:
        end = ["have"]
    sentences.append(["how", "many", item, "do" if len(owners) > 1 else "does", *owners, *end, "?"])
    return [token for sentence in sentences for token in sentence], equations, total


Reading = tuple[
    Sentence, Sentence, list[str], int
]  # passage, question, four options, index of the right one


def draw_reading(draw: random.Random) -> Reading:
    """Draw a passage of three statements, a question about one, and four options.

    The index of the right option is last. The wrong options do not occur in the passage: a model of
    this size learns to see which words occur long before it learns whom they are about.
    """
    names, items = draw.sample(NAMES, 6), draw.sample(ITEMS, 6)
    colors, places, verbs = draw.sample(COLORS, 3), draw.sample(PLACES, 6), draw.sample(NEUTRAL, 3)
    chosen_index = draw.randrange(3)
    if draw.random() < 0.5:
        sentences = [[names[i], "is", "in", "the", places[i], "."] for i in range(3)]
        question, pool = ["where", "is", names[chosen_index], "?"], places
    else:
        sentences = [[names[i], verbs[i], "the", colors[i], items[i], "."] for i in range(3)]
        question, pool = ["what", "does", names[chosen_index], "have", "?"], items
    options = draw.sample([pool[chosen_index], *pool[3:]], 4)
    return (
        [token for sentence in sentences for token in sentence],
        question,
        options,
        options.index(pool[chosen_index]),
    )


def draw_facts(seed: int) -> dict[tuple[str, str], str]:
    """Return the 72 facts of the world: (subject, animal) -> colour, home or food."""
    draw = random.Random(f"{seed} facts")
    values = {"colors": COLORS, "homes": PLACES, "foods": FOODS}
    found = {}
    for subject in SUBJECTS:
        for animal in ANIMALS:
            found[(subject, animal)] = draw.choice(values[subject])
    return found


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


# --- items as the benchmarks hold them ---


class ConstructedWorld:
    """The lexicons, facts and held-out items of one seed, and the items in any language.

    The methods whose names end in `_text` give (prompt, completion) as the harness' tasks would
    render them, answers in words and not by their letters.
    """

    def __init__(self, seed: int, languages: tuple[str, ...] = ("en", *CLONES)) -> None:
        self.seed = seed
        self.words = {language: draw_lexicon(language, seed) for language in languages}
        self.facts = draw_facts(seed)
        self.held_out: set[str] = set()

    def hold_out(
        self, kind: str, split: str, size: int, make: Callable[[random.Random], Any]
    ) -> list[Any]:
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
        """Return what no training file may hold, by its English meaning.

        This is a sentence, a problem, or a passage with its question. Facts are the same in all
        splits, because they should be learnt: only the same four options are kept apart.
        """
        return json.dumps(
            item[:2] if isinstance(item, tuple) and not isinstance(item[0], str) else item
        )

    def fresh(self, draw: random.Random, make: Callable[[random.Random], Any]) -> Any:
        """Draw a training item that is not held out."""
        while self.key(item := make(draw)) in self.held_out:
            pass
        return item

    def problem_text(self, item: tuple[Sentence, list[str], int], words: Words) -> tuple[str, str]:
        tokens, equations, answer = item
        question = f"Question: {say(tokens, words)}\nStep-by-Step Answer:"
        return question, f"{' '.join(equations)} The answer is {answer}."

    def bare_text(self, item: tuple[Sentence, list[str], int], words: Words) -> tuple[str, str]:
        """Return a problem with its answer alone, after the same prompt as in `problem_text`."""
        return self.problem_text(item, words)[0], f"The answer is {item[2]}."

    def reading_text(
        self, item: Reading, words: Words, answer_words: Words | None = None
    ) -> tuple[str, str]:
        """`own`: the words of the answer, where those of the passage are mixed."""
        passage, question, options, right = item
        return f"P: {say(passage, words)}\nQ: {say(question, words)}\nAnswer:", say(
            [options[right]], answer_words or words
        )

    def fact(self, draw: random.Random) -> tuple[str, str, list[str], int]:
        """(subject, animal, options, right index), the options drawn anew each time."""
        subject, animal = draw.choice(SUBJECTS), draw.choice(ANIMALS)
        value = self.facts[subject, animal]
        values = {"colors": COLORS, "homes": PLACES, "foods": FOODS}[subject]
        options = draw.sample(
            [value, *draw.sample([wrong for wrong in values if wrong != value], 3)], 4
        )
        return subject, animal, options, options.index(value)

    def fact_text(self, item: tuple[str, str, list[str], int], words: Words) -> tuple[str, str]:
        subject, animal, options, right = item
        return f"{say(fact_question(subject, animal), words)}\nAnswer:", say(
            [options[right]], words
        )

    def translation_text(self, sentence: Sentence, source: str, target: str) -> tuple[str, str]:
        prompt = (
            f"{LANGUAGE_NAMES[source]}:"
            f" {say(sentence, self.words[source])}\n{LANGUAGE_NAMES[target]}:"
        )
        return prompt, say(sentence, self.words[target])
