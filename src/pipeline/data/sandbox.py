"""The small world: a constructed world with known truth, in the files and schemas of the real data.

English-like text and three clone languages (qaa, qab, qac: high, medium, low resource) that share grammar, names,
digits and punctuation with it and nothing else: each English word stands for one word of two syllables a clone.
Everything is a function of the seed. `write` makes a folder laid out as any `data_root`:

    mgsm/{lang}/{train,dev,test}.jsonl           8 worked exemplars; word problems of one to three steps
    belebele/{lang}/{dev,test}.jsonl             four-way reading comprehension
    global_mmlu/{lang}/{exemplars,dev,test}.jsonl  four-way facts of three subjects (file `dev` of the real set is `exemplars` here)
    flores/{lang}/{dev,devtest}.jsonl            parallel sentences
    orca_math/train.jsonl, aya/train.jsonl       English math; instructions in the clones, with no math
    text/train.jsonl                             plain text that makes the base (only when asked for)
    tokenizer/                                   one token an English word, two a clone word, bytes for the rest
    data_card.md                                 what was written, and what math is where

No development or test item of any benchmark stands in a training file: all are drawn before, and kept apart by their
English meaning, so that no translation of one can slip in either.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

CLONES = ("qaa", "qab", "qac")
LANGUAGE_NAMES = {"en": "English", "qaa": "Qaa", "qab": "Qab", "qac": "Qac"}
SUBJECTS = ("colors", "homes", "foods")

NAMES = "Mia Tom Ana Sam Leo Eva Ben Ida Max Zoe Kim Ned".split()
ITEMS = (
    "apples balls books boxes cups coins cards cakes pens hats stones shells flowers leaves eggs keys lamps rings drums kites"
).split()
ANIMALS = (
    "fox cat dog horse cow duck frog bear wolf mouse owl crow goat sheep snake whale shark deer lion tiger bee ant crab snail"
).split()
COLORS = "red blue green yellow black white brown gray".split()
PLACES = "park school house garden shop forest river market".split()
FOODS = "grass fish corn rice bread honey fruit milk".split()
GAINS = "finds buys gets picks wins makes".split()
LOSSES = "loses sells eats drops breaks throws".split()
NEUTRAL = "sees likes draws cleans counts holds".split()
FUNCTION_WORDS = (
    "has have the a in at and more fewer than twice as many how does do who what where which is color of lives eat "
    "each bag bags together to gives now then today there all with near food"
).split()
WORDS = list(dict.fromkeys(ITEMS + ANIMALS + COLORS + PLACES + FOODS + GAINS + LOSSES + NEUTRAL + FUNCTION_WORDS))
LABELS = "Question Step-by-Step Answer P Q A B C D Reply English Qaa Qab Qac The answer Translate True False".split()
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
        text += token if token in PUNCTUATION or not text else " " + words.get(token, token)
        if len(text) == len(token) and token in words:
            text = words[token]
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
        kind = draw.choice(["gain", "receive", "loss", "give"] + (["more", "fewer", "twice", "together"] if last else []))
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
        told.insert(draw.randint(1, len(told)), [third, draw.choice(NEUTRAL), str(draw.randint(2, 20)), distractor, "."])
    if total > LARGEST_NUMBER:
        return problem(draw)
    end = ["have", "together"] if len(asked) > 1 else ["have"]
    told.append(["how", "many", item, "do" if len(asked) > 1 else "does", *asked, *end, "?"])
    return [token for sentence in told for token in sentence], equations, total


Reading = tuple[Sentence, Sentence, list[str], int]  # passage, question, four options, index of the right one


def passage(draw: random.Random) -> tuple[Sentence, list[tuple[Sentence, str, list[str]]]]:
    """Three statements, and what can be asked of them: (question, answer, wrong options to draw from)."""
    names, items = draw.sample(NAMES, 4), draw.sample(ITEMS, 3)
    colors, places, verbs = draw.sample(COLORS, 4), draw.sample(PLACES, 4), draw.sample(NEUTRAL, 3)
    if draw.random() < 0.3:
        told = [[names[i], "is", "in", "the", places[i], "."] for i in range(3)]
        asked = [(["where", "is", names[i], "?"], places[i], places) for i in range(3)]
    else:
        told = [[names[i], verbs[i], "the", colors[i], items[i], "."] for i in range(3)]
        asked = [(["who", verbs[i], "the", colors[i], items[i], "?"], names[i], names) for i in range(3)]
        asked += [(["what", "color", "of", items[i], "does", names[i], "have", "?"], colors[i], colors) for i in range(3)]
    return [token for sentence in told for token in sentence], asked


def reading(draw: random.Random) -> Reading:
    """A passage of three statements, a question on one of them, four options, the right one's index."""
    told, asked = passage(draw)
    question, right, pool = draw.choice(asked)
    options = draw.sample(pool, 4)
    return told, question, options, options.index(right)


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


