"""The schema of a config: each field refused when missing, mistyped or out of range, in one line that names it."""

import dataclasses
import math

import ml_collections
import pytest

from configs.math_grpo import VARIANTS, get_config
from rhyme_jax.errors import InputError, RunError
from rhyme_jax.grpo.advantages import AdvantageConfig
from rhyme_jax.grpo.losses import LossConfig
from rhyme_jax.grpo.presets import PRESETS
from rhyme_jax.histopipe.plan import LAYOUTS
from rhyme_jax.histospec.drafts import DraftRules
from rhyme_jax.histospec.sampling import SamplingParams
from rhyme_jax.training import cli
from rhyme_jax.training.settings import Settings, unknown_field


def flat(config: dict, prefix: str = "") -> dict:
    fields = {}
    for name, value in config.items():
        fields |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return fields


FIELDS = flat(get_config().to_dict())
SECTIONS = sorted({name.partition(".")[0] for name in FIELDS if "." in name})
NUMBERS = [name for name, value in FIELDS.items() if type(value) in (int, float)]


def config(changes: dict | None = None, variant: str = "tiny") -> ml_collections.ConfigDict:
    """A variant with fields set (whatever their type), added, or, where the new value is ..., left out."""
    values = get_config(variant).to_dict()
    for path, value in (changes or {}).items():
        *sections, name = path.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        if value is ...:
            del inner[name]
        else:
            inner[name] = value
    return ml_collections.ConfigDict(values, convert_dict=True)


def refusal(changes: dict) -> str:
    with pytest.raises(InputError) as error:
        Settings.from_config(config(changes))
    message = str(error.value)
    assert "\n" not in message
    return message


# --- what passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_passes_unchanged(variant):
    assert flat(dataclasses.asdict(Settings.from_config(config(variant=variant)))) == flat(
        get_config(variant).to_dict()
    )


def test_unknown_variants_list_the_known_ones():
    with pytest.raises(ValueError, match="no variant 'large'; there are tiny, smollm2, long_tail, mixture, smoke"):
        get_config("large")


