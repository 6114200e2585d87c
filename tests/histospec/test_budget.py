"""How much to draft: counts by a plain loop, estimates by hand and by simulation, the choice by brute force."""

import json
import math

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.histospec import budget
from rhyme_jax.histospec.budget import (
    MARGIN,
    SHAPE_XM,
    Acceptance,
    Cost,
    CostTable,
    Mix,
    Tally,
    choose_bucket,
    next_window,
)
from rhyme_jax.histospec.drafts import HISTORY, MAX_MATCH, OWN, SELF, SIBLINGS, SOURCES

D = 7  # depths: drafts of up to 7 tokens

# --- windows of a row -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "window", "proposed", "accepted", "want"),
    [
        ("paper", 2, 2, 2, 4),
        ("paper", 4, 4, 3, 2),
        ("paper", 4, 4, 0, 2),
        ("paper", 2, 2, 1, 2),
        ("paper", 30, 30, 30, 32),
        ("paper", 31, 31, 31, 32),
        ("paper", 32, 32, 32, 32),
        ("paper", 8, 3, 3, 10),  # shorter than allowed: all that was proposed was accepted
        ("paper", 8, 3, 2, 2),
        ("paper", 8, 0, 0, 8),  # nothing proposed: nothing learned
        ("released", 2, 2, 2, 4),
        ("released", 8, 8, 8, 16),
        ("released", 16, 16, 16, 16),
        ("released", 9, 9, 9, 16),
        ("released", 16, 16, 15, 8),
        ("released", 5, 5, 0, 2),
        ("released", 2, 2, 0, 2),
        ("released", 8, 1, 1, 16),
        ("released", 8, 1, 0, 4),
        ("released", 8, 0, 0, 8),
    ],
)
def test_next_window(rule, window, proposed, accepted, want):
    row = [np.array([x, 2], np.int32) for x in (window, proposed, accepted)]
    have = jax.jit(next_window, static_argnums=0)(rule, *row)
    assert have.dtype == np.int32
    assert have.tolist() == [want, 4]  # the other row: 2 of 2 accepted


def test_next_window_from_the_first_on():
    """Seven drafts that are accepted whole, then one that is not."""
    for rule, want in (("paper", [4, 6, 8, 10, 12, 14, 16, 2]), ("released", [4, 8, 16, 16, 16, 16, 16, 8])):
        windows, window = [], np.array([budget.FIRST_WINDOW], np.int32)
        for turn in range(8):
            window = next_window(rule, window, window, window - (turn == 7))
            windows.append(int(window[0]))
        assert windows == want


def test_marginal_windows_are_not_of_each_row():
    with pytest.raises(ValueError, match="'marginal'"):
        next_window("marginal", *[np.ones(1, np.int32)] * 3)


# --- counting -------------------------------------------------------------------------------------------------

count = jax.jit(lambda tally, *columns: tally.count(*columns))


def tallied(rows, tally=None) -> Tally:
    """Of rows of (source, match, proposed, accepted, allowance, active)."""
    columns = [np.array(x, np.int32) for x in zip(*rows, strict=True)]
    columns[-1] = columns[-1].astype(bool)
    return jax.tree.map(np.asarray, count(Tally.zeros(D) if tally is None else tally, *columns))


def slow_tally(rows) -> dict:
    """{(name, source, match, length): drafts}, and of rows without a draft {"without": rows}."""
    counts: dict = {}

    def add(*key):
        counts[key] = counts.get(key, 0) + 1

    for source, match, proposed, accepted, allowance, active in rows:
        if not active or allowance == 0:
            continue
        if proposed == 0:
            add("without")
            continue
        add("proposed", source, match, proposed)
        went_to_its_allowance = proposed == allowance and accepted == proposed
        add("cut" if went_to_its_allowance else "stopped", source, match, accepted)
    return counts


def as_counts(tally: Tally) -> dict:
    counts = {("without",): int(tally.without)} if tally.without else {}
    for name in ("proposed", "stopped", "cut"):
        table = getattr(tally, f"{name}_XML")
        assert table.shape == (*SHAPE_XM, D + 1) and table.dtype == np.int32
        counts |= {(name, *map(int, where)): int(table[tuple(where)]) for where in np.argwhere(table)}
    return counts


