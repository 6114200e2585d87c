"""Tokenizers and chat templates of the families, against transformers' word on hard texts."""

import dataclasses
import json
import pathlib
import shutil

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from rhyme_jax.errors import InputError
from rhyme_jax.models import tokenizer as tokenizer_module
from rhyme_jax.models.tokenizer import Tokenizer, char_tokenizer

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "tokenizers"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
FAMILIES = list(GOLDEN["families"])


@pytest.fixture(scope="module")
def loaded() -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(FOLDER / name) for name in FAMILIES}


def copy_of(name: str, tmp_path, **meta) -> pathlib.Path:
    """A directory of its own, with other fields in tokenizer_config.json ("DELETE": without)."""
    folder = pathlib.Path(shutil.copytree(FOLDER / name, tmp_path / name))
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | meta
    config.write_text(json.dumps({k: v for k, v in fields.items() if v != "DELETE"}))
    return folder


def render(tokenizer: Tokenizer, chat: dict) -> str | None:
    try:
        return tokenizer.render_chat(chat["user"], chat["system"], **chat["variables"])
    except InputError:
        return None


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_texts_are_those_of_transformers(name, loaded):
    tokenizer, want = loaded[name], GOLDEN["families"][name]
    assert [tokenizer.encode(text) for text in GOLDEN["texts"]] == want["ids"]
    prompts = [tokenizer.encode_prompt(text) for text in GOLDEN["texts"]]
    assert [len(ids) for ids in prompts] == want["prompt_lengths"]
    assert [ids[:4] for ids in prompts] == want["prompt_ids"]
    assert [tokenizer.decode(ids) for ids in want["ids"]] == want["decoded"]
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in want["ids"]] == want["decoded_with_special"]


@pytest.mark.parametrize("name", FAMILIES)
def test_chats_are_those_of_transformers(name, loaded):
    chats = [render(loaded[name], chat) for chat in GOLDEN["chats"]]
    assert chats == GOLDEN["families"][name]["chats"]
    assert (None in chats) == (name == "gemma")


def test_a_refused_system_prompt_is_named(loaded):
    with pytest.raises(InputError, match=r"with the system prompt 'Be brief\.': System role not supported"):
        loaded["gemma"].render_chat("hi", "Be brief.")


@pytest.mark.parametrize("title", GOLDEN["templates"])
def test_other_templates(title, loaded):
    golden = GOLDEN["templates"][title]
    tokenizer = dataclasses.replace(loaded["qwen"], chat_template=golden["template"])
    assert [render(tokenizer, chat) for chat in GOLDEN["chats"]] == golden["chats"]


@pytest.mark.parametrize("name", FAMILIES)
def test_live_against_transformers(name, loaded):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER / name), loaded[name]
    more = [a + b for a, b in zip(GOLDEN["texts"], reversed(GOLDEN["texts"]), strict=True)]
    for text in [*GOLDEN["texts"], *more]:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids and ours.encode_prompt(text) == theirs(text).input_ids
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    for chat in GOLDEN["chats"]:
        system = [] if chat["system"] is None else [{"role": "system", "content": chat["system"]}]
        if (text := render(ours, chat)) is not None:
            messages = [*system, {"role": "user", "content": chat["user"]}]
            options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
            ids = theirs.apply_chat_template(messages, **options, **chat["variables"])
            assert ours.encode(text) == ids == ours.encode_chat(chat["user"], chat["system"], **chat["variables"])


def test_a_prompt_begins_with_bos_but_a_rendered_chat_has_its_own(loaded):
    llama = loaded["llama3"]
    plain = dataclasses.replace(llama, chat_template=None)
    assert plain.encode_chat("hi") == llama.encode_prompt("hi") == [llama.bos_id, *llama.encode("hi")]
    chat = llama.encode_chat("hi", date_string="")
    assert chat.count(llama.bos_id) == 1 and chat[0] == llama.bos_id
    assert loaded["qwen"].encode_prompt("hi") == loaded["qwen"].encode("hi")


