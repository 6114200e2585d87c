"""Each family, number by number, as transformers computes it: logits, gradients, and decoding from the cache.

golden/families holds transformers' own numbers (golden/make_families.py). Where torch and transformers can be imported,
other models of the same families are made and compared on the spot, in both directions.
"""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhyme_jax.models import decoder, hf_config, hf_names, hf_weights

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text")
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}  # two thirds of the time of these tests
TOLERANCE = 1e-4  # absolute; the largest difference seen is in the docstring of each test


@functools.cache
def model(name):
    """(config, params, golden arrays) of a family; read once for all tests."""
    folder = GOLDEN / "families" / name
    config = hf_config.read_config(folder)
    return config, hf_weights.load_params(folder, config), dict(np.load(folder / "golden.npz"))


@functools.partial(jax.jit, static_argnums=1, compiler_options=FAST_TO_COMPILE)
def logits_and_gradients(params, config, tokens_BS):
    """Of the mean cross-entropy of the next token, as golden/make_families.py has it."""

    def loss(params):
        positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        hidden_BSD, _ = decoder.forward(params, config, tokens_BS, positions_BS)
        logits_BSV = decoder.logits(params, config, hidden_BSD)
        log_probs_BSV = jax.nn.log_softmax(logits_BSV[:, :-1])
        return -jnp.take_along_axis(log_probs_BSV, tokens_BS[:, 1:, None], axis=-1).mean(), logits_BSV

    gradients, logits_BSV = jax.grad(loss, has_aux=True)(params)
    return logits_BSV, gradients


def largest_difference(config, params, tokens_BS, want):
    """Over logits and gradients, each weight's under its Hugging Face name."""
    logits_BSV, gradients = logits_and_gradients(params, config, tokens_BS)
    got = {"logits": logits_BSV}
    for slot in hf_names.slots(config):
        value = functools.reduce(lambda tree, key: tree[key], slot.path, gradients)
        got[f"grad/{slot.hf_name}"] = slot.to_hf(np.asarray(value))
    assert got.keys() == want.keys()
    assert all(np.abs(want[name]).max() > 1e-3 for name in want)  # no weight is idle
    return max(np.abs(got[name] - want[name]).max() for name in want)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_of_transformers(name):
    """At most 1.2e-5 in logits (of up to 6), 1.9e-6 in gradients: SmolLM3's, both."""
    config, params, golden = model(name)
    want = {key: golden[key] for key in golden if key != "tokens"}
    assert largest_difference(config, params, golden["tokens"], want) < TOLERANCE


@functools.partial(jax.jit, static_argnums=1, compiler_options=FAST_TO_COMPILE)
def step(params, config, tokens_BK, positions_BK, cache):
    hidden_BKD, cache = decoder.forward(params, config, tokens_BK, positions_BK, cache)
    return decoder.logits(params, config, hidden_BKD), cache


# Tokens kept of those fed, by row and iteration: rows soon stand at their own positions, and what was fed too far is
# overwritten. Zero: nothing was right.
KEPT = {1: [[1, 0], [1, 1]], 4: [[4, 3], [1, 4], [2, 0], [4, 4]]}


# One token at a time only where a kind of layer is not in test_decoder.py.
@pytest.mark.parametrize(
    ("name", "K"),
    [*((name, 4) for name in FAMILIES), ("mistral", 1), ("smollm3", 1), ("gemma2", 1), ("gemma3_text", 1)],
)
def test_decoding_from_the_cache(name, K):
    """At most 7e-6."""
    config, params, golden = model(name)
    tokens_BS, want_BSV = golden["tokens"], golden["logits"]
    rows, S = tokens_BS.shape
    cache, lengths_B, iteration = decoder.init_cache(config, rows, S), np.zeros(rows, np.int32), 0
    while lengths_B.min() < S:
        at_BK = lengths_B[:, None] + np.arange(K, dtype=np.int32)
        kept_B = np.minimum(KEPT[K][iteration % len(KEPT[K])], S - lengths_B)
        fed_BK = np.take_along_axis(tokens_BS, np.minimum(at_BK, S - 1), 1)
        fed_BK = np.where(np.arange(K) < kept_B[:, None], fed_BK, (fed_BK + 7) % config.vocab_size)
        got_BKV, cache = step(params, config, fed_BK, at_BK, cache)
        assert np.isfinite(got_BKV).all()  # also of rows that are past the end
        for b, (length, n) in enumerate(zip(lengths_B, kept_B, strict=True)):
            np.testing.assert_allclose(got_BKV[b, :n], want_BSV[b, length : length + n], atol=TOLERANCE)
        lengths_B, iteration = lengths_B + kept_B, iteration + 1


@pytest.fixture(scope="module")
def make_families():
    """The maker of the golden files, for other models than those."""
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason=f"compares with {module}, which is not installed")
    spec = importlib.util.spec_from_file_location("make_families", GOLDEN / "make_families.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_on_the_spot(name, make_families, tmp_path):
    """Read from a file of transformers, and written so that transformers reads the same model.

    At most 3.5e-5 in logits and 1e-5 in gradients (SmolLM3's). What transformers reads back is the same to the bit.
    """
    sizes = {"vocab_size": 56, "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 6}
    hf = make_families.configs(**sizes, num_key_value_heads=3)[name]
    make_families.build(hf, seed=11).save_pretrained(tmp_path / "theirs")
    config = hf_config.read_config(tmp_path / "theirs")
    params = hf_weights.load_params(tmp_path / "theirs", config)
    tokens_BS = np.random.default_rng(5).integers(0, config.vocab_size, (3, 30)).astype(np.int32)
    theirs = make_families.answers(tmp_path / "theirs", tokens_BS)
    assert largest_difference(config, params, tokens_BS, theirs) < TOLERANCE

    hf_weights.save_params(tmp_path / "ours", params, config)
    assert hf_config.read_config(tmp_path / "ours") == config
    ours = make_families.answers(tmp_path / "ours", tokens_BS)
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value)
