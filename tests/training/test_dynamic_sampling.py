"""Dynamic sampling: which groups a step learns from, and that a run with it keeps every promise of one without."""

import shutil
import types

import jax
import numpy as np
import pytest
from test_loop import samples, small_config, trainer, without_times

from rhyme_jax.grpo.advantages import AdvantageConfig
from rhyme_jax.grpo.learner import Batch
from rhyme_jax.training.batches import Graded, of_informative_groups
from rhyme_jax.training.workdir import read_metrics

NAN = float("nan")


def make_graded(rewards, ended=None, length=None) -> Graded:
    """Rollouts with these rewards; only what `batch` looks at is filled in."""
    rewards = np.array(rewards, np.float64)
    n = len(rewards)
    rollouts = types.SimpleNamespace(
        tokens_NS=np.arange(n, dtype=np.int32)[:, None],
        prompt_length_N=np.ones(n, np.int32),
        response_length_N=np.full(n, 3, np.int32) if length is None else np.array(length, np.int32),
        log_prob_NT=np.zeros((n, 4), np.float32),
        ended_N=np.ones(n, bool) if ended is None else np.array(ended, bool),
    )
    return Graded([], [], rollouts, rewards, np.full(n, 5), np.full(n, 5), ())


# --- what a batch is made of ----------------------------------------------------------------------------------


def test_truncated_responses_are_masked_and_still_compared_with():
    graded = make_graded([1, 0, 0, NAN], ended=[True, False, True, True])
    for mask_truncated, valid in ((False, [1, 1, 1, 0]), (True, [1, 0, 1, 0])):
        batch = graded.batch(4, AdvantageConfig(normalize_std="none", mask_truncated=mask_truncated), step=5)
        np.testing.assert_allclose(batch.advantage, [2 / 3, -1 / 3, -1 / 3, 0], rtol=1e-6)
        np.testing.assert_array_equal(batch.valid, np.array(valid, bool))
    all_truncated = make_graded([1, 0], ended=[False, False])
    assert not all_truncated.batch(2, AdvantageConfig(mask_truncated=True), step=5).valid.any()
    assert all_truncated.informative(2, AdvantageConfig(mask_truncated=True)).tolist() == [False]


def test_long_responses_are_punished():
    """A budget of 8 with a buffer of 4, so 6 tokens cost half: two right answers of different lengths differ."""
    graded = make_graded([1, 1, 0, 0], length=[3, 6, 3, 3])
    config = AdvantageConfig(normalize_std="none", budget=8, overlong_buffer=4)
    np.testing.assert_allclose(graded.batch(2, config, step=5).advantage, [0.25, -0.25, 0, 0])
    assert graded.informative(2, config).tolist() == [True, False]
    assert graded.informative(2, AdvantageConfig()).tolist() == [False, False]
    np.testing.assert_array_equal(graded.rewards_N, [1, 1, 0, 0])  # what the grader said is kept


@pytest.mark.parametrize(
    ("informative", "groups", "valid"),
    [
        ([1, 0, 1, 1], [0, 2], [1, 1]),
        ([0, 0, 1, 0], [2, 0], [1, 0]),  # filled up with one that is masked
        ([0, 0, 0, 0], [0, 1], [0, 0]),
        ([1, 1, 1, 1], [0, 1], [1, 1]),
    ],
)
def test_the_groups_that_are_learned_from(informative, groups, valid):
    of_row, ones = np.arange(12, dtype=np.int32), np.ones(12, bool)
    batch = Batch(of_row[:, None], of_row, of_row, of_row[:, None], of_row, ones, ones)
    got, numbers = of_informative_groups(batch, np.array(informative, bool), 2)
    assert numbers.tolist() == groups
    assert got.tokens[:, 0].tolist() == [3 * g + i for g in groups for i in range(3)]
    assert got.valid.reshape(2, 3).tolist() == [[bool(v)] * 3 for v in valid]
    assert batch.valid.all()


# --- a run ----------------------------------------------------------------------------------------------------

STEPS, ROUNDS = 2, 3


def run_config():
    """Eight prompts, four a round: the third round of a step begins the next epoch. Two passes in two parts each."""
    config = small_config(max_new_tokens=32)
    config.draft.buckets = (1,)
    config.steps, config.checkpoint.every, config.eval.every = 9, 1, 9
    config.optimizer.micro_batches = 1
    config.grpo.sampling_rounds, config.grpo.minibatches, config.grpo.updates_per_batch = ROUNDS, 2, 2
    return config


