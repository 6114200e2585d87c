"""Drafting from history against a slow reading of its description, and the traps of matching by shifts."""

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from rhyme_jax.history.store import HistoryStore, Response
from rhyme_jax.histospec.drafts import (
    MAX_MATCH,
    NO_TOKEN,
    SEPARATOR,
    HistoryBlock,
    draft_from_history,
    last_tokens,
    suffix_match,
    vote,
)

fast = jax.jit(draft_from_history, static_argnames="max_drafts")

P, S, J = MAX_MATCH + 16, 64, 6


def history_row(tail, response, positions=P) -> np.ndarray:
    row = np.full(positions, SEPARATOR, np.int32)
    tail = list(tail)[-MAX_MATCH:]
    row[MAX_MATCH - len(tail) : MAX_MATCH] = tail
    row[MAX_MATCH : MAX_MATCH + len(response)] = response
    return row


def block(groups, weights=None) -> HistoryBlock:
    """Of groups, each a list of (prompt, response); short groups are padded as the store pads them."""
    responses = max(1, max(len(g) for g in groups))
    tokens_GRP = np.full((len(groups), responses, P), SEPARATOR, np.int32)
    weight_GR = np.zeros((len(groups), responses), np.float32)
    for g, group in enumerate(groups):
        for r, (prompt, response) in enumerate(group):
            tokens_GRP[g, r] = history_row(prompt, response)
            weight_GR[g, r] = 1 if weights is None else weights[g][r]
    return HistoryBlock(tokens_GRP=tokens_GRP, weight_GR=weight_GR)


def drafts(history, rows, group_B, behind=0, max_drafts=J, min_match=3, min_prob=0.0):
    """[(drafted tokens, match)] for rows of (prompt, response so far); `behind` fills the buffer after them."""
    tokens_BS = np.full((len(rows), S), behind, np.int32)
    for b, (prompt, response) in enumerate(rows):
        tokens_BS[b, : len(prompt) + len(response)] = [*prompt, *response]
    draft = fast(
        history,
        np.array(group_B, np.int32),
        tokens_BS,
        np.array([len(p) + len(r) for p, r in rows], np.int32),
        np.array([len(p) for p, _ in rows], np.int32),
        max_drafts=max_drafts,
        min_match=min_match,
        min_prob=min_prob,
    )
    assert draft.tokens_BJ.shape == (len(rows), max_drafts)
    tokens_BJ, length_B, match_B = (np.asarray(x) for x in (draft.tokens_BJ, draft.length_B, draft.match_B))
    return [(tokens[:n].tolist(), int(m)) for tokens, n, m in zip(tokens_BJ, length_B, match_B, strict=True)]


def draft_one(group, row, weights=None, **options):
    return drafts(block([group], weights and [weights]), [row], [0], **options)[0]


# --- against an oracle ----------------------------------------------------------------------------------------


def longest_match(history, row, response_length) -> tuple[int, int]:
    """(match, index of the next token): the longest context before any next token; of equally long ones that
    nearest to the row's own position; of equally near ones the earlier.
    """
    best = (0, 0, 0)
    for index, token in enumerate(history):
        if token < 0:
            continue
        match = 0
        while match < min(MAX_MATCH, index, len(row)):
            before = history[index - 1 - match]
            if before < 0 or before != row[-1 - match]:
                break
            match += 1
        best = max(best, (match, -abs(index - MAX_MATCH - response_length), -index))
    return best[0], -best[2]


def slow_draft(tokens_RP, weight_R, row, prompt_length, max_drafts, min_match, min_prob):
    found = [
        (*longest_match(history, row, len(row) - prompt_length), history, weight)
        for history, weight in zip(tokens_RP.tolist(), weight_R.tolist(), strict=True)
        if weight > 0
    ]
    longest = max((match for match, *_ in found), default=0)
    if longest < min_match:
        return [], 0
    voters = [(history[index:], weight) for match, index, history, weight in found if match == longest]
    total, path = sum(weight for _, weight in voters), []
    while len(path) < max_drafts:
        voters = [(tokens, weight) for tokens, weight in voters if len(tokens) > len(path) and tokens[len(path)] >= 0]
        votes = {}  # in order of the block, so that `max` gives ties to the earlier response
        for tokens, weight in voters:
            votes[tokens[len(path)]] = votes.get(tokens[len(path)], 0) + weight
        if not votes:
            break
        winner = max(votes, key=votes.get)
        if votes[winner] < min_prob * total:
            break
        voters = [(tokens, weight) for tokens, weight in voters if tokens[len(path)] == winner]
        path.append(winner)
    return path, longest if path else 0


GROUPS, RESPONSES, ROWS = 2, 3, 4