TALLIES = {
    "rejected at once": ((HISTORY, 3, 5, 0, 5, 1), "stopped", 0),
    "rejected later": ((HISTORY, 3, 5, 4, 5, 1), "stopped", 4),
    "accepted to the allowance": ((HISTORY, 3, 5, 5, 5, 1), "cut", 5),
    "accepted to its own end": ((HISTORY, 3, 5, 5, 6, 1), "stopped", 5),
    "rejected before its own end": ((HISTORY, 3, 5, 2, 6, 1), "stopped", 2),
    "one token, all there was room for": ((OWN, 0, 1, 1, 1, 1), "cut", 1),
    "as long as can be": ((OWN, MAX_MATCH, D, D, D, 1), "cut", D),
    "one short of that": ((OWN, MAX_MATCH, D, D - 1, D, 1), "stopped", D - 1),
}


@pytest.mark.parametrize("name", TALLIES)
def test_what_becomes_of_a_draft(name):
    row, what, length = TALLIES[name]
    source, match, proposed, *_ = row
    assert as_counts(tallied([row])) == {("proposed", source, match, proposed): 1, (what, source, match, length): 1}
    assert slow_tally([row]) == as_counts(tallied([row])), "the oracle disagrees"


@pytest.mark.parametrize(
    ("row", "without"),
    [
        ((HISTORY, 3, 0, 0, 5, 1), 1),  # could draft, but nothing matched
        ((HISTORY, 3, 0, 0, 0, 1), 0),  # the last token of its budget
        ((HISTORY, 3, 0, 0, 5, 0), 0),  # done
        ((HISTORY, 3, 5, 5, 5, 0), 0),  # done, whatever it holds
        ((HISTORY, 3, 5, 0, 5, 0), 0),
    ],
)
def test_rows_without_a_draft(row, without):
    assert as_counts(tallied([row])) == ({("without",): 1} if without else {})


@st.composite
def iterations(draw):
    rows = []
    for _ in range(5):
        allowance = draw(st.integers(0, D))
        proposed = draw(st.integers(0, allowance))
        accepted = draw(st.integers(0, proposed))
        source, match = draw(st.integers(0, SHAPE_XM[0] - 1)), draw(st.integers(0, MAX_MATCH))
        rows.append((source, match, proposed, accepted, allowance, draw(st.integers(0, 3)) > 0))
    return rows


@hypothesis.given(iterations(), iterations())
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_counts_are_those_of_a_loop(first, second):
    """Rows of several sources in one call, and several calls; also added up afterwards."""
    both = tallied(second, tallied(first))
    assert as_counts(both) == slow_tally([*first, *second])
    summed = tallied(first) + tallied(second)
    jax.tree.map(np.testing.assert_array_equal, summed, both)
    mix = both.mix
    drafted = [r for r in (*first, *second) if r[-1] and r[2] > 0]
    assert mix.drafts_XM.sum() == len(drafted) and isinstance(mix.without, int)
    for source, match, *_ in drafted:
        assert mix.drafts_XM[source, match] == sum(r[:2] == (source, match) for r in drafted)


def test_rows_of_one_kind_in_one_call_all_count():
    """A scatter that set, rather than added, would count one of them."""
    row = (SIBLINGS, 4, 3, 1, 3, 1)
    assert as_counts(tallied([row] * 6)) == {("proposed", SIBLINGS, 4, 3): 6, ("stopped", SIBLINGS, 4, 1): 6}


def test_an_empty_tally():
    tally = Tally.zeros(D)
    assert as_counts(tally) == {} and tally.mix.drafts_XM.sum() == tally.mix.without == 0


# --- estimates ------------------------------------------------------------------------------------------------


def tally_of(stopped=(), cut=(), source=HISTORY, match=3, depths=D) -> Tally:
    """Of yields of drafts that stopped, and of those that were cut."""
    tally = Tally.zeros(depths)
    stopped_XML, cut_XML, proposed_XML = (np.zeros((*SHAPE_XM, depths + 1), np.int32) for _ in range(3))
    for table, lengths in ((stopped_XML, stopped), (cut_XML, cut)):
        np.add.at(table[source, match], np.array(lengths, int), 1)
        np.add.at(proposed_XML[source, match], np.array(lengths, int), 1)  # not read by estimates
    return tally.replace(stopped_XML=stopped_XML, cut_XML=cut_XML, proposed_XML=proposed_XML)


def counted(*tallies, depths=D) -> Acceptance:
    acceptance = Acceptance(depths)
    for tally in tallies:
        acceptance.add(tally)
    return acceptance


