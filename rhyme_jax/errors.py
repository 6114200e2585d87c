"""The one exception that means "the input is wrong", as opposed to "the program is wrong"."""


class InputError(ValueError):
    """Bad input from the user: a config field, a file, a weight of the wrong shape.

    The message is a single line that names the field, the value, and what would be right. Entry points print
    it and exit with code 2; nothing else is caught there.
    """


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__
