"""What scheduling gains, simulated: policies side by side on the same lengths, from one accelerator to thousands.

The figures are those of `histopipe.simulator`, which drives the planner of the real runtime. Lengths are drawn, or
those that a run recorded; what decoding costs follows from the model's and the accelerator's numbers (a roofline).
"""

import copy
import dataclasses
import math
import pathlib
import statistics
import time

import ml_collections
import numpy as np

from rhyme_jax.errors import InputError
from rhyme_jax.histopipe import simulator, traces
from rhyme_jax.histopipe.costs import SliceCost
from rhyme_jax.histopipe.plan import LAYOUTS, Work, make_plan
from rhyme_jax.training import settings
from rhyme_jax.training.console import Console, duration

BASE = "equal"  # the policy that ratios are taken to
COLORS = {
    "equal": "0.65",
    "spread": "tab:olive",
    "balanced": "tab:green",
    "longest_first_oracle": "0.85",
    "async": "0.45",
    "async_spread": "darkkhaki",
    "paper": "tab:orange",
    "cross_step": "tab:blue",
    "over_provision": "tan",
}


@dataclasses.dataclass(frozen=True)
class Model:
    weight_gb: float
    kv_kb_per_token: float
    gflops_per_token: float

    def __post_init__(self):
        _above_0("model", self, "weight_gb", "kv_kb_per_token", "gflops_per_token")


@dataclasses.dataclass(frozen=True)
class Accelerator:
    tb_per_s: float
    tflops: float
    overhead_ms: float

    def __post_init__(self):
        _above_0("accelerator", self, "tb_per_s", "tflops")
        settings.at_least("accelerator", self, 0, "overhead_ms")


@dataclasses.dataclass(frozen=True)
class System:
    accelerators: int
    accelerators_per_slice: int
    max_rows: int
    prompts_per_accelerator: int
    samples_per_prompt: int
    steps_per_epoch: int
    layout: str
    defer: float
    look_seconds: float
    first_tokens: float

    def __post_init__(self):
        names = ("accelerators", "accelerators_per_slice", "max_rows", "prompts_per_accelerator", "samples_per_prompt",
                 "steps_per_epoch")  # fmt: skip
        settings.at_least("system", self, 1, *names)
        _above_0("system", self, "look_seconds", "first_tokens")
        settings.one_of("system.layout", self.layout, LAYOUTS)
        if not 0 <= self.defer <= 0.5:
            raise InputError(f"system.defer={self.defer}: must be a share of a step's prompts from 0 to 0.5")

    @property
    def prompts(self) -> int:
        """Of a step."""
        return self.accelerators * self.prompts_per_accelerator


@dataclasses.dataclass(frozen=True)
class Learner:
    accelerators: int
    tflops: float
    gflops_per_token: float
    fixed_seconds: float

    def __post_init__(self):
        settings.at_least("learner", self, 0, "accelerators", "fixed_seconds")
        _above_0("learner", self, "tflops", "gflops_per_token")


@dataclasses.dataclass(frozen=True)
class TraceSettings(traces.Lengths):
    path: str
    prompt_tokens: int

    def __post_init__(self):
        super().__post_init__()
        settings.at_least("trace", self, 1, "prompt_tokens")


