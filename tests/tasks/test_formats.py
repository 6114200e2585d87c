"""Problems from files: the formats as published, templates, the split, and every way in which a file can be wrong."""

import json
import sys
import types

import pytest

from rhyme_jax.errors import InputError
from rhyme_jax.tasks import files, templates
from rhyme_jax.tasks.formats import read
from rhyme_jax.tasks.problems import OPTIONAL, Source, load_problems
from rhyme_jax.training.settings import Task

EXTRACTORS = {"hashes": ("hashes", "boxed", "phrase"), "boxed": ("boxed", "hashes", "phrase")}


def task(name="gsm8k", **fields) -> Task:
    defaults = {"weight": 1.0, "seed": 0, "train_size": 2, "eval_size": 1, "difficulties": (2,)}
    return Task(name=name, chat_date="2024-07-26", **(dict.fromkeys(OPTIONAL, "") | defaults | fields))


def problems(path, name="gsm8k", **fields) -> list:
    return list(read(Source(task(name, path=str(path), **fields)), "path").values())


def record(n: int, **fields) -> dict:
    return {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"} | fields


def refusal(path, name="gsm8k", **fields) -> str:
    with pytest.raises(InputError) as error:
        problems(path, name, **fields)
    assert "\n" not in str(error.value) and len(str(error.value)) < len(str(path)) + 260
    return str(error.value)


@pytest.fixture
def file(tmp_path):
    """Writes lines (records, text or bytes) to a file; returns its path."""

    def write(*lines, end: str = "\n", name: str = "problems.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        encoded = (json.dumps(line, ensure_ascii=False) if isinstance(line, dict) else line for line in lines)
        path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + end.encode() for x in encoded))
        return str(path)

    return write


# --- formats --------------------------------------------------------------------------------------------------


def test_gsm8k(file):
    path = file(
        record(1),
        record(2, answer="thus\n#### -1,234.50", more="fields are fine"),
        "",  # blank lines are skipped
        record(3, question="  Où?\u2028 \u00e9  ", answer="#### 0"),  # a line separator inside a string
        "   ",
    )
    made = problems(path)
    assert [p.gold for p in made] == ["2", "-1,234.50", "0"]
    assert made[0].question == f"What is 1 + 1?\n\n{templates.INSTRUCTIONS['hashes']}"
    assert made[2].question == f"Où?\u2028 é\n\n{templates.INSTRUCTIONS['hashes']}"
    assert all(p.chat and p.task == "gsm8k" and p.extractors == EXTRACTORS["hashes"] for p in made)
    for response in ("#### 2", "so \\boxed{2}", "The answer is $2.00."):
        assert made[0].reward(response) == 1 and made[2].reward(response) == 0
    assert made[0].reward("2") == 0
    assert [p.reward(p.reference()) for p in made] == [1, 1, 1]


def test_math(file):
    """MATH as published has solutions; its subset of 500 has answers beside them."""
    path = file(
        {"problem": "What is $1+1$?", "level": "Level 1", "solution": "It is $\\boxed{1}+\\boxed{\\frac{4}{2}}$."},
        {"problem": "And $2$?", "answer": "\\frac{1}{2}", "solution": "no box"},
        {"problem": "And $3$?", "answer": "\\boxed{(1,2]}"},
    )
    made = problems(path, "math")
    assert [p.gold for p in made] == ["\\frac{4}{2}", "\\frac{1}{2}", "(1,2]"]
    assert made[0].question == "What is $1+1$?\n\n" + templates.INSTRUCTIONS["boxed"]
    assert made[0].extractors == EXTRACTORS["boxed"] and made[1].reference() == "\\boxed{\\frac{1}{2}}"
    assert refusal(file({"problem": "a", "solution": "no box"}), "math").endswith(
        "line 1: 'solution' must hold \\boxed{answer}, got 'no box'"
    )