@pytest.mark.parametrize(
    ("stopped", "cut", "reached", "went_on"),
    [
        # Kaplan & Meier: at each depth, those that got there and could go on; of those, those that did.
        ([0], [], [1, 0, 0, 0], [0, 0, 0, 0]),
        ([2], [], [1, 1, 1, 0], [1, 1, 0, 0]),
        ([], [2], [1, 1, 0, 0], [1, 1, 0, 0]),  # cut after two: no failure, and at risk no more
        ([], [4], [1, 1, 1, 1], [1, 1, 1, 1]),
        ([3], [], [1, 1, 1, 1], [1, 1, 1, 0]),
        ([0, 1, 1, 3], [2, 2, 4], [7, 6, 2, 2], [6, 4, 2, 1]),
        ([0] * 5, [1] * 5, [10, 0, 0, 0], [5, 0, 0, 0]),
    ],
)
def test_counts_at_risk_by_hand(stopped, cut, reached, went_on):
    acceptance = counted(tally_of(stopped, cut, depths=4), depths=4)
    assert acceptance.reached_XMD[HISTORY, 3].tolist() == reached
    assert acceptance.went_on_XMD[HISTORY, 3].tolist() == went_on
    assert acceptance.reached_XMD.sum() == sum(reached) and acceptance.went_on_XMD.sum() == sum(went_on)


def test_the_product_limit_by_hand(monkeypatch):
    """Without priors it is Kaplan and Meier's."""
    monkeypatch.setattr(Acceptance, "STRENGTH", 1e-9)
    acceptance = counted(tally_of([0, 1, 1, 3], [2, 2, 4], depths=4), depths=4)
    want = np.cumprod([6 / 7, 4 / 6, 2 / 2, 1 / 2])
    np.testing.assert_allclose(acceptance.survival_XMD[HISTORY, 3], want, rtol=1e-6)
    np.testing.assert_allclose(acceptance.yield_XML[HISTORY, 3], [0, *np.cumsum(want)], rtol=1e-6)


def test_a_prior_by_hand():
    """Each estimate leans on the one before it as on four observations."""
    acceptance = counted(tally_of([1], [2], depths=2), depths=2)  # reached 2, 2 - 1 = 1 more; went on 2, 1
    reached, went_on = [2, 2], [2, 1]
    assert acceptance.reached_XMD[HISTORY, 3].tolist() == reached
    source = (sum(went_on) + 4 * 0.5) / (sum(reached) + 4)
    match = (sum(went_on) + 4 * source) / (sum(reached) + 4)
    first = (2 + 4 * match) / (2 + 4)
    second = (1 + 4 * first) / (2 + 4)
    np.testing.assert_allclose(acceptance.going_on_XMD()[HISTORY, 3], [first, second], rtol=1e-12)
    np.testing.assert_allclose(acceptance.going_on_XMD()[HISTORY, 4], [source, source], rtol=1e-12)  # never seen
    np.testing.assert_allclose(acceptance.survival_XMD[HISTORY, 3], [first, first * second], rtol=1e-12)
    np.testing.assert_allclose(acceptance.yield_XML[HISTORY, 3], [0, first, first + first * second], rtol=1e-12)


def test_before_anything_is_known():
    acceptance = Acceptance(D)
    for x, source in enumerate(SOURCES):
        p = 0.95 if source == "own" else 0.5
        np.testing.assert_allclose(acceptance.going_on_XMD()[x], p)
        np.testing.assert_allclose(acceptance.survival_XMD[x], np.broadcast_to(p ** np.arange(1, D + 1), (8, D)))


def test_sources_and_match_lengths_lend_each_other_what_they_lack():
    """An unseen match length takes after its source, an unseen depth after the one before, an unseen source after
    nothing that others yielded.
    """
    good = tally_of([], [2] * 500, HISTORY, 3)
    bad = tally_of([0] * 500, [], HISTORY, 7)
    chance = counted(good + bad).going_on_XMD()
    assert chance[HISTORY, 3, :2].min() > 0.98 and chance[HISTORY, 7, 0] < 0.02
    np.testing.assert_allclose(chance[HISTORY, 3, 2:], chance[HISTORY, 3, 1])  # no draft got deeper
    np.testing.assert_allclose(chance[HISTORY, 5], (1000 + 4 * 0.5) / (1500 + 4))  # 1,000 tokens of 1,500 were right
    np.testing.assert_allclose(chance[[SIBLINGS, SELF]], 0.5)
    np.testing.assert_allclose(chance[OWN], 0.95)


def test_no_draft_is_not_certain_of_anything():
    """Whatever was seen, chances lie inside (0, 1)."""
    for tally in (tally_of([], [D] * 50), tally_of([0] * 50)):
        chance = counted(tally).going_on_XMD()
        assert chance.min() > 0 and chance.max() < 1


CHANCES = [0.9, 0.5, 0.8, 0.7, 0.6, 0.9, 0.3]


