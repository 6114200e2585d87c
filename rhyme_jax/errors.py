"""The exceptions that entry points turn into one line: the input is wrong, or a run cannot go on."""


class InputError(ValueError):
    """Bad input from the user: a config field, a file, a weight of the wrong shape.

    The message is a single line that names the field, the value, and what would be right. Entry points print
    it and exit with code 2; nothing else is caught there.
    """


class RunError(RuntimeError):
    """A run cannot go on: a device, a grader or another process failed. What was saved is whole.

    The message is a single line that names what was being worked on. Entry points print it and exit with code 1.
    """


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__
