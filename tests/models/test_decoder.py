"""The decoder against a slow numpy one, and the cache's promises: nothing stale is seen, nothing clamped."""

import dataclasses
import functools

import decoder_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhyme_jax.errors import InputError
from rhyme_jax.models import decoder
from rhyme_jax.models.config import DecoderConfig, RopeScaling
from rhyme_jax.models.decoder import forward, init_cache, logits
from rhyme_jax.models.params import (
    LEARNER_RULES,
    ROLLOUT_RULES,
    abstract_params,
    check_params,
    count_params,
    declare,
    init_params,
    make_mesh,
    param_shardings,
)

BASE = DecoderConfig(
    vocab_size=32, width=16, layers=2, q_heads=4, kv_heads=2, head_dim=8, mlp_width=24, rope_theta=100.0
)
CONFIGS = {
    "llama": BASE,
    "untied, one head each": dataclasses.replace(BASE, tie_embeddings=False, kv_heads=4),
    "qwen2, one kv head": dataclasses.replace(BASE, qkv_bias=True, kv_heads=1),
    "qwen3, wide heads": dataclasses.replace(BASE, qk_norm=True, head_dim=10, norm_eps=1e-2),
}
OPTIONS = {
    "gemma2's maths": dataclasses.replace(
        BASE,
        attn_softcap=0.7,
        logit_softcap=2.0,
        window=4,
        local_layers=(True, False),
        query_scalar=3,
        activation="gelu_tanh",
        embed_scale=True,
        norm_plus_one=True,
        post_norms=True,
    ),
    "gemma3's rotations": dataclasses.replace(
        BASE,
        qk_norm=True,
        window=3,
        local_layers=(False, True),
        rope_theta_local=7.0,
        rope_scaling=RopeScaling("linear", 8.0),
    ),
    "rope in one layer of two": dataclasses.replace(BASE, rope_layers=(True, False)),
    "llama3's rotation": dataclasses.replace(BASE, rope_scaling=RopeScaling("llama3", 8.0, original_positions=32)),
}
B, S = 3, 12


