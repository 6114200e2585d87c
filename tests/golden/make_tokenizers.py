"""Writes tokenizers/: small tokenizers as four families of models have them, with transformers' word on hard texts.

Environment as in make_smollm2.py. Each directory holds what a model's would (tokenizer.json, tokenizer_config.json and
so on), golden.json what transformers makes of TEXTS and CHATS with them.
"""
# ruff: noqa: RUF001 (letters that look like others are the point)

import json
import pathlib
import shutil

import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = pathlib.Path(__file__).parent / "tokenizers"

CORPUS = """\
History rhymes: the same prompts come back every epoch, and a policy changes little in between. A draft is accepted
only if it equals the token that was sampled. Let's see whether we'll find 12 + 34 = 46 and 1,234.5 * 6 = 7407 here.
Sie sagte, daß die Häuser größer würden; où est le café déjà vu? ¿Qué tal, señor? Привет, мир, как дела сегодня?
def add(a, b):\n    return a + b  # the sum\n\n\nfor i in range(10):\n\tprint(i)\n
今天天气很好，我们去公园散步。こんにちは、世界。 안녕하세요 세계. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया
The answer is 42. The question is what the question was. She can't, he won't, they've gone and I'm here; it's fine.
<think>Step by step: 3 * 7 = 21, 21 - 4 = 17.</think> So the answer is \\boxed{17}. #### 17
"""

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\r\n",
    "\t",
    "a",
    "Hello, world!",
    " leading",
    "trailing ",
    "  two leading and two trailing  ",
    "runs  of   spaces    of     every      length",
    "tabs\there\t\tand\t\t\tthere",
    "line\nbreaks\n\nand\n\n\nmore\n",
    "CRLF\r\nends\r\n\r\nof lines\r",
    " \n \n ",
    "It's we'll I'M they'VE don't 'tis o'clock",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 1e-5 ０１２ ²³ Ⅷ",
    "12+34-56=?",
    "café cafe\u0301 Å A\u030a \u1e9b\u0323 ﬁ",
    "Zalgo t\u0336\u0301\u0302e\u0335x\u0334\u0310t",
    "naïve Ünïcödé ß ẞ İ ı",
    "😀 👍\U0001f3fd 👩\u200d👩\u200d👧\u200d👦 \U0001f3f3\ufe0f\u200d🌈 🇩🇪 ❤\ufe0f 1\ufe0f\u20e3",
    "\u200bzero\u200bwidth\u200d\u2060\ufeff",
    "\u00a0no\u00a0break\u202f\u3000spaces\u2009thin",
    "soft\u00adhyphen \u2028 line \u2029 paragraph \x85 next \x0b \x0c",
    "\x00\x01\x1b[31mcontrol\x7f",
    "שלום עולם, שָׁלוֹם",
    "مرحبا بالعالم ١٢٣ \u202ertl\u202c",
    "今天天气很好，我们去公园。",
    "こんにちは世界、カタカナ ﾊﾝｶｸ",
    "안녕하세요 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "नमस्ते दुनिया क्षि",
    "ไทยไม่มีช่องว่าง",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 𐍈 \U0010ffff",
    "<s> </s> <unk> <0x41> <0x0A> <pad>",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "[INST] hi [/INST]</s>[INST]",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos>",
    "<think>\n\n</think>a<think> b </think>",
    "x<|eot_id|> y <|im_end|>z</s>  w <end_of_turn>",
    "▁already ▁▁ marked▁",
    "Ġbyte ĊlevelĊ ĉ",
    "snake_case camelCase SCREAMING_CASE kebab-case dotted.name path/to/file.py",
    "def f(x):\n    if x:\n        return {'a': [1, 2], \"b\": x ** 2}  # comment\n",
    "$\\frac{1}{2}\\sum_{i=1}^{n} x_i^2$ \\boxed{17}",
    "!!!??? ... --- === *** ### @@@ ~~~ ``` ```python",
    "https://example.org/a?b=c&d=%20e#f user@example.org",
    "#### 17",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 12,
    " " * 300,
    "\n" * 40 + "x" + "\t" * 40,
    "The same prompts come back every epoch, and 1234 rhymes. 😀\r\n" * 25,
]

