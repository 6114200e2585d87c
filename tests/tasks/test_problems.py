"""The tasks: the registry, generated chains and their demonstrations, mixtures."""

import importlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.tasks import arithmetic
from rhyme_jax.tasks.arithmetic import ALPHABET, Chain, generate, operand_limit, sample_chain, split
from rhyme_jax.tasks.demonstrations import GUESS_IS_RIGHT, WORKED_ONLY, Mixture
from rhyme_jax.tasks.grading import extract_answer, grade, parse_number
from rhyme_jax.tasks.problems import OPTIONAL, TASKS, Problem, load_mixture, load_problems
from rhyme_jax.training.settings import Task

DIFFICULTIES = (2, 3, 4, 5, 6)


def task(name="arithmetic", **fields) -> Task:
    defaults = {"weight": 1.0, "seed": 0, "train_size": 20, "eval_size": 10, "difficulties": DIFFICULTIES}
    return Task(name=name, chat_date="2024-07-26", **(dict.fromkeys(OPTIONAL, "") | defaults | fields))


# --- the registry ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_imported_and_reads_known_fields(name):
    module, _, function = TASKS[name].function.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert TASKS[name].uses <= set(OPTIONAL)


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "equations"])
def test_generated_tasks(name):
    """Seeded, disjoint, with eval problems that do not depend on the train set's size, and with responses that deserve
    full reward, also in a process that grades.
    """
    fields = {"train_size": 60, "eval_size": 40, "seed": 3}
    train, evaluation = load_problems(task(name, **fields), label="mine")
    questions = [p.question for p in train + evaluation]
    assert (len(train), len(evaluation), len(set(questions))) == (60, 40, 100)
    assert load_problems(task(name, **fields)) != (train, evaluation)  # the label is another
    assert load_problems(task(name, **fields), label="mine") == (train, evaluation)
    assert load_problems(task(name, **fields | {"train_size": 7}), label="mine")[1] == evaluation
    assert load_problems(task(name, **fields | {"seed": 4}), label="mine")[1] != evaluation
    for problem in pickle.loads(pickle.dumps(train + evaluation)):
        assert problem.task == "mine" and problem.reward(problem.reference()) == 1
        assert problem.reward("") == problem.reward(problem.question) == 0


def test_no_seed_trains_on_what_another_evaluates_with():
    """Not by design, that is: those of the same stream would have hundreds in common."""
    for name in ("arithmetic", "countdown", "equations"):
        made = [
            load_problems(task(name, seed=seed, train_size=60, eval_size=60, difficulties=(5, 6))) for seed in range(2)
        ]
        for i, (train, _) in enumerate(made):
            for j, (_, evaluation) in enumerate(made):
                common = {p.question for p in train} & {p.question for p in evaluation}
                assert len(common) < 5 and (i != j or not common), (name, i, j)


def test_a_base_problem_has_no_reward():
    problem = Problem("?", False, "none")
    assert problem.reference() is None
    with pytest.raises(NotImplementedError):
        problem.reward("1")


