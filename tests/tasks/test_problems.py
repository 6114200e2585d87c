"""Where problems come from: generated chains, their demonstrations, and GSM8K's files."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.tasks import arithmetic
from rhyme_jax.tasks.arithmetic import ALPHABET, Chain, generate, operand_limit, sample_chain, split
from rhyme_jax.tasks.demonstrations import GUESS_IS_RIGHT, WORKED_ONLY, Mixture
from rhyme_jax.tasks.grading import exact_match, extract_answer, parse_number
from rhyme_jax.tasks.problems import GSM8K_INSTRUCTION, load_problems, read_gsm8k
from rhyme_jax.training.settings import Task

DIFFICULTIES = (2, 3, 4, 5, 6)


def task(name="arithmetic", **fields) -> Task:
    defaults = {"path": "", "seed": 0, "train_size": 20, "eval_size": 10, "difficulties": DIFFICULTIES}
    return Task(name=name, system_prompt="", chat_date="2024-07-26", **(defaults | fields))


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
        assert exact_match(chain.worked_solution(), Fraction(result)) == 1
        assert exact_match(chain.worked_solution(), Fraction(result + 1)) == 0


def test_operands_grow_with_difficulty():
    assert [operand_limit(d) for d in range(1, 7)] == [20, 20, 50, 99, 99, 99]
    rng = np.random.default_rng(0)
    for difficulty, limit in ((2, 20), (3, 50), (5, 99)):
        largest = max(max(sample_chain(rng, difficulty).numbers) for _ in range(1000))
        assert 0.8 * limit < largest <= limit


@settings(deadline=None)
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
            assert problem.gold == chain.values[-1]
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
        ({"name": "gsm8k"}, "task.path='': a JSONL file in GSM8K's format is needed"),
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
        answer, reward = parse_number(extract_answer(response)), exact_match(response, Fraction(chain.values[-1]))
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


# --- gsm8k ----------------------------------------------------------------------------------------------------


def record(n: int, **fields) -> dict:
    return {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"} | fields


@pytest.fixture
def file(tmp_path):
    """Writes lines (records, text or bytes) to a file; returns its path."""

    def write(*lines, end: str = "\n") -> str:
        path = tmp_path / "problems.jsonl"
        encoded = (json.dumps(line, ensure_ascii=False) if isinstance(line, dict) else line for line in lines)
        path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + end.encode() for x in encoded))
        return str(path)

    return write


def test_gsm8k_problems(file):
    path = file(
        record(1),
        record(2, answer="thus\n#### -1,234.50", more="fields are fine"),
        "",  # blank lines are skipped
        record(3, question="  Où?\u2028 \u00e9  ", answer="#### 0"),  # a line separator inside a string
        "   ",
    )
    problems = read_gsm8k(path)
    assert [p.gold for p in problems] == [2, Fraction("-1234.5"), 0]
    assert problems[0].question == f"What is 1 + 1?\n\n{GSM8K_INSTRUCTION}"
    assert problems[2].question == f"Où?\u2028 é\n\n{GSM8K_INSTRUCTION}"
    assert all(p.chat for p in problems)
    for response in ("#### 2", "so \\boxed{2}", "The answer is $2.00."):
        assert problems[0].reward(response) == 1 and problems[2].reward(response) == 0
    assert problems[0].reward("2") == 0


def test_windows_line_ends_and_a_last_line_without_one(file):
    path = file(*map(record, range(3)), end="\r\n")
    assert [p.gold for p in read_gsm8k(path)] == [1, 2, 3]
    path = file(json.dumps(record(0)) + "\n" + json.dumps(record(1)), end="")
    assert [p.gold for p in read_gsm8k(path)] == [1, 2]


def test_duplicates_are_dropped(file):
    """The first counts, whatever spaces surround the others."""
    path = file(record(1), record(2), record(1), record(1, question="\nWhat is 1 + 1? ", answer="#### 5"))
    assert [p.gold for p in read_gsm8k(path)] == [2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('{"question": "a", "answer": "#### 1"}, ', "not valid JSON"),
        ("{'question': 'a'}", "not valid JSON"),
        ("9" * 5000, "not valid JSON"),  # Python refuses to read it as a number
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "expected an object with 'question' and 'answer'"),
        ("7", "expected an object with 'question' and 'answer'"),
        ({"answer": "#### 1"}, "field 'question' must be a non-empty string, got None"),
        ({"question": "a"}, "field 'answer' must be a non-empty string, got None"),
        (record(1, question="  "), "field 'question' must be a non-empty string, got '  '"),
        (record(1, answer=2), "field 'answer' must be a non-empty string, got 2"),
        (record(1, answer=["x" * 1000]), "field 'answer' must be a non-empty string, got "),
        (record(1, answer="it is 2"), "'answer' must end in '#### number', got 'it is 2'"),
        (record(1, answer="x" * 999 + "#### two"), r"'answer' must end in '#### number', got 'x*#### two'"),
        (record(1, answer="####"), "'answer' must end in '#### number'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_line_is_named(line, message, file):
    path = file(record(0), "", line, record(2))
    with pytest.raises(InputError, match=rf"^task.path={path}, line 3: {message}") as error:
        read_gsm8k(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < len(path) + 200


def test_files_that_cannot_be_read(file, tmp_path):
    missing = str(tmp_path / "nowhere.jsonl")
    for path in (missing, str(tmp_path), missing + "\0"):
        with pytest.raises(InputError, match=r"^task.path=.*: no such file$"):
            read_gsm8k(path)
    for content in ((), ("", "  ")):
        with pytest.raises(InputError, match=r"problems.jsonl: holds no problems$"):
            read_gsm8k(file(*content))
    path = file(record(0), '{"question": "caf\xe9"}'.encode("latin-1"))
    with pytest.raises(InputError, match=r"problems.jsonl: not readable as UTF-8 text \(.*0xe9") as error:
        read_gsm8k(path)
    assert "\n" not in str(error.value)


def test_the_split_is_disjoint_and_stable(file):
    path = file(*map(record, range(50)))

    def golds(**fields):
        train, evaluation = load_problems(task("gsm8k", path=path, **fields))
        return [p.gold for p in train], [p.gold for p in evaluation]

    train, evaluation = golds(train_size=25, eval_size=15)
    assert len(set(train)) == 25 and len(set(evaluation)) == 15 and not set(train) & set(evaluation)
    assert golds(train_size=25, eval_size=15) == (train, evaluation)
    assert golds(train_size=5, eval_size=15) == (train[:5], evaluation)  # eval does not depend on train's size
    assert golds(train_size=25, eval_size=15, seed=1) != (train, evaluation)
    train, evaluation = golds(train_size=35, eval_size=15)
    assert {*train, *evaluation} == set(range(1, 51))
    with pytest.raises(InputError, match=r"holds 50 different problems, fewer than .* = 36 \+ 15$"):
        golds(train_size=36, eval_size=15)