# ------------------------------------------------------------------------------------------------ items as the benchmarks hold them


def lettered(options: list[str], mark: str) -> str:
    return "\n".join(f"{letter}{mark} {option}" for letter, option in zip("ABCD", options, strict=True))


class World:
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
        draw, items = random.Random(f"{self.seed} {kind} {split}"), []
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


# ------------------------------------------------------------------------------------------------ training text


def plain_problem(draw: random.Random) -> str:
    """Arithmetic without words, in the form of a solution."""
    _, equations, answer = problem(draw)
    return " ".join(equations) + f" The answer is {answer}."


def drill(draw: random.Random) -> str:
    made = []
    for _ in range(6):
        left, right, sign = draw.randint(2, 60), draw.randint(2, 30), draw.choice("++--*")
        if sign == "*":
            left, right = draw.choice([(draw.randint(2, 5), draw.randint(2, 9)), (draw.randint(2, 49), 2)])
        left, right = (max(left, right), min(left, right)) if sign == "-" else (left, right)
        made.append(f"{left} {sign} {right} = {({'+': left + right, '-': left - right, '*': left * right})[sign]}.")
    return " ".join(made)


def document(world: World, kind: str, language: str, draw: random.Random) -> str:
    """One document of plain text that makes the base. No kind but `problem` holds a word problem with its solution."""
    words = world.words[language]
    if kind == "story":
        return " ".join(say(statement(draw), words) for _ in range(draw.randint(2, 5)))
    if kind in ("reading", "reply"):  # up to three questions on one passage, answered by letter or in words
        return questions(world, kind, language, draw)
    if kind == "letters":  # which letter stands before a word
        options = draw.sample(draw.choice([NAMES, COLORS, PLACES, FOODS, ITEMS]), 4)
        right, shown = draw.randrange(4), lettered([say([option], words) for option in options], draw.choice(":."))
        return f"Q: {say([options[right]], words)}\n{shown}\nAnswer: {'ABCD'[right]}"
    if kind == "echo":  # the same sentence twice
        sentence = say(statement(draw), words)
        return f"{LANGUAGE_NAMES[language]}: {sentence}\n{LANGUAGE_NAMES[language]}: {sentence}"
    if kind == "fact":
        return " ".join(world.fact_text(world.fresh(draw, world.fact), language))
    if kind == "fact_statement":
        pairs = draw.sample(sorted(world.facts), 3)
        return " ".join(say(fact_statement(*pair, world.facts[pair]), words) for pair in pairs)
    if kind == "translation":
        sentence = world.fresh(draw, sentences)
        source, target = draw.sample(["en", language], 2)
        return " ".join(world.translation_text(sentence, source, target))
    if kind == "switched":  # each word in English or the clone
        mixed = {word: draw.choice([word, words[word]]) for word in words}
        return " ".join(say(statement(draw), mixed) for _ in range(draw.randint(2, 4)))
    if kind == "lookup":  # numbers that are told, not computed
        owners, things = draw.sample(NAMES, 3), draw.sample(ITEMS, 3)
        numbers, wanted = draw.sample(range(2, 41), 3), draw.randrange(3)
        told = [say([owners[i], "has", str(numbers[i]), things[i], "."], words) for i in range(3)]
        question = say(["how", "many", things[wanted], "does", owners[wanted], "have", "?"], words)
        return f"P: {' '.join(told)}\nQ: {question}\nReply: {numbers[wanted]}"
    if kind == "problem":
        return " ".join(world.problem_text(world.fresh(draw, problem), language))
    return {"drill": drill, "plain_problem": plain_problem}[kind](draw)


def questions(world: World, kind: str, language: str, draw: random.Random) -> str:
    """A passage with up to three of the questions that can be asked of it; none that a benchmark holds."""
    words = world.words[language]
    told, possible = passage(draw)
    text = f"P: {say(told, words)}"
    for question, right, pool in draw.sample(possible, draw.randint(1, 3)):
        options = draw.sample(pool, 4)
        if world.key((told, question, options, 0)) in world.held_out:
            return questions(world, kind, language, draw)
        text += f"\nQ: {say(question, words)}\n"
        if kind == "reply":
            text += f"Reply: {say([right], words)}"
        else:
            shown = lettered([say([option], words) for option in options], ":")
            text += f"{shown}\nAnswer: {'ABCD'[options.index(right)]}"
    return text


