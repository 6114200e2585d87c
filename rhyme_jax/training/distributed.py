"""Several processes, on one host or many, as one run.

Every process runs the same program on the same config. The learner's mesh spans the devices of all; rollouts are
shared out, each process decoding on its own devices, and gathered. `--distributed.coordinator=HOST:PORT` names a port
of process 0, to which the others connect before JAX starts. There they find out whether all of them are there, and
were started alike. These connections stay open to the end of the run: whoever fails says so over them, and where a
process or its host dies, the system closes its connection, so that the others can end with one clear line instead of
waiting for it in a collective. (JAX notices too, after longer, and ends with a stack trace.)

All collectives, `gather` among them, must be called by every process, in the same order, from one thread.
"""

import collections
import contextlib
import dataclasses
import errno
import itertools
import json
import os
import pickle
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from rhyme_jax.errors import InputError, RunError, one_line

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130  # exit codes
GRACE_SECONDS = 5.0  # in which the loss of a process shows, where it makes collectives of the others fail
HELLO_BYTES = 1 << 20  # the longest message between processes
CHUNK_BYTES = 4 << 20  # most that a process puts on its devices at a time to be gathered


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where this process stands among those of its run.

    Raises:
      InputError: the values do not fit together.
    """

    coordinator: str  # HOST:PORT, a free port of process 0, reachable from the others
    num_processes: int
    process_id: int
    timeout: float = 300.0  # seconds that the processes wait for each other at the start

    def __post_init__(self):
        if self.num_processes < 1:
            raise InputError(f"distributed.num_processes={self.num_processes}: must be at least 1")
        if not 0 <= self.process_id < self.num_processes:
            raise InputError(
                f"distributed.process_id={self.process_id}: must be from 0 to {self.num_processes - 1} "
                f"(distributed.num_processes={self.num_processes})"
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InputError(
                f"distributed.coordinator={self.coordinator}: must be HOST:PORT, a free port of the host of process 0"
            )
        if not self.timeout > 0:
            raise InputError(f"distributed.timeout={self.timeout}: must be positive")

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Declares --distributed.coordinator, .num_processes, .process_id and .timeout."""
    flags.DEFINE_string(
        "distributed.coordinator", None, "Several processes: HOST:PORT, a free port of process 0.", flag_values=values
    )
    flags.DEFINE_integer("distributed.num_processes", 1, "Processes of this run.", flag_values=values)
    flags.DEFINE_integer("distributed.process_id", None, "Which of them this is, from 0.", flag_values=values)
    flags.DEFINE_float(
        "distributed.timeout", 300.0, "Seconds that they wait for each other at the start.", flag_values=values
    )


def from_flags(values: flags.FlagValues = flags.FLAGS) -> Cluster | None:
    """What the command line says; None for a single process.

    Raises:
      InputError: the flags do not fit together.
    """
    given = {f.name: values[f"distributed.{f.name}"].value for f in dataclasses.fields(Cluster)}
    several = values["distributed.num_processes"]
    if given["coordinator"] is not None and not several.present:
        raise InputError("distributed.num_processes: must be given with distributed.coordinator")
    if given["num_processes"] == 1 and given["process_id"] in (None, 0):
        return None  # so that one script serves any number of hosts
    for name in ("coordinator", "process_id"):
        if given[name] is None:
            raise InputError(f"distributed.{name}: must be given with distributed.num_processes")
    return Cluster(**given)


# --- connections between the processes ------------------------------------------------------------------------


class _Gone(Exception):
    """The other end of a link is closed or talks nonsense."""


class _Link:
    """JSON objects, one a line, over a TCP connection."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._received = b""
        # Where a host loses power nobody closes its connections: let the system ask, after 10 s and then every 5 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: dict) -> None:
        """Sends as far as anyone listens; that nobody does shows in `receive`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict]:
        """The messages that have arrived; waits for some bytes. Raises _Gone."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError as e:
            raise _Gone(e.strerror or str(e)) from e
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if not data or len(self._received) > HELLO_BYTES:
            raise _Gone("its connection was closed")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as e:
            raise _Gone("it does not speak our language") from e
        if not all(isinstance(m, dict) for m in messages):
            raise _Gone("it does not speak our language")
        return messages

    def drain(self, seconds: float) -> None:
        """Waits until the other end has closed."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(max(seconds, 0.01))
            while self.socket.recv(1 << 16):
                pass


def _listen(cluster: Cluster) -> socket.socket:
    address = ("", cluster.port)
    try:
        try:
            return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError) as e:  # a system without IPv6
            if getattr(e, "errno", None) == errno.EADDRINUSE:
                raise
            return socket.create_server(address)
    except OSError as e:
        raise InputError(
            f"distributed.coordinator={cluster.coordinator}: cannot listen on port {cluster.port} "
            f"({os.strerror(e.errno) if e.errno else e})"
        ) from e


