"""Graders: the same grades as in the calling thread, and no hang whatever a problem does to its process."""

import concurrent.futures
import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from rhyme_jax.tasks import graders
from rhyme_jax.tasks.graders import Graders, GradingError
from rhyme_jax.tasks.problems import MathProblem, Problem

ARITHMETIC = [MathProblem(f"{n}+{n}=?", False, "arithmetic", str(2 * n), ("hashes",)) for n in range(20)]
WAIT = 30  # seconds; nothing here takes as long, but machines are slow at times


@dataclasses.dataclass(frozen=True)
class Odd(Problem):
    """A problem that does to its process what a response says."""

    def reward(self, response: str) -> float | None:
        word, _, value = response.partition(" ")
        if word == "none":
            return None
        if word == "raise":
            raise ArithmeticError("on\ntwo lines")
        if word == "exit":
            os._exit(int(value))
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "sleep":
            time.sleep(float(value))
        if word == "write":
            with open(value, "a") as file:
                file.write(".")
            return 0.25
        if word == "stuck":  # never gives the interpreter back
            re.fullmatch("(a+)+", "a" * 50 + "b")
        if word == "fork":  # leaves a process behind that holds the pipe open
            if os.fork() == 0:
                time.sleep(float(value))
                os._exit(0)
            os._exit(1)
        return {"pid": os.getpid(), "jax": "jax" in sys.modules}.get(word, 0.5)


class Unsendable(Odd):
    def __reduce__(self):
        raise TypeError("not this one")


class Unreadable(Odd):
    def __reduce__(self):
        return int, ("what?",)


def odd(question: str = "odd?", kind: type = Odd) -> Problem:
    return kind(question, False, "odd")


@pytest.fixture(scope="module")
def two():
    """Shared: a lost process must not matter to the next test."""
    with Graders(2, timeout_s=WAIT) as pool:
        yield pool


def pid(pool: Graders) -> int:
    return int(pool.submit(odd(), ["pid"]).result(WAIT)[0])


