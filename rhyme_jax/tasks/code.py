"""Problems whose answer is a Python program: HumanEval, MBPP, and files of assertions or of inputs with outputs.

A program is run in a sandbox, its tests in another one (`sandbox`): it can neither read them nor say that it passed.
"""

import ast
import builtins
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Sequence

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.tasks import files
from rhyme_jax.tasks.problems import Problem, Source, Split, normalized
from rhyme_jax.tasks.sandbox import Sandbox, SandboxError

REWARDS = ("all", "fraction")
MAX_PROGRAM = 1 << 18  # characters; a longer program is graded 0
# Where a completion of a function ends that the model did not end itself (Chen et al. 2021, section 2.1).
_STOP = re.compile(r"\n(?:class|def|#|if|print|```)")
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")


def last_block(response: str) -> str | None:
    """The text in the last fenced block of a response (CommonMark: three or more backticks or tildes, then anything,
    such as a language); None where there is none. A block that the response does not close ends with it. Indentation
    of the fence is taken off its lines.
    """
    block, opening, lines = None, None, []
    for line in response.replace("\r\n", "\n").split("\n"):
        found = _FENCE.fullmatch(line)
        if opening is None:
            if found:
                opening, lines = found, []
            continue
        if found and found[2].startswith(opening[2]) and not found[3].strip():
            block, opening = "\n".join(lines) + "\n", None
            continue
        indent = len(opening[1])
        lines.append(line[indent:] if line[:indent] == opening[1] else line.lstrip(" \t") if indent else line)
    return block if opening is None else "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class CodeProblem(Problem):
    """A problem whose answer is the last fenced block of a response, or with `completion` what continues `prefix`.

    It has either `tests` of functions or `cases` of standard input and output.
    """

    tests: tuple[str, ...] = ()  # Python text, run in order
    names: tuple[str, ...] = ()  # functions and classes of the program that the tests use
    cases: tuple[tuple[str, str], ...] = ()  # (standard input, standard output); space at ends of lines is ignored
    helpers: str = ""  # Python text that stands before the program, and that the tests may use: imports, functions
    prefix: str = ""  # what a completion continues
    completion: bool = False  # a response without a fence continues `prefix`
    rewarded: str = "all"  # one of REWARDS: 1 where everything passes, else 0; or the share that passes
    solution: str | None = None  # a response that is right
    sandbox: Sandbox = dataclasses.field(default_factory=Sandbox)

    def __post_init__(self):
        if bool(self.tests) == bool(self.cases):
            raise ValueError("a CodeProblem has either tests or cases")
        if self.rewarded not in REWARDS:
            raise InputError(f"rewarded={self.rewarded!r}: must be one of {', '.join(REWARDS)}")

    def reference(self) -> str | None:
        return self.solution

    def program(self, response: str) -> tuple[str, ...] | None:
        """The program that a response is or contains, in parts; None where it has none."""
        block = last_block(response)
        first = response.lstrip("\r\n")[:1]
        if self.completion and (block is None or first in (" ", "\t")):  # indented: the body of a function
            return (self.prefix + _STOP.split(response, maxsplit=1)[0],)
        if block is None:
            return None
        return (self.helpers, block) if self.helpers else (block,)

    def reward(self, response: str) -> float | None:
        """1 or 0, or with rewarded="fraction" the share of tests or cases that pass; None where a sandbox could
        not be started, or the tests fail by themselves.

        Raises:
          InputError: there is no bubblewrap on this machine.
        """
        parts = self.program(response)
        if parts is None or sum(map(len, parts)) > MAX_PROGRAM:
            return 0.0
        try:
            return self._cases_passed(parts) if self.cases else self._tests_passed(parts)
        except SandboxError:
            return None

    def _tests_passed(self, parts: tuple[str, ...]) -> float:
        if self.rewarded == "all":
            return float(self.sandbox.judge(parts, self.names, self.tests, self.helpers).right)
        counted, total = _counting(self.tests)
        verdict = self.sandbox.judge(parts, self.names, counted, self.helpers)
        return max(0, min(verdict.passed, total - verdict.failed)) / total if total else float(verdict.right)

    def _cases_passed(self, parts: tuple[str, ...]) -> float:
        """A sandbox for each case, one after the other, in the time of one grading."""
        deadline = time.monotonic() + self.sandbox.limits.wall_s
        passed = 0
        for given, expected in self.cases:
            left = deadline - time.monotonic()
            outcome = self.sandbox.run("\n".join(parts), given, wall_s=left) if left > 0 else None
            right = outcome is not None and outcome.status == 0 and _same_output(outcome.stdout, expected)
            if self.rewarded == "all" and not right:
                return 0.0
            passed += right
        return passed / len(self.cases)


def _same_output(one: str, other: str) -> bool:
    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().split("\n")]

    return lines(one) == lines(other)