def _free_port() -> int:
    with socket.create_server(("", 0)) as s:
        return s.getsockname()[1]


def _call_roll(cluster: Cluster, same: dict[str, Any]) -> tuple[dict[int, _Link], int]:
    """Process 0: waits for all others; returns their links, and a port for JAX. Raises InputError."""
    deadline = time.monotonic() + cluster.timeout
    present: dict[int, _Link] = {}
    with _listen(cluster) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def drop(link: _Link) -> None:
            selector.unregister(link.socket)
            link.socket.close()

        while len(present) < cluster.num_processes - 1:
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                missing = sorted(set(range(1, cluster.num_processes)) - present.keys())
                error = (
                    f"distributed.num_processes={cluster.num_processes}: no call from process "
                    f"{', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''} within "
                    f"{cluster.timeout:g} s"
                )
                _refuse(present.values(), error)
            for key, _ in events:
                if key.fileobj is server:
                    with contextlib.suppress(OSError):
                        link = _Link(server.accept()[0])
                        selector.register(link.socket, selectors.EVENT_READ, link)
                    continue
                link = key.data
                try:
                    for message in link.receive():
                        error = _check_hello(cluster, same, message, present)
                        if error:
                            _refuse([link, *present.values()], error)
                        present[message["hello"]] = link
                except _Gone:  # a stranger, or a process that has ended again: it may be started anew
                    present = {i: other for i, other in present.items() if other is not link}
                    drop(link)
        for key in list(selector.get_map().values()):  # strangers who never said hello
            if key.data is not None and key.data not in present.values():
                drop(key.data)
    port = _free_port()
    for link in present.values():
        link.send({"go": port})
    return present, port


def _refuse(links, error: str) -> NoReturn:
    for link in links:
        link.send({"refused": error})
        link.socket.close()
    raise InputError(error)


def _check_hello(cluster: Cluster, same: dict[str, Any], hello: dict, present: dict[int, _Link]) -> str:
    """What is wrong with a process that calls, or nothing. Raises _Gone for something that is no such call."""
    process, processes, theirs = hello.get("hello"), hello.get("of"), hello.get("same")
    if type(process) is not int or type(processes) is not int or not isinstance(theirs, dict):
        raise _Gone("it does not speak our language")
    if processes != cluster.num_processes:
        return f"distributed.num_processes: process {process} was started with {processes}, process 0 with " + str(
            cluster.num_processes
        )
    if process in present or not 0 < process < processes:
        return f"distributed.process_id={process}: two processes were started with it"
    for name in sorted(same.keys() | theirs.keys()):
        if same.get(name) != theirs.get(name):
            return (
                f"{name}: must be the same in every process; it is {theirs.get(name)!r} in process {process} and "
                f"{same.get(name)!r} in process 0"
            )
    return ""


def _answer_roll(cluster: Cluster, same: dict[str, Any]) -> tuple[dict[int, _Link], int]:
    """The other processes: reports to process 0, and waits for all. Raises InputError."""
    deadline = time.monotonic() + cluster.timeout
    for pause in itertools.chain((0.1, 0.2, 0.5), itertools.repeat(1.0)):
        try:
            connection = socket.create_connection((cluster.host, cluster.port), timeout=10)
            if connection.getsockname() == connection.getpeername():  # on one host TCP may meet itself
                connection.close()
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
            break
        except OSError as e:  # not started yet, or its name is not known yet
            if time.monotonic() + pause > deadline:
                raise InputError(
                    f"distributed.coordinator={cluster.coordinator}: process 0 cannot be reached there "
                    f"({one_line(e)}); tried for {cluster.timeout:g} s"
                ) from e
            time.sleep(pause)
    link = _Link(connection)
    link.send({"hello": cluster.process_id, "of": cluster.num_processes, "same": same})
    connection.settimeout(max(1.0, deadline - time.monotonic()) + GRACE_SECONDS)  # process 0 gives up first
    answers: list[dict] = []
    try:
        while not answers:
            answers = link.receive()
    except _Gone as e:
        raise InputError(f"distributed.coordinator={cluster.coordinator}: process 0 does not answer ({e})") from e
    connection.settimeout(None)
    if "refused" in answers[0]:
        raise InputError(str(answers[0]["refused"]))
    if type(answers[0].get("go")) is not int:
        raise InputError(f"distributed.coordinator={cluster.coordinator}: another program answers there")
    return {0: link}, answers[0]["go"]


