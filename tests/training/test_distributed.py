"""Several processes as one run: how they meet, exchange data, and end; and that two train as one.

How they meet is tested between threads; the rest in real processes of four virtual devices each.
"""

import concurrent.futures
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from rhyme_jax.errors import InputError
from rhyme_jax.models.params import make_mesh
from rhyme_jax.training import distributed
from rhyme_jax.training.distributed import Cluster

ROOT = pathlib.Path(__file__).parents[2]


def free_address() -> str:
    with socket.create_server(("localhost", 0)) as s:
        return f"localhost:{s.getsockname()[1]}"


# --- the command line -----------------------------------------------------------------------------------------


def parse(*arguments: str) -> Cluster | None:
    values = flags.FlagValues()
    distributed.define_flags(values)
    values(["program", *(f"--distributed.{a}" for a in arguments)])
    return distributed.from_flags(values)


def test_flags():
    assert parse() is None
    assert parse("coordinator=a:1", "num_processes=1", "process_id=0") is None
    cluster = parse("coordinator=[::1]:1234", "num_processes=3", "process_id=2", "timeout=9")
    assert cluster == Cluster("[::1]:1234", 3, 2, 9.0)
    assert (cluster.host, cluster.port) == ("::1", 1234)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["coordinator=a:1"], "distributed.num_processes: must be given"),
        (["num_processes=2"], "distributed.coordinator: must be given"),
        (["num_processes=2", "coordinator=a:1"], "distributed.process_id: must be given"),
        (["num_processes=2", "coordinator=a:1", "process_id=2"], "distributed.process_id=2: must be from 0 to 1"),
        (["num_processes=1", "coordinator=a:1", "process_id=1"], "distributed.process_id=1: must be from 0 to 0"),
        (["num_processes=0", "coordinator=a:1", "process_id=0"], "distributed.num_processes=0: must be at least 1"),
        (["num_processes=2", "coordinator=a", "process_id=0"], "distributed.coordinator=a: must be HOST:PORT"),
        (["num_processes=2", "coordinator=a:x", "process_id=0"], "distributed.coordinator=a:x: must be HOST:PORT"),
        (["num_processes=2", "coordinator=a:70000", "process_id=0"], "distributed.coordinator=a:70000: must be"),
        (["num_processes=2", "coordinator=a:1", "process_id=0", "timeout=0"], "distributed.timeout=0.0: must be"),
    ],
)
def test_bad_flags(arguments, says):
    with pytest.raises(InputError) as e:
        parse(*arguments)
    assert str(e.value).startswith(says)


# --- how they meet --------------------------------------------------------------------------------------------


def meet(*processes: tuple, timeout: float = 20.0, stranger=lambda address: None) -> list:
    """Runs the start of (process_id, num_processes, what must be the same) in threads: a port, or the error.

    `stranger(address)` is called before process 1 calls.
    """
    address = free_address()

    def one(process_id, num_processes, same):
        cluster = Cluster(address, num_processes, process_id, timeout)
        if process_id == 1:
            stranger(address)
        try:
            links, port = (distributed._answer_roll if process_id else distributed._call_roll)(cluster, same)
        except InputError as e:
            return str(e)
        for link in links.values():
            link.socket.close()
        return port

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        return [f.result() for f in [pool.submit(one, *p) for p in processes]]


def test_they_meet_and_agree_on_a_port():
    ports = meet(*((i, 4, {"x": [1, None]}) for i in range(4)))
    assert type(ports[0]) is int and len(set(ports)) == 1


@pytest.mark.parametrize(
    ("processes", "says"),
    [
        ([(0, 2, {}), (1, 3, {})], "distributed.num_processes: process 1 was started with 3, process 0 with 2"),
        ([(0, 3, {}), (1, 3, {}), (1, 3, {})], "distributed.process_id=1: two processes were started with it"),
        (
            [(0, 2, {"config.steps": 4}), (1, 2, {"config.steps": 5})],
            "config.steps: must be the same in every process; it is 5 in process 1 and 4 in process 0",
        ),
    ],
)
def test_processes_that_do_not_belong_together(processes, says):
    assert set(meet(*processes)) == {says}  # all of them say so


def test_a_missing_process():
    here, missing = meet((0, 3, {}), (2, 3, {}), timeout=0.5)
    assert here == missing == "distributed.num_processes=3: no call from process 1 within 0.5 s"


def test_no_coordinator():
    (error,) = meet((1, 2, {}), timeout=0.2)
    assert "process 0 cannot be reached there" in error and "tried for 0.2 s" in error


def test_a_port_in_use():
    with socket.create_server(("", 0)) as s, pytest.raises(InputError) as e:
        distributed._call_roll(Cluster(f"localhost:{s.getsockname()[1]}", 2, 0), {})
    assert "cannot listen on port" in str(e.value) and "in use" in str(e.value)


