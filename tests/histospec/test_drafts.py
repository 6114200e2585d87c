"""Drafting against a slow reading of its description, the traps of matching by shifts, and walks past divergences."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from rhyme_jax.history.store import HistoryStore, Response
from rhyme_jax.histospec import drafts, noise
from rhyme_jax.histospec.budget import SHAPE_XM
from rhyme_jax.histospec.drafts import (
    HISTORY,
    LIVE_WEIGHT,
    MAX_MATCH,
    NO_TOKEN,
    OWN,
    SELF,
    SEPARATOR,
    SIBLINGS,
    Beliefs,
    Corpus,
    DraftRules,
    HistoryBlock,
    Reader,
    last_tokens,
    make_corpus,
)

T, S, J = 16, 64, 6  # response positions of a text, slots of the token buffer, drafted tokens
GROUPS, EARLIER, SAMPLES = 2, 3, 3  # prompts of a batch, earlier responses and rows of each
P = MAX_MATCH + T
PROMPT = [11, 12, 13, 14]
ALL = ("history", "siblings", "self")

write_live = jax.jit(drafts.write_live)
suffix_match = jax.jit(drafts.suffix_match)
vote = jax.jit(drafts.vote)


@functools.partial(jax.jit, static_argnames=("sources", "max_drafts"))
def fast(corpus, reader, beliefs, sources, min_match, min_prob, tokens_BS, length_B, prompt_length_B, max_drafts):
    """With the thresholds as arguments, so that it is compiled for each set of sources only."""
    rules = DraftRules(sources, min_match, min_prob)
    return drafts.draft(corpus, reader, beliefs, rules, tokens_BS, length_B, prompt_length_B, max_drafts)


# --- texts by hand --------------------------------------------------------------------------------------------


def text(tail, response, positions=P) -> np.ndarray:
    row = np.full(positions, SEPARATOR, np.int32)
    tail = list(tail)[-MAX_MATCH:]
    row[MAX_MATCH - len(tail) : MAX_MATCH] = tail
    row[MAX_MATCH : MAX_MATCH + len(response)] = response
    return row


def block(groups, weights=None, positions=P, slots=EARLIER) -> HistoryBlock:
    """Of groups, each a list of (prompt, response), padded as the store pads them, to `slots` texts at least."""
    slots = max([slots, *map(len, groups)])
    history = HistoryBlock(
        tokens_GRP=np.full((len(groups), slots, positions), SEPARATOR, np.int32),
        weight_GR=np.zeros((len(groups), slots), np.float32),
        sample_GR=np.full((len(groups), slots), -1, np.int32),
        noise_GR=np.full((len(groups), slots), noise.UNKNOWN_NOISE, np.int64),
    )
    for g, group in enumerate(groups):
        for r, (prompt, response) in enumerate(group):
            history.tokens_GRP[g, r] = text(prompt, response, positions)
            history.weight_GR[g, r] = 1 if weights is None else weights[g][r]
            history.sample_GR[g, r], history.noise_GR[g, r] = r, 7
    return history


def own_response(block: HistoryBlock, group: int, sample: int, word: int) -> int:
    return int(block.own_responses(np.array([group]), np.array([sample]), np.array([word]))[0])


def beliefs(value_XM=None) -> Beliefs:
    """By default what a longer match foretells is worth more, and a row's own response as much as any other."""
    if value_XM is None:
        value_XM = np.broadcast_to(np.arange(MAX_MATCH + 1), SHAPE_XM)
    return Beliefs(value_XM=np.float32(value_XM), window_XM=np.full(SHAPE_XM, J, np.int32))


def buffer(rows, behind=0):
    """(tokens_BS, length_B, prompt_length_B) of rows of (prompt, response so far); `behind` fills the rest."""
    tokens_BS = np.full((len(rows), S), behind, np.int32)
    for b, (prompt, response) in enumerate(rows):
        tokens_BS[b, : len(prompt) + len(response)] = [*prompt, *response]
    length_B = np.array([len(p) + len(r) for p, r in rows], np.int32)
    return tokens_BS, length_B, np.array([len(p) for p, _ in rows], np.int32)


def reader_of(rows: int, group=0, live=0, own=-1, shift=0) -> Reader:
    return Reader(*(np.array(np.broadcast_to(x, rows), np.int32) for x in (group, live, own, shift)))


def read(drafted: drafts.Draft) -> list[tuple]:
    """[(tokens, match, source, next shift)] of each row; without a draft ([], None, None, next shift)."""
    d = jax.tree.map(np.asarray, drafted)
    assert all(x.dtype == np.int32 for x in jax.tree.leaves(d))
    assert ((d.length_B >= 0) & (d.length_B <= d.tokens_BJ.shape[1])).all()
    return [
        (tokens[:n].tolist(), int(m), int(x), int(s)) if n else ([], None, None, int(s))
        for tokens, n, m, x, s in zip(d.tokens_BJ, d.length_B, d.match_B, d.source_B, d.shift_B, strict=True)
    ]


def told(corpus: Corpus, reader: Reader, rows) -> Corpus:
    """The corpus with what the rows have said."""
    positions_BT = np.broadcast_to(np.arange(S), (len(rows), S))
    tokens_BT = np.stack([np.pad(np.int32(r), (0, S - len(r))) for _, r in rows])
    return write_live(corpus, reader, positions_BT, tokens_BT, positions_BT < [[len(r)] for _, r in rows])


def draft_all(
    history, rows, groups=None, sources=ALL, behind=0, own=-1, shift=0, values=None, max_drafts=J, min_match=3,
    min_prob=0.0,
):  # fmt: skip
    """The drafts of rows of (prompt, response so far), each a sample of its own of its group (by default all of 0).

    Rows are padded with silent ones, as the engine pads them, and so that few shapes are compiled.
    """
    count, groups = len(rows), [0] * len(rows) if groups is None else list(groups)
    own, shift = ([*np.broadcast_to(x, count)] for x in (own, shift))
    while len(rows) % 4:
        rows, groups, own, shift = [*rows, (rows[0][0], [])], [*groups, groups[0]], [*own, -1], [*shift, 0]
    prompts = [np.zeros(0, np.int32)] * len(history.tokens_GRP)
    for g, (prompt, _) in zip(groups, rows, strict=True):
        prompts[g] = np.int32(prompt)
    rules = DraftRules(sources, min_match, min_prob)
    reader = reader_of(len(rows), groups, history.tokens_GRP.shape[1] + np.arange(len(rows)), own, shift)
    corpus = told(make_corpus(history, prompts, len(rows), rules), reader, rows)
    args = corpus, reader, beliefs(values), sources, min_match, min_prob, *buffer(rows, behind), max_drafts
    return read(fast(*args))[:count]


def draft_one(group, row, weights=None, sources=("history",), **options):
    """(tokens, match) of a lone row, by default from the responses of `group` alone."""
    return draft_all(block([group], weights and [weights]), [row], sources=sources, **options)[0][:2]