# Share of each kind among the documents of the base's text. Word problems stand in English and qaa only; qac, the
# low-resource target, has one document in forty.
MIX: dict[tuple[str, str], float] = {
    ("en", "story"): 2, ("en", "echo"): 3, ("en", "reading"): 8, ("en", "reply"): 4, ("en", "letters"): 9, ("en", "fact"): 2,
    ("en", "fact_statement"): 1, ("en", "lookup"): 3, ("en", "drill"): 6, ("en", "plain_problem"): 5, ("en", "problem"): 0.4,
    ("qaa", "story"): 1.5, ("qaa", "reading"): 5, ("qaa", "reply"): 3, ("qaa", "letters"): 1.5, ("qaa", "fact"): 1,
    ("qaa", "translation"): 5, ("qaa", "switched"): 6, ("qaa", "lookup"): 1.5, ("qaa", "problem"): 0.2,
    ("qab", "story"): 1, ("qab", "reading"): 3, ("qab", "reply"): 2, ("qab", "letters"): 0.5, ("qab", "fact"): 0.5,
    ("qab", "translation"): 3, ("qab", "switched"): 4, ("qab", "lookup"): 1,
    ("qac", "story"): 0.4, ("qac", "reading"): 0.4, ("qac", "reply"): 0.2, ("qac", "letters"): 0.1, ("qac", "fact"): 0.1,
    ("qac", "translation"): 0.6, ("qac", "switched"): 0.7, ("qac", "lookup"): 0.1,
}  # fmt: skip

# What a language expert is taught, in the clone: reading, facts and translation; no numbers are asked for.
INSTRUCTIONS = {"reading": 30, "fact": 12, "to_english": 26, "from_english": 26, "reply": 6}


def sentences(draw: random.Random) -> Sentence:
    return statement(draw) + statement(draw)


def corpus(world: World, size: int) -> Iterator[dict[str, str]]:
    draw = random.Random(f"{world.seed} corpus")
    for language, kind in draw.choices(list(MIX), list(MIX.values()), k=size):
        yield {"text": document(world, kind, language, draw)}