def test_strangers_on_the_port_are_ignored():
    def stranger(address):
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"hello": "x"}\n', b"", b"\xff\xfe\n"):
            deadline = time.monotonic() + 10
            while True:
                try:
                    with socket.create_connection(address.split(":")) as s:
                        s.sendall(words)
                    break
                except OSError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)

    ports = meet((0, 2, {}), (1, 2, {}), stranger=stranger)
    assert type(ports[0]) is int and ports[0] == ports[1]


# --- one process ----------------------------------------------------------------------------------------------


def test_alone_nothing_happens():
    mesh = make_mesh()
    x = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("data")))
    with distributed.running(None):
        value = {"a": np.arange(3)}
        assert distributed.is_primary()
        assert distributed.gather(value)[0] is value and distributed.from_primary(value) is value
        distributed.check_same("x", float("nan"))
        assert distributed.to_local({"x": x})["x"] is x
        assert distributed.local_mesh(mesh) is mesh
    with pytest.raises(KeyError), distributed.running(None):
        raise KeyError


# --- several processes ----------------------------------------------------------------------------------------

# Arguments: what to do, the address, the number of processes, which this is.
MEMBER = """
import os, signal, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from rhyme_jax.errors import InputError, RunError
from rhyme_jax.models.params import make_mesh
from rhyme_jax.training import distributed as d

what, address, count, me = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def exchange():
    def made(i):  # another size in each process; longer than a chunk in one
        rng = np.random.default_rng(i)
        return {
            "float32": np.array([np.nan, -0.0, 1e-42, np.inf, i], np.float32), "float64": rng.random(5) ** 9,
            "int8": np.arange(-3, i, dtype=np.int8), "bool": rng.random((i, 3)) > 0.5, "empty": np.zeros((0, 3)),
            "long": rng.random(d.CHUNK_BYTES // 8 * i + 7), "json": ["\\u00e9", None, 2**60, [i]],
        }
    for i, got in enumerate(d.gather(made(me))):
        for name, value in made(i).items():
            same = got[name] == value if name == "json" else (
                got[name].dtype == value.dtype and got[name].shape == value.shape
                and got[name].tobytes() == value.tobytes())
            assert same, (i, name)
    assert d.from_primary(f"from {me}") == "from 0"
    assert d.is_primary() == (me == 0)
    d.check_same("nan", {"x": float("nan")})
    try:
        d.check_same("learner/loss", 1.0 + me)
    except RunError as e:
        assert str(e) == "learner/loss: not the same in process 1 as in process 0"
    else:
        raise AssertionError("they do not agree")
    d.check_shared("--workdir", os.getcwd())
    # Weights split over local devices only, on the mesh of all; then on this process's devices, then on a slice.
    mesh = make_mesh(-1, 2, 2)
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    make = lambda spec: jax.jit(lambda: w * 2, out_shardings=NamedSharding(mesh, spec))()
    local = d.to_local({"w": make(P(None, "tensor")), "b": make(P())})
    part = make_mesh(1, 1, 2, devices=jax.local_devices()[2:])
    for x in jax.tree.leaves(local):
        assert x.is_fully_addressable
        np.testing.assert_array_equal(np.asarray(x), w * 2)
        np.testing.assert_array_equal(np.asarray(jax.device_put(x, NamedSharding(part, P("tensor")))), w * 2)
    try:
        d.to_local(make(P("data")))
    except InputError as e:
        assert "between processes" in str(e)
    else:
        raise AssertionError("an array split between processes has no local form")

with d.running(d.Cluster(address, count, me, timeout=60.0), same={"what": what}):
    d.gather(None)
    print("started", flush=True)
    if what == "exchange":
        exchange()
    elif what == "refuse" and me == 1:
        raise InputError("x.y=3: no such thing")
    elif what == "bug" and me == 1:
        raise KeyError("a bug")
    elif what == "collective":
        while True:
            d.gather(me)
    else:
        while True:
            time.sleep(0.1)
print("ended", flush=True)
"""


