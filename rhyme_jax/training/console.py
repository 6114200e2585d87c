"""What a run says on the terminal: one line a step, flushed at once."""

import sys
import time


class Console:
    def __init__(self, stream=None):
        self._stream = stream or sys.stdout

    def line(self, text: str = "") -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class Stopwatch:
    """Seconds by phase: `with watch("rollout"): ...`."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._phase, self._start = "", 0.0

    def __call__(self, phase: str) -> "Stopwatch":
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *exc) -> None:
        spent = time.monotonic() - self._start
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent


def duration(seconds: float) -> str:
    seconds = round(seconds)
    return f"{seconds} s" if seconds < 100 else f"{seconds // 60} min {seconds % 60:02d} s"