def test_problems_need_no_jax():
    """Graders import them in processes of their own."""
    modules = ["problems", "formats", "countdown", "equations", "arithmetic"]
    code = (
        "import sys\n" + "".join(f"import rhyme_jax.tasks.{m}\n" for m in modules) + "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60)


def test_a_mixture_keeps_its_tasks_apart():
    """Of one operation there are few chains, so that two tasks have some in common."""
    tasks = {
        "a": task(difficulties=(1,), train_size=150, eval_size=100),
        "b": task(difficulties=(1,), train_size=150, eval_size=100, seed=1),
        "c": task("equations", difficulties=(2,)),
    }
    said = []
    loaded = load_mixture(tasks, said.append)
    assert [p.task for p in loaded["b"][0]] == ["b"] * len(loaded["b"][0])
    train = [p.question for t, _ in loaded.values() for p in t]
    held_out = {p.question for _, e in loaded.values() for p in e}
    assert len(set(train)) == len(train) and not set(train) & held_out
    assert [len(e) for _, e in loaded.values()] == [100, 100, 10]
    left = [len(loaded[label][0]) for label in "ab"]
    assert said == [
        f"tasks.{label}: {150 - n} of 150 train problems are also in other tasks, and left out"
        for label, n in zip("ab", left, strict=True)
    ]
    assert 0 < left[1] < left[0] < 150
    with pytest.raises(InputError, match=r"^tasks.b: all of its 20 train problems are also in other tasks$"):
        load_mixture({"a": task(), "b": task()})
    with pytest.raises(InputError, match=r"^tasks.b.difficulties=\(9,\): must hold whole numbers of operations from 1"):
        load_mixture({"a": task(), "b": task(difficulties=(9,))})


# --- arithmetic -----------------------------------------------------------------------------------------------


def test_a_chain_by_hand():
    chain = Chain(numbers=(47, 38, 6), signs=(1, -1))
    assert chain.difficulty == 2 and chain.values == [85, 79]
    assert chain.question == "47+38-6=?\n"
    assert chain.worked_solution() == "47+38=85\n85-6=79\n#### 79"


def test_the_first_problems_of_seed_0():
    """Golden: a change here changes every run of the default task, and the embedded model was pretrained with the
    evaluation problems held out. Update it only on purpose, with the model.
    """
    train, evaluation = split(6, 4, DIFFICULTIES, seed=0)
    assert [c.question for c in train] == [
        "16+8-10=?\n",
        "12+24-28-5-2+33+21=?\n",
        "25+35+25-47=?\n",
        "9+10-16=?\n",
        "7+21+7-6+48=?\n",
        "45+54-15+9+5-45=?\n",
    ]
    assert [c.question for c in evaluation] == [
        "48+42-29+6=?\n",
        "80+16+3-24-75=?\n",
        "65+4+28-10+1-10=?\n",
        "19+20+16=?\n",
    ]


@pytest.mark.parametrize("difficulty", range(1, 9))
def test_chains_stay_in_range_and_are_solved_right(difficulty):
    rng = np.random.default_rng(difficulty)
    limit = operand_limit(difficulty)
    for _ in range(300):
        chain = sample_chain(rng, difficulty)
        assert chain.difficulty == difficulty
        assert 0 <= chain.numbers[0] <= limit and all(1 <= n <= limit for n in chain.numbers[1:])
        assert all(0 <= v <= 99 for v in chain.values)
        text = chain.question + chain.worked_solution()
        assert set(text) <= set(ALPHABET)
        # Python's own arithmetic agrees with the question and with each step.
        result = eval(chain.question.removesuffix("=?\n"))
        steps = chain.worked_solution().split("\n")
        assert [eval(s.replace("=", "==")) for s in steps[:-1]] == [True] * difficulty
        assert steps[-1] == f"#### {result}"
        assert grade(chain.worked_solution(), str(result), ("hashes",)) == 1
        assert grade(chain.worked_solution(), str(result + 1), ("hashes",)) == 0


def test_operands_grow_with_difficulty():
    assert [operand_limit(d) for d in range(1, 7)] == [20, 20, 50, 99, 99, 99]
    rng = np.random.default_rng(0)
    for difficulty, limit in ((2, 20), (3, 50), (5, 99)):
        largest = max(max(sample_chain(rng, difficulty).numbers) for _ in range(1000))
        assert 0.8 * limit < largest <= limit


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31 - 1), st.integers(1, 60), st.integers(1, 60))
def test_train_and_eval_are_disjoint_and_seeded(seed, train_size, eval_size):
    train, evaluation = split(train_size, eval_size, DIFFICULTIES, seed)
    assert (len(train), len(evaluation)) == (train_size, eval_size)
    assert len({c.question for c in train + evaluation}) == train_size + eval_size
    assert split(train_size, eval_size, DIFFICULTIES, seed) == (train, evaluation)
    assert split(train_size + 7, eval_size, DIFFICULTIES, seed)[1] == evaluation
    assert split(train_size, eval_size, DIFFICULTIES, seed + 1) != (train, evaluation)


def test_train_and_eval_are_disjoint_where_problems_are_few():
    """Of one operation there are some 500 chains, so that independent draws would collide."""
    train, evaluation = split(150, 150, (1,), seed=0)
    assert not set(train) & set(evaluation)


def test_difficulties_come_in_equal_shares():
    chains = generate(100, DIFFICULTIES, seed=3)
    assert [sum(c.difficulty == d for c in chains) for d in DIFFICULTIES] == [20] * 5
    assert [c.difficulty for c in chains] != sorted(c.difficulty for c in chains)


def test_more_problems_than_there_are():
    message = r"^task.train_size/eval_size: too few different problems of difficulty 1; ask for fewer or add"
    with pytest.raises(InputError, match=message):
        generate(2000, (1,), seed=0)
    with pytest.raises(InputError, match=message):
        load_problems(task(train_size=2000, difficulties=(1,)))


