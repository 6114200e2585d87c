"""The store against a naive model, and what it promises about bounds, ids, padding and snapshots."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rhyme_jax.buckets import bucket
from rhyme_jax.errors import InputError
from rhyme_jax.history import store as store_module
from rhyme_jax.history.store import HistoryStore, Response, prompt_id
from rhyme_jax.histospec.drafts import MAX_MATCH, SEPARATOR

A, B, C = [1, 2, 3], [1, 2, 4], list(range(50, 62))


def response(*tokens, reward=0.0, version=0, step=0) -> Response:
    return Response(np.array(tokens, np.int32), reward, version, step)


def visit(step: int, *lengths: int) -> list[Response]:
    """One visit's responses of the given lengths, told apart by their tokens."""
    return [response(*[1000 * step + i] * n, reward=i, version=step, step=step) for i, n in enumerate(lengths)]


def plain(responses) -> list[tuple]:
    """Comparable; NaN as None."""
    return [(r.tokens.tolist(), None if np.isnan(r.reward) else r.reward, r.policy_version, r.step) for r in responses]


def reloaded(store: HistoryStore, **bounds) -> HistoryStore:
    copy = HistoryStore(**{"depth": store.depth, "max_tokens": store.max_tokens, **bounds})
    copy.load_arrays(store.to_arrays())
    return copy


# --- add, responses, bounds -----------------------------------------------------------------------------------


def test_an_empty_store():
    store = HistoryStore(depth=1, max_tokens=10)
    assert len(store) == store.tokens == store.evicted_prompts == 0
    assert store.responses(A) == []
    assert store.query([A, B], 2) is None
    assert store.query([], 2) is None
    assert store.to_arrays() == {}
    assert len(reloaded(store)) == 0


def test_responses_come_back_as_they_were():
    store = HistoryStore(depth=1, max_tokens=100)
    given_A = [response(7, 8, reward=1.5, version=3, step=4), response(9, reward=float("nan"), version=3, step=4)]
    store.add(A, given_A)
    store.add(np.array(B), iter(visit(4, 2)))  # any sequence, any iterable
    assert plain(store.responses(A)) == [([7, 8], 1.5, 3, 4), ([9], None, 3, 4)]
    assert plain(store.responses(tuple(A))) == plain(given_A)
    assert plain(store.responses(B)) == plain(visit(4, 2))
    assert store.responses(C) == []
    assert (len(store), store.tokens) == (2, 5)


def test_a_visit_without_responses_is_none():
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, [])
    assert len(store) == 0
    store.add(A, visit(1, 3))
    store.add(A, [])
    assert plain(store.responses(A)) == plain(visit(1, 3))


def test_the_returned_list_is_the_callers():
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 3))
    store.responses(A).clear()
    assert len(store.responses(A)) == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_counts_visits_not_responses(depth):
    store = HistoryStore(depth=depth, max_tokens=10**6)
    visits = [visit(1, 5, 6), visit(4, 7), visit(5, 1, 2, 3), visit(9, 4, 4)]
    for v in visits:
        store.add(A, v)
    kept = [r for v in visits[-depth:] for r in v]
    assert plain(store.responses(A)) == plain(kept)
    assert store.tokens == sum(len(r.tokens) for r in kept)


def test_two_adds_in_one_step_are_one_visit():
    """Groups that finish in parts, or a prompt that stands twice in a batch."""
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 2))
    store.add(A, visit(2, 3))
    store.add(A, visit(2, 4))
    assert plain(store.responses(A)) == plain(visit(2, 3) + visit(2, 4))
    assert store.tokens == 7


def test_max_tokens_evicts_the_least_recently_visited_prompts():
    store = HistoryStore(depth=2, max_tokens=10)
    log = []
    for prompt, responses in (
        (A, visit(1, 3)),
        (B, visit(1, 3)),
        (C, visit(1, 3)),
        (A, visit(2, 1)),  # exactly full: nothing goes
        (A, visit(3, 4)),  # A drops its first visit, and is the last visited: B goes
        (C, visit(2, 3)),  # A goes
        (B, visit(4, 2, 2)),  # B is back, C stays
        (A, visit(5, 10)),  # all others go
    ):
        store.add(prompt, responses)
        tokens = [sum(len(r.tokens) for r in store.responses(p)) for p in (A, B, C)]
        assert store.tokens == sum(tokens) <= 10
        log.append((*tokens, store.evicted_prompts))
    assert log == [
        (3, 0, 0, 0),
        (3, 3, 0, 0),
        (3, 3, 3, 0),
        (4, 3, 3, 0),
        (5, 0, 3, 1),
        (0, 0, 6, 2),
        (0, 4, 6, 2),
        (10, 0, 0, 4),
    ]


