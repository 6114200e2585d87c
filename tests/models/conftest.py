import hf_files
import pytest

from rhyme_jax.models import hf_weights


@pytest.fixture
def saved(tmp_path):
    """A directory with config.json and the weights of `hf_files.BASE`."""
    hf_weights.save_params(tmp_path, hf_files.random_params(hf_files.BASE), hf_files.BASE)
    return tmp_path
