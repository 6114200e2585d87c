"""Text to token ids and back, with the end-of-sequence set and the chat template that belong to a model.

The work is done by Hugging Face `tokenizers`; this module adds what transformers' fast tokenizers
(`PreTrainedTokenizerFast`) do around it, from the files that they write: `tokenizer.json` (the tokenizer),
`tokenizer_config.json` and `special_tokens_map.json` (special tokens), `chat_template.jinja`, `generation_config.json`
(where generation stops).
"""

import dataclasses
import datetime
import functools
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup
from tokenizers import decoders, models, pre_tokenizers, processors

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.files import read_json, write_json

# Beyond any prompt: what a chat template may do. `render_chat` says what they bound, and what they do not.
MAX_CHAT = 2**22  # characters of the prompt, and of any text or items of any list on the way to it
MAX_RANGE = 2**20
MAX_SECONDS = 5.0  # of processor time of the rendering thread, so that a busy machine refuses nothing
MAX_WORK = 2**26  # characters that one call may write by an estimate from above
MAX_EXPONENT = 64

# The special tokens that have a name of their own in tokenizer_config.json, and in templates.
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the special ids of its model."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]  # generation stops after any of these
    pad_id: int  # fills unused positions; never read: masks come from lengths
    bos_id: int | None = None
    chat_template: str | None = None  # jinja2 source; None for a plain language model
    # What templates call `eos_token` and so on; those of the ids above where it is None.
    special_tokens: Mapping[str, str] | None = None
    clean_up: bool = False  # whether decoding takes out blanks before punctuation, as tokenizers of words need

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Nothing is added: the special tokens of a chat are already in the template."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text that a model without a chat template is to go on with.

        These are transformers' `tokenizer(text).input_ids`, with the beginning-of-sequence token that the model was
        trained with, but without an end-of-sequence token: a prompt must not end the text.
        """
        ids = self.backend.encode(text).ids
        return ids[: len(ids) - self._added_at_the_end]

    def encode_chat(
        self, user: str, system: str | None = None, today: datetime.date | None = None, **variables
    ) -> list[int]:
        """The prompt's token ids: `render_chat`, encoded as the model expects it.

        Raises:
          InputError: as `render_chat` does, and where the template writes nothing: no model goes on from no token.
        """
        text = self.render_chat(user, system, today, **variables)
        if self.chat_template is not None and not text:
            raise InputError("chat template: writes nothing")
        return self.encode_prompt(text) if self.chat_template is None else self.encode(text)

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        text = self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)
        return _cleaned_up(text) if self.clean_up else text

    def render_chat(self, user: str, system: str | None = None, today: datetime.date | None = None, **variables) -> str:
        """The prompt text that asks `user` of a chat model; the text itself where there is no template.

        The template comes from a file, so it runs in jinja2's sandbox, and each of these is refused: more than MAX_CHAT
        characters, as the prompt or as a text on the way to it; ranges of more than MAX_RANGE numbers, of all loops
        together; powers beyond MAX_EXPONENT; widths and repetitions that write more than MAX_WORK characters; and
        more than MAX_SECONDS of processor time for compiling and rendering.

        The time is looked at between lines of the template and of the Python that it calls. One call into compiled
        code is not interrupted: the operators, the filters and the methods of text and numbers that can write much
        more than they were given are bounded before they start, but others are not (comparing two lists, each of which
        holds the same lists many times over, can take very long). So these limits stop faulty templates and the common
        ways to exhaust a machine; they are no wall against a template that somebody wrote to get around them.

        Time is taken by `sys.settrace`, in the calling thread alone: a debugger or a coverage tool sees nothing of a
        rendering, and has its trace function back after it.

        Args:
          today: the date for templates that write it (Llama 3.2's); None: that of the clock, so that a prompt changes
            from day to day.
          variables: what else the template reads, like Qwen3's `enable_thinking`.

        Raises:
          InputError: the template is malformed, refuses the messages, fails, does more than it may, or writes what
            is not valid Unicode (a lone surrogate).
        """
        if self.chat_template is None:
            return user if system is None else f"{system}\n{user}"
        messages = [{"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        given = {**self._named_tokens, "tools": None, "documents": None, "range": _Range()}
        given |= {"strftime_now": (today or datetime.datetime.now()).strftime, **variables}
        about = "chat template" if system is None else f"chat template, with the system prompt {system[:60]!r}"
        given |= {"messages": messages, "add_generation_prompt": True}
        try:
            text = _within_time(lambda: _written(_compiled(self.chat_template), given))
            text.encode("utf-8")  # `tokenizers` raises TypeError on what does not encode
        except jinja2.TemplateSyntaxError as e:
            raise InputError(f"chat template, line {e.lineno}: {one_line(e)}") from e
        except _OutOfTimeError as e:
            raise InputError(f"{about}: takes more than {MAX_SECONDS:g} s of processor time") from e
        except UnicodeEncodeError as e:
            raise InputError(f"{about}: writes {e.object[e.start]!a}, which is not valid Unicode text") from e
        except Exception as e:  # a template can do most of what Python does, so it can fail in as many ways
            raise InputError(f"{about}: {one_line(e)}") from e
        return text

    @functools.cached_property
    def _named_tokens(self) -> Mapping[str, str]:
        if self.special_tokens is not None:
            return self.special_tokens
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0], "pad_token": self.pad_id}
        return {name: self.backend.id_to_token(i) for name, i in ids.items() if i is not None}

    @functools.cached_property
    def _added_at_the_end(self) -> int:
        """Tokens that the post-processor puts after a text."""
        added = self.backend.encode("a").special_tokens_mask
        return len(added) if all(added) else added[::-1].index(0)

    def save(self, directory) -> None:
        """Writes tokenizer.json and tokenizer_config.json, from which `load` makes the same tokenizer again."""
        directory = pathlib.Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        meta = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{"bos_token": None, **self._named_tokens},
            "clean_up_tokenization_spaces": self.clean_up,
            "rhyme_jax_eos_token_ids": list(self.eos_ids),
        }
        if self.chat_template is not None:
            meta["chat_template"] = self.chat_template
        write_json(directory / "tokenizer_config.json", meta)

    @classmethod
    def load(cls, directory) -> "Tokenizer":
        """Reads a directory.

        The EOS set is that which this class saved; or else all ids of `generation_config.json` (where it has none, of
        `config.json`) and the `eos_token` of `tokenizer_config.json`, as vLLM has it: a chat model's turn may end in
        either. What is put around a prompt is the post-processor's of tokenizer.json; where it has none,
        `add_bos_token` of tokenizer_config.json says whether a prompt begins with the BOS token.

        Raises:
          InputError: a file is missing or unreadable, or no end-of-sequence token is declared.
        """
        directory = pathlib.Path(directory)
        backend = _read_backend(directory / "tokenizer.json")
        config = directory / "tokenizer_config.json"
        meta = _optional_json(config)
        if "added_tokens_decoder" not in meta:  # files of transformers 4.33 and before, which had the tokens elsewhere
            meta = {**meta, **_optional_json(directory / "special_tokens_map.json")}
        _add_tokens(backend, meta, config)
        named = {name: _content(meta[name]) for name in _NAMED if _content(meta.get(name)) is not None}
        eos_ids = _eos_ids(directory, backend, meta, named.get("eos_token"))
        ids = {name: backend.token_to_id(token) for name, token in named.items()}
        bos_id, pad_id = ids.get("bos_token"), ids.get("pad_token")
        if backend.post_processor is None and meta.get("add_bos_token") is True and bos_id is not None:
            bos = named["bos_token"]
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_id)]
            )
        return cls(
            backend,
            eos_ids,
            eos_ids[0] if pad_id is None else pad_id,
            bos_id,
            _chat_template(directory, meta),
            named,
            # transformers 5 leaves it out for BPE, of which it would take real blanks.
            meta.get("clean_up_tokenization_spaces") is True and not isinstance(backend.model, models.BPE),
        )


def char_tokenizer(alphabet: str) -> Tokenizer:
    """One token per character of `alphabet`, after <pad> (0), <eos> (1) and <unk> (2)."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *alphabet])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    return Tokenizer(backend, eos_ids=(1,), pad_id=0)


# --- files ----------------------------------------------------------------------------------------------------


def _read_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise InputError(f"tokenizer: {path} does not exist")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception on any malformed file
        raise InputError(f"tokenizer: {path} is not a tokenizer.json ({one_line(e)})") from e
    backend.no_truncation()  # a file can ask for both, and they would cut and fill prompts
    backend.no_padding()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, meta: dict, path: pathlib.Path) -> None:
    """Adds what tokenizer_config.json declares beyond tokenizer.json, and makes its named tokens special.

    What would get another id than the declared one is left out, and so is a named token that no vocabulary holds: its
    id would lie beyond the embedding.
    """
    known = backend.get_added_tokens_decoder()
    declared = meta.get("added_tokens_decoder") or {}
    try:
        tokens = {int(i): _added_token(fields) for i, fields in declared.items()}
    except (TypeError, ValueError, AttributeError, KeyError) as e:
        raise InputError(f"{path}: added_tokens_decoder is malformed ({one_line(e)})") from e
    for i, token in sorted(tokens.items()):
        got = backend.token_to_id(token.content)
        its_own = backend.get_vocab_size() if got is None else got
        if repr(known.get(i)) != repr(token) and its_own == i:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    more = [meta.get("additional_special_tokens"), meta.get("extra_special_tokens")]
    more = [token for tokens in more if isinstance(tokens, list) for token in tokens]
    for token in map(_content, [*(meta.get(name) for name in _NAMED), *more]):
        if token is not None and backend.token_to_id(token) is not None:
            was = known.get(token, tokenizers.AddedToken(token, normalized=False))
            if not was.special:
                was.special = True
                backend.add_special_tokens([was])