def drawn(n, chances, most, rng, source=HISTORY, match=3) -> Tally:
    """Of n drafts that go on at each depth with the chance there, and may be `most` tokens long (of each)."""
    went_on_ND = np.cumprod(rng.random((n, len(chances))) < chances, axis=1)
    yield_N = went_on_ND.sum(1)
    most_N = np.broadcast_to(most, n)
    cut_N = yield_N >= most_N
    return tally_of(yield_N[~cut_N], most_N[cut_N], source, match)


@pytest.mark.parametrize("censored", ["not", "at 3", "at random", "by depth of interest"])
@pytest.mark.parametrize("chances", [CHANCES, [0.8] * D], ids=["uneven", "geometric"])
def test_the_true_chances_are_found(chances, censored):
    """Within 5 sigma at each depth. Counting cut drafts as failures would miss by hundreds."""
    rng, n = np.random.default_rng(0), 40_000
    most = {
        "not": D,
        "at 3": 3,
        "at random": rng.integers(1, D + 1, n),
        "by depth of interest": np.where(rng.random(n) < 0.9, 1, D),
    }[censored]
    acceptance = counted(drawn(n, chances, most, rng))
    reached_D, have_D = acceptance.reached_XMD[HISTORY, 3], acceptance.going_on_XMD()[HISTORY, 3]
    deepest = int(np.max(most))
    assert (reached_D[:deepest] > 100).all() and (reached_D[deepest:] == 0).all()
    for d in range(deepest):
        prior_weight = Acceptance.STRENGTH / (reached_D[d] + Acceptance.STRENGTH)  # bias: at most that
        sigma = math.sqrt(chances[d] * (1 - chances[d]) / reached_D[d])
        assert abs(have_D[d] - chances[d]) < 5 * sigma + prior_weight, d
    survival = np.cumprod(chances)[:deepest]
    np.testing.assert_allclose(acceptance.survival_XMD[HISTORY, 3, :deepest], survival, atol=0.02)


def test_the_sources_are_told_apart():
    rng = np.random.default_rng(1)
    truth = {(HISTORY, 3): 0.3, (HISTORY, 7): 0.7, (SIBLINGS, 3): 0.5, (OWN, 0): 0.9}
    tallies = [drawn(5000, [p] * D, D, rng, x, m) for (x, m), p in truth.items()]
    total = tallies[0]
    for tally in tallies[1:]:
        total = total + tally
    chance = counted(total).going_on_XMD()
    for (x, m), p in truth.items():
        assert abs(chance[x, m, 0] - p) < 0.04