def texts(longest):
    """Over three letters, so that matches abound; of all lengths alike, where `lists` alone prefers short ones."""
    return st.integers(0, longest).flatmap(lambda n: st.lists(st.integers(0, 2), min_size=n, max_size=n))


@st.composite
def batches(draw):
    prompts = [draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)) for _ in range(GROUPS)]
    groups, weights, rows = [], [], []
    for g in range(GROUPS):
        count = draw(st.integers(0, RESPONSES)) if g else RESPONSES  # the first fixes the shape
        groups.append([(prompts[g], draw(texts(P - MAX_MATCH))) for _ in range(count)])
        # Dyadic, so that sums are exact in float32 and a share of exactly min_prob is one in both.
        weights.append(draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5]), min_size=count, max_size=count)))
    group_B = draw(st.lists(st.integers(0, GROUPS - 1), min_size=ROWS, max_size=ROWS))
    for g in group_B:
        # Half of the rows repeat an earlier response for a while, and some are longer than any history row.
        copied = draw(st.sampled_from([r for _, r in groups[g]])) if groups[g] and draw(st.booleans()) else []
        own = copied[: draw(st.integers(0, len(copied)))] + draw(texts(38))
        rows.append((prompts[g], own))
    options = {"min_match": draw(st.integers(1, 7)), "min_prob": draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))}
    return block(groups, weights), rows, group_B, draw(st.integers(0, 2)), options


@hypothesis.given(batches())
@hypothesis.settings(max_examples=400, deadline=None, derandomize=True)
def test_matches_the_slow_reading(batch):
    history, rows, group_B, behind, options = batch
    have = drafts(history, rows, group_B, behind, **options)
    for b, (prompt, response) in enumerate(rows):
        g = group_B[b]
        row = (history.tokens_GRP[g], history.weight_GR[g], [*prompt, *response], len(prompt))
        assert have[b] == slow_draft(*row, J, **options), (b, row)


# --- where drafts come from -----------------------------------------------------------------------------------

PROMPT = [11, 12, 13, 14]


def test_the_first_token_is_drafted_from_the_prompt():
    assert draft_one([(PROMPT, [1, 2, 3, 4])], (PROMPT, [])) == ([1, 2, 3, 4], 4)


def test_the_whole_prompt_tail_counts_and_no_more():
    assert draft_one([(range(20, 40), [1, 2])], (range(20, 40), [])) == ([1, 2], MAX_MATCH)


def test_a_row_shorter_than_the_longest_match():
    """One or two tokens in all: context before the start equals nothing, also not the padding or the row's end."""
    assert draft_one([([5, 6], [1, 2])], ([5, 6], []), min_match=2) == ([1, 2], 2)
    assert draft_one([([5, 6], [1, 2])], ([5, 6], []), min_match=3) == ([], 0)
    assert draft_one([([5], [1, 2])], ([5], []), min_match=1) == ([1, 2], 1)


@pytest.mark.parametrize("behind", [NO_TOKEN, SEPARATOR, 4, 5])
def test_negative_positions_do_not_wrap(behind):
    """Before a one-token row comes nothing. A wrapped index would read the end of the buffer and find 4, 5."""
    group = [([4], [5, 7, 7]), ([3, 3], [5, 8, 8])]
    assert draft_one(group, ([5], []), behind=behind, min_match=1) == ([7, 7], 1)
    assert draft_one(group, ([5], []), behind=behind, min_match=2) == ([], 0)


def test_last_tokens():
    tokens_BS = np.arange(40).reshape(2, 20)
    have = last_tokens(tokens_BS, np.array([2, 20]))
    np.testing.assert_array_equal(have, [[1, 0] + [NO_TOKEN] * 5, [39, 38, 37, 36, 35, 34, 33]])


def test_a_match_in_the_middle():
    assert draft_one([(PROMPT, [1, 2, 3, 4, 5, 6])], (PROMPT, [9, 2, 3, 4])) == ([5, 6], 3)


@pytest.mark.parametrize(("min_match", "want"), [(3, ([5, 6], 3)), (4, ([], 0))])
def test_min_match(min_match, want):
    assert draft_one([(PROMPT, [1, 2, 3, 4, 5, 6])], (PROMPT, [9, 2, 3, 4]), min_match=min_match) == want


def test_the_longest_match_wins_over_the_nearest():
    group = [(PROMPT, [1, 2, 3, 4, 50, 0, 2, 3, 4, 60])]
    assert draft_one(group, (PROMPT, [9, 9, 9, 9, 9, 1, 2, 3, 4]))[0][0] == 50  # 4 tokens, at a distance of 5
    assert draft_one(group, (PROMPT, [9, 9, 9, 9, 9, 9, 2, 3, 4]))[0][0] == 60  # 3 tokens each: the nearer