def test_the_newest_prompt_stays_however_long():
    store = HistoryStore(depth=1, max_tokens=10)
    store.add(A, visit(1, 5))
    store.add(B, visit(1, 30))
    assert (len(store), store.tokens) == (1, 30)
    store.add(A, visit(2, 5))
    assert (len(store), store.tokens, store.evicted_prompts) == (1, 5, 2)


def test_a_query_is_not_a_visit():
    store = HistoryStore(depth=1, max_tokens=10)
    store.add(A, visit(1, 5))
    store.add(B, visit(1, 5))
    store.query([A], 1)
    store.responses(A)
    store.add(C, visit(1, 5))
    assert store.responses(A) == []


@pytest.mark.parametrize(
    ("wrong", "field"), [({"depth": 0}, "history.depth=0"), ({"max_tokens": 0}, "history.max_tokens=0")]
)
def test_wrong_bounds_name_their_field(wrong, field):
    with pytest.raises(InputError, match=field):
        HistoryStore(**{"depth": 1, "max_tokens": 1, **wrong})


# --- prompt ids -----------------------------------------------------------------------------------------------


def test_prompt_ids_are_stable():
    """They key stored histories and the noise of resumed runs: a change here breaks both."""
    assert prompt_id([1, 2, 3]) == 0x9E3D_6A5F_7456_9CD6
    assert prompt_id([]) == 0xB4B2_7974_57A0_A6E4
    assert prompt_id(range(1000)) == 0xEE60_2997_CAA7_B3DD


@pytest.mark.parametrize("form", [tuple, np.array, lambda x: np.array(x, np.int32), lambda x: np.array(x, ">i8")])
def test_prompt_ids_do_not_depend_on_the_form(form):
    assert prompt_id(form(A)) == prompt_id(A)


def test_prompt_ids_tell_order_length_and_zeros_apart():
    prompts = [[1, 2], [2, 1], [1], [1, 2, 0], [0, 1, 2], [258], [2, 1, 0, 0], [1, 2 << 8], []]
    ids = {prompt_id(p) for p in prompts}
    assert len(ids) == len(prompts)
    assert all(0 <= i < 2**64 for i in ids)


@pytest.mark.parametrize("use", [lambda s: s.add(B, visit(1, 1)), lambda s: s.query([B], 1), lambda s: s.responses(B)])
def test_a_collision_raises(monkeypatch, use):
    """Two prompts of one id would feed each other's drafts and be saved as one: refused, however unlikely."""
    monkeypatch.setattr(store_module, "prompt_id", lambda tokens: 42)
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 1))
    store.add(list(A), visit(2, 2))  # the same prompt again is no collision
    with pytest.raises(RuntimeError, match="share the 64-bit id 0x2a"):
        use(store)
    assert plain(store.responses(A)) == plain(visit(2, 2))


def test_an_evicted_prompt_leaves_no_collision_behind(monkeypatch):
    monkeypatch.setattr(store_module, "prompt_id", lambda tokens: int(tokens[0]) % 2)
    store = HistoryStore(depth=1, max_tokens=4)
    store.add([1], visit(1, 3))
    store.add([2], visit(1, 3))
    assert len(store) == 1
    store.add([3], visit(1, 1))  # the id of [1], which is gone
    assert len(store) == 2


# --- query ----------------------------------------------------------------------------------------------------