@dataclasses.dataclass(frozen=True)
class Planning:
    prompts: int
    samples: int
    slices: int

    def __post_init__(self):
        settings.at_least("planning", self, 1, "prompts", "samples", "slices")
        if self.slices > self.prompts:
            raise InputError(f"planning.slices={self.slices}: must not exceed planning.prompts={self.prompts}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A typed, checked copy of `configs/simulate_pipeline.py`."""

    seed: int
    steps: int
    policies: str
    cases: str
    model: Model
    accelerator: Accelerator
    system: System
    learner: Learner
    trace: TraceSettings
    planning: Planning

    def __post_init__(self):
        settings.at_least("config", self, 1, "steps")
        settings.at_least("config", self, 0, "seed")
        for name in self.policies.split("+"):
            settings.one_of("policies", name, simulator.POLICIES)
        if BASE not in self.policies.split("+"):
            raise InputError(f"policies={self.policies!r}: must have {BASE!r} among them, which ratios are taken to")
        rest = self.system.accelerators - self.learner.accelerators
        if rest < 1 or rest % self.system.accelerators_per_slice:
            raise InputError(
                f"system.accelerators_per_slice={self.system.accelerators_per_slice}: does not divide the {rest} "
                "accelerators that roll out (system.accelerators - learner.accelerators)"
            )
        self.simulated()

    @classmethod
    def from_config(cls, config: ml_collections.ConfigDict) -> "Settings":
        return settings.section(cls, config.to_dict(), "")

    def simulated(self) -> simulator.System:
        m, a, s, n = self.model, self.accelerator, self.system, self.system.accelerators_per_slice
        cost = SliceCost.roofline(
            weight_bytes=m.weight_gb * 1e9, kv_bytes_per_token=m.kv_kb_per_token * 1e3, bandwidth=n * a.tb_per_s * 1e12,
            flops_per_token=m.gflops_per_token * 1e9, flops=n * a.tflops * 1e12, overhead=a.overhead_ms * 1e-3,
            max_rows=s.max_rows,
        )  # fmt: skip
        trains = self.learner.accelerators or s.accelerators
        learner = simulator.Learner(
            token_seconds=self.learner.gflops_per_token / (self.learner.tflops * 1e3 * trains),
            fixed_seconds=self.learner.fixed_seconds,
            own=self.learner.accelerators > 0,
        )
        return simulator.System(
            slices=(s.accelerators - self.learner.accelerators) // n, cost=cost, learner=learner, groups=s.prompts,
            look_seconds=s.look_seconds, defer_share=s.defer, first_tokens=s.first_tokens,
            max_tokens=self.trace.max_tokens,
        )  # fmt: skip

    def lengths(self) -> traces.Trace:
        t, s = self.trace, self.system
        if t.path:
            return traces.recorded(pathlib.Path(t.path), t.prompt_tokens)
        names = (f.name for f in dataclasses.fields(traces.Lengths))
        drawn = traces.Lengths(**{name: getattr(t, name) for name in names})
        prompts = s.prompts * s.steps_per_epoch
        most = max(round(s.prompts * simulator.POLICIES[p].provision) for p in self.policies.split("+"))
        if most > prompts:
            raise InputError(f"system.steps_per_epoch={s.steps_per_epoch}: over_provision needs at least 2")
        epochs = math.ceil((self.steps + 1) / (prompts // most))
        return traces.draw(drawn, epochs, prompts, s.samples_per_prompt, t.prompt_tokens, self.seed)


def run(config: ml_collections.ConfigDict, console: Console) -> dict:
    """Simulates a config (`configs/simulate_pipeline.py`) and returns what belongs in its JSON file.

    Raises:
      InputError: a field is unknown, mistyped or impossible, also in one of the cases.
    """
    cases = [(case, Settings.from_config(_overridden(config, case))) for case in _cases(config)]
    if not cases:
        chosen = Settings.from_config(config)
        return {**_simulate(chosen, console), "planning_seconds": planning_seconds(chosen, console)}
    done = []
    for case, chosen in cases:
        console.line(f"--- {case}")
        done.append({"case": case, **_simulate(chosen, console)})
    return {"cases": done}


def planning_seconds(s: Settings, console: Console) -> dict[str, float]:
    """What one plan takes, by mode: process seconds on whatever cores numpy uses, the median of five."""
    n = s.planning
    rng = np.random.default_rng(s.seed)
    mean_G = np.clip(s.trace.median * rng.lognormal(0.0, s.trace.sigma, n.prompts), 1, s.trace.max_tokens)
    prompt_G = np.full(n.prompts, s.trace.prompt_tokens)
    work = Work(mean_G, mean_G * (1 + 2 * s.trace.within), prompt_G, n.samples, longest=s.trace.max_tokens)
    cost, seconds = s.simulated().cost, {}
    busy_S = rng.uniform(0, 60, n.slices)
    for mode, busy in (("balanced", None), ("cross_step", busy_S)):
        taken = []
        for _ in range(5):
            start = time.process_time()
            make_plan(work, n.slices, cost, mode, busy_S=busy)
            taken.append(time.process_time() - start)
        seconds[mode] = statistics.median(taken)
    text = ", ".join(f"{mode} {t:.2f} s" for mode, t in seconds.items())
    console.line(f"a plan of {n.prompts} prompts x {n.samples} samples on {n.slices} slices: {text}")
    return seconds


def _cases(config: ml_collections.ConfigDict) -> list[str]:
    cases = config.get("cases", "")
    return [case.strip() for case in cases.split(";") if case.strip()] if isinstance(cases, str) else []


def _overridden(config: ml_collections.ConfigDict, case: str) -> ml_collections.ConfigDict:
    """A copy with "field=value,field=value" set."""
    changed = copy.deepcopy(config).unlock()
    for override in case.split(","):
        name, equals, text = override.strip().partition("=")
        section, _, field = name.rpartition(".")
        try:
            at = changed.get(section) if section else changed
            old = at[field]
            at[field] = type(old)(text)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InputError(f"cases={case!r}: expected field=value of the config, got {override.strip()!r}") from e
        if not equals or isinstance(old, ml_collections.ConfigDict):
            raise InputError(f"cases={case!r}: expected field=value of the config, got {override.strip()!r}")
    return changed


def _simulate(s: Settings, console: Console) -> dict:
    trace, system = s.lengths(), s.simulated()
    lengths = trace.lengths_EPC
    first = trace.prompts // system.groups
    drawn = {
        "mean_tokens": float(lengths.mean()),
        "longest_tokens": int(lengths.max()),
        "cut_share": float((lengths >= s.trace.max_tokens).mean()),
        "major_shifts": trace.major_shifts(),
    }
    limits = simulator.bounds(system, trace, s.steps, s.seed)
    console.line(
        f"{system.slices} slices, {system.groups} prompts x {trace.samples} samples a step, {drawn['mean_tokens']:.0f} "
        f"tokens on average, {100 * drawn['cut_share']:.1f} % cut, {100 * drawn['major_shifts']:.1f} % major shifts"
    )
    console.line(
        f"bounds of a step's rollouts: {limits.alone.mean():.0f} s (its longest response alone), "
        f"{limits.work.mean():.0f} s (its tokens, all slices full)"
    )
    policies: dict[str, dict] = {}
    for name in sorted(s.policies.split("+"), key=lambda name: name != BASE):
        started = time.monotonic()
        policy = simulator.POLICIES[name]
        if policy.layout == "best":
            policy = dataclasses.replace(policy, layout=s.system.layout)
        made = simulator.summary(simulator.simulate(policy, system, trace, s.steps, s.seed), first)
        base = policies.get(BASE, made)
        made = {
            "throughput_ratio": made["tokens_per_s"] / base["tokens_per_s"],
            "rollouts_ratio": made["rollouts_per_s"] / base["rollouts_per_s"],
            **made,
        }
        policies[name] = made
        console.line(
            f"{name:<20} {made['throughput_ratio']:.2f}x tokens/s | step {made['step_seconds']:.0f} s | bubbles "
            f"{100 * made['bubble_ratio']:.1f} % | staleness {made['mean_staleness']:.2f} (at most "
            f"{made['max_staleness']}) | deferred {100 * made['deferred_share']:.2f} % | moved {made['moved']} | "
            f"simulated in {duration(time.monotonic() - started)}"
        )
    return {
        "trace": drawn,
        "slices": system.slices,
        "groups": system.groups,
        "bounds": _bounds(limits, system, trace, s, policies[BASE]["tokens_per_s"], first),
        "policies": policies,
    }


def _bounds(limits, system, trace, s: Settings, base: float, first: int) -> dict:
    """What any schedule could reach, over the same steps as the policies."""
    first = first if first < s.steps else 0
    alone, work = limits.alone[first:], limits.work[first:]
    batches = trace.batches(system.groups, s.seed, s.steps)[first:]
    tokens = [int(lengths_GC.sum()) for _, lengths_GC in batches]
    updates = [
        t * system.learner.token_seconds * (not system.learner.own) + system.learner.fixed_seconds for t in tokens
    ]
    ahead = sum(work) + (0 if system.learner.own else sum(updates))
    barrier = sum(map(max, alone, work)) + sum(updates)
    return {
        "alone_seconds": float(alone.mean()),
        "work_seconds": float(work.mean()),
        "ratio_with_barrier": sum(tokens) / barrier / base,
        "ratio_ahead": sum(tokens) / ahead / base,
    }


def _above_0(section: str, values, *names: str) -> None:
    for name in names:
        if not getattr(values, name) > 0:
            raise InputError(f"{section}.{name}={getattr(values, name)}: must be above 0")


# --- pictures ---------------------------------------------------------------------------------------------------


def pyplot():
    """matplotlib's, without a display.

    Raises:
      InputError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as e:
        raise InputError("--plot: needs matplotlib (pip install matplotlib)") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot(result: dict, path: str) -> None:
    """One picture of a result: bars by policy, or, of a result with cases, lines over them."""
    plt = pyplot()
    if "cases" in result:
        fig, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
        draw_cases(axis, result)
    else:
        fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
        draw_policies(*axes, result)
    try:
        fig.savefig(path, dpi=110)
    except (OSError, ValueError) as e:
        raise InputError(f"--plot={path}: cannot be written ({e})") from e
    plt.close(fig)


def draw_policies(ratio, bubbles, result: dict) -> None:
    """Throughput and bubbles of each policy."""
    names = list(result["policies"])[::-1]
    for axis, key, scale in ((ratio, "throughput_ratio", 1), (bubbles, "bubble_ratio", 100)):
        values = [scale * result["policies"][name][key] for name in names]
        bars = axis.barh([name.replace("_", " ") for name in names], values, color=[COLORS[name] for name in names])
        axis.bar_label(bars, fmt="%.2f" if scale == 1 else "%.1f", fontsize=8, padding=2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    ratio.set_title("tokens/s, equal split = 1")
    bubbles.set_title("bubbles (% of slice time)")
    bubbles.set_yticklabels([])


def draw_cases(axis, result: dict) -> None:
    """Throughput over the values of the field that the cases set."""
    labels = [case["case"].partition("=")[2] for case in result["cases"]]
    at = range(len(labels))
    for name in result["cases"][0]["policies"]:
        values = [case["policies"][name]["throughput_ratio"] for case in result["cases"]]
        axis.plot(at, values, marker="o", ms=4, color=COLORS[name], label=name.replace("_", " "))
    axis.set_xticks(list(at), labels, fontsize=8)
    axis.set(xlabel=result["cases"][0]["case"].partition("=")[0], ylim=(0, None), title="tokens/s, equal split = 1")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