def test_settings_cannot_be_changed():
    settings = Settings.from_config(config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.steps = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.rollout.top_k = 3


def test_whole_numbers_are_floats_and_lists_are_tuples():
    changes = {"rollout.temperature": 1, "optimizer.clip_norm": 2, "draft.buckets": [1, 4]}
    settings = Settings.from_config(config(changes))
    assert settings.draft.buckets == (1, 4) and type(settings.draft.buckets) is tuple
    assert type(settings.rollout.temperature) is type(settings.optimizer.clip_norm) is float


@pytest.mark.parametrize(
    ("changes", "sources", "weight", "window", "min_prob"),
    [
        ({"draft.preset": "paper"}, ("history",), "reward", "paper", 0.1),
        ({"draft.preset": "released"}, ("history",), "count", "released", 0.1),
        ({"draft.preset": "rhyme"}, ("history", "siblings", "self"), "reward", "marginal", 0.1),
        # A field of its own goes before the preset's.
        ({"draft.preset": "paper", "draft.window": "released"}, ("history",), "reward", "released", 0.1),
        ({"draft.weight": "recency", "draft.min_prob": 0.0}, ("history", "siblings", "self"), "recency", "marginal", 0),
        ({"draft.sources": "self+history"}, ("self", "history"), "reward", "marginal", 0.1),
    ],
)
def test_presets(changes, sources, weight, window, min_prob):
    draft = Settings.from_config(config(changes)).draft
    assert draft.rules() == DraftRules(sources, 3, min_prob)
    assert (draft.vote_weight, draft.window_rule) == (weight, window)


@pytest.mark.parametrize(
    ("changes", "loss", "advantages", "rounds"),
    [
        ({"grpo.preset": "grpo"}, {}, {}, 1),
        ({"grpo.preset": "dr_grpo"}, {"aggregate": "constant"}, {"normalize_std": "none"}, 1),
        ({"grpo.preset": "dapo"}, {"aggregate": "token", "clip_high": 0.28}, {"overlong_buffer": 13}, 4),
        (
            {"grpo.preset": "gspo"},
            {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "behaviour": "recomputed"},
            {},
            1,
        ),
        (
            {"grpo.preset": "rloo", "grpo.kl_coef": 0.2},
            {"aggregate": "constant", "kl_estimator": "k1"},
            {"baseline": "leave_one_out", "normalize_std": "none", "kl_coef": 0.2},
            1,
        ),
        ({"grpo.preset": "reinforce"}, {"aggregate": "constant"}, {"baseline": "batch", "normalize_std": "none"}, 1),
        (
            {"grpo.preset": "reinforce++", "grpo.kl_coef": 0.1},
            {"aggregate": "token", "kl_estimator": "k1"},
            {"baseline": "none", "normalize_std": "batch", "kl_coef": 0.1},
            1,
        ),
        (
            {"grpo.preset": "reinforce++_baseline", "grpo.kl_coef": 0.1},
            {"aggregate": "token", "kl_estimator": "k2", "kl_coef": 0.1},
            {"normalize_std": "batch"},
            1,
        ),
        # A field of its own goes before the preset's.
        (
            {
                "grpo.preset": "dapo",
                "grpo.overlong_buffer": 0,
                "grpo.sampling_rounds": 1,
                "grpo.clip_high": 0.3,
                "grpo.aggregate": "sequence",
                "grpo.mask_truncated": True,
            },
            {"clip_high": 0.3},
            {"mask_truncated": True},
            1,
        ),
        ({"grpo.clip_low": 0.0, "grpo.entropy_coef": 0.01}, {"clip_low": 0.0, "entropy_coef": 0.01}, {}, 1),
    ],
    ids=str,
)
def test_recipes(changes, loss, advantages, rounds):
    grpo = Settings.from_config(config(changes)).grpo
    assert grpo.loss(64) == LossConfig(budget=64, **loss)
    assert grpo.advantages(64) == AdvantageConfig(budget=64, **advantages)
    assert grpo.rounds == rounds


def test_derived_settings():
    settings = Settings.from_config(config({"steps": 10, "grpo.updates_per_batch": 3, "optimizer.b1": 0.8}))
    assert settings.total_updates == 30
    assert settings.rollout.rows == 32 * 8
    assert settings.rollout.sampling() == SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
    engine = settings.engine(settings.rollout.sampling(), eos_ids=(2, 5), prompt_slots=19)
    assert (engine.eos_ids, engine.prompt_slots, engine.draft_buckets) == ((2, 5), 19, (1, 4, 8, 16))
    assert (engine.chunk, engine.max_rows, engine.window, engine.by_length) == (32, 256, "marginal", False)
    assert engine.rules == DraftRules(("history", "siblings", "self"), min_match=3, min_prob=0.1)
    assert settings.grpo.loss(64) == LossConfig(budget=64)
    assert settings.grpo.advantages(64) == AdvantageConfig(budget=64)
    assert Settings.from_config(config({"grpo.minibatches": 4})).total_updates == 30 * 4
    optimizer = settings.optimizer.config(settings.total_updates)
    assert (optimizer.total_updates, optimizer.b1, optimizer.warmup_updates) == (30, 0.8, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2**31 - 1},
        {"rollout.prompts_per_step": 128},  # all prompts
        {"draft.buckets": (1,)},  # never drafts
        {"rollout.top_p": 1e-9, "rollout.top_k": 1},
        {"draft.min_prob": 0, "grpo.clip_low": 0, "grpo.kl_coef": 0, "optimizer.b1": 0, "optimizer.weight_decay": 0},
        {"draft.min_prob": 1.0, "rollout.samples_per_prompt": 2, "history.depth": 1, "checkpoint.keep": 1},
        {"optimizer.schedule": "cosine", "optimizer.warmup_updates": 1000},  # longer than the run
        {"mesh.data": 2, "mesh.fsdp": -1},  # the mesh checks itself against the devices
    ],
    ids=str,
)
def test_the_edges_of_the_ranges_pass(changes):
    Settings.from_config(config(changes))


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field(name):
    assert refusal({name: ...}) == f"config.{name}: missing"


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_section(section):
    assert refusal({section: ...}) == f"config.{section}: missing"
    assert refusal({section: 3}) == f"config.{section}=3: must be a section of fields"