@functools.lru_cache(maxsize=64)
def _counting(tests: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """Tests that go on after one that fails; the number of them.

    A test is a statement with an assertion in it, or a call of a function that has one, in the text itself or in its
    function `check`; not `assert True`, which is in many tests of HumanEval. A loop is one test: if each of its rounds
    counted, a program could pass the first of them and then stall, for a better share than one that fails the others.
    """
    trees = [ast.parse(text) for text in tests]
    functions = {n.name: n for tree in trees for n in tree.body if isinstance(n, ast.FunctionDef)}
    checks = [functions.pop("check")] if "check" in functions else []
    asserting = {name for name, function in functions.items() if _asserts(function, ())}
    total = 0
    for body in [block.body for block in (*trees, *checks)]:
        for i, statement in enumerate(body):
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef) and _asserts(statement, asserting):
                body[i] = _counted(statement)
                total += 1
    return tuple(ast.unparse(ast.fix_missing_locations(tree)) for tree in trees), total


def _asserts(statement: ast.AST, functions: Iterable[str]) -> bool:
    return any(isinstance(node, ast.Name) for node in ast.walk(statement)) and any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions)
        for node in ast.walk(statement)
    )


def _counted(statement: ast.stmt) -> ast.Try:
    passed, failed = ([ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))] for name in ("__passed__", "__failed__"))
    return ast.Try([statement], [ast.ExceptHandler(ast.Name("BaseException", ast.Load()), None, failed)], passed, [])


def used_names(tests: Sequence[str], solution: str = "", helpers: str = "") -> tuple[str, ...]:
    """What tests use that is neither built in nor their own, or that a right solution defines.

    Raises:
      SyntaxError, ValueError, RecursionError, MemoryError: not Python text.
    """
    used, own, solved = set(), set(), set()
    for text in (*tests, helpers):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) and text is not helpers else own).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
                own.add(node.name)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                own.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    if solution:
        for node in ast.parse(solution).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                solved.add(node.name)
    return tuple(sorted(used & solved - own | used - own - set(dir(builtins))))


# --- files ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Options:
    task: str
    chat: bool
    completion: bool
    rewarded: str
    sandbox: Sandbox


def load_code(
    path: str,
    *,
    field: str = "task.path",
    task: str = "code",
    chat: bool = True,
    completion: bool = False,
    rewarded: str = "all",
    sandbox: Sandbox | None = None,
) -> list[CodeProblem]:
    """Problems of a file, a directory of files or a data set of the Hub (see `files.rows`); of those that ask the same
    the first.

    Each record is read by the fields it has:

    - HumanEval (Chen et al. 2021): prompt, entry_point, test, canonical_solution.
    - MBPP (Austin et al. 2021), full or sanitized: text or prompt, test_list, code, test_setup_code, test_imports. The
      question shows the first of the tests, for the name of the function.
    - question and tests, a list of Python texts with assertions; optionally setup (run before the tests) and solution.
    - question and cases, a list of {"input", "output"}; optionally solution.

    Args:
      field: what the path is called, for errors.
      task, chat, completion, rewarded, sandbox: as in `CodeProblem`. With `completion`, questions of HumanEval are its
        prompts and nothing else.

    Raises:
      InputError: with the path, the line or row, and what is wrong with it.
    """
    if rewarded not in REWARDS:
        raise InputError(f"rewarded={rewarded!r}: must be one of {', '.join(REWARDS)}")
    if not path:
        raise InputError(f"{field}='': a file of programming problems ({', '.join(files.SUFFIXES)}) is needed")
    options = _Options(task, chat, completion, rewarded, sandbox or Sandbox())
    problems: dict[str, CodeProblem] = {}
    kept = 0
    for where, row in files.rows(field, path, _COLUMNS):
        problem = _problem(where, {name: value for name, value in row.items() if value is not None}, options)
        if (key := normalized(problem.question)) in problems:
            continue
        kept += len(key) + sum(map(len, (*problem.tests, *itertools.chain(*problem.cases), problem.solution or "")))
        if kept > files.MAX_KEPT:
            raise InputError(f"{field}={path}: holds more than {files.MAX_KEPT} characters of problems")
        problems[key] = problem
    if not problems:
        raise InputError(f"{field}={path}: holds no problems")
    return list(problems.values())


def load(source: Source) -> Split:
    """Disjoint (train, eval) problems of a task's files (see `load_code`), after a first program has run.

    Raises:
      InputError: programs cannot be run here, a file is missing or malformed, or holds fewer problems than asked for.
    """
    options = source.options

    def read_field(field: str) -> dict[str, Problem]:
        problems = load_code(
            getattr(options, field),
            field=f"{source.section}.{field}",
            task=source.task,
            chat=not options.completion,
            completion=options.completion,
            rewarded=options.code_reward or "all",
            sandbox=source.sandbox,
        )
        return {normalized(p.question): p for p in problems}

    both = files.split(source, read_field)
    source.sandbox.check()
    return both