def test_matches_longer_than_the_maximum_are_equal():
    """Both occurrences match at least 7 tokens; the one of 9 is no better, the nearer is taken."""
    run = [1, 2, 3, 4, 5, 6, 7]
    group = [([0], [8, 9, *run, 50])], [([0], [8, 0, *run, 60])]
    both = [group[0][0], group[1][0]]
    assert draft_one(both, ([0], [8, 9, *run]), min_prob=0.6) == ([], 0)  # one vote each
    assert draft_one(both, ([0], [8, 9, *run]), min_prob=0.5) == ([50], MAX_MATCH)


REPEATED = [(PROMPT, [1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3, 70])]


@pytest.mark.parametrize(
    ("length", "next_token"),
    [
        pytest.param(3, 50, id="first"),
        pytest.param(5, 50, id="equally near: the earlier"),
        pytest.param(6, 60, id="second, from before"),
        pytest.param(8, 60, id="second, from after"),
        pytest.param(11, 70, id="third"),
        pytest.param(40, 70, id="far beyond the end of every response"),
    ],
)
def test_the_nearest_of_equally_long_matches(length, next_token):
    """A row of `length` response tokens, the last three of which stand three times in the response."""
    assert draft_one(REPEATED, (PROMPT, [9] * (length - 3) + [1, 2, 3]))[0][0] == next_token


def test_rows_draw_from_their_own_group():
    history = block([[(PROMPT, [1, 2, 3])], [(PROMPT, [4, 5, 6])], [(PROMPT, [7, 8, 9])]])
    have = drafts(history, [(PROMPT, [])] * 4, [2, 0, 1, 2])
    assert [tokens for tokens, _ in have] == [[7, 8, 9], [1, 2, 3], [4, 5, 6], [7, 8, 9]]


# --- separators -----------------------------------------------------------------------------------------------


def test_separators_are_neither_drafted_nor_matched():
    """A draft ends with its response, and padding to the left of a short prompt matches nothing."""
    group = [([5], [1, 2, 3])]
    assert draft_one(group, ([5], [1])) == ([], 0)  # only 2 tokens match: 1, 5, then padding
    assert draft_one(group, ([5], [1]), min_match=2) == ([2, 3], 2)


def test_nothing_follows_the_end_of_a_response():
    assert draft_one([(PROMPT, [1, 2, 3])], (PROMPT, [1, 2, 3])) == ([], 0)
    # A response that fills its row: the end of the array is an end too, not a repetition of the last token.
    full = list(range(100, 100 + P - MAX_MATCH))
    assert draft_one([(PROMPT, full)], (PROMPT, full)) == ([], 0)
    assert draft_one([(PROMPT, full)], (PROMPT, full[:-2])) == (full[-2:], MAX_MATCH)


def test_an_empty_response_votes_for_nothing():
    assert draft_one([(PROMPT, []), (PROMPT, [1, 2])], (PROMPT, []), min_prob=1.0) == ([1, 2], 4)
    assert draft_one([(PROMPT, [])], (PROMPT, [])) == ([], 0)


@pytest.mark.parametrize("min_prob", [0.0, 0.1])
def test_padded_groups_draft_nothing(min_prob):
    history = block([[(PROMPT, [1, 2, 3])], []])
    assert (
        drafts(history, [(PROMPT, []), ([0], []), ([SEPARATOR] * 9, [])], [1, 1, 1], min_prob=min_prob) == [([], 0)] * 3
    )


def test_responses_of_weight_zero_do_not_count():
    """Neither as voters nor as the longest match, which would silence the others."""
    group = [(PROMPT, [1, 2, 3, 4, 50]), (PROMPT, [9, 2, 3, 4, 60])]
    row = (PROMPT, [1, 2, 3, 4])
    assert draft_one(group, row, [1, 1]) == ([50], MAX_MATCH)
    assert draft_one(group, row, [0, 1]) == ([60], 3)
    assert draft_one(group, row, [0, 0]) == ([], 0)


# --- the vote -------------------------------------------------------------------------------------------------

VOTERS = [(PROMPT, [1, 2, 3, 9]), (PROMPT, [1, 2, 4]), (PROMPT, [1, 5, 6]), (PROMPT, [7, 5, 6])]