def test_math_as_a_folder_of_files(file, tmp_path):
    """A problem a file, by subject and number, as the data set was published."""
    for subject, number in (("algebra", 2), ("algebra", 10), ("geometry", 1)):
        file(
            json.dumps({"problem": f"{subject} {number}", "solution": "\\boxed{5}"}, indent=1),
            name=f"m/{subject}/{number}.json",
        )
    file("not data", name="m/README.md")
    made = problems(tmp_path / "m", "math", template="plain")
    assert [p.question for p in made] == ["algebra 10", "algebra 2", "geometry 1"]
    file("{", name="m/geometry/2.json")
    assert refusal(tmp_path / "m", "math").endswith("geometry/2.json: not valid JSON")


def test_dapo(file):
    """Chats with one message, which says itself how to answer."""
    chat = [{"role": "user", "content": 'Solve it.\n\nWhat is {x}?\n\nRemember: "Answer:"'}]
    path = file(
        {"prompt": chat, "reward_model": {"ground_truth": "34", "style": "rule"}, "data_source": "math_dapo"},
        {"prompt": "As a text?", "reward_model": {"ground_truth": -7}},
    )
    made = problems(path, "dapo")
    assert [(p.question, p.gold) for p in made] == [(chat[0]["content"], "34"), ("As a text?", "-7")]
    assert made[0].reward("so\nAnswer: 34") == 1 and made[0].reward("Answer: 35") == 0
    system = [{"role": "system", "content": "Be brief."}, *chat]
    for prompt, roles in (
        (system, r"['system', 'user']"),
        ([], "[]"),
        (["a"], "[None]"),
        (chat * 2, "['user', 'user']"),
    ):
        said = refusal(file({"prompt": prompt, "reward_model": {"ground_truth": "1"}}), "dapo")
        assert (
            f"line 1: field 'prompt' must be a text or a chat with one message, of the role 'user'; "
            f"its roles are {roles}" in said
        )
    said = refusal(file({"prompt": "a", "reward_model": "x"}), "dapo")
    assert said.endswith(
        "line 1: field 'reward_model.ground_truth' must be a non-empty string, got None; there are prompt, reward_model"
    )


def test_columns_by_config(file):
    row = {"text": {"body": "One half?"}, "labels": {"final": 0.5}, "a.b": "c"}
    path = file(
        row,
        '{"text": {"body": "A tenth?"}, "labels": {"final": 0.1000}}',
        {"text": {"body": "2?"}, "labels": {"final": 2}},
    )
    made = problems(
        path, "qa", question_column="text.body", answer_column="labels.final", template="qa", answer_style="phrase"
    )
    assert [p.gold for p in made] == ["0.5", "0.1000", "2"]  # as written
    assert made[0].question == "Question: One half?\nAnswer:"
    assert made[0].reference() == "Answer: 0.5" and made[0].reward("\\boxed{0.5}") == 1
    assert [p.gold for p in problems(file(row), "qa", question_column="text.body", answer_column="a.b")] == ["c"]
    said = refusal(file(record(1)), "qa", question_column="text.body")
    assert said.endswith("line 1: field 'text.body' must be a non-empty string, got None; there are question, answer")
    assert "'answer' must end in" in refusal(file(record(1, answer="it is 2")))
    for value in (True, None, [], {"a": 1}, " "):
        assert "field 'answer' must be a non-empty string, got" in refusal(
            file({"question": "q", "answer": value}), "qa"
        )


def test_templates(file):
    """Braces are nothing but braces, in questions and in templates."""
    path = file({"question": "Is {question} {instruction} {0}?", "answer": "1"})
    (made,) = problems(path, "qa", template="{instruction} {x} \\boxed{}: {question} {question}", answer_style="hashes")
    question = "Is {question} {instruction} {0}?"
    assert made.question == f"{templates.INSTRUCTIONS['hashes']} {{x}} \\boxed{{}}: {question} {question}"
    assert problems(path, "qa", template="plain")[0].question == question
    for style, instruction in templates.INSTRUCTIONS.items():
        (made,) = problems(path, "qa", answer_style=style)
        assert made.question == f"{question}\n\n{instruction}" and made.extractors[0] == style
        assert made.reward(made.reference()) == 1


