"""What runs inside a sandbox, in one of three modes: a program as a whole, a program as a server of calls, tests.

`sandbox.Sandbox` starts an interpreter with LOADER, which takes this module's code and a task from its standard input:
nothing needs to be mounted or compiled. The module is also imported outside, for LOADER and the encoding of plain data,
and has no effects then. It imports next to nothing, as every grading pays for it twice.

A program that is served, and tests that call it, are in two sandboxes: neither has the other's text. Between them go
frames: four bytes of length, then data in the encoding below. Plain data are passed by value, exactly as the built-in
types hold them. Anything else that a program returns stays where it is, and tests get a `Remote` for it. So no method
that a program has written ever runs beside the tests: their comparisons are those of the built-in types.
"""

import os
import struct
import sys

MAX_FRAME = 1 << 22  # bytes
MAX_DEPTH = 100  # of nested containers
UP = b"U"  # the first byte of the output of any sandbox: its limits hold, the program is next
READY = b"ready"  # the first frame of a program that is served: it is loaded
CALL, PASSED, FAILED, DONE, INVALID = b"C", b"P", b"F", b"D", b"X"  # first bytes of frames from tests

LOADER = """\
import marshal
source = open(0, "rb", 0, closefd=False)
def take(count):
    data = b""
    while len(data) < count:
        part = source.read(count - len(data))
        if not part:
            raise SystemExit("the task did not arrive")
        data += part
    return data
code, task = (take(int.from_bytes(take(4), "little")) for _ in range(2))
guard = {"__name__": "guard"}
exec(marshal.loads(code), guard)
guard["main"](guard["decode"](task))
"""


class Malformed(Exception):
    """Data that are not in the encoding, or not plain."""


# --- plain data -----------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
# Built-in types of plain data, each after those that it is derived from: what a subclass is reduced to.
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
_GROUPS = {list: b"l", tuple: b"t", set: b"S", frozenset: b"z"}
_MAKERS = {108: list, 116: tuple, 83: set, 122: frozenset}


def encode(value, refer=None) -> bytes:
    """Plain data as bytes.

    Args:
      value: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, nested. An object of a
        subclass becomes one of the built-in type.
      refer: gives the number (int) under which the receiver may refer to an object of another type.

    Raises:
      Malformed: other types without `refer`, nested deeper than MAX_DEPTH, or longer than MAX_FRAME.
    """
    out = []
    _put(out, value, refer, 0)
    data = b"".join(out)
    if len(data) > MAX_FRAME:
        raise Malformed("more data than can be passed")
    return data


def _sized(tag: bytes, data: bytes) -> bytes:
    if len(data) > MAX_FRAME:
        raise Malformed("more data than can be passed")
    return tag + _LENGTH.pack(len(data)) + data


def _put(out, value, refer, depth) -> None:
    if depth > MAX_DEPTH:
        raise Malformed("nested too deeply to be passed")
    kind = type(value)
    if kind not in _PLAIN:
        kind = next((plain for plain in _PLAIN if issubclass(kind, plain)), kind)
    if value is None:
        out.append(b"N")
    elif kind is bool:
        out.append(b"T" if value else b"F")
    elif kind is int:
        number = int.__index__(value)
        out.append(_sized(b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)))
    elif kind is float:
        out.append(b"f" + _FLOAT.pack(float.__float__(value)))
    elif kind is complex:
        out.append(b"c" + _COMPLEX.pack(complex.real.__get__(value), complex.imag.__get__(value)))
    elif kind is str:
        out.append(_sized(b"s", str.encode(value, "utf-8", "surrogatepass")))
    elif kind is bytes or kind is bytearray:
        out.append(_sized(b"b", kind.__getitem__(value, slice(None))))
    elif kind is dict:
        out.append(b"d" + _LENGTH.pack(dict.__len__(value)))
        for key, item in dict.items(value):
            _put(out, key, refer, depth + 1)
            _put(out, item, refer, depth + 1)
    elif kind in _GROUPS:
        out.append(_GROUPS[kind] + _LENGTH.pack(kind.__len__(value)))
        for item in kind.__iter__(value):
            _put(out, item, refer, depth + 1)
    elif refer is None:
        raise Malformed(f"{kind.__name__} is not plain data")
    else:
        out.append(b"r" + _LENGTH.pack(refer(value)))


def decode(data: bytes, resolve=None):
    """What `encode` was given, checked in every byte.

    Args:
      resolve: gives the object for a number that refers to one.

    Raises:
      Malformed
    """
    value, end = _get(data, 0, resolve, 0)
    if end != len(data):
        raise Malformed("bytes are left over")
    return value


