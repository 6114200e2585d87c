"""The store against a naive model, and what it promises about bounds, memory, ids, padding and snapshots."""

import gc
import tracemalloc

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.history import store as store_module
from rhyme_jax.history.store import HistoryStore, Response, prompt_id, vote_weight
from rhyme_jax.histospec.drafts import MAX_MATCH, NO_TOKEN, SEPARATOR
from rhyme_jax.histospec.noise import COUPLED, UNKNOWN_NOISE

A, B, C = [1, 2, 3], [1, 2, 4], list(range(50, 62))


def response(*tokens, reward=0.0, version=0, step=0, sample=0, noise=UNKNOWN_NOISE) -> Response:
    return Response(np.array(tokens, np.int32), reward, version, step, sample, noise)


def visit(step: int, *lengths: int) -> list[Response]:
    """One visit's responses of the given lengths, told apart by their tokens. From step 66 on these need 32 bits."""
    return [
        response(*[1000 * step + i] * n, reward=i, version=step, step=step, sample=i, noise=COUPLED | step)
        for i, n in enumerate(lengths)
    ]


def plain(responses) -> list[tuple]:
    """Comparable; NaN as None."""
    return [
        (r.tokens.tolist(), None if np.isnan(r.reward) else r.reward, r.policy_version, r.step, r.sample, r.noise)
        for r in responses
    ]


def assert_empty(block) -> None:
    """Nothing in it is matched, drafted, counted or taken for a known noise."""
    for array, empty in zip(
        (block.tokens_GRP, block.weight_GR, block.sample_GR, block.noise_GR),
        (SEPARATOR, 0, -1, UNKNOWN_NOISE),
        strict=True,
    ):
        assert (array == empty).all()


def reloaded(store: HistoryStore, **bounds) -> HistoryStore:
    copy = HistoryStore(**{"depth": store.depth, "max_tokens": store.max_tokens, **bounds})
    copy.load_arrays(store.to_arrays())
    return copy


# --- add, responses, bounds -----------------------------------------------------------------------------------


def test_an_empty_store():
    store = HistoryStore(depth=1, max_tokens=10)
    assert len(store) == store.tokens == store.evicted_prompts == store.nbytes == store.token_bytes == 0
    assert store.responses(A) == []
    for prompts in ([A, B], []):
        assert_empty(store.query(prompts, 2, 3, 4))
    assert store.to_arrays() == {}
    assert len(reloaded(store)) == 0


def test_responses_come_back_as_they_were():
    store = HistoryStore(depth=1, max_tokens=100)
    given_A = [
        response(7, 8, reward=1.5, version=3, step=4, sample=2, noise=2**32 - 1),
        response(9, reward=float("nan"), version=3, step=4),
    ]
    store.add(A, given_A)
    store.add(np.array(B), iter(visit(4, 2)))  # any sequence, any iterable
    assert plain(store.responses(A)) == [([7, 8], 1.5, 3, 4, 2, 2**32 - 1), ([9], None, 3, 4, 0, UNKNOWN_NOISE)]
    assert plain(store.responses(tuple(A))) == plain(given_A)
    assert plain(store.responses(B)) == plain(visit(4, 2))
    assert store.responses(C) == []
    assert (len(store), store.tokens) == (2, 5)


@pytest.mark.parametrize("ids", [[0, 65535], [0, 65536], [2**31 - 1], [-1, 5], [150_000, 3, 65535], []])
def test_every_token_id_survives(ids):
    store = HistoryStore(depth=3, max_tokens=100)
    store.add(A, [response(7, step=1), response(*ids, step=1)])
    store.add(A, [response(*ids, step=2), response(8, step=3)])
    store.add(A, [response(9, step=2)])  # a visit of 32 bits grows by one of 16
    store.add(A, [response(*ids, step=3)])  # and one of 16 by one of 32
    for s in (store, reloaded(store)):
        assert [r.tokens.tolist() for r in s.responses(A)] == [[7], ids, ids, [9], [8], ids]
        assert all(r.tokens.dtype == np.int32 for r in s.responses(A))
        rows = s.query([A], 1, 6, 2).tokens_GRP[0, :, MAX_MATCH:].tolist()
        assert rows == [[*t, SEPARATOR, SEPARATOR][:2] for t in (ids, [8], [9], ids, ids, [7])]


