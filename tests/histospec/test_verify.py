"""Verification against one row and one token at a time, and the traps of the design as a table."""

import dataclasses
import math

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from rhyme_jax.histospec.verify import Verdict, verify

fast = jax.jit(verify, static_argnames="eos_ids")

EOS = 9
PAD = 0


def check(draft_BJ, draft_length_B, sampled_BK, remaining_B, active_B, eos_ids=(EOS,)) -> Verdict:
    """The verdict as numpy arrays."""
    verdict = fast(
        *(np.asarray(x, np.int32) for x in (draft_BJ, draft_length_B, sampled_BK, remaining_B)),
        np.asarray(active_B, bool),
        eos_ids=eos_ids,
    )
    assert verdict.commit_B.dtype == verdict.accepted_B.dtype == np.int32
    return jax.tree.map(np.asarray, verdict)


# --- against an oracle ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """What plain decoding would do, token by token, for as long as the draft foretells it."""

    commit: int = 0
    accepted: int = 0
    ended: bool = False
    exhausted: bool = False


def decode_row(draft, draft_length, sampled, remaining, active, eos_ids) -> Row:
    row = Row()
    if not active:
        return row
    for k, token in enumerate(sampled):
        # `sampled[k]` was drawn after draft tokens 0..k-1; it is what plain decoding draws only while all were right.
        foretold = k < draft_length and draft[k] == token
        row.commit += 1
        row.accepted += foretold
        if token in eos_ids:
            row.ended = True
            return row
        if row.commit == remaining:
            row.exhausted = True
            return row
        if not foretold:
            return row
    raise AssertionError("the last sampled token follows the last draft: nothing foretells it")


ROWS = 4


@st.composite
def batches(draw):
    k = draw(st.sampled_from([1, 2, 5]))

    def array(elements, *shape):
        size = math.prod(shape)
        return np.array(draw(st.lists(elements, min_size=size, max_size=size)), int).reshape(shape)

    token = st.integers(0, 3)
    sampled_BK = array(token, ROWS, k)
    noise_BJ, copied_BJ = array(token, ROWS, k - 1), array(token, ROWS, k - 1) > 0
    return {
        # Three in four drafted tokens are right, so that all lengths of run are met.
        "draft_BJ": np.where(copied_BJ, sampled_BK[:, :-1], noise_BJ),
        "draft_length_B": array(st.integers(0, k - 1), ROWS),
        "sampled_BK": sampled_BK,
        "remaining_B": array(st.integers(1, k + 1), ROWS),
        "active_B": array(st.booleans() | st.just(True), ROWS),
        "eos_ids": draw(st.sampled_from([(3,), (2, 3), (0,)])),
    }


@hypothesis.given(batches())
@hypothesis.settings(max_examples=400, deadline=None, derandomize=True)
def test_matches_sequential_decoding(batch):
    verdict = check(**batch)
    eos_ids = batch.pop("eos_ids")
    for b, row in enumerate(zip(*batch.values(), strict=True)):
        want = decode_row(*row, eos_ids)
        have = Row(*(x[b] for x in (verdict.commit_B, verdict.accepted_B, verdict.ended_B, verdict.exhausted_B)))
        assert have == want, (b, row)


# --- the traps ------------------------------------------------------------------------------------------------

TRAPS = {
    # name: (draft, sampled, remaining, eos ids, (commit, accepted, ended, exhausted))
    "full acceptance": ([1, 2, 3], [1, 2, 3, 4], 9, (EOS,), (4, 3, False, False)),
    "nothing accepted": ([1, 2, 3], [5, 2, 3, 4], 9, (EOS,), (1, 0, False, False)),
    "a later match after a mismatch does not count": ([1, 2, 3], [1, 5, 3, 4], 9, (EOS,), (2, 1, False, False)),
    "no draft": ([], [7, 7, 7, 7], 9, (EOS,), (1, 0, False, False)),
    "a short draft; what stands behind it is ignored": ([1], [1, 0, 0, 0], 9, (EOS,), (2, 1, False, False)),
    "EOS inside an accepted run": ([1, EOS, 3], [1, EOS, 3, 4], 9, (EOS,), (2, 2, True, False)),
    "EOS as the last accepted token": ([1, 2, EOS], [1, 2, EOS, 4], 9, (EOS,), (3, 3, True, False)),
    "EOS as the correction": ([1, 2, 3], [1, EOS, 3, 4], 9, (EOS,), (2, 1, True, False)),
    "EOS as the bonus token": ([1, 2, 3], [1, 2, 3, EOS], 9, (EOS,), (4, 3, True, False)),
    "EOS drafted, something else sampled": ([1, EOS, 3], [1, 5, 3, 4], 9, (EOS,), (2, 1, False, False)),
    "EOS sampled past a mismatch": ([1, 2, 3], [5, EOS, 3, 4], 9, (EOS,), (1, 0, False, False)),
    "first token is EOS, drafted": ([EOS, 2, 3], [EOS, 2, 3, 4], 9, (EOS,), (1, 1, True, False)),
    "first token is EOS, not drafted": ([1, 2, 3], [EOS, 2, 3, 4], 9, (EOS,), (1, 0, True, False)),
    "two EOS in one run: the first counts": ([1, EOS, EOS], [1, EOS, EOS, 4], 9, (EOS,), (2, 2, True, False)),
    "several ids, the first of them": ([1, 8, 3], [1, 8, 3, 4], 9, (8, EOS), (2, 2, True, False)),
    "several ids, another": ([1, 2, EOS], [1, 2, EOS, 8], 9, (8, EOS), (3, 3, True, False)),
    "EOS equal to the padding id": ([1, PAD, 3], [1, PAD, 3, 4], 9, (PAD,), (2, 2, True, False)),
    "EOS equal to the padding id, beyond a short draft": ([1], [1, 2, PAD, PAD], 9, (PAD,), (2, 1, False, False)),
    "draft longer than the budget": ([1, 2, 3], [1, 2, 3, 4], 2, (EOS,), (2, 2, False, True)),
    "a budget of one": ([1, 2, 3], [1, 2, 3, 4], 1, (EOS,), (1, 1, False, True)),
    "budget ends on the correction": ([1, 2, 3], [1, 5, 3, 4], 2, (EOS,), (2, 1, False, True)),
    "budget ends on the bonus token": ([1, 2, 3], [1, 2, 3, 4], 4, (EOS,), (4, 3, False, True)),
    "EOS before the end of the budget": ([1, EOS, 3], [1, EOS, 3, 4], 3, (EOS,), (2, 2, True, False)),
    "EOS past the end of the budget": ([1, 2, EOS], [1, 2, EOS, 4], 2, (EOS,), (2, 2, False, True)),
    "EOS and budget on the same token: EOS wins": ([1, EOS, 3], [1, EOS, 3, 4], 2, (EOS,), (2, 2, True, False)),
    "EOS as the correction, on the last token": ([1, 2, 3], [1, EOS, 3, 4], 2, (EOS,), (2, 1, True, False)),
    "a budget of one, and EOS": ([1, 2, 3], [EOS, 2, 3, 4], 1, (EOS,), (1, 0, True, False)),
}


