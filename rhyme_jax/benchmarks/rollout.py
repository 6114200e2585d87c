"""What speculation gains in rollouts, mode against mode, in one process.

Policies and histories are made by real training steps (`training.loop.Trainer`), once under fresh and once under
coupled noise; then the next step's rollouts are repeated in each mode, by turns, after everything is compiled and the
acceptance estimates have settled. Each mode's tokens are compared with those of plain decoding on the same noise.
"""

import concurrent.futures
import copy
import dataclasses
import os
import platform
import tempfile
import time
import tracemalloc
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rhyme_jax.benchmarks import exactness
from rhyme_jax.errors import InputError
from rhyme_jax.history.store import HistoryStore, Response
from rhyme_jax.histospec.budget import Acceptance
from rhyme_jax.histospec.drafts import MAX_MATCH, DraftRules, HistoryBlock, Reader, draft, make_corpus
from rhyme_jax.histospec.engine import RolloutEngine
from rhyme_jax.histospec.presets import PRESETS
from rhyme_jax.histospec.rollouts import Request, Rollouts
from rhyme_jax.histospec.telemetry import predicted
from rhyme_jax.training.console import Console
from rhyme_jax.training.loop import Trainer

MODES = ("vanilla", "histospec", "coupled", "cold", "adversarial", "oracle", "paper", "released")
SETTLE = 3  # untimed runs of each mode, after which its estimates and programs are those of a run in progress


@dataclasses.dataclass
class Mode:
    """One way to make the same rollouts."""

    engine: RolloutEngine
    weights: dict
    requests: list[Request]
    history: HistoryBlock | None  # None decodes plainly
    reference: str  # the mode that decodes the same noise plainly
    acceptance: Acceptance
    rollouts: Rollouts | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> Rollouts:
        self.engine.acceptance = self.acceptance
        self.rollouts = self.engine.generate(self.weights, self.requests, self.history)
        return self.rollouts


def run(config: ml_collections.ConfigDict, console: Console, verify_tokens: int = 0) -> dict:
    """Runs the benchmark of a config (`configs/bench_rollout.py`) and returns what belongs in its JSON file."""
    for mode in config.modes:
        if mode not in MODES:
            raise InputError(f"config.modes={tuple(config.modes)}: no mode {mode!r}; there are {', '.join(MODES)}")
    if config.reward not in ("task", "brevity"):
        raise InputError(f"config.reward={config.reward!r}: must be one of task, brevity")
    if config.repeats < 1 or config.steps < 1:
        raise InputError(f"config.repeats={config.repeats}, config.steps={config.steps}: must be at least 1")
    with tempfile.TemporaryDirectory() as scratch:
        worlds = _Worlds(config, scratch, console)
        try:
            modes = _modes(config, worlds, console)
            result: dict = {"machine": machine()}
            if modes:
                _measure(modes, config.repeats, console)
                result["modes"] = {name: _summary(modes, name) for name in modes if name != "vanilla coupled"}
                _table(result["modes"], console)
            fresh = worlds.world("fresh")
            result["cost_table"] = fresh.sampler.engine.costs.to_json()
            result["store"] = store_bytes()
            console.line(f"history store: {result['store']['bytes_per_token']:.2f} bytes a token in all")
            result["drafting"] = drafting_cost(fresh, **config.drafting.to_dict())
            d = result["drafting"]
            console.line(
                f"drafting: {d['draft_ms']:.2f} ms of an iteration of {d['iteration_ms']:.1f} ms "
                f"({100 * d['share']:.1f} %), {d['rows']} rows, {d['responses']} responses of {d['tokens']} tokens"
            )
            if config.plain_rows:
                result["plain"] = [
                    plain_decoding(fresh, rows, config.plain_tokens, console) for rows in config.plain_rows
                ]
            if verify_tokens:
                result["exactness"] = _verify(fresh, verify_tokens, console)
            return result
        finally:
            worlds.close()