def test_arithmetic_problems():
    train, evaluation = load_problems(task())
    chains, held_out = arithmetic.split(20, 10, DIFFICULTIES, 0)
    for problems, source in ((train, chains), (evaluation, held_out)):
        for problem, chain in zip(problems, source, strict=True):
            assert problem.question == chain.question and not problem.chat
            assert problem.gold == str(chain.values[-1]) and problem.reference() == chain.worked_solution()
            assert problem.reward(chain.worked_solution()) == 1
            assert problem.reward(f"#### {chain.values[-1] + 1}") == 0
            assert problem.reward(f"{chain.values[-1]}") == 0  # not declared


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "chess"}, "task.name='chess': must be one of arithmetic, gsm8k"),
        ({"difficulties": ()}, r"task.difficulties=\(\): must hold whole numbers of operations from 1 to 8"),
        ({"difficulties": (2, 0)}, r"task.difficulties=\(2, 0\): must hold"),
        ({"difficulties": (9,)}, r"task.difficulties=\(9,\): must hold"),
        ({"difficulties": (2.5,)}, r"task.difficulties=\(2.5,\): must hold"),
        (
            {"name": "countdown", "difficulties": (1,)},
            r"task.difficulties=\(1,\): must hold whole numbers of numbers from",
        ),
        (
            {"name": "equations", "difficulties": (7,)},
            r"task.difficulties=\(7,\): must hold whole numbers of levels from",
        ),
        ({"name": "gsm8k"}, "task.path='': a JSONL, JSON or Parquet file, a directory"),
        (
            {"name": "qa", "path": "x", "template": "{answer}"},
            "task.template='{answer}': must be one of plain, instruct",
        ),
        (
            {"name": "countdown", "template": "no"},
            "task.template='no': must be one of plain, instruct, qa, or a text with",
        ),
        ({"name": "equations", "answer_style": "xml"}, "task.answer_style='xml': must be one of hashes, boxed, phrase"),
        *(({field: "x"}, f"task.{field}='x': is not used by task.name='arithmetic'") for field in OPTIONAL),
        ({"name": "countdown", "path": "x"}, "task.path='x': is not used by task.name='countdown'"),
    ],
)
def test_impossible_tasks_are_refused(fields, message):
    with pytest.raises(InputError, match=f"^{message}"):
        load_problems(task(**fields))


# --- demonstrations -------------------------------------------------------------------------------------------

DRAWS = 4000


def within_6_sigma(count: int, share: float, of: int) -> bool:
    return abs(count - share * of) <= 6 * (share * (1 - share) * of) ** 0.5


def style(chain: Chain, response: str) -> str:
    shown = response.count("\n")
    return {0: "direct", chain.difficulty // 2: "sloppy", chain.difficulty: "worked"}[shown]


@pytest.mark.parametrize("mixture", [Mixture(0.25, 0.2), Mixture(0.0, 0.0), Mixture(0.5, 0.5), WORKED_ONLY], ids=str)
def test_a_mixture_has_its_shares(mixture):
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(("worked", "sloppy", "direct"), 0)
    right = unworked = 0
    for chain in generate(DRAWS, DIFFICULTIES, seed=9):
        response = mixture.response(chain, rng)
        kind = style(chain, response)
        counts[kind] += 1
        steps = chain.steps()
        shown = {"worked": steps, "sloppy": steps[: chain.difficulty // 2], "direct": []}[kind]
        assert response.startswith("".join(shown) + "#### ")  # steps that are shown are right
        answer, reward = parse_number(extract_answer(response)), grade(response, str(chain.values[-1]), ("hashes",))
        assert 0 <= answer <= 99 and abs(answer - chain.values[-1]) <= 9
        if kind == "worked":
            assert reward == 1
        else:
            unworked += 1
            right += int(reward)
    assert within_6_sigma(counts["worked"], mixture.worked, DRAWS)
    assert within_6_sigma(counts["sloppy"], mixture.sloppy, DRAWS)
    assert not unworked or within_6_sigma(right, GUESS_IS_RIGHT, unworked)


@pytest.mark.parametrize("answer", [0, 1, 50, 99])
def test_wrong_guesses_cover_the_neighbours(answer):
    """Also at the ends of the range, where half of them would lie outside."""
    chain = Chain(numbers=(answer, 1, 1), signs=(1, -1) if answer < 99 else (-1, 1))
    rng = np.random.default_rng(0)
    guesses = {parse_number(extract_answer(Mixture(0.0, 0.0).response(chain, rng))) for _ in range(1000)}
    assert guesses == set(range(max(0, answer - 9), min(99, answer + 9) + 1))


def test_demonstrations_are_seeded():
    chains = generate(50, DIFFICULTIES, seed=1)
    first, again, other = (
        [Mixture(0.3, 0.3).response(c, rng) for c in chains]
        for rng in (np.random.default_rng(0), np.random.default_rng(0), np.random.default_rng(1))
    )
    assert first == again != other
