"""Supervised pretraining of the embedded models on demonstrations of their tasks.

Two stages: worked solutions alone until the model executes them reliably, then the mixture of styles that
leaves GRPO its choice (see `tasks.demonstrations`). Every batch is a function of (seed, step), so a run can be
repeated.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rhyme_jax.errors import InputError
from rhyme_jax.models import hf_weights
from rhyme_jax.models.config import DecoderConfig
from rhyme_jax.models.params import count_params, init_params
from rhyme_jax.models.scoring import score_responses
from rhyme_jax.models.tokenizer import Tokenizer, char_tokenizer
from rhyme_jax.tasks import arithmetic, functions
from rhyme_jax.tasks.demonstrations import WORKED_ONLY, Mixture
from rhyme_jax.training.console import Console

POOL = 16  # batches drawn together and sorted by length, so that a batch is padded little


@dataclasses.dataclass(frozen=True)
class World:
    """A task that a model is pretrained on. Its problems have a `question`, a `difficulty`, a `worked_solution()`, and
    are hashable; `demonstrations.hasty` answers them.
    """

    alphabet: str  # every character of its texts
    sample: Callable  # (rng, difficulty) -> a problem
    split: Callable  # (train_size, eval_size, difficulties, seed) -> (train problems, eval problems)


WORLDS = {
    "arithmetic": World(arithmetic.ALPHABET, arithmetic.sample_chain, arithmetic.split),
    "functions": World(functions.ALPHABET, functions.sample_function, functions.split),
}


def encode(tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids with a closing EOS) of each (prompt, response)."""
    return [(tokenizer.encode(p), [*tokenizer.encode(r), tokenizer.eos_ids[0]]) for p, r in pairs]


