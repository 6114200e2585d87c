"""Tokenizers from GGUF metadata: against SentencePiece, against a slow merge by score, and case by case."""

import json
import pathlib

import numpy as np
import pytest
from gguf_files import MERGES, TOKENS, TYPES, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_jax.errors import InputError
from rhyme_jax.models.gguf_tokenizer import build_tokenizer
from rhyme_jax.models.tokenizer import Tokenizer

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "sentencepiece.json").read_text(encoding="utf-8")
)  # see make_sentencepiece.py
PIECES = {token: i for i, token in enumerate(GOLDEN["tokens"])}
BLANK = "\u2581"


def byte_level(**fields):
    """Metadata as `read_header` gives it; a field of None is left out."""
    chat = "<|im_start|>{{ messages[0]['content'] }}"
    return metadata(
        {
            "ggml.model": "gpt2",
            "ggml.pre": "smollm",
            "ggml.tokens": TOKENS,
            "ggml.token_type": np.array(TYPES, np.int32),
            "ggml.merges": MERGES,
            "ggml.bos_token_id": VOCAB["<|im_start|>"],
            "ggml.eos_token_id": VOCAB["<|im_end|>"],
            "ggml.padding_token_id": VOCAB["<pad>"],
            "chat_template": chat,
        },
        fields,
    )


def sentencepiece(**fields):
    return metadata(
        {
            "ggml.model": "llama",
            "ggml.tokens": GOLDEN["tokens"],
            "ggml.scores": np.array(GOLDEN["scores"], np.float32),
            "ggml.token_type": np.array(GOLDEN["types"], np.int32),
            "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 2,
        },
        fields,
    )


def metadata(known, fields):
    known |= {f"ggml.{key}": value for key, value in fields.items()}
    return {f"tokenizer.{key}": value for key, value in known.items() if value is not None}


def ids(*tokens):
    return [VOCAB[token] for token in tokens]


@pytest.fixture
def reread(tmp_path):
    """A tokenizer as it is built, and as it comes back from the directory it was saved in."""

    def both(metadata):
        built = build_tokenizer(metadata, "m.gguf")
        built.save(tmp_path)
        return built, Tokenizer.load(tmp_path)

    return both


# --- byte-level BPE -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "hello", ids("hello")),
        ("smollm", "12  5", ids("1", "2", "ĠĠ", "5")),  # digits apart, and the spaces before one together
        ("smollm", "a<|im_end|>b", ids("a", "<|im_end|>", "b")),
        ("smollm", "<tool>x<pad>", ids("<tool>", "x", "<pad>")),
        ("smollm", "é", ids("Ã", "©")),
        ("smollm", "e\u0301", ids("e", "Ì", "ģ")),  # no normalisation
        ("smollm", "xyz", ids("x", "y", "z")),
        ("smollm", "(x", ids("(", "x")),
        ("qwen2", "12  5", ids("1", "2", "Ġ", "Ġ", "5")),
        ("qwen2", "e\u0301", ids("Ã", "©")),  # NFC
        ("qwen2", "(x", ids("(x")),  # a letter run takes the sign before it
        ("deepseek-r1-qwen", "e\u030112(x", ids("Ã", "©", "1", "2", "(x")),
        *((name, "12  5", ids("12", "Ġ", "Ġ", "5")) for name in ("llama-bpe", "llama3", "llama-v3", "falcon3")),
        ("llama-bpe", "hello", ids("hello")),
        ("llama-bpe", "xyz", ids("xyz")),  # a word of the vocabulary, whole
        ("smaug-bpe", "12xyz", ids("12", "x", "y", "z")),
        ("tekken", "12  5", ids("1", "2", "Ġ", "Ġ", "5")),
        ("tekken", "eXe", ids("e", "X", "e")),  # a capital letter begins a word
        ("llama-bpe", "eXe", ids("eX", "e")),
        ("tekken", "1xyz", ids("1", "xyz")),
        ("gpt-2", "12  5", ids("12", "Ġ", "Ġ", "5")),
        ("gpt-2", "xyz(x", ids("x", "y", "z", "(", "x")),
    ],
)
def test_pre_tokenizers(pre, text, expected, reread):
    for tokenizer in reread(byte_level(pre=pre)):
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected, skip_special_tokens=False) in (text, text.replace("e\u0301", "é"))


def test_special_ids(reread):
    for tokenizer in reread(byte_level()):
        assert tokenizer.eos_ids == (VOCAB["<|im_end|>"], VOCAB["<|endoftext|>"])
        assert tokenizer.pad_id == VOCAB["<pad>"] and tokenizer.bos_id == VOCAB["<|im_start|>"]
        assert tokenizer.decode(ids("<|im_start|>", "h", "<tool>", "<|im_end|>")) == "h<tool>"
        assert tokenizer.render_chat("hi") == "<|im_start|>hi"
    plain = byte_level(padding_token_id=None, bos_token_id=None)
    del plain["tokenizer.chat_template"]
    for tokenizer in reread(plain):
        assert tokenizer.pad_id == VOCAB["<|im_end|>"]
        assert tokenizer.chat_template is None and tokenizer.bos_id is None


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({}, []),
        ({"add_bos_token": True}, ["<|im_start|>"]),
        ({"pre": "llama-bpe"}, ["<|im_start|>"]),  # where the file does not say
        ({"pre": "llama-bpe", "bos_token_id": None}, []),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"pre": "smaug-bpe"}, []),
    ],
)
def test_bos_before_a_prompt(fields, added, reread):
    for end in (False, True):
        for tokenizer in reread(byte_level(**fields, add_eos_token=end)):
            assert tokenizer.encode_prompt("hell") == ids(*added, "hell")
            assert tokenizer.encode("hell") == ids("hell")
            everything = tokenizer.backend.encode("hell").ids
            assert everything == ids(*added, "hell", *["<|im_end|>"] * end)