def random_params(config, mean=0.3, std=0.4):
    """Random in every entry: norms at one and biases at zero would hide their absence."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(mean, std, x.shape), x.dtype), abstract_params(config))


@pytest.fixture(scope="module")
def params():
    return random_params(BASE)


@pytest.fixture(scope="module")
def tokens_BS():
    return np.random.default_rng(1).integers(0, BASE.vocab_size, (B, S)).astype(np.int32)


def positions(starts, K):
    return np.asarray(starts, np.int32)[:, None] + np.arange(K, dtype=np.int32)


@functools.partial(jax.jit, static_argnums=1)
def uncached(params, config, tokens_BK):
    return forward(params, config, tokens_BK, positions([0] * len(tokens_BK), tokens_BK.shape[1]))[0]


step = jax.jit(forward, static_argnums=1)


# --- against an oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS | OPTIONS)
def test_equals_the_oracle(name, tokens_BS):
    config = (CONFIGS | OPTIONS)[name]
    params = random_params(config) if name in CONFIGS else random_params(config, 0, 0.7)
    got = logits(params, config, uncached(params, config, tokens_BS))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, decoder_oracle.logits(params, config, tokens_BS), atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("gemma2's maths", {"attn_softcap": 0.0}),
        ("gemma2's maths", {"query_scalar": 0}),
        ("gemma2's maths", {"window": 5}),
        ("gemma3's rotations", {"rope_theta_local": 0.0}),
        ("gemma3's rotations", {"rope_scaling": None}),
        ("rope in one layer of two", {"rope_layers": ()}),
        ("llama3's rotation", {"rope_scaling": RopeScaling("linear", 8.0)}),
    ],
)
def test_the_oracle_tells_each_option(name, off, tokens_BS):
    """What the decoder is compared at has room to differ: without an option the numbers are others."""
    config = OPTIONS[name]
    params, row = random_params(config, 0, 0.7), tokens_BS[:1]  # with a common mean, all tokens are too much alike
    other = decoder_oracle.logits(params, dataclasses.replace(config, **off), row)
    assert np.abs(other - decoder_oracle.logits(params, config, row)).max() > 1e-2


# --- cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("K", [1, 4, S])
def test_fed_in_pieces_equals_fed_whole(K, name, tokens_BS):
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    cache, pieces = init_cache(config, B, S), []
    for start in range(0, S, K):
        hidden, cache = step(params, config, tokens_BS[:, start : start + K], positions([start] * B, K), cache)
        pieces.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), uncached(params, config, tokens_BS), atol=1e-5)


def test_rows_at_their_own_positions(params, tokens_BS):
    """Rows advance by different numbers of tokens; what was fed too far is stale and then overwritten."""
    expected = uncached(params, BASE, tokens_BS)
    cache = init_cache(BASE, B, S)
    lengths = np.zeros(B, np.int32)
    accepted = np.array([[4, 1, 2], [1, 4, 3], [3, 2, 4], [4, 4, 1]])
    K = 4
    for accepted_B in accepted:
        at = positions(lengths, K)
        right = np.arange(K) < accepted_B[:, None]
        fed = np.take_along_axis(tokens_BS, np.minimum(at, S - 1), 1)
        fed = np.where(right & (at < S), fed, (fed + 7) % BASE.vocab_size)  # rejected drafts
        hidden, cache = step(params, BASE, fed, at, cache)
        for b in range(B):
            valid = min(accepted_B[b], S - lengths[b])
            got = hidden[b, :valid]
            np.testing.assert_allclose(got, expected[b, lengths[b] : lengths[b] + valid], atol=1e-5)
        lengths = np.minimum(lengths + accepted_B, S).astype(np.int32)
    assert lengths.tolist() == [12, 11, 10]


def test_a_write_past_the_end_is_dropped(params, tokens_BS):
    _, cache = step(params, BASE, tokens_BS, positions([0] * B, S), init_cache(BASE, B, S))
    for start in (S, S + 5, 10**9):
        _, after = step(params, BASE, tokens_BS[:, :3], positions([start] * B, 3), cache)
        jax.tree.map(np.testing.assert_array_equal, after, cache)
    # Across the edge: the last slot is written, and none of those before it.
    _, after = step(params, BASE, tokens_BS[:, :3], positions([S - 1] * B, 3), cache)
    for (keys, values), (old_keys, old_values) in zip(after, cache, strict=True):
        for new, old in ((keys, old_keys), (values, old_values)):
            np.testing.assert_array_equal(new[:, :, : S - 1], old[:, :, : S - 1])
            assert (np.asarray(new[:, :, S - 1]) != np.asarray(old[:, :, S - 1])).any()


def test_what_lies_beyond_the_row_is_invisible(params, tokens_BS):
    """Huge stale entries beyond each row's position change no bit of what it computes."""
    _, clean = step(params, BASE, tokens_BS[:, :6], positions([0] * B, 6), init_cache(BASE, B, S))
    lengths = np.array([2, 4, 6])
    stale = np.arange(S)[None, None, :, None] >= lengths[:, None, None, None]
    dirty = jax.tree.map(lambda x: jnp.where(stale, 1e4, x), clean)
    fed = tokens_BS[:, :2], positions(lengths, 2)
    np.testing.assert_array_equal(step(params, BASE, *fed, clean)[0], step(params, BASE, *fed, dirty)[0])


def test_neighbouring_rows_do_not_mix(params, tokens_BS):
    alone = uncached(params, BASE, tokens_BS[1:2])
    np.testing.assert_allclose(uncached(params, BASE, tokens_BS)[1:2], alone, atol=1e-6)


# --- per platform ---------------------------------------------------------------------------------------------


def values_and_gradients(fn, *args):
    """fn's values and the gradients of a sum over them, uneven so that no symmetry hides a swap."""

    def uneven_sum(*args):
        out = fn(*args)
        return jnp.vdot(out, jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)), out

    return jax.jit(jax.grad(uneven_sum, argnums=tuple(range(len(args))), has_aux=True))(*args)


def random_arrays(*shapes):
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(("H", "N", "softcap"), [(4, 4, 0), (6, 3, 0), (4, 1, 0), (6, 3, 1.5)])
@pytest.mark.parametrize(
    ("K", "starts"),
    [(1, [0, 5, S + 3]), (4, [0, 5, S - 2]), (S, [0, 0, 0])],
    ids=["cached, one token", "cached, across the end", "uncached"],
)
def test_accelerators_attend_as_the_cpu_does(K, starts, H, N, softcap):
    visible_BKS = np.arange(S) <= positions(starts, K)[:, :, None]
    arrays = random_arrays((B, K, H, 10), (B, N, S, 10), (B, N, S, 10))
    on_cpu, on_accelerator = (
        values_and_gradients(functools.partial(attend, visible_BKS=visible_BKS, scale=0.4, softcap=softcap), *arrays)
        for attend in (decoder._attend_on_cpu, decoder._attend_on_accelerator)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), on_cpu, on_accelerator)


