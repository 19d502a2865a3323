"""The world: languages, sentences, problems, passages, facts, and held-out items."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import chain, product
from typing import Any

CLONES = ("qaa", "qab", "qac")
LANGUAGE_NAMES = {"en": "English", "qaa": "Qaa", "qab": "Qab", "qac": "Qac"}

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
FACT_VALUES = {"colors": COLORS, "homes": PLACES, "foods": FOODS}
SUBJECTS = tuple(FACT_VALUES)
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
LARGEST_NUMBER = 99  # Each number up to this is one token.
STEPS = (0.3, 0.4, 0.3)  # shares of word problems of one, two and three steps, in every set
LARGEST_RESULT = 40  # limit for each step of a problem
# Each benchmark and split reserves this many items, even if fewer items are written.
POOL = 2000
ENGLISH_SYLLABLES = {"to", "do", "me", "no", "be"}


def syllables_of(consonants: str) -> list[str]:
    """Return the syllables with these consonants that are not English words."""
    pairs = [consonant + vowel for consonant, vowel in product(consonants, "aeiou")]
    return [syllable for syllable in pairs if syllable not in ENGLISH_SYLLABLES]


SYLLABLES = syllables_of("bdfgklmnprstvz")
QAC_SYLLABLES = syllables_of("hjqwxcy")  # only qac is written with these

# English words, names, numbers and punctuation: the meaning that all languages share
Sentence = list[str]


# --- languages ---


def draw_lexicon(language: str, seed: int) -> dict[str, str]:
    """Return English word -> word of the language.

    A word of a clone has two syllables. No word is in two languages or has two meanings.
    """
    if language == "en":
        return {word: word for word in WORDS}
    if language == "qac":
        qac_words = [first + second for first, second in product(QAC_SYLLABLES, repeat=2)]
        drawn = random.Random(f"{seed} lexicon of qac").sample(qac_words, len(WORDS))
        return dict(zip(WORDS, drawn, strict=True))
    shared = [first + second for first, second in product(SYLLABLES, repeat=2)]
    candidates = [word for word in shared if word not in WORDS]
    drawn = random.Random(f"{seed} lexicons").sample(candidates, 2 * len(WORDS))
    begin = CLONES.index(language) * len(WORDS)
    own = drawn[begin : begin + len(WORDS)]
    return dict(zip(WORDS, own, strict=True))


class Switched:
    """English and other languages mixed at random: every look-up of a word draws its language."""

    def __init__(self, others: list[dict[str, str]], draw: random.Random) -> None:
        self.languages: list[dict[str, str]] = [{}, *others]
        self.draw = draw

    def get(self, word: str, default: str) -> str:
        return self.draw.choice(self.languages).get(word, default)


Words = dict[str, str] | Switched  # English word -> its translation


def say(sentence: Sentence, words: Words) -> str:
    """Return the sentence as text in the words of one or two languages."""
    text = ""
    for token in sentence:
        if text and token not in PUNCTUATION:
            text += " "
        text += words.get(token, token)
    return text


# --- sentences ---


STATEMENTS = (
    "{name} {verb} the {color} {item} .",
    "{name} is in the {place} .",
    "{name} has {number} {item} in the {place_of_items} .",
    "{name} {gain} {number} {item} {end} .",
    "{name} {loss} {number} {item} {end} .",
    "{name} {verb_of_number} {number} {item} {end} .",
    "{name} gives {number} {item} to {second} .",
    "{name} and {second} have {number} {color_of_items} {item} together .",
    "{second} has twice as many {item} as {name} .",
    "{second} has {number} {comparison} {item} than {name} .",
    "each bag of {name} has {number} {item} .",
    "{name} has {number} bags and {verb_of_animal} a {animal} .",
    "how many {item} does {name} have now ?",
    "how many {item} do {name} and {second} have together ?",
)
# The words that only some statements use. All are drawn for every statement, in this order:
# fewer or reordered draws would change the world of a seed.
STATEMENT_WORDS = {
    "verb": NEUTRAL,
    "color": COLORS,
    "place": PLACES,
    "place_of_items": PLACES,
    "gain": GAINS,
    "loss": LOSSES,
    "verb_of_number": NEUTRAL,
    "color_of_items": COLORS,
    "comparison": ["more", "fewer"],
    "verb_of_animal": NEUTRAL,
    "animal": ANIMALS,
}


def draw_statement(draw: random.Random) -> Sentence:
    """Draw one sentence about a person, without a calculation. It may have numbers."""
    name, second = draw.sample(NAMES, 2)
    words = {"name": name, "second": second}
    words["item"] = draw.choice(ITEMS)
    words["number"] = str(draw.randint(2, 40))
    inside = f"in the {draw.choice(PLACES)}"
    outside = f"near the {draw.choice(PLACES)}"
    words["end"] = draw.choice(["", "today", inside, outside])
    for word, candidates in STATEMENT_WORDS.items():
        words[word] = draw.choice(candidates)
    return draw.choice(STATEMENTS).format(**words).split()


def draw_sentences(draw: random.Random) -> Sentence:
    """Draw two statements, which are translated together."""
    return draw_statement(draw) + draw_statement(draw)


def compute(left: int, sign: str, right: int) -> int:
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    return left * right


class Story:
    """A word problem that is being drawn.

    Attributes:
        sentences: the statements, then the question.
        equations: the steps as text.
        results: the result of each step.
        total: the answer to the question.
        owners: the people that the question is about.
    """

    def __init__(self, name: str, second: str, item: str) -> None:
        self.name, self.second, self.item = name, second, item
        self.sentences: list[Sentence] = []
        self.equations: list[str] = []
        self.results: list[int] = []
        self.total = 0
        self.owners: Sentence = [name]

    def tell(self, sentence: str) -> None:
        self.sentences.append([*sentence.split(), "."])

    def calculate(self, sign: str, number: int) -> None:
        result = compute(self.total, sign, number)
        self.equations.append(f"{self.total} {sign} {number} = {result}.")
        self.results.append(result)
        self.total = result

    def begin_with_bags(self, bags: int, in_each_bag: int) -> None:
        self.tell(f"{self.name} has {bags} bags")
        self.tell(f"each bag has {in_each_bag} {self.item}")
        self.total = bags
        self.calculate("*", in_each_bag)

    def begin_with_items(self, number: int) -> None:
        self.tell(f"{self.name} has {number} {self.item}")
        self.total = number

    def add_step(self, kind: str, number: int, draw: random.Random) -> None:
        name, second, item = self.name, self.second, self.item
        if kind == "gain":
            verb = draw.choice(GAINS)
            self.tell(f"{name} {verb} {number} {item}")
            self.calculate("+", number)
        elif kind == "receive":
            self.tell(f"{second} gives {number} {item} to {name}")
            self.calculate("+", number)
        elif kind == "loss":
            verb = draw.choice(LOSSES)
            self.tell(f"{name} {verb} {number} {item}")
            self.calculate("-", number)
        elif kind == "give":
            self.tell(f"{name} gives {number} {item} to {second}")
            self.calculate("-", number)
        elif kind == "together":
            self.tell(f"{second} has {number} {item}")
            self.calculate("+", number)
            self.owners = [name, "and", second]
        elif kind == "twice":
            self.tell(f"{second} has twice as many {item} as {name}")
            self.calculate("*", 2)
            self.owners = [second]
        else:
            self.tell(f"{second} has {number} {kind} {item} than {name}")
            signs = {"more": "+", "fewer": "-"}
            self.calculate(signs[kind], number)
            self.owners = [second]

    def ask(self) -> None:
        if len(self.owners) > 1:
            verb, end = "do", ["have", "together", "?"]
        else:
            verb, end = "does", ["have", "?"]
        self.sentences.append(["how", "many", self.item, verb, *self.owners, *end])


def draw_problem(draw: random.Random) -> tuple[Sentence, list[str], int]:
    """Draw a word problem: (sentences, steps as equations, answer).

    The verb decides whether a number is added, taken away or left out. All sentences have one form,
    so a reader who does not know the words cannot solve the problem.
    """
    name, second, third = draw.sample(NAMES, 3)
    item, distractor = draw.sample(ITEMS, 2)
    steps = draw.choices(range(1, 1 + len(STEPS)), STEPS)[0]
    story = Story(name, second, item)
    if steps > 1 and draw.random() < 0.2:
        story.begin_with_bags(draw.randint(2, 4), draw.randint(2, 8))
        steps -= 1
    else:
        story.begin_with_items(draw.randint(4, 24))
    for left in reversed(range(steps)):
        number = draw.randint(2, 12)
        kinds = ["gain", "gain", "loss", "loss", "receive", "give"]
        # These steps change the owner, so they can only come last.
        if left == 0:
            kinds += ["more", "fewer", "twice", "together"]
        kind = draw.choice(kinds)
        if kind in ("loss", "give", "fewer"):
            number = min(number, story.total - 1)
        if number < 1:
            kind, number = "gain", draw.randint(2, 12)
        if draw.random() < 0.2:
            verb, count = draw.choice(NEUTRAL), draw.randint(2, 15)
            story.tell(f"{name} {verb} {count} {item}")
        story.add_step(kind, number, draw)
    if draw.random() < 0.15:
        place = draw.randint(1, len(story.sentences))
        verb, count = draw.choice(NEUTRAL), draw.randint(2, 15)
        story.sentences.insert(place, [third, verb, str(count), distractor, "."])
    if max(story.results) > LARGEST_RESULT:
        return draw_problem(draw)
    story.ask()
    return list(chain.from_iterable(story.sentences)), story.equations, story.total


# passage, question, four options, index of the right option
Reading = tuple[Sentence, Sentence, list[str], int]


def draw_reading(draw: random.Random) -> Reading:
    """Draw a passage of three statements, a question about one, and four options.

    The index of the right option is last. The wrong options do not occur in the passage: a model of
    this size learns to see which words occur long before it learns whom they are about.
    """
    names = draw.sample(NAMES, 6)
    items = draw.sample(ITEMS, 6)
    colors = draw.sample(COLORS, 3)
    places = draw.sample(PLACES, 6)
    verbs = draw.sample(NEUTRAL, 3)
    chosen = draw.randrange(3)
    passage: Sentence = []
    if draw.random() < 0.5:
        for i in range(3):
            passage += [names[i], "is", "in", "the", places[i], "."]
        question, pool = ["where", "is", names[chosen], "?"], places
    else:
        for i in range(3):
            passage += [names[i], verbs[i], "the", colors[i], items[i], "."]
        question, pool = ["what", "does", names[chosen], "have", "?"], items
    right = pool[chosen]
    options = draw.sample([right, *pool[3:]], 4)
    return passage, question, options, options.index(right)


def draw_facts(seed: int) -> dict[tuple[str, str], str]:
    """Return the 72 facts of the world: (subject, animal) -> colour, home or food."""
    draw = random.Random(f"{seed} facts")
    found = {}
    for subject in SUBJECTS:
        for animal in ANIMALS:
            found[subject, animal] = draw.choice(FACT_VALUES[subject])
    return found


def fact_question(subject: str, animal: str) -> Sentence:
    if subject == "colors":
        return ["what", "color", "is", "the", animal, "?"]
    if subject == "homes":
        return ["where", "lives", "the", animal, "?"]
    return ["what", "food", "does", "the", animal, "eat", "?"]


def fact_statement(subject: str, animal: str, value: str) -> Sentence:
    if subject == "colors":
        return ["the", animal, "is", value, "."]
    if subject == "homes":
        return ["the", animal, "lives", "in", "the", value, "."]
    return ["the", animal, "eat", value, "."]


# --- items as the benchmarks hold them ---


class ConstructedWorld:
    """The lexicons, facts and held-out items of one seed, and the items in any language.

    The methods whose names end in `_text` return (prompt, completion) in the form of the harness'
    tasks. Answers are words, not letters.
    """

    def __init__(self, seed: int, languages: tuple[str, ...] = ("en", *CLONES)) -> None:
        self.seed = seed
        self.words = {language: draw_lexicon(language, seed) for language in languages}
        self.facts = draw_facts(seed)
        self.held_out: set[str] = set()

    def hold_out(
        self, kind: str, split: str, size: int, make: Callable[[random.Random], Any]
    ) -> list[Any]:
        """Draw `size` new items, and reserve them so that later training items differ from them."""
        draw = random.Random(f"{self.seed} {kind} {split}")
        items: list[Any] = []
        while len(items) < size:
            item = self.fresh(draw, make)
            self.held_out.add(self.key(item))
            items.append(item)
        return items

    @staticmethod
    def key(item: Any) -> str:
        """Return the English meaning that no training file may contain, as JSON.

        This is a sentence, a problem, or a passage with its question. Facts are the same in all
        splits, because they should be learnt: only the same four options are kept apart.
        """
        # Problems and passages begin with a sentence, facts and sentences with a word.
        if isinstance(item[0], list):
            item = item[:2]
        return json.dumps(item)

    def fresh(self, draw: random.Random, make: Callable[[random.Random], Any]) -> Any:
        """Draw an item that is not held out."""
        while True:
            item = make(draw)
            if self.key(item) not in self.held_out:
                return item

    def problem_text(self, item: tuple[Sentence, list[str], int], words: Words) -> tuple[str, str]:
        tokens, equations, answer = item
        question = f"Question: {say(tokens, words)}\nStep-by-Step Answer:"
        return question, f"{' '.join(equations)} The answer is {answer}."

    def bare_text(self, item: tuple[Sentence, list[str], int], words: Words) -> tuple[str, str]:
        """Return a problem and its answer without the steps. The prompt is `problem_text`'s."""
        prompt, _ = self.problem_text(item, words)
        return prompt, f"The answer is {item[2]}."

    def reading_text(
        self, item: Reading, words: Words, answer_words: Words | None = None
    ) -> tuple[str, str]:
        """Return a passage with its question, and the answer in `answer_words` if given."""
        passage, question, options, right = item
        prompt = f"P: {say(passage, words)}\nQ: {say(question, words)}\nAnswer:"
        answer = say([options[right]], answer_words or words)
        return prompt, answer

    def fact(self, draw: random.Random) -> tuple[str, str, list[str], int]:
        """Draw a fact's question: (subject, animal, new options, index of the right option)."""
        subject, animal = draw.choice(SUBJECTS), draw.choice(ANIMALS)
        value = self.facts[subject, animal]
        others = FACT_VALUES[subject].copy()
        others.remove(value)
        wrong = draw.sample(others, 3)
        options = draw.sample([value, *wrong], 4)
        return subject, animal, options, options.index(value)

    def fact_text(self, item: tuple[str, str, list[str], int], words: Words) -> tuple[str, str]:
        subject, animal, options, right = item
        question = say(fact_question(subject, animal), words)
        answer = say([options[right]], words)
        return f"{question}\nAnswer:", answer

    def translation_text(self, sentence: Sentence, source: str, target: str) -> tuple[str, str]:
        said = say(sentence, self.words[source])
        prompt = f"{LANGUAGE_NAMES[source]}: {said}\n{LANGUAGE_NAMES[target]}:"
        return prompt, say(sentence, self.words[target])