def _get(data, at, resolve, depth):
    if depth > MAX_DEPTH or at >= len(data):
        raise Malformed("nested too deeply, or cut off")
    tag, at = data[at], at + 1
    if tag in b"NTF":
        return {78: None, 84: True, 70: False}[tag], at
    if tag in b"fc":
        form = _FLOAT if tag == 102 else _COMPLEX
        if at + form.size > len(data):
            raise Malformed("cut off")
        numbers = form.unpack_from(data, at)
        return (numbers[0] if tag == 102 else complex(*numbers)), at + form.size
    if tag not in b"isbdrltSz" or at + 4 > len(data):
        raise Malformed("no such type, or cut off")
    count, at = _LENGTH.unpack_from(data, at)[0], at + 4
    if tag == 114:
        if resolve is None:
            raise Malformed("a reference where there can be none")
        return resolve(count), at
    if count > len(data) - at:  # an item takes a byte at least
        raise Malformed("cut off")
    if tag in b"isb":
        part, at = data[at : at + count], at + count
        if tag == 105:
            return int.from_bytes(part, "little", signed=True), at
        if tag == 98:
            return part, at
        try:
            return part.decode("utf-8", "surrogatepass"), at
        except UnicodeDecodeError:
            raise Malformed("not text") from None
    items = []
    for _ in range(count * 2 if tag == 100 else count):
        item, at = _get(data, at, resolve, depth + 1)
        items.append(item)
    try:
        return (dict(zip(items[::2], items[1::2])) if tag == 100 else _MAKERS[tag](items)), at
    except TypeError:
        raise Malformed("a key that cannot be one") from None


# --- frames ---------------------------------------------------------------------------------------------------


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _read(handle: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(handle, min(count - len(data), 1 << 16))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _receive(handle: int) -> bytes:
    count = _LENGTH.unpack(_read(handle, 4))[0]
    if count > MAX_FRAME + 64:
        raise Malformed("a frame that is too long")
    return _read(handle, count)


# --- inside ---------------------------------------------------------------------------------------------------


def main(task: dict) -> None:
    """Runs a task: `mode`, `limits`, and what the mode takes."""
    _limit(**task["limits"])
    if "random" in task["text"]:  # the same program is graded alike each time
        import random

        random.seed(0)
    {"program": _program, "serve": _serve, "tests": _tests}[task["mode"]](task)


def _limit(memory: int, cpu: int, file: int, open_files: int) -> None:
    """The kernel keeps these limits, and nobody in here may raise them again."""
    import resource

    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, file),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        # One more second of CPU time between the signal that can be caught and the one that cannot.
        hard = most + 1 if kind == resource.RLIMIT_CPU else most
        allowed = resource.getrlimit(kind)[1]
        if allowed != resource.RLIM_INFINITY:
            most, hard = min(most, allowed), min(hard, allowed)
        resource.setrlimit(kind, (most, hard))


def _channel() -> tuple[int, int]:
    """Standard input and output, moved out of the way of programs that read and print."""
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for handle in range(3):
        os.dup2(nowhere, handle)
    return requests, replies


def _module(name: str) -> dict:
    """The names of a new module, which is found where, say, dataclasses look for it."""
    sys.modules[name] = module = type(sys)(name)
    return module.__dict__


def _program(task: dict) -> None:
    """A program with its standard input and output."""
    for name, data in task["files"].items():
        with open(name, "wb") as file:
            file.write(data)
    names = _module("__main__")
    _write(1, UP)
    exec(compile(task["text"], "program.py", "exec", dont_inherit=True), names)


def _serve(task: dict) -> None:
    """A program whose functions are called from outside. What it prints goes nowhere."""
    requests, replies = _channel()
    names = _module("solution")
    _write(replies, UP)
    for part in task["parts"]:  # each of its own, so that `from __future__` may begin any
        exec(compile(part, "solution.py", "exec", dont_inherit=True), names)
    objects = []  # what has been referred to

    def refer(value) -> int:
        objects.append(value)
        return len(objects) - 1

    def found(name: str):
        if name not in names:
            raise NameError(f"name {name!r} is not defined")
        return names[name]

    operations = {
        "call": lambda target, args, kwargs: target(*args, **kwargs),
        "global": lambda name, args, kwargs: found(name)(*args, **kwargs),
        "get": getattr,
        "set": setattr,
        "iter": iter,
        "next": next,
    }
    _write(replies, frame(READY))
    while True:
        request = _receive(requests)
        token = request[:8]
        try:
            operation, *operands = decode(request[8:], objects.__getitem__)
            reply = b"v" + encode(operations[operation](*operands), refer)
        except BaseException as e:
            said = e.args[0] if e.args and type(e.args[0]) is str else ""
            reply = b"e" + encode([[kind.__name__ for kind in type(e).__mro__], said[:1000]])
        _write(replies, frame(token + reply))


