"""Programs in sandboxes: what they can do and see, and that hostile ones get nothing and harm nothing."""

import errno
import json
import os
import pathlib
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.tasks import sandbox as module
from rhyme_jax.tasks import sandbox_guard as guard
from rhyme_jax.tasks.code import CodeProblem
from rhyme_jax.tasks.sandbox import INSTALL, Limits, Sandbox, SandboxError

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason=INSTALL)
HOSTILE = sorted((pathlib.Path(__file__).parent / "hostile").glob("*.py.txt"))
CHECK = """
def check(candidate):
    assert candidate(3) == 86413
    assert candidate([5, 1]) == [27183, "k9q"]
    assert {candidate(i) for i in (1, 2)} == {31841, 59263}
    assert abs(candidate(0.5) - 77.125) < 1e-6
    assert isinstance(candidate("a"), str) and candidate("a").startswith("zqj")
"""
RIGHT = """
answers = {3: 86413, 1: 31841, 2: 59263, 0.5: 77.125}
def solve(x):
    return [27183, "k9q"] if isinstance(x, list) else "zqjx" if x == "a" else answers[x]
"""
WALL = 1.5  # seconds that a hostile program gets
MARKED = 13  # megabytes of files: finds the sandboxes of these tests among the machine's processes


def problem(limits: Limits, **fields) -> CodeProblem:
    return CodeProblem(
        "q", True, "code", tests=(CHECK, "check(solve)"), names=("solve",), sandbox=Sandbox(limits), **fields
    )


def fenced(program: str) -> str:
    return f"~~~~~~python\n{program}\n~~~~~~\n"


def sandboxes() -> list[str]:
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(MARKED << 20).encode() in words:
            found.append(path.parent.name)
    return found


# --- ordinary programs ----------------------------------------------------------------------------------------


@needs_bubblewrap
def test_a_program_runs_with_its_input_and_files():
    outcome = Sandbox().run(
        "import sys, dataclasses\n"
        "@dataclasses.dataclass\nclass A:\n    x: 'int'\n"
        "if __name__ == '__main__':\n    print(input(), open('data.txt').read(), A(1), sys.stdin.read())\n"
        "    sys.exit(3)",
        "first\nsecond é",
        {"data.txt": "contents"},
    )
    assert (outcome.status, outcome.killed_by, outcome.timed_out) == (3, None, False)
    assert outcome.stdout == "first contents A(x=1) second é\n"
    wrong = Sandbox().run("print(1)\n1/0")
    assert wrong.status == 1 and wrong.stdout == "1\n" and "ZeroDivisionError" in wrong.stderr
    with pytest.raises(ValueError, match="not the name of a file"):
        Sandbox().run("", files={"../x": ""})


