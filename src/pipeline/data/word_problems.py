"""Which rows look like math word problems: language sets are to hold none (layer_swapping 3.1,
unreasonable 3.4).
"""

from __future__ import annotations

import re

from pipeline.data.sources import Example

NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
EQUATION = re.compile(
    r"\d\s*[%$€£]?\s*[-+*/×÷−=xX]\s*[$€£]?\s*\d[^=\n]{0,40}=\s*[$€£]?\s*-?\d|####\s*-?\d"
)
HOW_MANY = re.compile(
    r"\bhow (?:many|much|long|far|old|tall|heavy|fast)\b|\bcalculate\b"
    r"|\bwhat(?:'s| is| was| are|) (?:the |his |her |their )?"
    r"(?:total|sum|average|difference|cost|price|percentage|percent|distance|age|number|amount|profit|speed|area|ratio)"
    r"|ngapi\b|\b(?:kiasi|muda|umbali|bei|asilimia|kasi|umri) (?:\w+"
    r" ){0,3}(?:gani|upi|ipi)\b|\bhesabu\b"
    r"|কত|কয়টি|কয়টা|কয়জন|কটি|কটা|নির্ণয়|গণনা"
    r"|ఎన్ని|ఎంత|ఎన్నో|ఎందరు|లెక్కించ"
    r"|いくつ|いくら|どれ(?:だけ|くらい|ほど)|どのくらい|割合|求め|計算|何(?![かがをもでにのはと])",
    re.IGNORECASE,
)


def is_word_problem(example: Example) -> bool:
    """Two numbers or more are given, and either an equation is worked out, or a quantity is
    requested and a number that was not given ends the answer.
    """
    prompt, answer = example.get("prompt", ""), example.get("completion", "")
    text = NUMBER.findall(prompt)
    if len(text) < 2:
        return False
    if EQUATION.search(answer):
        return True
    last = NUMBER.findall(answer[-60:])
    return bool(last) and last[-1] not in text and HOW_MANY.search(prompt) is not None
