"""Eight virtual CPU devices for the whole suite, so that every sharding test runs on any machine.

Must be set before jax starts its backend. Equality claims are about float32 at full precision.
"""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    + ["--xla_force_host_platform_device_count=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_default_matmul_precision", "highest")