def test_query_layout():
    """Rows of `prompt tail, response, padding`, the most recent visit first, silent where there is nothing."""
    store = HistoryStore(depth=2, max_tokens=1000)
    store.add(A, visit(1, 2, 1))
    store.add(A, visit(2, 3))
    store.add(C, visit(2, 4))
    block = store.query([C, B, A], group_slots=4)
    assert block.tokens_GRP.shape == (4, 4, MAX_MATCH + 64)
    assert block.tokens_GRP.dtype == np.int32 and block.weight_GR.dtype == np.float32

    def row(tail, *tokens):
        left = [SEPARATOR] * (MAX_MATCH - len(tail))
        return [*left, *tail, *tokens, *[SEPARATOR] * (64 - len(tokens))]

    empty = [SEPARATOR] * (MAX_MATCH + 64)
    np.testing.assert_array_equal(block.tokens_GRP[0], [row(C[-MAX_MATCH:], *[2000] * 4), empty, empty, empty])
    np.testing.assert_array_equal(block.tokens_GRP[1], [empty] * 4)
    np.testing.assert_array_equal(block.tokens_GRP[2], [row(A, *[2000] * 3), row(A, 1001), row(A, 1000, 1000), empty])
    np.testing.assert_array_equal(block.tokens_GRP[3], [empty] * 4)
    np.testing.assert_array_equal(block.weight_GR, [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("lengths", "responses", "positions"),
    [
        ([1], 1, 64),
        ([64], 1, 64),
        ([65], 1, 256),
        ([1, 1], 2, 64),
        ([1, 1, 1], 4, 64),
        ([257, 3, 1, 1, 1], 8, 1024),
        ([0], 1, 64),
    ],
)
def test_query_shapes_are_few(lengths, responses, positions):
    store = HistoryStore(depth=1, max_tokens=10**6)
    store.add(A, visit(1, *lengths))
    assert store.query([A], 1).tokens_GRP.shape == (1, responses, MAX_MATCH + positions)


def test_query_of_unseen_prompts_is_none():
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 3))
    assert store.query([B, C], 2) is None


def test_query_takes_a_prompt_twice():
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 3))
    block = store.query([A, A], 2)
    np.testing.assert_array_equal(block.tokens_GRP[0], block.tokens_GRP[1])


# --- snapshots ------------------------------------------------------------------------------------------------


def test_snapshot_keeps_everything():
    store = HistoryStore(depth=3, max_tokens=1000)
    store.add(A, [response(7, 8, reward=0.1, version=3, step=4), response(9, reward=float("nan"), version=2, step=4)])
    store.add(C, [response(reward=-1.0, step=4)])  # an empty response
    store.add(A, [response(5, reward=float("inf"), version=10**10, step=10**10)])
    copy = reloaded(store)
    for prompt in (A, B, C):
        assert plain(copy.responses(prompt)) == plain(store.responses(prompt))
        assert all(r.tokens.dtype == np.int32 for r in copy.responses(prompt))
    assert (len(copy), copy.tokens) == (2, 4)


def test_snapshots_are_plain_arrays_that_orbax_takes():
    """None of size zero, none of objects; also where every response is empty."""
    store = HistoryStore(depth=1, max_tokens=1000)
    store.add(A, [response()])
    for name, array in store.to_arrays().items():
        assert isinstance(array, np.ndarray) and array.size > 0, name
        assert array.dtype.kind in "iuf", name
    assert plain(reloaded(store).responses(A)) == plain([response()])
    assert reloaded(store).query([A], 1).weight_GR.tolist() == [[1.0]]


def test_eviction_goes_on_in_the_same_order_after_a_reload():
    store = HistoryStore(depth=1, max_tokens=9)
    for prompt, step in ((A, 1), (B, 1), (C, 1), (A, 2)):
        store.add(prompt, visit(step, 3))
    copy = reloaded(store)
    for s in (store, copy):
        s.add([9, 9], visit(3, 3))
        assert [bool(s.responses(p)) for p in (A, B, C, [9, 9])] == [True, False, True, True]
        s.add([8, 8], visit(3, 3))
        assert [bool(s.responses(p)) for p in (A, B, C, [9, 9])] == [True, False, False, True]


def test_load_replaces_what_was_there():
    store, other = HistoryStore(depth=1, max_tokens=100), HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 3))
    other.add(B, visit(1, 4))
    store.load_arrays(other.to_arrays())
    assert store.responses(A) == []
    assert (len(store), store.tokens) == (1, 4)
    store.load_arrays({})
    assert (len(store), store.tokens) == (0, 0)


def test_a_snapshot_does_not_change_afterwards():
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 3))
    arrays = store.to_arrays()
    before = {k: v.copy() for k, v in arrays.items()}
    store.add(A, visit(2, 5))
    store.add(B, visit(2, 5))
    for name in before:
        np.testing.assert_array_equal(arrays[name], before[name])


# --- against a naive model ------------------------------------------------------------------------------------