@hypothesis.given(st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_survival_falls_and_the_yield_is_concave(seed):
    rng = np.random.default_rng(seed)
    tally = Tally.zeros(D).replace(
        stopped_XML=rng.integers(0, 3, (*SHAPE_XM, D + 1)), cut_XML=rng.integers(0, 2, (*SHAPE_XM, D + 1))
    )
    acceptance = counted(tally, tally)
    survival, yields = acceptance.survival_XMD, acceptance.yield_XML
    assert survival.shape == (*SHAPE_XM, D) and yields.shape == (*SHAPE_XM, D + 1)
    assert (np.diff(survival) <= 0).all() and (survival > 0).all() and (survival < 1).all()
    assert (yields[..., 0] == 0).all() and (yields <= np.arange(D + 1)).all()
    np.testing.assert_allclose(np.diff(yields), survival)


def test_older_counts_fade_with_each_chunk():
    acceptance, m = counted(tally_of([0, 0]), tally_of([1]), tally_of([1])), Acceptance.MEMORY
    assert 0 < m < 1
    np.testing.assert_allclose(acceptance.reached_XMD[HISTORY, 3, :3], [2 * m**2 + m + 1, m + 1, 0])
    np.testing.assert_allclose(acceptance.went_on_XMD[HISTORY, 3, :3], [m + 1, 0, 0])


def test_chunks_without_drafts_fade_nothing():
    acceptance = counted(tally_of([0, 0]))
    acceptance.add(Tally.zeros(D).replace(without=np.int32(40)))
    assert acceptance.reached_XMD.sum() == 2


def test_new_policies_are_learned():
    """Thirty chunks after a change of heart little is left of what was believed."""
    acceptance = counted(*[tally_of([], [D] * 100)] * 20)
    assert acceptance.going_on_XMD()[HISTORY, 3, 0] > 0.99
    for _ in range(30):
        acceptance.add(tally_of([0] * 100))
    assert acceptance.going_on_XMD()[HISTORY, 3, 0] < 0.06


def test_estimates_follow_the_counts():
    """They are kept until the counts change, not longer."""
    acceptance = Acceptance(D)
    before = acceptance.yield_XML
    np.testing.assert_array_equal(acceptance.yield_XML, before)
    acceptance.add(tally_of([0] * 50))
    after = acceptance.yield_XML
    assert after[HISTORY, 3, 1] < before[HISTORY, 3, 1]
    acceptance.load(Acceptance(D).state())
    np.testing.assert_array_equal(acceptance.yield_XML, before)


@pytest.mark.parametrize("depths", [1, D - 1, D + 1])
def test_a_tally_of_other_depths_raises(depths):
    acceptance = Acceptance(D)
    with pytest.raises(ValueError, match=f"a tally of {depths} depths, want {D}"):
        acceptance.add(tally_of([0], depths=depths))


def test_without_drafts_there_is_nothing_to_estimate():
    """Buckets of 1 alone."""
    acceptance = counted(Tally.zeros(0), depths=0)
    assert acceptance.survival_XMD.shape == (*SHAPE_XM, 0) and acceptance.yield_XML.shape == (*SHAPE_XM, 1)
    b = acceptance.beliefs(0.1, windows=True)
    assert b.value_XM.shape == b.window_XM.shape == SHAPE_XM


# --- state ----------------------------------------------------------------------------------------------------


def test_state_round_trip_through_json_is_exact():
    rng = np.random.default_rng(0)
    acceptance = counted(*(drawn(50, CHANCES, D, rng, x, m) for x in range(4) for m in range(8)))
    assert (acceptance.reached_XMD % 1 > 0).any()  # numbers that a short decimal does not hold
    other = Acceptance(D)
    other.load(json.loads(json.dumps(acceptance.state())))
    np.testing.assert_array_equal(other.reached_XMD, acceptance.reached_XMD)
    np.testing.assert_array_equal(other.went_on_XMD, acceptance.went_on_XMD)
    for tally in (tally_of([1, 2]), tally_of([0], [3], OWN, 0)):  # and they go on alike
        acceptance.add(tally)
        other.add(tally)
    np.testing.assert_array_equal(other.yield_XML, acceptance.yield_XML)
    assert other.state() == acceptance.state()


@pytest.mark.parametrize("name", ["reached", "went_on"])
@pytest.mark.parametrize("wrong", ["depths", "sources", "empty"])
def test_state_of_another_shape_raises_and_changes_nothing(name, wrong):
    acceptance = counted(tally_of([1]))
    before = acceptance.state()
    value = {"depths": Acceptance(D + 1).state()[name], "sources": before[name][1:], "empty": []}[wrong]
    with pytest.raises(ValueError, match="Acceptance: counts of shape"):
        acceptance.load({**before, name: value})
    assert acceptance.state() == before


# --- beliefs --------------------------------------------------------------------------------------------------


def sure(p, depths=D) -> Acceptance:
    """A chance of exactly p, or p[d] at each depth, of whatever source and match length."""
    acceptance = Acceptance(depths)
    acceptance.STRENGTH = 0.0  # no priors
    acceptance.reached_XMD[:] = 1
    acceptance.went_on_XMD[:] = p
    return acceptance


@pytest.mark.parametrize(
    ("least_chance", "window"),
    [(2.0, 1), (0.51, 1), (0.49, 1), (0.26, 1), (0.24, 2), (0.13, 2), (0.12, 3), (0.01, 6), (0.005, D), (0.0, D)],
)
def test_windows_go_as_deep_as_pays(least_chance, window):
    """Survival at depths 0, 1, 2, ...: 1/2, 1/4, 1/8, ..."""
    b = sure(0.5).beliefs(least_chance, windows=True)
    assert b.window_XM.dtype == np.int32 and (b.window_XM == window).all()


def test_values_and_windows_of_each_kind():
    acceptance = counted(tally_of([], [D] * 1000, HISTORY, 3), tally_of([0] * 1000, [], HISTORY, 4))
    b = acceptance.beliefs(0.3, windows=True)
    assert b.window_XM[HISTORY, 3] == D and b.window_XM[HISTORY, 4] == 1
    assert b.value_XM.dtype == np.float32 and b.value_XM.shape == SHAPE_XM
    np.testing.assert_allclose(b.value_XM, acceptance.yield_XML[..., D], rtol=1e-6)
    assert b.value_XM[HISTORY, 3] > 6.5 and b.value_XM[HISTORY, 4] < 0.1


def test_without_windows_drafts_are_as_long_as_can_be():
    b = sure(0.01).beliefs(5.0, windows=False)
    assert (b.window_XM == D).all() and b.window_XM.dtype == np.int32


# --- costs ----------------------------------------------------------------------------------------------------


def table(*costs, assumed=0.0) -> CostTable:
    return CostTable(tuple(Cost(*c) for c in costs), assumed)


def test_a_measured_shape():
    costs = table((8, 64, 1, 1.0), (8, 64, 8, 2.0, 0.3, 0.2))
    assert len(costs) == 2
    assert costs.seconds(8, 64, 1) == 1.0 and costs.seconds(8, 64, 8) == 2.0
    assert costs.parts(8, 64, 8) == Cost(8, 64, 8, 2.0, 0.3, 0.2)


@pytest.mark.parametrize(("k", "want"), [(1, 1.0), (2, 1.5), (3, 2.0), (5, 3.0), (9, 5.0)])
def test_interpolation_in_k(k, want):
    costs = table((8, 64, 9, 5.0, 0.8, 0.4), (8, 64, 1, 1.0), (8, 64, 3, 2.0, 0.2, 0.1))  # in any order
    parts = costs.parts(8, 64, k)
    assert parts.seconds == want
    np.testing.assert_allclose(parts.draft, np.interp(k, [1, 3, 9], [0, 0.2, 0.8]))
    np.testing.assert_allclose(parts.sample, np.interp(k, [1, 3, 9], [0, 0.1, 0.4]))
    assert (parts.rows, parts.slots, parts.k) == (8, 64, k)


@pytest.mark.parametrize(
    ("rows", "slots", "want"),
    [
        (8, 64, "a"),
        (8, 128, "b"),
        (32, 128, "c"),
        (1, 64, "a"),
        (15, 64, "a"),  # 15 / 8 < 32 / 15
        (17, 128, "c"),  # 17 / 8 > 32 / 17
        (1000, 1, "c"),
        (8, 90, "a"),  # 90 / 64 < 128 / 90
        (8, 91, "b"),
        (9, 1000, "b"),
        (9, 2, "a"),
    ],
)
def test_the_nearest_shape_by_ratio(rows, slots, want):
    """The rows decide, then the slots."""
    costs = table((8, 64, 1, 1.0), (8, 128, 1, 2.0), (32, 128, 1, 3.0))
    assert costs.seconds(rows, slots, 1) == {"a": 1.0, "b": 2.0, "c": 3.0}[want]


def test_shapes_are_not_mixed():
    """K is interpolated within one shape only."""
    costs = table((8, 64, 1, 1.0), (8, 64, 8, 8.0), (16, 64, 1, 100.0), (16, 64, 4, 400.0))
    assert costs.seconds(8, 64, 4) == 4.0
    assert costs.seconds(16, 64, 2) == 200.0


def test_an_empty_table_assumes():
    costs = table(assumed=0.25)
    assert len(costs) == 0
    assert [costs.seconds(4, 32, k) for k in (1, 2, 5)] == [1.0, 1.25, 2.0]
    assert costs.parts(4, 32, 5) == Cost(4, 32, 5, 2.0)


def test_a_new_measurement_replaces_the_old():
    costs = table((8, 64, 1, 1.0), assumed=0.25)
    costs.add(Cost(8, 64, 1, 3.0))
    assert len(costs) == 1 and costs.seconds(8, 64, 1) == 3.0


def test_a_table_survives_json():
    costs = table((8, 64, 1, 0.1 + 0.2, 1e-9, 1 / 3), (2, 96, 8, 5e-324), assumed=0.1)
    other = CostTable.from_json(json.loads(json.dumps(costs.to_json())))
    assert other.costs == costs.costs and other.assumed == costs.assumed
    assert CostTable.from_json(CostTable().to_json()).costs == {}


GOOD = {"rows": 8, "slots": 64, "k": 1, "seconds": 0.5, "draft": 0.1, "sample": 0.0}
DAMAGED = {
    "null": None,
    "a list": [],
    "a text": "costs",
    "a number": 3,
    "nothing": {},
    "no costs": {"assumed": 0.1},
    "no assumed": {"costs": []},
    "costs of null": {"assumed": 0.1, "costs": None},
    "costs of a number": {"assumed": 0.1, "costs": 5},
    "a cost of null": {"assumed": 0.1, "costs": [None]},
    "a cost of a list": {"assumed": 0.1, "costs": [[8, 64, 1, 0.5]]},
    "a cost of a text": {"assumed": 0.1, "costs": ["rows"]},
    "costs of a mapping": {"assumed": 0.1, "costs": GOOD},
    "assumed of null": {"assumed": None, "costs": []},
    "assumed of a list": {"assumed": [], "costs": []},
    "assumed of a text": {"assumed": "much", "costs": []},
    "a field too many": {"assumed": 0.1, "costs": [{**GOOD, "columns": 3}]},
    "a field too few": {"assumed": 0.1, "costs": [{"rows": 8, "slots": 64, "k": 1}]},
}
for field, values in {
    "rows": (0, -1, None, "8", 8.5, float("nan"), float("inf")),
    "slots": (0, None, "64", float("nan")),
    "k": (0, None, "1", [], float("nan")),
    "seconds": (0, 0.0, -1.0, None, "0.5", float("nan"), float("inf")),
    "draft": (-1.0, None, "0.1", [], float("nan"), float("inf")),
    "sample": (-1.0, None, "0.1", [], float("nan"), float("inf")),
}.items():
    DAMAGED |= {f"{field} of {v!r}": {"assumed": 0.1, "costs": [GOOD, {**GOOD, field: v}]} for v in values}
DAMAGED |= {f"assumed of {v!r}": {"assumed": v, "costs": []} for v in (-1.0, float("nan"), float("inf"))}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tables_are_refused(name):
    with pytest.raises(InputError, match="not a cost table"):
        CostTable.from_json(DAMAGED[name])


# --- the choice -----------------------------------------------------------------------------------------------

BUCKETS = (1, 2, 4, 8)


def mix_of(drafts=1, without=0, source=HISTORY, match=3) -> Mix:
    drafts_XM = np.zeros(SHAPE_XM, int)
    drafts_XM[source, match] = drafts
    return Mix(drafts_XM, without)


def linear(per_token, buckets=BUCKETS) -> CostTable:
    return table(*((8, 64, k, 1 + per_token * (k - 1)) for k in buckets))


def choice(acceptance, costs, mix=None, buckets=BUCKETS) -> int:
    return choose_bucket(acceptance, costs, mix_of() if mix is None else mix, 8, 64, buckets)


def test_tokens_per_iteration():
    acceptance = sure(0.5)
    for k, want in ((1, 1.0), (2, 1.5), (4, 1.875)):
        np.testing.assert_allclose(acceptance.tokens_per_iteration(mix_of(), k), want, rtol=1e-9)
        np.testing.assert_allclose(acceptance.tokens_per_iteration(mix_of(1, 3), k), 1 + (want - 1) / 4, rtol=1e-9)
    assert acceptance.tokens_per_iteration(mix_of(0, 0), 8) == acceptance.tokens_per_iteration(mix_of(0, 5), 8) == 1.0
    two = Mix(mix_of(3, source=HISTORY).drafts_XM + mix_of(1, source=OWN, match=0).drafts_XM, 4)
    acceptance = counted(tally_of([0] * 9), tally_of([], [D] * 9, OWN, 0))
    want = 1 + (3 * acceptance.yield_XML[HISTORY, 3, 3] + acceptance.yield_XML[OWN, 0, 3]) / 8
    np.testing.assert_allclose(acceptance.tokens_per_iteration(two, 4), want)


@hypothesis.given(
    st.integers(0, 2**32 - 1), st.sets(st.sampled_from([2, 3, 4, 6, 8]), max_size=4), st.floats(0, 1), st.floats(0, 0.5)
)
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_the_choice_is_the_best_by_brute_force(seed, more, share, per_token):
    """Over uneven costs and estimates of several sources. The rate is written out here, depth by depth."""
    rng, buckets = np.random.default_rng(seed), (1, *more)
    tallies = [drawn(20, rng.random(D) ** share, D, rng, x, m) for x, m in ((HISTORY, 3), (SIBLINGS, 7), (OWN, 0))]
    acceptance = counted(*tallies)
    seconds = {k: (1 + per_token * (k - 1)) * rng.uniform(0.9, 1.1) for k in buckets}
    drafts_XM = rng.integers(0, 4, SHAPE_XM) * (rng.random(SHAPE_XM) < 0.3)
    mix = Mix(drafts_XM, int(rng.integers(0, 9)))
    chances, rates = acceptance.going_on_XMD(), {}
    for k in buckets:
        tokens = 0.0
        for x, m in np.argwhere(drafts_XM):
            survives = 1.0
            for d in range(k - 1):
                survives *= chances[x, m, d]
                tokens += drafts_XM[x, m] * survives
        tokens = 1 + tokens / max(1, drafts_XM.sum() + mix.without)
        rates[k] = (MARGIN if k == 1 else tokens) / seconds[k]
    chosen = choice(acceptance, table(*((8, 64, k, s) for k, s in seconds.items())), mix, buckets)
    assert chosen in buckets and rates[chosen] >= max(rates.values()) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("p", "per_token", "want"),
    [
        (0.99, 0.0, 8),  # free, and right
        (0.01, 0.02, 1),  # never right, and dear
        (0.01, 0.0, 1),  # never right: free, and nevertheless not worth the margin
        (0.5, 0.5, 1),  # 1.5 tokens for 1.5 seconds
        (0.5, 0.4, 2),
        (0.9, 1.0, 1),  # each position as dear as a token
        (0.9, 0.05, 8),
        (0.7, 0.2, 4),  # 1.7 / 1.2 = 1.417, 2.533 / 1.6 = 1.583, 3.14 / 2.4 = 1.308
    ],
)
def test_the_choice(p, per_token, want):
    assert choice(sure(p), linear(per_token)) == want