def as_rows(traps):
    drafts = [d + [PAD] * (3 - len(d)) for d, *_ in traps]
    return drafts, [len(d) for d, *_ in traps], [t[1] for t in traps], [t[2] for t in traps]


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name):
    draft, sampled, remaining, eos_ids, want = TRAPS[name]
    v = check(*as_rows([TRAPS[name]]), [True], eos_ids)
    assert (v.commit_B[0], v.accepted_B[0], v.ended_B[0], v.exhausted_B[0]) == want
    assert decode_row(draft, len(draft), sampled, remaining, True, eos_ids) == Row(*want), "the oracle disagrees"


def test_rows_do_not_disturb_each_other():
    """Full and zero acceptance, ends and budgets, active and not, in one batch: each row as if alone."""
    traps = [t for t in TRAPS.values() if t[3] == (EOS,)]
    active_B = np.arange(len(traps)) % 4 > 0
    v = check(*as_rows(traps), active_B)
    assert len(set(v.accepted_B.tolist())) == 4
    for b, (*_, want) in enumerate(traps):
        have = (v.commit_B[b], v.accepted_B[b], v.ended_B[b], v.exhausted_B[b])
        assert have == (want if active_B[b] else (0, 0, False, False))


def test_the_correction_comes_from_the_position_of_the_mismatch():
    """The committed tokens are a prefix of `sampled`: the correction is sampled[accepted], which followed the last
    right draft; neither the token sampled at another position nor the rejected draft.
    """
    draft, sampled = [1, 2, 3], [1, 7, 8, 6]
    v = check([draft], [3], [sampled], [9], [True])
    assert sampled[: v.commit_B[0]] == [1, 7]
    assert v.accepted_B[0] == 1


@pytest.mark.parametrize(
    ("sampled", "remaining", "want"), [(4, 5, (False, False)), (4, 1, (False, True)), (9, 1, (True, False))]
)
def test_one_position_is_plain_decoding(sampled, remaining, want):
    v = check(np.zeros((1, 0)), [0], [[sampled]], [remaining], [True])
    assert (v.commit_B[0], v.accepted_B[0]) == (1, 0)
    assert (v.ended_B[0], v.exhausted_B[0]) == want


@pytest.mark.parametrize("remaining", [0, 3])
def test_inactive_rows_commit_nothing(remaining):
    """Whatever they hold: padding rows, and finished ones whose budget is used up."""
    v = check([[EOS, EOS]] * 2, [2, 0], [[EOS, EOS, EOS]] * 2, [remaining] * 2, [False] * 2)
    for x in (v.commit_B, v.accepted_B, v.ended_B, v.exhausted_B):
        np.testing.assert_array_equal(x, [0, 0])


# --- wrong shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("draft", (2, 4)),
        ("draft", (2, 2)),
        ("draft", (3, 3)),
        ("draft", (3,)),
        ("draft_length", (3,)),
        ("draft_length", (2, 1)),
        ("remaining", (1,)),
        ("remaining", ()),
        ("active", (4,)),
    ],
)
def test_wrong_shapes_raise(name, shape):
    shapes = {"draft": (2, 3), "draft_length": (2,), "sampled": (2, 4), "remaining": (2,), "active": (2,), name: shape}
    with pytest.raises(ValueError, match=f"verify: {name}"):
        check(*(np.ones(s) for s in shapes.values()))