@pytest.mark.parametrize(
    ("weights", "min_prob", "path"),
    [
        pytest.param([1, 1, 1, 1], 0.0, [1, 2, 3, 9], id="most votes, ties to the earlier response"),
        pytest.param([1, 1, 1, 1], 0.25, [1, 2, 3, 9], id="a share of exactly min_prob goes on"),
        pytest.param([1, 1, 1, 1], 0.3, [1, 2], id="the share is of the initial weight, all along the path"),
        pytest.param([1, 1, 1, 1], 0.5, [1, 2], id="two of four"),
        pytest.param([1, 1, 1, 1], 0.6, [1], id="three of four"),
        pytest.param([1, 1, 1, 1], 0.8, [], id="no majority, no draft"),
        pytest.param([1, 1, 3, 1], 0.0, [1, 5, 6], id="a weight shifts a later vote"),
        pytest.param([1, 1, 1, 4], 0.0, [7, 5, 6], id="a weight shifts the first vote"),
        pytest.param([1, 2, 1, 1], 0.0, [1, 2, 4], id="a weight breaks the tie; the path ends with its response"),
        pytest.param([1, 1, 1, 4], 1.0, [], id="unanimity wanted"),
        pytest.param([0, 0, 0, 4], 1.0, [7, 5, 6], id="unanimity of one"),
        pytest.param([0.5, 0.25, 0.125, 0], 0.5, [1, 2, 3, 9], id="fractions"),
    ],
)
def test_vote(weights, min_prob, path):
    tokens, match = draft_one(VOTERS, (PROMPT, []), weights, min_prob=min_prob)
    assert tokens == path
    assert match == (4 if path else 0)


def test_losers_do_not_vote_on():
    """[1, 2] and [3, 5], [4, 5]: 1 wins with two votes, and 5, with two, is not what follows it."""
    group = [(PROMPT, x) for x in ([1, 2], [1, 6], [3, 5], [4, 5])]
    assert draft_one(group, (PROMPT, []))[0] == [1, 2]


def test_a_path_goes_on_while_any_of_its_responses_does():
    assert draft_one([(PROMPT, [1]), (PROMPT, [1, 2])], (PROMPT, []), min_prob=0.5)[0] == [1, 2]
    assert draft_one([(PROMPT, [1]), (PROMPT, [1, 2])], (PROMPT, []), min_prob=0.6)[0] == [1]


@pytest.mark.parametrize("max_drafts", [1, 2, 4])
def test_max_drafts(max_drafts):
    assert draft_one([(PROMPT, [1, 2, 3, 4])], (PROMPT, []), max_drafts=max_drafts)[0] == [1, 2, 3, 4][:max_drafts]


def test_vote_without_voters_is_empty():
    _, length_B = vote(np.full((1, 2, 3), 4), np.zeros((1, 2), np.float32), 0.0)
    np.testing.assert_array_equal(length_B, [0])


def test_suffix_match_reports_each_response():
    history_BRP = np.stack([history_row(PROMPT, [1, 2, 3, 4]), history_row(PROMPT, [2, 3, 5]), history_row([], [])])[
        None
    ]
    context_BM = np.array([[3, 2, 1, 14, 13, 12, 11]])
    next_BR, match_BR = suffix_match(history_BRP, context_BM, np.array([3]))
    np.testing.assert_array_equal(match_BR, [[7, 2, 0]])
    np.testing.assert_array_equal(next_BR[0, :2], [MAX_MATCH + 3, MAX_MATCH + 2])


# --- from the store -------------------------------------------------------------------------------------------


def test_from_the_store():
    """Store, query, draft: prompts in the order of the query, unseen ones and unused slots silent, and of equal
    votes the most recent visit's.
    """
    store = HistoryStore(depth=2, max_tokens=1000)
    other = [21, 22, 23]

    def add(prompt, step, *responses):
        store.add(prompt, [Response(np.array(r, np.int32), 0.0, step, step) for r in responses])

    rows = [(PROMPT, []), ([31, 32, 33], []), (other, [4, 5, 6]), (PROMPT, [])]
    queried = [PROMPT, [31, 32, 33], other]

    add(PROMPT, 1, [1, 2, 3])
    add(other, 1, [4, 5, 6, 7, 8], [4, 5, 6, 7, 9])
    have = drafts(store.query(queried, 4), rows, [0, 1, 2, 3])
    assert have == [([1, 2, 3], 4), ([], 0), ([7, 9], 6), ([], 0)]

    add(PROMPT, 2, [1, 5])
    add(other, 2, [4, 5, 6, 7, 8])
    have = drafts(store.query(queried, 4), rows, [0, 1, 2, 3])
    assert have == [([1, 5], 4), ([], 0), ([7, 8], 6), ([], 0)]

    add(PROMPT, 3, [6])
    add(PROMPT, 4, [6])  # step 1 and 2 are gone now
    assert drafts(store.query(queried, 4), rows, [0, 1, 2, 3])[0] == ([6], 4)
