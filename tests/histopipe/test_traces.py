"""Length traces: what is drawn has the asked-for distribution and correlation; what a run recorded comes back."""

import dataclasses
import json
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.histopipe import traces
from rhyme_jax.tasks.stream import PromptStream

HEAVY = traces.Lengths(
    median=2000.0, sigma=1.0, hard_share=0.03, hard_exponent=1.0, within=0.25, jitter=0.02, major_shifts=0.03,
    max_tokens=16384,
)  # fmt: skip


def changed(**fields) -> traces.Lengths:
    return dataclasses.replace(HEAVY, **fields)


def test_the_normal_quantile_is_that_of_the_standard_library():
    p = np.concatenate([np.linspace(1e-4, 1 - 1e-4, 999), [1e-9, 1e-6, 1 - 1e-6]])
    expected = [statistics.NormalDist().inv_cdf(x) for x in p]
    np.testing.assert_allclose(traces._normal_quantile(p), expected, rtol=1e-7, atol=1e-8)


def test_the_body_is_log_normal_and_the_tail_pareto():
    u = np.array([0.5, statistics.NormalDist().cdf(1.0)])
    np.testing.assert_allclose(HEAVY.quantile(u), [2000.0, 2000.0 * np.e], rtol=1e-6)
    edge = HEAVY.quantile(0.97)
    np.testing.assert_allclose(HEAVY.quantile([0.985, 0.997]), [2 * edge, 10 * edge], rtol=1e-6)  # exponent 1
    assert np.isfinite(changed(hard_share=0.0).quantile(1 - 1e-12))


@pytest.mark.parametrize(("asked", "least", "most"), [(0.0, 0, 0.015), (0.03, 0.02, 0.045), (0.4, 0.36, 0.44)])
def test_major_shifts_are_as_many_as_asked_for(asked, least, most):
    """The scatter of sixteen samples adds about one per cent."""
    trace = traces.draw(changed(major_shifts=asked), epochs=4, prompts=2000, samples=16, prompt_tokens=1, seed=0)
    assert least <= trace.major_shifts() <= most


def test_useless_history_is_independent_from_epoch_to_epoch():
    trace = traces.draw(changed(major_shifts=0.81), epochs=2, prompts=4000, samples=4, prompt_tokens=1, seed=0)
    first, second = np.log(trace.lengths_EPC.mean(axis=2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert trace.major_shifts() == pytest.approx(0.81, abs=0.02)


def test_every_epoch_has_the_same_distribution():
    trace = traces.draw(HEAVY, epochs=6, prompts=2000, samples=8, prompt_tokens=1, seed=1)
    mean_E = trace.lengths_EPC.mean(axis=(1, 2))
    assert mean_E.std() / mean_E.mean() < 0.03


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(1, 40), st.integers(1, 4), st.integers(16, 5000), st.floats(0, 1))
def test_lengths_are_within_bounds_and_repeatable(seed, prompts, samples, most, shifts):
    lengths = changed(max_tokens=most, major_shifts=shifts)
    trace = traces.draw(lengths, 3, prompts, samples, 7, seed)
    assert trace.lengths_EPC.shape == (3, prompts, samples)
    assert trace.lengths_EPC.min() >= traces.SHORTEST and trace.lengths_EPC.max() <= most
    np.testing.assert_array_equal(trace.lengths_EPC, traces.draw(lengths, 3, prompts, samples, 7, seed).lengths_EPC)


def test_batches_follow_the_order_of_a_run():
    trace = traces.draw(HEAVY, epochs=2, prompts=10, samples=2, prompt_tokens=1, seed=0)
    stream = PromptStream(10, 4, seed=3)
    for step, (prompts_G, lengths_GC) in enumerate(trace.batches(4, seed=3, steps=4)):
        epoch = stream.epoch
        np.testing.assert_array_equal(prompts_G, stream.next())
        assert epoch == step // 2
        np.testing.assert_array_equal(lengths_GC, trace.lengths_EPC[epoch, prompts_G])


def test_a_trace_that_is_too_short_is_refused():
    trace = traces.draw(HEAVY, epochs=2, prompts=10, samples=2, prompt_tokens=1, seed=0)
    with pytest.raises(InputError, match=r"^steps: 5 batches of 4 prompts .* 2 epochs of 2 batches"):
        trace.batches(4, seed=0, steps=5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"median": 0.0}, r"^trace\.median=0\.0: must be above 0$"),
        ({"hard_exponent": -1.0}, r"^trace\.hard_exponent=-1\.0: must be above 0$"),
        ({"sigma": 9.0}, r"^trace\.sigma=9\.0: must lie in \[0, 5\]$"),
        ({"major_shifts": 1.5}, r"^trace\.major_shifts=1\.5: must lie in \[0, 1\]$"),
        ({"max_tokens": 3}, r"^trace\.max_tokens=3: must be at least 16$"),
    ],
)
def test_impossible_distributions_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        changed(**fields)


# --- recorded -----------------------------------------------------------------------------------------------------


def record(workdir, steps: list[list[tuple[str, int, int]]]) -> None:
    (workdir / "samples").mkdir(parents=True)
    for step, rollouts in enumerate(steps, 1):
        lines = [json.dumps({"prompt": p, "sample": i, "length": x, "policy_version": step}) for p, i, x in rollouts]
        (workdir / f"samples/step_{step}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_what_a_run_recorded_comes_back_by_visit(tmp_path):
    steps = [
        [("a", 0, 5), ("a", 1, 6), ("b", 1, 8), ("b", 0, 7)],
        [("c", 0, 9), ("c", 1, 10), ("a", 0, 11), ("a", 1, 12)],
        [("b", 0, 13), ("b", 1, 14), ("c", 0, 15), ("c", 1, 16)],
        [("c", 0, 17), ("c", 1, 18)],  # an epoch that was not completed
    ]
    record(tmp_path, steps)
    trace = traces.recorded(tmp_path, prompt_tokens=3)
    assert trace.lengths_EPC.tolist() == [[[5, 6], [7, 8], [9, 10]], [[11, 12], [13, 14], [15, 16]]]
    assert trace.prompt_P.tolist() == [3, 3, 3]


def test_step_ten_comes_after_step_two_and_a_prompt_may_come_twice_in_a_step(tmp_path):
    record(tmp_path, [[("a", 0, i + 1)] for i in range(10)] + [[("a", 0, 11), ("a", 0, 12)]])
    assert traces.recorded(tmp_path, 1).lengths_EPC.ravel().tolist() == list(range(1, 13))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"step_1\.jsonl, line 1: expected an object with"),
        ('["a"]', r"line 1: expected an object with"),
        ('{"prompt": "a", "sample": 0}', r"line 1: expected an object with"),
        ('{"prompt": "a", "sample": 0, "length": 0}', r"line 1: expected an object with"),
        ('{"prompt": "a", "sample": 0, "length": 1.5}', r"line 1: expected an object with"),
    ],
)
def test_damaged_recordings_are_refused(tmp_path, line, message):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_1.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match=message):
        traces.recorded(tmp_path, 1)


def test_a_directory_without_samples_and_uneven_groups_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no samples/step_\*\.jsonl$"):
        traces.recorded(tmp_path / "nothing", 1)
    record(tmp_path, [[("a", 0, 1), ("a", 1, 1), ("b", 0, 1)]])
    with pytest.raises(InputError, match=r"its groups differ in size \(1, 2\)$"):
        traces.recorded(tmp_path, 1)
