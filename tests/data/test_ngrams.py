"""N-grams against a plain reference, and what counts as a shared one."""

import json
import os
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import repositories

from pipeline.benchmarks import scored_files
from pipeline.data.benchmarks import Known, benchmark_ngrams
from pipeline.data.ngrams import UNSPACED, ngrams_of
from pipeline.errors import PipelineError


def reference(text: str, n: int) -> list[tuple[str, ...]]:
    """Return the n-grams of one text by the definition, word by word."""
    words: list[tuple[str, int]] = []
    inside = False
    text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
    text = unicodedata.normalize("NFKC", text.casefold()).casefold()
    for letter in (
        letter for letter in text if not unicodedata.name(letter, "").startswith("COMBINING")
    ):
        letter = str(unicodedata.digit(letter)) if unicodedata.category(letter) == "Nd" else letter
        if UNSPACED.match(letter) and unicodedata.category(letter)[0] in "LMN":
            words.append((letter, 1))
            inside = False
        elif unicodedata.category(letter)[0] in "LMN":
            if inside:
                words[-1] = (words[-1][0] + letter, 2)
            else:
                words.append((letter, 2))
            inside = True
        else:
            inside = False
    found = []
    for start in range(len(words)):
        weight, end = 0, start
        while weight < 2 * n and end < len(words):
            weight += words[end][1]
            end += 1
        if weight >= 2 * n:
            found.append(tuple(word for word, _ in words[start:end]))
    return found


ALPHABETS = (
    "abcdef  ,.",
    "ABCé0123  -",
    "কখগািীু ।",
    "తెలుగు ం  ",
    "日本語かなカナ、。",
    "ａｂｃ１２　",
    "a日 本b語 c ",
    "ไทย กข ๑๒1",
    "తె\u200cలు\u200dగు ౧౨1 ",
    "e\u0301 e\u0323\u0301 o\u0337 a",
    "Straße STRASSE ß\u00adſ ℌ",
)


def made_up(draw: random.Random) -> str:
    return "".join(draw.choices(draw.choice(ALPHABETS), k=draw.randint(0, 120)))


@pytest.mark.parametrize("n", [2, 4, 13])
def test_ngrams_are_those_of_the_definition(n: int) -> None:
    draw = random.Random(n)
    for text in (made_up(draw) for _ in range(400)):
        assert ngrams_of(text, n) == set(map(hash, reference(text, n)))


def test_ngrams_do_not_depend_on_what_lies_between_words() -> None:
    text = "Janet's ducks lay 16 eggs per day, and she eats three for breakfast every morning."
    other = (
        "JANET S DUCKS — lay: 16 eggs\nper day; and she eats three for breakfast every   morning"
    )
    assert len(ngrams_of(text, 4)) == 13 and ngrams_of(other, 4) == ngrams_of(text, 4)
    assert len(ngrams_of("emoji 😀 and Han 𠀀𠀁", 4)) == 1
    assert ngrams_of("", 4) == ngrams_of("\x00", 4) == set()


NATIVE = {"te": 0x0C66, "bn": 0x09E6, "th": 0x0E50}  # the digit zero
COPIES: dict[str, Callable[[str, str], str]] = {
    "without joiners": lambda text, _: "".join(
        one for one in text if unicodedata.category(one) != "Cf"
    ),
    "more joiners": lambda text, _: "\u200b".join(text),
    "soft hyphens": lambda text, _: text.replace("e", "e\u00ad"),
    "native digits": lambda text, code: "".join(
        chr(NATIVE[code] + int(one)) if one in "0123456789" and code in NATIVE else one
        for one in text
    ),
    "upper case": lambda text, _: text.upper(),
    "ss for ß": lambda text, _: text.replace("ß", "ss"),
    "variation selectors": lambda text, _: "\ufe0f".join(text),
    "ideographic selectors": lambda text, _: "\U000e0100".join(text),
    "further diacritics": lambda text, _: "".join(
        one + "\u0337" if one.isascii() and one.isalpha() else one for one in text
    ),
    "decomposed": lambda text, _: unicodedata.normalize("NFKD", text),
}


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["te", "bn", "th", "de", "sw"])
@pytest.mark.parametrize("copy", COPIES)
def test_copies_of_mgsm_are_found_all(copy: str, code: str) -> None:
    """What a copy changes that says the same.

    195 of 250 were found in Telugu without joiners, 156 with bn's digits.
    """
    lines = (
        (Path(os.environ["PIPELINE_TEST_DATA"]) / f"mgsm/{code}/test.jsonl")
        .read_text()
        .splitlines()
    )
    questions = [json.loads(line)["question"] for line in lines]
    found = [
        not ngrams_of(one, 13).isdisjoint(ngrams_of(COPIES[copy](one, code), 13))
        for one in questions
    ]
    assert (sum(found), len(found)) == (250, 250)