class _BrevityTrainer(Trainer):
    """Rewards short responses, whatever they say: every group differs in length, so every step is a real update, also
    of a model that solves none of the problems.
    """

    def grade(self, problem, responses) -> concurrent.futures.Future:
        rewards = concurrent.futures.Future()
        rewards.set_result([1.0 - len(r) / self.settings.rollout.max_new_tokens for r in responses])
        return rewards


class _Worlds:
    """A trainer for each kind of noise, a few real updates on; they share the engine's programs."""

    def __init__(self, config: ml_collections.ConfigDict, scratch: str, console: Console):
        self.config, self.scratch, self.console = config, scratch, console
        self.trainers: dict[str, Trainer] = {}

    def world(self, noise: str) -> Trainer:
        if noise not in self.trainers:
            train = copy.deepcopy(self.config.train).unlock()
            train.rollout.noise = noise
            train.steps = self.config.steps + 1  # the last is the one that is measured
            kind = _BrevityTrainer if self.config.reward == "brevity" else Trainer
            trainer = kind(train.lock(), os.path.join(self.scratch, noise), self.console)
            if self.trainers:
                trainer.sampler = next(iter(self.trainers.values())).sampler
                trainer.sampler.forget()
            else:
                trainer.measure_costs()
            self.trainers[noise] = trainer
            self.console.line(f"training {self.config.steps} steps under {noise} noise")
            for _ in range(self.config.steps):
                m = trainer.step()
                self.console.line(f"  step {m['step']}: reward {m['reward/mean']:.3f}, {m['rollout/tokens']} tokens")
        return self.trainers[noise]

    def close(self) -> None:
        for trainer in self.trainers.values():
            trainer.close()


def _modes(config, worlds: _Worlds, console: Console) -> dict[str, Mode]:
    modes: dict[str, Mode] = {}
    if not config.modes:
        return modes
    rng = np.random.default_rng(config.train.seed)
    for noise in ("fresh", "coupled"):
        wanted = [m for m in config.modes if (m == "coupled") == (noise == "coupled")]
        if not wanted:
            continue
        trainer = worlds.world(noise)
        engine, settings = trainer.sampler.engine, trainer.settings
        learned = copy.deepcopy(engine.acceptance)  # by the training steps
        weights = trainer.learner.rollout_params(trainer.state)
        prompts, requests, history, _ = trainer.plan(trainer.progress.steps)
        prompts, requests, history = _first_groups(config.groups, prompts, requests, history)
        if config.groups:
            engine.prepare(weights, requests, history)
        plain = "vanilla" if noise == "fresh" else "vanilla coupled"
        modes[plain] = Mode(engine, weights, requests, None, plain, copy.deepcopy(learned))
        for name in wanted:
            if name == "vanilla":
                continue
            block, mode_engine = history, engine
            if name == "cold":
                block = _emptied(history)
            elif name == "adversarial":
                block = _garbled(history, rng, trainer.model.vocab_size)
            elif name == "oracle":
                block = _foretold(history, modes[plain].run(), requests)
            elif name in PRESETS:
                preset = PRESETS[name]
                rules = dataclasses.replace(engine.config.rules, sources=preset.sources, min_prob=preset.min_prob)
                chosen = dataclasses.replace(engine.config, rules=rules, window=preset.window)
                mode_engine = RolloutEngine(trainer.model, chosen, trainer.learner.mesh, settings.seed, engine.costs)
                tokens = [p.tokens for p in prompts]
                block = trainer.history.query(
                    tokens, len(tokens), history.weight_GR.shape[1], settings.rollout.max_new_tokens, preset.weight
                )
            estimates = learned if mode_engine is engine else Acceptance(engine.config.depths)
            modes[name] = Mode(mode_engine, weights, requests, block, plain, copy.deepcopy(estimates))
    return modes