def test_the_store_shares_no_memory_with_its_callers():
    """Engines reuse their buffers, and a caller may do as it likes with what it got."""
    store = HistoryStore(depth=1, max_tokens=100)
    prompt, tokens = np.array(A), np.array([70_000, 70_001], np.int32)
    store.add(prompt, [Response(tokens, 0.0, 0, 0)])
    arrays = store.to_arrays()
    copy = reloaded(store)
    copy.load_arrays(arrays)
    prompt[:], tokens[:] = 0, 0
    store.responses(A)[0].tokens[:] = 0
    block = store.query([A], 1, 1, 2)
    for array in (*arrays.values(), block.tokens_GRP, block.sample_GR, block.noise_GR):
        array[...] = 0
    for s in (store, copy):
        assert plain(s.responses(A)) == plain([response(70_000, 70_001)])


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
    store.query([A], 1, 1, 8)
    store.responses(A)
    store.add(C, visit(1, 5))
    assert store.responses(A) == []


@pytest.mark.parametrize(
    ("wrong", "field"), [({"depth": 0}, "history.depth=0"), ({"max_tokens": 0}, "history.max_tokens=0")]
)
def test_wrong_bounds_name_their_field(wrong, field):
    with pytest.raises(InputError, match=field):
        HistoryStore(**{"depth": 1, "max_tokens": 1, **wrong})


# --- memory ---------------------------------------------------------------------------------------------------


def held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize(("vocabulary", "token_bytes", "most"), [(65_536, 2, 2.4), (150_000, 4, 4.4)])
@pytest.mark.usefixtures("traced")
def test_memory_of_a_realistic_store(vocabulary, token_bytes, most):
    """At most 6 bytes a token is the promise, Python's own objects included; this is what it comes to."""
    rng = np.random.default_rng(0)
    before = held_bytes()
    store = HistoryStore(depth=2, max_tokens=10**9)
    for p in range(200):
        texts = [rng.integers(0, vocabulary, n).astype(np.int32) for n in rng.integers(200, 800, 16)]
        store.add([p, *range(99)], [Response(t, 0.5, 3, p // 10, i, COUPLED) for i, t in enumerate(texts)])
    del texts
    grown = held_bytes() - before
    assert 1_500_000 < store.tokens < 1_700_000
    assert store.token_bytes == token_bytes * store.tokens
    assert store.token_bytes < store.nbytes <= grown <= most * store.tokens

    # A store that was loaded, or that evicted, is no larger than one that was filled.
    arrays = store.to_arrays()
    size = store.nbytes
    del store
    before = held_bytes()
    loaded = HistoryStore(depth=2, max_tokens=arrays["tokens"].size // 2)
    loaded.load_arrays(arrays)
    assert loaded.nbytes == size
    assert size <= held_bytes() - before <= most * loaded.tokens
    loaded.add(A, visit(1, 1))
    assert loaded.evicted_prompts > 90
    assert loaded.nbytes <= held_bytes() - before <= most * loaded.tokens


def test_bytes_are_those_of_the_arrays():
    store = HistoryStore(depth=2, max_tokens=1000)
    store.add(A, visit(1, 3, 4))
    store.add(A, visit(66, 5))
    assert store.token_bytes == 2 * 7 + 4 * 5
    assert store.nbytes == store.token_bytes + 3 * 32 + 4 * len(A)


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


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.add(B, visit(1, 1)),
        lambda s: s.query([B], 1, 1, 1),
        lambda s: s.responses(B),
    ],
)
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
    block = store.query([C, B, A], group_slots=4, response_slots=4, token_slots=6)
    assert [a.dtype for a in (block.tokens_GRP, block.weight_GR, block.sample_GR, block.noise_GR)] == [
        np.int32,
        np.float32,
        np.int32,
        np.int64,
    ]

    def row(tail, *tokens):
        left = [SEPARATOR] * (MAX_MATCH - len(tail))
        return [*left, *tail, *tokens, *[SEPARATOR] * (6 - len(tokens))]

    empty, none = [SEPARATOR] * (MAX_MATCH + 6), UNKNOWN_NOISE
    first, second = COUPLED | 1, COUPLED | 2
    np.testing.assert_array_equal(
        block.tokens_GRP,
        [
            [row(C[-MAX_MATCH:], *[2000] * 4), empty, empty, empty],
            [empty] * 4,
            [row(A, *[2000] * 3), row(A, 1001), row(A, 1000, 1000), empty],
            [empty] * 4,
        ],
    )
    np.testing.assert_array_equal(block.weight_GR, [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(block.sample_GR, [[0, -1, -1, -1], [-1] * 4, [0, 1, 0, -1], [-1] * 4])
    np.testing.assert_array_equal(
        block.noise_GR, [[second, none, none, none], [none] * 4, [second, first, first, none], [none] * 4]
    )


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 3, 64), (7, 16, 5), (3, 0, 4), (3, 4, 0)])
@pytest.mark.parametrize("prompts", [[], [C], [A, B]])
def test_query_has_the_shape_asked_for(shape, prompts):
    """Whatever is known, so that the engine compiles once."""
    store = HistoryStore(depth=2, max_tokens=1000)
    store.add(A, visit(1, 9, 0, 2))
    store.add(A, visit(2, 1))
    groups, responses, positions = shape
    block = store.query(prompts, *shape)
    assert block.tokens_GRP.shape == (groups, responses, MAX_MATCH + positions)
    assert block.weight_GR.shape == block.sample_GR.shape == block.noise_GR.shape == (groups, responses)


def test_query_of_unseen_prompts_is_empty():
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 3))
    assert_empty(store.query([B, C], 2, 4, 8))


