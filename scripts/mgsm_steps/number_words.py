"""Numbers in a text of MGSM's languages, in digits of any script and in words.

The only question is whether a number occurs, so a text with several readings (80.000) has all their
values.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction

SPANS = re.compile(r"\d+(?:[.,'\u2019\u00a0\u202f\u2009 \u066b\u066c]\d+)*|(?<!\d)\.\d+")
_UNITS = {"百": 100, "千": 1000, "万": 10000}
_WITH_UNIT = re.compile(r"(\d[\d,]*(?:\.\d+)?)([百千万])")  # 8万 is 80000
# Words for 0, 1, 2 ... 20, 30, 40 ... 100. Forms of the same number are separated by |. A - stands
# for a number without a word here.
_VALUES = [*range(21), *range(30, 101, 10)]
_WORDS = {
    "en": (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy "
        "eighty ninety hundred"
    ),
    "de": (
        "null ein|eins|eine|einen|einem|einer|eines zwei|beide|beiden drei vier fünf sechs sieben "
        "acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn "
        "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig hundert|einhundert"
    ),
    "es": (
        "cero un|uno|una dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce "
        "quince dieciséis diecisiete dieciocho diecinueve veinte treinta cuarenta cincuenta "
        "sesenta setenta ochenta noventa cien|ciento"
    ),
    "fr": (
        "zéro un|une deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze "
        "quinze seize dix-sept dix-huit dix-neuf vingt|vingts trente quarante cinquante soixante "
        "soixante-dix quatre-vingt|quatre-vingts quatre-vingt-dix cent|cents"
    ),
    "ru": (
        "ноль|нуль|нуля один|одна|одно|одну|одного|одной|одному|одним|одном "
        "два|две|двух|двум|двумя|двое|двоих три|трех|трёх|трем|трём|тремя|трое|троих "
        "четыре|четырех|четырёх|четырем|четырём|четырьмя|четверо пять|пяти|пятью|пятеро "
        "шесть|шести|шестью|шестеро семь|семи|семью|семеро восемь|восьми|восемью "
        "девять|девяти|девятью десять|десяти|десятью одиннадцать|одиннадцати двенадцать|двенадцати "
        "тринадцать|тринадцати четырнадцать|четырнадцати пятнадцать|пятнадцати "
        "шестнадцать|шестнадцати семнадцать|семнадцати восемнадцать|восемнадцати "
        "девятнадцать|девятнадцати двадцать|двадцати тридцать|тридцати сорок|сорока "
        "пятьдесят|пятидесяти шестьдесят|шестидесяти семьдесят|семидесяти восемьдесят|восьмидесяти "
        "девяносто|девяноста сто|ста"
    ),
    "sw": (
        "sifuri moja|mmoja|kimoja|umoja|limoja mbili|wawili|viwili|miwili|mawili|pili "
        "tatu|watatu|vitatu|mitatu|matatu nne|wanne|vinne|minne|manne "
        "tano|watano|vitano|mitano|matano sita saba nane|wanane|vinane|minane|manane tisa kumi - - "
        "- - - - - - - ishirini thelathini arobaini|arubaini hamsini sitini sabini themanini "
        "tisini mia"
    ),
    "zh": (
        "零 一 二|两|双 三 四 五 六 七 八 九 十 十一 十二 十三 十四 十五 十六 十七 十八 十九 二十 "
        "三十 四十 五十 六十 七十 八十 九十 百"
    ),
    "ja": (
        "零|ゼロ 一|ひとつ 二|ふたつ|両 三|みっつ 四 五 六 七 八 九 十 十一 十二 十三 十四 十五 "
        "十六 十七 十八 十九 二十 三十 四十 五十 六十 七十 八十 九十 百"
    ),
    "th": (
        "ศูนย์ หนึ่ง|เดียว สอง|คู่ สาม สี่ ห้า หก เจ็ด แปด เก้า สิบ สิบเอ็ด สิบสอง สิบสาม สิบสี่ "
        "สิบห้า สิบหก สิบเจ็ด สิบแปด สิบเก้า ยี่สิบ สามสิบ สี่สิบ ห้าสิบ หกสิบ เจ็ดสิบ แปดสิบ "
        "เก้าสิบ ร้อย"
    ),
    "bn": (
        "শূন্য এক|একটি|একটা|একজন দুই|দুটি|দুটো|দুজন|দু তিন|তিনটি|তিনটে|তিনজন চার|চারটি|চারজন "
        "পাঁচ|পাঁচটি|পাঁচজন ছয়|ছয়টি|ছয়|ছয়টি|ছ'টি সাত|সাতটি আট|আটটি নয়|নয়টি|নয়|নয়টি দশ|দশটি "
        "এগারো|এগারোটি বারো|বারোটি তেরো চোদ্দ|চৌদ্দ পনেরো ষোলো|ষোল সতেরো আঠারো উনিশ "
        "কুড়ি|কুড়ি|বিশ ত্রিশ|তিরিশ চল্লিশ পঞ্চাশ ষাট সত্তর আশি নব্বই একশ|একশো|শত|শো"
    ),
    "te": (
        "సున్నా ఒక|ఒక్క|ఒకటి|ఒకరు రెండు|ఇద్దరు|రెండ మూడు|ముగ్గురు|మూడ నాలుగు|నలుగురు ఐదు|ఐదుగురు "
        "ఆరు|ఆరుగురు ఏడు|ఏడుగురు ఎనిమిది తొమ్మిది పది పదకొండు పన్నెండు పదమూడు పద్నాలుగు|పధ్నాలుగు "
        "పదిహేను పదహారు పదిహేడు పద్దెనిమిది పంతొమ్మిది ఇరవై ముప్పై|ముప్ఫై నలభై యాభై అరవై "
        "డెబ్బై|డెబ్భై ఎనభై తొంభై వంద|నూరు"
    ),
}
# These are written without spaces, or with endings, so a number word may be part of a longer word.
_INSIDE = ("zh", "ja", "th", "te", "bn")


def read_numbers(text: str, language: str) -> list[Fraction]:
    """Return the numbers of a text in their order, in all their readings.

    Numbers in words are read if `language` has a list.
    """
    normal = unicodedata.normalize("NFKC", text)
    plain = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), normal)
    found = []
    for match in SPANS.finditer(plain):
        for value in _readings(match[0], language):
            found.append((match.start(), value))
    if language in ("zh", "ja"):
        for match in _WITH_UNIT.finditer(plain):
            number = Fraction(match[1].replace(",", ""))
            found.append((match.start(), number * _UNITS[match[2]]))
    lowered = plain.lower()
    for value, word in _words(language):
        pattern = re.escape(word)
        if language == "de":
            pattern += "(?:mal|fach[a-z]*)?"  # viermal, das Vierfache
        if language not in _INSIDE:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        for match in re.finditer(pattern, lowered):
            found.append((match.start(), Fraction(value)))
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]


def _words(language: str) -> Iterator[tuple[int, str]]:
    forms = unicodedata.normalize("NFKC", _WORDS.get(language, "")).split()
    for value, words in zip(_VALUES, forms, strict=False):
        for word in words.split("|"):
            if word != "-":
                yield value, word


def _readings(written: str, language: str) -> list[Fraction]:
    """Return all readings of a number in digits.

    80.000 is read as 80000 and 80, 80 000 as 80000, 80 and 0, and 1,5 as 3/2. English text has a
    single reading: 1,000.5.
    """
    if language in ("en", ""):
        found = []
        for piece in re.split(r"[^\d.,]", written):
            part = piece.rstrip(".")
            if part.count(".") < 2:
                found.append(Fraction(part.replace(",", "")))
        return found
    parts = re.split(r"\D", written)
    values = []
    for part in re.split(r"[^\d.,]", written):
        if part.isdigit():
            values.append(Fraction(part))
    values.append(Fraction("".join(parts)))
    if len(parts) > 1:
        whole = "".join(parts[:-1]) or "0"
        values.append(Fraction(f"{whole}.{parts[-1]}"))
    return list(dict.fromkeys(values))