NONE = ([], None)

# --- the slow reading -----------------------------------------------------------------------------------------


def slow_match(row_text, context, here) -> tuple[int, int]:
    """(match, index of the next token): the longest context before any next token of a response, or of the prompt's
    own text; of equally long ones that nearest to `here`; of equally near ones the later.
    """
    best = (0, 0, 0)
    for index in range(MAX_MATCH, len(row_text)):
        if row_text[index] < 0:
            continue
        match = 0
        while match < min(MAX_MATCH, len(context)):
            before = row_text[index - 1 - match]
            if before < 0 or before != context[-1 - match]:
                break
            match += 1
        best = max(best, (match, -abs(index - here), index))
    return best[0], best[2]


def common(x, y) -> int:
    """Tokens on which two lists agree before they part or one ends."""
    n = 0
    while n < min(len(x), len(y)) and x[n] == y[n]:
        n += 1
    return n


def slow_vote(continuations, weights, min_prob) -> tuple[list[int], int]:
    """(path, its voter). If one continuation, drawn by weight, comes true: which foretells most of it?"""
    best, winner = -1, None
    for i, path in enumerate(continuations):
        foretold = sum(w * common(path, other) for other, w in zip(continuations, weights, strict=True))
        if weights[i] > 0 and foretold > best:
            best, winner = foretold, i
    path = []
    while winner is not None and len(path) < len(continuations[winner]):
        longer = continuations[winner][: len(path) + 1]
        votes = sum(w for x, w in zip(continuations, weights, strict=True) if x[: len(longer)] == longer)
        if votes < min_prob * sum(weights):
            break
        path = longer
    return path, winner


def onwards(row_text, index, most) -> list[int]:
    """Up to `most` tokens of a text from an index on."""
    tokens = []
    while len(tokens) < most and 0 <= index < len(row_text) and row_text[index] >= 0:
        tokens.append(row_text[index])
        index += 1
    return tokens


def slow_draft(texts, history, weights, row, live, own, shift, sources, min_match, min_prob, values, most):
    """As `read`: the draft of a row of (prompt, response), given the texts of its group, the first `history` of
    which are earlier responses, with their weights.
    """
    prompt, response = row
    said, here = [*prompt, *response], MAX_MATCH + len(response)
    found, weight = [slow_match(t, said, here + shift) for t in texts], []
    for r in range(len(texts)):
        source = "self" if r in (live, len(texts) - 1) else "history" if r < history else "siblings"
        assumed = weights[r] if r < history else LIVE_WEIGHT
        weight.append(assumed if source in sources else 0)
    longest = max((m for (m, _), w in zip(found, weight, strict=True) if w > 0), default=0)
    voting = [r for r, (m, _) in enumerate(found) if weight[r] > 0 and m == longest >= min_match]
    paths = [onwards(texts[r], found[r][1], most) for r in voting]
    voted, winner = slow_vote(paths, [weight[r] for r in voting], min_prob)
    result = ([], None, None, shift)
    if voted:
        r = voting[winner]
        result = (voted, longest, SELF if r in (live, len(texts) - 1) else HISTORY if r < history else SIBLINGS, shift)
    if own >= 0:
        match, index = found[own]
        pointer = index if match >= min_match else here + shift
        match = 0
        while (
            match < MAX_MATCH
            and match < len(said)
            and onwards(texts[own], pointer - 1 - match, 1) == [said[-1 - match]]
        ):
            match += 1
        path = onwards(texts[own], pointer, most)
        if path and (not voted or values[OWN][match] >= values[result[2]][result[1]]):
            return path, match, OWN, pointer - here
    return result


# --- the fast path against it ---------------------------------------------------------------------------------

SOURCE_SETS = [ALL, ("history",), ("siblings",), ("self",), ("history", "siblings"), ("siblings", "self"), ()]
few_letters = st.integers(0, 2)


def letters(longest, shortest=0):
    """Over three letters, so that matches abound; of all lengths alike, where `lists` alone prefers short ones."""
    sizes = st.integers(shortest, longest)
    return sizes.flatmap(lambda n: st.lists(few_letters, min_size=n, max_size=n))


@st.composite
def batches(draw):
    sources = draw(st.sampled_from(SOURCE_SETS))
    prompts = [draw(letters(9, 1)) for _ in range(GROUPS)]
    groups, weights = [], []
    for g in range(GROUPS):
        count = draw(st.integers(0, EARLIER))
        groups.append([(prompts[g], draw(letters(T))) for _ in range(count)])
        # Dyadic, so that sums are exact in float32 and a share of exactly min_prob is one in both.
        weights.append(draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5]), min_size=count, max_size=count)))
    rows, group_B, own, shift = [], [], [], []
    for g in range(GROUPS):
        for _ in range(SAMPLES):
            # Half of the rows repeat an earlier response for a while, and some are longer than any text.
            copied = draw(st.sampled_from([r for _, r in groups[g]])) if groups[g] and draw(st.booleans()) else []
            rows.append((prompts[g], copied[: draw(st.integers(0, len(copied)))] + draw(letters(T + 4))))
            group_B.append(g)
            own.append(draw(st.integers(-1, len(groups[g]) - 1)))
            shift.append(draw(st.integers(-3, 3)))
    options = {"min_match": draw(st.integers(1, 7)), "min_prob": draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))}
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 3, SHAPE_XM).astype(float)
    options |= {"sources": sources, "own": own, "shift": shift, "values": values, "behind": draw(few_letters)}
    return block(groups, weights), rows, group_B, options


@hypothesis.given(batches())
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_matches_the_slow_reading(batch):
    history, rows, group_B, options = batch
    have = draft_all(history, rows, group_B, **options)
    options.pop("behind")
    own, shift = options.pop("own"), options.pop("shift")
    for b, (prompt, _) in enumerate(rows):
        g = group_B[b]
        live = [text(prompt, r[:T] if g == group_B[i] else []) for i, (_, r) in enumerate(rows)]
        earlier = history.tokens_GRP[g] if "history" in options["sources"] else np.full((EARLIER, P), SEPARATOR)
        texts = [t.tolist() for t in (*earlier, *live, text([], prompt))]
        weights = history.weight_GR[g].tolist()
        row = (texts, EARLIER, weights, rows[b], EARLIER + b, own[b], shift[b])
        assert have[b] == slow_draft(*row, **options, most=J), (b, row)


@st.composite
def searches(draw):
    texts = [[draw(st.sampled_from([SEPARATOR, 0, 0, 1, 1, 2])) for _ in range(P)] for _ in range(3)]
    context = draw(st.lists(few_letters, min_size=1, max_size=9))
    return np.array(texts, np.int32), context, draw(st.integers(MAX_MATCH - 4, P + 4))


