"""The tokenizer that a GGUF file's metadata describes: byte-level BPE, or SentencePiece's BPE.

A GGUF file holds no tokenizer.json. It has the vocabulary, merges or scores, and the *name* of how text is split
beforehand (`tokenizer.ggml.pre`). What a name stands for is taken from llama.cpp (src/llama-vocab.cpp), which quotes
the published tokenizer.json of each model; names whose pattern is not certain are refused, since a wrong one would
go unnoticed.
"""

import dataclasses

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rhyme_jax.errors import InputError, one_line
from rhyme_jax.models.tokenizer import Tokenizer

# What ends a turn or a text in these families. A file names one eos id, but a chat model may emit any of them.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # of llama.cpp's token types
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's spelling of a space
_LONGEST_PIECE = 512  # characters; every way to cut a piece in two is looked up, so a longer one is a lie


def build_tokenizer(metadata: dict, source: str) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Its end-of-sequence set is the file's eos id and those of `END_TOKENS` that are control tokens here. The backend's
    post-processor adds what llama.cpp would add to a prompt: BOS, EOS or neither.

    Args:
      metadata: of `gguf_header.read_header`.
      source: names the file in errors.

    Raises:
      InputError: it is of another kind, or its parts do not fit together.
    """
    fields = _Fields(metadata, source)
    kind = fields.one_of("model", tuple(_KINDS))
    tokens, types = fields.get("tokens", list), fields.get("token_type", np.ndarray)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens) or len(types) != len(tokens):
        raise InputError(f"{source}: is damaged: its tokens and their types do not fit together")
    backend, adds_bos = _KINDS[kind](fields, vocab, types)
    special = [t for t, kind in zip(tokens, types) if kind in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in special])
    whole = [t for t, kind in zip(tokens, types) if kind == _USER_DEFINED]
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False, special=False) for t in whole])

    eos, bos = fields.token_id("eos"), fields.token_id("bos", None)
    pad = fields.token_id("padding", eos)
    control = {t for t, kind in zip(tokens, types) if kind == _CONTROL}
    ends = (vocab[token] for token in END_TOKENS if token in control)
    added_bos = fields.get("add_bos_token", bool, adds_bos and bos is not None)
    if added_bos and bos is None:
        raise InputError(f"{source}: tokenizer.ggml.bos_token_id=missing, though add_bos_token asks for it")
    before = [tokens[bos]] if added_bos else []
    after = [tokens[eos]] if fields.get("add_eos_token", bool, False) else []
    if before or after:
        try:
            backend.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after],
                special_tokens=[(token, vocab[token]) for token in dict.fromkeys(before + after)],
            )
        except Exception as e:  # the library raises bare Exception
            raise InputError(f"{source}: is damaged: its BOS and EOS cannot be added ({one_line(e)})") from e
    template = fields.get("chat_template", str, None, section="tokenizer")
    return Tokenizer(backend, tuple(dict.fromkeys((eos, *ends))), pad, bos, template)


class _Fields:
    """The metadata by key, with its types checked."""

    def __init__(self, metadata: dict, source: str):
        self.metadata, self.source = metadata, source

    def get(self, key: str, want: type, *default, section: str = "tokenizer.ggml"):
        """The value of a key, of type `want`; without a `default` the key must be there."""
        name = f"{section}.{key}"
        if name not in self.metadata and default:
            return default[0]
        value = self.metadata.get(name)
        if not isinstance(value, want) or (isinstance(value, bool) and want is not bool):
            shown = "missing" if value is None else repr(value)[:80]
            raise InputError(f"{self.source}: {name}={shown}: must be of type {want.__name__}")
        return value

    def one_of(self, key: str, supported: tuple[str, ...]) -> str:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, str) or value not in supported:
            shown = repr(value)[:80]
            raise InputError(
                f"{self.source}: tokenizer.ggml.{key}={shown} is not supported; supported: {', '.join(supported)}"
            )
        return value

    def token_id(self, key: str, *default) -> int | None:
        i, count = self.get(f"{key}_token_id", int, *default), len(self.get("tokens", list))
        if i is not None and not 0 <= i < count:
            raise InputError(f"{self.source}: tokenizer.ggml.{key}_token_id={i}: there are {count} tokens")
        return i

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else () for merge in self.get("merges", list)]
        if any(len(pair) != 2 for pair in pairs):
            raise InputError(f"{self.source}: is damaged: its merges are not pairs of tokens")
        return pairs

    def bpe(self, vocab: dict[str, int], merges: list[tuple[str, str]], **options) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
        except Exception as e:  # the library raises bare Exception
            raise InputError(f"{self.source}: is damaged: its merges make no tokenizer ({one_line(e)})") from e


# --- byte-level BPE -------------------------------------------------------------------------------------------


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """The pattern of Llama 3 and Qwen2, which differ in how many digits go together."""
    return _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_words() -> pre_tokenizers.PreTokenizer:
    """The pattern of Mistral's Tekken, where a capital letter after a small one begins a word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return _split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@dataclasses.dataclass(frozen=True)
