"""Reading and writing small JSON files."""

import json
import pathlib
from typing import Any

from rhyme_jax.errors import InputError, one_line


def read_json(path: pathlib.Path) -> dict:
    """The JSON object in a file.

    Raises:
      InputError: there is no such file, or it holds something else.
    """
    if not path.exists():
        raise InputError(f"{path}: does not exist")
    if not path.is_file():  # nor a pipe, which would never end
        raise InputError(f"{path}: is not a file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as e:
        raise InputError(f"{path}: not readable as JSON ({one_line(e)})") from e
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
