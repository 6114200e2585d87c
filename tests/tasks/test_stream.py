"""The order of prompts: epochs are permutations, and a saved position is all it takes to go on."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.tasks.stream import MixtureStream, PromptStream

SIZES = st.integers(1, 30).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))
SEEDS = st.integers(0, 2**31 - 1)


def take(stream: PromptStream, batches: int) -> list[list[int]]:
    return [stream.next().tolist() for _ in range(batches)]


@settings(deadline=None)
@given(SIZES, SEEDS)
def test_an_epoch_visits_each_prompt_at_most_once(sizes, seed):
    size, batch = sizes
    stream = PromptStream(size, batch, seed)
    assert stream.batches_per_epoch == size // batch
    for epoch in range(3):
        assert stream.progress == epoch
        visited = [prompt for batch in take(stream, stream.batches_per_epoch) for prompt in batch]
        assert len(visited) == len(set(visited)) == size - size % batch
        assert set(visited) <= set(range(size))
    assert stream.position() == {"epoch": 3, "index": 0}


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(0, 40), st.integers(1, 12))
def test_a_position_reproduces_the_future(sizes, seed, before, after):
    stream = PromptStream(*sizes, seed)
    take(stream, before)
    position, progress = stream.position(), stream.progress
    future = take(stream, after)
    resumed = PromptStream(*sizes, seed)
    resumed.seek(position)
    assert resumed.progress == progress and resumed.position() == position
    assert take(resumed, after) == future
    assert resumed.position() == stream.position()
    stream.seek(position)  # also backwards
    assert take(stream, after) == future


def test_the_position_is_a_copy():
    stream = PromptStream(8, 2, 0)
    position = stream.position()
    stream.next()
    assert position == {"epoch": 0, "index": 0} and stream.position() == {"epoch": 0, "index": 1}


def test_epochs_and_seeds_differ():
    stream = PromptStream(20, 20, 0)
    epochs = take(stream, 10)
    assert len(set(map(tuple, epochs))) == 10
    assert take(PromptStream(20, 20, 1), 1)[0] not in epochs


def test_what_is_left_over_changes_from_epoch_to_epoch():
    stream = PromptStream(7, 3, 0)
    left_over = [set(range(7)).difference(*take(stream, 2)) for _ in range(50)]
    assert [len(prompts) for prompts in left_over] == [1] * 50
    assert set.union(*left_over) == set(range(7))


def test_progress_counts_epochs():
    stream = PromptStream(9, 2, 0)  # 4 batches an epoch
    progress = [stream.progress]
    for _ in range(5):
        stream.next()
        progress.append(stream.progress)
    assert progress == [0, 0.25, 0.5, 0.75, 1, 1.25]


def test_the_first_batches_of_seed_0():
    """Golden: stored runs go on with this order. Where NumPy changes it, say so in the release notes."""
    assert take(PromptStream(8, 3, 0), 4) == [[5, 0, 3], [6, 2, 4], [3, 4, 2], [0, 5, 6]]


@pytest.mark.parametrize(("size", "batch"), [(8, 0), (8, -1), (8, 9), (0, 1)])
def test_batches_that_do_not_fit(size, batch):
    message = rf"^rollout.prompts_per_step={batch}: must be from 1 to the {size} prompts of the task$"
    with pytest.raises(InputError, match=message):
        PromptStream(size, batch, 0)


def test_a_visit_says_how_often_a_prompt_was_seen():
    stream = PromptStream(5, 2, 0)
    visits = [stream.visit() for _ in range(5)]
    assert [v.tolist() for _, v in visits] == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2]]
    assert [b.tolist() for b, _ in visits] == take(PromptStream(5, 2, 0), 5)


# --- mixtures -------------------------------------------------------------------------------------------------

MIXTURES = st.lists(st.tuples(st.integers(8, 30), st.integers(1, 9)), min_size=1, max_size=4).flatmap(
    lambda tasks: st.tuples(
        st.just({f"t{k}": size for k, (size, _) in enumerate(tasks)}),
        st.just({f"t{k}": float(weight) for k, (_, weight) in enumerate(tasks)}),
        st.integers(1, 8),
        SEEDS,
    )
)


def task_of(sizes: dict, prompt: int) -> str:
    for label, size in sizes.items():
        if prompt < size:
            return label
        prompt -= size
    raise IndexError(prompt)


@settings(deadline=None, max_examples=40)
@given(MIXTURES)
def test_shares_are_exact_over_time(mixture):
    """In each run of as many places as the weights add up to, from the first place on."""
    sizes, weights, *_ = mixture
    period = int(sum(weights.values()))
    stream = MixtureStream(*mixture)
    places = [task_of(sizes, i) for prompts in take(stream, 3 * period) for i in prompts]
    for start in range(0, len(places) - period + 1, period):
        counts = {label: places[start : start + period].count(label) for label in sizes}
        assert counts == weights
    # And never far off in between.
    for label in sizes:
        share = weights[label] / period
        taken = [places[:n].count(label) for n in range(len(places))]
        assert all(abs(t - share * n) <= len(sizes) for n, t in enumerate(taken))


@settings(deadline=None, max_examples=40)
@given(MIXTURES)
def test_each_task_has_epochs_of_its_own(mixture):
    sizes, *_ = mixture
    stream = MixtureStream(*mixture)
    seen: dict[tuple, list] = {}
    for _ in range(40):
        done = stream.epoch
        prompts, visits = stream.visit()
        assert len(set(prompts.tolist())) == len(prompts) == stream.batch
        assert stream.epoch >= done and stream.progress >= stream.epoch
        for prompt, visit in zip(prompts.tolist(), visits.tolist(), strict=True):
            seen.setdefault((task_of(sizes, prompt), visit), []).append(prompt)
    for (label, visit), prompts in seen.items():
        assert len(set(prompts)) == len(prompts)  # once an epoch
        if (label, visit + 1) in seen:  # all, but for fewer than a batch
            assert sizes[label] - stream.batch < len(prompts) <= sizes[label]
    for label in sizes:
        visits = [v for name, v in seen if name == label]
        assert sorted(visits) == list(range(len(visits)))


@settings(deadline=None, max_examples=40)
@given(MIXTURES, st.integers(0, 40), st.integers(1, 12))
def test_a_position_of_a_mixture_reproduces_the_future(mixture, before, after):
    stream = MixtureStream(*mixture)
    take(stream, before)
    position, epochs = json.loads(json.dumps(stream.position())), stream.epochs()
    future = [(b.tolist(), v.tolist()) for b, v in (stream.visit() for _ in range(after))]
    resumed = MixtureStream(*mixture)
    resumed.seek(position)
    assert resumed.epochs() == epochs and resumed.position() == position
    assert [(b.tolist(), v.tolist()) for b, v in (resumed.visit() for _ in range(after))] == future


def test_the_first_batches_of_a_mixture():
    """Golden: stored runs go on with this order."""
    stream = MixtureStream({"a": 6, "b": 4}, {"a": 3.0, "b": 1.0}, 4, 0)
    assert take(stream, 4) == [[0, 3, 6, 5], [2, 4, 8, 1], [2, 0, 7, 4], [3, 5, 9, 1]]
    assert stream.epochs() == {"a": 2.0, "b": 1.0} and (stream.epoch, stream.progress) == (1, 1.0)


def test_a_task_that_is_all_in_the_batch_waits():
    """Its places go to others, and come back."""
    stream = MixtureStream({"a": 2, "b": 30}, {"a": 1.0, "b": 2.0}, 5, 0)
    counts = [sum(i < 2 for i in prompts) for prompts in take(stream, 60)]
    assert max(counts) == 2 and abs(sum(counts) - 100) <= 1


@pytest.mark.parametrize(
    ("sizes", "batch", "message"),
    [
        ({"a": 8, "b": 8}, 0, "rollout.prompts_per_step=0: must be at least 1"),
        (
            {"a": 8, "b": 2},
            6,
            "rollout.prompts_per_step=6: takes 3 prompts of tasks.b on average, and it has 2; lower it, or "
            "tasks.b.weight",
        ),
    ],
)
def test_mixtures_that_do_not_fit(sizes, batch, message):
    with pytest.raises(InputError) as error:
        MixtureStream(sizes, dict.fromkeys(sizes, 1.0), batch, 0)
    assert str(error.value) == message
