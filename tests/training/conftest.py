"""Runs of the loop compile the same programs again and again: a cache on disk compiles each once."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("compiled")))
    jax.config.update(names[1], 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