WRONG = {
    int: [1.5, 1.0, "1", True, None, (1,)],  # a bool is an int to Python, and a mistake in a config
    float: ["1.0", True, None, (1.0,)],
    str: [1, True, None, ("a",)],
    bool: [1, 0, "True", None],
    tuple: [1, "12", None],
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_type(name):
    kind = type(FIELDS[name])
    for value in WRONG[kind]:
        want = f"config.{name}={value!r}: must be of type {kind.__name__}, not {type(value).__name__}"
        assert refusal({name: value}) == want
    assert refusal({name: {"a": 1}}).startswith(f"config.{name}={{'a': 1}}: must be of type {kind.__name__}")


@pytest.mark.parametrize("name", [name for name, value in FIELDS.items() if type(value) is tuple])
@pytest.mark.parametrize("value", [(1, 2.0), (1, "2"), (1, True), (1, None), [1, "2"], ((1,),)], ids=str)
def test_tuples_hold_whole_numbers(name, value):
    assert refusal({name: value}) == f"config.{name}={tuple(value)!r}: must hold whole numbers"


@pytest.mark.parametrize("name", [name for name, value in FIELDS.items() if type(value) is float])
def test_floats_are_finite(name):
    for value in (math.nan, math.inf, -math.inf):
        assert refusal({name: value}) == f"config.{name}={value}: must be finite"


@pytest.mark.parametrize("name", ["lora.alpha", "grpo.kl_coef"])
def test_floats_are_finite_in_float32(name):
    for value in (1e308, -1e39):
        want = f"config.{name}={value}: must be finite in float32, whose largest number is 3.4e38"
        assert refusal({name: value}) == want


@pytest.mark.parametrize("name", ["seed", "lora.rank", "lora.alpha", "rollout.top_k"])
@pytest.mark.parametrize("value", [10**20, -(10**20), 10**400], ids=["positive", "negative", "huge"])
def test_numbers_of_more_than_64_bits(name, value):
    assert refusal({name: value}) == f"config.{name}={str(value)[:80]}: must be a number of at most 64 bits"


def test_a_tuple_of_more_than_64_bits():
    assert refusal({"draft.buckets": (1, 10**20)}).startswith(f"config.draft.buckets=(1, {10**20}): must be a number")


@pytest.mark.parametrize("error", [InputError, RunError])
def test_an_error_is_one_line_on_stderr(error, monkeypatch, capsys):
    """Also where it names a file or a weight with line breaks in its name."""

    def work():
        raise error("a\nb: is\r\nmissing")

    monkeypatch.setattr(cli.app, "run", lambda main, flags_parser: main(["program"]))
    monkeypatch.setattr(cli.logging, "set_verbosity", lambda level: None)
    with pytest.raises(SystemExit) as end:
        cli.run_without_config(work)
    assert end.value.code == {InputError: cli.BAD_INPUT, RunError: cli.FAILED}[error]
    assert capsys.readouterr().err == "error: a b: is missing\n"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("stepz", "steps"),
        ("rollouts", "rollout"),
        ("optimiser", "optimizer"),
        ("rollout.temprature", "rollout.temperature"),
        ("rollout.topk", "rollout.top_k"),
        ("draft.bucket", "draft.buckets"),
        ("optimizer.learning_rte", "optimizer.learning_rate"),
        ("optimizer.microbatches", "optimizer.micro_batches"),
        ("grpo.clip_hi", "grpo.clip_high"),
        ("task.size", "task.eval_size"),
        ("checkpoint.evry", "checkpoint.every"),
    ],
)
def test_an_unknown_field_names_the_nearest(name, nearest):
    message = refusal({name: 1})
    assert message.startswith(f"config.{name}: no such field; did you mean ")
    assert message.partition("did you mean ")[2].startswith(nearest)


def test_an_unknown_field_like_no_other_lists_them_all():
    assert refusal({"xyzzy": 1}) == f"config.xyzzy: no such field; there are seed, steps, {listed()}"
    assert str(unknown_field("q", ["abc", "def"])) == "config.q: no such field; there are abc, def"


