r"""Final answers in a canonical form, and when two of them are equal. All of it exact: rationals, never floats.

What counts as equal:

- A rational number equals the same number in any notation: 0.5, 1/2, \frac{2}{4}, 5e-1, "1,000" and 1000, 2\frac{1}{2}
  and 2.5, 0.\overline{3} and 1/3. Digits decide: 0.333 is not 1/3.
- Where the gold answer is a rational number, arithmetic that is left to do (2+3, 2^{10}, \sqrt{4}) is no answer: to
  repeat the question must not be rewarded. Where the gold answer is itself such an expression, any form of it is right.
- A unit counts only where both sides have one: "5 cm" equals 5 and not "5 m". Units are not converted. The percent sign
  is a unit like others: 50% equals 50, and not 0.5. So are currencies, degrees and the base of a numeral (101_2).
- Lists and sets have no order, tuples, intervals, ratios and matrices have one. Brackets count: (1,2] is not (1,2). A
  list never equals a tuple. Sets in braces forget repetitions.
- "x = 3" equals 3, and not "y = 3". "x > 3" equals (3, \infty).
- Choices equal by their letter: (B), B, "B. 12". Words equal without regard to case and article.

What is none of these is a `Formula`, and for `symbolic` to compare.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

MAX_LENGTH = 1000  # of an answer; longer is no answer, and keeps hostile text from costing time
MAX_DIGITS = 400  # of a number, and the largest exponent of ten
_MAX_DEPTH = 8  # of lists in lists
_MAX_ITEMS = 64  # of a list


def word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


Formulas = Callable[[str, str], bool | None]


@dataclasses.dataclass(frozen=True)
class Number:
    value: Fraction | float  # a float only where it is infinite
    unit: str
    text: str = dataclasses.field(compare=False)  # as it was written, without the unit


@dataclasses.dataclass(frozen=True)
class Words:
    text: str


@dataclasses.dataclass(frozen=True)
class Formula:
    """An expression or relation that is not read here, in TeX."""

    text: str
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Group:
    """Items in order: a tuple or interval by its brackets, a ratio ("::"), a row or matrix ("rows")."""

    brackets: str
    items: tuple["Answer", ...]
    text: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Unordered:
    """A list or set; with `union`, the union of its items."""

    items: tuple["Answer", ...]
    union: bool
    text: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Named:
    """A value with a name: x = 3. A range of x, too."""

    name: str
    value: "Answer"
    text: str = dataclasses.field(compare=False)


Answer = Number | Words | Formula | Group | Unordered | Named


def equal(gold: str, answer: str, formulas: Formulas) -> bool | None:
    """Whether `answer` says the same as `gold`.

    Args:
      gold: the right answer.
      answer: any text.
      formulas: whether two formulas (gold, answer; in TeX) are equal; None where it cannot tell.

    Returns:
      None where the two can only be told apart by formulas, and `formulas` returned None.
    """
    if len(answer) > max(MAX_LENGTH, len(gold)):
        return False
    right, chosen = _gold(gold), _tidy(answer)
    if not chosen:
        return False
    if _squeezed(chosen) == right.squeezed:
        return True
    if right.choice:
        match = _CHOSEN.fullmatch(chosen)
        return match is not None and (match["bare"] or match["bracketed"].upper()) == right.choice
    return _same(right.answer, _read(chosen, 0), formulas)


# --- comparison -----------------------------------------------------------------------------------------------------


def _same(gold: Answer, answer: Answer, formulas: Formulas) -> bool | None:
    if gold == answer:
        return True
    if isinstance(gold, Named) or isinstance(answer, Named):
        return _same_named(gold, answer, formulas)
    if isinstance(gold, Unordered) and not gold.union and len(gold.items) == 1:
        return _same(gold.items[0], answer, formulas)
    if isinstance(answer, Unordered) and not answer.union and len(answer.items) == 1:
        return _same(gold, answer.items[0], formulas)
    match gold, answer:
        case Number(), Number():
            return gold.value == answer.value and _units_agree(gold, answer)
        case Formula(), Formula() | Number():
            return formulas(gold.text, answer.text) if _units_agree(gold, answer) else False
        case Group(), Group():
            if gold.brackets != answer.brackets or len(gold.items) != len(answer.items):
                return False
            return _all(_same(g, a, formulas) for g, a in zip(gold.items, answer.items))
        case Group(), Unordered():  # (3, 4) as "x = 3, y = 4"
            names = [item.name for item in answer.items if isinstance(item, Named)]
            if gold.brackets != "()" or answer.union or len(set(names)) != len(answer.items):
                return False
            values = tuple(item.value for item in answer.items)
            return _same(gold, Group("()", values, answer.text), formulas)
        case Unordered(), Unordered():
            return gold.union == answer.union and _same_items(gold.items, answer.items, formulas)
    return False


def _units_agree(gold: Number | Formula, answer: Number | Formula) -> bool:
    return gold.unit == answer.unit or not gold.unit or not answer.unit


def _same_named(gold: Answer, answer: Answer, formulas: Formulas) -> bool | None:
    if not isinstance(gold, Named):
        if isinstance(gold, Formula) and _RELATION.search(gold.text):
            return formulas(gold.text, answer.text)
        return _same(gold, answer.value, formulas)
    if isinstance(answer, Named):
        if gold.name == answer.name:
            return _same(gold.value, answer.value, formulas)
        # y = 2x + 1 may be solved for x, but "x = 3" is not "y = 3".
        return formulas(gold.text, answer.text) if _has_formula(gold.value) or _has_formula(answer.value) else False
    if isinstance(answer, Formula) and _RELATION.search(answer.text):
        return formulas(gold.text, answer.text)
    return _same(gold.value, answer, formulas)


def _has_formula(answer: Answer) -> bool:
    if isinstance(answer, Group | Unordered):
        return any(map(_has_formula, answer.items))
    return isinstance(answer, Formula)


def _same_items(gold: Sequence[Answer], answer: Sequence[Answer], formulas: Formulas) -> bool | None:
    """As multisets. Equality is an equivalence, so that the first match will do."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for item in sorted(gold, key=lambda g: isinstance(g, Formula)):  # what costs nothing first
        unsure = False
        for other in sorted(left, key=lambda a: a != item):
            verdict = _same(item, other, formulas)
            if verdict:
                left.remove(other)
                break
            unsure |= verdict is None
        else:
            return None if unsure else False
    return True


