"""Forecasts of lengths: averages by hand, calibration on drifting prompts, metrics against slow formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.history.lengths import Forecast, LengthPredictor, forecast_metrics, lognormal


def visits(groups, samples, epochs, drift=0.15, sigma=0.45, seed=0):
    rng = np.random.default_rng(seed)
    mu = 6.0 + 0.9 * rng.standard_normal(groups)
    for _ in range(epochs):
        yield np.maximum(1, np.exp(mu[:, None] + sigma * rng.standard_normal((groups, samples))).round())
        mu = mu + drift * rng.standard_normal(groups)


def test_means_are_recency_weighted_by_hand():
    predictor = LengthPredictor(memory=0.5)
    predictor.observe([7], [np.array([10, 30])])
    assert predictor.predict([7]).mean_G == pytest.approx([20])
    predictor.observe([7, 2**64 - 1], [np.array([50]), np.array([4, 8])])
    forecast = predictor.predict([2**64 - 1, 7, 5])
    assert forecast.mean_G[:2] == pytest.approx([6, (0.5 * 20 + 50) / 1.5])
    assert forecast.mean_G[2] == pytest.approx((0.5 * 40 + 62) / (0.5 * 2 + 3))  # all responses seen lately
    assert forecast.seen_G.tolist() == [True, True, False]
    assert (forecast.upper_G >= forecast.mean_G).all()


def test_before_anything_was_seen():
    forecast = LengthPredictor(first=100.0).predict([1, 2])
    assert forecast.mean_G.tolist() == [100.0, 100.0] and not forecast.seen_G.any()
    assert (forecast.upper_G > 100).all()
    assert len(LengthPredictor().predict([]).mean_G) == 0


@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("quantile", [0.75, 0.9])
def test_upper_quantiles_are_those_of_what_comes(samples, quantile):
    predictor = LengthPredictor(quantile)
    shares = []
    for lengths in visits(200, samples, 8):
        metrics = forecast_metrics(predictor.predict(range(200)), lengths)
        shares.append(metrics["history/length_calibration"])
        predictor.observe(range(200), lengths)
    assert shares[0] is None
    assert np.mean(shares[3:]) == pytest.approx(quantile, abs=0.03)


def test_the_unseen_have_the_quantile_of_the_mixture():
    predictor = LengthPredictor()
    lengths = next(visits(400, 4, 1))
    predictor.observe(range(200), lengths[:200])
    forecast = predictor.predict(range(200, 400))
    assert np.mean(lengths[200:] <= forecast.upper_G[:, None]) == pytest.approx(0.9, abs=0.04)
    seen = predictor.predict(range(200))
    assert np.median(seen.upper_G / seen.mean_G) < forecast.upper_G[0] / forecast.mean_G[0]


def test_a_prompt_listed_twice_had_one_visit():
    twice, once = LengthPredictor(), LengthPredictor()
    twice.observe([1, 2, 1], [np.array([5]), np.array([9]), np.array([7, 9])])
    once.observe([1, 2], [np.array([5, 7, 9]), np.array([9])])
    assert twice.predict([1, 2]).mean_G.tolist() == once.predict([1, 2]).mean_G.tolist() == [7.0, 9.0]


def test_resume_is_exact():
    straight, first = LengthPredictor(), LengthPredictor()
    assert straight.to_arrays() == {}
    ids = [2**64 - 1 - i for i in range(100)]  # more than there is room for at the start
    batches = list(visits(100, 3, 4))
    for predictor, some in ((straight, batches), (first, batches[:2])):
        for lengths in some:
            predictor.observe(ids, lengths)
    saved = first.to_arrays()
    assert saved["ids_P"].dtype == np.uint64 and all(x.size for x in saved.values())
    resumed = LengthPredictor()
    resumed.observe([3], [np.array([1])])  # forgotten
    resumed.load_arrays(saved)
    for lengths in batches[2:]:
        resumed.observe(ids, lengths)
    for name, value in straight.to_arrays().items():
        np.testing.assert_array_equal(resumed.to_arrays()[name], value)
    unknown = [3, *ids]
    np.testing.assert_array_equal(resumed.predict(unknown).upper_G, straight.predict(unknown).upper_G)
    resumed.load_arrays({})
    assert resumed.to_arrays() == {}


def test_misfits_are_refused():
    predictor = LengthPredictor()
    for ids, lengths in (([1], []), ([1], [np.array([])])):
        with pytest.raises(ValueError, match="one response or more"):
            predictor.observe(ids, lengths)
    predictor.observe([1], [np.array([3])])
    with pytest.raises(ValueError, match="overall"):
        LengthPredictor().load_arrays(predictor.to_arrays() | {"overall": np.zeros(3)})


@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0])
def test_lognormal_has_the_mean_and_the_quantile(ratio):
    mu, sigma = lognormal(50.0, 50.0 * ratio)
    assert np.exp(mu + sigma**2 / 2) == pytest.approx(50)
    assert np.exp(mu + 1.2815515655 * sigma) == pytest.approx(50 * ratio)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans()), max_size=12))
def test_metrics_by_slow_formulas(prompts):
    forecast, actual, seen = (np.array(x, float) for x in zip(*prompts, strict=True)) if prompts else [np.zeros(0)] * 3
    made = Forecast(forecast, forecast + 1, seen.astype(bool))
    metrics = forecast_metrics(made, [np.array([a, a + 1]) for a in actual])
    kept = [(f, a + 0.5) for f, a, s in zip(forecast, actual, seen, strict=True) if s]
    if not kept:
        assert set(metrics.values()) == {None}
        return
    ranks = [
        [sum(y < x for y in column) + (sum(y == x for y in column) - 1) / 2 for x in column]
        for column in zip(*kept, strict=True)
    ]
    deviations = np.array(ranks) - np.mean(ranks, axis=1, keepdims=True)
    scale = np.sqrt((deviations**2).sum(1).prod())
    want = (deviations[0] * deviations[1]).sum() / scale if scale else None
    assert metrics["history/length_rank_correlation"] == (want if want is None else pytest.approx(want))
    shifted = [abs(x - y) > 0.1 * len(kept) for x, y in zip(*ranks, strict=True)]
    assert metrics["history/length_major_shifts"] == pytest.approx(np.mean(shifted))
    under = [x <= f + 1 for f, a in kept for x in (a - 0.5, a + 0.5)]
    assert metrics["history/length_calibration"] == pytest.approx(np.mean(under))
    assert metrics["history/length_error"] == pytest.approx(np.mean([abs(f - a) / a for f, a in kept]))