@hypothesis.given(searches())
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_suffix_match_is_a_search(search):
    """Also in texts full of holes, which a corpus never has, and from positions outside of them."""
    texts_RP, context, here = search
    padded = [*context[::-1], *[NO_TOKEN] * MAX_MATCH][:MAX_MATCH]
    next_BR, match_BR = suffix_match(texts_RP[None], np.array([0]), np.array([padded], np.int32), np.array([here]))
    for row_text, index, match in zip(texts_RP.tolist(), next_BR[0].tolist(), match_BR[0].tolist(), strict=True):
        want, where = slow_match(row_text, context, here)
        assert match == want
        assert match == 0 or index == where


@st.composite
def elections(draw):
    paths = [[*draw(letters(J)), *[SEPARATOR] * J][:J] for _ in range(4)]
    return paths, [draw(st.sampled_from([0.0, 0.0, 0.25, 1.0, 1.5])) for _ in range(4)]


@hypothesis.given(elections(), st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0]))
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_vote_is_the_slow_one(election, min_prob):
    paths, weights = election
    tokens_BJ, length_B, winner_B = vote(np.array([paths], np.int32), np.array([weights], np.float32), min_prob)
    want, winner = slow_vote([onwards(p, 0, J) for p in paths], weights, min_prob)
    assert tokens_BJ[0, : length_B[0]].tolist() == want
    if winner is not None:
        assert winner_B[0] == winner


# --- the corpus -----------------------------------------------------------------------------------------------


def test_the_layout_of_a_corpus():
    """Earlier responses, then live ones, which hold the prompt's tail, then the prompt."""
    history = block([[(PROMPT, [1, 2]), (PROMPT, [3])], []], [[0.25, 2.0], []], slots=0)
    long = list(range(30, 39))
    corpus = make_corpus(history, [np.int32(PROMPT), np.int32(long)], 3, DraftRules(ALL))
    assert corpus.tokens_GRP.shape == (2, 2 + 3 + 1, P) and corpus.tokens_GRP.dtype == np.int32
    assert corpus.history == 2
    np.testing.assert_array_equal(corpus.source_R, [HISTORY] * 2 + [SIBLINGS] * 3 + [SELF])
    np.testing.assert_array_equal(corpus.tokens_GRP[:, :2], history.tokens_GRP)
    for g, prompt in enumerate((PROMPT, long)):
        np.testing.assert_array_equal(corpus.tokens_GRP[g, 2:5], [text(prompt, [])] * 3)
        np.testing.assert_array_equal(corpus.tokens_GRP[g, 5], text([], prompt))
    np.testing.assert_array_equal(corpus.weight_GR, [[0.25, 2, *[LIVE_WEIGHT] * 4], [0, 0, *[LIVE_WEIGHT] * 4]])
    assert corpus.weight_GR.dtype == np.float32


@pytest.mark.parametrize("length", [1, MAX_MATCH - 1, MAX_MATCH, MAX_MATCH + 1, T - 1, T, T + 1, T + 30])
def test_prompts_of_all_lengths(length):
    """Of a long one the last tokens are kept: MAX_MATCH where it is context, as many as fit where it is a text."""
    prompt = np.arange(100, 100 + length)
    corpus = make_corpus(block([[]], slots=1), [prompt], 1, DraftRules(ALL))
    np.testing.assert_array_equal(corpus.tokens_GRP[0, 1], text(prompt, []))
    np.testing.assert_array_equal(corpus.tokens_GRP[0, 2], text([], prompt[-T:]))


def test_a_corpus_without_history_or_prompt():
    """A store that is empty, and a group that no request draws from."""
    corpus = make_corpus(block([[], []], slots=0), [np.zeros(0, np.int32), np.int32(PROMPT)], 2, DraftRules(ALL))
    np.testing.assert_array_equal(corpus.source_R, [SIBLINGS, SIBLINGS, SELF])
    assert (corpus.tokens_GRP[0] == SEPARATOR).all()
    np.testing.assert_array_equal(corpus.tokens_GRP[1], [text(PROMPT, []), text(PROMPT, []), text([], PROMPT)])


@pytest.mark.parametrize("sources", SOURCE_SETS)
def test_sources_that_are_off_weigh_nothing(sources):
    history = block([[(PROMPT, [1, 2])]], [[0.25]], slots=0)
    before = history.tokens_GRP.copy()
    corpus = make_corpus(history, [np.int32(PROMPT)], 2, DraftRules(sources))
    weights = {"history": [0.25], "siblings": [LIVE_WEIGHT] * 2, "self": [LIVE_WEIGHT]}
    want = [w if source in sources else 0 for source, ws in weights.items() for w in ws]
    np.testing.assert_array_equal(corpus.weight_GR, [want])
    assert (corpus.tokens_GRP[0, 0] >= 0).any() == ("history" in sources)
    corpus.tokens_GRP[:] = 99
    np.testing.assert_array_equal(history.tokens_GRP, before)  # the block is the caller's


def test_write_live_writes_where_asked_and_nowhere_else():
    corpus = make_corpus(block([[(PROMPT, [1, 2])]] * 2, slots=0), [np.int32(PROMPT)] * 2, 2, DraftRules(ALL))
    reader = reader_of(3, [1, 0, 1], [1, 2, 2])
    position_BK = np.array([[0, 1, 2], [T - 2, T - 1, T], [5, 6, 7]])
    write_BK = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
    have = write_live(corpus, reader, position_BK, np.array([[21, 22, 23], [31, 32, 33], [41, 42, 43]]), write_BK)
    want = corpus.tokens_GRP.copy()
    want[1, 1, MAX_MATCH : MAX_MATCH + 2] = [21, 22]
    want[0, 2, P - 2 :] = [31, 32]  # the third lies past the end of a text
    np.testing.assert_array_equal(have.tokens_GRP, want)
    assert have.history == corpus.history
    np.testing.assert_array_equal(have.weight_GR, corpus.weight_GR)


