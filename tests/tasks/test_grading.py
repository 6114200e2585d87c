"""Grading: tables of answers, what no text can do, and that numbers survive being written out."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.tasks.grading import EXTRACTORS, exact_match, extract_answer, parse_number

MINUS = "\N{MINUS SIGN}"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("0", 0),
        ("-0", 0),
        ("7", 7),
        ("007", 7),
        ("+7", 7),
        ("-3", -3),
        (f"{MINUS}3", -3),
        ("- 3", -3),
        ("1,000", 1000),
        ("1,234,567.5", Fraction("1234567.5")),
        ("12,345", 12345),
        ("$1,234.00", 1234),
        ("$ 5", 5),
        ("-$5", -5),
        ("$-5", -5),
        (f"${MINUS}5", -5),
        ("7.0", 7),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("0.1", Fraction(1, 10)),
        ("50%", 50),
        ("50\\%", 50),
        ("50 %", 50),
        ("7.", 7),
        ("7.5.", Fraction(15, 2)),
        ("50%.", 50),
        ("  7\t", 7),
        ("1" * 400, int("1" * 400)),
    ],
)
def test_numbers(answer, number):
    assert parse_number(answer) == number


@pytest.mark.parametrize(
    "answer",
    [
        *("", " ", ".", "-", "$", "%", ",", "+", "seven", "nan", "inf", "NaN", "None"),
        *("12abc", "x12", "12 apples", "1 2", "7 8", "7\n8", "3+4", "=7"),
        *("1,00", "1,0000", "1,,000", ",000", "1,000,", "1234,567", "1,000,00", "1.000,5", "1,.5"),
        *("1e3", "1E3", "0x10", "1_000", "1/2", "\\frac{1}{2}", "1.2.3", "..5", "7..", "5 .5"),
        *("--3", "+-3", "-+3", "-$-3", f"{MINUS}-3", "3-", "$$5", "5$", "%5", "50%%"),
        *("²", "½", "Ⅷ", "∞", "9^{9^{9^9}}", "2**3", "__import__('os')", "1" * 401),
    ],
)
def test_what_is_no_number(answer):
    assert parse_number(answer) is None


@pytest.mark.parametrize(
    ("text", "extractor", "answer"),
    [
        ("#### 7", "hashes", "7"),
        ("3+4=7\n#### 7", "hashes", "7"),
        ("####7", "hashes", "7"),
        ("####\t 7  \r\n", "hashes", "7"),
        ("#### 7\nThat is all.\n\nBye.", "hashes", "7"),  # text after the answer
        ("#### 7\n#### 8", "hashes", "8"),  # the last counts
        ("#### 7 #### 8", "hashes", "8"),
        ("#### 7\n####", "hashes", ""),
        ("####\n7", "hashes", ""),
        ("##### 7", "hashes", "# 7"),
        ("### 7", "hashes", None),
        ("the answer is 7", "hashes", None),
        ("", "hashes", None),
        (r"so \boxed{7}.", "boxed", "7"),
        (r"\boxed{7} and \boxed{8}", "boxed", "8"),
        (r"\boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        (r"\boxed{a{b{c}d}e} f}", "boxed", "a{b{c}d}e"),
        (r"\boxed{1 + \boxed{2}}", "boxed", "2"),
        (r"\boxed{7} then \boxed{8", "boxed", "7"),  # cut off by the budget
        (r"\boxed{7} then \boxed{{8}", "boxed", "7"),
        (r"\boxed{ \boxed{7}", "boxed", "7"),
        (r"}} \boxed{7}", "boxed", "7"),
        (r"{{ \boxed{7}", "boxed", "7"),
        (r"\boxed{}", "boxed", ""),
        (r"\boxed 7", "boxed", None),
        (r"\boxed{7", "boxed", None),
        ("boxed{7}", "boxed", None),
        ("no box", "boxed", None),
        ("The answer is 7", "phrase", "7"),
        ("Answer: $7", "phrase", "$7"),
        ("FINAL ANSWER:7\nDone.", "phrase", "7"),
        ("the answer is: 7.", "phrase", "7."),
        ("the answer  is 5, no, the answer is 6", "phrase", "6"),
        ("answer:\n7", "phrase", ""),
        ("answers 7", "phrase", None),
    ],
)
def test_extraction(text, extractor, answer):
    assert extract_answer(text, (extractor,)) == answer


def test_the_first_extractor_that_finds_something_decides():
    text = "answer is 1\n\\boxed{2}\n#### 3"
    assert extract_answer(text, ("hashes", "boxed", "phrase")) == "3"
    assert extract_answer(text, ("phrase", "boxed")) == "1"
    assert extract_answer(text[:-2], ("hashes", "boxed", "phrase")) == ""  # declared, and empty
    assert extract_answer("answer is 1", ("hashes", "boxed", "phrase")) == "1"
    assert extract_answer(text, ()) is None
    with pytest.raises(ValueError, match=r"unknown extractor 'xml'; there are hashes, boxed, phrase"):
        extract_answer(text, ("xml",))


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("#### 7.0", 7, 1),
        ("#### 7", 7, 1),
        ("#### 0", 0, 1),  # a gold of 0 is a number like any other
        ("#### -0.0", 0, 1),
        ("####", 0, 0),
        ("", 0, 0),
        ("#### none", 0, 0),
        ("#### 1", 0, 0),
        ("#### -3", -3, 1),
        (f"#### {MINUS}3", -3, 1),
        ("#### 3", -3, 0),
        ("#### $1,234.00", 1234, 1),
        (r"\boxed{50\%}", 50, 1),
        (r"\boxed{7} I am sure." + "\n", 7, 1),
        ("The answer is 1,000.", 1000, 1),
        ("#### 0.3", Fraction(3, 10), 1),  # exact, where floats would have 0.1 + 0.2 != 0.3
        ("#### 0.30000000000000004", Fraction(3, 10), 0),
        ("#### 7 apples", 7, 0),
        ("7", 7, 0),
        ("#### 8\n#### 7\nwait\n", 7, 1),
        ("#### 7\n#### 8", 7, 0),
    ],
)
def test_rewards(text, gold, reward):
    got = exact_match(text, Fraction(gold), EXTRACTORS)
    assert got == reward and type(got) is float


MANY = 100_000


HOSTILE = {
    "digits after hashes": "#### " + "9" * 2_000_000,
    "digits in a box": "\\boxed{" + "9" * 2_000_000 + "}",
    "digits after a phrase": "answer is " + "9" * 2_000_000,
    "a tower of powers": "#### 9^{9^{9^9}}",
    "boxes never closed": "\\boxed{" * MANY,
    "braces never closed": "\\boxed{" + "{" * MANY,
    "a box over boxes never closed": "\\boxed{" * MANY + "}",
    "nested boxes": "\\boxed{" * MANY + "}" * MANY,
    "closing braces": "}" * MANY + "\\boxed{",
    "backslashes": "\\boxed" * MANY,
    "hashes": "#" * 2_000_000,
    "empty answers": "####\n" * MANY,
    "answers in answers": "#### " * MANY,
    "spaces after hashes": "####" + " " * 2_000_000,
    "spaces in a number": "#### -" + " " * MANY + "$" + " " * MANY + "x",
    "separators": "#### 1" + ",111" * MANY + ",",
    "decimals": "#### 1." + "1" * MANY + "x",
    "phrases": "answer is " * MANY,
    "phrases without end": "answer" + " " * MANY,
    "many phrases without end": ("answer" + " " * 1000) * 1000,
    "lines": "answer" + "\n" * MANY + "is" + "\n" * MANY,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_costs_no_time(name):
    start = time.process_time()
    for extractors in (EXTRACTORS, *((e,) for e in EXTRACTORS)):
        assert exact_match(HOSTILE[name], Fraction(7), extractors) == 0
    assert time.process_time() - start < 2  # measured 0.5 at most; quadratic time would be minutes


# --- properties -----------------------------------------------------------------------------------------------

PIECES = ["####", " ", "\n", "\\boxed{", "{", "}", "answer is", "Answer:", "$", "-", MINUS, "+", ",", ".", "%", "\\%"]
MATHS = st.lists(
    st.sampled_from(PIECES) | st.integers(0, 99999).map(str) | st.characters(categories=["Nd", "No", "Zs", "Cs"]),
    max_size=40,
).map("".join)


@settings(deadline=None)
@given(st.text() | MATHS, st.permutations(EXTRACTORS))
def test_no_text_raises(text, extractors):
    assert exact_match(text, Fraction(7), extractors) in (0.0, 1.0)
    parse_number(text)


def boxes_by_scanning(text: str) -> str | None:
    """The last closed box, found by counting braces from each in turn."""
    content = None
    for start in range(len(text)):
        if text.startswith("\\boxed{", start):
            depth, at = 1, start + len("\\boxed{")
            begin = at
            while at < len(text) and depth:
                depth += {"{": 1, "}": -1}.get(text[at], 0)
                at += 1
            content = text[begin : at - 1].strip() if depth == 0 else content
    return content


@settings(deadline=None)
@given(st.lists(st.sampled_from(["\\boxed{", "\\boxed", "\\", "{", "}", "}", "7", " "]), max_size=30).map("".join))
def test_boxes_equal_the_oracle(text):
    assert extract_answer(text, ("boxed",)) == boxes_by_scanning(text)


@st.composite
def written_numbers(draw):
    """(a decimal number, a way of writing it)"""
    whole, decimals = draw(st.integers(0, 10**12)), draw(st.none() | st.text("0123456789", min_size=1, max_size=6))
    sign, currency = draw(st.sampled_from(["", "+", "-", MINUS])), draw(st.sampled_from(["", "$", "$ "]))
    digits = draw(st.sampled_from([str(whole), f"{whole:,}"])) + ("" if decimals is None else f".{decimals}")
    if sign in ("-", MINUS) and currency and draw(st.booleans()):
        sign, currency = currency, sign  # $-5
    value = Fraction(f"{whole}.{decimals or 0}") * (-1 if "-" in sign + currency or MINUS in sign + currency else 1)
    return value, sign + currency + digits + draw(st.sampled_from(["", "%", "\\%", " %"])) + draw(
        st.sampled_from(["", "."])
    )


@settings(deadline=None)
@given(written_numbers(), st.sampled_from(["#### {}", "so\n####{}\nbye", "\\boxed{{{}}}", "The answer is {}"]))
def test_written_numbers_are_read_back(written, template):
    value, text = written
    assert parse_number(text) == value
    assert exact_match(template.format(text), value, EXTRACTORS) == 1
    assert exact_match(template.format(text), value + 1, EXTRACTORS) == 0


@settings(deadline=None)
@given(st.fractions(), st.text(max_size=5))
def test_undeclared_answers_earn_nothing(gold, text):
    if not any(mark in text.lower() for mark in ("####", "\\boxed", "answer")):
        assert exact_match(f"{text}{gold}", gold, EXTRACTORS) == 0