@pytest.mark.parametrize(
    ("slots", "kept"),
    [
        (1, [(3, 1)]),
        (2, [(3, 1), (3, 0)]),
        (3, [(3, 1), (3, 0), (2, 2)]),
        (5, [(3, 1), (3, 0), (2, 2), (2, 1), (2, 0)]),
        (6, [(3, 1), (3, 0), (2, 2), (2, 1), (2, 0), (1, 0)]),
        (8, [(3, 1), (3, 0), (2, 2), (2, 1), (2, 0), (1, 0)]),
    ],
)
def test_query_leaves_out_the_oldest(slots, kept):
    store = HistoryStore(depth=3, max_tokens=100)
    for step, lengths in ((1, [2]), (2, [2, 2, 2]), (3, [2, 2])):
        store.add(A, visit(step, *lengths))
    block = store.query([A], 1, slots, 2)
    n = len(kept)
    assert block.tokens_GRP[0, :n, MAX_MATCH].tolist() == [1000 * step + i for step, i in kept]
    assert block.sample_GR[0, :n].tolist() == [i for _, i in kept]
    assert block.noise_GR[0, :n].tolist() == [COUPLED | step for step, _ in kept]
    assert (block.weight_GR[0] > 0).tolist() == [True] * n + [False] * (slots - n)
    assert (block.tokens_GRP[0, n:] == SEPARATOR).all()


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 4, 9])
def test_query_cuts_what_is_too_long(slots):
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, [response(5, 6, 7, step=1), response(8, 9, step=1), response(step=1)])
    block = store.query([A], 1, 3, slots)
    padding = [SEPARATOR] * 9
    for row, text in zip(block.tokens_GRP[0], ([], [8, 9], [5, 6, 7]), strict=True):
        assert row.tolist() == [*[SEPARATOR] * (MAX_MATCH - 3), *A, *[*text, *padding][:slots]]
    assert [r.tokens.tolist() for r in store.responses(A)] == [[5, 6, 7], [8, 9], []]  # nothing is lost


def test_query_of_more_prompts_than_groups():
    with pytest.raises(ValueError, match="2 prompts do not fit 1 group_slots"):
        HistoryStore(depth=1, max_tokens=100).query([A, B], 1, 4, 8)


def test_query_takes_a_prompt_twice():
    store = HistoryStore(depth=1, max_tokens=100)
    store.add(A, visit(1, 3))
    block = store.query([A, A], 2, 1, 3)
    np.testing.assert_array_equal(block.tokens_GRP[0], block.tokens_GRP[1])
    assert (block.weight_GR == 1).all()


# --- snapshots ------------------------------------------------------------------------------------------------


def test_snapshot_keeps_everything():
    store = HistoryStore(depth=3, max_tokens=1000)
    store.add(A, [response(7, 8, reward=0.1, version=3, step=4), response(9, reward=float("nan"), version=2, step=4)])
    store.add(C, [response(reward=-1.0, step=4, sample=3, noise=0)])  # an empty response
    store.add(A, [response(5, reward=float("inf"), version=10**10, step=10**10, sample=2**31 - 1, noise=2**32 - 1)])
    copy = reloaded(store)
    for prompt in (A, B, C):
        assert plain(copy.responses(prompt)) == plain(store.responses(prompt))
        assert all(r.tokens.dtype == np.int32 for r in copy.responses(prompt))
    assert (len(copy), copy.tokens) == (2, 4)
    assert copy.nbytes == store.nbytes
    blocks = [vars(s.query([A, B, C], 3, 4, 5)) for s in (copy, store)]
    for name in blocks[0]:
        np.testing.assert_array_equal(blocks[0][name], blocks[1][name])


