"""Scheduling of rollouts over slices, simulated; runs on one CPU core, whatever the number of accelerators.

  python -m experiments.simulate_pipeline [--config=configs/simulate_pipeline.py:VARIANT] [--json=PATH] [--plot=PATH]

Hardware for all: one CPU core, 1 GiB (`scaling` 3 GiB). Ratios are tokens per second to "equal"; the figures of all
variants, and how to read them, are in docs/pipeline.md.

default     16 accelerators.
            Time: half a minute.  Expected: balanced 1.5x, cross_step 1.8x.
heavy_tail  128 accelerators, 512 prompts x 16 samples a step, 50 steps.
            Time: about 2 minutes.  Expected: balanced 1.87x, cross_step 2.24x and under 1 % bubbles.
scaling     8 to 4096 accelerators, four prompts each.
            Time: about 10 minutes, 8 of them for 4096.  Expected: gains grow with the number: balanced 1.4x
            to 2.4x, cross_step 1.9x to 3.1x.
predictor   from a perfect to a useless history (0.81: epochs are independent), 64 accelerators.
            Time: about 3 minutes.  Expected: balanced 1.8x to 1.6x, cross_step 2.2x to 1.8x; the paper's layout
            2.1x to 1.1x.
sensitivity one field changed at a time, 64 accelerators.
            Time: about 5 minutes.  Expected: balanced 1.6x to 2.4x, cross_step 1.8x to 3.1x.
smoke       4 accelerators, 6 steps, for continuous integration.
            Time: 5 s.  Expected: runs to the end.
"""

import ml_collections

VARIANTS = ("default", "heavy_tail", "scaling", "predictor", "sensitivity", "smoke")


def get_config(variant: str = "default") -> ml_collections.ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    c = ml_collections.ConfigDict()
    c.seed = 0  # of lengths and data order
    c.steps = 20  # training steps; those of the first epoch count as warm-up
    # With a barrier: "equal" keeps groups whole, "spread" deals their samples out blindly, "balanced" plans, and
    # "longest_first_oracle" knows every length. One step ahead: "async" (equal), "async_spread", "paper" (RhymeRL's
    # layout), "cross_step". "over_provision" rolls out 1.25 times the prompts and drops the slowest.
    c.policies = "equal+spread+balanced+longest_first_oracle+async+async_spread+paper+cross_step+over_provision"
    c.cases = ""  # "field=value;field=value": simulates each in place of this config

    # --- the model that decodes: 8B parameters with grouped queries (36 layers, 8 key/value heads of 128), bfloat16
    c.model = ml_collections.ConfigDict()
    c.model.weight_gb = 16.4
    c.model.kv_kb_per_token = 147.5
    c.model.gflops_per_token = 16.4  # forward

    # --- an accelerator of the H100 class (80 GB, 3.35 TB/s, 990 TFLOP/s), at what decoding reaches of it
    c.accelerator = ml_collections.ConfigDict()
    c.accelerator.tb_per_s = 2.5
    c.accelerator.tflops = 600.0
    c.accelerator.overhead_ms = 2.0  # of an iteration: launches, sampling, the host

    # --- the machine and the batch
    c.system = ml_collections.ConfigDict()
    c.system.accelerators = 16
    c.system.accelerators_per_slice = 1
    c.system.max_rows = 32  # of a slice; 32 caches of 10K tokens fill the 48 GB that weights leave
    c.system.prompts_per_accelerator = 4  # of a step
    c.system.samples_per_prompt = 16
    c.system.steps_per_epoch = 5
    c.system.layout = "best"  # of the planner; see histopipe/plan.py
    c.system.defer = 0.05  # share of a step's prompts that may join the next, at most
    c.system.look_seconds = 2.0  # between two looks for something to move or defer (about a chunk of 128 iterations)
    c.system.first_tokens = 2048.0  # forecast while nothing is known

    # --- the learner
    c.learner = ml_collections.ConfigDict()
    c.learner.accelerators = 0  # of system.accelerators; 0: takes turns with the slices on all of them
    c.learner.tflops = 400.0  # of an accelerator, reached in training
    c.learner.gflops_per_token = 65.6  # forward, backward, and the forward pass that gives old log-probabilities
    c.learner.fixed_seconds = 4.0  # optimizer step, resharding, new weights to the slices

    # --- lengths
    c.trace = ml_collections.ConfigDict()
    c.trace.path = ""  # workdir of a run whose lengths are replayed; its samples and prompts replace the fields below
    c.trace.prompt_tokens = 256
    c.trace.median = 2000.0  # of prompts' typical lengths; log-normal,
    c.trace.sigma = 1.0  # of their logarithm
    c.trace.hard_share = 0.03  # the hardest prompts have a Pareto tail
    c.trace.hard_exponent = 1.0
    c.trace.within = 0.25  # sigma of the logarithm of a prompt's samples
    c.trace.jitter = 0.02  # most that a prompt's rank moves between epochs, but for
    c.trace.major_shifts = 0.03  # share of prompts whose rank moves by over 10 %; 0.81: epochs are independent
    c.trace.max_tokens = 16384

    # --- the size of the plan that is timed
    c.planning = ml_collections.ConfigDict()
    c.planning.prompts = 8192
    c.planning.samples = 16
    c.planning.slices = 512

    if variant == "heavy_tail":
        c.steps = 50
        c.system.accelerators = 128
    elif variant == "scaling":
        c.steps = 5
        c.system.steps_per_epoch = 2
        c.system.look_seconds = 5.0
        c.policies = "equal+spread+balanced+cross_step"
        c.cases = ";".join(f"system.accelerators={n}" for n in (8, 32, 128, 512, 2048, 4096))
    elif variant == "predictor":
        c.steps = 20
        c.system.accelerators = 64
        c.policies = "equal+spread+balanced+async_spread+paper+cross_step"
        c.cases = ";".join(f"trace.major_shifts={x}" for x in (0.0, 0.02, 0.04, 0.1, 0.2, 0.4, 0.81))
    elif variant == "sensitivity":
        c.steps = 20
        c.system.accelerators = 64
        c.policies = "equal+spread+balanced+async_spread+cross_step"
        c.cases = ";".join((
            "system.max_rows=32", "system.max_rows=16", "system.max_rows=64", "system.prompts_per_accelerator=2",
            "system.prompts_per_accelerator=8", "trace.sigma=0.7", "trace.sigma=1.3", "trace.hard_share=0.0",
            "trace.within=0.5", "trace.max_tokens=32768", "system.accelerators_per_slice=2", "learner.accelerators=16",
        ))  # fmt: skip
    elif variant == "smoke":
        c.steps = 6
        c.system.accelerators = 4
        c.system.samples_per_prompt = 8
        c.system.steps_per_epoch = 2
        c.planning.prompts, c.planning.slices = 256, 16
    return c
