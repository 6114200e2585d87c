"""Padded sizes. Everything on the device has one of few declared sizes, so that few programs are compiled."""


def bucket(n: int, minimum: int = 8, base: int = 2) -> int:
    """The smallest of minimum, minimum * base, minimum * base^2, ... that holds n."""
    size = minimum
    while size < n:
        size *= base
    return size