def test_windows_hide_what_has_left_them(tokens_BS):
    """Two local layers see twice the window, less one: tokens before that change nothing, those within do."""
    config = dataclasses.replace(BASE, window=4)
    params = random_params(config)
    reach = config.layers * (config.window - 1)
    got = {}
    for changed in (S - 1 - reach, S - 2 - reach):
        tokens = tokens_BS.copy()
        tokens[:, : changed + 1] = (tokens[:, : changed + 1] + 1) % BASE.vocab_size
        got[changed] = uncached(params, config, tokens)[:, -1]
    same = uncached(params, config, tokens_BS)[:, -1]
    np.testing.assert_array_equal(got[S - 2 - reach], same)
    assert (got[S - 1 - reach] != same).any()


@pytest.mark.parametrize("K", [1, 2, decoder.FEW_TOKENS // B, decoder.FEW_TOKENS])
def test_accelerators_have_the_head_of_the_cpu(K):
    arrays = random_arrays((B, K, BASE.width), (BASE.vocab_size, BASE.width))
    on_cpu, on_accelerator = (
        values_and_gradients(head, *arrays) for head in (decoder._tied_head_on_cpu, decoder._tied_head)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), on_cpu, on_accelerator)


def test_each_platform_gets_its_branch_alone(params, tokens_BS):
    """Only the CPU's branches hold barriers, and neither program holds the other's products too."""

    @jax.jit
    def run(params, cache):
        hidden, cache = forward(params, BASE, tokens_BS[:, :2], positions([0] * B, 2), cache)
        return logits(params, BASE, hidden), cache

    traced = run.trace(params, init_cache(BASE, B, S))
    cpu, cuda = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda"))
    assert cpu.count("optimization_barrier") == BASE.layers + 1
    assert "optimization_barrier" not in cuda
    per_layer = 4 + 2 + 3  # projections, scores and weighted sum, MLP
    assert cpu.count("dot_general") == cuda.count("dot_general") == BASE.layers * per_layer + 1


# --- gradients, dtypes, initial values ------------------------------------------------------------------------


def test_remat_gives_the_same_gradients(params, tokens_BS):
    def loss(params, remat):
        hidden, _ = forward(params, BASE, tokens_BS, positions([0] * B, S), remat=remat)
        return jnp.mean(jnp.square(logits(params, BASE, hidden)))

    plain, saved = (jax.jit(jax.grad(loss), static_argnums=1)(params, remat) for remat in ("none", "full"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, saved)
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(plain))  # every parameter is used


def test_bfloat16_is_close_and_finite(tokens_BS):
    low = dataclasses.replace(BASE, dtype="bfloat16")
    params = init_params(BASE, jax.random.key(0))
    hidden = uncached(params, low, tokens_BS)
    got, want = logits(params, low, hidden), logits(params, BASE, uncached(params, BASE, tokens_BS))
    assert hidden.dtype == jnp.bfloat16 and got.dtype == jnp.float32 and jnp.isfinite(got).all()
    assert jnp.abs(got - want).max() < 0.05 * jnp.abs(want).max()
    cached, cache = step(params, low, tokens_BS, positions([0] * B, S), init_cache(low, B, S))
    np.testing.assert_allclose(cached.astype(np.float32), hidden.astype(np.float32), atol=0.05)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(cache))