def _problem(where: str, record: dict, options: _Options) -> CodeProblem:
    readers = [reader for needs, reader in _FORMATS if all(name in record for name in needs)]
    if not readers:
        known = "; ".join(", ".join(needs) for needs, _ in _FORMATS)
        raise InputError(f"{where}: has the fields {', '.join(map(str, record))!r:.80}; needs all of one of: {known}")
    try:
        fields = readers[0](_Fields(where, record), options)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{where}: tests or solution are not Python text ({one_line(e)})") from e
    if "tests" in fields and not fields["names"]:
        raise InputError(f"{where}: the tests use no function of the program")
    return CodeProblem(
        chat=options.chat,
        task=options.task,
        completion=options.completion,
        rewarded=options.rewarded,
        sandbox=options.sandbox,
        **fields,
    )


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A record whose fields are checked as they are read."""

    where: str
    record: dict

    def text(self, name: str, default: str | None = None) -> str:
        value = self.record.get(name)
        if default is not None and value is None:
            return default
        if not isinstance(value, str) or (default is None and not value.strip()):
            kind = "a string" if default is not None else "a string that is not empty"
            raise InputError(f"{self.where}: field {name!r} must be {kind}, got {value!r:.60}")
        return value

    def texts(self, name: str, default: list | None = None) -> list[str]:
        value = self.record.get(name, default)
        if not isinstance(value, list) or not (value or default is not None):
            raise InputError(f"{self.where}: field {name!r} must be a list that is not empty, got {value!r:.60}")
        for item in value:
            if not isinstance(item, str):
                raise InputError(f"{self.where}: field {name!r} must hold strings, got {item!r:.60}")
        return value

    def cases(self) -> tuple[tuple[str, str], ...]:
        cases = self.record["cases"]
        if not isinstance(cases, list) or not cases:
            raise InputError(f"{self.where}: field 'cases' must be a list that is not empty, got {cases!r:.60}")
        for case in cases:
            if not isinstance(case, dict) or not all(isinstance(case.get(k), str) for k in ("input", "output")):
                raise InputError(f"{self.where}: cases must be {{'input': text, 'output': text}}, got {case!r:.60}")
        return tuple((case["input"], case["output"]) for case in cases)


_ANSWER = "Answer with the whole program in one fenced Python code block."


def _fenced(code: str) -> str:
    return f"```python\n{code.strip(chr(10))}\n```"


def _human_eval(fields: _Fields, options: _Options) -> dict:
    prompt, entry, test = fields.text("prompt"), fields.text("entry_point"), fields.text("test")
    if not entry.isidentifier():
        raise InputError(f"{fields.where}: field 'entry_point' must be the name of a function, got {entry!r:.60}")
    solution = fields.text("canonical_solution", "")
    tests = (test, f"check({entry})")
    for text in (*tests, _standing_alone(prompt)):
        ast.parse(text)
    asked = f"Complete this Python function. {_ANSWER}\n\n{_fenced(prompt)}"
    answer = solution if options.completion else _fenced(prompt + solution)
    return {
        "question": prompt if options.completion else asked,
        "tests": tests,
        "names": (entry,),
        "helpers": _standing_alone(prompt),
        "prefix": prompt,
        "solution": answer if solution else None,
    }


def _standing_alone(prompt: str) -> str:
    """A prompt that a function's body is to follow, as a text of its own."""
    try:
        ast.parse(prompt)
    except SyntaxError:
        return prompt.rstrip() + "\n    pass\n"
    return prompt


def _mbpp(fields: _Fields, options: _Options) -> dict:
    asked = fields.text("text" if "text" in fields.record else "prompt")
    tests, code = fields.texts("test_list"), fields.text("code", "")
    setup = "\n".join([*fields.texts("test_imports", []), fields.text("test_setup_code", "")])
    ran = ([setup] if setup.strip() else []) + tests
    return {
        "question": f"{asked.strip()} {_ANSWER} It must pass tests like this one:\n\n{tests[0]}",
        "tests": tuple(ran),
        "names": used_names(ran, code),
        "solution": _fenced(code) if code else None,
    }


def _asserted(fields: _Fields, options: _Options) -> dict:
    tests, setup, solution = fields.texts("tests"), fields.text("setup", ""), fields.text("solution", "")
    ran = ([setup] if setup.strip() else []) + tests
    return {
        "question": fields.text("question"),
        "tests": tuple(ran),
        "names": used_names(ran, solution),
        "solution": _fenced(solution) if solution else None,
    }


def _with_cases(fields: _Fields, options: _Options) -> dict:
    solution = fields.text("solution", "")
    return {
        "question": fields.text("question"),
        "cases": fields.cases(),
        "solution": _fenced(solution) if solution else None,
    }


_FORMATS: tuple[tuple[tuple[str, ...], Callable[[_Fields, _Options], dict]], ...] = (
    (("prompt", "entry_point", "test"), _human_eval),
    (("text", "test_list"), _mbpp),
    (("prompt", "test_list"), _mbpp),
    (("question", "tests"), _asserted),
    (("question", "cases"), _with_cases),
)
# What there may be to read of a row.
_COLUMNS = (
    *dict.fromkeys(itertools.chain.from_iterable(needs for needs, _ in _FORMATS)),
    *("canonical_solution", "code", "test_setup_code", "test_imports", "setup", "solution"),
)
