"""Problems from files and from the Hugging Face Hub: GSM8K, MATH, DAPO-Math, and columns of any other name.

Files are JSONL, JSON or Parquet, or directories of them. They are read piece by piece, and what is kept of them is
bounded, so that no file can fill the memory. docs/tasks.md describes the formats.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.tasks import grading, templates
from rhyme_jax.tasks.problems import MathProblem, Problem, Source, Split, normalized

MAX_LINE = 2**22  # bytes of a line of JSONL, of text in a row of Parquet
MAX_JSON = 2**26  # bytes of a .json file, which is read whole
MAX_KEPT = 2**30  # characters of all questions and answers
MAX_GROUP = 2**30  # bytes of a row group of Parquet, unpacked: a few kilobytes can unpack to gigabytes
MAX_FILES = 100_000  # of a directory
ROWS = 64  # of Parquet that are unpacked at a time
SUFFIXES = (".jsonl", ".json", ".parquet")
HUB = "hf:"
_HUB_SPEC = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.+-]*(?:\[[\w%:+-]*\])?))?(?::([\w.-]+))?", re.ASCII
)

Row = tuple[str, dict]  # where it stands, for errors; its columns


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
    return split(source, lambda field: read(source, field))


def split(source: Source, read_field: Callable[[str], dict[str, Problem]]) -> Split:
    """Disjoint (train, eval) problems of the files that a task's section names.

    Which problems are evaluated with follows from a hash of their questions: eval problems are those with the smallest,
    train problems those with the largest. So a file that grows moves no problem from one set into the other, as long
    as it holds more than both together.

    Args:
      read_field: the problems of the file that a field names, "path" or "eval_path", by their normalized questions.

    Raises:
      InputError: a file is missing or malformed, or holds fewer problems than asked for.
    """
    options = source.options
    problems = read_field("path")
    wanted = f"{source.section}.train_size + {source.section}.eval_size = {options.train_size} + {options.eval_size}"
    if not options.eval_path:
        if len(problems) < options.train_size + options.eval_size:
            raise source.error("path", f"holds {len(problems)} different problems, fewer than {wanted}")
        order = _by_hash(problems, options.seed)
        return _chosen(problems, order[::-1], options.train_size), _chosen(problems, order, options.eval_size)
    held_out = read_field("eval_path")
    kept = {question: p for question, p in problems.items() if question not in held_out}
    if dropped := len(problems) - len(kept):
        source.say(
            f"{source.section}.path={options.path}: {dropped} of {len(problems)} problems are also in "
            f"{source.section}.eval_path, and are not trained on"
        )
    for field, size, have in (("path", "train_size", kept), ("eval_path", "eval_size", held_out)):
        if len(have) < getattr(options, size):
            raise source.error(
                field,
                f"holds {len(have)} different problems{' that eval_path has not' if field == 'path' else ''}, fewer "
                f"than {source.section}.{size}={getattr(options, size)}",
            )
    train = _chosen(kept, _by_hash(kept, options.seed)[::-1], options.train_size)
    return train, _chosen(held_out, _by_hash(held_out, options.seed), options.eval_size)


def _by_hash(problems: dict[str, Problem], seed: int) -> list[str]:
    return sorted(problems, key=lambda question: hashlib.sha256(f"{seed}\0{question}".encode()).digest())


def _chosen(problems: dict[str, Problem], order: list[str], size: int) -> list[Problem]:
    return [problems[question] for question in order[:size]]


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
    needed = (question_column, *answer_columns)
    rows = _hub_rows(source, field) if path.startswith(HUB) else _file_rows(source, field, pathlib.Path(path), needed)
    for where, row in rows:
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
        if kept > MAX_KEPT:
            raise source.error(field, f"holds more than {MAX_KEPT} characters of questions and answers", path)
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
    if len(text) > MAX_LINE:
        raise InputError(f"{where}: field {column!r} has {len(text)} characters; the most is {MAX_LINE}")
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


# --- files ----------------------------------------------------------------------------------------------------


def _file_rows(source: Source, field: str, path: pathlib.Path, columns: tuple[str, ...]) -> Iterator[Row]:
    for file in _files(source, field, path):
        where = f"{source.section}.{field}={file}"
        try:
            if file.suffix == ".parquet":
                yield from _parquet(where, file, columns)
            elif file.suffix == ".json":
                yield from _json(where, file)
            else:
                yield from _jsonl(where, file)
        except OSError as e:
            raise InputError(f"{where}: cannot be read ({one_line(e)})") from e


def _files(source: Source, field: str, path: pathlib.Path) -> list[pathlib.Path]:
    """The file itself, or those of a directory and of directories in it, in the order of their names."""
    try:
        if path.is_dir():
            found = (p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            files = sorted(itertools.islice(found, MAX_FILES + 1))
            if not files:
                raise source.error(field, f"holds no files that end in {', '.join(SUFFIXES)}")
            if len(files) > MAX_FILES:
                raise source.error(field, f"holds more than {MAX_FILES} files")
            return files
        if path.is_file():  # not a pipe, which would never end
            return [path]
    except (OSError, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise source.error(field, f"cannot be read ({one_line(e)})") from e
    raise source.error(field, "no such file")


def _jsonl(where: str, file: pathlib.Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number in itertools.count(1):
            line = lines.readline(MAX_LINE + 1)
            if not line:
                return
            at = f"{where}, line {number}"
            if len(line) > MAX_LINE:
                raise InputError(f"{at}: longer than {MAX_LINE} bytes")
            text = _decoded(at, line, first=number == 1)
            if text.strip():
                yield at, _object(at, _parsed(at, text))


def _json(where: str, file: pathlib.Path) -> Iterator[Row]:
    """An object, a list of objects, or JSONL by another name."""
    if (size := file.stat().st_size) > MAX_JSON:
        raise InputError(f"{where}: has {size} bytes; the most is {MAX_JSON}, larger data must be JSONL or Parquet")
    text = _decoded(where, file.read_bytes(), first=True)
    try:
        value = _parsed(where, text)
    except InputError:
        if "\n" not in text.strip():
            raise
        yield from _jsonl(where, file)
        return
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        at = f"{where}, row {number}" if isinstance(value, list) else where
        yield at, _object(at, row)


def _decoded(where: str, data: bytes, first: bool) -> str:
    try:
        return data.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as e:
        raise InputError(f"{where}: not readable as UTF-8 text ({one_line(e)})") from e


def _parsed(where: str, text: str) -> Any:
    """Decimals stay text, so that a gold answer is exactly what was written."""
    try:
        return json.loads(text, parse_float=str)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: not valid JSON") from e


def _object(where: str, row: Any) -> dict:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object with a question and an answer, got {row!r:.40}")
    return row


def _parquet(where: str, file: pathlib.Path, columns: tuple[str, ...]) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise InputError(f"{where}: Parquet files need pyarrow: pip install pyarrow") from e
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            wanted = [n for n in names if n in columns or n in {c.partition(".")[0] for c in columns}]
            if not wanted:
                raise InputError(f"{where}: has none of the columns {', '.join(columns)}; there are {names!r:.100}")
            for group in range(table.num_row_groups):
                if (size := table.metadata.row_group(group).total_byte_size) > MAX_GROUP:
                    raise InputError(f"{where}, row {number + 1}: a row group of {size} bytes; the most is {MAX_GROUP}")
            for batch in table.iter_batches(ROWS, columns=wanted):
                for i in range(batch.num_rows):
                    number += 1
                    yield f"{where}, row {number}", {name: batch.column(name)[i].as_py() for name in wanted}
    except (pyarrow.ArrowException, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{where}: not readable as Parquet after row {number} ({one_line(e)})") from e


# --- the Hub --------------------------------------------------------------------------------------------------


def _hub_rows(source: Source, field: str) -> Iterator[Row]:
    """hf:ORG/NAME[:SPLIT][:CONFIG], through the `datasets` package."""
    spec = getattr(source.options, field)
    found = _HUB_SPEC.fullmatch(spec.removeprefix(HUB))
    if found is None:
        raise source.error(field, "a data set of the Hub is hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME:SPLIT:CONFIG")
    name, split, config = found.groups()
    try:
        import datasets
    except ImportError as e:
        raise source.error(field, "data sets of the Hub need the datasets package: pip install datasets") from e
    try:
        table = datasets.load_dataset(name, config, split=split or "train")
    except Exception as e:  # of the network, the Hub, the data set's files
        raise source.error(
            field,
            f"cannot be loaded ({one_line(e):.200}); without a network, download it elsewhere and name its files "
            "instead, or set HF_HOME to a cache that holds it",
        ) from e
    try:
        for number, row in enumerate(table, 1):
            yield f"{source.section}.{field}={spec}, row {number}", _object(spec, row)
    except (OSError, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise source.error(field, f"cannot be read ({one_line(e)})") from e
