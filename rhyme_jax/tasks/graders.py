"""Grading in processes of its own, while the devices decode.

Each worker is a Python process and a thread here that feeds it one group at a time. It answers text by text, so that a
process that dies or hangs costs the grade of one text: that one is NaN (the loop masks and counts it), the process is
replaced, and the new one goes on with the next text. A `concurrent.futures.ProcessPoolExecutor` breaks as a whole and
cannot end a worker that hangs. The processes are started afresh: forking is unsafe beside JAX's threads, and
`multiprocessing`'s "spawn" imports the main module again, which for an experiment means JAX in each.
"""

import atexit
import contextlib
import ctypes
import functools
import math
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from rhyme_jax.errors import RunError, one_line
from rhyme_jax.tasks import symbolic
from rhyme_jax.tasks.problems import Problem

FIRST_SECONDS = 10.0  # more for the first text of a process: it may have to load what it grades with
LOOK_SECONDS = 0.5  # how often a process that says nothing is looked at
JOIN_SECONDS = 5.0  # most that `close` waits for a thread


class GradingError(RunError):
    """A group could not be graded. One line: the beginning of the question, and the cause."""

    def __init__(self, problem: Problem, cause: str):
        super().__init__(f"grading {' '.join(problem.question.split())[:60]!r}: {cause}")


