r"""Formulas, compared by `math-verify`'s reader of TeX. Only in grading processes, within limits of time and memory.

What a model writes is never evaluated as Python. `math_verify.parse` may hand text to `sympy.parse_expr`, which calls
`eval` (its `ExprExtractionConfig`, on by default), and SymPy itself does so with any string that reaches `sympify`. So
text is first taken apart into tokens, all of which must be on a list, and put together anew; that is read by
`latex2sympy`, the grammar (ANTLR) behind math-verify, which makes SymPy's objects without `sympify` on text. Limits on
length, nesting, digits and exponents refuse what would only cost time.

Two expressions are equal where they have the same value, to a hundred digits, at random points. math-verify's own
comparison of expressions rounds to 6 to 15 digits, so that 0.333333 passes for 1/3, and simplifies, which may take
minutes; it is left with sets. It has a time limit of its own, by `signal.alarm`, which fails outside of the main
thread: it is off, and the process ends itself instead (`Limits`).
"""

import contextlib
import faulthandler
import functools
import logging
import os
import re
import sys
import zlib
from collections.abc import Iterator
from typing import Any

from rhyme_jax.tasks.answers import word_set

SECONDS = 2.0  # most that the formulas of one grade may take
MEMORY = 1 << 30  # bytes, most that they may take beside what the process has
MAX_TOKENS = 200
_MAX_LENGTH = 400
_MAX_DIGITS = 20
_MAX_DEPTH = 12

_enabled = False


def enable() -> None:
    """Allows formulas in this process, which a formula may end. The first one loads math-verify, in about a second."""
    global _enabled
    _enabled = True


class Limits:
    """A context in which `equal` may be called, for one grade. The process exits if that takes longer than SECONDS."""

    def __enter__(self) -> "Limits":
        self._stack = contextlib.ExitStack()
        self._begun = False
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def equal(self, gold: str, answer: str) -> bool | None:
        r"""Whether two formulas in TeX are equal. None where gold is not understood, formulas are not enabled in this
        process, or memory does not suffice; an answer that is not understood is wrong.
        """
        right = sanitized(gold)
        if right is None:
            return None if re.search(r"[\\^+*/=<>_|!-]|\d\s*[a-z]", gold) else False  # or else it is words
        given = sanitized(answer)
        if given is None:
            return False
        if not _enabled:
            return None
        if not self._begun:
            self._begin()
        try:
            return _equal(right, given)
        except (MemoryError, RecursionError):
            return None

    def _begin(self) -> None:
        self._begun = True
        _library()  # has all the time that it needs
        # A thread of C calls _exit, whatever Python is busy with. Its report of where that was would be of no use.
        silence = os.open(os.devnull, os.O_WRONLY)
        self._stack.callback(os.close, silence)
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=silence)
        self._stack.callback(faulthandler.cancel_dump_traceback_later)
        if sys.platform == "linux":
            import resource

            with open("/proc/self/statm") as f:
                used = int(f.read().split()[5]) * resource.getpagesize()
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = used + MEMORY
            if hard == resource.RLIM_INFINITY or most < hard:
                resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
                self._stack.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))


