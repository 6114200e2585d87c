"""Tokenizers and chat templates of the families, against transformers' word on hard texts."""

import dataclasses
import gc
import json
import pathlib
import shutil
import sys
import threading

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


NESTED = "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
DOUBLED = "{% set n = namespace(a='x', b=3) %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 9**(9**9) }}", "a power beyond 64"),
        ("{{ '%0999999999d' % 1 }}", "a width of more than 3 digits"),
        ("{{ '%(a)0999999999d' % {'a': 1} }}", "a width of more than 3 digits"),
        ("{{ '%*d' % (999999999, 1) }}", "a width of more than 3 digits"),
        ("{{ '%0999999999d' | format(1) }}", "a width of more than 3 digits"),
        ("{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}", "% could write more than"),
        ("{{ 'x' * 3000000000 }}", "repeats to more than 4194304"),
        ("{{ 3000000000 * [1] }}", "repeats to more than 4194304"),
        ("{{ '{:>1500000000}'.format(1) }}", "a width of more than 3 digits in the format '>1500000000'"),
        ("{{ '{:>{w}}'.format(1, w=1500000000) }}", "a width of more than 3 digits in the format"),
        ("{{ ('{a:>1500000000}' | safe).format_map({'a': 1}) }}", "a width of more than 3 digits in the format"),
        ("{{ ('{0}' * 100000).format('x' * 100000) }}", "writes more than 4194304"),
        ("{{ 'x'.center(1500000000) }}", "center could write"),
        ("{{ 'x'.ljust(width=1500000000) }}", r"ljust\(\) takes no keyword|ljust could write"),
        ("{{ 'x'.zfill(1500000000) }}", "zfill could write"),
        ("{{ 'x' | center(1500000000) }}", "center could write"),
        ("{{ 'x\ny' | indent(1500000000) }}", "indent could write"),
        ("{{ [1] | batch(1500000000, 0) | list }}", "batch could write"),
        ("{{ 2.5 | round(999999999, 'ceil') }}", "rounds to more than 64 digits"),
        ("{{ ('x' * 100000).replace('x', 'y' * 100000) }}", "replace could write"),
        ("{{ ('y' * 100000).join(['x'] * 1000) }}", "join could write"),
        ("{{ ('x' * 900) | map('upper') | join('y' * 100000) }}", "join could write"),
        (DOUBLED + "{% set n.a = n.a ~ n.a %}{% endfor %}", "writes more than 4194304"),
        (DOUBLED + "{% set n.a = n.a + n.a %}{% endfor %}", "adds up to more than 4194304"),
        (DOUBLED + "{% set n.a %}{{ n.a }}{{ n.a }}{% endset %}{% endfor %}", "writes more than 4194304"),
        (DOUBLED + "{% set n.b = n.b * n.b %}{% endfor %}", "a number of more than 4096 bits"),
    ],
)
def test_templates_that_would_write_too_much_at_once(template, message, loaded):
    """None of them may start on it: most are one call that nothing could interrupt."""
    tokenizer = dataclasses.replace(loaded["qwen"], chat_template=template)
    with pytest.raises(InputError, match=f"^chat template: .*({message})") as error:
        tokenizer.render_chat("hi")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in 'x' * 100000 %}{% for b in 'x' * 100000 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ [1] | slice(1000000000) | list }}",  # folded: it runs out of time while jinja2 compiles it
        *(NESTED + use for use in ("{{ n.a }}", "{{ n.a | tojson }}", "{{ '%s' % n.a }}", "{{ '{!r}'.format(n.a) }}")),
    ],
)
def test_templates_that_take_for_ever(template, loaded, monkeypatch):
    """In a thread that is not the main one, too; and the trace function of before is back afterwards."""
    monkeypatch.setattr(tokenizer_module, "MAX_SECONDS", 0.1)
    tokenizer = dataclasses.replace(loaded["qwen"], chat_template=template)
    said = []

    def trace(frame, event, arg):
        return None

    def work():
        sys.settrace(trace)
        try:
            tokenizer.render_chat("hi")
        except InputError as e:
            said.extend([str(e), sys.gettrace() is trace])
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == ["chat template: takes more than 0.1 s of processor time", True]