class _Ended(BaseException):
    """The program is gone, or what it sends is no reply. Not an Exception: tests that expect one do not catch it."""


class _Connection:
    """A program, as tests see it."""

    def __init__(self, requests: int, replies: int):
        self._requests, self._replies = requests, replies
        self._remotes: dict = {}
        self.calls = 0
        self.lost = False

    def ask(self, *request):
        """Raises what the program raised, where that is a built-in Exception; _Ended."""
        if self.lost:
            raise _Ended
        token = os.urandom(8)  # nobody can reply to what was not yet asked
        data = encode(list(request), _number)
        self.calls += 1
        try:
            _write(self._requests, frame(CALL + token + data))
            reply = _receive(self._replies)
            if reply[:8] != token or reply[8:9] not in (b"v", b"e"):
                raise Malformed("not the reply to what was asked")
            value = decode(reply[9:], self._remote)
            if reply[8:9] == b"v":
                return value
            error = _error(value)
        except (Malformed, OSError, EOFError, MemoryError, RecursionError):
            self.lost = True
            raise _Ended from None
        raise error

    def _remote(self, number: int) -> "Remote":
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        return self._remotes[number]

    def function(self, name: str):
        """A function of the program, looked up when it is called."""

        def call(*args, **kwargs):
            return self.ask("global", name, args, kwargs)

        call.__name__ = name
        return call


def _error(value) -> Exception:
    if type(value) is not list or len(value) != 2 or type(value[0]) is not list or type(value[1]) is not str:
        raise Malformed("not an exception")
    import builtins

    for name in value[0]:
        kind = getattr(builtins, name, None) if type(name) is str else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(value[1])
            except TypeError:  # such as UnicodeDecodeError, which takes more
                return Exception(value[1])
    raise Malformed("an exception that ends programs")


def _number(value) -> int:
    if type(value) is not Remote:
        raise Malformed(f"tests pass {type(value).__name__}, which is not plain data, to the program")
    return object.__getattribute__(value, "_number")


class Remote:
    """An object of the program that is not plain data: tests can call it, use its attributes, iterate over it and pass
    it back. It equals nothing but itself, and is neither true nor false.
    """

    __slots__ = ("_connection", "_number")

    def __init__(self, connection: _Connection, number: int):
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args, **kwargs):
        return self._connection.ask("call", self, args, kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._connection.ask("get", self, name)

    def __setattr__(self, name: str, value) -> None:
        self._connection.ask("set", self, name, value)

    def __iter__(self):
        return self._connection.ask("iter", self)

    def __next__(self):
        return self._connection.ask("next", self)

    def __bool__(self) -> bool:
        raise TypeError("the program returned an object, which is neither true nor false")


def _tests(task: dict) -> None:
    """Tests of a program that is elsewhere. Says which passed, and whether all ended as they should."""
    replies, verdicts = _channel()
    connection = _Connection(verdicts, replies)
    names = _module("tests")
    _write(verdicts, UP)

    failed = False

    def count(kind: bytes) -> None:
        nonlocal failed
        kind = FAILED if connection.lost else kind
        failed = failed or kind == FAILED
        _write(verdicts, frame(kind))

    ended = False
    try:
        if task["helpers"]:
            exec(compile(task["helpers"], "helpers.py", "exec", dont_inherit=True), names)
        for name in task["names"]:
            names[name] = connection.function(name)
        names["__passed__"], names["__failed__"] = lambda: count(PASSED), lambda: count(FAILED)
        for text in task["tests"]:
            exec(compile(text, "tests.py", "exec", dont_inherit=True), names)
        ended = True
        if connection.lost and not failed:  # and the tests did not mind
            count(FAILED)
    except BaseException as e:
        if not connection.calls:
            # Whatever is wrong, it is not the program.
            said = f"{type(e).__name__}: {e}"[:200].encode("utf-8", "replace")
            _write(verdicts, frame(INVALID + said))
            return
    _write(verdicts, frame(DONE + (b"1" if ended else b"0")))