@hypothesis.given(st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_write_live_is_a_loop_over_tokens(seed):
    rng = np.random.default_rng(seed)
    corpus = make_corpus(block([[]] * 2, slots=1), [np.int32(PROMPT)] * 2, 2, DraftRules(ALL))
    reader = reader_of(4, [0, 0, 1, 1], [1, 2, 2, 1])
    position_BK = rng.integers(0, T + 3, (4, 1)) + np.arange(3)
    tokens_BK, write_BK = rng.integers(0, 9, (4, 3)), rng.random((4, 3)) < 0.5
    want = corpus.tokens_GRP.copy()
    for g, r, *columns in zip(reader.group_B, reader.live_B, position_BK, tokens_BK, write_BK, strict=True):
        for position, token, write in zip(*columns, strict=True):
            if write and position < T:
                want[g, r, MAX_MATCH + position] = token
    np.testing.assert_array_equal(write_live(corpus, reader, position_BK, tokens_BK, write_BK).tokens_GRP, want)


@pytest.mark.parametrize(
    ("sample", "word", "want"),
    [
        pytest.param(1, 7, 0, id="the most recent of two"),
        pytest.param(2, 7, 1, id="another sample"),
        pytest.param(1, 8, 3, id="another word"),
        pytest.param(2, 8, -1, id="the sample under another word only"),
        pytest.param(3, 7, -1, id="no such sample"),
        pytest.param(1, noise.UNKNOWN_NOISE, -1, id="unknown noise equals no noise, not even unknown noise"),
        pytest.param(-1, noise.UNKNOWN_NOISE, -1, id="an empty row is nobody's"),
        pytest.param(0, noise.coupled_word(0, 0, 0), 5, id="a word of coupled noise, beyond int32"),
    ],
)
def test_own_response(sample, word, want):
    samples = [1, 2, 1, 1, 1, 0, -1]
    words = [7, 7, 7, 8, noise.UNKNOWN_NOISE, noise.COUPLED, noise.UNKNOWN_NOISE]
    others = np.full((1, 7), 1), np.full((1, 7), 7)  # another group, where sample 1 under 7 is found at once
    history = HistoryBlock(
        tokens_GRP=np.zeros((2, 7, P), np.int32),
        weight_GR=np.ones((2, 7), np.float32),
        sample_GR=np.concatenate([others[0], [samples]]).astype(np.int32),
        noise_GR=np.concatenate([others[1], [words]]).astype(np.int64),
    )
    assert own_response(history, 1, sample, word) == want


# --- matching -------------------------------------------------------------------------------------------------


def test_the_first_token_is_drafted_from_the_prompt():
    assert draft_one([(PROMPT, [1, 2, 3, 4])], (PROMPT, [])) == ([1, 2, 3, 4], 4)


def test_the_whole_prompt_tail_counts_and_no_more():
    assert draft_one([(range(20, 40), [1, 2])], (range(20, 40), [])) == ([1, 2], MAX_MATCH)


def test_a_row_shorter_than_the_longest_match():
    """One or two tokens in all: context before the start equals nothing, also not the padding or the row's end."""
    assert draft_one([([5, 6], [1, 2])], ([5, 6], []), min_match=2) == ([1, 2], 2)
    assert draft_one([([5, 6], [1, 2])], ([5, 6], []), min_match=3) == NONE
    assert draft_one([([5], [1, 2])], ([5], []), min_match=1) == ([1, 2], 1)


@pytest.mark.parametrize("behind", [NO_TOKEN, SEPARATOR, 4, 5])
def test_negative_positions_do_not_wrap(behind):
    """Before a one-token row comes nothing. A wrapped index would read the end of the buffer and find 4, 5."""
    group = [([4], [5, 7, 7]), ([3, 3], [5, 8, 8])]
    assert draft_one(group, ([5], []), behind=behind, min_match=1) == ([7, 7], 1)
    assert draft_one(group, ([5], []), behind=behind, min_match=2) == NONE


def test_last_tokens():
    tokens_BS = np.arange(40).reshape(2, 20)
    have = last_tokens(tokens_BS, np.array([2, 20]))
    np.testing.assert_array_equal(have, [[1, 0] + [NO_TOKEN] * 5, [39, 38, 37, 36, 35, 34, 33]])


@pytest.mark.parametrize(("min_match", "want"), [(3, ([5, 6], 3)), (4, NONE)])
def test_a_match_in_the_middle_and_min_match(min_match, want):
    assert draft_one([(PROMPT, [1, 2, 3, 4, 5, 6])], (PROMPT, [9, 2, 3, 4]), min_match=min_match) == want


def test_the_longest_match_wins_over_the_nearest():
    group = [(PROMPT, [1, 2, 3, 4, 50, 0, 2, 3, 4, 60])]
    assert draft_one(group, (PROMPT, [9, 9, 9, 9, 9, 1, 2, 3, 4]))[0][0] == 50  # 4 tokens, at a distance of 5
    assert draft_one(group, (PROMPT, [9, 9, 9, 9, 9, 9, 2, 3, 4]))[0][0] == 60  # 3 tokens each: the nearer


def test_the_longest_match_over_all_texts_decides_alone():
    """Back-off: two texts that match three tokens have no say against one that matches four, whatever their votes."""
    group = [(PROMPT, [2, 3, 4, 60]), (PROMPT, [1, 2, 3, 4, 50]), (PROMPT, [2, 3, 4, 60])]
    assert draft_one(group, (PROMPT, [9, 1, 2, 3, 4]), [5, 0.1, 5]) == ([50], 4)
    assert draft_one(group, (PROMPT, [9, 9, 2, 3, 4]), [5, 0.1, 5]) == ([60], 3)


def test_matches_longer_than_the_maximum_are_equal():
    """Both texts match at least 7 tokens; the one of 9 is no better: each has a vote."""
    run = [1, 2, 3, 4, 5, 6, 7]
    both = [([0], [8, 9, *run, 50]), ([0], [8, 0, *run, 60])]
    assert draft_one(both, ([0], [8, 9, *run]), min_prob=0.6) == NONE
    assert draft_one(both, ([0], [8, 9, *run]), min_prob=0.5) == ([50], MAX_MATCH)


REPEATED = [(PROMPT, [1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3, 70])]


@pytest.mark.parametrize(
    ("length", "shift", "next_token"),
    [
        pytest.param(3, 0, 50, id="first"),
        pytest.param(5, 0, 60, id="equally near: the later"),
        pytest.param(6, 0, 60, id="second, from before"),
        pytest.param(8, 0, 60, id="second, from after"),
        pytest.param(9, 0, 70, id="equally near once more"),
        pytest.param(11, 0, 70, id="third"),
        pytest.param(T + 4, 0, 70, id="the last, from beyond the text"),
        pytest.param(8, 1, 70, id="where the row's shift says"),
        pytest.param(8, -4, 50, id="where its shift says, earlier"),
        pytest.param(3, -40, 50, id="a shift out of the text"),
    ],
)
def test_the_nearest_of_equally_long_matches(length, shift, next_token):
    """A row of `length` response tokens, the last three of which stand three times in the response."""
    assert draft_one(REPEATED, (PROMPT, [9] * (length - 3) + [1, 2, 3]), shift=shift)[0][0] == next_token


@pytest.mark.parametrize("here", [0, MAX_MATCH, P - 1, P + 9, 2**25])
def test_matches_at_both_ends_of_a_text(here):
    """Its first token may be next, and its last, from wherever one looks."""
    texts_GRP = np.stack([text(PROMPT, range(100, 100 + T)), text(PROMPT, [1, 2])])[None]
    for context, want in (
        ([14, 13, 12, 11], ([MAX_MATCH, MAX_MATCH], [4, 4])),
        ([98 + T, 97 + T, 96 + T, 95 + T], ([P - 1, None], [4, 0])),
        ([99 + T, 98 + T, 97 + T, 96 + T], ([None, None], [0, 0])),  # nothing follows the end of the array
    ):
        context_BM = np.array([[*context, *[NO_TOKEN] * 3]])
        next_BR, match_BR = suffix_match(texts_GRP, np.array([0]), context_BM, np.array([here]))
        assert match_BR[0].tolist() == want[1]
        assert all(w is None or n == w for n, w in zip(next_BR[0].tolist(), want[0], strict=True))


def test_separators_are_neither_drafted_nor_matched():
    """A draft ends with its response, and padding to the left of a short prompt matches nothing."""
    group = [([5], [1, 2, 3])]
    assert draft_one(group, ([5], [1])) == NONE  # only 2 tokens match: 1, 5, then padding
    assert draft_one(group, ([5], [1]), min_match=2) == ([2, 3], 2)
    assert draft_one(group, ([SEPARATOR] * 3, []), min_match=1) == NONE
    assert draft_one(group, ([NO_TOKEN] * 3, []), min_match=1) == NONE


def test_nothing_follows_the_end_of_a_response():
    assert draft_one([(PROMPT, [1, 2, 3])], (PROMPT, [1, 2, 3])) == NONE
    # A response that fills its row: the end of the array is an end too, not a repetition of the last token.
    full = list(range(100, 100 + T))
    assert draft_one([(PROMPT, full)], (PROMPT, full)) == NONE
    assert draft_one([(PROMPT, full)], (PROMPT, full[:-2])) == (full[-2:], MAX_MATCH)


def test_an_empty_response_votes_for_nothing():
    assert draft_one([(PROMPT, []), (PROMPT, [1, 2])], (PROMPT, []), min_prob=1.0) == ([1, 2], 4)
    assert draft_one([(PROMPT, [])], (PROMPT, [])) == NONE


def test_texts_of_weight_zero_do_not_count():
    """Neither as voters nor as the longest match, which would silence the others."""
    group = [(PROMPT, [1, 2, 3, 4, 50]), (PROMPT, [9, 2, 3, 4, 60])]
    row = (PROMPT, [1, 2, 3, 4])
    assert draft_one(group, row, [1, 1]) == ([50], MAX_MATCH)
    assert draft_one(group, row, [0, 1]) == ([60], 3)
    assert draft_one(group, row, [0, 0]) == NONE


@pytest.mark.parametrize("max_drafts", [1, 2, 4])
def test_max_drafts(max_drafts):
    assert draft_one([(PROMPT, [1, 2, 3, 4])], (PROMPT, []), max_drafts=max_drafts)[0] == [1, 2, 3, 4][:max_drafts]


# --- the vote -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "weights", "min_prob", "want"),
    [
        # 1 2 3 9 foretells 4 + 2 + 1 + 0 tokens, 1 2 4 3 + 2 + 1 + 0, 1 5 6 3 + 1 + 1 + 0, 7 5 6 only its own 3.
        pytest.param(["1239", "124", "156", "756"], [1, 1, 1, 1], 0.0, ("1239", 0), id="the largest agreement"),
        pytest.param(["124", "1239", "156", "756"], [1, 1, 1, 1], 0.0, ("1239", 1), id="whatever the order"),
        pytest.param(["1239", "124", "156", "756"], [1, 1, 1, 1], 0.25, ("1239", 0), id="exactly min_prob goes on"),
        pytest.param(["1239", "124", "156", "756"], [1, 1, 1, 1], 0.3, ("12", 0), id="of the weight of all voters"),
        pytest.param(["1239", "124", "156", "756"], [1, 1, 1, 1], 0.5, ("12", 0), id="two of four"),
        pytest.param(["1239", "124", "156", "756"], [1, 1, 1, 1], 0.6, ("1", 0), id="three of four"),
        pytest.param(["1239", "124", "156", "756"], [1, 1, 1, 1], 0.8, ("", 0), id="no majority, no draft"),
        pytest.param(["1239", "124", "156", "756"], [1, 1, 3, 1], 0.0, ("156", 2), id="a weight shifts the path"),
        pytest.param(["1239", "124", "156", "756"], [1, 1, 1, 4], 0.0, ("756", 3), id="a weight against all others"),
        pytest.param(["1239", "124", "156", "756"], [0, 0, 0, 4], 1.0, ("756", 3), id="unanimity of one"),
        pytest.param(["1239", "124", "156", "756"], [1, 1, 1, 4], 1.0, ("", 3), id="unanimity wanted"),
        pytest.param(["12", "34"], [1, 1], 0.0, ("12", 0), id="ties to the first"),
        pytest.param(["12", "34", "34"], [2, 1, 1], 0.0, ("12", 0), id="also by weight against number"),
        pytest.param(["12", "34", "34"], [1, 1, 1], 0.0, ("34", 1), id="the first of the equal winners"),
        # Token by token, 1 would win, the first with two votes; but 2 3 4 5 foretells four tokens of two voters.
        pytest.param(["19", "18", "2345", "2345"], [1, 1, 1, 1], 0.0, ("2345", 2), id="far agreement beats near"),
        pytest.param(["123456", "1", "1", "1", "1"], [1] * 5, 0.5, ("1", 0), id="a long path ends with its votes"),
        pytest.param(["1", "12"], [1, 1], 0.0, ("12", 1), id="a path goes on while any of its voters does"),
        pytest.param(["1", "12"], [1, 1], 0.6, ("1", 1), id="if that is enough"),
        pytest.param(["", "12"], [1, 1], 0.0, ("12", 1), id="a voter with nothing to say"),
        pytest.param(["", "12"], [3, 1], 0.5, ("", 1), id="but with a vote"),
        pytest.param(["", ""], [0, 1], 0.0, ("", 1), id="the only voter, with nothing to say"),
        pytest.param(["12", "13"], [0, 0], 0.0, ("", None), id="no voter"),
        pytest.param(["1", "21", "31"], [1, 1, 1], 0.0, ("21", 1), id="a later 1 is not the same 1"),
    ],
)
def test_vote(paths, weights, min_prob, want):
    padded = [[*map(int, p), *[SEPARATOR] * J][:J] for p in paths]
    tokens_BJ, length_B, winner_B = vote(np.array([padded], np.int32), np.array([weights], np.float32), min_prob)
    assert "".join(map(str, tokens_BJ[0, : length_B[0]].tolist())) == want[0]
    assert want[1] is None or winner_B[0] == want[1]
    path, winner = slow_vote([list(map(int, p)) for p in paths], weights, min_prob)
    assert ("".join(map(str, path)), want[1]) == want, "the oracle disagrees with the table"
    assert want[1] is None or winner == want[1]