def instructions(world: World, language: str, size: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(f"{world.seed} instructions {language}")
    for kind in draw.choices(list(INSTRUCTIONS), list(INSTRUCTIONS.values()), k=size):
        if kind == "reading":
            yield world.reading_text(world.fresh(draw, reading), language)
        elif kind == "fact":
            yield world.fact_text(world.fresh(draw, world.fact), language)
        elif kind == "reply":
            told, question, options, right = world.fresh(draw, reading)
            words = world.words[language]
            yield f"P: {say(told, words)}\nQ: {say(question, words)}\nReply:", say([options[right]], words)
        else:
            pair = ("en", language) if kind == "from_english" else (language, "en")
            yield world.translation_text(world.fresh(draw, sentences), *pair)


# ------------------------------------------------------------------------------------------------ tokenizer


def tokenizer() -> Any:
    """A transformers tokenizer: one piece an English word, name, label or number up to 99, two a clone word, bytes else."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    whole = [*WORDS, *NAMES, *LABELS, *map(str, range(LARGEST_NUMBER + 1))]
    pieces = [form for word in dict.fromkeys(whole) for form in ("▁" + word, word)]
    pieces += [form for syllable in SYLLABLES for form in ("▁" + syllable, syllable)]
    pieces += [mark for mark in PUNCTUATION] + ["▁" + mark for mark in "+-*="] + ["▁"]
    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = [(special, 0.0) for special in specials]
    vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocabulary += [(piece, -1.0) for piece in dict.fromkeys(pieces)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ files


def write(folder: Path, config: Any) -> dict[str, int]:
    """The whole world below `folder`, with a data card. Gives the counts that the card states."""
    from pipeline.data.mixture import write_jsonl

    world, counts = World(config.seed), {}

    def put(name: str, rows: list[Any]) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, rows)
        counts[name] = len(rows)

    held = {
        kind: {
            split: world.hold_out(kind, split, POOL, make)[:size]
            for split, size in {"exemplars": 8, "dev": config.dev_items, "test": config.items}.items()
        }
        for kind, make in {"problem": problem, "reading": reading, "fact": world.fact, "sentences": sentences}.items()
    }
    for language in world.words:
        for split, name in {"exemplars": "train", "dev": "dev", "test": "test"}.items():
            put(f"mgsm/{language}/{name}.jsonl", mgsm_rows(world, held["problem"][split], language, split == "exemplars"))
        for split in ("dev", "test"):
            put(f"belebele/{language}/{split}.jsonl", belebele_rows(world, held["reading"][split], language))
            name = {"dev": "dev", "test": "devtest"}[split]
            put(f"flores/{language}/{name}.jsonl", flores_rows(world, held["sentences"][split], language))
        for split, name in {"exemplars": "dev", "dev": "development", "test": "test"}.items():
            put(f"global_mmlu/{language}/{name}.jsonl", mmlu_rows(world, held["fact"][split], language, name))
    put("orca_math/train.jsonl", list(orca_rows(world, config.math_rows)))
    put("aya/train.jsonl", [row for clone in CLONES for row in aya_rows(world, clone, config.language_rows)])
    if config.documents:
        put("text/train.jsonl", list(corpus(world, config.documents)))
    tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "data_card.md").write_text(card(config, counts), encoding="utf-8")
    return counts


def mgsm_rows(world: World, items: list[Any], language: str, worked: bool) -> list[dict[str, Any]]:
    """MGSM's columns: exemplars carry their prefixes and worked answers, problems are bare."""
    rows = []
    for told, equations, answer in items:
        prompt, solution = world.problem_text((told, equations, answer), language)
        question = prompt.removesuffix("\nStep-by-Step Answer:")
        rows.append({
            "question": question if worked else question.removeprefix("Question: "),
            "answer": f"Step-by-Step Answer: {solution}" if worked else None,
            "answer_number": answer,
            "equation_solution": " ".join(equations) if worked else None,
        })  # fmt: skip
    return rows


def belebele_rows(world: World, items: list[Reading], language: str) -> list[dict[str, Any]]:
    words = world.words[language]
    return [
        {
            "link": f"sandbox/{index}",
            "question_number": 1,
            "flores_passage": say(passage, words),
            "question": say(question, words),
            **{f"mc_answer{i + 1}": say([option], words) for i, option in enumerate(options)},
            "correct_answer_num": str(right + 1),
            "dialect": language,
            "ds": "2026-01-01T00:00:00",
        }
        for index, (passage, question, options, right) in enumerate(items)
    ]


def mmlu_rows(world: World, items: list[Any], language: str, split: str) -> list[dict[str, Any]]:
    words = world.words[language]
    return [
        {
            "sample_id": f"{subject}/{split}/{index}",
            "subject": subject,
            "subject_category": "Sandbox",
            "question": say(fact_question(subject, animal), words),
            **{f"option_{letter}": say([option], words) for letter, option in zip("abcd", options, strict=True)},
            "answer": "ABCD"[right],
            **dict.fromkeys(("required_knowledge", "time_sensitive", "reference", "culture", "region", "country"), "[]"),
            "cultural_sensitivity_label": "-",
            "is_annotated": False,
        }
        for index, (subject, animal, options, right) in enumerate(items)
    ]


def flores_rows(world: World, items: list[Sentence], language: str) -> list[dict[str, Any]]:
    same = {"URL": "sandbox", "domain": "sandbox", "topic": "sandbox", "has_image": 0, "has_hyperlink": 0}
    return [{"id": index, **same, "sentence": say(item, world.words[language])} for index, item in enumerate(items, start=1)]


def orca_rows(world: World, size: int) -> Iterator[dict[str, str]]:
    """English word problems. The question carries the benchmark's prefixes, as a 0-shot model must know them."""
    draw = random.Random(f"{world.seed} orca_math")
    for _ in range(size):
        question, answer = world.problem_text(world.fresh(draw, problem), "en")
        yield {"question": question, "answer": answer}


def aya_rows(world: World, clone: str, size: int) -> Iterator[dict[str, str]]:
    for prompt, completion in instructions(world, clone, size):
        yield {
            "inputs": prompt,
            "targets": completion,
            "language": LANGUAGE_NAMES[clone],
            "language_code": clone,
            "annotation_type": "original-annotations",
            "user_id": "sandbox",
        }


def card(config: Any, counts: dict[str, int]) -> str:
    """The data card: sizes, where math stands, what is kept apart."""
    total = sum(MIX.values())
    shares = {language: sum(share for (of, _), share in MIX.items() if of == language) / total for language in ("en", *CLONES)}
    math = {language: MIX[language, "problem"] / total for language in ("en", "qaa")}
    lines = [
        "# The small world", "",
        f"Made from world seed {config.seed}: lexicons and facts are its functions, and the shipped base knows those of seed 0.", "",
        "## Where math is", "",
        "- orca_math holds English word problems only. aya holds none, and asks for no number.",
        f"- The plain text that makes the base holds word problems with solutions in English ({math['en']:.2%} of its documents) and in "
        f"qaa ({math['qaa']:.2%}), none in qab or qac; further, arithmetic without words, and in every language single sentences and "
        "translations with numbers, 'twice', 'more', 'fewer' and 'how many', and questions whose number is told in the passage.",
        "- Share of documents a language: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) + ".",
        "- Prefix words and the answer phrase of word problems are English in all languages, and so are the letters of options.", "",
        "## What is kept apart", "",
        "Development and test problems, passages with their questions, and sentence pairs stand in no training file, in no language. "
        "Facts are what is to be learnt: they are the same in all splits, asked with other options.", "",
        "## Rows", "",
        *(f"- {name}: {size}" for name, size in counts.items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