def pad_batch(rows: list[tuple[list[int], list[int]]], pad_id: int, bucket: int) -> dict[str, np.ndarray]:
    """Left-aligned rows: tokens_BS, prompt_length_B, response_length_B, with S and T multiples of `bucket`."""

    def round_up(n):
        return -(-n // bucket) * bucket

    slots = round_up(max(len(r) for _, r in rows))
    positions = round_up(max(len(p) for p, _ in rows)) + slots
    tokens_BS = np.full((len(rows), positions), pad_id, np.int32)
    for b, (prompt, response) in enumerate(rows):
        tokens_BS[b, : len(prompt) + len(response)] = prompt + response
    return {
        "tokens_BS": tokens_BS,
        "prompt_length_B": np.array([len(p) for p, _ in rows], np.int32),
        "response_length_B": np.array([len(r) for _, r in rows], np.int32),
        "response_slots": slots,
    }


def batches(config, tokenizer: Tokenizer, exclude: frozenset) -> Iterator[dict[str, np.ndarray]]:
    """Batches for steps 0, 1, ...; worked solutions before `config.mixed_from`, the mixture after."""
    mixture = Mixture(worked=config.worked, sloppy=config.sloppy)
    difficulties, sample = tuple(config.difficulties), WORLDS[config.task].sample
    for pool in range(-(-config.steps // POOL)):
        rng = np.random.default_rng([config.seed, pool])
        style = WORKED_ONLY if pool * POOL < config.mixed_from else mixture
        pairs = []
        while len(pairs) < POOL * config.batch_size:
            problem = sample(rng, difficulties[rng.integers(len(difficulties))])
            if problem not in exclude:
                pairs.append((problem.question, style.response(problem, rng)))
        rows = sorted(encode(tokenizer, pairs), key=lambda row: len(row[1]))
        for start in rng.permutation(POOL) * config.batch_size:
            yield pad_batch(rows[start : start + config.batch_size], tokenizer.pad_id, config.length_bucket)


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "response_slots"), donate_argnames=("params", "opt"))
def _update(params, opt, model, optimizer, tokens_BS, prompt_length_B, response_length_B, response_slots):
    mask_BT = jnp.arange(response_slots) < response_length_B[:, None]

    def loss_fn(params):
        log_prob_BT, _ = score_responses(params, model, tokens_BS, prompt_length_B, response_slots)
        return -jnp.sum(log_prob_BT * mask_BT) / jnp.sum(mask_BT)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt = optimizer.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, loss


@functools.partial(jax.jit, static_argnames=("model", "response_slots"))
def _log_probs(params, model, tokens_BS, prompt_length_B, response_slots):
    return score_responses(params, model, tokens_BS, prompt_length_B, response_slots)[0]


def worked_reliability(params, model: DecoderConfig, tokenizer: Tokenizer, problems: list, bucket: int) -> float:
    """Share of problems whose whole worked solution has probability above 1/2 in every token but the openings of
    lines (those choose a style, not a number). Greedy decoding of the worked form is then right.
    """
    pairs = [(p.question, p.worked_solution()) for p in problems]
    batch = pad_batch(encode(tokenizer, pairs), tokenizer.pad_id, bucket)
    likely_BT = np.asarray(_log_probs(params, model, **{k: v for k, v in batch.items() if k != "response_length_B"}))
    likely_BT = likely_BT > np.log(0.5)
    right = [
        # A token is a character here, and the one after the text closes the response.
        all(likely_BT[b, t] for t in range(len(text) + 1) if text[:t].rpartition("\n")[2].strip(" "))
        for b, (_, text) in enumerate(pairs)
    ]
    return float(np.mean(right))


def make_model(config, directory: str, console: Console) -> None:
    """Trains the model of a `configs/pretrain_tiny.py` config and writes weights and tokenizer to a directory.

    Raises:
      InputError: the directory cannot be written, or the config is out of range.
    """
    if config.task not in WORLDS:
        raise InputError(f"task={config.task!r}: must be one of {', '.join(WORLDS)}")
    for name in ("steps", "mixed_from", "batch_size", "length_bucket", "log_every", "warmup_steps"):
        if config[name] < 1:
            raise InputError(f"{name}={config[name]}: must be at least 1")
    if config.steps <= config.warmup_steps:
        raise InputError(f"steps={config.steps}: must exceed warmup_steps={config.warmup_steps}")
    if config.mixed_from % POOL:
        raise InputError(f"mixed_from={config.mixed_from}: must be a multiple of {POOL}, the batches drawn together")
    if not 0 <= config.worked + config.sloppy <= 1:
        raise InputError(f"worked + sloppy={config.worked + config.sloppy}: shares must add up to at most 1")
    out = pathlib.Path(directory)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"--workdir={directory}: cannot be written ({e.strerror or e})") from e
    tokenizer = char_tokenizer(WORLDS[config.task].alphabet)
    model = DecoderConfig(vocab_size=tokenizer.vocab_size, max_positions=256, **config.model.to_dict())
    console.line(f"pretraining {count_params(model):,} parameters for {config.steps} steps")
    params = pretrain(config, model, tokenizer, console.line)
    hf_weights.save_params(out, jax.device_get(params), model, eos_ids=tokenizer.eos_ids)
    tokenizer.save(out)
    console.line(f"workdir: {out}")


def pretrain(config, model: DecoderConfig, tokenizer: Tokenizer, log: Callable[[str], None]) -> dict:
    """Trains from scratch; returns the parameters. `log` receives a line every `config.log_every` steps.

    Raises:
      FloatingPointError: the loss stopped being finite.
    """
    _, held_out = WORLDS[config.task].split(1, config.exclude_size, tuple(config.difficulties), config.task_seed)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.steps, 0.02 * config.learning_rate
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay)
    )
    params = init_params(model, jax.random.key(config.seed))
    opt = optimizer.init(params)
    start, losses = time.monotonic(), []
    for step, batch in enumerate(batches(config, tokenizer, frozenset(held_out)), 1):
        params, opt, loss = _update(params, opt, model=model, optimizer=optimizer, **batch)
        losses.append(loss)
        if step % config.log_every == 0 or step == config.steps:
            mean = float(jnp.mean(jnp.stack(losses)))
            if not np.isfinite(mean):
                raise FloatingPointError(f"pretraining: loss {mean} at step {step}")
            reliable = worked_reliability(params, model, tokenizer, held_out[:256], config.length_bucket)
            log(f"step {step}/{config.steps}  loss {mean:.4f}  worked {reliable:.3f}  {time.monotonic() - start:.0f} s")
            losses = []
        if step == config.steps:
            break
    return params
