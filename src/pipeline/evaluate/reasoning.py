"""What stands in the worked answers to math problems: equations, whether they hold, the plan, the language.

All of it from stored answers, so that a score that is low for want of arithmetic, or high in the wrong language, is
seen as such. Pure functions on text; nothing here decides whether an answer is right.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pipeline.evaluate.metrics import last_number, share_in
from pipeline.languages import MGSM, language

LETTERS = 10  # an answer of fewer letters has no language

_SIGNS = str.maketrans("×✕✖∗⋅·∙÷∕⁄／＊＋＝−–－（）％，．＄￥", "*******////*+=---()%,.$¥")
_TEX = ((r"\\(?:times|cdot)\b", "*"), (r"\\div\b", "/"), (r"\\\$", "$"), (r"\\%", "%"), (r"\*\*|<<|>>", " "))
_NUMBER = r"(?:[$\u00a2-\u00a5\u09f2\u09f3\u0e3f\u20a0-\u20cf]\s?)?\d(?:[\d.,']*\d)?\s?%?"
_WORD = r"[^\s\d=+*/()<>%$.,;:!?。、।॥\-]{1,30}"
# a number with its unit: 5 tennis balls
_TERM = rf"\({{0,5}}\s*(?:-\s?)?{_NUMBER}(?>(?:\s?{_WORD})?)(?>(?:\s{_WORD})?)\s*\){{0,5}}"
_SIDE = re.compile(rf"(?>{_TERM})(?>(?:\s*[-+*/]\s*{_TERM})*)")
_EQUALS = re.compile(rf"\s*=\s*(?:{_WORD})?\s*")  # = dola 15, as Swahili has it
_TOKEN = re.compile(r"\d(?:[\d.,']*\d)?|[-+*/()%]")


@dataclass(frozen=True)
class Equation:
    """terms: operands and operators of the left side in order, without brackets; result: the value that is given;
    holds: whether both sides are equal, a result with decimals to its last one."""

    terms: tuple[Fraction | str, ...]
    result: Fraction | None
    holds: bool


def plain_text(text: str) -> str:
    """Digits of any script, signs of any width and TeX's as ASCII has them; a cross between numbers multiplies."""
    text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_SIGNS))
    for pattern, sign in _TEX:
        text = re.sub(pattern, sign, text)
    return re.sub(r"(?<=\d)\s:\s(?=\d)", " / ", re.sub(r"(?<=[\d)])\s*[xX]\s*(?=[$\d(])", " * ", text))


def equations(text: str) -> list[Equation]:
    """The equations of an answer, in order: something is computed on one side at least, and the other gives a value.

    Numbers may carry a currency, a percent sign and a unit of up to two words. a + b = c = d are two equations, unless
    one of them computes nothing (c = d).
    """
    text = plain_text(text)
    sides = list(_SIDE.finditer(text))
    equations_found = []
    for left, right in zip(sides, sides[1:], strict=False):
        if _EQUALS.fullmatch(text, left.end(), right.start()):
            first, second = _TOKEN.findall(left[0]), _TOKEN.findall(right[0])
            if has_operator(first) or has_operator(second):
                terms = tuple(
                    token if token in "+-*/" else parse_number(token) for token in first if token not in "()%"
                )
                equations_found.append(Equation(terms, value(second), are_equal(first, second)))
    return equations_found


def has_operator(tokens: Sequence[str]) -> bool:
    """Whether two numbers are combined: a minus before a single one is its sign."""
    return sum(token[0].isdigit() for token in tokens) > 1


def parse_number(written: str) -> Fraction:
    return last_number(written) or Fraction(0)


def are_equal(left: Sequence[str], right: Sequence[str]) -> bool:
    """Whether two sides have one value; a single number with decimals may be rounded, 25 % may be 25 or 0.25."""
    left_value, right_value = value(left), value(right)
    if left_value is None or right_value is None:
        return False
    gaps = [abs(left_value - right_value)]
    if "%" in [*left, *right]:
        gaps += [abs(left_value - 100 * right_value), abs(100 * left_value - right_value)]
    written = re.search(r"[.,](\d+)$", right[0]) if len(right) == 1 else None
    rounded = written and parse_number(right[0]).denominator > 1
    return min(gaps) <= (Fraction(1, 2 * 10 ** len(written[1])) if written and rounded else 0)


