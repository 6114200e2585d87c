"""Problems for training and evaluation: a prompt text, a gold answer, and how an answer is declared."""

import dataclasses
import json
import pathlib
from fractions import Fraction

import numpy as np

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.tasks import arithmetic
from rhyme_jax.tasks.grading import exact_match, extract_answer, parse_number

TASKS = ("arithmetic", "gsm8k")
GSM8K_INSTRUCTION = "Solve the problem step by step. End with a line of the form: #### answer"


@dataclasses.dataclass(frozen=True)
class Problem:
    question: str  # what the user asks; the prompt is this, or this in the model's chat template
    gold: Fraction
    extractors: tuple[str, ...]  # how a response may declare its answer (see `grading.extract_answer`)
    chat: bool  # render through the chat template

    def reward(self, response: str) -> float | None:
        """Reward of a response; None (or NaN) says that grading itself failed, and masks the sample."""
        return exact_match(response, self.gold, self.extractors)


def load_problems(task) -> tuple[list[Problem], list[Problem]]:
    """Disjoint (train, eval) problems for a config's `task` section.

    Raises:
      InputError: unknown task, missing or malformed file, or fewer problems than asked for.
    """
    if task.name not in TASKS:
        raise InputError(f"task.name={task.name!r}: must be one of {', '.join(TASKS)}")
    if task.name == "arithmetic":
        difficulties = tuple(task.difficulties)
        if not difficulties or any(not isinstance(d, int) or not 1 <= d <= 8 for d in difficulties):
            raise InputError(f"task.difficulties={difficulties}: must hold whole numbers of operations from 1 to 8")
        train, evaluation = arithmetic.split(task.train_size, task.eval_size, difficulties, task.seed)
        return [_from_chain(c) for c in train], [_from_chain(c) for c in evaluation]
    problems = read_gsm8k(task.path)
    wanted = task.train_size + task.eval_size
    if len(problems) < wanted:
        raise InputError(
            f"task.path={task.path}: holds {len(problems)} different problems, fewer than task.train_size + "
            f"task.eval_size = {task.train_size} + {task.eval_size}"
        )
    # Evaluation comes first in the shuffled order, so that it does not depend on the size of the train set.
    order = np.random.default_rng([task.seed, 0x65A8]).permutation(len(problems))[:wanted]
    chosen = [problems[i] for i in order]
    return chosen[task.eval_size :], chosen[: task.eval_size]


def _from_chain(chain: arithmetic.Chain) -> Problem:
    return Problem(chain.question, Fraction(chain.values[-1]), ("hashes",), chat=False)


def read_gsm8k(path: str) -> list[Problem]:
    """Problems of a JSONL file in GSM8K's format (`question`, `answer` ending in "#### number"; Cobbe et al.
    2021), duplicates of a question dropped.

    Raises:
      InputError: with the path, the line and what is wrong with it.
    """
    if not path:
        raise InputError("task.path='': a JSONL file in GSM8K's format is needed for task.name='gsm8k'")
    file = pathlib.Path(path)
    if not file.is_file():
        raise InputError(f"task.path={path}: no such file")
    problems: dict[str, Problem] = {}
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"task.path={path}: not readable as UTF-8 text ({one_line(e)})") from e
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"task.path={path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise InputError(f"{where}: not valid JSON") from e
        if not isinstance(record, dict):
            raise InputError(f"{where}: expected an object with 'question' and 'answer'")
        for field in ("question", "answer"):
            if not isinstance(record.get(field), str) or not record[field].strip():
                raise InputError(f"{where}: field {field!r} must be a non-empty string, got {record.get(field)!r:.60}")
        answer = extract_answer(record["answer"])
        gold = None if answer is None else parse_number(answer)
        if gold is None:
            raise InputError(f"{where}: 'answer' must end in '#### number', got {record['answer'][-40:]!r}")
        question = f"{record['question'].strip()}\n\n{GSM8K_INSTRUCTION}"
        problems.setdefault(question, Problem(question, gold, ("hashes", "boxed", "phrase"), chat=True))
    if not problems:
        raise InputError(f"task.path={path}: holds no problems")
    return list(problems.values())
