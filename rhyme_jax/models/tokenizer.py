"""Text to token ids and back, with the end-of-sequence set and the chat template that belong to a model.

The work is done by Hugging Face `tokenizers`; this class adds what a rollout needs to know. A directory holds
`tokenizer.json` (the tokenizer) and `tokenizer_config.json` (special tokens, chat template), as transformers
writes them.
"""

import dataclasses
import json
import pathlib

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.files import read_json


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the special ids of its model."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]  # generation stops after any of these
    pad_id: int  # fills unused positions; never read: masks come from lengths
    bos_id: int | None = None  # only for chat templates that write it (Llama 3)
    chat_template: str | None = None  # jinja2 source; None for a plain language model

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Nothing is added: the special tokens of a chat are already in the template."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def render_chat(self, user: str, system: str | None = None) -> str:
        """The prompt text that asks `user` of a chat model; the text itself where there is no template.

        The template comes from a file, so it runs in jinja2's sandbox.
        """
        if self.chat_template is None:
            return user if system is None else f"{system}\n{user}"
        messages = [{"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})

        def raise_exception(message):
            raise InputError(f"chat template: {message}")

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.globals["raise_exception"] = raise_exception
        special = {"eos_token": self._token(self.eos_ids[0]), "bos_token": self._token(self.bos_id)}
        try:
            return env.from_string(self.chat_template).render(messages=messages, add_generation_prompt=True, **special)
        except jinja2.TemplateError as e:
            raise InputError(f"chat template: {one_line(e)}") from e

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self.backend.id_to_token(token_id)

    def save(self, directory) -> None:
        directory = pathlib.Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        meta = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._token(self.eos_ids[0]),
            "bos_token": self._token(self.bos_id) or None,
            "pad_token": self.backend.id_to_token(self.pad_id),
            "rhyme_jax_eos_token_ids": list(self.eos_ids),
        }
        if self.chat_template is not None:
            meta["chat_template"] = self.chat_template
        text = json.dumps(meta, indent=1, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, directory) -> "Tokenizer":
        """Reads a directory. The EOS set is, in this order of precedence: the ids this class saved; those of
        `generation_config.json` or `config.json`; the `eos_token` of `tokenizer_config.json`.

        Raises:
          InputError: a file is missing or unreadable, or no end-of-sequence token is declared.
        """
        directory = pathlib.Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"tokenizer: {path} does not exist")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception on any malformed file
            raise InputError(f"tokenizer: {path} is not a tokenizer.json ({one_line(e)})") from e
        meta = _optional_json(directory / "tokenizer_config.json")
        eos = meta.get("rhyme_jax_eos_token_ids")
        for name in ("generation_config.json", "config.json"):
            eos = eos if eos is not None else _optional_json(directory / name).get("eos_token_id")
        if eos is None:
            eos = _token_id(backend, meta.get("eos_token"))
        eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
        if not eos_ids or not all(type(i) is int and 0 <= i < backend.get_vocab_size() for i in eos_ids):
            raise InputError(f"tokenizer: {directory} declares no usable end-of-sequence token (eos_token_id={eos})")
        pad_id = _token_id(backend, meta.get("pad_token"))
        template = meta.get("chat_template")
        if not isinstance(template, str):
            jinja = directory / "chat_template.jinja"
            template = jinja.read_text(encoding="utf-8") if jinja.is_file() else None
        bos_id = _token_id(backend, meta.get("bos_token"))
        return cls(backend, eos_ids, eos_ids[0] if pad_id is None else pad_id, bos_id, template)


def char_tokenizer(alphabet: str) -> Tokenizer:
    """One token per character of `alphabet`, after <pad> (0), <eos> (1) and <unk> (2)."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *alphabet])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    return Tokenizer(backend, eos_ids=(1,), pad_id=0)


def _token_id(backend: tokenizers.Tokenizer, token) -> int | None:
    """The id of a token written as text or as transformers' {"content": text}."""
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _optional_json(path: pathlib.Path) -> dict:
    return read_json(path) if path.is_file() else {}