class _Watch(threading.Thread):
    """Ends this process when another is lost or has failed, whatever the main thread is waiting for.

    Process 0 is linked to all others and the others to process 0, which passes on what concerns all.
    """

    def __init__(self, cluster: Cluster, links: dict[int, _Link]):
        super().__init__(name="peers", daemon=True)
        self._cluster, self._links = cluster, links
        self._lock = threading.Lock()
        self._ending = False  # somebody is about to end this process
        self._done: set[int] = set()  # processes that have come to their normal end
        self._all_done = threading.Event()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, link in self._links.items():
                selector.register(link.socket, selectors.EVENT_READ, process)
            while not self._all_done.is_set():
                for key, _ in selector.select(1.0):
                    try:
                        for message in self._links[key.data].receive():
                            self._handle(key.data, message)
                    except _Gone as e:
                        if self._all_done.is_set():
                            return
                        self._lost(key.data, str(e))

    def _handle(self, sender: int, message: dict) -> None:
        if "failed" in message:
            text, code, process = message["failed"], message["code"], message["process"]
            self.end(f"error: process {process} of this run ended: {text}\n", code, process, text)
        elif self._cluster.process_id == 0:
            self._finished(sender)
        else:
            self._all_done.set()

    def _lost(self, process: int, how: str) -> NoReturn:
        text = f"process {process} is gone ({how})"
        line = (
            f"error: another process of this run is gone: process {process} ({how}); start all processes again to go "
            "on from the last checkpoint\n"
        )
        self.end(line, FAILED, process, text)

    def _finished(self, process: int) -> None:
        with self._lock:
            self._done.add(process)
            complete = len(self._done) == self._cluster.num_processes
        if complete:
            self._all_done.set()  # first, for they close their connections when they read it
            for link in self._links.values():
                link.send({"done": True})

    def finish(self) -> None:
        """Waits until all processes have come to their normal end."""
        if self._cluster.process_id == 0:
            self._finished(0)
        else:
            self._links[0].send({"done": True})
        self._all_done.wait()
        self.join()
        for link in self._links.values():
            link.socket.close()

    def end(self, line: str, code: int, process: int, text: str) -> NoReturn:
        """Writes `line`, tells the others that `process` failed, and ends this process at once: a usual exit would
        wait for the lost one (in JAX's shutdown, and in Orbax).
        """
        with self._lock:
            first, self._ending = not self._ending, True
        if not first:  # the other thread ends the process
            threading.Event().wait()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(line)
            sys.stderr.flush()
        for link in self._links.values():
            link.send({"failed": text, "code": code, "process": process})
        # Where process 0 goes first, JAX ends the others with a stack trace: it lets them read this and go.
        if self._cluster.process_id == 0:
            deadline = time.monotonic() + GRACE_SECONDS
            for link in self._links.values():
                link.drain(deadline - time.monotonic())
        os._exit(code)


# --- the run --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Session:
    cluster: Cluster
    watch: _Watch


_session: _Session | None = None


@contextlib.contextmanager
def running(cluster: Cluster | None, same: dict[str, Any] | None = None) -> Iterator[None]:
    """The run's processes meet before the block and part after it. With cluster None there is one, and nothing happens.

    It must come before anything that asks JAX for its devices. An exception in the block does not leave it: it ends
    this process (InputError and RunError with one line, others with their traceback), and all others with a line that
    says why.

    Args:
      same: what must not differ between processes, by the name that the user knows it by; JSON values.

    Raises:
      InputError: process 0 cannot be reached, a process is missing, or was started with something else.
    """
    global _session
    if cluster is None:
        yield
        return
    if _session is not None:
        raise RuntimeError("this process is part of a run already")
    same = json.loads(json.dumps({**(same or {}), "the version of jax": jax.__version__}))
    links, port = (_call_roll if cluster.process_id == 0 else _answer_roll)(cluster, same)
    watch = _Watch(cluster, links)
    watch.start()
    _session = _Session(cluster, watch)
    try:
        _initialize(cluster, port)
        yield
        watch.finish()
        jax.distributed.shutdown()
    except BaseException as e:
        _fail(e)
    _session = None


def _initialize(cluster: Cluster, port: int) -> None:
    # It would catch SIGTERM to announce a pre-emption, for which nobody here asks: `kill` would do nothing.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        f"{cluster.coordinator.rpartition(':')[0]}:{port}",
        cluster.num_processes,
        cluster.process_id,
        initialization_timeout=max(1, round(cluster.timeout)),
        shutdown_timeout_seconds=60,
        cluster_detection_method="deactivate",  # under SLURM it would leave each process one GPU
    )
    devices = collections.Counter(d.process_index for d in jax.devices())
    if len(set(devices.values())) > 1 or len(devices) < cluster.num_processes:
        counts = [devices[i] for i in range(cluster.num_processes)]
        raise InputError(f"distributed.num_processes: all must have the same number of devices; they have {counts}")


