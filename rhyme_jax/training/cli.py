"""The command line of an experiment: `--config=FILE[:VARIANT] --config.field=value --workdir=DIR`.

Bad input ends the program with one line on stderr and exit code 2, before anything is compiled.
"""

import os
import runpy
import sys
from collections.abc import Callable
from typing import NoReturn

import ml_collections
from absl import app, flags, logging
from flax import traverse_util
from ml_collections import config_flags

from rhyme_jax.errors import InputError, RunError, one_line
from rhyme_jax.training import distributed
from rhyme_jax.training.settings import unknown_field

BAD_INPUT, FAILED = 2, 1  # exit codes


def run(
    experiment: Callable[[ml_collections.ConfigDict, str, str | None], None],
    default_config: str,
    several_processes: bool = False,
) -> None:
    """Parses the command line and calls experiment(config, variant, workdir).

    Args:
      default_config: config file, relative to the repository's root.
      several_processes: whether several processes can run it together, see `training.distributed`.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    default = os.path.join(root, default_config)
    try:
        # Overrides are already looked at while the flag is defined, so bad ones can raise here.
        config_flags.DEFINE_config_file("config", default, "Config file, with :variant.")
    except Exception as e:
        _refuse(_explain(e, sys.argv, default))
    flags.DEFINE_string("workdir", None, "Where the run is kept; the same workdir again resumes it.")
    if several_processes:
        distributed.define_flags()

    def parse(argv):
        try:
            rest = flags.FLAGS(argv)
            list(flags.FLAGS.config)  # a config file that failed to load says so only when it is looked at
            return rest
        except Exception as e:  # config files are Python, absl raises many kinds; whatever it is, the input is wrong
            return _refuse(_explain(e, argv, default))

    def work():
        config = flags.FLAGS.config
        variant = flags.FLAGS["config"].config_filename.partition(":")[2] or "default"
        workdir = flags.FLAGS.workdir
        cluster = distributed.from_flags() if several_processes else None
        with distributed.running(cluster, {"--workdir": workdir, **_fields(config)}):
            experiment(config.lock(), variant, workdir)

    _run(work, parse)


def run_without_config(work: Callable[[], None]) -> None:
    """Parses a command line that has flags of its own but no config file, and calls `work`."""

    def parse(argv):
        try:
            return flags.FLAGS(argv)
        except flags.Error as e:
            return _refuse(one_line(e))

    _run(work, parse)


def _run(work: Callable[[], None], parse: Callable) -> None:
    def main(argv):
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # else jax reports every backend that it does not find
        if len(argv) > 1:
            _refuse(f"{argv[1]!r}: unexpected argument; options start with --")
        try:
            work()
        except InputError as e:
            _refuse(str(e))
        except RunError as e:
            _end(str(e), FAILED)

    app.run(main, flags_parser=parse)


def _explain(error: Exception, argv: list[str], default: str) -> str:
    """One line on what is wrong with a command line, where absl and ml_collections raise chains of exceptions."""
    options = {}
    for argument, after in zip(argv[1:], [*argv[2:], ""], strict=True):
        if argument.startswith("-"):
            name, equals, value = argument.lstrip("-").partition("=")
            options[name] = value if equals else after  # "--config FILE" is the same as "--config=FILE"
    path, _, variant = options.get("config", default).partition(":")
    if not os.path.isfile(path):
        return f"--config={path}: no such file"
    try:
        config = runpy.run_path(path)["get_config"](*([variant] if variant else []))
        known = list(traverse_util.flatten_dict(config.to_dict(), sep="."))
    except Exception as e:
        return f"--config={path}: {one_line(e)}"
    for name in (o.removeprefix("config.") for o in options if o.startswith("config.")):
        if name not in known:
            return str(unknown_field(name, known))
    return one_line(error)


def _fields(config: ml_collections.ConfigDict) -> dict:
    """The config's fields by the names of their options."""
    return {f"config.{k}": v for k, v in traverse_util.flatten_dict(config.to_dict(), sep=".").items()}


def _refuse(message: str) -> NoReturn:
    _end(message, BAD_INPUT)


def _end(message: str, code: int) -> NoReturn:
    """One line, also where a message names a file or a weight whose name has line breaks."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(code)