def _added_token(fields: dict) -> tokenizers.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})


def _eos_ids(directory: pathlib.Path, backend: tokenizers.Tokenizer, meta: dict, eos_token: str | None) -> tuple:
    eos = meta.get("rhyme_jax_eos_token_ids")
    if eos is None:
        for name in ("generation_config.json", "config.json"):
            eos = eos if eos is not None else _optional_json(directory / name).get("eos_token_id")
        eos = [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
        named = None if eos_token is None else backend.token_to_id(eos_token)
        eos += [] if named is None else [named]
    if not isinstance(eos, list) or not eos or not all(_is_id(i, backend) for i in eos):
        raise InputError(f"tokenizer: {directory} declares no usable end-of-sequence token (eos_token_id={eos})")
    return tuple(dict.fromkeys(eos))


def _is_id(value, backend: tokenizers.Tokenizer) -> bool:
    """Whether a token has this id. Ids may be sparse, so the size of the vocabulary does not tell."""
    # `tokenizers` holds ids in 32 bits and raises beyond.
    return type(value) is int and 0 <= value < 2**32 and backend.id_to_token(value) is not None


def _chat_template(directory: pathlib.Path, meta: dict) -> str | None:
    """The template, from the first of the places where transformers has kept it."""
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise InputError(f"{jinja}: not readable as UTF-8 ({one_line(e)})") from e
    templates = meta.get("chat_template")
    if templates is None:
        templates = _optional_json(directory / "chat_template.json").get("chat_template")
    if isinstance(templates, list):  # of several, by name
        named = {t.get("name"): t.get("template") for t in templates if isinstance(t, dict)}
        if not isinstance(named.get("default"), str):
            raise InputError(f"tokenizer: {directory}: chat_template has no 'default' among {sorted(map(str, named))}")
        templates = named["default"]
    if templates is not None and not isinstance(templates, str):
        raise InputError(f"tokenizer: {directory}: chat_template must be text, got {type(templates).__name__}")
    return templates


def _content(token) -> str | None:
    """A token written as text or as transformers' {"content": text}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _optional_json(path: pathlib.Path) -> dict:
    return read_json(path) if path.is_file() else {}


def _cleaned_up(text: str) -> str:
    """transformers' `clean_up_tokenization`."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text


# --- chat templates -------------------------------------------------------------------------------------------


class _Generation(Extension):
    """The tag `{% generation %}`, which tells transformers what an assistant said; to us it is what it surrounds."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """jinja2's own escapes what HTML does not allow."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Range:
    """`range` for one rendering. The sandbox bounds each one, but not a range within a range."""

    def __init__(self):
        self._left = MAX_RANGE

    def __call__(self, *args) -> range:
        numbers = range(*args)
        self._left -= len(numbers)
        if self._left < 0:
            raise OverflowError(f"loops over more than {MAX_RANGE} numbers")
        return numbers


# Where time is looked at (a template has no __name__). Not everywhere: Python drops what is raised in a callback
# of its garbage collector, and JAX has one, and the trace with it; then a template ran on until 22 GB were full.
_TIMED = {"jinja2", "markupsafe", __name__.split(".")[0], "json", "pprint", "re", "string", "textwrap"}


class _OutOfTimeError(BaseException):
    """Not an Exception: jinja2 catches those while it folds constants, and Python ends a trace that has raised."""


def _within_time(work: Callable[[], str]) -> str:
    """`work()`, stopped between two lines of Python after MAX_SECONDS of this thread's time.

    A trace function works in any thread, which an alarm signal does not.
    """
    end = time.thread_time() + MAX_SECONDS
    look = time.monotonic() + MAX_SECONDS  # a thread's time is a system call, and cannot pass faster than this clock

    def tick(frame, event, arg):
        nonlocal look
        if event == "call" and frame.f_globals.get("__name__", "jinja2").split(".")[0] not in _TIMED:
            return None
        if event in ("call", "line") and (now := time.monotonic()) > look:
            left = end - time.thread_time()
            if left <= 0:
                raise _OutOfTimeError
            look = now + left
        return tick

    before = sys.gettrace()
    sys.settrace(tick)
    try:
        return work()
    finally:
        sys.settrace(before)


def _written(template: jinja2.Template, given: dict) -> str:
    parts, size = [], 0
    for part in template.generate(given):
        parts.append(part)
        size += len(part)
        if size > MAX_CHAT:
            raise OverflowError(f"writes more than {MAX_CHAT} characters")
    return "".join(parts)


def _size(*values) -> int:
    """Characters of the texts in `values` and in their lists, and one for everything else.

    Raises OverflowError beyond MAX_CHAT, and soon: a short template can nest lists whose text has 2**60 characters.
    """
    size, left = 0, list(values)
    while left:
        value = left.pop()
        size += max(1, len(value)) if isinstance(value, str | bytes) else 1
        if size + len(left) > MAX_CHAT:
            raise OverflowError(f"writes more than {MAX_CHAT} characters")
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            left += value
    return size


def _sized(value):
    _size(value)
    return value


def _bounded_join(join: Callable) -> Callable:
    def bounded(texts: Iterable) -> str:
        texts = tuple(texts)
        _size(*texts)
        return join(texts)

    return bounded


def _bound_call(name: str, value, given: tuple) -> None:
    """Refuses a filter or a method of `value` that would write too much; both have the same names."""
    size = _size(value, *given)
    numbers = [abs(number) for number in given if isinstance(number, int)]
    if name == "round" and max(numbers, default=0) > MAX_EXPONENT:
        raise OverflowError(f"rounds to more than {MAX_EXPONENT} digits")
    if name == "format":
        _bound_percent(value, given)
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes", "batch"):
        work = max(numbers, default=0)
    elif name in ("expandtabs", "indent", "tojson", "replace", "join", "translate", "wordwrap"):
        # At the most, all that is given is written once for each character (or item) of the value, or vice versa.
        inner = _size(value)
        work = inner * (size - inner) + inner * (0 if name in ("replace", "wordwrap") else max(numbers, default=0))
    else:
        return
    if work > MAX_WORK:
        raise OverflowError(f"{name} could write more than {MAX_WORK} characters")


def _bound_percent(text, given) -> None:
    """Refuses what `text % given` writes too much of."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    # A width or a precision comes after the % or after its (key).
    if re.search(r"[%)][#0\- +]*(\d*\.)?(\*|\d{4})", str(text)):
        raise OverflowError("a width of more than 3 digits in a format")
    if str(text).count("%") * _size(given) > MAX_WORK:
        raise OverflowError(f"% could write more than {MAX_WORK} characters")


def _bounded_filter(name: str, function: Callable) -> Callable:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the environment or the context

    @functools.wraps(function)
    def bounded(*args, **kwargs):
        value, *given = args[first:]
        if name in ("join", "sum", "list") and hasattr(value, "__next__"):
            value = list(value)
            args = (*args[:first], value, *given)
        _bound_call(name, value, (*given, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


class _Bounded(SandboxedFormatter):
    """str.format that writes at most MAX_CHAT characters."""

    written = 0

    def get_field(self, field_name, args, kwargs):
        field = super().get_field(field_name, args, kwargs)
        _size(field[0])
        return field

    def format_field(self, value, format_spec: str) -> str:
        if re.search(r"\d{4}", format_spec):
            raise OverflowError(f"a width of more than 3 digits in the format {format_spec[:20]!r}")
        text = super().format_field(value, format_spec)
        self.written += len(text)
        if self.written > MAX_CHAT:
            raise OverflowError(f"writes more than {MAX_CHAT} characters")
        return text


class _BoundedEscape(_Bounded, SandboxedEscapeFormatter):
    pass


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which bounds what a template reaches, with bounds on what it does.

    jinja2 leaves the operators named here to the rendering: it does not fold them when it compiles. It folds filters,
    and those that are bounded here say so at the rendering.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_bounded_join("".join))  # of macros and of blocks that are set

    def call_binop(self, context, operator, left, right):
        if operator == "%" and isinstance(left, str | bytes):
            _bound_percent(left, right)
        elif operator == "**" and isinstance(right, int | float) and abs(right) > MAX_EXPONENT:
            raise OverflowError(f"a power beyond {MAX_EXPONENT}")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            if bits > MAX_EXPONENT**2:
                raise OverflowError(f"a number of more than {MAX_EXPONENT**2} bits")
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if hasattr(items, "__len__") and isinstance(times, int) and len(items) * times > MAX_CHAT:
                    raise OverflowError(f"repeats to more than {MAX_CHAT} characters or items")
        elif operator == "+" and sum(len(part) for part in (left, right) if hasattr(part, "__len__")) > MAX_CHAT:
            raise OverflowError(f"adds up to more than {MAX_CHAT} characters or items")
        return super().call_binop(context, operator, left, right)

    def call(
        __self, __context, __obj, *args, **kwargs
    ):  # the names leave a template's keywords all others, as jinja2 does
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            name = __obj.__name__
            if name == "join" and args:  # the separator owns the method, the items are the value
                items = list(args[0])
                args = (items, *args[1:])
                _bound_call(name, items, (owner,))
            elif name not in ("format", "format_map"):  # which `wrap_str_format` bounds
                _bound_call(name, owner, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value):
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__

        def wrapper(*args, **kwargs):
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            markup = isinstance(text, Markup)
            formatter = _BoundedEscape(self, escape=text.escape) if markup else _Bounded(self)
            return type(text)(formatter.vformat(text, args, kwargs))

        return wrapper


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """As transformers compiles it, so that it says the same."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_sized)
    env.filters["tojson"] = _tojson
    env.filters = {name: _bounded_filter(name, function) for name, function in env.filters.items()}
    env.globals["raise_exception"] = _raise_exception
    template = env.from_string(source)
    # What `~` compiles to; jinja2 has no hook for it.
    names = template.root_render_func.__globals__
    names |= {name: _bounded_join(names[name]) for name in ("str_join", "markup_join")}
    return template