def _all(verdicts) -> bool | None:
    """False where one is False, else None where one is None."""
    unsure = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unsure |= verdict is None
    return None if unsure else True


# --- tidying --------------------------------------------------------------------------------------------------------

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u2007~", " "),
        **{"\u00d7": "\\times ", "\u22c5": "\\cdot ", "\u00b7": "\\cdot ", "\u00f7": "/", "\u03c0": "\\pi "},
        **{"\u221e": "\\infty ", "\u221a": "\\sqrt ", "\u00b0": "^\\circ ", "\u2264": "\\le ", "\u2265": "\\ge "},
        **{"\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u00b1": "\\pm ", "\u2205": "\\emptyset "},
        **{"\u2260": "\\ne ", "\u03b8": "\\theta ", "\u00b2": "^{2}", "\u00b3": "^{3}", "\u3002": "."},
        **{"\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}", "\u00be": "\\frac{3}{4}"},
        **{"\uff04": "$", "\uff05": "%", "\ufe69": "$"},
    }
)
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])")
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|\s+")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]!]")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|mathit|textbf|textit|textrm|textsf|mbox|bm|boldsymbol)\s*\{([^{}]*)\}")
_SYNONYMS = {
    **{"dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac", "leq": "\\le ", "geq": "\\ge ", "leqslant": "\\le "},
    **{"geqslant": "\\ge ", "lt": "<", "gt": ">", "div": "/", "varnothing": "\\emptyset ", "neq": "\\ne "},
    **{"bar": "\\overline", "lbrace": "\\{", "rbrace": "\\}"},
}
_SYNONYM = re.compile(rf"\\({'|'.join(_SYNONYMS)})(?![a-zA-Z])")
_ARGUMENT = r"\s*(\{[^{}]*\}|\d|[a-zA-Z])"
_FRAC = re.compile(rf"\\frac{_ARGUMENT}{_ARGUMENT}")
_SQRT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z])")
_CURRENCY = re.compile(r"\\\$|\$(?=\s*-?\s*[\d.])")
_COMMAS = re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d)")
_LOOSE = re.compile(r"(?<![a-zA-Z0-9.,]) | (?![a-zA-Z0-9.,])")
_MARKS = ("**", "*", "__", "`", '"', "'", "\u201c", "\u201d")