def rare_trainer(workdir):
    """Of the first three prompts of the epoch alone the responses differ, by their length."""
    t = trainer(run_config(), workdir)
    useful = {t.train_prompts[i].problem.question for i in np.random.default_rng([0, 0, 0x57E4]).permutation(8)[:3]}

    def grade(problem, responses):
        future = types.SimpleNamespace(done=lambda: True)
        values = [len(r) % 5 + 0.1 * i if problem.question in useful else 1.8 for i, r in enumerate(responses)]
        future.result = lambda: values
        return future

    t.grade = grade
    t.learned_from = []

    def update(state, batch, *log_probs):
        """Takes down what is learned from. Learning itself would take most of the time here, to compile."""
        t.learned_from.append(batch)
        return state.replace(updates=state.updates + 1), {"loss": 0.0, "rollout_gap": 0.0}

    t.learner.update = update
    return t, useful


def step(t) -> None:
    t.step()
    t._checkpoint_if_due()
    t.checkpoints.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(trainer after two steps, its workdir, that as it was after the first, the useful prompts)."""
    workdir, first = tmp_path_factory.mktemp("dynamic"), tmp_path_factory.mktemp("first") / "step"
    t, useful = rare_trainer(workdir)
    step(t)
    shutil.copytree(workdir, first)
    step(t)
    t.close()
    return t, workdir, first, useful


def test_a_step_samples_until_it_has_enough(whole):
    """Three of the first four prompts are of use, none of the next, and the third round has some of them again."""
    t, workdir, _, useful = whole
    metrics, kept = read_metrics(workdir / "metrics.jsonl"), samples(workdir)
    for m, of_step in zip(metrics, kept.values(), strict=True):
        groups = [of_step[i : i + 8] for i in range(0, len(of_step), 8)]
        assert len(groups) == 4 * m["rollout/rounds"] and m["rollout/tokens"] == sum(s["length"] for s in of_step)
        informative = [g[0]["prompt"] in useful for g in groups]
        assert m["rollout/uninformative_groups"] == informative.count(False)
        enough = [sum(informative[: 4 * r]) >= 4 for r in range(1, m["rollout/rounds"] + 1)]
        assert not any(enough[:-1]) and (enough[-1] or m["rollout/rounds"] == ROUNDS)
        short = max(0, 4 - sum(informative))
        assert m["learner/masked_samples"] == 8 * short and m["learner/zero_advantage_share"] == short / 4
    assert metrics[0]["rollout/rounds"] == 3
    assert len(t.learned_from) == STEPS * 4
    for batch in t.learned_from:
        assert len(batch.valid) == 16
    # A pass has each kept row once: in the first step those of the first three useful groups, and of a fourth or none.
    tokens = np.concatenate([b.tokens for b in t.learned_from[:2]])
    again = np.concatenate([b.tokens for b in t.learned_from[2:4]])
    assert (tokens != again).any()
    np.testing.assert_array_equal(np.unique(tokens, axis=0), np.unique(again, axis=0))


def test_a_prompt_that_comes_twice_in_a_step_meets_other_noise(whole):
    _, workdir, *_ = whole
    first_step = next(iter(samples(workdir).values()))
    texts = {}
    for s in first_step:
        texts.setdefault((s["prompt"], s["sample"]), []).append(s["completion"])
    twice = [t for t in texts.values() if len(t) == 2]
    assert len(twice) == 4 * 8
    assert sum(a != b for a, b in twice) > len(twice) / 2  # short answers may be alike


def test_history_and_lengths_learn_from_what_was_set_aside(whole):
    t, workdir, *_ = whole
    seen = {s["prompt"] for of_step in samples(workdir).values() for s in of_step}
    assert len(seen) == 8 == len(t.history)
    assert t.lengths.predict([p.id for p in t.train_prompts]).seen_G.all()


def test_resume_is_exact(whole):
    t, workdir, first, _ = whole
    second, _ = rare_trainer(first)
    assert second.progress.steps == 1
    step(second)
    second.close()
    assert int(second.state.updates) == int(t.state.updates) == STEPS * 4
    jax.tree.map(np.testing.assert_array_equal, second.learned_from, t.learned_from[4:])
    assert samples(first) == samples(workdir)
    assert second.stream.position() == t.stream.position()
    a, b = (without_times(read_metrics(w / "metrics.jsonl")) for w in (workdir, first))
    assert a == b