def test_elections_of_rows_are_their_own():
    rng = np.random.default_rng(0)
    paths_BRJ, weight_BR = rng.integers(0, 2, (20, 4, J)), rng.integers(0, 3, (20, 4)).astype(np.float32)
    whole = vote(paths_BRJ, weight_BR, 0.3)
    for b in range(20):
        for x, y in zip(vote(paths_BRJ[b : b + 1], weight_BR[b : b + 1], 0.3), whole, strict=True):
            np.testing.assert_array_equal(x[0], y[b])


# --- each source ----------------------------------------------------------------------------------------------

HISTORY_SAYS, SIBLING_SAYS, SELF_SAYS, PROMPT_SAYS = 51, 52, 53, 54
SAID = [1, 2, 3]


def one_of_each(sources, order=(0, 1), **options):
    """Two rows of a group. What follows 1 2 3 is known from each source, differently; the second row has said 1 2 3
    already, and goes on to say it again.
    """
    prompt = [*SAID, PROMPT_SAYS, 9]
    history = block([[(prompt, [*SAID, HISTORY_SAYS])]])
    rows = [(prompt, [8, *SAID, SIBLING_SAYS]), (prompt, [7, 7, *SAID, SELF_SAYS, 6, *SAID])]
    return draft_all(history, [rows[i] for i in order], sources=sources, max_drafts=1, **options)[order.index(1)]