class Graders:
    """Grades groups of responses, `workers` at a time. A context manager; `close` it when done."""

    def __init__(self, workers: int, timeout_s: float = 0.0):
        """Returns at once; the processes start in the background.

        Args:
          workers: processes. 0 grades in the calling thread, at `submit`, where formulas cannot be compared: a grade
            for which that matters is NaN (see `grading.grade`), and a problem that ends its process ends the caller.
          timeout_s: most seconds that one text may take, 0 for any; cannot be kept with workers=0. Formulas have a
            limit of their own, `symbolic.SECONDS`, in any case.
        """
        if workers < 0 or not timeout_s >= 0:
            raise ValueError(f"graders: workers={workers}, timeout_s={timeout_s}: must not be negative")
        self._timeout_s = timeout_s or math.inf
        self._groups: queue.SimpleQueue = queue.SimpleQueue()  # (future, problem, texts); None ends a thread
        self._lock = threading.Lock()
        self._processes: set[_Process] = set()
        self._closed = False
        self._threads = [threading.Thread(target=self._feed, name="grading", daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def submit(self, problem: Problem, texts: Sequence[str]) -> Future:
        """Grades the responses to one problem, whose class must be importable (not one of the main module).

        Responses that are equal are graded once: those of a group come to be so as a model grows sure, and with coupled
        noise from the start.

        Returns:
          A future of the rewards in the order of the texts, list[float]; NaN where a grade is None, and where it takes
          longer than timeout_s or takes its process down. Its result() raises GradingError where grading raises, where
          no process can be started, and where `close` comes first.

        Raises:
          ValueError: the graders are closed.
        """
        future: Future = Future()
        with self._lock:
            if self._closed:
                raise ValueError("graders: closed")
            if self._threads:
                self._groups.put((future, problem, list(texts)))
                return future
        _settle(future, problem, texts, functools.partial(_grade, problem))
        return future

    def close(self) -> None:
        """Ends the processes, busy or not. Groups that are not done raise GradingError."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        for _ in self._threads:
            self._groups.put(None)
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        atexit.unregister(self.close)

    def __enter__(self) -> "Graders":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _feed(self) -> None:
        """A thread's life: one process, replaced when it is lost; one group after the other."""
        process = None
        with contextlib.suppress(Exception):  # what is wrong shows again when there is a group to name
            process = self._start()  # now, so that the first group need not wait for it
        while (group := self._groups.get()) is not None:
            future, problem, texts = group

            def graded(texts: list[str], problem=problem) -> list[float]:
                nonlocal process
                rewards: list[float] = []
                while True:
                    if process is None:
                        process = self._start()
                    try:
                        process.grade(problem, texts[len(rewards) :], self._timeout_s, rewards)
                    except _Lost as lost:
                        self._drop(process)
                        process = None
                        if self._closed:
                            raise _Lost("the graders were closed") from None
                        if not lost.at_text:
                            raise
                        rewards.append(math.nan)
                    if len(rewards) == len(texts):
                        return rewards

            if future.set_running_or_notify_cancel():
                _settle(future, problem, texts, graded)
        if process is not None:
            self._drop(process)

    def _start(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise _Lost("the graders were closed")
            process = _Process()
            self._processes.add(process)
            return process

    def _drop(self, process: "_Process") -> None:
        with self._lock:
            self._processes.discard(process)
        process.end()


class _Lost(Exception):
    """The process is gone, and why; or with `at_text`, while it graded a text."""

    def __init__(self, cause: str, at_text: bool = False):
        super().__init__(cause)
        self.at_text = at_text


class _Failed(Exception):
    """Grading raised; the process is fine."""


def _settle(future: Future, problem: Problem, texts: Sequence[str], graded: Callable[[list[str]], list[float]]) -> None:
    """Gives the future the rewards of texts, of which graded() sees each once, or a GradingError."""
    distinct = list(dict.fromkeys(texts))
    try:
        rewards = dict(zip(distinct, graded(distinct), strict=True))
        future.set_result([rewards[text] for text in texts])
    except Exception as e:
        cause = str(e) if isinstance(e, _Lost | _Failed) else _say(e)
        error = GradingError(problem, cause)
        error.__cause__ = e
        future.set_exception(error)


def _grade(problem: Problem, texts: Sequence[str]) -> list[float]:
    rewards = [problem.reward(text) for text in texts]
    return [math.nan if r is None else float(r) for r in rewards]


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


class _Process:
    """A grading process, as its thread sees it. Only `kill` may be called by others."""

    def __init__(self):
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            handle = theirs.fileno()
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from rhyme_jax.tasks import graders; graders.serve({handle})"],
                pass_fds=[handle],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal goes to the controller alone
                # A grader that uses JAX must not take the controller's accelerator.
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                    "JAX_PLATFORMS": "cpu",
                },
            )
        self._ready = self._warm = False  # has started; has graded

    def grade(self, problem: Problem, texts: list[str], timeout_s: float, rewards: list[float]) -> None:
        """Appends the rewards of the texts one by one. Raises _Failed or _Lost; whatever pickling raises."""
        group = pickle.dumps((problem, texts))
        expected, at_text = len(rewards) + len(texts), False
        try:
            if not self._ready:
                self._receive(math.inf)
                self._ready = True
            self._connection.send_bytes(group)
            self._receive_from(math.inf)  # it has read the group
            at_text = True
            while len(rewards) < expected:
                rewards.append(self._receive_from(timeout_s + (0.0 if self._warm else FIRST_SECONDS)))
                self._warm = True
        except TimeoutError:
            self.kill()
            raise _Lost(f"took longer than {timeout_s:g} s", at_text) from None
        except (EOFError, OSError):
            self.end()
            when = "died" if self._ready else "did not start"
            raise _Lost(f"the grading process {when} (exit code {self._popen.returncode})", at_text) from None

    def _receive_from(self, timeout_s: float) -> float | None:
        """As `_receive`; raises _Failed."""
        reward, failure = self._receive(timeout_s)
        if failure:
            raise _Failed(failure)
        return reward

    def kill(self) -> None:
        """With the processes it has started, if any."""
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        try:
            self._popen.wait(LOOK_SECONDS)  # one that is ending by itself has an exit code to tell
        except subprocess.TimeoutExpired:
            self.kill()
            self._popen.wait()
        self._connection.close()

    def _receive(self, timeout_s: float) -> Any:
        """Raises EOFError or OSError where the process is gone, TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            # Usually its end shows as an end of the pipe; not while a process that it has forked lives on.
            if self._popen.poll() is not None and not self._connection.poll():
                raise EOFError
            if time.monotonic() >= deadline:
                raise TimeoutError
        return self._connection.recv()


def serve(handle: int) -> None:
    """A grading process's life: takes (problem, texts), gives (None, None) when it has them and (reward, None) for each
    text, up to one that raises: (None, what was raised).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # The kernel ends it with the thread that started it, also while it is stuck in, say, a regular expression.
        # Elsewhere it ends when it next looks at the pipe.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    symbolic.enable()
    with Connection(handle) as connection, contextlib.suppress(EOFError, ConnectionError):
        connection.send(True)
        while True:
            group = connection.recv_bytes()
            try:
                problem, texts = pickle.loads(group)
                connection.send((None, None))
                for text in texts:
                    connection.send((_grade(problem, [text])[0], None))
            except ConnectionError:
                raise
            except Exception as e:
                connection.send((None, _say(e)))
