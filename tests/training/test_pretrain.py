import itertools

import jax
import numpy as np
import pytest

from configs.pretrain_tiny import VARIANTS, get_config
from rhyme_jax.errors import InputError
from rhyme_jax.models.load import load_model
from rhyme_jax.models.tokenizer import char_tokenizer
from rhyme_jax.tasks.demonstrations import WORKED_ONLY
from rhyme_jax.training import pretrain
from rhyme_jax.training.console import Console
from rhyme_jax.training.pretrain import POOL, WORLDS, batches, pad_batch, worked_reliability


def texts(tokenizer, batch) -> list[str]:
    ends = batch["prompt_length_B"] + batch["response_length_B"]
    return [tokenizer.decode(row[:end]) for row, end in zip(batch["tokens_BS"], ends, strict=True)]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "smoke"])
def test_batches_are_worked_solutions_then_the_mixture_of_what_is_not_held_out(variant):
    config = get_config(variant)
    config.steps, config.mixed_from, config.batch_size = 2 * POOL, POOL, 8
    world = WORLDS[config.task]
    tokenizer = char_tokenizer(world.alphabet)
    rng = np.random.default_rng([config.seed, 0])
    difficulties = tuple(config.difficulties)
    drawn = []
    for _ in range(20):
        drawn.append(world.sample(rng, difficulties[rng.integers(len(difficulties))]))
        WORKED_ONLY.response(drawn[-1], rng)
    all_drawn = list(batches(config, tokenizer, frozenset()))
    first, second = (
        [t for b in part for t in texts(tokenizer, b)] for part in (all_drawn[:POOL], all_drawn[POOL : 2 * POOL])
    )
    assert len(first) == len(second) == 8 * POOL
    assert {p.question + p.worked_solution() for p in drawn} <= set(first)
    held_out = frozenset(drawn[:3])
    kept = [t for b in itertools.islice(batches(config, tokenizer, held_out), POOL) for t in texts(tokenizer, b)]
    assert len(kept) == 8 * POOL and not {p.question for p in held_out} & {t.partition("\n")[0] + "\n" for t in kept}
    # Of mixed demonstrations most are shorter than worked ones.
    assert sum(map(len, second)) < 0.9 * sum(map(len, first))
    again = list(batches(config, tokenizer, frozenset()))
    assert all(np.array_equal(a["tokens_BS"], b["tokens_BS"]) for a, b in zip(all_drawn, again, strict=True))
    for batch in all_drawn:
        assert batch["tokens_BS"].shape[1] % config.length_bucket == batch["response_slots"] % config.length_bucket == 0
        assert batch["response_length_B"].max() > batch["response_slots"] - config.length_bucket


def test_padding():
    batch = pad_batch([([5, 6, 7], [8]), ([5], [6, 7, 8, 9, 1])], pad_id=0, bucket=4)
    assert batch["tokens_BS"].tolist() == [[5, 6, 7, 8] + [0] * 8, [5, 6, 7, 8, 9, 1] + [0] * 6]
    assert batch["response_slots"] == 8 and batch["response_length_B"].tolist() == [1, 5]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("task", "poetry", "task='poetry': must be one of arithmetic, functions"),
        ("length_bucket", 0, "length_bucket=0: must be at least 1"),
        ("mixed_from", 17, "mixed_from=17: must be a multiple of 16"),
        ("worked", 0.9, "worked \\+ sloppy=1.1: shares must add up"),
    ],
)
def test_what_is_refused(field, value, message, tmp_path):
    config = get_config("smoke")
    config[field] = value
    with pytest.raises(InputError, match=message):
        pretrain.make_model(config, str(tmp_path / "model"), Console())
    assert not (tmp_path / "model").exists()


def test_the_embedded_code_model_works_functions_out():
    model = load_model("embedded:code_tiny")
    config = get_config("code")
    world = WORLDS[config.task]
    assert model.tokenizer.vocab_size == len(world.alphabet) + 3 == model.config.vocab_size
    _, held_out = world.split(1, 32, tuple(config.difficulties), config.task_seed)
    for problem in held_out:
        text = problem.question + problem.worked_solution()
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    score = [worked_reliability(p, model.config, model.tokenizer, held_out, 32) for p in (model.params, spoiled(model))]
    assert score[0] > 0.9 and score[1] == 0


def spoiled(model) -> dict:
    return jax.tree.map(np.zeros_like, model.params)
