"""The parts of the rollout benchmark that could make a wrong figure."""

import types

import numpy as np
import pytest
from helpers import group_requests, random_prompts

from configs.bench_rollout import get_config
from rhyme_jax.benchmarks import rollout
from rhyme_jax.errors import InputError
from rhyme_jax.history.store import HistoryStore, Response
from rhyme_jax.histospec.drafts import MAX_MATCH, SEPARATOR
from rhyme_jax.training.console import Console

PROMPTS = random_prompts(3, 40, seed=0)
REQUESTS = group_requests(PROMPTS, 2, 7, 9)


def history():
    store = HistoryStore(2, 10**6)
    rng = np.random.default_rng(0)
    for prompt in PROMPTS:
        store.add(prompt, [Response(rng.integers(0, 40, 5).astype(np.int32), 1.0, 0, 0, i, 7) for i in range(2)])
    return store.query(PROMPTS, 3, 4, 9, "reward")


def test_histories_of_all_modes_have_one_shape():
    """Else each would be compiled for, and compilation would be timed."""
    future = types.SimpleNamespace(response=lambda n: np.arange(n, n + 6, dtype=np.int32))
    real = history()
    garbled = rollout._garbled(real, np.random.default_rng(0), 40)
    for block in (rollout._emptied(real), garbled, rollout._foretold(real, future, REQUESTS)):
        for name in ("tokens_GRP", "weight_GR", "sample_GR", "noise_GR"):
            assert getattr(block, name).shape == getattr(real, name).shape
            assert getattr(block, name).dtype == getattr(real, name).dtype
    assert (rollout._emptied(real).tokens_GRP == SEPARATOR).all()
    # As many tokens, but others, and nobody's own.
    np.testing.assert_array_equal(garbled.tokens_GRP >= 0, real.tokens_GRP >= 0)
    assert (garbled.tokens_GRP == real.tokens_GRP)[real.tokens_GRP >= 0].mean() < 0.2
    first = np.zeros(1, int)
    assert garbled.own_responses(first, first, first + 7) == -1 and real.own_responses(first, first, first + 7) >= 0


def test_the_oracle_holds_the_future():
    future = types.SimpleNamespace(response=lambda n: np.arange(n, n + 6, dtype=np.int32))
    block = rollout._foretold(history(), future, REQUESTS)
    for n, request in enumerate(REQUESTS):
        (row,) = block.own_responses(*(np.array([x]) for x in (request.group, request.sample, request.noise)))
        np.testing.assert_array_equal(
            block.tokens_GRP[request.group, row, MAX_MATCH : MAX_MATCH + 6], future.response(n)
        )


def test_store_bytes():
    assert rollout.store_bytes(prompts=20)["bytes_per_token"] < 6


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("modes", ("fast",), "config.modes=('fast',): no mode 'fast'; there are vanilla, histospec"),
        ("repeats", 0, "config.repeats=0, config.steps=12: must be at least 1"),
    ],
)
def test_bad_configs(field, value, message):
    config = get_config()
    config[field] = value
    with pytest.raises(InputError) as error:
        rollout.run(config, Console())
    assert message in str(error.value)
