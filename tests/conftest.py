"""What the whole suite shares: eight virtual CPU devices, one cache of compiled programs, the same examples each time.

The devices and the cache must be set before jax starts its backend; they reach the processes that tests start, too.
Equality claims are about float32 at full precision.

Property tests try the same examples in each run, so that a change is judged by what it changes. To look for new ones:
`python -m pytest --hypothesis-profile=explore`.
"""

import atexit
import os
import shutil
import tempfile

import hypothesis

os.environ["XLA_FLAGS"] = " ".join(
    [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    + ["--xla_force_host_platform_device_count=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers inherit the directory of the process that started them
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="rhyme_jax_tests_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax

jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False, max_examples=2_000)
hypothesis.settings.load_profile("suite")