@pytest.mark.parametrize(
    ("sources", "want"),
    [
        (("history",), ([HISTORY_SAYS], 3, HISTORY, 0)),
        (("siblings",), ([SIBLING_SAYS], 3, SIBLINGS, 0)),
        (("self",), ([SELF_SAYS], 3, SELF, 0)),
        ((), ([], None, None, 0)),
    ],
)
def test_each_source_alone(sources, want):
    """The prompt knows it as well, in its turn: after the row's own text."""
    assert one_of_each(sources) == want
    assert one_of_each(sources, order=(1, 0)) == want


@pytest.mark.parametrize(
    ("off", "want"),
    [
        ("history", {SIBLING_SAYS, SELF_SAYS, PROMPT_SAYS}),
        ("siblings", {HISTORY_SAYS, SELF_SAYS, PROMPT_SAYS}),
        ("self", {HISTORY_SAYS, SIBLING_SAYS}),
    ],
)
def test_each_source_switched_off(off, want):
    """Each text that is on votes for a token of its own. A threshold of exactly the winner's share of their weight
    lets it pass, and a little more does not: no other text votes.
    """
    sources = tuple(s for s in ALL if s != off)
    total = ("history" in sources) * 1.0 + LIVE_WEIGHT * (len(want) - ("history" in sources))
    first = 1.0 if "history" in sources else LIVE_WEIGHT
    tokens, *_ = one_of_each(sources, min_prob=first / total)
    assert tokens[0] in want
    assert one_of_each(sources, min_prob=first / total + 0.01)[0] == []


def test_a_right_answer_outvotes_live_texts_and_they_a_wrong_one():
    """By the weights of the store: 1.1 for a right answer, 0.1 for a wrong one; LIVE_WEIGHT is between."""
    for weight, source in ((1.1, HISTORY), (0.1, SIBLINGS)):
        history = block([[(PROMPT, [*SAID, HISTORY_SAYS])]], [[weight]])
        rows = [(PROMPT, [*SAID, SIBLING_SAYS]), (PROMPT, SAID)]
        assert draft_all(history, rows, max_drafts=1)[1][2] == source


def test_the_prompt_is_a_text_of_its_own():
    """A question's words come again in the answer, before anything else is known."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert draft_all(block([[]]), [(prompt, [2, 3, 4])]) == [([5, 6, 7, 8, 9], 3, SELF, 0)]
    assert draft_all(block([[]]), [(prompt, [])]) == [([], None, None, 0)]
    assert draft_all(block([[]]), [(prompt, [2, 3, 4])], sources=("history", "siblings")) == [([], None, None, 0)]


def test_a_row_is_not_drafted_from_its_own_end():
    """The tokens just said match themselves, but nothing follows them."""
    assert draft_all(block([[]]), [(PROMPT, [1, 2, 3, 4])]) == [([], None, None, 0)]
    assert draft_all(block([[]]), [(PROMPT, [1, 2, 3, 1, 2, 3])]) == [([1, 2, 3], 3, SELF, 0)]


def test_a_live_text_is_a_sibling_to_others_and_self_to_its_row():
    rows = [(PROMPT, [1, 2, 3, 4, 1, 2, 3]), (PROMPT, [1, 2, 3])]
    have = draft_all(block([[]]), rows, max_drafts=1)
    assert have == [([4], 3, SELF, 0), ([4], 7, SIBLINGS, 0)]


def test_siblings_that_lead_are_followed():
    """From the first token on: the prompt's tail is context in live texts too."""
    rows = [(PROMPT, [1, 2, 3]), (PROMPT, []), (PROMPT, [1])]
    have = draft_all(block([[]]), rows)
    assert have == [([], None, None, 0), ([1, 2, 3], 4, SIBLINGS, 0), ([2, 3], 5, SIBLINGS, 0)]