def value(tokens: Sequence[str]) -> Fraction | None:
    """The value of a side; None where it is none, or divides by 0. Brackets that do not match are ignored."""
    if tokens.count("(") != tokens.count(")"):
        tokens = [token for token in tokens if token not in "()"]
    remaining = list(tokens)

    def factor() -> Fraction:
        token = remaining.pop(0)
        if token == "-":
            return -factor()
        if token == "(":
            result = total()
            remaining.pop(0)
        else:
            result = Fraction(last_number(token) if token[0].isdigit() else None)  # type: ignore[arg-type]
        while remaining and remaining[0] == "%":
            remaining.pop(0)
            result /= 100
        return result

    def product() -> Fraction:
        result = factor()
        while remaining and remaining[0] in "*/":
            result = result * factor() if remaining.pop(0) == "*" else result / factor()
        return result

    def total() -> Fraction:
        result = product()
        while remaining and remaining[0] in "+-":
            result = result + product() if remaining.pop(0) == "+" else result - product()
        return result

    try:
        result = total()
    except (IndexError, TypeError, ZeroDivisionError):
        return None
    return None if remaining else result


# ---------------------------------------------------------------------------------------------------- the plan


def same_plan(answer: str, solution: str) -> bool:
    """Whether an answer computes what the solution does: its operands and operators, step by step, in order.

    A step may go on from its own result where the solution goes on from the right one: a slip of arithmetic is no
    other plan.
    """
    equations_given, expected = equations(answer), equations(solution)
    if len(equations_given) != len(expected):
        return False
    results: list[tuple[Fraction | None, Fraction | None]] = []
    for equation, expected_equation in zip(equations_given, expected, strict=True):
        if len(equation.terms) != len(expected_equation.terms):
            return False
        for term, expected_term in zip(equation.terms, expected_equation.terms, strict=True):
            if term != expected_term and (term, expected_term) not in results:
                return False
        results.append((equation.result, expected_equation.result))
    return True


# ---------------------------------------------------------------------------------------------------- the language


@lru_cache(maxsize=1)
def language_identifier() -> Any:
    """py3langid's model, which its package holds (4 MB, 140 languages), over the languages of MGSM."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    loaded = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    loaded.set_languages(list(MGSM))
    return loaded


def told_by(code: str) -> str:
    """What tells a language: "script" where no other that MGSM has is written in it, or where nothing else can tell (a
    language that MGSM does not have); "py3langid" among MGSM's of one script."""
    return "script" if code not in MGSM or not languages_of_script(code) else "py3langid"


def languages_of_script(code: str) -> list[str]:
    """MGSM's other languages that are written in a script of this one: English, where that is the Latin one."""
    scripts = set(language(code).scripts)
    return [other_code for other_code in MGSM if other_code != code and scripts & set(language(other_code).scripts)]


def in_language(text: str, code: str) -> bool | None:
    """Whether an answer is in this language; None where it has too few letters to have one."""
    share = share_in(language(code).scripts, text)
    if share is None or sum(mark.isalpha() for mark in text) < LETTERS:
        return None
    if share < 0.5 or told_by(code) == "script":
        return share >= 0.5
    return language_identifier().classify(re.sub(r"[\W\d_]*\d[\W\d_]*", " ", plain_text(text)))[0] == code


# ---------------------------------------------------------------------------------------------------- shares


@dataclass(frozen=True)
class Share:
    """A share of `each` (ones and zeros): of answers, equations or plans. how: by what it was told, "none" if plain."""

    metric: str
    how: str
    each: tuple[bool, ...]


def language_share(answers: Sequence[str], code: str) -> Share:
    languages = [in_language(answer, code) for answer in answers]
    return Share("other_language", told_by(code), tuple(not item for item in languages if item is not None))


def answer_shares(answers: Sequence[str], code: str, solutions: Sequence[str | None]) -> Iterator[Share]:
    """Beside a math score: answers without any equation; equations that hold; answers that are not in the language
    asked for, of those long enough to tell; plans that are right, of problems that have a worked solution.

    What there is none of (equations, answers long enough, solutions) has no share.
    """
    by_answer = [equations(answer) for answer in answers]
    yield Share("no_equation", "none", tuple(not item for item in by_answer))
    yield Share("equations_true", "none", tuple(item.holds for equations_of in by_answer for item in equations_of))
    yield language_share(answers, code)
    pairs = [(answer, item) for answer, item in zip(answers, solutions, strict=True) if item]
    yield Share("plan", "none", tuple(same_plan(*pair) for pair in pairs))