def test_the_end_of_sequence_that_a_file_adds_is_left_out(tmp_path, loaded):
    folder = copy_of("mistral", tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    for text in GOLDEN["texts"]:
        assert tokenizer.encode_prompt(text) == loaded["mistral"].encode_prompt(text)


def test_add_bos_token_counts_where_there_is_no_post_processor(tmp_path, loaded):
    for add, want in ((True, [1]), (False, [])):
        folder = copy_of("mistral", tmp_path / str(add), add_bos_token=add)
        value = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
        (folder / "tokenizer.json").write_text(json.dumps(value))
        assert Tokenizer.load(folder).encode_prompt("hi") == [*want, *loaded["mistral"].encode("hi")]


def test_special_tokens_and_ends(loaded):
    def ids(name, *tokens):
        return tuple(loaded[name].backend.token_to_id(t) for t in tokens)

    assert loaded["llama3"].eos_ids == ids("llama3", "<|end_of_text|>", "<|eot_id|>")
    assert loaded["qwen"].eos_ids == ids("qwen", "<|endoftext|>", "<|im_end|>")  # config.json's, then its own
    assert loaded["mistral"].eos_ids == ids("mistral", "</s>")
    assert loaded["gemma"].eos_ids == ids("gemma", "<eos>", "<end_of_turn>")
    assert (loaded["gemma"].pad_id, loaded["gemma"].bos_id) == ids("gemma", "<pad>", "<bos>")
    assert loaded["mistral"].pad_id == loaded["mistral"].eos_ids[0] and loaded["qwen"].bos_id is None


def test_tokens_that_only_the_config_declares(tmp_path, loaded):
    """One more token, one that is in the vocabulary but not special, and one that no vocabulary holds."""
    more = loaded["qwen"].vocab_size
    declared = {str(more): {"content": "<extra>", "special": True, "normalized": False}}
    folder = copy_of("qwen", tmp_path, added_tokens_decoder=declared, pad_token="<nowhere>", unk_token="<think>")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a<extra>b") == [*loaded["qwen"].encode("a"), more, *loaded["qwen"].encode("b")]
    assert tokenizer.vocab_size == more + 1 and tokenizer.pad_id == tokenizer.eos_ids[0]
    assert tokenizer.decode(tokenizer.encode("a<extra><think></think>")) == "a</think>"
    folder = copy_of("qwen", tmp_path / "bad", added_tokens_decoder={"x": {"content": "y"}})
    with pytest.raises(InputError, match=r"tokenizer_config.json: added_tokens_decoder is malformed"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_again(name, tmp_path, loaded):
    before = loaded[name]
    before.save(tmp_path)
    after = Tokenizer.load(tmp_path)
    same = ("eos_ids", "pad_id", "bos_id", "chat_template", "special_tokens", "clean_up")
    assert all(getattr(after, field) == getattr(before, field) for field in same)
    for text in GOLDEN["texts"]:
        assert after.encode_prompt(text) == before.encode_prompt(text)


def test_words_are_joined_as_transformers_joins_them(tmp_path):
    """A tokenizer of words, which alone needs its blanks cleaned up."""
    vocab = {w: i for i, w in enumerate(["<eos>", "It", "is", "n't", "so", "?", "'", "s", ",", "."])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend, (0,), 0, clean_up=True).save(tmp_path)
    ids = [vocab[w] for w in ("It", "is", "n't", "so", ",", "is", "'", "s", "?")]
    assert Tokenizer.load(tmp_path).decode(ids) == "It isn't so, is's?"
    assert dataclasses.replace(Tokenizer.load(tmp_path), clean_up=False).decode(ids) == "It is n't so , is ' s ?"


def test_a_template_in_a_file_of_its_own_or_among_several(tmp_path):
    folder = copy_of("mistral", tmp_path, chat_template="DELETE")
    assert Tokenizer.load(folder).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}!"}')
    assert Tokenizer.load(folder).render_chat("hi") == "hi!"
    (folder / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    assert Tokenizer.load(folder).render_chat("hi") == "file: hi"
    for template, message in (([{"name": "rag", "template": ""}], "no 'default' among"), (7, "must be text, got int")):
        folder = copy_of("gemma", tmp_path / message, chat_template=template)
        with pytest.raises(InputError, match=message):
            Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template, line 1: Expected an expression"),
        ("\n{% for m in messages %}", "chat template, line 2: Unexpected end of template"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('no\nway') }}", "no way"),
        ("{% for i in range(10**9) %}{% endfor %}", "chat template: loops over more than 1048576 numbers"),
        ("{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}", "loops over more than"),
        ("{% for i in range(90000) %}{{ 'x' * 100 }}{% endfor %}", "writes more than 4194304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_bad_templates(template, message, loaded):
    tokenizer = dataclasses.replace(loaded["qwen"], chat_template=template)
    with pytest.raises(InputError, match=message) as error:
        tokenizer.render_chat("hi")
    assert "\n" not in str(error.value)


def test_a_template_may_ask_for_the_date(loaded, monkeypatch):
    class Fixed(tokenizer_module.datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 7, 9)

    monkeypatch.setattr(tokenizer_module.datetime, "datetime", Fixed)
    assert "Today Date: 09 Jul 2031\n\nBe brief.<" in loaded["llama3"].render_chat("hi", "Be brief.")


def test_no_template():
    tokenizer = char_tokenizer("hi\nyou")
    assert tokenizer.render_chat("you") == "you" and tokenizer.render_chat("you", "hi") == "hi\nyou"
    assert tokenizer.encode_chat("hi") == tokenizer.encode("hi")


@pytest.mark.parametrize("eos", [[], ["x"], 10**6, -1, True, {"a": 1}])
def test_no_usable_end(eos, tmp_path):
    folder = copy_of("llama3", tmp_path, eos_token=None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(InputError, match="declares no usable end-of-sequence token") as error:
        Tokenizer.load(folder)
    assert "\n" not in str(error.value)
