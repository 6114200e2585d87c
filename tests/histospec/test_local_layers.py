"""Rollouts of a model with all that families differ in (sliding windows, layers without rotation, soft-caps, extra
norms), under tensor parallelism: drafted as plain, and both as the slow decoder.

Positions outside a window are hidden, not dropped, so a rejected draft must not show up there either.
"""

import dataclasses

import jax
import numpy as np
import oracle
import pytest
from helpers import group_requests, random_prompts
from world import EOS, SEED, STEP, as_block, assert_same, by_group, draft_with, make_engine, one_size, policy
from world import MODEL as BASE

from rhyme_jax.histospec.drafts import DraftRules
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models.config import RopeScaling
from rhyme_jax.models.params import ROLLOUT_RULES, make_mesh, param_shardings

MODEL = dataclasses.replace(
    BASE,
    window=7,
    local_layers=(True, False),
    rope_layers=(True, False),
    rope_scaling=RopeScaling("llama3", 8.0, original_positions=16),
    rope_theta_local=500.0,
    attn_softcap=5.0,
    logit_softcap=12.0,
    activation="gelu_tanh",
    embed_scale=True,
    norm_plus_one=True,
    post_norms=True,
)
GROUPS, SAMPLES, LONGEST = 4, 8, 40
PROMPTS = random_prompts(GROUPS, MODEL.vocab_size, seed=3)
REQUESTS = group_requests(PROMPTS, SAMPLES, STEP, lambda n: LONGEST - n % 5)
CONFIG = EngineConfig(SamplingParams(), EOS, (1, 4), DraftRules(min_prob=0.4), chunk=8, prompt_slots=16)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (tests/conftest.py makes them on a CPU)")
def test_drafted_on_eight_devices_as_plain_as_one_token_at_a_time():
    mesh = make_mesh(4, 1, 2)
    engine, weights = one_size(make_engine(CONFIG, mesh, MODEL)), policy(model=MODEL)
    placed = jax.device_put(weights, param_shardings(MODEL, mesh, ROLLOUT_RULES))
    plain = engine.generate(placed, REQUESTS)
    for n in (0, 11):
        want = oracle.roll_out(weights, MODEL, CONFIG.sampling, EOS, SEED, REQUESTS[n])
        assert plain.response(n).tolist() == want
    # The first half of what will be said, then something else: accepted, and rejected, far past the window.
    texts = [
        [np.r_[t[: len(t) // 2], (t[len(t) // 2 :] + 1) % MODEL.vocab_size] for t in group]
        for group in by_group(plain, REQUESTS)
    ]
    drafted = draft_with(engine, [4], REQUESTS, as_block(PROMPTS, texts, tokens=LONGEST), placed)
    assert_same(drafted, plain, REQUESTS, CONFIG.sampling, weights, MODEL)
    assert drafted.accepted_N.sum() > 100 and (drafted.proposed_N > drafted.accepted_N).sum() > 10
    assert plain.generated > 500 and plain.response_length_N.max() > 3 * MODEL.window
