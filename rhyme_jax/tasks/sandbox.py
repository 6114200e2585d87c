"""Runs programs that nobody has read: of models, and the tests of their data sets.

Each run has a sandbox of its own, made by bubblewrap: namespaces without a network, other processes or files of the
host, a filter of system calls that leaves it a single process, and limits that the kernel keeps. From outside it gets a
wall-clock limit, and its output is read up to a cap. docs/sandbox.md says against what that protects, and against what
it does not. Nothing here is a reason to trust what comes out: it is bytes.

Graders call this in worker processes; JAX is not imported.
"""

import contextlib
import dataclasses
import functools
import marshal
import os
import pathlib
import platform
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.tasks import sandbox_guard as guard

INSTALL = "apt-get install bubblewrap (dnf, pacman, zypper: install bubblewrap)"
START_SECONDS = 20.0  # most that a sandbox may take before its program begins; about 0.03 where the machine is idle
END_SECONDS = 5.0  # most that a killed sandbox is waited for
SAID = 4096  # bytes kept of what a served program or tests write to standard error
RELAYED = 1 << 20  # bytes on their way to tests before more of a program's output is read
_PIECE = 1 << 16


class SandboxError(Exception):
    """A sandbox did not start, or tests are broken: no fault of the program. One line."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one sandbox."""

    wall_s: float = 10.0  # seconds of a whole grading, but for the making of its sandboxes
    cpu_s: int = 5  # seconds of CPU time
    memory_mb: int = 512  # of address space
    output_kb: int = 1024  # of standard output, and of standard error
    files_mb: int = 16  # of all files together, which lie in memory
    open_files: int = 64

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int) or (field.type is float and isinstance(value, float))
            if not number or isinstance(value, bool) or not 0 < value <= 1 << 20:
                kind = "number" if field.type is float else "whole number"
                raise InputError(f"sandbox.{field.name}={value!r}: must be a {kind} above 0 and at most {1 << 20}")
        if self.memory_mb < 64 or self.open_files < 16:
            raise InputError(
                f"sandbox.memory_mb={self.memory_mb}, sandbox.open_files={self.open_files}: an empty Python program "
                "needs 64 and 16"
            )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a program did."""

    status: int  # its exit code, 128 + the number of the signal that ended it
    stdout: str
    stderr: str
    killed_by: str | None  # the limit that ended it: "wall", "cpu" or "output"

    @property
    def timed_out(self) -> bool:
        return self.killed_by in ("wall", "cpu")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What tests say about a program."""

    ended: bool  # they ran to their end, without an exception
    passed: int = 0  # what was counted as passed (see `Sandbox.judge`)
    failed: int = 0  # and as failed
    why: str = ""  # they did not end: one line for people

    @property
    def right(self) -> bool:
        return self.ended and not self.failed


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """How programs are run. Picklable; holds nothing open."""

    limits: Limits = Limits()
    unsafe_subprocess: bool = False  # plain processes of this user's, where there is no bubblewrap

    @property
    def longest_s(self) -> float:
        """Seconds after which a grading of two sandboxes has ended, whatever its program does."""
        return self.limits.wall_s + 2 * START_SECONDS + 2 * END_SECONDS

    def check(self) -> None:
        """Says now whether programs can be run; call it where a run starts. Warns each time where they run unsafely.

        Raises:
          InputError: bubblewrap is missing or cannot make a sandbox here, with the line that installs it.
        """
        if self.unsafe_subprocess:
            warnings.warn(
                "sandbox.unsafe_subprocess=true: programs written by a model run as this user, with this user's files "
                "and network",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            _command(self.limits.files_mb)
        try:
            outcome = self.run("print(6 * 7)")
            said = "" if outcome.stdout == "42\n" else f"status {outcome.status}, {outcome.killed_by}: {outcome.stderr}"
        except SandboxError as e:
            said = str(e)
        if not said:
            return
        said = f"a first program failed ({one_line(ValueError(said))})"
        if self.unsafe_subprocess:
            raise InputError(f"sandbox: {said} as a plain process; are the limits too low?")
        raise InputError(
            f"sandbox: {said} inside bubblewrap, which needs user namespaces, as some containers forbid; "
            "sandbox.unsafe_subprocess=true does without, and without protection"
        )

    def run(
        self,
        program: str,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        wall_s: float | None = None,
    ) -> Outcome:
        """Runs a program as `python program.py` would, in an empty directory but for `files`.

        Args:
          program: its text.
          stdin: its standard input.
          files: contents by name (of files, without directories).
          wall_s: seconds, where that is less than those of the limits.

        Returns:
          What it did. Bytes that are not UTF-8 are replaced.

        Raises:
          InputError: no bubblewrap.
          SandboxError: the sandbox did not start.
        """
        contents = {name: _bytes(data) for name, data in (files or {}).items()}
        if wrong := [name for name in contents if name in ("", ".", "..") or "/" in name or "\0" in name]:
            raise ValueError(f"files: {wrong[0]!r} is not the name of a file")
        with _Process(self, {"mode": "program", "text": _text(program), "files": contents}) as process:
            process.outgoing += _bytes(stdin)
            process.close_input = True
            most = self.limits.output_kb * 1024
            process.start()
            wall_s = self.limits.wall_s if wall_s is None else min(wall_s, self.limits.wall_s)
            killed_by = _pump([process], wall_s, lambda: _excess(process, most))
            status = process.end()
            if killed_by is None and status == 128 + signal.SIGXCPU:
                killed_by = "cpu"
            out, err = (bytes(b[:most]).decode("utf-8", "replace") for b in (process.output, process.errors))
            return Outcome(status, out, err, killed_by)

    def judge(
        self,
        parts: Sequence[str],
        names: Sequence[str],
        tests: Sequence[str],
        helpers: str = "",
    ) -> Verdict:
        """Runs tests against a program, each in a sandbox of its own, so that the program never sees the tests and they
        never run a line of it (see `sandbox_guard`).

        Args:
          parts: the program, in parts that are run one after the other.
          names: functions and classes of the program that the tests use.
          tests: Python text, run in order; the first exception ends them. They may call `__passed__()` and
            `__failed__()` to have something counted.
          helpers: Python text that the tests need, run before them and before `names` are defined.

        Raises:
          InputError: no bubblewrap.
          SandboxError: a sandbox did not start, or the tests fail before they call the program.
        """
        program = {"mode": "serve", "parts": [_text(p) for p in parts], "text": _text("\n".join(parts))}
        left = self.limits.wall_s
        ready = guard.frame(guard.READY)
        with _Process(self, program) as server:
            server.start()
            began = time.monotonic()
            killed_by = _pump([server], left, lambda: len(server.output) >= len(ready) or None)
            left -= time.monotonic() - began
            if bytes(server.output) != ready:
                return Verdict(
                    False, why="the program took too long to load" if killed_by == "wall" else "it did not load"
                )
            server.output.clear()
            # Only now: of early models, many programs do not load.
            task = {
                "mode": "tests",
                "text": "\n".join([helpers, *tests]),
                "helpers": helpers,
                "names": list(names),
                "tests": list(tests),
            }
            with _Process(self, task) as tester:
                tester.start()
                relay = _Relay(server, tester)
                return relay.verdict(_pump([server, tester], left, relay.step))


class _Relay:
    """Carries calls from tests to a program and replies back, and takes down what the tests say."""

    def __init__(self, server: "_Process", tester: "_Process"):
        self._server, self._tester = server, tester
        self._passed = self._failed = 0
        self._done: bool | None = None

    def step(self) -> str | None:
        """After each read. A text or True ends the judging."""
        server, tester = self._server, self._tester
        if server.output:
            tester.outgoing += server.output
            server.output.clear()
        # An end of the program's output is one of the tests' input: their next call fails at once.
        tester.close_input = server.finished
        server.paused = len(tester.outgoing) > RELAYED
        while len(tester.output) >= 4:
            size = int.from_bytes(tester.output[:4], "little")
            if len(tester.output) < 4 + size:
                break
            kind, data = bytes(tester.output[4:5]), bytes(tester.output[5 : 4 + size])
            del tester.output[: 4 + size]
            if kind == guard.CALL:
                server.outgoing += guard.frame(data)
            elif kind == guard.PASSED:
                self._passed += 1
            elif kind == guard.FAILED:
                self._failed += 1
            elif kind == guard.INVALID:
                raise SandboxError(
                    f"the tests fail by themselves: {one_line(ValueError(data.decode('utf-8', 'replace')))}"
                )
            else:
                self._done = data == b"1"
                return "done"
        return "tests ended" if tester.finished else None

    def verdict(self, killed_by: str | None) -> Verdict:
        ended = self._done is True
        why = "" if ended else "a test failed" if self._done is False else f"the tests did not end ({killed_by})"
        return Verdict(ended, self._passed, self._failed, why)


def _excess(process: "_Process", most: int) -> str | None:
    return "output" if max(len(process.output), len(process.errors)) > most else None


def _bytes(data: str | bytes) -> bytes:
    return data.encode("utf-8", "replace") if isinstance(data, str) else data


def _text(program: str) -> str:
    """Without what UTF-8 has no bytes for; Python would not compile it either way."""
    return program.encode("utf-8", "replace").decode("utf-8")


# --- processes ------------------------------------------------------------------------------------------------


class _Process:
    """A started sandbox with a task. A context manager, which ends it."""

    def __init__(self, sandbox: Sandbox, task: dict[str, Any]):
        limits = sandbox.limits
        task["limits"] = {
            "memory": limits.memory_mb << 20,
            "cpu": limits.cpu_s,
            "file": limits.files_mb << 20,
            "open_files": limits.open_files,
        }
        self.output, self.errors, self.outgoing = bytearray(), bytearray(), bytearray()
        try:
            self.outgoing += guard.frame(_guard_code()) + guard.frame(guard.encode(task))
        except guard.Malformed as e:
            raise SandboxError(f"a program, its files or its tests are {e}") from e
        self.up = self.finished = self.paused = self.close_input = False
        self._keep_errors = SAID if task["mode"] != "program" else (limits.output_kb * 1024 + 1)
        self._directory = None
        pass_fds: tuple[int, ...] = ()
        try:
            if sandbox.unsafe_subprocess:
                self._directory = tempfile.mkdtemp(prefix="sandbox-")
                command = [sys.executable, *_FLAGS, guard.LOADER]
            else:
                source, sink = os.pipe()
                pass_fds = (source,)
                os.write(sink, _filter())  # a kilobyte: a pipe holds it
                os.close(sink)
                command = [*_command(limits.files_mb), "--seccomp", str(source), _INSIDE, *_FLAGS, guard.LOADER]
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=self._directory,
                env=_ENVIRONMENT | ({"HOME": self._directory} if self._directory else {}),
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except OSError as e:
            self._remove()
            raise SandboxError(f"cannot start a process ({one_line(e)})") from e
        finally:
            for handle in pass_fds:
                os.close(handle)
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            os.set_blocking(stream.fileno(), False)

    def start(self) -> None:
        """Waits until it is ready for its program, which has no part in how long that takes.

        Raises:
          SandboxError: it ended, or took START_SECONDS.
        """
        _pump([self], START_SECONDS, lambda: self.up or None)
        if not self.up:
            status = self.end()
            said = self.errors.decode("utf-8", "replace").strip()
            raise SandboxError(one_line(ValueError(said or f"ended with status {status} before it was ready")))

    @property
    def streams(self):
        return self._popen.stdin, self._popen.stdout, self._popen.stderr

    def read(self, stream) -> bool:
        """Takes what there is of an output; False at its end."""
        try:
            data = os.read(stream.fileno(), _PIECE)
        except BlockingIOError:
            return True
        if stream is self._popen.stderr:
            self.errors += data[: max(0, self._keep_errors - len(self.errors))]
        else:
            if data and not self.up:
                self.up, data = data[:1] == guard.UP, data[1:]
                if not self.up:
                    return False
                if not data:
                    return True
            self.output += data
            self.finished = self.finished or not data
        return bool(data)

    def write(self) -> None:
        """Gives it what it takes. One that no longer reads is no error: its end shows in its output."""
        try:
            del self.outgoing[: os.write(self._popen.stdin.fileno(), memoryview(self.outgoing)[:_PIECE])]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()
            self.close_input = True

    def end(self) -> int:
        """Kills what is left of it, and waits until that is gone. Its status: see `Outcome`."""
        if not self.finished:
            self._kill()
        try:
            self._popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        status = self._popen.wait()
        # All processes inside hold the output. Those of a killed sandbox end a moment after its keeper.
        deadline = time.monotonic() + END_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while not self.finished and selector.select(max(0.0, deadline - time.monotonic())):
                self.finished = not os.read(self._popen.stdout.fileno(), _PIECE)
        return 128 - status if status < 0 else status

    def _kill(self) -> None:
        # Bubblewrap's end is that of its namespaces (--die-with-parent); plain processes have a group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _remove(self) -> None:
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_) -> None:
        if self._popen.returncode is None:
            self.end()
        for stream in self.streams:
            stream.close()
        self._remove()