def _fail(error: BaseException) -> NoReturn:
    watch, process = _session.watch, _session.cluster.process_id
    if isinstance(error, KeyboardInterrupt):
        watch.end("interrupted\n", INTERRUPTED, process, "it was interrupted")
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else FAILED
        watch.end("" if error.code in (None, code) else f"{error.code}\n", code or FAILED, process, "it left")
    # A lost process makes collectives of the others fail. Then the watch knows better what to say.
    if not isinstance(error, InputError) or error.__cause__ is not None:
        time.sleep(GRACE_SECONDS)
    if isinstance(error, (InputError, RunError)):
        code = BAD_INPUT if isinstance(error, InputError) else FAILED
        watch.end(f"error: {error}\n", code, process, one_line(error))
    text = f"{type(error).__name__}: {one_line(error)}"
    watch.end("".join(traceback.format_exception(error)), FAILED, process, text)


def is_primary() -> bool:
    """Whether this process writes the workdir and talks to the user."""
    return _session is None or _session.cluster.process_id == 0


# --- data between processes -----------------------------------------------------------------------------------


def gather(value: Any) -> list[Any]:
    """What each process passed, by process id: the same list in every process, bit for bit.

    Any value that can be pickled, of any size (the bytes come from processes of this run alone). They travel as bytes,
    in chunks over the devices, so that 64-bit numbers and NaN stay what they are, and few shapes are compiled.
    """
    if _session is None:
        return [value]
    mine = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
    digits = np.array(divmod(mine.size, 1 << 30), np.int32)  # JAX would cut an int64 down
    sizes = [high * (1 << 30) + low for high, low in multihost_utils.process_allgather(digits).tolist()]
    chunk = min(CHUNK_BYTES, max(1 << 12, 1 << (max(sizes) - 1).bit_length()))
    parts = []
    for offset in range(0, max(sizes), chunk):
        piece = np.zeros(chunk, np.uint8)
        here = mine[offset : offset + chunk]
        piece[: here.size] = here
        parts.append(multihost_utils.process_allgather(piece))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(np.concatenate(parts, axis=1), sizes, strict=True)]


def from_primary(value: Any) -> Any:
    """The value that process 0 passed."""
    return gather(value if is_primary() else None)[0]


def check_shared(what: str, path: str | os.PathLike) -> None:
    """Raises InputError, in every process, unless all of them see the file or directory that process 0 has made."""
    deadline = time.monotonic() + GRACE_SECONDS  # network file systems are late at times
    while not (seen := os.path.exists(path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [process for process, sees in enumerate(gather(seen)) if not sees]
    if blind:
        raise InputError(f"{what}={path}: process {blind[0]} does not see it; use a file system that all hosts share")


def check_same(what: str, value: Any) -> None:
    """Raises RunError, in every process, unless all of them pass an equal value: the controllers must agree."""
    values = [pickle.dumps(v, protocol=5) for v in gather(value)]  # NaN does not equal itself
    odd = [process for process, other in enumerate(values) if other != values[0]]
    if odd:
        raise RunError(f"{what}: not the same in process {odd[0]} as in process 0")


def local_mesh(mesh: Mesh) -> Mesh:
    """The part of a mesh that lies on this process's devices, with the same axes; the mesh itself where that is all.

    Raises:
      InputError: it has no device of this process, or they do not lie together.
    """
    mine = np.vectorize(lambda d: d.process_index == jax.process_index(), otypes=[bool])(mesh.devices)
    if mine.all():
        return mesh
    if not mine.any():
        raise InputError(
            f"mesh={tuple(mesh.devices.shape)}: leaves process {jax.process_index()} without devices; the mesh must "
            f"use some of every process"
        )
    box = tuple(slice(i.min(), i.max() + 1) for i in np.nonzero(mine))
    if not mine[box].all():
        raise InputError(
            f"mesh={tuple(mesh.devices.shape)}: does not cut into one block for each process; use sizes that divide "
            f"the {jax.local_device_count()} devices of a process, innermost axis first"
        )
    return Mesh(mesh.devices[box], mesh.axis_names, axis_types=mesh.axis_types)


def to_local(tree: Any) -> Any:
    """Arrays on a mesh of all processes, as arrays on `local_mesh` alone; the shards are shared, not copied.

    They must not be split over axes that span processes, so that each process holds all parts: rollout weights are
    split over `mesh.tensor` only.

    Raises:
      InputError: an array is split between processes.
    """

    def local(x: jax.Array) -> jax.Array:
        if x.is_fully_addressable:
            return x
        sharding = NamedSharding(local_mesh(x.sharding.mesh), x.sharding.spec)
        if sharding.shard_shape(x.shape) != x.sharding.shard_shape(x.shape):
            raise InputError(
                f"mesh.tensor={x.sharding.mesh.shape['tensor']}: rollout weights must not be split between processes; "
                f"use a divisor of the {jax.local_device_count()} devices of a process"
            )
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])

    return jax.tree.map(local, tree)