# --- SentencePiece --------------------------------------------------------------------------------------------


def merged_by_score(text):
    """SentencePiece's BPE, slowly: the neighbours whose union scores highest are joined, the leftmost of equals."""
    symbols = list(BLANK + text.replace(" ", BLANK)) if text else []
    while True:
        best = None
        for i in range(len(symbols) - 1):
            at = PIECES.get(symbols[i] + symbols[i + 1])
            if at is not None and GOLDEN["types"][at] == 1 and (best is None or GOLDEN["scores"][at] > best[0]):
                best = GOLDEN["scores"][at], i
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = ["".join(symbols[best[1] : best[1] + 2])]
    out = []
    for symbol in symbols:
        out += [PIECES[symbol]] if symbol in PIECES else [PIECES[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return out


@pytest.fixture(scope="module")
def spm():
    return build_tokenizer(sentencepiece(), "m.gguf")


def test_equals_sentencepiece(reread):
    assert len(GOLDEN["encoded"]) >= 25
    for tokenizer in reread(sentencepiece()):
        for text, expected, decoded in GOLDEN["encoded"]:
            assert tokenizer.encode(text) == expected == merged_by_score(text), text
            assert tokenizer.decode(expected) == decoded, text
            assert tokenizer.encode_prompt(text) == [1, *expected], text


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([t for t, i in PIECES.items() if GOLDEN["types"][i] == 1]) | st.text(max_size=6), max_size=12
    )
)
def test_equals_a_slow_merge(spm, parts):
    text = "".join(parts).replace("<", "")  # which could spell a special token
    assert spm.encode(text) == merged_by_score(text)
    assert spm.decode(spm.encode(text)) == text.replace(BLANK, " ")


def test_special_tokens_and_spaces(reread):
    types = np.array(GOLDEN["types"], np.int32)
    types[PIECES["roll"]] = 4  # as if somebody had added it
    for tokenizer in reread(sentencepiece(token_type=types)):
        assert tokenizer.eos_ids == (2,) and tokenizer.pad_id == 2 and tokenizer.bos_id == 1
        assert tokenizer.encode("<s>a b</s>") == [1, PIECES[BLANK + "a"], PIECES[BLANK + "b"], 2]
        assert tokenizer.backend.encode("scroll", add_special_tokens=False).tokens[-1] == "roll"
        assert tokenizer.decode([1, PIECES[BLANK + "a"], 2]) == "a"
    for tokenizer in reread(sentencepiece(add_space_prefix=False, add_bos_token=False)):
        assert tokenizer.encode_prompt("a b") == [PIECES["a"], PIECES[BLANK + "b"]]
        assert tokenizer.decode([PIECES[BLANK + "a"]]) == " a"


def test_merges_of_the_file_come_before_scores(spm):
    merges = ["▁ a", "a b"]
    tokenizer = build_tokenizer(sentencepiece(merges=merges), "m.gguf")
    assert tokenizer.backend.encode("ab", add_special_tokens=False).tokens == ["▁a", "b"]


def test_without_bytes_unknown_characters_are_the_unknown_token():
    tokens = ["<unk>", "<s>", "</s>", BLANK, "a", BLANK + "a"]
    fields = {"tokens": tokens, "token_type": np.array([2, 3, 3, 1, 1, 1]), "scores": np.array([0, 0, 0, -2, -3, -1.0])}
    tokenizer = build_tokenizer(sentencepiece(**fields), "m.gguf")
    assert tokenizer.encode("a xya") == [5, 3, 0, 4]


# --- refusals -------------------------------------------------------------------------------------------------

ONES = np.ones(len(GOLDEN["tokens"]), np.int32)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level(model="bert"), "tokenizer.ggml.model='bert' is not supported; supported: gpt2, llama$"),
        (byte_level(model=np.arange(3)), "tokenizer.ggml.model=array"),
        (byte_level(pre="default"), "tokenizer.ggml.pre='default' is not supported; supported: smollm, llama-bpe, "),
        (byte_level(merges=["he"]), "its merges are not pairs"),
        (byte_level(merges=np.arange(3)), "tokenizer.ggml.merges=array.*must be of type list"),
        (byte_level(tokens=[*TOKENS[:-1], "a"]), "its tokens and their types do not fit together"),
        (byte_level(bos_token_id=-1), "tokenizer.ggml.bos_token_id=-1: there are"),
        (byte_level(bos_token_id=True), "tokenizer.ggml.bos_token_id=True: must be of type int"),
        (byte_level(add_bos_token=1), "tokenizer.ggml.add_bos_token=1: must be of type bool"),
        (byte_level(add_bos_token=True, bos_token_id=None), "bos_token_id=missing, though add_bos_token asks for it"),
        (sentencepiece(scores=None), "tokenizer.ggml.scores=missing"),
        (sentencepiece(scores=np.zeros(3)), "its tokens and their scores do not fit together"),
        (sentencepiece(scores=np.full(len(ONES), np.nan)), "its tokens and their scores do not fit together"),
        (sentencepiece(tokens=[*GOLDEN["tokens"][:-1], "x" * 10**6]), "a token has 1000000 characters, at most 512"),
        (
            sentencepiece(token_type=ONES, tokens=[f"t{i}" for i in range(len(ONES))]),
            "neither all bytes nor an unknown",
        ),
        (sentencepiece(eos_token_id=None), "tokenizer.ggml.eos_token_id=missing"),
    ],
)
def test_what_is_refused(metadata, message):
    with pytest.raises(InputError, match=message) as error:
        build_tokenizer(metadata, "m.gguf")
    assert str(error.value).startswith("m.gguf: ") and "\n" not in str(error.value)