def _first_groups(groups: int, prompts: list, requests: list[Request], history: HistoryBlock) -> tuple:
    """The part of a batch that belongs to its first groups; all of it for 0."""
    if groups:
        prompts, requests = prompts[:groups], [r for r in requests if r.group < groups]
        history = HistoryBlock(**{f.name: getattr(history, f.name)[:groups] for f in dataclasses.fields(history)})
    return prompts, requests, history


def _emptied(history: HistoryBlock) -> HistoryBlock:
    return HistoryStore(1, 1).query([], *history.tokens_GRP.shape[:2], _text_slots(history))


def _text_slots(history: HistoryBlock) -> int:
    return history.tokens_GRP.shape[2] - MAX_MATCH


def _garbled(history: HistoryBlock, rng, vocab_size: int) -> HistoryBlock:
    """As many tokens, at random; no response is known to be under any noise."""
    tokens_GRP = np.where(history.tokens_GRP >= 0, rng.integers(0, vocab_size, history.tokens_GRP.shape), -1)
    nowhere = np.full(history.sample_GR.shape, -1)
    return HistoryBlock(tokens_GRP.astype(np.int32), history.weight_GR, nowhere.astype(np.int32), nowhere)


def _foretold(history: HistoryBlock, future: Rollouts, requests: list[Request]) -> HistoryBlock:
    """A history that holds the rollouts to come, each under its own noise."""
    store = HistoryStore(1, 10**12)
    prompts: dict[int, np.ndarray] = {}
    responses: dict[int, list[Response]] = {}
    for n, r in enumerate(requests):
        prompts[r.group] = r.prompt
        responses.setdefault(r.group, []).append(Response(future.response(n), 1.0, 0, 0, r.sample, r.noise))
    for g, prompt in prompts.items():
        store.add(prompt, responses[g])
    groups, texts, _ = history.tokens_GRP.shape
    return store.query([prompts[g] for g in range(groups)], groups, texts, _text_slots(history), "count")


def _measure(modes: dict[str, Mode], repeats: int, console: Console) -> None:
    for name, mode in modes.items():
        for _ in range(SETTLE):
            mode.run()
        console.line(f"settled: {name}")
    names = list(modes)
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            modes[name].seconds.append(modes[name].run().seconds)
        console.line(f"repeat {repeat + 1} of {repeats}")


def _summary(modes: dict[str, Mode], name: str) -> dict:
    mode, plain = modes[name], modes[modes[name].reference]
    rollouts, reference = mode.rollouts, plain.rollouts
    ratios = np.array(plain.seconds) / np.array(mode.seconds)
    identical = compared = 0
    for n in range(len(mode.requests)):
        have, want = rollouts.response(n), reference.response(n)
        shorter = min(len(have), len(want))
        identical += int((have[:shorter] == want[:shorter]).sum())
        compared += max(len(have), len(want))
    seconds = float(np.median(mode.seconds))
    oracle = modes.get("oracle")
    tokens_per_s = rollouts.generated / seconds
    return {
        "tokens_per_s": tokens_per_s,
        "ratio_vs_vanilla": float(np.median(ratios)),
        "ratio_min": float(ratios.min()),
        "ratio_max": float(ratios.max()),
        "predicted_ratio": predicted(rollouts.chunks, mode.engine.costs)["rollout/predicted_speedup"],
        "tokens_per_row_forward": rollouts.tokens_per_row_forward,
        "acceptance": rollouts.acceptance,
        "proposed": int(rollouts.proposed_N.sum()),
        "row_forwards": int(rollouts.forwards_N.sum()),
        "iterations": rollouts.iterations,
        "identical_tokens": identical,
        "compared_tokens": compared,
        "share_of_oracle": None
        if oracle is None
        else tokens_per_s / (oracle.rollouts.generated / float(np.median(oracle.seconds))),
        "chunks": [[c.rows, c.slots, c.k, c.iterations] for c in rollouts.chunks],
        "seconds": mode.seconds,
    }