def _pump(processes: Sequence[_Process], seconds: float, step) -> Any:
    """Moves bytes in and out of sandboxes until step() gives something, which is returned, or all outputs ended.

    Returns:
      "wall" where that takes longer than `seconds`; None at the end of all outputs.
    """
    deadline = time.monotonic() + seconds
    ended: set = set()
    while True:
        if (result := step()) is not None:
            return result
        with selectors.DefaultSelector() as selector:
            open_outputs = 0
            for process in processes:
                stdin, stdout, stderr = process.streams
                for stream in (stdout, stderr):
                    if stream not in ended:
                        open_outputs += stream is stdout
                        if not process.paused:
                            selector.register(stream, selectors.EVENT_READ, process)
                if process.outgoing and not stdin.closed:
                    selector.register(stdin, selectors.EVENT_WRITE, process)
                elif process.close_input and not stdin.closed:
                    stdin.close()
            if not open_outputs:
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                return "wall"
            for key, events in selector.select(left):
                process, stream = key.data, key.fileobj
                if events & selectors.EVENT_WRITE:
                    process.write()
                elif not process.read(stream):
                    ended.add(stream)


# --- bubblewrap -----------------------------------------------------------------------------------------------

# Not -I, which would ignore PYTHONHASHSEED; the environment is ours.
_FLAGS = ("-P", "-s", "-S", "-B", "-c")
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PATH": "/nonexistent", "PYTHONHASHSEED": "0"}
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_HERE = "/usr" if sys.base_prefix == "/usr" else "/python"  # where the interpreter's tree lies inside
_INSIDE = f"{_HERE}/bin/{_VERSION}"
if _HERE != "/usr":
    _ENVIRONMENT["LD_LIBRARY_PATH"] = f"{_HERE}/lib"