def test_time_runs_out_in_spite_of_callbacks_of_the_garbage_collector(loaded, monkeypatch):
    """Python drops what a trace function raises in one, and the trace with it. This one takes most of the time."""
    monkeypatch.setattr(tokenizer_module, "MAX_SECONDS", 0.2)
    template = "{% for i in 'x' * 3000 %}{{ collect() }}{% endfor %}"
    tokenizer = dataclasses.replace(loaded["qwen"], chat_template=template)

    def collected(phase, info):
        total = 0
        for i in range(30000):
            total += i

    gc.callbacks.append(collected)
    try:
        with pytest.raises(InputError, match=r"takes more than 0\.2 s of processor time"):
            tokenizer.render_chat("hi", collect=lambda: gc.collect(0))
    finally:
        gc.callbacks.remove(collected)


def test_the_bounds_leave_ordinary_templates_alone(loaded):
    """Against jinja2 without any of them."""
    template = """{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 3 }}{{ '%5.1f|%-4s|' % (2.5, 'a') }}
{{ '{:>4}{}{a[b]!r:^9}'.format(1, 'q', a={'b': 'c'}) }}{{ '{a}'.format_map({'a': 1}) }}{{ ('<{}>' | safe).format('<') }}
{{ 'a' | center(5) }}{{ [1, 2] | join(', ') }}{{ ','.join(['a', 'b']) }}{{ 'a' ~ 1 ~ none }}{{ none }}{{ [1] + [2] }}
{{ 2.567 | round(2) }}{{ 'a-b'.replace('-', '+') }}{{ '%d' | format(3) }}{{ 'a\nb' | indent(2) }}{{ x }}{{ 1.5 ** 2 }}
{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(f(2)) }}{% set y %}{{ f(1) }}{% endset %}{{ y }}{{ 'x'.zfill(3) }}
{{ [3, 1] | sort | map('string') | join('-') }}{{ [[1, 2, 3] | batch(2, 0) | list, [1, 2] | sum] }}
{{ 'a b' | title }}"""
    want = tokenizer_module.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    got = dataclasses.replace(loaded["qwen"], chat_template=template).render_chat("hi")
    assert got == want.render() and "ababab" in got


def test_a_lone_surrogate_and_an_empty_prompt_are_refused(loaded):
    tokenizer = dataclasses.replace(loaded["qwen"], chat_template="{{ '\\ud800' }}")
    with pytest.raises(InputError, match=r"^chat template: writes '\\ud800', which is not valid Unicode text$"):
        tokenizer.encode_chat("hi")
    tokenizer = dataclasses.replace(loaded["qwen"], chat_template="{% if false %}x{% endif %}")
    assert tokenizer.render_chat("hi") == ""
    with pytest.raises(InputError, match=r"^chat template: writes nothing$"):
        tokenizer.encode_chat("hi")


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


@pytest.mark.parametrize("eos", [[], ["x"], 10**6, 2**40, -1, True, {"a": 1}])
def test_no_usable_end(eos, tmp_path):
    folder = copy_of("llama3", tmp_path, eos_token=None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(InputError, match="declares no usable end-of-sequence token") as error:
        Tokenizer.load(folder)
    assert "\n" not in str(error.value)


def test_ids_may_be_sparse(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 3, "</s>": 900}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    for eos, usable in ((900, True), (3, True), (0, False), (899, False)):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        if usable:
            assert Tokenizer.load(tmp_path).eos_ids == (eos,)
        else:
            with pytest.raises(InputError, match=rf"no usable end-of-sequence token \(eos_token_id=\[{eos}\]\)"):
                Tokenizer.load(tmp_path)