def test_windows_line_ends_a_last_line_without_one_and_a_mark(file):
    path = file(*map(record, range(3)), end="\r\n")
    assert [p.gold for p in problems(path)] == ["1", "2", "3"]
    path = file(b"\xef\xbb\xbf" + json.dumps(record(0)).encode() + b"\n" + json.dumps(record(1)).encode(), end="")
    assert [p.gold for p in problems(path)] == ["1", "2"]


def test_duplicates_are_dropped(file):
    """The first counts, whatever spaces surround the others or lie in them."""
    same = record(1, question="\nWhat  is\t1 + 1? ", answer="#### 5")
    assert [p.gold for p in problems(file(record(1), record(2), record(1), same))] == ["2", "3"]


def test_json_files(file):
    """One object, a list, or lines by that name."""
    assert [p.gold for p in problems(file(json.dumps(record(4), indent=2), name="one.json"))] == ["5"]
    assert [p.gold for p in problems(file(json.dumps([record(1), record(2)]), name="list.json"))] == ["2", "3"]
    assert [p.gold for p in problems(file(record(1), record(2), name="lines.json"))] == ["2", "3"]
    assert refusal(file(json.dumps([record(1), 5]), name="bad.json")).endswith(
        "bad.json, row 2: expected an object, got 5"
    )
    assert refusal(file(record(1), "{", name="bad.json")).endswith("bad.json, line 2: not valid JSON")