@functools.cache
def _guard_code() -> bytes:
    """The guard, compiled once."""
    path = pathlib.Path(guard.__file__)
    return marshal.dumps(compile(path.read_text(encoding="utf-8"), "guard.py", "exec", dont_inherit=True))


@functools.cache
def _command(files_mb: int) -> tuple[str, ...]:
    """The command that makes a sandbox, up to what is run in it.

    It has: the host's libraries and this interpreter with its standard library, all read-only; /dev/null; an empty
    directory in memory, where it starts. It has no /proc, /sys, /etc, nor commands.

    Raises:
      InputError: bubblewrap is not installed, or too old, or there is no call filter for this processor.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise InputError(
            f"sandbox: bubblewrap is not installed, and programs are only run inside it: {INSTALL}; "
            "sandbox.unsafe_subprocess=true does without, and without protection"
        )
    help_text = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    if "--size" not in help_text:
        raise InputError(f"sandbox: {program} is too old, it has no --size: install bubblewrap 0.7 or newer")
    if platform.machine() not in _PROCESSORS:
        raise InputError(
            f"sandbox: no filter of system calls for {platform.machine()}: one of {', '.join(_PROCESSORS)}"
        )
    command = [program]
    for namespace in ("user", "ipc", "pid", "net", "uts", "cgroup-try"):
        command.append(f"--unshare-{namespace}")
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    command += ["--hostname", "sandbox"]
    for name in ("lib", "lib64"):
        command += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
        top = pathlib.Path("/", name)
        if top.is_symlink():
            command += ["--symlink", f"usr/{name}", str(top)]
        else:
            command += ["--ro-bind-try", str(top), str(top)]
    prefix = pathlib.Path(sys.base_prefix)
    interpreter = prefix / "bin" / _VERSION
    if not interpreter.exists():
        raise InputError(f"sandbox: {interpreter}: no such file; the interpreter's own files are needed")
    command += ["--ro-bind", str(interpreter.resolve()), _INSIDE]
    if _HERE != "/usr":
        for name in sorted({"lib", sys.platlibdir}):
            command += ["--ro-bind-try", str(prefix / name), f"{_HERE}/{name}"]
    library = prefix / "lib" / _VERSION
    hidden = {"/usr/lib/python3/dist-packages", str(library / "site-packages"), str(library / "dist-packages")}
    for path in sorted(filter(os.path.isdir, hidden)):
        inside = path if path.startswith("/usr/lib") else f"{_HERE}/{os.path.relpath(path, prefix)}"
        command += ["--perms", "0500", "--tmpfs", inside]
    command += ["--dev-bind", "/dev/null", "/dev/null"]
    # The root is a file system in memory, too, without a cap of its own: closed for writing.
    command += ["--size", str(files_mb << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return tuple(command)


# --- the filter of system calls -------------------------------------------------------------------------------

# Refused, with the numbers that they have on x86_64 and on aarch64 (None: it has no such call).
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # A sandbox is one process: no fork bomb, nothing that outlives it, and the limit of a process's memory is that of
    # the sandbox. (`clone` is refused but for threads.)
    "fork": (57, None),
    "vfork": (58, None),
    # Memory that would count for nobody.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Where the grader is root, the sandbox's user is too, by the kernel's book: without capabilities, but the owner of
    # the device that it shares with the host.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    # No sockets: not every family of them is confined to a network namespace.
    "socket": (41, 198),
    # What exploits of kernels are made of, and computations are not.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "syslog": (103, 116),
}
# By processor: its column, its name in a filter (AUDIT_ARCH_*), the number of `clone`.
_PROCESSORS = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
_CLONE3 = 435


@functools.cache
def _filter() -> bytes:
    """A seccomp program (BPF) for this processor."""
    column, architecture, clone = _PROCESSORS[platform.machine()]
    load, equal, at_least, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # LD|ABS, JEQ, JGE, JSET, RET
    kill, refuse, missing, allow = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000  # process; EPERM; ENOSYS
    program: list[tuple[int, int, int, int]] = []  # operation, jumps if true and if false, operand

    def add(operation: int, operand: int, true: int = 0, false: int = 0) -> None:
        program.append((operation, true, false, operand))

    add(load, 4)
    add(equal, architecture, true=1)
    add(answer, kill)  # another processor's calls have other numbers
    add(load, 0)
    add(at_least, 0x40000000, false=1)
    add(answer, kill)  # so do those of x32
    # The C library falls back on clone, whose flags a filter can see.
    add(equal, _CLONE3, false=1)
    add(answer, missing)
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            add(equal, number, false=1)
            add(answer, refuse)
    add(equal, clone, false=3)
    add(load, 16)  # the first argument's lower half
    add(bits, 0x00010000, true=1)  # CLONE_THREAD
    add(answer, refuse)
    add(answer, allow)
    return b"".join(struct.pack("<HBBI", *line) for line in program)