def test_plain_decoding_where_nothing_would_be_drafted():
    assert choice(sure(0.99), linear(0.0), mix_of(0, 8)) == 1
    assert choice(sure(0.99), linear(0.0), mix_of(0, 0)) == 1
    assert choice(sure(0.99), linear(0.2), mix_of(1, 99)) == 1


def test_drafts_must_promise_more_than_the_margin():
    """With iterations of one price, 1.03 tokens against 1 + p."""
    for p, want in ((0.029, 1), (0.031, 2)):
        assert choice(sure(p), linear(0.0), buckets=(1, 2)) == want


def test_ties_go_to_the_smallest():
    """A measured K = 4 and 8 as good as each other; buckets in any order."""
    acceptance = sure([1.0] * 3 + [0.0] * 4)  # three right, then never
    assert choice(acceptance, linear(0.0), buckets=(8, 4, 1, 6)) == 4
    even = table(*((8, 64, k, 1 + (k - 1) / 2) for k in (1, 2, 3)))  # 1.5 / 1.5 and 2 / 2, both under the margin
    assert choice(sure([0.5] + [1.0] * 6), even, buckets=(3, 2, 1)) == 1


@hypothesis.given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.lists(st.floats(0.001, 0.4), min_size=3, max_size=3),
    st.integers(0, 3),
)
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_better_drafts_never_give_a_smaller_k(one, other, steps, without):
    """For drafts that go on with one chance at all depths, under any costs. (Not for any acceptance: where only first
    tokens become better, a shorter draft may well do.)
    """
    seconds = np.cumsum([1.0, *steps])
    costs, mix = table(*((8, 64, k, s) for k, s in zip(BUCKETS, seconds, strict=True))), mix_of(4, without)
    low, high = sorted([one, other])
    assert choice(sure(low), costs, mix) <= choice(sure(high), costs, mix)