def listed() -> str:
    return ", ".join(f.name for f in dataclasses.fields(Settings) if f.name not in ("seed", "steps"))


AT_LEAST_0 = "must be at least 0"
AT_LEAST_1 = "must be at least 1"
NOT_NEGATIVE = "must not be negative"
POSITIVE = "must be positive"

OUT_OF_RANGE = [
    ("seed", -1, "must be from 0 to 2**31 - 1"),
    ("seed", 2**31, "must be from 0 to 2**31 - 1"),
    ("steps", 0, AT_LEAST_1),
    ("task.seed", -1, AT_LEAST_0),
    ("task.weight", 0.0, POSITIVE),
    ("task.train_size", 0, AT_LEAST_1),
    ("task.eval_size", 0, AT_LEAST_1),
    ("model.dtype", "float16", "must be one of float32, bfloat16"),
    ("model.param_dtype", "", "must be one of float32, bfloat16"),
    ("rollout.prompts_per_step", 0, AT_LEAST_1),
    ("rollout.samples_per_prompt", 0, AT_LEAST_1),
    ("rollout.max_prompt_tokens", 0, AT_LEAST_1),
    ("rollout.max_new_tokens", 0, AT_LEAST_1),
    ("rollout.temperature", 0.0, "training needs a temperature above 0"),
    ("rollout.temperature", -1.0, "training needs a temperature above 0"),
    ("rollout.top_k", -1, "must be 0 (off) or positive"),
    ("rollout.top_p", 0.0, "must lie in (0, 1]; 1 is off"),
    ("rollout.top_p", 1.5, "must lie in (0, 1]; 1 is off"),
    ("draft.buckets", (), "must hold 1 and otherwise sizes above 1"),
    ("draft.buckets", (4, 8), "must hold 1 and otherwise sizes above 1"),
    ("draft.buckets", (1, 0), "must hold 1 and otherwise sizes above 1"),
    ("draft.preset", "vllm", "must be one of paper, released, rhyme"),
    ("draft.sources", "history+future", "no source 'future'; join history, siblings, self with +, or say 'preset'"),
    ("draft.sources", "", "no source ''; join history, siblings, self with +, or say 'preset'"),
    ("draft.window", "wide", "must be one of preset, marginal, paper, released"),
    ("draft.min_match", 0, "must be from 1 to 7, the longest match tried"),
    ("draft.min_match", 8, "must be from 1 to 7, the longest match tried"),
    ("draft.min_prob", -0.1, "must lie in [0, 1], or be -1 for the preset's"),
    ("draft.min_prob", 1.1, "must lie in [0, 1], or be -1 for the preset's"),
    ("draft.weight", "votes", "must be one of preset, reward, count, recency"),
    ("rollout.noise", "pink", "must be one of fresh, coupled"),
    ("noise.refresh_epochs", -1, "must be at least 0"),
    ("rollout.chunk", 0, AT_LEAST_1),
    ("rollout.max_rows", 0, AT_LEAST_1),
    ("history.depth", 0, AT_LEAST_1),
    ("history.max_tokens", 0, AT_LEAST_1),
    ("grpo.clip_low", -0.2, NOT_NEGATIVE),
    ("grpo.clip_high", -0.2, NOT_NEGATIVE),
    ("grpo.kl_coef", -0.1, NOT_NEGATIVE),
    ("grpo.preset", "ppo", f"must be one of {', '.join(PRESETS)}"),
    ("grpo.baseline", "mean", "must be one of preset, group, leave_one_out, batch, none"),
    ("grpo.normalize_std", "max", "must be one of preset, group, batch, none"),
    ("grpo.ratio", "group", "must be one of preset, token, sequence"),
    ("grpo.aggregate", "mean", "must be one of preset, sequence, token, constant"),
    ("grpo.clip_dual", 0.5, "must be above 1, or 0 for off"),
    ("grpo.kl_in", "advantage", "must be one of preset, loss, reward"),
    ("grpo.kl_estimator", "k4", "must be one of preset, k1, k2, k3"),
    ("grpo.entropy_coef", -0.1, NOT_NEGATIVE),
    ("grpo.overlong_buffer", -2, "must be 0 (off) or more, or -1 for the preset's"),
    ("grpo.overlong_buffer", 65, "must be from 0 to rollout.max_new_tokens=64"),
    ("grpo.overlong_factor", 0.0, POSITIVE),
    ("grpo.sampling_rounds", 0, "must be 1 (off) or more, or -1 for the preset's"),
    ("grpo.sampling_rounds", 65, "must be at most 64"),
    ("grpo.updates_per_batch", 0, AT_LEAST_1),
    ("grpo.minibatches", 0, AT_LEAST_1),
    ("grpo.minibatches", 3, "must divide rollout.prompts_per_step * samples_per_prompt=256"),
    ("grpo.behaviour", "stale", "must be one of preset, rollout, recomputed, corrected"),
    ("grpo.importance_cap", 0.5, "must be at least 1"),
    ("pipeline.mode", "async", "must be one of sync, balanced, cross_step"),
    ("pipeline.layout", "random", f"must be one of {', '.join(LAYOUTS)}"),
    ("pipeline.slices", 0, AT_LEAST_1),
    ("pipeline.learner_devices", -1, AT_LEAST_0),
    ("pipeline.tensor", -1, AT_LEAST_0),
    ("pipeline.defer", 0.6, "must be a share of a step's prompts from 0 to 0.5"),
    ("pipeline.defer", -0.1, "must be a share of a step's prompts from 0 to 0.5"),
    ("grading.workers", -1, AT_LEAST_0),
    ("grading.timeout", -1.0, AT_LEAST_0),
    ("optimizer.learning_rate", 0.0, POSITIVE),
    ("optimizer.schedule", "linear", "must be one of constant, cosine"),
    ("optimizer.warmup_updates", -1, NOT_NEGATIVE),
    ("optimizer.b1", 1.0, "must lie in [0, 1)"),
    ("optimizer.b2", -0.1, "must lie in [0, 1)"),
    ("optimizer.weight_decay", -0.1, NOT_NEGATIVE),
    ("optimizer.clip_norm", 0.0, POSITIVE),
    ("optimizer.micro_batches", 0, AT_LEAST_1),
    ("optimizer.vocab_block", -1, "must not be negative; 0 is all at once"),
    ("lora.rank", -1, "must be at least 0"),
    ("lora.rank", 2**31, "must be at most 65536"),
    ("lora.alpha", 0.0, "must be a positive number"),
    ("task.code_reward", "most", "must be one of all, fraction"),
    ("sandbox.wall_s", 0.0, "must be a number above 0 and at most 1048576"),
    ("sandbox.cpu_s", 0, "must be a whole number above 0 and at most 1048576"),
    ("sandbox.memory_mb", 0, "must be a whole number above 0 and at most 1048576"),
    ("sandbox.output_kb", 0, "must be a whole number above 0 and at most 1048576"),
    ("sandbox.files_mb", -1, "must be a whole number above 0 and at most 1048576"),
    ("sandbox.open_files", 0, "must be a whole number above 0 and at most 1048576"),
    ("eval.every", 0, AT_LEAST_1),
    ("checkpoint.every", 0, AT_LEAST_1),
    ("checkpoint.keep", 0, AT_LEAST_1),
    # Impossible together.
    ("pipeline.slices", 33, "must not exceed rollout.prompts_per_step=32"),
    ("rollout.prompts_per_step", 129, "must not exceed task.train_size=128"),
    ("rollout.samples_per_prompt", 1, "a group of one has no advantage, nothing would be learned; use 2 or more"),
]


