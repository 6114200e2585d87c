"""Problems from files and from the Hugging Face Hub: GSM8K, MATH, DAPO-Math, and columns of any other name.

docs/tasks.md describes the formats.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from rhyme_jax.errors import InputError
from rhyme_jax.tasks import files, grading, templates
from rhyme_jax.tasks.problems import MathProblem, Source, Split, normalized


@dataclasses.dataclass(frozen=True)
class Format:
    """What a data set calls its columns, and how its questions are put unless the config says otherwise."""

    question: str  # its column; dots lead into objects
    answers: tuple[str, ...]  # columns of answers: the first that a row has counts
    gold: Callable[[str, str], str | None]  # (column, text): the gold answer in it; None where there is none
    wanted: str  # what the answer's column must be, for errors
    template: str  # see `templates`
    style: str


def _of_gsm8k(column: str, text: str) -> str | None:
    answer = grading.extract_answer(text, ("hashes",))
    return answer if answer and grading.parse_number(answer) is not None else None


def _of_math(column: str, text: str) -> str | None:
    boxed = grading.extract_answer(text, ("boxed",))
    return boxed if boxed is not None or column == "solution" else text


def _whole(column: str, text: str) -> str | None:
    return text


FORMATS = {
    # Cobbe et al. 2021, Training verifiers to solve math word problems.
    "gsm8k": Format("question", ("answer",), _of_gsm8k, "must end in '#### number'", "instruct", "hashes"),
    # Hendrycks et al. 2021, Measuring mathematical problem solving with the MATH dataset; MATH-500 has answers, too.
    "math": Format("problem", ("answer", "solution"), _of_math, "must hold \\boxed{answer}", "instruct", "boxed"),
    # Yu et al. 2025, DAPO; the format of verl. Its questions say how to answer: "Answer: ..." on a line of its own.
    "dapo": Format("prompt", ("reward_model.ground_truth",), _whole, "must be an answer", "plain", "phrase"),
    "qa": Format("question", ("answer",), _whole, "must be an answer", "instruct", "boxed"),
}


def load(source: Source) -> Split:
    """Disjoint (train, eval) problems of files in one of FORMATS."""
    return files.split(source, lambda field: read(source, field))


def read(source: Source, field: str) -> dict[str, MathProblem]:
    """The problems of the file, directory or data set of the Hub that a field names, by their questions but for white
    space; of those that ask the same the first.

    Raises:
      InputError: with the path, the line or row, the column and what is wrong with it.
    """
    path, options = getattr(source.options, field), source.options
    kind = FORMATS[options.name]
    if not path:
        raise source.error(
            field, f"a JSONL, JSON or Parquet file, a directory of them or hf:ORG/NAME is needed for "
            f"{source.section}.name={options.name!r}", repr(path)
        )  # fmt: skip
    template, extractors = templates.template(source, kind.template), templates.extractors(source, kind.style)
    question_column = options.question_column or kind.question
    answer_columns = (options.answer_column,) if options.answer_column else kind.answers
    problems: dict[str, MathProblem] = {}
    kept = 0
    for where, row in files.rows(f"{source.section}.{field}", path, (question_column, *answer_columns)):
        question = _question(where, row, question_column)
        column = next((c for c in answer_columns if _value(row, c) is not None), answer_columns[0])
        text = _text(where, row, column)
        gold = kind.gold(column, text)
        if not gold:
            raise InputError(f"{where}: {column!r} {kind.wanted}, got {text[-40:]!r}")
        key = normalized(question)
        if key in problems:
            continue
        kept += len(question) + len(gold)
        if kept > files.MAX_KEPT:
            raise source.error(field, f"holds more than {files.MAX_KEPT} characters of problems")
        asked = templates.asked(template, question, extractors[0])
        problems[key] = MathProblem(asked, True, source.task, gold, extractors)
    if not problems:
        raise source.error(field, "holds no problems")
    return problems


# --- a row ----------------------------------------------------------------------------------------------------


def _value(row: Any, column: str) -> Any:
    """What a row has in a column; None where it has no such column."""
    if column in row:
        return row[column]
    for name in column.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def _text(where: str, row: dict, column: str) -> str:
    value = _value(row, column)
    text = str(value) if type(value) in (int, float) else value
    if not isinstance(text, str) or not text.strip():
        raise InputError(
            f"{where}: field {column!r} must be a non-empty string, got {value!r:.60}{_columns(row, value)}"
        )
    if len(text) > files.MAX_LINE:
        raise InputError(f"{where}: field {column!r} has {len(text)} characters; the most is {files.MAX_LINE}")
    return text.strip()


def _question(where: str, row: dict, column: str) -> str:
    """A text, or the one message of a chat."""
    value = _value(row, column)
    if not isinstance(value, list):
        return _text(where, row, column)
    roles = [m.get("role") if isinstance(m, dict) else None for m in value[:9]]
    if roles != ["user"]:
        raise InputError(
            f"{where}: field {column!r} must be a text or a chat with one message, of the role 'user'; its roles are "
            f"{roles!r:.60} (a system message belongs into system_prompt)"
        )
    return _text(where, value[0], "content")


def _columns(row: dict, value: Any) -> str:
    """What a row without a column has instead."""
    if value is not None or not row:
        return ""
    names = [f"{name!s:.20}" for name in itertools.islice(row, 4)]
    return f"; there are {', '.join(names)}{', ...' if len(row) > 4 else ''}"