def environment(devices: int) -> dict:
    return {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONPATH": str(ROOT)}


def members(what: str, count: int = 2, kill: int | None = None, by=signal.SIGKILL) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each process; process `kill` gets a signal once it has started."""
    address = free_address()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, what, address, str(count), str(i)],
            env=environment(4),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    try:
        if kill is not None:
            for line in running[kill].stdout:
                if "started" in line:
                    break
            running[kill].send_signal(by)
        return [(p.returncode, *out) for p, out in [(p, p.communicate(timeout=120)) for p in running]]
    finally:
        for p in running:
            p.kill()


def error_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def test_data_goes_round_and_all_end_together():
    for code, out, err in members("exchange"):
        assert code == 0, err
        assert out.endswith("ended\n")


@pytest.mark.parametrize(
    ("what", "kill", "by"),
    [
        ("collective", 1, signal.SIGKILL),  # the other finds out in a collective,
        ("sleep", 0, signal.SIGTERM),  # or while it does other things
    ],
)
def test_a_killed_process_ends_the_others(what, kill, by):
    processes = members(what, kill=kill, by=by)
    assert processes[kill][0] == -by
    code, _, err = processes[1 - kill]
    assert code == 1, err
    (line,) = error_lines(err)
    assert line.startswith(f"error: another process of this run is gone: process {kill} (") and "Traceback" not in err


@pytest.mark.parametrize(
    ("what", "count", "code", "own", "others"),
    [
        ("refuse", 3, 2, "error: x.y=3: no such thing", "error: process 1 of this run ended: x.y=3: no such thing"),
        ("bug", 2, 1, "KeyError: 'a bug'", "error: process 1 of this run ended: KeyError: 'a bug'"),
    ],
)
def test_a_process_that_fails_ends_the_others(what, count, code, own, others):
    processes = members(what, count)
    assert [p[0] for p in processes] == [code] * count
    assert processes.pop(1)[2].rstrip().endswith(own)
    for _, _, err in processes:
        assert error_lines(err) == [others]


# --- training -------------------------------------------------------------------------------------------------

STEPS, DEVICES = 3, 8  # devices of all processes together


def command(workdir: pathlib.Path, *arguments: str) -> list[str]:
    options = {
        "draft.costs": ROOT / "tests/training/cheap_drafts.json",
        "draft.buckets": "(1,)",
        "steps": STEPS,
        "checkpoint.every": 1,
        "eval.every": STEPS,
        "task.eval_size": 8,
        "rollout.max_new_tokens": 32,
        "pipeline.slices": 2,
    }
    return [
        sys.executable,
        *("-m", "experiments.math_grpo", f"--config={ROOT}/configs/math_grpo.py:smoke", f"--workdir={workdir}"),
        *(f"--config.{name}={value}" for name, value in options.items()),
        *arguments,
    ]


def launch(workdir: pathlib.Path, cache: pathlib.Path, processes: int) -> list[subprocess.Popen]:
    """The run in so many processes."""
    address = free_address()
    env = environment(DEVICES // processes) | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    several = [f"--distributed.coordinator={address}", f"--distributed.num_processes={processes}"]
    return [
        subprocess.Popen(
            command(workdir, *several, f"--distributed.process_id={i}"),
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]


def outcome(processes: list[subprocess.Popen], timeout: float = 400) -> list[tuple[int, str, str]]:
    try:
        return [(p.returncode, *out) for p, out in [(p, p.communicate(timeout=timeout)) for p in processes]]
    finally:
        for p in processes:
            p.kill()


def lines_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples(workdir: pathlib.Path) -> dict[str, list[dict]]:
    """What was rolled out, by file; without how it was drafted."""
    drop = ("accepted",)
    return {
        f.name: [{k: v for k, v in sample.items() if k not in drop} for sample in lines_of(f)]
        for f in sorted((workdir / "samples").glob("*.jsonl"))
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache) -> pathlib.Path:
    """The workdir of the run in one process."""
    workdir = tmp_path_factory.mktemp("alone")
    ((code, _, err),) = outcome(launch(workdir, cache, 1))
    assert code == 0, err
    return workdir


def test_two_processes_train_as_one(alone, cache, tmp_path):
    first, second = outcome(launch(tmp_path, cache, 2))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "result: held-out accuracy" in first[1]
    assert "step" not in second[1]  # one process talks
    assert samples(tmp_path) == samples(alone)
    ours, theirs = lines_of(tmp_path / "metrics.jsonl"), lines_of(alone / "metrics.jsonl")
    assert [m["step"] for m in ours] == [m["step"] for m in theirs] == list(range(STEPS + 1))
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        for name in ("learner/loss", "learner/grad_norm", "reward/mean", "history/tokens"):
            assert a[name] == pytest.approx(b[name], abs=1e-5), name


def test_a_run_that_lost_a_process_goes_on_from_its_last_checkpoint(alone, cache, tmp_path):
    killed, processes = 1, launch(tmp_path, cache, 2)
    deadline = time.monotonic() + 300
    while not any(p.name.isdecimal() for p in (tmp_path / "checkpoints").glob("*")):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes), outcome(processes)
        time.sleep(0.05)
    processes[killed].kill()
    survivor = processes[1 - killed]
    _, err = survivor.communicate(timeout=60)
    assert survivor.returncode == 1
    assert len(error_lines(err)) == 1 and f"process {killed}" in err, err
    outcome(processes)
    ((code, out, err),) = outcome(launch(tmp_path, cache, 1))  # one process goes on where two began
    assert code == 0, err
    assert "resuming" in out
    assert samples(tmp_path) == samples(alone)