class Naive:
    """Every visit ever made, in a list; everything else is found by looking through it."""

    def __init__(self, depth, max_tokens):
        self.depth, self.max_tokens, self.evicted = depth, max_tokens, 0
        self.visits = []  # (prompt, response), in the order added

    def responses(self, prompt):
        all_of_it = [r for p, r in self.visits if p == prompt]
        steps = sorted({r.step for r in all_of_it})[-self.depth :]
        return [r for r in all_of_it if r.step in steps]

    def prompts(self):
        """Least recently visited first."""
        return sorted({p for p, _ in self.visits}, key=lambda p: max(i for i, v in enumerate(self.visits) if v[0] == p))

    @property
    def tokens(self):
        return sum(len(r.tokens) for p in self.prompts() for r in self.responses(p))

    def add(self, prompt, responses):
        self.visits += [(prompt, r) for r in responses]
        while self.tokens > self.max_tokens and len(self.prompts()) > 1:
            oldest = self.prompts()[0]
            self.visits = [v for v in self.visits if v[0] != oldest]
            self.evicted += 1


PROMPTS = [(1,), (1, 2, 3), tuple(range(12)), (4, 4)]
adds = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 1), st.lists(st.integers(0, 6), max_size=3))


@hypothesis.given(
    depth=st.integers(1, 3), max_tokens=st.integers(1, 40), steps=st.lists(adds | st.just("reload"), max_size=25)
)
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_behaves_as_the_naive_model(depth, max_tokens, steps):
    store, naive = HistoryStore(depth, max_tokens), Naive(depth, max_tokens)
    step, evicted_before_reload = 0, 0
    for action in steps:
        if action == "reload":
            evicted_before_reload += store.evicted_prompts
            store = reloaded(store)
        else:
            prompt, later, lengths = action
            step += later
            responses = visit(step, *lengths)
            store.add(prompt, responses)
            naive.add(prompt, responses)
        for prompt in PROMPTS:
            assert plain(store.responses(prompt)) == plain(naive.responses(prompt))
        assert len(store) == len(naive.prompts())
        assert store.tokens == naive.tokens
        assert store.evicted_prompts + evicted_before_reload == naive.evicted

    block = store.query(PROMPTS, 8)
    if not naive.visits:
        assert block is None
        return
    kept = [naive.responses(p)[::-1] for p in PROMPTS]
    assert block.tokens_GRP.shape[:2] == (8, bucket(max(len(rs) for rs in kept), 1))
    for g, (prompt, rs) in enumerate(zip(PROMPTS, kept, strict=True)):
        assert block.weight_GR[g].sum() == len(rs)
        for r, tokens in zip(rs, block.tokens_GRP[g], strict=False):
            assert [t for t in tokens if t != SEPARATOR] == [*prompt[-MAX_MATCH:], *r.tokens]


# --- votes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("count", [1, 1, 1, 1, 1]),
        ("reward", [0.1, 1.1, 0.1, 0.1, 0.6]),  # NaN and negative rewards vote as if there were none
        ("recency", [0.25, 0.25, 0.5, 1, 1]),
    ],
)
def test_vote_weights(weight, expected):
    store = HistoryStore(depth=3, max_tokens=100)
    rewards = {1: [0.0, 1.0], 2: [np.nan], 3: [-1.0, 0.5]}
    for step, values in rewards.items():
        store.add(A, [response(7, reward=r, step=step) for r in values])
    block = store.query([A], 1, weight)
    np.testing.assert_allclose(block.weight_GR[0, :5], expected[::-1])  # most recent first
    assert (block.weight_GR[0, 5:] == 0).all()


def test_an_old_response_keeps_a_vote():
    """A weight that rounds to 0 would mark the row as empty."""
    store = HistoryStore(depth=2, max_tokens=100)
    store.add(A, [response(7, step=0)])
    store.add(A, [response(8, step=100_000)])
    assert (store.query([A], 1, "recency").weight_GR > 0).sum() == 2


def test_an_unknown_weight():
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, [response(7)])
    with pytest.raises(ValueError, match="unknown weight 'votes'; there are reward, count, recency"):
        store.query([A], 1, "votes")


def test_a_late_visit_is_put_in_order():
    """A deferred rollout of step 1 arrives after those of step 2."""
    store = HistoryStore(depth=3, max_tokens=100)
    store.add(A, [response(7, step=2)])
    store.add(A, [response(8, step=1)])
    assert [r.step for r in store.responses(A)] == [1, 2]
    assert store.query([A], 1).tokens_GRP[0, :, MAX_MATCH].tolist() == [7, 8]