def test_rows_draw_from_their_own_group():
    history = block([[(PROMPT, [1, 2, 3])], [(PROMPT, [4, 5, 6])], [(PROMPT, [7, 8, 9])]])
    have = draft_all(history, [(PROMPT, [])] * 4, [2, 0, 1, 2])
    assert [tokens for tokens, *_ in have] == [[7, 8, 9], [1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_votes_are_of_the_rows_own_group():
    """The same texts in two groups, with other weights: each group decides by its own."""
    group = [(PROMPT, [1, 2, 3]), (PROMPT, [4, 5, 6])]
    history = block([group, group, group], [[1, 2], [2, 1], [0, 1]])
    have = draft_all(history, [(PROMPT, [])] * 4, [0, 1, 2, 1], sources=("history",))
    assert [tokens for tokens, *_ in have] == [[4, 5, 6], [1, 2, 3], [4, 5, 6], [1, 2, 3]]


@hypothesis.given(batches(), letters(T), letters(9, 1))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_groups_do_not_see_each_other(batch, other, prompt):
    """Whatever group 1 has said, and whatever its prompt, group 0 drafts the same."""
    history, rows, group_B, options = batch
    before = draft_all(history, rows, group_B, **options)[:SAMPLES]
    history.tokens_GRP[1], history.weight_GR[1] = text(prompt, other), 8
    rows = rows[:SAMPLES] + [(prompt, other)] * SAMPLES
    assert draft_all(history, rows, group_B, **options)[:SAMPLES] == before


def test_rows_do_not_depend_on_their_batch():
    """Alone or among others, a row's draft is the same, if the texts are."""
    rng = np.random.default_rng(0)
    history = block([[(PROMPT, rng.integers(0, 3, T)) for _ in range(3)]])
    rows = [(PROMPT, rng.integers(0, 3, n).tolist()) for n in range(3, 11)]
    reader = reader_of(8, 0, 3 + np.arange(8), np.arange(8) % 4 - 1)
    corpus = told(make_corpus(history, [np.int32(PROMPT)], 8, DraftRules()), reader, rows)
    whole = read(fast(corpus, reader, beliefs(), ALL, 2, 0.1, *buffer(rows), J))
    assert len({x for _, _, x, _ in whole}) > 1
    for b in range(8):
        one = jax.tree.map(lambda x, b=b: x[b : b + 1], reader)
        assert read(fast(corpus, one, beliefs(), ALL, 2, 0.1, *buffer(rows[b : b + 1]), J)) == [whole[b]]


# --- the own earlier response ---------------------------------------------------------------------------------

OLD = list(range(100, 100 + T + 14))  # all different: what is right can only come from the right place
WIDE = MAX_MATCH + 40


def walk(old, new, sources=("history",), min_match=3, count=3, values=None, history=None):
    """(how many of `count` drafted tokens are right, source, shift) at each position of `new`, said one by one by a
    row whose own earlier response is `old`.
    """
    history = block([[(PROMPT, old)]], positions=WIDE) if history is None else history
    reader = reader_of(1, 0, history.tokens_GRP.shape[1], 0)
    corpus = make_corpus(history, [np.int32(PROMPT)], 1, DraftRules(sources))
    steps = []
    for t in range(len(new)):
        row = (PROMPT, list(new[:t]))
        corpus = told(corpus, reader, [row])
        drafted = fast(corpus, reader, beliefs(values), sources, min_match, 0.0, *buffer([row]), count)
        tokens, _, source, shift = read(drafted)[0]
        reader = reader.replace(shift_B=np.asarray(drafted.shift_B))
        steps.append((common(tokens, list(new[t:])), source, shift))
    return steps


def test_an_unchanged_response_is_foretold_to_its_end():
    steps = walk(OLD, OLD)
    assert [right for right, *_ in steps] == [*[3] * (len(OLD) - 3), 3, 2, 1]
    assert {(source, shift) for _, source, shift in steps} == {(OWN, 0)}


def test_the_own_response_is_followed_without_any_match():
    """At the row's own position; from other texts there would be no draft."""
    steps = walk(OLD, [1, *OLD[1:5], 2, 3, 4, *OLD[8:12]])
    # After 1 there is no context in common; 101 and 102 are nevertheless right.
    assert [right for right, *_ in steps] == [0, 3, 3, 2, 1, 0, 0, 0, 3, 3, 2, 1]
    assert {shift for *_, shift in steps} == {0}


EDITS = {
    # name: (new response, position of the edit, tokens said anew, shift after it)
    "substitution": ([*OLD[:8], 1, *OLD[9:20]], 8, 1, 0),
    "substitution of three": ([*OLD[:8], 1, 2, 3, *OLD[11:20]], 8, 3, 0),
    "insertion": ([*OLD[:8], 1, *OLD[8:20]], 8, 1, -1),
    "insertion of four": ([*OLD[:8], 1, 2, 3, 4, *OLD[8:20]], 8, 4, -4),
    "deletion": ([*OLD[:8], *OLD[9:22]], 8, 0, 1),
    "deletion of five": ([*OLD[:8], *OLD[13:26]], 8, 0, 5),
    "one for three": ([*OLD[:8], 1, *OLD[11:24]], 8, 1, 2),
    "at the start": ([1, *OLD[:12]], 0, 1, -1),
    "the first token left out": (OLD[1:14], 0, 0, 1),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("min_match", [1, 3, 5])
def test_drafts_are_right_again_after_a_divergence(name, min_match):
    """At once where the positions still agree; else as soon as min_match tokens say where the row went on."""
    new, edit, said, shift = EDITS[name]
    steps = walk(OLD, new, min_match=min_match)
    for t, (right, source, have) in enumerate(steps):
        assert source == OWN
        again = edit + said + (min_match if shift else 0)
        if t < edit:
            assert (right, have) == (min(3, edit - t), 0)
        elif t >= again:
            assert (right, have) == (min(3, len(new) - t), shift), t
        else:
            assert (right, have) == (0, 0), t


def test_a_shift_outlasts_a_second_divergence():
    """After an insertion, a substitution is stepped over where it stands: the row's position says so, shifted."""
    new = [*OLD[:5], 1, *OLD[5:10], 2, *OLD[11:20]]
    steps = walk(OLD, new)
    assert [shift for *_, shift in steps[9:]] == [-1] * (len(new) - 9)
    assert [right for right, *_ in steps[9:15]] == [2, 1, 0, 3, 3, 3]  # 2 stands at 11


def test_shifts_add_up():
    new = [*OLD[:5], 1, *OLD[5:10], 2, 3, *OLD[10:16], *OLD[20:30]]
    steps = walk(OLD, new)
    want = {
        4: (1, 0),
        9: (2, -1),
        10: (1, -1),
        11: (0, -1),
        13: (0, -1),
        16: (3, -3),
        18: (1, -3),
        22: (3, 1),
        24: (3, 1),
    }
    assert {t: (steps[t][0], steps[t][2]) for t in want} == want


def test_the_shift_tells_repetitions_apart():
    """A loop of period 4 in the old response. The new one says one token more before it: of the equally long matches
    that near the shifted position is right, and its exit is foretold.
    """
    loop = [1, 2, 3, 4]
    old = [*OLD[:4], *loop * 4, 50, 51, 52]
    new = [*OLD[:2], 60, 61, 62, *OLD[2:4], *loop * 4, 50, 51, 52]  # all later by 3, most of a period
    steps = walk(old, new, min_match=2, count=3)
    aligned = new.index(1)
    assert steps[aligned:] == [(min(3, len(new) - t), OWN, -3) for t in range(aligned, len(new))]
    # Twelve tokens into the loop, the unshifted position is nearer to its exit.
    row = (PROMPT, new[: aligned + 12])
    history = block([[(PROMPT, old)]], positions=WIDE)
    assert draft_all(history, [row], sources=("history",), own=0, max_drafts=3) == [([50, 51, 52], 7, OWN, 1)]
    assert draft_all(history, [row], sources=("history",), own=0, max_drafts=3, shift=-3) == [([1, 2, 3], 7, OWN, -3)]


VALUES = [(2.0, 1.0, OWN), (1.0, 2.0, HISTORY), (1.0, 1.0, OWN)]


@pytest.mark.parametrize(("own_value", "other_value", "source"), VALUES)
def test_the_own_response_and_the_vote_are_compared_by_belief(own_value, other_value, source):
    """At the match lengths that each has: 3 tokens of the own response, 5 of another. All other values would decide
    otherwise.
    """
    history = block([[(PROMPT, [8, 8, 3, 4, 5, 60]), (PROMPT, [1, 2, 3, 4, 5, 70])]])
    values = np.full(SHAPE_XM, 9.0 if source == HISTORY else 0.0)
    values[[HISTORY, SIBLINGS, SELF]] = 0.0 if source == HISTORY else 9.0
    values[OWN, 3], values[HISTORY, 5] = own_value, other_value
    row = (PROMPT, [7, 1, 2, 3, 4, 5])
    want = {OWN: ([60], 3, OWN, -1), HISTORY: ([70], 5, HISTORY, 0)}[source]
    assert draft_all(history, [row], own=0, values=values) == [want]


@pytest.mark.parametrize("voted", [HISTORY, SIBLINGS, SELF])
@pytest.mark.parametrize("better", [False, True])
def test_the_belief_of_the_source_that_won_the_vote_counts(voted, better):
    """And of no other: the own response is worth 5, other sources as much less or more as would decide otherwise."""
    source = ["history", "siblings", "self"][voted]
    texts = {"history": [[*SAID, 70]], "siblings": [], "self": []}[source]
    history = block([[(PROMPT, [8, 8, 60, 60]), *((PROMPT, x) for x in texts)]])
    first = [9, *SAID, 70] if source == "siblings" else []
    second = [7, *SAID, 70, 6, *SAID] if source == "self" else [9, *SAID]
    rows = [(PROMPT, first), (PROMPT, second)]
    values = np.full(SHAPE_XM, 9.0 if better else 0.0)
    values[OWN], values[voted] = 5, 1 if better else 8
    # Rather than by a match, the own response is followed at the row's position.
    tokens, _, have, _ = draft_all(history, rows, own=[-1, 0], shift=2 - len(rows[1][1]), values=values)[1]
    assert (tokens[0], have) == ((60, OWN) if better else (70, voted))


@pytest.mark.parametrize("min_match", [3, 7])
def test_the_own_response_needs_no_belief_where_there_is_no_vote(min_match):
    values = np.full(SHAPE_XM, 9.0)
    values[OWN] = -1
    history = block([[(PROMPT, OLD[:10]), (PROMPT, [1, 2])]])
    row = (PROMPT, [7, 8])
    assert draft_all(history, [row], own=0, values=values, min_match=min_match) == [(OLD[2:8], 0, OWN, 0)]


def test_no_own_draft_past_its_end():
    history = block([[(PROMPT, [1, 2, 3]), (PROMPT, [1, 2, 3, 4, 5, 6])]])
    assert draft_all(history, [(PROMPT, [1, 2])], own=0) == [([3], 6, OWN, 0)]
    assert draft_all(history, [(PROMPT, [1, 2, 3])], own=0) == [([4, 5, 6], 7, HISTORY, 0)]
    assert draft_all(history, [(PROMPT, OLD[:30])], own=0) == [([], None, None, 0)]
    strange = list(range(200, 200 + T))
    full = block([[(PROMPT, OLD[:T])]])  # fills its row: what follows its end is nothing, not its last token
    assert draft_all(full, [(PROMPT, strange)], own=0) == [([], None, None, 0)]
    assert draft_all(full, [(PROMPT, strange[1:])], own=0) == [([OLD[T - 1]], 0, OWN, 0)]


def test_the_shift_is_kept_while_others_are_followed():
    """The own response is found elsewhere, but not chosen: nothing is known of where it goes on."""
    history = block([[(PROMPT, [8, 3, 4, 5, 60]), (PROMPT, [1, 2, 3, 4, 5, 70])]])
    values = np.zeros(SHAPE_XM)
    values[HISTORY] = 1
    row = (PROMPT, [1, 2, 3, 4, 5])
    assert draft_all(history, [row], own=0, values=values, shift=2) == [([70], 7, HISTORY, 2)]


def test_without_history_there_is_no_own_response():
    """Its text is not in the corpus, even where the reader points to it."""
    history = block([[(PROMPT, OLD[:8])]])
    assert draft_all(history, [(PROMPT, OLD[:2])], sources=("siblings", "self"), own=0) == [([], None, None, 0)]


def test_each_row_has_its_own_response():
    history = block([[(PROMPT, [1, 2, 3]), (PROMPT, [4, 5, 6])]])
    have = draft_all(history, [(PROMPT, [])] * 3, own=[1, 0, -1])
    assert have == [([4, 5, 6], 4, OWN, 0), ([1, 2, 3], 4, OWN, 0), ([1, 2, 3], 4, HISTORY, 0)]


def test_an_own_response_of_no_vote_is_followed():
    """A wrong answer's weight may be 0; that it will be said again does not depend on it."""
    history = block([[(PROMPT, [1, 2, 3])]], [[0]])
    assert draft_all(history, [(PROMPT, [])], own=0) == [([1, 2, 3], 4, OWN, 0)]


# --- from the store -------------------------------------------------------------------------------------------


def test_from_the_store():
    """Store, query, draft: prompts in the order of the query, unseen ones and unused slots silent, of equal votes the
    most recent visit's, and the own response by its sample and its noise.
    """
    store = HistoryStore(depth=2, max_tokens=1000)
    other = [21, 22, 23]

    def add(prompt, step, *responses):
        visit = [Response(np.array(r, np.int32), 0.0, step, step, i, 100 + i) for i, r in enumerate(responses)]
        store.add(prompt, visit)

    rows = [(PROMPT, []), ([31, 32, 33], []), (other, [4, 5, 6]), (PROMPT, [])]
    queried = [PROMPT, [31, 32, 33], other]

    def query():
        return store.query(queried, group_slots=4, response_slots=4, token_slots=T)

    def from_history(**options):
        have = draft_all(query(), rows, [0, 1, 2, 0], sources=("history",), **options)
        return [(tokens, match) for tokens, match, *_ in have]

    add(PROMPT, 1, [1, 2, 3])
    add(other, 1, [4, 5, 6, 7, 8], [4, 5, 6, 7, 9])
    have = from_history()
    assert [have[0], have[1], have[3]] == [([1, 2, 3], 4), NONE, ([1, 2, 3], 4)]
    assert have[2] == ([7, 9], 6)  # the last of a visit comes first

    add(PROMPT, 2, [1, 5, 5], [6, 6, 6])
    add(other, 2, [4, 5, 6, 7, 8])
    assert from_history()[2] == ([7, 8], 6)
    block_2 = query()
    owned = [own_response(block_2, 0, 0, 100), -1, own_response(block_2, 2, 1, 101), own_response(block_2, 0, 1, 101)]
    assert own_response(block_2, 0, 1, 100) == own_response(block_2, 1, 0, 100) == -1
    have = from_history(own=owned)
    assert have == [([1, 5, 5], 4), NONE, ([7, 9], 6), ([6, 6, 6], 4)]

    add(PROMPT, 3, [6])
    add(PROMPT, 4, [6])  # step 1 and 2 are gone now
    assert from_history()[0] == ([6], 4)
    assert own_response(query(), 0, 1, 101) == -1


def test_a_batch_of_drafts_is_compiled_once():
    """Not for each content: the shapes and the sources decide."""
    before = fast._cache_size()
    for response in ([1, 2, 3], [4, 5, 6, 7], []):
        draft_all(block([[(PROMPT, response)]], slots=2), [(PROMPT, [])] * 5, sources=("history",))
    assert fast._cache_size() <= before + 1