def test_known_texts_say_which_benchmarks_a_text_shares_with() -> None:
    draw = random.Random(0)
    vocabulary = [f"word{n}" for n in range(2000)]
    texts = [" ".join(draw.choices(vocabulary, k=60)) for _ in range(300)]
    known = Known(5)
    for text in texts[:100]:
        known.add("first", text)
    for text in texts[50:150]:
        known.add("second", text)
    both = ["first", "second"]
    found = [known.shared(text)[0] for text in texts]
    assert found == [["first"]] * 50 + [both] * 50 + [["second"]] * 50 + [[]] * 150
    inside = f"before it {' '.join(texts[3].split()[20:25])} after it"
    assert known.shared(inside)[0] == ["first"] and known.shared("before it") == ([], [])
    assert Known(5).shared(texts[0]) == ([], [])


def lay_benchmarks(root: Path) -> None:
    """One item of each benchmark, in the Hub's columns."""
    words = " ".join(f"w{n}" for n in range(20))
    options = {f"mc_answer{n}": f"{n}" for n in range(1, 5)}
    repositories.jsonl(root / "mgsm/sw/test.jsonl", [{"question": f"mgsm {words}"}])
    repositories.jsonl(root / "mgsm/sw/train.jsonl", [{"question": f"shown {words[::-1]}"}])
    repositories.jsonl(
        root / "belebele/te/test.jsonl",
        [{"flores_passage": f"b {words}", "question": "q?", **options}],
    )
    repositories.jsonl(root / "flores/bn/devtest.jsonl", [{"sentence": f"flores {words}"}])
    row = {"question": "short?", **{f"option_{letter}": letter for letter in "abcd"}}
    repositories.jsonl(root / "global_mmlu/ja/test.jsonl", [row])
    repositories.jsonl(root / "global_mmlu/ja/dev.jsonl", [row])
    repositories.jsonl(
        root / "mbpp/en/test.jsonl", [{"text": f"mbpp {words}", "code": f"code {words}"}]
    )


def test_benchmarks_of_a_folder_are_all_languages_without_exemplars(tmp_path: Path) -> None:
    lay_benchmarks(tmp_path)
    found = benchmark_ngrams(13, tmp_path, None)
    texts = {name: count for name, count in found.texts.items() if count}
    assert texts == {"mgsm": 1, "belebele": 2, "flores": 1, "global_mmlu": 1, "mbpp": 2}
    files = {name: len(paths) for name, paths in scored_files(tmp_path).items() if paths}
    assert files == dict.fromkeys(texts, 1)
    assert found.short == 2  # a question with its options, in words
    words = " ".join(f"w{n}" for n in range(12))
    rows = [f"x mgsm {words} y", f"flores {words}", words, "shown"]
    assert [found.shared(row)[0] for row in rows] == [["mgsm"], ["flores"], [], []]


@pytest.mark.parametrize("line", ["not json", '{"answer": 1}', '{"question": null}', "[]"])
def test_a_benchmark_that_cannot_be_read_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "mgsm/sw").mkdir(parents=True)
    (tmp_path / "mgsm/sw/test.jsonl").write_text(f'{{"question": "1 + 1?"}}\n\n{line}\n')
    with pytest.raises(PipelineError, match="mgsm/sw/test.jsonl, line 3 cannot be compared with"):
        benchmark_ngrams(13, tmp_path, None)