def gone(process: int) -> bool:
    """Ended, at the latest within WAIT seconds."""
    for _ in range(WAIT * 20):
        try:
            with open(f"/proc/{process}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("workers", [0, 1])
def test_equal_responses_are_graded_once(workers, tmp_path):
    """All of them get that grade, where they stand; whatever has ended their process has done so once."""
    graded = tmp_path / "graded"
    with Graders(workers) as pool:
        texts = [f"write {graded}", "none", f"write {graded}", "half", "none"]
        assert repr(pool.submit(odd(), texts).result(WAIT)) == "[0.25, nan, 0.25, 0.5, nan]"
        assert graded.read_text() == "."
        if workers:
            first = pid(pool)
            assert repr(pool.submit(odd(), ["exit 3", "half", "exit 3"]).result(WAIT)) == "[nan, 0.5, nan]"
            assert pid(pool) != first


def test_processes_grade_as_the_calling_thread_does(two):
    """Any group's rewards in the order of its texts, whatever the order in which they are asked for."""
    groups = [(p, [f"#### {2 * n}", "####", f"#### {n}", f"so: #### {2 * n}."]) for n, p in enumerate(ARITHMETIC)]
    groups += [(odd(), ["none", "half", "none"]), (odd(), [])]
    with Graders(0) as here:
        want = [here.submit(*g).result() for g in groups]
    futures = [two.submit(*g) for g in groups]
    got = [f.result(WAIT) for f in reversed(futures)][::-1]
    assert repr(got) == repr(want)  # NaNs are not equal
    assert want[1] == [1, 0, 0, 1] and repr(want[-2:]) == "[[nan, 0.5, nan], []]"
    assert all(type(r) is float for rewards in got for r in rewards)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_problem_that_raises(workers, two):
    long = odd("What is\n the   sum of " + "x" * 100)
    message = "grading 'What is the sum of " + "x" * 41 + "': ArithmeticError: on two lines"
    with Graders(0) as here:
        future = (two if workers else here).submit(long, ["half", "raise"])
        with pytest.raises(GradingError, match=f"^{re.escape(message)}$"):
            future.result(WAIT)


@pytest.mark.parametrize("response", ["exit 3", "kill", "exit 0", "fork 2"])
def test_a_process_that_dies_costs_one_text_only(response, two):
    futures = [two.submit(odd(f"number {n}"), ["half", response, "half"] if n == 1 else ["half"]) for n in range(5)]
    assert repr(futures[1].result(WAIT)) == "[0.5, nan, 0.5]"
    assert [futures[n].result(WAIT) for n in (0, 2, 3, 4)] == [[0.5]] * 4


@pytest.mark.parametrize("response", ["sleep 60", "stuck"])
def test_a_text_that_takes_too_long(response):
    with Graders(1, timeout_s=0.3) as pool:
        process = pid(pool)
        late, next_one = pool.submit(odd("late?"), ["half", response, "pid"]), pool.submit(odd(), ["half", "pid"])
        before, nothing, after = late.result(WAIT)
        assert before == 0.5 and math.isnan(nothing)
        assert next_one.result(WAIT) == [0.5, after] and after != process
        assert gone(process)


def test_each_text_has_its_time():
    """Not the group; and the first text of a process has more."""
    with Graders(1, timeout_s=0.5) as pool:
        assert pool.submit(odd(), ["sleep 0.6", *["sleep 0.2"] * 4]).result(WAIT) == [0.5] * 5


def test_every_text_may_be_lost(two):
    rewards = two.submit(odd(), ["exit 1", "kill"]).result(WAIT)
    assert len(rewards) == 2 and all(map(math.isnan, rewards))
    assert two.submit(odd(), ["half"]).result(WAIT) == [0.5]


def test_problems_that_cannot_be_sent(two):
    with pytest.raises(GradingError, match=r"^grading 'this': TypeError: not this one$"):
        two.submit(odd("this", Unsendable), ["half"]).result(WAIT)
    with pytest.raises(GradingError, match=r"^grading 'that': ValueError: invalid literal"):
        two.submit(odd("that", Unreadable), ["half"]).result(WAIT)


def test_a_process_that_does_not_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Graders(1) as pool, pytest.raises(GradingError, match=r"did not start \(exit code 1\)$"):
        pool.submit(odd(), ["half"]).result(WAIT)
    monkeypatch.setattr(sys, "executable", "/no/such/file")
    with Graders(1) as pool, pytest.raises(GradingError, match=r"FileNotFoundError.*/no/such/file"):
        pool.submit(odd(), ["half"]).result(WAIT)


def test_the_processes_know_no_jax_and_ignore_ctrl_c(two):
    assert "jax" in sys.modules
    pids = set()
    for _ in range(200):
        pids.add(pid(two))
        if len(pids) == 2:
            break
    for process in pids:
        assert process != os.getpid() and os.getsid(process) != os.getsid(0)
        os.kill(process, signal.SIGINT)
    assert two.submit(odd(), ["jax", "half"]).result(WAIT) == [0.0, 0.5]
    assert pid(two) in pids


def test_close_does_not_wait_for_work():
    pool = Graders(2)
    process = pid(pool)
    busy = [pool.submit(odd(f"number {n}"), [r]) for n, r in enumerate(["sleep 60", "stuck", "half", "half"])]
    cancelled = pool.submit(odd(), ["half"])
    assert cancelled.cancel()
    time.sleep(0.2)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < graders.JOIN_SECONDS
    for n, future in enumerate(busy):
        with pytest.raises(GradingError, match=rf"^grading 'number {n}': the graders were closed$"):
            future.result(WAIT)
    with pytest.raises(concurrent.futures.CancelledError):
        cancelled.result(WAIT)
    assert gone(process) and not any(t in pool._threads for t in threading.enumerate())
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.submit(odd(), ["half"])


def test_closed_before_the_processes_have_started():
    start = time.monotonic()
    with Graders(4) as pool:
        assert time.monotonic() - start < 1
        future = pool.submit(odd(), ["half"])
    with pytest.raises(GradingError, match="closed"):
        future.result(WAIT)


PARENT = """
import os, sys, time
from test_graders import odd, pid
from rhyme_jax.tasks.graders import Graders
pool = Graders(1)
print(pid(pool), flush=True)
pool.submit(odd(), ["stuck"])
time.sleep(0.5)
{ending}
"""


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "pass"])
def test_processes_end_with_their_parent(ending):
    """However it ends, and also where nobody closed the graders and a process is stuck."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    output = subprocess.run(
        [sys.executable, "-c", PARENT.format(ending=ending)], env=env, stdout=subprocess.PIPE, timeout=60
    ).stdout
    assert gone(int(output))


@pytest.mark.parametrize(("workers", "timeout_s"), [(-1, 0.0), (1, -1.0), (1, math.nan)])
def test_impossible_graders_are_refused(workers, timeout_s):
    with pytest.raises(ValueError, match="must not be negative"):
        Graders(workers, timeout_s)