# --- what may be read -----------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\[{}|]|(?:\d+(?:\.\d+)?|\.\d+)(?![\d.])|[a-zA-Z]+|[-+*/^_()\[\]{}|!,=<>]|\s+")
_FUNCTIONS = word_set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp")
_GREEK = word_set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi "
    "omega Delta Omega Sigma Phi Psi Theta"
)
_COMMANDS = (
    _FUNCTIONS | _GREEK | word_set("pi infty cdot frac sqrt lfloor rfloor lceil rceil cup cap setminus in emptyset")
)
_OTHERS = {"\\times": "\\cdot ", "*": "\\cdot ", "\\le": "\\leq ", "\\ge": "\\geq ", "\\ne": "\\neq "}
_OPENING, _CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")
_KEPT = re.compile(
    r"\\mathbb\s*\{\s*(?P<set>[RZQNC])\s*\}"
    r"|\\d?binom\s*\{\s*(?P<n>[a-zA-Z0-9]{1,2})\s*\}\s*\{\s*(?P<k>[a-zA-Z0-9]{1,2})\s*\}"
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


def sanitized(text: str) -> str | None:
    """The formula in the TeX that `latex2sympy` reads, made of known parts alone; None where it has others or is too
    large.
    """
    if len(text) > _MAX_LENGTH or "\\kept" in text:
        return None
    kept: list[str] = []  # sets and binomial coefficients, in which the grammar wants no space

    def keep(match: re.Match) -> str:
        kept.append(f"\\mathbb{{{match['set']}}}" if match["set"] else f"\\binom{{{match['n']}}}{{{match['k']}}}")
        return "\\kept "

    text = _KEPT.sub(keep, text)
    tokens, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        at = token.end()
        if not token[0].isspace():
            tokens.append(token[0])
    tokens = _letters(tokens)
    if not tokens or len(tokens) > MAX_TOKENS or not _balanced(tokens) or not _small(tokens, 0):
        return None
    return _written(_roots(tokens), iter(kept))


def _letters(tokens: list[str]) -> list[str]:
    """Words as functions or products of letters; unknown ones and unknown commands give nothing."""
    letters = []
    for token in tokens:
        name = token.removeprefix("\\")
        if not name[0].isalpha():
            letters.append(token)
        elif token[0] == "\\":
            if name not in _COMMANDS and token not in _OTHERS and token != "\\kept":
                return []
            letters.append(token)
        elif name in _FUNCTIONS or name in ("pi", "sqrt"):
            letters.append("\\" + name)
        elif len(name) <= 3:
            letters += name
        else:
            return []
    return letters


def _balanced(tokens: list[str]) -> bool:
    """Brackets match in number and are not nested deeply. Of which kind they are may differ, for intervals."""
    depth = 0
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if not 0 <= depth <= _MAX_DEPTH:
            return False
    return depth == 0


def _argument(tokens: list[str], at: int) -> int:
    """The end of the group or single token that begins at `at`."""
    depth = 0
    for end in range(at, len(tokens)):
        depth += (tokens[end] in _OPENING) - (tokens[end] in _CLOSING)
        if depth <= 0 and tokens[end] not in ("-", "+"):
            return end + 1
    return len(tokens)


def _small(tokens: list[str], height: int) -> bool:
    """No number is long, and no power towers: an exponent has at most 3 digits, in an exponent 1."""
    most = (_MAX_DIGITS, 3, 1)[height]
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if (token[0].isdigit() and len(token) > most) or (token == "!" and height):
            return False
        at += 1
        if token == "^":
            end = _argument(tokens, at)
            if height == 2 or not _small(tokens[at:end], height + 1) or tokens[end : end + 1] == ["^"]:
                return False
            at = end
    return True


def _roots(tokens: list[str]) -> list[str]:
    r"""sqrt(x) as \sqrt{x}."""
    roots = list(tokens)
    for at, token in enumerate(tokens):
        if token == "\\sqrt" and tokens[at + 1 : at + 2] == ["("]:
            end = _argument(tokens, at + 1)
            roots[at + 1], roots[end - 1] = "{", "}"
    return roots


def _written(tokens: list[str], kept: Iterator[str]) -> str:
    r"""The tokens in TeX. Decimals become fractions, which are exact. Braces that are no argument become parentheses,
    and products of numbers are marked: the grammar reads (2)(3) and \frac{4}{2}(3) as mixed numbers, 5.
    """
    parts: list[str] = []
    roles: list[str] = []  # of the open braces
    before = ""  # the token before, or for a brace the role of what it closes
    at = 0
    while at < len(tokens):
        token, (first, second, third) = tokens[at], [*tokens[at + 1 : at + 4], "", "", ""][:3]
        argument = before in ("^", "_")
        factor = before in (")", "lower", "kept", "number")
        at += 1
        if _NUMBER.fullmatch(token):
            if factor:
                parts.append("\\cdot ")
            over = first == "/" and token.isdigit() and second.isdigit()
            if over and third not in ("^", "!") and not argument and before != "/":
                parts.append(f"\\frac{{{token}}}{{{second}}}")  # 2/3x is (2/3)x
                before, at = "lower", at + 2
                continue
            mixed = _mixed(token, tokens[at : at + 7])
            whole, _, decimals = token.partition(".")
            written = mixed or (f"\\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}" if decimals else token)
            parts.append(written if written == token and not argument else f"{{{written}}}")
            before = "argument" if argument else "lower" if mixed else "number"
            at += 7 if mixed else 0
        elif token == "{":
            argument = argument or before in ("\\sqrt", "root")
            role = "argument" if argument else {"\\frac": "upper", "upper": "lower"}.get(before, ")")
            parts.append("{" if role != ")" else "\\cdot (" if factor else "(")
            roles.append(role)
            before = "{"
        elif token == "}":
            before = roles.pop() if roles else ")"
            parts.append(")" if before == ")" else "}")
        elif token in ("(", "\\frac", "\\kept"):
            parts.append("\\cdot " if factor else "")
            parts.append(next(kept) if token == "\\kept" else token)
            before = "kept" if token == "\\kept" else token
        else:
            parts.append(_OTHERS.get(token) or (token + " " if token[-1].isalpha() else token))
            before = "root" if token == "]" else token
    return "".join(parts)


def _mixed(whole: str, tokens: list[str]) -> str | None:
    r"""The fraction that a mixed number is, if \frac{1}{2} or the like follows."""
    if [*tokens[:2], *tokens[3:5], *tokens[6:]] != ["\\frac", "{", "}", "{", "}"]:
        return None
    if not (whole.isdigit() and tokens[2].isdigit() and tokens[5].isdigit()) or int(tokens[2]) >= int(tokens[5]):
        return None
    return f"\\frac{{{int(whole) * int(tokens[5]) + int(tokens[2])}}}{{{tokens[5]}}}"


# --- comparison -----------------------------------------------------------------------------------------------------

_DIGITS = 150  # that are computed
_AGREE = 100  # that must agree
_POINTS = 7


@functools.cache
def _library() -> Any:
    """What is used of math-verify, loaded when it is needed: a second, half of it for the first formula, and 60 MB."""
    import types

    import mpmath
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from latex2sympy2_extended.logic import And
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its time limit is off
    context = mpmath.MPContext()
    context.dps = _DIGITS
    names = ConversionConfig(lowercase_symbols=False)

    def read(text: str):
        return latex2sympy(text, is_real=None, normalization_config=None, conversion_config=names)

    read(r"\frac{x^{2}+1}{2\sqrt{3}}-e^{2x}(y+1)")  # the grammar builds its tables as it meets what needs them
    return types.SimpleNamespace(sympy=sympy, read=read, And=And, verify=verify, mp=context)


class _NotComputable(Exception):
    """An expression without a value, or with one that would take too long."""


@functools.lru_cache(256)
def _gold(text: str) -> Any:
    return _library().read(text)


def _equal(gold: str, answer: str) -> bool | None:
    if gold == answer:
        return True
    library = _library()
    try:
        right = _gold(gold)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # of any kind: the grammar's are plain Exceptions
        return None
    try:
        given = library.read(answer)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return False
    try:
        return _same(right, given)
    except (MemoryError, RecursionError):
        raise
    except _NotComputable:
        return None
    except Exception:  # SymPy fails in many ways on what makes no sense
        return False


def _same(gold: Any, answer: Any) -> bool | None:
    library, sympy = _library(), _library().sympy
    if isinstance(gold, library.And) or isinstance(answer, library.And):
        both = isinstance(gold, library.And) and isinstance(answer, library.And)
        if not both or len(gold._unsorted_args) != len(answer._unsorted_args):
            return False
        return all(_same(g, a) for g, a in zip(gold._unsorted_args, answer._unsorted_args))
    if isinstance(gold, sympy.core.relational.Relational) or isinstance(answer, sympy.core.relational.Relational):
        return _same_relations(gold, answer)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return _same_expressions(gold, answer)
    if isinstance(gold, sympy.Set) and isinstance(answer, sympy.Set):
        return bool(library.verify(gold, answer, timeout_seconds=None))
    return False


def _same_expressions(gold: Any, answer: Any) -> bool:
    """Where both are real, which leaves out, say, ln of a negative number; everywhere if that is nowhere."""
    mp, pairs = _library().mp, []
    for point in range(_POINTS if gold.free_symbols | answer.free_symbols else 1):
        pair = _values(gold, answer, point)
        if pair is not None:
            pairs.append(pair)
    if not pairs:
        raise _NotComputable
    real = [(g, a) for g, a in pairs if not mp.im(g) and not mp.im(a)]
    return all(_agree(g, a) for g, a in (real if len(real) > 2 else pairs))


def _values(gold: Any, answer: Any, point: int) -> tuple[Any, Any] | None:
    """None where gold has no value at the point. An answer that has none is wrong, as far as gold has one."""
    try:
        right = _value(gold, point)
    except (ZeroDivisionError, ValueError):
        return None
    try:
        return right, _value(answer, point)
    except (ZeroDivisionError, ValueError, _NotComputable):
        return right, _library().mp.nan


def _agree(a: Any, b: Any) -> bool:
    mp = _library().mp
    if not (mp.isfinite(a) and mp.isfinite(b)):
        return False
    return abs(a - b) <= mp.mpf(10) ** -_AGREE * max(1, abs(a), abs(b))


def _same_relations(gold: Any, answer: Any) -> bool:
    """a = b and c = d say the same if a - b is a multiple of c - d; so do inequalities, with regard to the sign."""
    relational = _library().sympy.core.relational
    if not all(isinstance(r, relational.Relational) for r in (gold, answer)):
        return False
    mp, ratios = _library().mp, []
    for point in range(_POINTS):
        pair = _values(gold.lhs - gold.rhs, answer.lhs - answer.rhs, point)
        if pair is None or not mp.isfinite(pair[1]):
            continue
        if not pair[0] or not pair[1]:
            return False
        ratios.append(pair[0] / pair[1])
    if len(ratios) < 3 or mp.im(ratios[0]) or not all(_agree(ratios[0], r) for r in ratios):
        return False
    flips = {relational.Gt: relational.Lt, relational.Lt: relational.Gt, relational.Ge: relational.Le}
    flips[relational.Le] = relational.Ge
    kind = type(answer) if mp.re(ratios[0]) > 0 else flips.get(type(answer), type(answer))
    return type(gold) is kind


def _value(expr: Any, point: int) -> Any:
    """The value of an expression where its symbols have those of a point. SymPy's own evaluation would compute exact
    powers of integers, of any size.

    Raises:
      _NotComputable: a function that is not known here, or too large an argument.
      ZeroDivisionError, ValueError: it has no value.
    """
    library, sympy, mp = _library(), _library().sympy, _library().mp
    if expr.is_Rational:
        return mp.mpf(expr.p) / expr.q
    if expr.is_Symbol:
        return mp.j if expr.name == "i" else _coordinate(expr.name, point)
    if expr is sympy.pi:
        return +mp.pi
    if expr is sympy.E:
        return +mp.e
    if expr is sympy.I:
        return mp.j
    args = [_value(a, point) for a in expr.args]
    kind = expr.func
    if any(not mp.isfinite(a) or abs(mp.mag(a or 1)) > 100_000 for a in args):
        raise _NotComputable
    if kind is sympy.Add:
        return mp.fsum(args)
    if kind is sympy.Mul:
        return mp.fprod(args)
    if kind is sympy.Pow:
        base, exponent = args
        if abs(exponent) * max(1, abs(mp.mag(base or 1))) > 1_000_000:
            raise _NotComputable
        return mp.power(base, exponent)
    if kind in (library.sympy.UnevaluatedExpr, sympy.re):
        return args[0]
    name = kind.__name__
    if name in _KNOWN and all(abs(a) < 10_000 for a in args):
        return getattr(mp, _KNOWN[name])(*args)
    raise _NotComputable


_ALIKE = word_set("sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log factorial floor binomial")
_KNOWN = {**dict(zip(_ALIKE, _ALIKE)), "Abs": "fabs", "ceiling": "ceil"}  # SymPy's names to mpmath's


def _coordinate(name: str, point: int) -> Any:
    """Between -5 and 5, not 0 and of no regularity; of the first points positive, so that roots and logarithms have
    real values; the others with signs.
    """
    mp, word = _library().mp, zlib.crc32(f"{name} {point}".encode())
    value = mp.mpf(word % 99_989 + 1) / 20_011
    return -value if point > 3 and (word >> 20) % 3 else value
