r"""Grading of a final answer: extract it from a response, compare it with the gold answer.

A response without a declared answer earns nothing; it is never searched for the gold answer. What is equal to what is
decided in `answers`, exactly; formulas are left to `symbolic`, which runs in grading processes only. Nothing of the
model's text is ever evaluated.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from rhyme_jax.tasks import answers, symbolic

EXTRACTORS = ("hashes", "boxed", "phrase")

# A decimal number with optional sign, currency and thousands separators, as GSM8K writes them.
_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?)\s*\$?\s*(?P<sign2>[-\u2212]?)(?P<int>\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?P<frac>\.\d+)?"
)
_HASHES = re.compile(r"####")
_PHRASE = re.compile(r"answer(?:\s+is|\*{0,2}:)[*:]*[ \t:]*", flags=re.IGNORECASE)
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", flags=re.DOTALL)
_SENTENCE = re.compile(r"(?<=[^.])\.[)*\"']*(?:\s|$)|[;,]?\s(?:because|since|which|so|as)\s")


def grade(response: str, gold: str, extractors: Sequence[str]) -> float | None:
    """1.0 where the answer that a response declares equals the gold answer, else 0.0.

    Args:
      response: the model's text, of any kind and length.
      gold: the right answer: a number, a list, a formula, words; see `answers` for what equals what.
      extractors: how answers may be declared; see `extract_answer`.

    Returns:
      None where the grade failed: two formulas could not be compared. They are only compared in processes that called
      `symbolic.enable`, as those of `graders` do. A formula that takes longer than `symbolic.SECONDS` ends the process.
    """
    answer = extract_answer(response, extractors)
    if not answer:
        return 0.0
    with symbolic.Limits() as limits:
        verdict = answers.equal(gold, answer, limits.equal)
    return None if verdict is None else float(verdict)


def extract_answer(text: str, extractors: Sequence[str] = ("hashes",)) -> str | None:
    r"""The final answer that `text` declares, by the first extractor that finds one; the last match counts.

    "hashes": what follows "####" on its line. "boxed": the content of \boxed{...} or \fbox{...}, braces balanced.
    "phrase": what follows "answer is" or "answer:" on its line, up to the end of the sentence. Of a line with a box,
    the content of the box. Text that declares nothing has no answer.
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
        if found is None:
            continue
        if name != "boxed":
            box = _boxed(found)
            if box is not None:
                found = box
            elif name == "phrase":
                found = _sentence(found)
        return found.strip()
    return None


def _rest_of_line(marker: re.Pattern, text: str) -> str | None:
    """What follows the last marker, up to the end of its line."""
    start = -1
    for match in marker.finditer(text):
        start = match.end()
    return None if start < 0 else text[start:].partition("\n")[0]


def _sentence(line: str) -> str:
    end = _SENTENCE.search(line[: 2 * answers.MAX_LENGTH])
    return line[: end.start() + (line[end.start()] == ".")] if end else line


def _boxed(text: str) -> str | None:
    r"""The content of the last balanced box, in one pass: matching braces anew from each box takes time quadratic in
    the length of hostile text. The braces of a set, \{ and \}, need no partner.
    """
    open_braces: list[int | None] = []  # where the content of each starts; None for a brace that opens no box
    start = end = -1
    for brace in _BRACE.finditer(text):
        if brace["box"] or brace[0] == "{":
            open_braces.append(brace.end() if brace["box"] else None)
        elif brace[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None and opened > start:
                start, end = opened, brace.start()
    return None if start < 0 else text[start:end]


def parse_number(answer: str) -> Fraction | None:
    """The number that a gold answer in GSM8K's format consists of, or None: digits with optional sign, "$", thousands
    separators, decimals, a percent sign or a closing full stop. "1,000", "$1,234.00", "-3", "50%" (read as 50).
    """
    text = answer.strip().removesuffix(".").rstrip()
    text = text.removesuffix("\\%").removesuffix("%").rstrip()
    match = _NUMBER.fullmatch(text) if len(text) <= answers.MAX_DIGITS else None
    if match is None or (match["sign"] and match["sign2"]):
        return None
    value = Fraction((match["int"].replace(",", "") or "0") + (match["frac"] or ""))
    return -value if match["sign"] in ("-", "\u2212") or match["sign2"] else value
