"""100,000 drafted tokens against an independent, one-token-at-a-time answer; and that the answer would notice."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import SMALL, group_requests, one_device, random_prompts

from rhyme_jax.benchmarks import exactness
from rhyme_jax.histospec import noise
from rhyme_jax.histospec.engine import RolloutEngine
from rhyme_jax.histospec.iteration import EngineConfig
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.models.params import init_params

MODEL = dataclasses.replace(SMALL, tie_embeddings=False)
EOS = (2, 0)


@pytest.fixture(scope="module")
def params():
    """Random weights whose text is neither constant nor uniform."""
    params = init_params(MODEL, jax.random.key(0))
    return {**params, "head": 3 * params["head"].at[:, np.array(EOS)].multiply(0.3)}


def test_a_hundred_thousand_tokens(params, monkeypatch):
    """Temperatures, filters, sources, windows, sets of buckets, with and without refill, under both kinds of noise:
    see `exactness.campaign`. A near tie of the two fastest tokens, below 1e-5, may go either way.
    """
    # Compilation is what takes long: three of the thirteen samplings, each temperature above 0 and each filter once.
    monkeypatch.setattr(exactness, "SAMPLINGS", tuple(exactness.SAMPLINGS[i] for i in (0, 5, 10)))
    lines = []
    report = exactness.campaign(
        params,
        MODEL,
        EOS,
        random_prompts(16, MODEL.vocab_size, seed=0),
        one_device(),
        tokens=100_000,
        samples=8,
        progress=lines.append,
    )
    assert report.compared >= 100_000
    assert report.drafted > 20_000
    assert report.wrong == []
    assert len(report.near_ties) <= 10, report.near_ties
    assert lines[-1].startswith(f"{report.compared} tokens compared")


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, 8, 0.9)], ids=str)
def test_a_wrong_token_is_found(params, sampling):
    prompts = random_prompts(4, MODEL.vocab_size, seed=1)
    requests = group_requests(prompts, 2, 3, 24)
    engine = RolloutEngine(MODEL, EngineConfig(sampling, EOS), one_device(), 5)
    rollouts = engine.generate(params, requests)
    assert exactness.check(params, MODEL, sampling, 5, requests, rollouts) == []
    n = int(np.argmax(rollouts.response_length_N))
    at = rollouts.prompt_length_N[n] + rollouts.response_length_N[n] - 1
    rollouts.tokens_NS[n, at] = (rollouts.tokens_NS[n, at] + 1) % MODEL.vocab_size
    (found,) = exactness.check(params, MODEL, sampling, 5, requests, rollouts, "planted")
    assert (found.case, found.rollout, found.position) == ("planted", n, rollouts.response_length_N[n] - 1)
    assert found.token == rollouts.tokens_NS[n, at] and not found.near_tie
    # Under another seed nearly nothing is what would have been drawn.
    if sampling.temperature == 1:
        assert len(exactness.check(params, MODEL, sampling, 6, requests, rollouts)) > 0.5 * rollouts.generated


def test_near_ties():
    difference = exactness.Difference("", 0, 0, 1, 2, gap=9e-6)
    assert difference.near_tie and not dataclasses.replace(difference, gap=1.1e-5).near_tie


def test_the_noise_is_the_engines():
    keys = np.random.default_rng(0).integers(0, 2**32, (50, 2), dtype=np.uint32)
    np.testing.assert_allclose(exactness.exponentials(keys, 300), noise.exponentials(keys, 300), rtol=2e-6)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), [1, 1, 1, 1]),
        (SamplingParams(top_k=2), [1, 1, 0, 0]),
        (SamplingParams(top_p=0.5), [1, 0, 0, 0]),
        (SamplingParams(top_p=0.51), [1, 1, 0, 0]),
        (SamplingParams(top_k=3, top_p=0.9), [1, 1, 1, 0]),
    ],
)
def test_filters(sampling, kept):
    logits = np.log([[0.5, 0.25, 0.15, 0.1]])
    np.testing.assert_array_equal(exactness.probabilities(logits, sampling)[0] > 0, np.array(kept, bool))
