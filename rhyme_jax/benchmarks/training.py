"""What a training step takes: peak memory and seconds, with each remat policy, with logits whole and in blocks.

A step is what `grpo.learner.Learner` does with one micro-batch: one program adds the gradients of the policy loss to
those of earlier micro-batches, another clips them and steps Adam. The programs are written out here, of the same loss,
scores and optimizer, so that a large model can be compiled without its parameters being allocated; that they do the
same is tested.

Memory is what the compiler says that it assigned. The peak of a program is arguments + results - what they share +
temporaries; while gradients are accumulated, Adam's moments lie beside that.
"""

import dataclasses
import math
import operator
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from rhyme_jax.benchmarks import loading
from rhyme_jax.benchmarks.rollout import machine
from rhyme_jax.errors import InputError
from rhyme_jax.grpo.losses import LossConfig, policy_loss
from rhyme_jax.models.config import DTYPES, DecoderConfig
from rhyme_jax.models.load import RANDOM
from rhyme_jax.models.params import abstract_params, count_params, init_params
from rhyme_jax.models.remat import check_policy
from rhyme_jax.models.scoring import score_responses
from rhyme_jax.training.console import Console

LEARNING_RATE = 1e-6


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table."""

    dtype: str  # of activations; parameters, gradients and Adam's moments are float32
    remat: str
    vocab_block: int

    def __str__(self) -> str:
        logits = f"in blocks of {self.vocab_block}" if self.vocab_block else "whole"
        return f"{self.dtype}, remat {self.remat}, logits {logits}"


def run(config: ml_collections.ConfigDict, console: Console) -> dict:
    """Runs the benchmark of a config (`configs/bench_training.py`) and returns what belongs in its JSON file."""
    model = _checked(config)
    console.line(
        f"{config.weights}: {count_params(model) / 1e6:.0f}M parameters, {model.layers} layer(s), vocabulary "
        f"{model.vocab_size}; micro-batches of {config.rows} rows of {config.prompt_tokens} + "
        f"{config.response_tokens} tokens"
    )
    settings = [
        Setting(dtype, remat, block)
        for dtype in config.dtypes
        for remat in config.remat
        for block in config.vocab_blocks
    ]
    apply, moments_bytes = compile_apply(model, config.rows)
    programs = {}
    for setting in settings:
        start = time.perf_counter()
        programs[setting] = compile_accumulate(
            dataclasses.replace(model, dtype=setting.dtype),
            setting.remat,
            setting.vocab_block,
            config.rows,
            config.prompt_tokens + config.response_tokens,
            config.response_tokens,
        )
        console.line(f"compiled {setting} in {time.perf_counter() - start:.0f} s")
    seconds = _measure(programs, apply, model, config)
    steps = [
        {
            **dataclasses.asdict(setting),
            "peak_bytes": max(peak_bytes(program) + moments_bytes, peak_bytes(apply)),
            "accumulate_bytes": peak_bytes(program) + moments_bytes,
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
            "seconds": seconds[setting],
        }
        for setting, program in programs.items()
    ]
    _table(steps, console)
    result = {"machine": machine(), "parameters": count_params(model), "steps": steps}
    if config.loading.files:
        result["loading"] = _loading(config, model, console)
    return result


def compile_accumulate(
    model: DecoderConfig, remat: str, vocab_block: int, rows: int, positions: int, slots: int
) -> jax.stages.Compiled:
    """(parameters, gradients of loss sums (donated), batch) -> gradients with those of the batch added.

    For micro-batches of `rows` sequences of `positions`, the last `slots` of which are the response. Compiled for
    abstract arguments, so nothing is allocated.
    """
    params = abstract_params(model)

    def loss_sum(params: dict, batch: dict) -> jax.Array:
        scores = score_responses(
            params, model, batch["tokens"], batch["prompt_length"], slots, remat=remat, vocab_block=vocab_block
        )
        mask_BT = jnp.ones((rows, slots), bool)
        return policy_loss(LossConfig(), *scores, batch["log_prob"], batch["advantage"], mask_BT).loss

    def accumulate(params: dict, total: dict, batch: dict) -> dict:
        return jax.tree.map(jnp.add, total, jax.grad(loss_sum)(params, batch))

    batch = jax.eval_shape(lambda: make_batch(model, rows, positions, slots))
    return jax.jit(accumulate, donate_argnums=1).lower(params, params, batch).compile()


def compile_apply(model: DecoderConfig, weight: float) -> tuple[jax.stages.Compiled, int]:
    """((parameters, Adam's moments) (donated), gradients of loss sums) -> the former after an update by the mean.

    Returns it with the bytes of the moments.
    """
    optimizer = make_optimizer()
    params = abstract_params(model)
    moments = jax.eval_shape(optimizer.init, params)

    def apply(state: tuple, total: dict) -> tuple:
        params, moments = state
        updates, moments = optimizer.update(jax.tree.map(lambda g: g / weight, total), moments, params)
        return optax.apply_updates(params, updates), moments

    compiled = jax.jit(apply, donate_argnums=0).lower((params, moments), params).compile()
    return compiled, sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(moments))


def peak_bytes(program: jax.stages.Compiled) -> int:
    """Of arguments, results and temporaries, on each device."""
    memory = program.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, weight_decay=0.0))


def make_batch(model: DecoderConfig, rows: int, positions: int, slots: int) -> dict:
    """Random rollouts, good and bad ones."""
    tokens = jax.random.randint(jax.random.key(0), (rows, positions), 0, model.vocab_size)
    return {
        "tokens": tokens,
        "prompt_length": jnp.full(rows, positions - slots),
        "log_prob": jnp.full((rows, slots), -1.0),
        "advantage": jnp.linspace(-1.0, 1.0, rows),
    }


def _checked(config: ml_collections.ConfigDict) -> DecoderConfig:
    """The model that a config names.

    Raises:
      InputError: a field is bad.
    """
    name = config.weights.removeprefix("random:")
    if name not in RANDOM or name == config.weights:
        shapes = ", ".join(f"random:{shape}" for shape in RANDOM)
        raise InputError(f"config.weights={config.weights!r}: no such shape; there are {shapes}")
    for field, least in (
        ("vocab_size", 0),
        ("layers", 0),
        ("rows", 1),
        ("prompt_tokens", 1),
        ("response_tokens", 1),
        ("repeats", 0),
        ("loading.files", 0),
    ):
        value = operator.attrgetter(field)(config)
        if value < least:
            raise InputError(f"config.{field}={value}: must be at least {least}")
    for field in ("dtypes", "remat", "vocab_blocks"):
        if not config[field]:
            raise InputError(f"config.{field}=(): must name at least one")
    for dtype in config.dtypes:
        if dtype not in DTYPES:
            raise InputError(f"config.dtypes={tuple(config.dtypes)}: no {dtype!r}; there are {', '.join(DTYPES)}")
    for policy in config.remat:
        check_policy(policy, "config.remat")
    for block in config.vocab_blocks:
        if block < 0:
            raise InputError(f"config.vocab_blocks={tuple(config.vocab_blocks)}: must not be negative")
    shape = RANDOM[name]
    return dataclasses.replace(
        shape, vocab_size=config.vocab_size or shape.vocab_size, layers=config.layers or shape.layers
    )


def _measure(programs: dict[Setting, jax.stages.Compiled], apply, model: DecoderConfig, config) -> dict:
    """{setting: seconds of a step}, by turns, after one that is not timed."""
    seconds: dict[Setting, list[float]] = {setting: [] for setting in programs}
    if not config.repeats:
        return seconds
    params = init_params(model, jax.random.key(0))
    state = params, make_optimizer().init(params)
    batch = make_batch(model, config.rows, config.prompt_tokens + config.response_tokens, config.response_tokens)
    for repeat in range(config.repeats + 1):
        for setting, accumulate in programs.items():
            total = jax.block_until_ready(jax.tree.map(jnp.zeros_like, state[0]))
            start = time.perf_counter()
            state = jax.block_until_ready(apply(state, accumulate(state[0], total, batch)))
            if repeat:
                seconds[setting].append(time.perf_counter() - start)
    return seconds


def _loading(config: ml_collections.ConfigDict, model: DecoderConfig, console: Console) -> list[dict]:
    """Memory of reading such a model from a checkpoint, shard by shard and as a whole, in processes of their own."""
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        loading.write_synthetic(pathlib.Path(scratch), model, config.loading.files)
        console.line(f"{'loading onto':14} {'how':>9} {'parameters':>11} {'beyond them':>12} {'seconds':>8}")
        for mesh in config.loading.meshes:
            for streamed in (True, False):
                measured = loading.measure_loading(pathlib.Path(scratch), tuple(mesh), streamed=streamed)
                results.append({"mesh": list(mesh), "streamed": streamed, **measured})
                console.line(
                    f"{'x'.join(map(str, mesh)) + ' devices':14} {'by shard' if streamed else 'whole':>9} "
                    f"{_mb(measured['params_bytes'])} {_mb(measured['extra_bytes'], 12)} {measured['seconds']:8.2f}"
                )
    return results


def _table(steps: list[dict], console: Console) -> None:
    plain = {step["dtype"]: step for step in reversed(steps)}  # the first setting of each dtype
    console.line(
        f"{'compute':9} {'remat':6} {'block':>7} {'peak':>11} {'temporary':>11} {'peak ratio':>10} {'seconds':>8} "
        f"{'ratio':>6}"
    )
    for step in steps:
        base = plain[step["dtype"]]
        line = (
            f"{step['dtype']:9} {step['remat']:6} {step['vocab_block'] or 'whole':>7} {_mb(step['peak_bytes'])} "
            f"{_mb(step['temporary_bytes'])} {step['peak_bytes'] / base['peak_bytes']:10.2f}"
        )
        if step["seconds"]:
            ratio = np.median(np.array(step["seconds"]) / np.array(base["seconds"]))
            line += f" {np.median(step['seconds']):8.2f} {ratio:6.2f}"
        console.line(line)


def _mb(size: int, width: int = 11) -> str:
    return f"{size / 1e6:.0f} MB".rjust(width)
