"""Detection of math word problems, which language sets must not contain.

See layer_swapping 3.1 and unreasonable 3.4.
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
    """Return True if a row looks like a math word problem.

    The prompt has two numbers or more. The answer either works out an equation, or the prompt asks
    for a quantity and the answer ends with a number that is not in the prompt.
    """
    prompt, answer = example.get("prompt", ""), example.get("completion", "")
    given = NUMBER.findall(prompt)
    if len(given) < 2:
        return False
    if EQUATION.search(answer):
        return True
    if not HOW_MANY.search(prompt):
        return False
    last_numbers = NUMBER.findall(answer[-60:])
    return bool(last_numbers) and last_numbers[-1] not in given