def _tidy(text: str) -> str:
    """One notation for what TeX and Markdown can say in many; no delimiters around the whole, no closing full stop."""
    text = _COMMAS.sub(",", text.translate(_CHARACTERS))
    if "\\" in text:
        text = _DELIMITERS.sub("", _SIZES.sub(" ", text)).replace("\\%", "%")
    text = _SPACES.sub(" ", text)
    for _ in range(3):  # text in text
        text, found = _TEXT.subn(r" \1 ", text)
        if not found:
            break
    if "\\" in text:
        text = _SYNONYM.sub(lambda m: _SYNONYMS[m[1]], text)
        text = _FRAC.sub(lambda m: "\\frac" + "".join(f"{{{a.strip('{} ')}}}" for a in m.groups()), text)
        text = _SQRT.sub(r"\\sqrt{\1}", text)
    if text.count("$") - text.count("\\$") == 1 or "\\$" in text:
        text = _CURRENCY.sub("\u00a4", text)
    text = text.replace("$", "")
    before = None
    while text != before:
        before, text = text, text.strip()
        for mark in _MARKS:
            text = text.removeprefix(mark).removesuffix(mark)
        if text.endswith((".", ",", ";", ":")) and not text.endswith(".."):
            text = text[:-1]
    return _SPACES.sub(" ", text)


def _squeezed(text: str) -> str:
    """Without the spaces that say nothing."""
    return _LOOSE.sub("", text)


# --- reading --------------------------------------------------------------------------------------------------------

_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(r"(?P<bare>[A-J])(?:[).:].*)?|\((?P<bracketed>[A-Ja-j])\).*", flags=re.DOTALL)
_RELATION = re.compile(r"=|<|>|\\[lg]e(?![a-zA-Z])")
_NAME = re.compile(r"(?:[a-zA-Z]|\\(?!infty|emptyset)[a-zA-Z]+)\s?(?:_\{?\w{1,3}\}?)?\s?'?(?:\([a-z](?:,\s?[a-z])*\))?")
_LABEL = re.compile(r"[a-zA-Z][a-zA-Z ]{1,40}")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", flags=re.DOTALL)
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z'-]*(?: [a-zA-Z'-]+)*")
_FUNCTIONS = word_set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi")
_MEASURED = re.compile(r"(.*(?:[\d})]|\\pi)) ?(\^ ?\{? ?\\circ ?\}?|%|(?<= )[a-zA-Z][a-zA-Z /^{}23]*)", flags=re.DOTALL)
_VARIABLES = re.compile(r"[abcdknmpqrstxyz]{1,2}|[bcdknmpqrstxyz]{3}")  # a product; not a word


@dataclasses.dataclass(frozen=True)
class _Gold:
    squeezed: str
    choice: str  # its letter, if it is one
    answer: Answer


@functools.lru_cache(4096)
def _gold(text: str) -> _Gold:
    tidy = _tidy(text)
    choice = _CHOICE.fullmatch(tidy)
    return _Gold(_squeezed(tidy), choice[1] if choice else "", _read(tidy, 0))