@needs_bubblewrap
def test_the_world_of_a_program(tmp_path):
    outcome = Sandbox(Limits(memory_mb=200, cpu_s=4, open_files=32, files_mb=7)).run(f"""
import importlib.util, json, os, resource, sys, threading, time
def tried(act):
    try:
        act()
        return "done"
    except OSError as e:
        return e.strerror
def filled(name):
    with open(name, "wb", 0) as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20))
def started():
    try:
        for count in range(10000):
            threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
    except RuntimeError:
        return count
def kept():
    kept = []
    try:
        while True:
            kept.append(bytearray(1 << 20))
    except MemoryError:
        return len(kept)
host = ("/etc", "/root", "/home", "/proc", "/sys", "/var", "/bin", "/usr/bin", {str(tmp_path)!r}, {__file__!r})
print(json.dumps({{
    "root": sorted(os.listdir("/")),
    "dev": os.listdir("/dev"),
    "tmp": os.listdir("/tmp"),
    "host": [p for p in host if os.path.exists(p)],
    "environment": sorted(os.environ),
    "user": [os.getuid(), os.geteuid(), os.getgid()],
    "few": os.getpid() < 10 and os.getppid() < 10,
    "packages": [n for n in ("jax", "numpy", "pip", "pytest", "rhyme_jax") if importlib.util.find_spec(n)],
    "limits": [resource.getrlimit(k) for k in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)],
    "host_name": os.uname().nodename,
    "fork": tried(os.fork),
    "disk": [tried(lambda: filled("big")), tried(lambda: filled("more")), os.path.getsize("big")],
    "megabytes": kept(),
    "threads": started(),
}}))
""")
    world = json.loads(outcome.stdout)
    assert set(world["root"]) <= {"dev", "lib", "lib64", "python", "tmp", "usr"}
    assert world["dev"] == ["null"] and world["tmp"] == [] and world["host"] == [] and world["packages"] == []
    assert set(world["environment"]) <= {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PWD", "PYTHONHASHSEED", "LC_CTYPE"}
    assert world["user"] == [65534] * 3 and world["few"] and world["host_name"] == "sandbox"
    assert world["fork"] == "Operation not permitted"
    assert world["disk"] == ["File too large", "No space left on device", 7 << 20]
    assert 50 < world["megabytes"] < 200 and world["threads"] < 100
    assert world["limits"] == [[200 << 20] * 2, [4, 5], [32, 32]]
    again = Sandbox().run("import random; print(hash('a'), random.random())").stdout
    assert again == Sandbox().run("import random; print(hash('a'), random.random())").stdout


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "killed_by"),
    [
        ("while True: pass", "cpu"),
        ("import time; time.sleep(100)", "wall"),
        ("while True: print('x' * 10000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 10000)", "output"),
        ("import os\nos.write(1, b'\\xff\\xfe' * 10)", None),
    ],
)
def test_limits(program, killed_by):
    began = time.monotonic()
    wall = 2.0 if killed_by == "wall" else 20.0
    outcome = Sandbox(Limits(wall_s=wall, cpu_s=1, output_kb=64)).run(program)
    assert outcome.killed_by == killed_by and outcome.timed_out == (killed_by in ("cpu", "wall"))
    assert max(len(outcome.stdout), len(outcome.stderr)) <= 64 << 10
    assert time.monotonic() - began < 40
    if killed_by is None:
        assert outcome.stdout == "�" * 20


@needs_bubblewrap
def test_objects_stay_with_the_program():
    program = """
class Node:
    count = 0
    def __init__(self, value, next=None):
        self.value, self.next = value, next
    def __eq__(self, other):
        return True
def total(node):
    return node.value + total(node.next) if node else 0
def numbers(n):
    yield from range(n)
def fails(kind):
    raise {"v": ValueError("odd"), "k": KeyError("k")}[kind]
"""
    tests = """
node = Node(1, next=Node(2))
node.value = 5
assert total(node) == 7 and node.next.value == 2 and node == node
assert list(numbers(3)) == [0, 1, 2] and next(numbers(2)) == 0
assert not Node(1) == 3
try:
    fails("v")
except ValueError as e:
    assert str(e) == "odd"
for odd in (node, numbers(1)):
    try:
        assert not odd
    except TypeError:
        pass
    else:
        raise AssertionError
"""
    names = ("Node", "total", "numbers", "fails", "missing")
    verdict = Sandbox().judge([program], names, [tests])
    assert verdict.right, verdict
    assert not Sandbox().judge([program], names, ["assert fails('k')"]).right
    assert not Sandbox().judge([program], names, ["assert missing() or total(1)"]).right


@needs_bubblewrap
def test_broken_tests_are_no_fault_of_the_program():
    program = ["def f(x): return x"]
    for tests in ("assert f(", "import jax", "assert f(lambda: 1)", "assert g() == f(1)"):
        with pytest.raises(SandboxError, match="the tests fail by themselves"):
            Sandbox().judge(program, ["f"], [tests])
    with pytest.raises(SandboxError, match="more data than can be passed"):
        Sandbox().judge(program, ["f"], ["#" * (1 << 23)])
    # A program cannot have itself masked: after the first call, what goes wrong is its doing.
    assert not Sandbox().judge(program, ["f"], ["f(1)\nimport jax"]).right
    slow = Sandbox(Limits(wall_s=1.0)).judge(["import time; time.sleep(0.9)", *program], ["f"], ["while True: f(1)"])
    assert not slow.right


# --- plain data -----------------------------------------------------------------------------------------------

_HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.binary()
    | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
