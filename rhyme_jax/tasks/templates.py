"""How a question is put, and how an answer to it is to be declared."""

import re
from typing import Any

from rhyme_jax.tasks import grading

# By answer style: what is asked of a response, and what declares an answer in it. The styles are extractors' names.
INSTRUCTIONS = {
    "hashes": "Solve the problem step by step. End with a line of the form: #### answer",
    "boxed": "Solve the problem step by step. Put the final answer in \\boxed{}.",
    "phrase": "Solve the problem step by step. End with a line of the form: Answer: answer",
}
_DECLARED = {"hashes": "#### {}", "boxed": "\\boxed{{{}}}", "phrase": "Answer: {}"}

TEMPLATES = {
    "plain": "{question}",
    "instruct": "{question}\n\n{instruction}",
    "qa": "Question: {question}\nAnswer:",  # for models that were not taught to follow instructions
}
_FIELD = re.compile(r"\{(question|instruction)\}")


def template(source: Any, default: str) -> str:
    """The template that a task's section asks for: one of TEMPLATES by name, a text of its own, or the default.

    Args:
      source: a `problems.Source`.

    Raises:
      InputError: it is neither a name nor a text with {question}.
    """
    name = source.options.template or default
    text = TEMPLATES.get(name, name)
    if "{question}" not in text:
        raise source.error(
            "template", f"must be one of {', '.join(TEMPLATES)}, or a text with {{question}}", repr(name)
        )
    return text


def extractors(source: Any, default: str) -> tuple[str, ...]:
    """How responses to a task's questions may declare their answer: the way that they are asked for goes first.

    Raises:
      InputError: there is no such answer style.
    """
    style = source.options.answer_style or default
    if style not in INSTRUCTIONS:
        raise source.error("answer_style", f"must be one of {', '.join(INSTRUCTIONS)}", repr(style))
    return (style, *(e for e in grading.EXTRACTORS if e != style))


def asked(template: str, question: str, style: str) -> str:
    """The text that asks a question. Braces mean nothing in it, nor in the template but for its two fields."""
    fields = {"question": question, "instruction": INSTRUCTIONS[style]}
    return _FIELD.sub(lambda match: fields[match[1]], template)


def declared(style: str, answer: str) -> str:
    """The end of a response that declares an answer as the style asks for it."""
    return _DECLARED[style].format(answer)