# Written for this test, in the manner of the families' own.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- raise_exception("This template supports no tool calls") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not (message.content.startswith('<tool_response>')) %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
ODD = """\
{% set data = {"z": "ä<>&'", "a": [1, none, true]} %}
{{ data | tojson }}
    {{ data | tojson(indent=2, sort_keys=true) }}
{% for m in messages %}
  {% if m.role == "system" %}
  {% continue %}
  {% endif %}
{{ loop.index }}:{{ m.content | upper }}{{ eos_token }}{{ unk_token }}{{ missing }}
{% endfor %}
{{ dict(a=1) }} {{ namespace(b=2).b }} {{ documents is none }} {{ pad_token is defined }}
"""

CHATS = [
    {"user": "What is 2+2?", "system": None, "variables": {"date_string": "1 Jan 2025"}},
    {"user": "What is 2+2?", "system": "Be brief.", "variables": {"date_string": "1 Jan 2025"}},
    {"user": "  blanks around \n", "system": " and here\n", "variables": {"date_string": "x"}},
    {"user": "", "system": None, "variables": {"date_string": "", "enable_thinking": False}},
    {
        "user": "Ünï <|im_end|> [INST] {{ x }} 'q' \"d\"",
        "system": None,
        "variables": {"date_string": "", "tools": None},
    },
    {"user": "think", "system": "s", "variables": {"date_string": "", "enable_thinking": True}},
]

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(digits: str, specials: list[str], whole: list[str], nfc: bool) -> tokenizers.Tokenizer:
    """Llama 3, Qwen2, Qwen3."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=not nfc))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT.replace("DIGITS", digits)), behavior="isolated")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=520, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in whole])
    return tokenizer


def sentencepiece(specials: list[str], after: list[str], gemma: bool) -> tokenizers.Tokenizer:
    """Llama 2 and Mistral, or Gemma: pieces with a mark for blanks, and bytes for what no piece covers."""
    marked = [line.replace(" ", "▁") for line in CORPUS.splitlines(keepends=True)]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁+"), behavior="merged_with_next")
    trained.train_from_iterator(marked, trainers.BpeTrainer(vocab_size=320, show_progress=False, limit_alphabet=90))
    model = json.loads(trained.to_str())["model"]
    pieces = [*specials, *(f"<0x{i:02X}>" for i in range(256)), *model["vocab"]]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(m) for m in model["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    blanks = normalizers.Replace(" ", "▁")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        tokenizer.normalizer = blanks
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        bos = "<bos>"
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        back.append(decoders.Strip(" ", left=1))
        bos = "<s>"
    tokenizer.decoder = decoders.Sequence(back)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in [*specials, *after]])
    if gemma:
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("\n\n", "▁▁", "<tool>")])
    tokenizer.post_processor = begins_with(tokenizer, bos)
    return tokenizer


def begins_with(tokenizer: tokenizers.Tokenizer, bos: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def make() -> dict[str, tuple[tokenizers.Tokenizer, dict[str, object]]]:
    """Tokenizer and other files of each family."""
    headers = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    llama3 = byte_level("{1,3}", ["<|begin_of_text|>", "<|end_of_text|>", *headers], [], nfc=False)
    llama3.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), begins_with(llama3, "<|begin_of_text|>")]
    )
    ids = [llama3.token_to_id(t) for t in ("<|end_of_text|>", "<|eot_id|>")]
    qwen = byte_level("", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>"], nfc=True)
    mistral = sentencepiece(["<unk>", "<s>", "</s>"], ["[INST]", "[/INST]"], gemma=False)
    mistral.enable_truncation(7)  # left in some files, and not heeded by a call without arguments
    mistral.enable_padding(length=9, pad_id=2, pad_token="</s>")
    gemma = sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>"], ["<start_of_turn>", "<end_of_turn>"], gemma=True)
    return {
        "llama3": (
            llama3,
            {
                "tokenizer_config.json": {
                    "bos_token": "<|begin_of_text|>",
                    "eos_token": "<|eot_id|>",
                    "chat_template": LLAMA3,
                    "clean_up_tokenization_spaces": True,
                    "model_max_length": 131072,
                },
                "generation_config.json": {"bos_token_id": 0, "eos_token_id": ids, "temperature": 0.6, "top_p": 0.9},
            },
        ),
        "qwen": (
            qwen,
            {
                "tokenizer_config.json": {
                    "add_bos_token": False,
                    "bos_token": None,
                    "eos_token": "<|im_end|>",
                    "pad_token": "<|endoftext|>",
                    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
                    "clean_up_tokenization_spaces": False,
                    "chat_template": "{{ 'the file chat_template.jinja goes before this' }}",
                },
                "chat_template.jinja": QWEN3,
                "config.json": {"eos_token_id": qwen.token_to_id("<|endoftext|>")},
            },
        ),
        "mistral": (
            mistral,
            {
                "tokenizer_config.json": {
                    "add_bos_token": True,
                    "add_eos_token": False,
                    "chat_template": [
                        {"name": "tool_use", "template": "{{ 'tools' }}"},
                        {"name": "default", "template": MISTRAL},
                    ],
                    "legacy": False,
                },
                "special_tokens_map.json": {
                    "bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False},
                    "eos_token": {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False},
                    "unk_token": {
                        "__type": "AddedToken",
                        "content": "<unk>",
                        "lstrip": False,
                        "normalized": False,
                        "rstrip": False,
                    },
                },
            },
        ),
        "gemma": (
            gemma,
            {
                "tokenizer_config.json": {
                    "bos_token": "<bos>",
                    "eos_token": "<eos>",
                    "unk_token": {
                        "__type": "AddedToken",
                        "content": "<unk>",
                        "lstrip": False,
                        "normalized": False,
                        "rstrip": False,
                    },
                    "pad_token": "<pad>",
                    "chat_template": GEMMA,
                },
                "generation_config.json": {
                    "eos_token_id": [gemma.token_to_id("<eos>"), gemma.token_to_id("<end_of_turn>")]
                },
            },
        ),
    }


def rendered(tokenizer, template: str | None, chat: dict) -> str | None:
    """None where the template refuses."""
    messages = [{"role": "user", "content": chat["user"]}]
    if chat["system"] is not None:
        messages.insert(0, {"role": "system", "content": chat["system"]})
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **chat["variables"]
        )
    except Exception as e:
        if "System role" not in str(e):
            raise
        return None


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    golden = {"texts": TEXTS, "chats": CHATS, "families": {}, "templates": {}}
    for name, (backend, files) in make().items():
        folder = FOLDER / name
        folder.mkdir(parents=True)
        backend.save(str(folder / "tokenizer.json"), pretty=False)
        for file, value in files.items():
            text = value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False) + "\n"
            (folder / file).write_text(text, encoding="utf-8")
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
        golden["families"][name] = {
            "ids": ids,
            "prompt_ids": [tokenizer(text).input_ids[:4] for text in TEXTS],  # their beginnings: the rest is in ids
            "prompt_lengths": [len(tokenizer(text).input_ids) for text in TEXTS],
            "decoded": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
            "decoded_with_special": [tokenizer.decode(i, skip_special_tokens=False) for i in ids],
            "chats": [rendered(tokenizer, None, chat) for chat in CHATS],
        }
        print(name, len(tokenizer), sum(p.stat().st_size for p in folder.iterdir()))  # noqa: T201
        if name == "qwen":
            for title, template in (("smollm2", SMOLLM2), ("odd", ODD)):
                texts = [rendered(tokenizer, template, chat) for chat in CHATS]
                golden["templates"][title] = {"template": template, "chats": texts}
    (FOLDER / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    print(transformers.__version__, tokenizers.__version__, (FOLDER / "golden.json").stat().st_size)  # noqa: T201


if __name__ == "__main__":
    main()