def test_snapshot_layout():
    store = HistoryStore(depth=2, max_tokens=1000)
    store.add(A, visit(1, 2, 1))
    store.add(B, visit(66, 1))
    store.add(A, [response(5, reward=0.5, step=2)])
    arrays = store.to_arrays()
    assert {k: v.tolist() for k, v in arrays.items()} == {
        "prompt_tokens": [*B, *A],  # least recently visited first
        "prompt_lengths": [3, 3],
        "responses_per_prompt": [1, 3],
        "tokens": [NO_TOKEN, 66_000, 1000, 1000, 1001, 5],
        "lengths": [1, 2, 1, 1],
        "rewards": [0, 0, 1, 0.5],
        "policy_versions": [66, 1, 1, 0],
        "steps": [66, 1, 1, 2],
        "samples": [0, 0, 1, 0],
        "noises": [COUPLED | 66, COUPLED | 1, COUPLED | 1, UNKNOWN_NOISE],
    }
    int32, float64 = {"prompt_tokens", "tokens"}, {"rewards"}
    for name, array in arrays.items():
        assert array.dtype == (np.int32 if name in int32 else np.float64 if name in float64 else np.int64), name
        assert array.flags.c_contiguous, name


def test_snapshots_are_plain_arrays_that_orbax_takes():
    """None of size zero, none of objects; also where every response is empty."""
    store = HistoryStore(depth=1, max_tokens=1000)
    store.add(A, [response()])
    for name, array in store.to_arrays().items():
        assert isinstance(array, np.ndarray) and array.size > 0, name
        assert array.dtype.kind in "iuf", name
    assert plain(reloaded(store).responses(A)) == plain([response()])
    assert reloaded(store).query([A], 1, 1, 4).weight_GR.tolist() == [[1.0]]


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
        return sorted((r for r in all_of_it if r.step in steps), key=lambda r: r.step)

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
# Steps go on by 0 or 1, or fall behind as those of deferred rollouts do; from 66 on their tokens need 32 bits.
adds = st.tuples(st.sampled_from(PROMPTS), st.integers(-1, 1), st.lists(st.integers(0, 6), max_size=3))


@hypothesis.given(
    depth=st.integers(1, 3),
    max_tokens=st.integers(1, 40),
    steps=st.lists(adds | st.just("reload"), max_size=25),
    slots=st.tuples(st.integers(4, 6), st.integers(0, 8), st.integers(0, 8)),
)
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_behaves_as_the_naive_model(depth, max_tokens, steps, slots):
    store, naive = HistoryStore(depth, max_tokens), Naive(depth, max_tokens)
    step, evicted_before_reload = 65, 0
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

    block = store.query(PROMPTS, *slots)
    _, response_slots, token_slots = slots
    kept = [naive.responses(p)[::-1][:response_slots] for p in PROMPTS]
    for g, (prompt, rs) in enumerate(zip(PROMPTS, kept, strict=True)):
        used = block.weight_GR[g] > 0
        assert used.tolist() == [i < len(rs) for i in range(response_slots)]
        assert (block.tokens_GRP[g, ~used] == SEPARATOR).all()
        assert block.sample_GR[g].tolist() == [r.sample for r in rs] + [-1] * (response_slots - len(rs))
        assert block.noise_GR[g].tolist() == [r.noise for r in rs] + [UNKNOWN_NOISE] * (response_slots - len(rs))
        for r, tokens in zip(rs, block.tokens_GRP[g, used], strict=True):
            assert [t for t in tokens if t != SEPARATOR] == [*prompt[-MAX_MATCH:], *r.tokens[:token_slots]]
    assert (block.tokens_GRP[len(PROMPTS) :] == SEPARATOR).all()


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
    block = store.query([A], 1, 8, 1, weight)
    np.testing.assert_allclose(block.weight_GR[0, :5], expected[::-1])  # most recent first
    assert (block.weight_GR[0, 5:] == 0).all()
    ages = [2, 2, 1, 0, 0]
    np.testing.assert_array_equal(vote_weight(np.concatenate(list(rewards.values())), np.array(ages), weight), expected)


def test_an_old_response_keeps_a_vote():
    """A weight that rounds to 0 would mark the row as empty."""
    store = HistoryStore(depth=2, max_tokens=100)
    store.add(A, [response(7, step=0)])
    store.add(A, [response(8, step=100_000)])
    assert (store.query([A], 1, 2, 1, "recency").weight_GR > 0).sum() == 2


def test_an_unknown_weight():
    store = HistoryStore(depth=1, max_tokens=100)
    for _ in range(2):  # unseen and seen
        with pytest.raises(ValueError, match="unknown weight 'votes'; there are reward, count, recency"):
            store.query([A], 1, 1, 1, "votes")
        store.add(A, [response(7)])


def test_a_late_visit_is_put_in_order():
    """A deferred rollout of step 1 arrives after those of step 2."""
    store = HistoryStore(depth=3, max_tokens=100)
    store.add(A, [response(7, step=2)])
    store.add(A, [response(8, step=1)])
    assert [r.step for r in store.responses(A)] == [1, 2]
    assert store.query([A], 1, 2, 1).tokens_GRP[0, :, MAX_MATCH].tolist() == [7, 8]