@pytest.mark.parametrize(("name", "value", "message"), OUT_OF_RANGE)
def test_out_of_range(name, value, message):
    assert refusal({name: value}) == f"{name}={value!r}: {message}"


def test_every_number_has_a_range_check():
    """The mesh's are in `models.params.make_mesh`, which knows the devices. A new field belongs in the table."""
    assert {n for n in NUMBERS if not n.startswith("mesh.")} <= {name for name, *_ in OUT_OF_RANGE}


def test_a_timeout_needs_a_process_to_end():
    assert refusal({"grading.workers": 0, "grading.timeout": 3.0}) == (
        "grading.timeout=3.0: needs grading.workers of at least 1"
    )


def test_a_program_cannot_have_itself_masked_by_stalling():
    """Its own limits end it, before the grader's do."""
    code = {"task.name": "functions", "sandbox.wall_s": 3.0}
    assert refusal(code | {"grading.timeout": 30.0}) == (
        "grading.timeout=30.0: must be 0 or at least 53 where programs are run: sandbox.wall_s, and what making "
        "sandboxes may take"
    )
    assert Settings.from_config(config(code | {"grading.timeout": 53.0})).grading.timeout == 53
    assert Settings.from_config(config({"grading.timeout": 30.0})).grading.timeout == 30


