"""Files of problems: their rows, one by one, and which problems are held out.

Files are JSONL, JSON or Parquet, or directories of them, or data sets of the Hugging Face Hub. They are read piece by
piece, and what is read at a time is bounded, so that no file can fill the memory. docs/tasks.md describes them.
"""

import gzip
import hashlib
import itertools
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.tasks.problems import Problem, Source, Split

MAX_LINE = 2**24  # bytes of a line of JSONL, unpacked; characters of a text: some published cases have megabytes
MAX_JSON = 2**26  # bytes of a .json file, which is read whole
MAX_KEPT = 2**30  # characters of all problems
MAX_GROUP = 2**30  # bytes of a row group of Parquet, unpacked: a few kilobytes can unpack to gigabytes
MAX_FILES = 100_000  # of a directory
ROWS = 64  # of Parquet that are unpacked at a time
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
HUB = "hf:"
_HUB_SPEC = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.+-]*(?:\[[\w%:+-]*\])?))?(?::([\w.-]+))?", re.ASCII
)

Row = tuple[str, dict]  # where it stands, for errors; its columns


def rows(field: str, path: str, columns: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a file, of a directory of files, or of a data set of the Hub.

    Args:
      field: what the path is called, for errors: "task.path".
      path: a path, or hf:ORG/NAME[:SPLIT[:CONFIG]]. Files are JSONL but for those that end in .json or .parquet.
      columns: those that are read of Parquet files; dots lead into structs. Other rows come whole.

    Raises:
      InputError: with the path, the line or row, and what is wrong with it.
    """
    if path.startswith(HUB):
        yield from _hub_rows(field, path)
        return
    for file in _files(field, path):
        where = f"{field}={file}"
        try:
            if file.suffix == ".parquet":
                yield from _parquet(where, file, columns)
            elif file.suffix == ".json":
                yield from _json(where, file)
            else:
                yield from _jsonl(where, file)
        except (OSError, EOFError, zlib.error) as e:
            raise InputError(f"{where}: cannot be read ({one_line(e)})") from e


def _files(field: str, name: str) -> list[pathlib.Path]:
    """The file itself, or those of a directory and of directories in it, in the order of their names."""
    where, path = f"{field}={name}", pathlib.Path(name)
    try:
        if path.is_dir():
            found = (p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
            files = sorted(itertools.islice(found, MAX_FILES + 1))
            if not files:
                raise InputError(f"{where}: holds no files that end in {', '.join(SUFFIXES)}")
            if len(files) > MAX_FILES:
                raise InputError(f"{where}: holds more than {MAX_FILES} files")
            return files
        if path.is_file():  # not a pipe, which would never end
            return [path]
    except (OSError, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{where}: cannot be read ({one_line(e)})") from e
    raise InputError(f"{where}: no such file")


def _jsonl(where: str, file: pathlib.Path) -> Iterator[Row]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
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
    """Decimals become text: a gold answer is exactly what was written."""
    try:
        return json.loads(text, parse_float=str)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: not valid JSON") from e


def _object(where: str, row: Any) -> dict:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, got {row!r:.40}")
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


def _hub_rows(field: str, spec: str) -> Iterator[Row]:
    """hf:ORG/NAME[:SPLIT][:CONFIG], through the `datasets` package."""
    where = f"{field}={spec}"
    found = _HUB_SPEC.fullmatch(spec.removeprefix(HUB))
    if found is None:
        raise InputError(
            f"{where}: a data set of the Hub is hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME:SPLIT:CONFIG"
        )
    name, split, config = found.groups()
    try:
        import datasets
    except ImportError as e:
        raise InputError(f"{where}: data sets of the Hub need the datasets package: pip install datasets") from e
    try:
        table = datasets.load_dataset(name, config, split=split or "train")
    except Exception as e:  # of the network, the Hub, the data set's files
        raise InputError(
            f"{where}: cannot be loaded ({one_line(e):.200}); without a network, download it elsewhere and name its "
            "files instead, or set HF_HOME to a cache that holds it"
        ) from e
    try:
        for number, row in enumerate(table, 1):
            yield f"{where}, row {number}", _object(where, row)
    except (OSError, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{where}: cannot be read ({one_line(e)})") from e


# --- which problems are held out ------------------------------------------------------------------------------


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
