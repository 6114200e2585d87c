"""Loading onto a mesh needs memory for the arrays and little more, measured in a process of its own."""

import pathlib

import pytest

from rhyme_jax.benchmarks.loading import measure_loading, write_synthetic
from rhyme_jax.errors import RunError
from rhyme_jax.models.config import DecoderConfig

CONFIG = DecoderConfig(vocab_size=8192, width=512, layers=8, q_heads=8, kv_heads=4, head_dim=64, mlp_width=2048)


def test_memory_of_loading(tmp_path):
    write_synthetic(tmp_path, CONFIG, files=3)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    measured = measure_loading(tmp_path, (1, 4, 2))
    assert measured["params_bytes"] > 140e6 and measured["largest_bytes"] == 8192 * 512 * 4
    # Read as a whole it would be all of params_bytes; the slack is what the backend and its threads take.
    assert measured["extra_bytes"] < measured["largest_bytes"] + 40e6
    assert measured["end_bytes"] - measured["start_bytes"] > 0.9 * measured["params_bytes"]


def test_a_failure_is_told(tmp_path):
    with pytest.raises(RunError, match=r"config.json: does not exist"):
        measure_loading(pathlib.Path(tmp_path), (1, 1, 1))