def test_a_layout_that_would_do_nothing_is_refused():
    assert refusal({"pipeline.mode": "sync", "pipeline.layout": "paper"}) == (
        "pipeline.layout='paper': pipeline.mode='sync' knows equal shares only"
    )


ALONE = {"pipeline.learner_devices": 1}
GROUP_BY_GROUP = "pipeline.learner_devices=1: learns group by group; "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"grpo.baseline": "none"},
            "grpo.normalize_std='group': needs grpo.baseline='group' or 'leave_one_out', not 'none'",
        ),
        (
            {"grpo.kl_in": "reward", "grpo.kl_estimator": "k3"},
            "grpo.kl_estimator='k3': grpo.kl_in='reward' takes the log ratio itself, 'k1'",
        ),
        ({"grpo.kl_in": "reward", "grpo.kl_coef": -1.0}, "grpo.kl_coef=-1.0: must not be negative"),
        ({**ALONE, "grpo.preset": "reinforce"}, GROUP_BY_GROUP + "grpo.baseline='batch' needs the whole batch"),
        ({**ALONE, "grpo.preset": "reinforce++"}, GROUP_BY_GROUP + "grpo.normalize_std='batch' needs the whole batch"),
        (
            {**ALONE, "grpo.kl_in": "reward", "grpo.kl_coef": 0.1},
            GROUP_BY_GROUP + "grpo.kl_in='reward' needs the whole batch",
        ),
        ({**ALONE, "grpo.minibatches": 2}, GROUP_BY_GROUP + "grpo.minibatches=2 needs the whole batch"),
        (
            {**ALONE, "grpo.preset": "dapo"},
            "grpo.sampling_rounds=4: needs pipeline.learner_devices=0; groups are chosen when all are graded",
        ),
        (
            {"grpo.preset": "dapo", "pipeline.mode": "cross_step", "pipeline.slices": 2},
            "grpo.sampling_rounds=4: does not go with pipeline.mode='cross_step', which begins the next step early",
        ),
        (
            {"grpo.preset": "dapo", "rollout.noise": "coupled"},
            "grpo.sampling_rounds=4: needs rollout.noise='fresh'; 'coupled' would repeat a prompt's responses",
        ),
        (
            {"grpo.preset": "reinforce", "grpo.sampling_rounds": 2},
            "grpo.sampling_rounds=2: sets aside groups of equal rewards, which grpo.baseline='batch' learns from",
        ),
        (
            {"grpo.preset": "rloo", "grpo.kl_coef": 0.1, "grpo.sampling_rounds": 2},
            "grpo.sampling_rounds=2: sets aside groups of equal rewards, which grpo.kl_in='reward' learns from",
        ),
        (
            {"grpo.preset": "dapo", "steps": 2**24 + 1},
            "steps=16777217: must not exceed 16777216 with grpo.sampling_rounds=4",
        ),
    ],
    ids=str,
)
def test_losses_that_do_not_go_with_the_rest(changes, message):
    assert refusal(changes) == message


@pytest.mark.parametrize("preset", ["reinforce", "reinforce++"])
def test_groups_of_one_where_no_group_is_asked_about(preset):
    Settings.from_config(config({"grpo.preset": preset, "rollout.samples_per_prompt": 1}))