def _read(text: str, depth: int) -> Answer:
    text = text.strip()
    number = _number(text)
    if number is not None or depth > _MAX_DEPTH:
        return number or Formula(text)
    if _WORDS.fullmatch(text):
        words = text.lower().split()
        if not _FUNCTIONS.intersection(words) and not all(map(_VARIABLES.fullmatch, text.split())):
            return Words(" ".join(words[1:] if len(words) > 1 and words[0] in ("the", "a", "an") else words))
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}", "{}"):
        return Unordered((), False, text)
    matrix = _MATRIX.fullmatch(text)
    if matrix and "\\begin" not in matrix[2]:
        return _matrix(text, matrix[2], depth + 1)
    parts = _split(text)
    if parts is None:
        return Formula(text)
    for read in (_union, _list, _relation, _ratio, _bracketed, _plus_minus):
        answer = read(text, parts, depth + 1)
        if answer is not None:
            return answer
    measured = _MEASURED.fullmatch(text)
    if measured and all(len(w) > 3 or _known_unit(w) for w in re.findall("[a-zA-Z]+", measured[2])):
        unit = _unit(f" {measured[2]}")
        if unit:
            return Formula(measured[1], unit)
    return Formula(text)


_TOKENS = re.compile(
    r"\\[{}]|\\cup(?![a-zA-Z])|\\in(?![a-zA-Z])|\\[lg]e(?![a-zA-Z])|\\\\|\\[a-zA-Z]+"
    r"|[()\[\]{}]|[,;:=<>]|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])"
)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What stands outside of all brackets."""

    marks: list[tuple[str, int, int]]  # (separator or relation, start, end)
    whole: bool  # the first bracket closes with the last


def _split(text: str) -> _Parts | None:
    """None where brackets do not match in number."""
    marks, depth, first_closes = [], 0, -1
    for token in _TOKENS.finditer(text):
        mark = token[0]
        if mark in ("(", "[", "{", "\\{"):
            depth += 1
        elif mark in (")", "]", "}", "\\}"):
            depth -= 1
            if depth < 0:
                return None
            if depth == 0 and first_closes < 0:
                first_closes = token.end()
        elif depth == 0 and not (mark.startswith("\\") and mark not in ("\\cup", "\\in", "\\le", "\\ge")):
            marks.append((mark, token.start(), token.end()))
    return _Parts(marks, first_closes == len(text)) if depth == 0 else None


def _pieces(text: str, marks: Sequence[tuple[str, int, int]]) -> list[str]:
    edges = [0, *(edge for _, start, end in marks for edge in (start, end)), len(text)]
    return [text[a:b].strip() for a, b in zip(edges[::2], edges[1::2])]


def _union(text: str, parts: _Parts, depth: int) -> Answer | None:
    marks = [m for m in parts.marks if m[0] == "\\cup"]
    if not marks or any(m[0] in ",;" for m in parts.marks):
        return None
    name, whole = "", text
    if parts.marks[0][0] == "\\in":
        name, text = text[: parts.marks[0][1]].strip(), text[parts.marks[0][2] :]
        if not _NAME.fullmatch(name):
            return None
        shift = parts.marks[0][2]
        marks = [(m, start - shift, end - shift) for m, start, end in marks]
    items = _pieces(text, marks)
    if len(items) > _MAX_ITEMS:
        return None
    union = Unordered(tuple(_read(i, depth) for i in items), True, text)
    return Named(name, union, whole) if name else union


def _items(text: str, marks: Sequence[tuple[str, int, int]], depth: int) -> list[Answer] | None:
    """The elements of a list. Where some commas are followed by a space, the others belong to thousands."""
    marks = [m for m in marks if m[0] in (",", ";", "and", "or")]
    if any(m[0] == ";" for m in marks):
        marks = [m for m in marks if m[0] != ","]
    elif any(m[0] != "," or text[m[2] : m[2] + 1].isspace() for m in marks):
        marks = [m for m in marks if m[0] != "," or not text[m[2] : m[2] + 1].isdigit()]
    items = [p for p in _pieces(text, marks) if p] if marks else [text]  # "1, 2, and 3" has an empty piece
    return [_read(i, depth) for i in items] if len(items) <= _MAX_ITEMS else None


def _list(text: str, parts: _Parts, depth: int) -> Answer | None:
    if not any(m[0] in (",", ";", "and", "or") for m in parts.marks):
        return None
    items = _items(text, parts.marks, depth)
    if items is None or len(items) < 2:
        return None
    named = [i for i in items if isinstance(i, Named)]
    if named and isinstance(items[0], Named) and len({i.name for i in named}) == 1:
        values = tuple(i.value if isinstance(i, Named) else i for i in items)
        union = all(isinstance(v, Group) for v in values)  # x < 1 or x > 3
        return Named(named[0].name, Unordered(values, union, text), text)
    flat = [i for item in items for i in (item.items if isinstance(item, Unordered) and not item.union else (item,))]
    return Unordered(tuple(flat), False, text)


_OPENS = {">": ("()", False), "\\ge": ("[)", False), "<": ("()", True), "\\le": ("(]", True)}
_FLIPPED = {">": "<", "<": ">", "\\ge": "\\le", "\\le": "\\ge"}


def _relation(text: str, parts: _Parts, depth: int) -> Answer | None:
    marks = [m for m in parts.marks if m[0] in ("=", "<", ">", "\\le", "\\ge", "\\in")]
    if not marks:
        return None
    kinds, sides = {m[0] for m in marks}, _pieces(text, marks)
    named = _NAME.fullmatch(sides[0])
    if kinds == {"="}:
        if named or _LABEL.fullmatch(sides[0]):
            return Named(_squeezed(sides[0]), _read(sides[-1], depth), text)
        # 47+38 = 85 says 85; 2x = 6 is an equation.
        return None if re.search("[a-zA-Z]", "".join(sides[:-1])) else _read(sides[-1], depth)
    if kinds == {"\\in"} and len(sides) == 2 and named:
        return Named(_squeezed(sides[0]), _read(sides[1], depth), text)
    if "=" in kinds or "\\in" in kinds or len(sides) > 3:
        return None
    if len(sides) == 2:
        (name, operator, bound), kind = (sides[0], marks[0][0], sides[1]), sides[1]
        if not named:
            name, operator, bound = sides[1], _FLIPPED[marks[0][0]], kind and sides[0]
        if not _NAME.fullmatch(name):
            return None
        brackets, above = _OPENS[operator]
        infinite = Number(float("-inf") if above else float("inf"), "", "-\\infty" if above else "\\infty")
        value = _read(bound, depth)
        return Named(_squeezed(name), Group(brackets, (infinite, value) if above else (value, infinite), text), text)
    low, name, high = sides
    operators = [m[0] for m in marks]
    if operators[0] in (">", "\\ge"):
        low, high, operators = high, low, [_FLIPPED[o] for o in reversed(operators)]
    if not _NAME.fullmatch(name) or not {"<", "\\le"}.issuperset(operators):
        return None
    brackets = ("(" if operators[0] == "<" else "[") + (")" if operators[1] == "<" else "]")
    return Named(_squeezed(name), Group(brackets, (_read(low, depth), _read(high, depth)), text), text)


def _ratio(text: str, parts: _Parts, depth: int) -> Answer | None:
    marks = [m for m in parts.marks if m[0] == ":"]
    if not marks or len(marks) > _MAX_ITEMS:
        return None
    return Group("::", tuple(_read(p, depth) for p in _pieces(text, marks)), text)


def _bracketed(text: str, parts: _Parts, depth: int) -> Answer | None:
    if not parts.whole:
        return None
    for opening, closing in (("\\{", "\\}"), ("{", "}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if text.startswith(opening) and text.endswith(closing):
            break
    else:
        return None
    inside = text[len(opening) : -len(closing)]
    inner = _split(inside)
    if inner is None:
        return None
    if opening == "{" or (opening == "(" and closing == ")" and not inner.marks):
        return _read(inside, depth)
    if any(m[0] not in ",;" for m in inner.marks) and opening != "\\{":
        return None
    items = _items(inside, inner.marks, depth)
    if items is None:
        return None
    if opening == "\\{":
        if any(isinstance(i, Named) for i in items):  # {x | x > 3} and the like
            return None
        flat = [i for item in items for i in (item.items if isinstance(item, Unordered) and not item.union else [item])]
        return Unordered(tuple(dict.fromkeys(flat)), False, text)
    return Group(opening + closing, tuple(items), text)


def _matrix(text: str, cells: str, depth: int) -> Answer:
    rows = [row.split("&") for row in cells.split("\\\\") if row.strip()]
    if sum(map(len, rows)) > _MAX_ITEMS:
        return Formula(text)
    return Group("rows", tuple(Group("row", tuple(_read(c, depth) for c in r), "") for r in rows), text)


def _plus_minus(text: str, parts: _Parts, depth: int) -> Answer | None:
    sides = re.split(r"\\pm(?![a-zA-Z])", text)
    if len(sides) != 2:
        return None
    before, after = sides
    return Unordered(tuple(_read(f"{before}{sign}{after.lstrip()}", depth) for sign in "+-"), False, text)


# --- numbers --------------------------------------------------------------------------------------------------------

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?![,\d])(?:\.\d+)?|\.\d+)(?!\.?\d)"
_POWER = r"10\s?\^\s?(?:\{\s?(?P<NAME>[-+]?\s?\d{1,4})\s?\}|(?P<NAMEb>[-+]?\d{1,4}))"
_NUMERAL = re.compile(
    r"(?P<sign>[-+]?)\s?(?:(?P<currency>[\u00a4\u20ac\u00a3\u00a5\u20b9])\s?(?P<sign2>-?)\s?)?(?:"
    r"(?P<infinite>\\infty|infinity(?![a-zA-Z]))"
    r"|(?P<whole>\d+)\s?"
    r"(?:\\frac\{\s?(?P<up>\d+)\s?\}\{\s?(?P<down>\d+)\s?\}|(?<= )(?P<up2>\d+)\s?/\s?(?P<down2>\d+))(?!\d)"
    rf"|\\frac\{{\s?(?P<above>-?\s?{_DECIMAL})\s?\}}\{{\s?(?P<below>-?\s?{_DECIMAL})\s?\}}"
    rf"|(?P<left>{_DECIMAL})\s?/\s?(?P<right>{_DECIMAL})"
    rf"|(?P<mantissa>{_DECIMAL})\s?(?:\\times|\\cdot|\*|x)\s?{_POWER.replace('NAME', 'exponent')}"
    r"|(?P<base>\d+(?:\.\d+)?)[eE](?P<e>[-+]?\d{1,4})(?![\da-zA-Z])"
    rf"|{_POWER.replace('NAME', 'power')}"
    r"|(?P<fixed>\d*\.\d*)\\overline\{(?P<repeated>\d+)\}"
    rf"|(?P<decimal>{_DECIMAL})"
    r")"
)
_TIMES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}


def _number(text: str) -> Number | None:
    """What `text` says, if it is one rational number, with or without a unit; or infinity."""
    match = _NUMERAL.match(text)
    if match is None or match.end() > MAX_DIGITS or (match["sign"] and match["sign2"]):
        return None
    try:
        value = _value(match)
    except ZeroDivisionError:
        return None
    if value is None:
        return None
    rest = text[match.end() :]
    word, space, more = rest.strip().partition(" ")
    if rest.startswith(" ") and word.lower() in _TIMES:
        value, rest = value * _TIMES[word.lower()], space + more
    unit = _unit(rest)
    if unit is None:
        return None
    if match["currency"]:
        currency = "dollar" if match["currency"] == "\u00a4" else match["currency"]
        unit = f"{currency} {unit}" if unit not in ("", "%", "dollar") else currency
    plain = text[: match.end()].replace("\u00a4", "")
    return Number(-value if "-" in (match["sign"], match["sign2"]) else value, unit, plain)


def _value(match: re.Match) -> Fraction | float | None:
    r"""Without the sign. None where notation is in doubt: 2\frac{3}{2} may be a product."""
    if match["infinite"]:
        return float("inf")
    if match["whole"]:
        up, down = int(match["up"] or match["up2"]), int(match["down"] or match["down2"])
        return int(match["whole"]) + Fraction(up, down) if up < down else None
    if match["above"]:
        return _decimal(match["above"]) / _decimal(match["below"])
    if match["left"]:
        return _decimal(match["left"]) / _decimal(match["right"])
    if match["fixed"]:
        fixed, repeated = match["fixed"], match["repeated"]
        scale = 10 ** len(fixed.partition(".")[2])
        return _decimal(fixed + "0") + Fraction(int(repeated), (10 ** len(repeated) - 1) * scale)
    for base, exponent in (("mantissa", "exponent"), ("base", "e"), (None, "power")):
        written = match[exponent] or (match[exponent + "b"] if exponent != "e" else None)
        if written:
            tens = int(written.replace(" ", ""))
            if abs(tens) > MAX_DIGITS:
                return None
            return (_decimal(match[base]) if base else 1) * Fraction(10) ** tens
    return _decimal(match["decimal"])


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


# Beside a number without a space; of one letter there, it is a variable.
_ABBREVIATIONS = word_set(
    "cm mm km kg mg lb lbs oz ft in mi mph kph sec min hr hrs ml am pm nm hz khz mhz ghz kb mb gb tb kw kwh mol"
)
_LETTERS = frozenset("mgshlNJWKCFVAL")  # units of one letter
_RAISED = r"(?:\s?\^\s?\{?\s?[23]\s?\}?)?"
_UNIT = re.compile(rf"[a-zA-Z]+\.?{_RAISED}(?:(?:\s?/\s?|[ -])[a-zA-Z]+{_RAISED}){{0,3}}")
_NO_UNIT = word_set(
    "and or not less more fewer than times plus minus over half halves third thirds quarter quarters fourth fourths "
    "fifth fifths tenth tenths hundredth hundredths squared cubed to of is if when where but because hundred thousand "
    "million billion trillion dozen point approximately about mod modulo factorial"
)
_ONE_NAME = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "inche": "in", "inch": "in", "feet": "ft", "foot": "ft", "mile": "mi",
    "gram": "g", "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "liter": "l",
    "litre": "l", "dollar": "dollar", "usd": "dollar", "percent": "%", "percentage": "%", "pct": "%", "pound": "lb",
    "deg": "degree", "unit": "",
}  # fmt: skip
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?\s?([CF]?)")
_BASE = re.compile(r"_\s?(?:\{\s?(\d{1,2})\s?\}|(\d))")


def _unit(text: str) -> str | None:
    """The unit that `text` is, in one spelling; "" where there is none, None where it is something else."""
    if not text.strip():
        return ""
    stripped = text.strip()
    if stripped == "%":
        return "%"
    degrees = _DEGREES.fullmatch(stripped)
    if degrees:
        return f"degree {degrees[1]}".strip()
    base = _BASE.fullmatch(stripped)
    if base:
        return f"base {base[1] or base[2]}"
    if not _UNIT.fullmatch(stripped):
        return None
    words = re.findall(r"[a-zA-Z]+|\d|/", stripped)
    if not text[0].isspace() and words[0].lower() not in _ABBREVIATIONS:
        return None
    if _NO_UNIT.intersection(w.lower() for w in words):
        return None
    if any(len(w) == 1 and w.isalpha() and w not in _LETTERS for w in words):
        return None
    names = [_one_name(w) for w in words]
    for shape, power in (("square", "2"), ("sq", "2"), ("cubic", "3")):
        if names[0] == shape and len(names) > 1:
            names = [names[1], power, *names[2:]]
    return " ".join("/" if n == "per" else n for n in names if n)


def _known_unit(word: str) -> bool:
    name = word.lower()
    return name in _ABBREVIATIONS or name in _ONE_NAME or name.removesuffix("s") in _ONE_NAME


def _one_name(word: str) -> str:
    name = word.lower()
    if name in _ONE_NAME:
        return _ONE_NAME[name]
    singular = name.removesuffix("s") if len(name) > 2 else name
    return _ONE_NAME.get(singular, singular)
