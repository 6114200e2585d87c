"""Exact grading of a final answer: extract it from text, compare as a rational number.

Nothing of the model's text is ever evaluated.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

# A decimal number with optional sign, currency and thousands separators, as GSM8K writes them.
_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?)\s*\$?\s*(?P<sign2>[-\u2212]?)(?P<int>\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?P<frac>\.\d+)?"
)
_MAX_DIGITS = 400  # longer is no answer; keeps hostile text from costing time

_HASHES = re.compile(r"####")
_PHRASE = re.compile(r"answer(?:\s+is|:)[ \t:]*", flags=re.IGNORECASE)
_BRACE = re.compile(r"(\\boxed)?\{|\}")

EXTRACTORS = ("hashes", "boxed", "phrase")


def extract_answer(text: str, extractors: Sequence[str] = ("hashes",)) -> str | None:
    r"""The final answer that `text` declares, by the first extractor that finds one; the last match counts.

    "hashes": what follows "####" on its line. "boxed": the content of \boxed{...}, braces balanced. "phrase":
    what follows "answer is" or "answer:" on its line. Text that declares nothing has no answer.
    """
    for name in extractors:
        if name == "hashes":
            found = _rest_of_line(_HASHES, text)
        elif name == "boxed":
            found = _boxed(text)
        elif name == "phrase":
            found = _rest_of_line(_PHRASE, text)
        else:
            raise ValueError(f"grading: unknown extractor {name!r}; there are {', '.join(EXTRACTORS)}")
        if found is not None:
            return found.strip()
    return None


def _rest_of_line(marker: re.Pattern, text: str) -> str | None:
    """What follows the last marker, up to the end of its line."""
    start = -1
    for match in marker.finditer(text):
        start = match.end()
    return None if start < 0 else text[start:].partition("\n")[0]


def _boxed(text: str) -> str | None:
    """The content of the last balanced box, in one pass: matching braces anew from each box takes time quadratic in
    the length of hostile text.
    """
    open_braces: list[int | None] = []  # where the content of each starts; None for a brace that opens no box
    start = end = -1
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace.end() if brace[1] else None)
        elif open_braces:
            opened = open_braces.pop()
            if opened is not None and opened > start:
                start, end = opened, brace.start()
    return None if start < 0 else text[start:end]


def parse_number(answer: str) -> Fraction | None:
    """The number that `answer` consists of, or None: digits with optional sign, "$", thousands separators,
    decimals, a percent sign or a closing full stop. "1,000", "$1,234.00", "-3", "50%" (read as 50).
    """
    text = answer.strip().removesuffix(".").rstrip()
    text = text.removesuffix("\\%").removesuffix("%").rstrip()
    match = _NUMBER.fullmatch(text) if len(text) <= _MAX_DIGITS else None
    if match is None or (match["sign"] and match["sign2"]):
        return None
    value = Fraction((match["int"].replace(",", "") or "0") + (match["frac"] or ""))
    return -value if match["sign"] in ("-", "\u2212") or match["sign2"] else value


def exact_match(text: str, gold: Fraction, extractors: Sequence[str] = ("hashes",)) -> float:
    """1.0 where the declared final answer equals gold exactly, else 0.0."""
    answer = extract_answer(text, extractors)
    number = None if answer is None else parse_number(answer)
    return 1.0 if number is not None and number == gold else 0.0