def _table(modes: dict[str, dict], console: Console) -> None:
    console.line(
        f"{'mode':12} {'tokens/s':>9} {'ratio':>6} {'min':>5} {'max':>5} {'pred':>5} {'tok/fwd':>8} {'accept':>7} "
        f"{'iters':>6} {'identical':>14}"
    )
    for name, m in modes.items():
        console.line(
            f"{name:12} {m['tokens_per_s']:9.0f} {m['ratio_vs_vanilla']:6.2f} {m['ratio_min']:5.2f} "
            f"{m['ratio_max']:5.2f} {m['predicted_ratio']:5.2f} {m['tokens_per_row_forward']:8.2f} "
            f"{m['acceptance']:7.2f} {m['iterations']:6d} {m['identical_tokens']:7d}/{m['compared_tokens']}"
        )


def store_bytes(prompts: int = 200, samples: int = 16) -> dict:
    """What the history store takes for each token, everything counted."""
    rng = np.random.default_rng(0)
    groups = [
        [
            Response(rng.integers(0, 49152, rng.integers(200, 800)).astype(np.int32), 1.0, 0, 0, i)
            for i in range(samples)
        ]
        for _ in range(prompts)
    ]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        store = HistoryStore(1, 10**9)
        for g, responses in enumerate(groups):
            store.add([g], responses)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return {"tokens": store.tokens, "bytes_per_token": grown / store.tokens}


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def drafting_cost(trainer: Trainer, rows: int, samples: int, responses: int, tokens: int, k: int) -> dict:
    """Time of drafting alone, against an iteration of plain decoding of as many rows, with a short cache."""
    rng, groups = np.random.default_rng(0), rows // samples
    words = rng.integers(0, trainer.model.vocab_size, (groups, responses, tokens), dtype=np.int32)
    store = HistoryStore(1, 10**9)
    prompts = [np.arange(g, g + 16, dtype=np.int32) for g in range(groups)]
    for prompt, texts in zip(prompts, words, strict=True):
        store.add(prompt, [Response(t, 1.0, 0, 0, i) for i, t in enumerate(texts)])
    rules = DraftRules()
    corpus = jax.device_put(make_corpus(store.query(prompts, groups, responses, tokens), prompts, samples, rules))
    row_B = np.arange(rows)
    zeros_B = np.zeros(rows, np.int32)
    reader = Reader(row_B // samples, responses + row_B % samples, zeros_B - 1, zeros_B)
    beliefs = Acceptance(k - 1).beliefs(0.0, windows=True)
    tokens_BS = jnp.asarray(np.concatenate([np.tile(prompts[0], (rows, 1)), words[row_B // samples, 0]], axis=1))
    length_B, prompt_B = jnp.full(rows, 16 + tokens // 2), jnp.full(rows, 16)
    drafting = jax.jit(
        lambda corpus, reader, beliefs, tokens, length, prompt: draft(
            corpus, reader, beliefs, rules, tokens, length, prompt, k - 1
        )
    )
    arguments = jax.device_put((corpus, reader, beliefs, tokens_BS, length_B, prompt_B))
    jax.block_until_ready(drafting(*arguments))
    draft_s = _median_seconds(lambda: drafting(*arguments), 15)
    iteration_s = _plain_seconds(trainer, rows, 16) / 16
    return {
        "rows": rows,
        "responses": responses,
        "live_texts": samples,
        "tokens": tokens,
        "k": k,
        "draft_ms": 1e3 * draft_s,
        "iteration_ms": 1e3 * iteration_s,
        "share": draft_s / iteration_s,
    }


def _plain_seconds(trainer: Trainer, rows: int, tokens: int) -> float:
    """Seconds to decode so many tokens in each of some rows, prefill included; no row ends early."""
    config = dataclasses.replace(
        trainer.sampler.engine.config, eos_ids=(-1,), draft_buckets=(1,), max_rows=rows, chunk=tokens, prompt_slots=8
    )
    engine = RolloutEngine(trainer.model, config, trainer.learner.mesh, 0)
    weights = trainer.learner.rollout_params(trainer.state)
    prompts = trainer.train_prompts

    requests = [
        Request(prompts[b % len(prompts)].tokens, prompts[b % len(prompts)].id, b, 0, 0, tokens) for b in range(rows)
    ]
    engine.generate(weights, requests)  # compiles
    return float(np.median([engine.generate(weights, requests).seconds for _ in range(3)]))


def plain_decoding(trainer: Trainer, rows: int, tokens: int, console: Console) -> dict:
    """Tokens per second of plain decoding, beside the floor that the machine's memory and arithmetic set."""
    seconds = _plain_seconds(trainer, rows, tokens)
    weights = trainer.learner.rollout_params(trainer.state)
    size = sum(x.nbytes for x in jax.tree.leaves(weights))
    count = sum(x.size for x in jax.tree.leaves(weights))
    memory, arithmetic = bandwidth(), matrix_rate(rows, trainer.model.width, trainer.model.mlp_width)
    floor = max(size / memory, 2 * count * rows / arithmetic)
    result = {
        "rows": rows,
        "new_tokens": tokens,
        "tokens_per_s": rows * tokens / seconds,
        "floor_tokens_per_s": rows / floor,
        "weight_bytes": size,
        "bytes_per_s": memory,
        "flop_per_s": arithmetic,
    }
    console.line(
        f"plain decoding, {rows} rows: {result['tokens_per_s']:.0f} tokens/s; the machine's floor is "
        f"{result['floor_tokens_per_s']:.0f} ({size / 1e6:.0f} MB of weights at {memory / 1e9:.1f} GB/s, "
        f"{arithmetic / 1e9:.0f} GFLOP/s at {rows} rows)"
    )
    return result


def bandwidth() -> float:
    """Bytes per second of reading a large array."""
    x = jnp.ones(2**27, jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    return x.nbytes / _median_seconds(lambda: total(x), 5)


def matrix_rate(rows: int, width: int, hidden: int, layers: int = 64) -> float:
    """Floating-point operations per second of matrix products with as few rows, over weights too many for a cache."""
    weights = jnp.ones((layers, width, hidden), jnp.float32)
    x = jnp.ones((rows, width), jnp.float32)
    product = jax.jit(lambda x, w: jax.lax.map(lambda layer: x @ layer, w))
    jax.block_until_ready(product(x, weights))
    return 2 * rows * weights.size / _median_seconds(lambda: product(x, weights), 5)


def machine() -> dict:
    return {
        "devices": [str(d.device_kind) for d in jax.devices()],
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "jax": jax.__version__,
    }


def _verify(trainer: Trainer, tokens: int, console: Console) -> dict:
    """The exactness campaign, with the weights of the fresh world."""
    weights = trainer.learner.rollout_params(trainer.state)
    report = exactness.campaign(
        weights,
        trainer.model,
        trainer.tokenizer.eos_ids,
        [p.tokens for p in trainer.train_prompts[:16]],
        trainer.learner.mesh,
        tokens,
        budget=min(48, trainer.settings.rollout.max_new_tokens),
        progress=console.line,
    )
    for d in report.differences:
        what = "near tie" if d.near_tie else "WRONG"
        console.line(
            f"{what}: {d.case}: rollout {d.rollout}, position {d.position}: {d.token}, not {d.oracle}; {d.gap}"
        )
    console.line(
        f"exactness: {report.compared} tokens in {report.cases} rollout batches against one-at-a-time decoding, "
        f"{report.drafted} of them drafted: {len(report.wrong)} wrong, {len(report.near_ties)} near ties"
    )
    return {
        "compared_tokens": report.compared,
        "drafted_tokens": report.drafted,
        "wrong": len(report.wrong),
        "near_ties": [dataclasses.asdict(d) for d in report.near_ties],
    }
