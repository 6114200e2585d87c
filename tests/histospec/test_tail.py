"""What the engine does as a batch runs out: it shrinks, and gives drafting up where that does not pay. Neither may
change a token.
"""

import jax
import numpy as np
import pytest
from helpers import SMALL, group_requests, one_device, random_prompts

from rhyme_jax.histospec.drafts import MAX_MATCH, HistoryBlock
from rhyme_jax.histospec.engine import EngineConfig, RolloutEngine, Rollouts
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models.params import init_params

PROMPTS = random_prompts(8, SMALL.vocab_size, seed=3)
# Most rows are done after a few tokens; one is long.
REQUESTS = group_requests(PROMPTS, 4, step=1, budget=lambda n: 48 if n == 13 else 3 + n % 7)


@pytest.fixture(scope="module")
def params():
    return init_params(SMALL, jax.random.key(0))


def engine(**options) -> RolloutEngine:
    config = EngineConfig(SamplingParams(), (39,), draft_buckets=(1, 4), chunk=8, prompt_slots=16, **options)
    return RolloutEngine(SMALL, config, one_device(), seed=0)


def same(a: Rollouts, b: Rollouts) -> None:
    assert len(a.response_length_N) == len(b.response_length_N)
    for n in range(len(a.response_length_N)):
        np.testing.assert_array_equal(a.response(n), b.response(n))


@pytest.fixture(scope="module")
def whole(params):
    """(an engine, its rollouts): the batch of 32 shrinks to 8 on the way."""
    e = engine()
    return e, e.generate(params, REQUESTS)


def test_the_batch_shrinks(whole):
    e, rollouts = whole
    assert [c for c in e.compiled if c.startswith("decode")] == ["decode 32x80 K=1", "decode 8x80 K=1"]
    assert rollouts.iterations == rollouts.response_length_N.max()
    np.testing.assert_array_equal(rollouts.forwards_N, rollouts.response_length_N)


def test_shrinking_changes_nothing(whole, params, monkeypatch):
    e = engine()
    monkeypatch.setattr(e, "_smaller_batch", lambda rows: 0)
    kept = e.generate(params, REQUESTS)
    assert [c for c in e.compiled if c.startswith("decode")] == ["decode 32x80 K=1"]
    same(whole[1], kept)
    for name in ("forwards_N", "ended_N", "prompt_length_N"):
        np.testing.assert_array_equal(getattr(whole[1], name), getattr(kept, name))
    np.testing.assert_allclose(whole[1].log_prob_NT, kept.log_prob_NT, atol=1e-5)


def misleading_history() -> HistoryBlock:
    """Continues every context of one kind of token with a token that is not likely to come."""
    tokens = np.tile(np.arange(3, 35, dtype=np.int32), (8, 1, 4))[:, :, : 64 + MAX_MATCH]
    return HistoryBlock(tokens_GRP=tokens, weight_GR=np.ones((8, 1), np.float32))


@pytest.mark.parametrize(("cost", "gives_up"), [(0.0, False), (1.0, True)])
def test_drafts_that_do_not_pay_are_given_up(whole, params, cost, gives_up):
    e = engine(verify_cost=cost, min_match=1)
    rollouts = e.generate(params, REQUESTS, misleading_history())
    assert any("K=4" in c for c in e.compiled)
    assert any("K=1" in c for c in e.compiled) == gives_up
    same(whole[1], rollouts)


@pytest.mark.parametrize(
    ("cost", "k", "rate", "worth"),
    [(0.0, 8, 1.0, True), (0.3, 8, 3.0, False), (0.3, 8, 3.2, True), (0.3, 2, 1.2, False), (0.5, 1, 1.0, True)],
)
def test_worth_drafting(cost, k, rate, worth):
    config = EngineConfig(SamplingParams(), (0,), verify_cost=cost)
    assert config.worth_drafting(k, rate) == worth


def test_a_prompt_is_prefilled_once_for_its_group(whole):
    assert whole[0].compiled[0] == "prefill 8x16 for 32 rows"


def test_the_smallest_batches():
    e = engine()
    assert [e._smaller_batch(rows) for rows in (256, 64, 32, 16, 8, 1)] == [64, 16, 8, 0, 0, 0]