def test_init_is_deterministic_and_by_path():
    first, again = (init_params(BASE, jax.random.key(3)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    other = init_params(BASE, jax.random.key(4))
    assert (first["embed"] != other["embed"]).any()
    layers = first["layers"]
    assert (layers["0"]["q"] != layers["1"]["q"]).any() and (layers["0"]["k"] != layers["0"]["v"]).any()
    # Adding parameters (biases, norms, a layer) moves none of the others, but for the residual scale 1/sqrt(2L).
    wider = init_params(dataclasses.replace(BASE, qkv_bias=True, qk_norm=True, layers=3), jax.random.key(3))
    for name in ("q", "k", "v", "gate", "up", "attn_norm"):
        np.testing.assert_array_equal(wider["layers"]["1"][name], layers["1"][name])
    np.testing.assert_allclose(wider["layers"]["1"]["o"] * 3**0.5, layers["1"]["o"] * 2**0.5, rtol=1e-6)
    assert not wider["layers"]["0"]["q_bias"].any() and (wider["layers"]["0"]["q_norm"] == 1).all()


def test_norms_that_add_one_start_at_zero():
    layer = declare(OPTIONS["gemma2's maths"])["layers"]["1"]
    for name in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
        assert layer[name].shape == (BASE.width,) and layer[name].scale == 0
    assert declare(BASE)["layers"]["1"]["attn_norm"].scale is None  # one


def test_configs_of_equal_models_are_equal():
    assert dataclasses.replace(BASE, rope_layers=[1, 1], query_scalar=8, window=3, local_layers=(True, True)) == (
        dataclasses.replace(BASE, window=3)
    )
    assert dataclasses.replace(BASE, window=3, rope_theta_local=100) == dataclasses.replace(BASE, window=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu"}, r"model.activation='relu': must be one of silu, gelu_tanh"),
        ({"window": -1}, r"model.window=-1: must be a positive number, or 0"),
        ({"logit_softcap": float("nan")}, r"model.logit_softcap=nan"),
        ({"rope_layers": (True,)}, r"model.rope_layers: has 1 entries; must have one for each of 2 layers"),
        ({"local_layers": (True, False)}, r"model.local_layers=\(True, False\): needs a window, which is 0"),
        ({"rope_theta_local": 10.0}, r"model.rope_theta_local=10.0: needs a window"),
    ],
)
def test_configs_that_are_refused_at_once(changes, message):
    with pytest.raises(InputError, match=message) as error:
        dataclasses.replace(BASE, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "yarn", "factor": 2.0}, r"rope_scaling.kind='yarn': must be one of linear, llama3"),
        ({"kind": "linear", "factor": 0.0}, r"rope_scaling.factor=0.0: must be a positive number"),
        ({"kind": "llama3", "factor": 2.0, "low_freq": 4.0}, r"high_freq=4.0: must be greater than low_freq=4.0"),
    ],
)
def test_rope_scalings_that_are_refused_at_once(fields, message):
    with pytest.raises(InputError, match=message):
        RopeScaling(**fields)


def test_initial_logits_do_not_grow_with_depth():
    tokens = np.random.default_rng(2).integers(0, BASE.vocab_size, (4, 16))
    for layers in (1, 8):
        deep = dataclasses.replace(BASE, layers=layers)
        params = init_params(deep, jax.random.key(0))
        assert 0.5 < logits(params, deep, uncached(params, deep, tokens)).std() < 2


def test_count_and_check():
    params = init_params(BASE, jax.random.key(0))
    assert count_params(BASE) == sum(x.size for x in jax.tree.leaves(params))
    check_params(params, BASE, "here")
    for change, message in (
        (lambda p: p.pop("final_norm"), "here: weight final_norm is missing"),
        (lambda p: p.update(head=p["embed"]), "here: unexpected weight head"),
        (lambda p: p.update(embed=p["embed"].T), r"here: weight embed has shape \(16, 32\), expected \(32, 16\)"),
    ):
        broken = dict(params)
        change(broken)
        with pytest.raises(InputError, match=message):
            check_params(broken, BASE, "here")


# --- sharding -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them on a CPU)")
def test_sharded_forward_equals_unsharded(params, tokens_BS):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    tokens = np.concatenate([tokens_BS, tokens_BS[:1]])
    for rules in (LEARNER_RULES, ROLLOUT_RULES):
        sharded = jax.device_put(params, param_shardings(BASE, mesh, rules))
        run = jax.jit(lambda p: forward(p, BASE, tokens, positions([0] * 4, S), mesh=mesh)[0])
        np.testing.assert_allclose(run(sharded), uncached(params, BASE, tokens), atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them on a CPU)")
def test_an_axis_that_does_not_divide_is_refused():
    with pytest.raises(
        InputError, match=r"mesh.tensor=8: does not divide the model's kv_heads of 2; sizes that divide all .*: 1, 2$"
    ) as error:
        param_shardings(BASE, make_mesh(data=1, tensor=8), LEARNER_RULES)
    assert "\n" not in str(error.value)
    odd = dataclasses.replace(BASE, width=18)
    with pytest.raises(InputError, match=r"mesh.fsdp=4: does not divide the model's embed of 18"):
        param_shardings(odd, make_mesh(data=2, fsdp=4), LEARNER_RULES)
    param_shardings(odd, make_mesh(data=2, fsdp=4), ROLLOUT_RULES)  # where the width is not split