@hypothesis.given(
    st.lists(st.floats(0.0, 1.0), min_size=D, max_size=D),
    st.lists(st.floats(0.001, 0.4), min_size=3, max_size=3),
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
)
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_more_drafts_never_give_a_smaller_k(chances, steps, drafts):
    """Of rows that have one, for any acceptance and any costs."""
    seconds = np.cumsum([1.0, *steps])
    costs, acceptance = table(*((8, 64, k, s) for k, s in zip(BUCKETS, seconds, strict=True))), sure(chances)
    few, many = sorted(drafts)
    assert choice(acceptance, costs, mix_of(few, 50 - few)) <= choice(acceptance, costs, mix_of(many, 50 - many))


def test_first_tokens_alone_may_shorten_a_draft():
    """Why the property above asks for one chance at all depths."""
    costs = table((8, 64, 1, 1.0), (8, 64, 2, 1.5), (8, 64, 8, 3.0))
    before, after = sure([0.5, *[0.9] * 6]), sure([1.0, *[0.45] * 6])
    assert (after.survival_XMD[..., 0] > before.survival_XMD[..., 0]).all()
    assert choice(before, costs, buckets=(1, 2, 8)) == 8
    assert choice(after, costs, buckets=(1, 2, 8)) == 2


def test_a_choice_is_repeated():
    """A run that resumes decides alike: nothing but counts and costs goes in."""
    rng = np.random.default_rng(3)
    acceptance = counted(*(drawn(30, CHANCES, D, rng, x, 3) for x in range(4)))
    resumed = Acceptance(D)
    resumed.load(json.loads(json.dumps(acceptance.state())))
    costs = linear(0.11)
    again = CostTable.from_json(json.loads(json.dumps(costs.to_json())))
    for source in range(4):
        for without in (0, 1, 5):
            mix = mix_of(2, without, source)
            assert choice(acceptance, costs, mix) == choice(resumed, again, mix)