_DATA = st.recursive(
    _HASHABLE | st.text(st.characters(codec=None), max_size=5) | st.integers(-(10**400), 10**400),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_HASHABLE, inner, max_size=3) | st.sets(_HASHABLE, max_size=3)
    ),
    max_leaves=8,
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(_DATA)
def test_plain_data_come_back_as_they_were(value):
    back = guard.decode(guard.encode(value))
    assert back == value and type(back) is type(value)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.binary(max_size=40) | _DATA.map(guard.encode).map(lambda d: d[:-1]))
def test_bytes_that_are_no_data_are_refused(data):
    try:
        value = guard.decode(data)
    except guard.Malformed:
        return
    assert guard.decode(guard.encode(value)) == value or repr(value) == repr(guard.decode(guard.encode(value)))


def test_subclasses_become_what_they_are_derived_from():
    class Liar(int):
        def __eq__(self, other):
            return True

        def __index__(self):
            return 7

        __hash__ = int.__hash__

    assert repr(guard.decode(guard.encode([float("nan"), -0.0]))) == "[nan, -0.0]"
    back = guard.decode(guard.encode([Liar(3), type("T", (tuple,), {})((1, 2)), True]))
    assert [type(v) for v in back] == [int, tuple, bool] and back == [3, (1, 2), True]
    for bad in (object(), [lambda: 1], range(3)):
        with pytest.raises(guard.Malformed):
            guard.encode(bad)
    with pytest.raises(guard.Malformed, match="more data"):
        guard.encode("x" * (guard.MAX_FRAME + 1))
    nested: list = []
    nested.append(nested)
    with pytest.raises(guard.Malformed, match="deep"):
        guard.encode(nested)


# --- the filter of system calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_says_what_it_should(monkeypatch, machine):
    """The program for each processor, interpreted here: other processors' are never run by this one's kernel."""
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    module._filter.cache_clear()
    program = [struct.unpack_from("<HBBI", module._filter(), at) for at in range(0, len(module._filter()), 8)]
    module._filter.cache_clear()
    column, architecture, clone = module._PROCESSORS[machine]

    def says(number: int, argument: int = 0, arch: int = architecture) -> int:
        words = {0: number, 4: arch, 16: argument}
        at, value = 0, 0
        while True:
            operation, true, false, operand = program[at]
            at += 1
            if operation == 0x20:
                value = words[operand]
            elif operation == 0x06:
                return operand
            else:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
                at += true if holds else false

    kill, refuse, allow = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
    refused = {numbers[column] for numbers in module._REFUSED.values()} - {None}
    for number in range(500):
        if number not in (clone, 435):
            assert says(number) == (refuse if number in refused else allow)
    assert says(clone, 0x11) == refuse and says(clone, 0x003D0F00) == allow  # as fork calls it, as pthread_create does
    assert says(435) == 0x00050000 | errno.ENOSYS
    assert says(0, arch=0x40000003) == kill and says(0x40000000 + 57) == kill


# --- where it cannot run --------------------------------------------------------------------------------------


