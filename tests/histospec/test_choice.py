"""How much is drafted: K follows what drafts have yielded and what iterations cost, and nothing else.

Costs are given rather than measured: those of an iteration of 128 rows on two cores, in those of plain decoding. The
engine is that of `world`, with batches of one size, so that nothing is compiled but a judge of drafts.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from world import (
    CONFIGS,
    LONGEST,
    PROMPTS,
    REQUESTS,
    SAMPLES,
    as_block,
    assert_same,
    by_group,
    check_records,
    coupled,
    engine,
    forced,
    mixed_history,
    params,
    plain,
    policy,
    remembered,
    twin,
)

from rhyme_jax.histospec import session as session_module
from rhyme_jax.histospec.budget import Acceptance, Cost, CostTable
from rhyme_jax.histospec.drafts import OWN, DraftRules

SECONDS = {1: 1.0, 2: 1.4, 4: 1.8, 8: 2.6, 16: 4.2}
SAMPLING = CONFIGS["T=1"].sampling


def costs(seconds=SECONDS) -> CostTable:
    return CostTable(tuple(Cost(128, 80, k, s / 1000) for k, s in seconds.items()))


def choosing(**config):
    """An engine that has seen nothing and chooses for itself."""
    return twin(engine("T=1"), costs(), **config)


def random_history(seed: int):
    rng = np.random.default_rng(seed)
    return as_block(PROMPTS, [list(rng.integers(3, 40, (SAMPLES, LONGEST))) for _ in PROMPTS])


def oracle_history():
    return as_block(PROMPTS, by_group(plain("T=1"), REQUESTS))


def checked(have, requests=REQUESTS):
    assert_same(have, plain("T=1"), requests, SAMPLING)
    check_records(have, requests, 15, SAMPLING)
    return have


# --- what is chosen -------------------------------------------------------------------------------------------


def test_drafts_that_never_come_true_are_given_up():
    """The future is not in the history: after a look or two, K = 1 for good."""
    e = choosing(rules=DraftRules(("history",), min_match=1, min_prob=0.0))
    first = checked(e.generate(params(), REQUESTS, random_history(0)))
    drafted = sum(c.iterations for c in first.chunks if c.k > 1)
    assert drafted <= 8 and [c.k for c in first.chunks[2:]] == [1] * len(first.chunks[2:])
    for seed in range(1, 4):
        later = checked(e.generate(params(), REQUESTS, random_history(seed)))
        assert {c.k for c in later.chunks} == {1}
        assert later.proposed_N.sum() == 0


def test_drafts_that_come_true_are_made_long():
    """The very future of each sample, among those of its siblings: the largest K after a few batches."""
    e, seconds = choosing(), []
    for _ in range(4):
        have = checked(e.generate(params(), REQUESTS, oracle_history()))
        seconds.append(sum(c.iterations * SECONDS[c.k] for c in have.chunks))
    assert {c.k for c in have.chunks} == {16}
    assert have.acceptance > 0.9 and have.tokens_per_row_forward > 7
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < plain("T=1").iterations / 2


def test_an_own_response_is_followed_far_from_the_first():
    e, requests = choosing(), coupled(REQUESTS)
    want = e.generate(params(), requests)
    have = e.generate(params(), requests, remembered(PROMPTS, want, requests))
    assert_same(have, want, requests, SAMPLING)
    check_records(have, requests, 15, SAMPLING)
    assert {c.k for c in have.chunks} == {16}
    assert have.acceptance > 0.99 and have.tokens_per_row_forward > 11


def test_costs_decide():
    """The same drafts, where verifying costs next to nothing, and where it costs as much as decoding."""
    chosen = {}
    for name, seconds in {
        "free": dict.fromkeys(SECONDS, 1.0),
        "dear": {k: 1.0 * k for k in SECONDS},
        "up to 4": {1: 1.0, 2: 1.0, 4: 1.0, 8: 10.0, 16: 20.0},
    }.items():
        e = twin(engine("T=1"), costs(seconds))
        have = checked(e.generate(params(), REQUESTS, mixed_history("T=1")))
        chosen[name] = {c.k for c in have.chunks}
    assert chosen == {"free": {16}, "dear": {1}, "up to 4": {4}}


def test_a_table_that_believes_drafts_worthless_learns_better():
    """While K = 1 runs, drafts are made on the side and compared with what is decoded."""
    e = choosing()
    e.acceptance.reached_XMD[:] = 30.0
    ks = []
    for _ in range(6):
        have = checked(e.generate(params(), REQUESTS, oracle_history()))
        ks += [c.k for c in have.chunks]
    assert ks[0] == 1 and ks[-1] >= 8
    quiet = next(i for i, k in enumerate(ks) if k > 1)
    assert 0 < quiet <= 20


def test_an_own_response_is_judged_too():
    """Under coupled noise, with all drafts believed worthless: one quiet chunk tells."""
    e, requests = choosing(), coupled(REQUESTS)
    want = e.generate(params(), requests)
    e.acceptance.reached_XMD[OWN] = 10.0
    have = e.generate(params(), requests, remembered(PROMPTS, want, requests))
    assert_same(have, want, requests, SAMPLING)
    ks = [c.k for c in have.chunks]
    assert ks[0] == 1 and min(ks[1:]) >= 8


def test_chunks_grow_while_the_choice_stands():
    e = choosing(chunk=32)
    have = e.generate(params(), REQUESTS, random_history(0))
    for before, after in zip(have.chunks, have.chunks[1:], strict=False):
        most = (
            min(32, 2 * before.iterations) if before.k == after.k else 4 if after.k > 1 else session_module.FIRST_QUIET
        )
        assert after.iterations <= most
    assert have.chunks[0].iterations in (4, session_module.FIRST_QUIET)


# --- the same evidence, the same choice -----------------------------------------------------------------------


def decisions(e, histories) -> list:
    return [[dataclasses.astuple(c) for c in e.generate(params(), REQUESTS, history).chunks] for history in histories]


def test_choices_repeat():
    """In another engine, from the same beginning."""
    histories = [random_history(0), mixed_history("T=1"), oracle_history(), mixed_history("T=1")]
    first, second = decisions(choosing(), histories), decisions(choosing(), histories)
    assert first == second
    ks = {k for chunks in first for _, _, k, *_ in chunks}
    assert len(ks) >= 2, f"always K={ks}: nothing was chosen"


def test_choices_go_on_after_a_resume():
    """With acceptance and costs as JSON keeps them."""
    histories = [random_history(0), mixed_history("T=1"), oracle_history(), mixed_history("T=1")]
    whole = choosing()
    early = decisions(whole, histories[:2])
    state, table = json.dumps(whole.acceptance.state()), json.dumps(whole.costs.to_json())
    late = decisions(whole, histories[2:])

    resumed = twin(engine("T=1"), CostTable.from_json(json.loads(table)))
    resumed.acceptance.load(json.loads(state))
    assert decisions(resumed, histories[2:]) == late
    np.testing.assert_array_equal(resumed.acceptance.reached_XMD, whole.acceptance.reached_XMD)
    np.testing.assert_array_equal(resumed.acceptance.went_on_XMD, whole.acceptance.went_on_XMD)
    # The experience matters: an engine without it does not do the same.
    assert decisions(choosing(), histories[2:]) != late
    assert len(early) == 2


def test_plain_decoding_teaches_nothing():
    e = choosing()
    before = json.dumps(e.acceptance.state())
    e.generate(params(), REQUESTS)
    assert json.dumps(e.acceptance.state()) == before


# --- what is counted ------------------------------------------------------------------------------------------


class Watched(Acceptance):
    """Keeps the tallies that it is given."""

    def __init__(self, depths):
        super().__init__(depths)
        self.tallies = []

    def add(self, tally):
        self.tallies.append(jax.device_get(tally))
        super().add(tally)


@pytest.mark.parametrize("kind", ["fresh", "coupled"])
def test_judged_drafts_are_worth_what_verified_ones_are(kind, monkeypatch):
    """The drafts of a first iteration, once verified, and once compared with the 15 tokens that were then decoded."""
    monkeypatch.setattr(session_module, "FIRST_CHUNK", 1)
    monkeypatch.setattr(session_module, "FIRST_QUIET", 15)
    requests, history = REQUESTS, mixed_history("T=1")
    if kind == "coupled":
        requests = coupled(REQUESTS)
        history = remembered(PROMPTS, engine("T=1").generate(policy(0.02), requests), requests)
    drafts_XM, accepted_XM = {}, {}
    for k in (16, 1):
        e = twin(engine("T=1"), chunk=15)
        e.acceptance = Watched(e.config.depths)
        with forced([k]):
            have = e.generate(params(), requests, history)
        assert have.chunks[0].k == k and have.chunks[0].iterations == (1 if k > 1 else 15)
        tally = e.acceptance.tallies[0]
        drafts_XM[k] = tally.proposed_XML.sum(-1)
        accepted_XM[k] = ((tally.stopped_XML + tally.cut_XML) * np.arange(16)).sum(-1)
    np.testing.assert_array_equal(drafts_XM[1], drafts_XM[16])
    np.testing.assert_array_equal(accepted_XM[1], accepted_XM[16])
    assert drafts_XM[1].sum() > 20 and accepted_XM[1].sum() > 0