# --- what is wrong with a file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('{"question": "a", "answer": "#### 1"}, ', "not valid JSON"),
        ("{'question': 'a'}", "not valid JSON"),
        ("9" * 5000, "not valid JSON"),  # Python refuses to read it as a number
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "expected an object, got [1]"),
        ("7", "expected an object, got 7"),
        ({"answer": "#### 1"}, "field 'question' must be a non-empty string, got None; there are answer"),
        ({"question": "a"}, "field 'answer' must be a non-empty string, got None; there are question"),
        (record(1, question="  "), "field 'question' must be a non-empty string, got '  '"),
        (record(1, answer="x" * 999 + "#### two"), "'answer' must end in '#### number', got 'xxx"),
        (record(1, answer=["x" * 1000]), "field 'answer' must be a non-empty string, got ['xxx"),
        (record(1, answer=2), "'answer' must end in '#### number', got '2'"),
        (record(1, answer="it is 2"), "'answer' must end in '#### number', got 'it is 2'"),
        (record(1, answer="####"), "'answer' must end in '#### number'"),
        (
            {"x" * 1000: 1} | {str(n): n for n in range(1000)},
            "field 'question' must be a non-empty string, got None; there are xxxxx",
        ),
        (b'{"question": "caf\xe9"}', "not readable as UTF-8 text ('utf-8' codec can't decode byte 0xe9"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_line_is_named(line, message, file):
    path = file(record(0), "", line, record(2))
    assert refusal(path).startswith(f"task.path={path}, line 3: {message}")


def test_files_that_cannot_be_read(tmp_path, file):
    missing = tmp_path / "nowhere.jsonl"
    for path in (missing, str(missing) + "\0", "/dev/null"):
        assert refusal(path) == f"task.path={path}: no such file"
    assert refusal(tmp_path) == f"task.path={tmp_path}: holds no files that end in .jsonl, .jsonl.gz, .json, .parquet"
    for content in ((), ("", "  ")):
        assert refusal(file(*content)).endswith("problems.jsonl: holds no problems")


def test_files_too_large(file, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "MAX_LINE", 200)
    monkeypatch.setattr(files, "MAX_JSON", 300)
    monkeypatch.setattr(files, "MAX_KEPT", 100)
    monkeypatch.setattr(files, "MAX_FILES", 2)
    assert refusal(file(record(1), "x" * 201)).endswith("line 2: longer than 200 bytes")
    assert refusal(file(record(1), "x" * 10**6, end="")).endswith("line 1: longer than 200 bytes")
    assert refusal(file(*map(record, range(20)))).endswith("holds more than 100 characters of problems")
    assert len(problems(file(*[record(1)] * 50))) == 1  # the same again takes no memory
    said = refusal(file(json.dumps([record(n) for n in range(9)]), name="list.json"))
    assert "the most is 300, larger data must be JSONL or Parquet" in said
    for n in range(3):
        file(record(n), name=f"many/{n}.jsonl")
    assert refusal(tmp_path / "many").endswith("many: holds more than 2 files")


# --- parquet and the Hub --------------------------------------------------------------------------------------


def test_parquet_needs_pyarrow(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = file(b"PAR1", name="problems.parquet")
    assert refusal(path) == f"task.path={path}: Parquet files need pyarrow: pip install pyarrow"


def test_parquet(tmp_path, file, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    from pyarrow import parquet

    def write(rows, name="problems.parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        return str(tmp_path / name)

    made = problems(write([record(n) for n in range(150)]))
    assert [p.gold for p in made] == [str(n + 1) for n in range(150)]
    dapo = {"prompt": [{"role": "user", "content": "Why?"}], "reward_model": {"ground_truth": "3", "style": "rule"}}
    (why,) = problems(write([dapo, dapo]), "dapo")
    assert (why.question, why.gold) == ("Why?", "3")
    half = problems(write([{"q.x": "Half?", "y": 0.5, "z": 1}]), "qa", question_column="q.x", answer_column="y")
    assert half[0].gold == "0.5"

    path = write([*map(record, range(70)), record(1, answer="two")])
    assert refusal(path).startswith(f"task.path={path}, row 71: 'answer' must end in '#### number', got 'two'")
    path = write([{"a": 1, "b": 2}])
    assert refusal(path) == f"task.path={path}: has none of the columns question, answer; there are ['a', 'b']"
    path = write([{"question": "q"}])
    assert "row 1: field 'answer' must be a non-empty string, got None; there are question" in refusal(path)
    whole = (tmp_path / "problems.parquet").read_bytes()
    for broken in (b"", b"PAR1", whole[: len(whole) // 2], b"PAR1" + whole[4:-8] + b"\xff" * 4 + b"PAR1"):
        path = file(broken, end="", name="problems.parquet")
        assert refusal(path).startswith(f"task.path={path}: not readable as Parquet after row 0 (")
    monkeypatch.setattr(files, "MAX_GROUP", 1000)
    path = write([record(n) for n in range(150)])
    assert "row 1: a row group of" in refusal(path) and refusal(path).endswith("the most is 1000")


def hub(load) -> types.ModuleType:
    module = types.ModuleType("datasets")
    module.load_dataset = load
    return module


def test_the_hub(monkeypatch):
    asked = []

    def load(*where, **more):
        asked.append((*where, more))
        return [record(1), record(2)]

    monkeypatch.setitem(sys.modules, "datasets", hub(load))
    for spec, want in (
        ("hf:openai/gsm8k", ("openai/gsm8k", None, {"split": "train"})),
        ("hf:openai/gsm8k:test", ("openai/gsm8k", None, {"split": "test"})),
        ("hf:openai/gsm8k:test:main", ("openai/gsm8k", "main", {"split": "test"})),
        ("hf:openai/gsm8k:train[:10]:main", ("openai/gsm8k", "main", {"split": "train[:10]"})),
        ("hf:openai/gsm8k::main", ("openai/gsm8k", "main", {"split": "train"})),
    ):
        assert [p.gold for p in problems(spec)] == ["2", "3"]
        assert asked.pop() == want
    for spec in ("hf:", "hf:gsm8k", "hf:/etc/passwd", "hf:../x", "hf:a/b:c:d:e"):
        assert refusal(spec).startswith(f"task.path={spec}: a data set of the Hub is hf:ORG/NAME, ")
    monkeypatch.setitem(sys.modules, "datasets", hub(lambda *_, **__: [record(1), {"question": "q"}]))
    assert "task.path=hf:a/b, row 2: field 'answer' must be" in refusal("hf:a/b")


def test_the_hub_out_of_reach(monkeypatch):
    def load(*_, **__):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\n(offline mode is enabled)")

    monkeypatch.setitem(sys.modules, "datasets", hub(load))
    said = refusal("hf:a/b")
    assert said.startswith(
        "task.path=hf:a/b: cannot be loaded (Couldn't reach 'a/b' on the Hub (offline mode is enabled))"
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal("hf:a/b") == "task.path=hf:a/b: data sets of the Hub need the datasets package: pip install datasets"


# --- the split ------------------------------------------------------------------------------------------------


def golds(path, **fields) -> tuple[list, list]:
    train, evaluation = load_problems(task(path=path, **fields))
    return [int(p.gold) for p in train], [int(p.gold) for p in evaluation]


def test_the_split_is_disjoint_and_stable(file):
    path = file(*map(record, range(50)))
    sizes = {"train_size": 25, "eval_size": 15}
    train, evaluation = golds(path, **sizes)
    assert len(set(train)) == 25 and len(set(evaluation)) == 15 and not set(train) & set(evaluation)
    assert golds(path, **sizes) == (train, evaluation)
    assert golds(path, train_size=5, eval_size=15) == (train[:5], evaluation)  # eval does not depend on train's size
    assert golds(path, train_size=25, eval_size=4) == (train, evaluation[:4])
    assert golds(path, **sizes, seed=1) != (train, evaluation)
    assert golds(path, **sizes, template="plain", answer_style="boxed") == (train, evaluation)
    assert golds(file(*map(record, reversed(range(50)))), **sizes) == (
        train,
        evaluation,
    )  # nor on the order in the file
    train, evaluation = golds(path, train_size=35, eval_size=15)
    assert {*train, *evaluation} == set(range(1, 51))
    with pytest.raises(InputError, match=r"holds 50 different problems, fewer than .* = 36 \+ 15$"):
        golds(path, train_size=36, eval_size=15)


def test_new_problems_move_none_from_one_set_into_the_other(file):
    train, evaluation = golds(file(*map(record, range(50))), train_size=20, eval_size=15)
    more_train, more_evaluation = golds(file(*map(record, range(60))), train_size=20, eval_size=15)
    assert (more_train, more_evaluation) != (train, evaluation)
    assert not set(train) & set(more_evaluation) and not set(evaluation) & set(more_train)


def test_a_separate_eval_file(file):
    """What it holds is not trained on, whether it is evaluated with or not."""
    path = file(*map(record, range(30)))
    other = file(*map(record, range(20, 40)), record(21, question=" What is\n20 + 1?"), name="eval.jsonl")
    said = []
    options = task(path=path, eval_path=other, train_size=20, eval_size=5)
    train, evaluation = load_problems(options, say=said.append)
    assert {int(p.gold) for p in train} == set(range(1, 21))
    assert {int(p.gold) for p in evaluation} <= set(range(21, 41)) and len(evaluation) == 5
    assert said == [f"task.path={path}: 10 of 30 problems are also in task.eval_path, and are not trained on"]
    for sizes, message in (
        (
            {"train_size": 21},
            f"task.path={path}: holds 20 different problems that eval_path has not, fewer than task.train_size=21",
        ),
        ({"eval_size": 21}, f"task.eval_path={other}: holds 20 different problems, fewer than task.eval_size=21"),
        ({"eval_path": "nowhere"}, "task.eval_path=nowhere: no such file"),
    ):
        with pytest.raises(InputError) as error:
            load_problems(task(path=path, **{"eval_path": other, **sizes}))
        assert str(error.value) == message