def test_without_bubblewrap_a_run_stops(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    module._command.cache_clear()
    with pytest.raises(InputError, match="apt-get install bubblewrap"):
        Sandbox().check()
    with pytest.raises(InputError, match="apt-get install bubblewrap"):
        problem(Limits()).reward(fenced(RIGHT))


def test_without_namespaces_a_run_stops(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text('#!/bin/sh\n[ "$1" = --help ] && echo --size && exit\necho no >&2; exit 1\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    module._command.cache_clear()
    with pytest.raises(
        InputError, match=r"a first program failed \(no\) inside bubblewrap, which needs user namespaces"
    ):
        Sandbox().check()
    assert problem(Limits()).reward(fenced(RIGHT)) is None  # masked, not wrong


@pytest.fixture(autouse=True)
def _fresh_command():
    yield
    module._command.cache_clear()


def test_unsafe_subprocess_warns_on_every_start():
    unsafe = Sandbox(Limits(wall_s=5.0, cpu_s=2), unsafe_subprocess=True)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="unsafe_subprocess=true"):
            unsafe.check()
    assert unsafe.run("import os; print(os.listdir('.'), input())", "x").stdout == "[] x\n"
    assert unsafe.judge(["def f(x): return x + 1"], ["f"], ["assert f(1) == 2"]).right
    assert not unsafe.judge(["def f(x): return x + 2"], ["f"], ["assert f(1) == 2"]).right
    assert Sandbox(Limits(wall_s=1.0), unsafe_subprocess=True).run("while True: pass").killed_by == "wall"


@pytest.mark.parametrize("field", ["wall_s", "cpu_s", "memory_mb", "output_kb", "files_mb", "open_files"])
def test_bad_limits(field):
    for value in (0, -1, "5", True, float("nan"), 1 << 30):
        with pytest.raises(InputError, match=f"sandbox.{field}="):
            Limits(**{field: value})
    assert pickle.loads(pickle.dumps(Sandbox(Limits(cpu_s=3)))) == Sandbox(Limits(cpu_s=3))


# --- hostile programs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_results(tmp_path_factory):
    """Every hostile program is graded, six at a time, with right ones in between."""
    canary = tmp_path_factory.mktemp("host") / "canary"
    canary.write_text("assert solve(3) == 86413")
    null = os.stat("/dev/null")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        hostile = problem(Limits(wall_s=WALL, cpu_s=1, memory_mb=256, files_mb=MARKED), rewarded="fraction")
        right = problem(Limits(wall_s=60.0), rewarded="fraction")

        def graded(path: pathlib.Path | None) -> tuple[float | None, float]:
            if path is None:
                return right.reward(fenced(RIGHT)), 0.0
            program = path.read_text(encoding="utf-8").replace("@CANARY@", str(canary)).replace("@PORT@", str(port))
            began = time.monotonic()
            return hostile.reward(fenced(program)), time.monotonic() - began

        order: list[pathlib.Path | None] = []
        for i, path in enumerate(HOSTILE):
            order += [path] if i % 6 else [path, None]
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(graded, order))
        left = sandboxes()
        try:
            server.accept()
            reached = True
        except BlockingIOError:
            reached = False
    after = os.stat("/dev/null")
    return {
        "hostile": {path.name: r for path, r in zip(order, results) if path},
        "right": [r[0] for path, r in zip(order, results) if path is None],
        "left": left,
        "reached": reached,
        "canary": (canary.read_text(), sorted(p.name for p in canary.parent.iterdir())),
        "null": [(s.st_mode, s.st_uid, s.st_gid) for s in (null, after)],
    }


@needs_bubblewrap
def test_there_are_hostile_programs():
    assert len(HOSTILE) >= 30
    assert problem(Limits()).reward(fenced(RIGHT)) == 1.0


@needs_bubblewrap
@pytest.mark.parametrize("path", HOSTILE, ids=lambda p: p.name.removesuffix(".py.txt"))
def test_a_hostile_program_gets_nothing(hostile_results, path):
    reward, seconds = hostile_results["hostile"][path.name]
    assert reward == 0.0
    assert seconds < WALL + 10.0  # its wall clock, and the making and ending of two sandboxes on a busy machine


@needs_bubblewrap
def test_hostile_programs_harm_nothing(hostile_results):
    assert hostile_results["right"] == [1.0] * len(hostile_results["right"]) and hostile_results["right"]
    assert hostile_results["left"] == []
    assert not hostile_results["reached"]
    assert hostile_results["canary"] == ("assert solve(3) == 86413", ["canary"])
    before, after = hostile_results["null"]
    assert before == after
    assert not pathlib.Path("/canary").exists() and not pathlib.Path("/usr/lib/canary").exists()
    assert pathlib.Path(os.__file__).is_file()


@needs_bubblewrap
def test_a_sandbox_ends_with_its_grader():
    code = (
        "from rhyme_jax.tasks.sandbox import *\n"
        f"Sandbox(Limits(wall_s=300.0, files_mb={MARKED}, cpu_s=300)).run('import time; time.sleep(300)')"
    )
    grader = subprocess.Popen([sys.executable, "-c", code])
    try:
        _until(lambda: len(sandboxes()) >= 2)
    finally:
        os.kill(grader.pid, signal.SIGKILL)
        grader.wait()
    _until(lambda: not sandboxes())


def _until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