class _Pre:
    """What a value of `tokenizer.ggml.pre` stands for."""

    split: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word of the vocabulary is taken whole, without merging its bytes
    adds_bos: bool = False  # where `tokenizer.ggml.add_bos_token` does not say


_LLAMA3 = _Pre(_words(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_QWEN2 = _Pre(_words(r"\p{N}"), normalizers.NFC())
_PRE = {
    "smollm": _Pre(_digits_apart()),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _Pre(_LLAMA3.split),  # SmolLM3 as well
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Pre(_cased_words(), ignore_merges=True, adds_bos=True),
    "gpt-2": _Pre(pre_tokenizers.ByteLevel(add_prefix_space=False)),
}


def _byte_level(fields: _Fields, vocab: dict[str, int], _types) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's kind: UTF-8 bytes spelled as printable characters, merged in the order of a list."""
    pre = _PRE[fields.one_of("pre", tuple(_PRE))]
    backend = fields.bpe(vocab, fields.merges(), ignore_merges=pre.ignore_merges)
    backend.pre_tokenizer = pre.split
    backend.decoder = decoders.ByteLevel()
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    return backend, pre.adds_bos


# --- SentencePiece --------------------------------------------------------------------------------------------


def _sentencepiece(fields: _Fields, vocab: dict[str, int], types: np.ndarray) -> tuple[tokenizers.Tokenizer, bool]:
    """Llama 2's and Mistral's kind: characters merged by the score of what they make, with a fallback to bytes.

    A space precedes the text, and whatever follows a special token, as in SentencePiece, llama.cpp and the
    tokenizer.json of Llama 2; `add_space_prefix` turns that off.
    """
    source = fields.source
    unknown = [token for token, i in vocab.items() if types[i] == _UNKNOWN]
    if not unknown and not all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        raise InputError(f"{source}: is damaged: its tokens have neither all bytes nor an unknown token")
    if "tokenizer.ggml.merges" in fields.metadata:
        merges = fields.merges()  # those of the model's tokenizer.json, from which the scores were made, or nothing
    else:
        scores = fields.get("scores", np.ndarray)
        if len(scores) != len(vocab) or not np.isfinite(scores).all():
            raise InputError(f"{source}: is damaged: its tokens and their scores do not fit together")
        pieces = {token: i for token, i in vocab.items() if types[i] == _NORMAL}
        longest = max(map(len, pieces), default=0)
        if longest > _LONGEST_PIECE:
            raise InputError(f"{source}: is damaged: a token has {longest} characters, at most {_LONGEST_PIECE}")
        merges = merges_from_scores(pieces, scores)
    options = {"unk_token": unknown[0]} if unknown else {}
    backend = fields.bpe(vocab, merges, fuse_unk=True, byte_fallback=True, **options)
    prefix = fields.get("add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", _BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), spaces]) if prefix else spaces
    decode = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decode, decoders.Strip(" ", 1, 0)] if prefix else decode)
    return backend, True


def merges_from_scores(pieces: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, most preferred first, in the order that transformers gives them.

    SentencePiece merges the neighbours that make the piece of the highest score, BPE those that come first in a
    list, so every way to cut a piece in two becomes a merge at that piece's place. (Where scores tie, SentencePiece
    takes the leftmost neighbours and a list cannot; the scores of a trained vocabulary are all different.)

    Args:
      pieces: piece -> token id; only those that text may be merged into.
      scores: by token id.
    """
    merges = []
    for piece, i in pieces.items():
        cuts = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        cuts = [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
        cuts.sort(key=lambda cut: (pieces[cut[0]], pieces[cut[1]]))
        merges += [(scores[i], cut) for cut in cuts]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1][0]), -len(merge[1][1])))
    return [cut for _, cut in merges]


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
