"""Makes sentencepiece.json: a small vocabulary of Llama 2's kind, and what SentencePiece makes of hard strings.

    pip install sentencepiece==0.2.3
    python tests/golden/make_sentencepiece.py

The model is trained with the options of Llama 2's tokenizer (byte-pair merging, byte fallback, no normalisation, digits
apart, a space before the text), on the README. The result holds what a GGUF file would (pieces, scores and types), and
for each string its ids and what they decode to. None of the strings names a special token: SentencePiece would spell
it out, where Hugging Face's tokenizers and llama.cpp take it whole.
"""

import io
import json
import pathlib

import sentencepiece

HERE = pathlib.Path(__file__).parent
EXTRA = "Übergröße naïve café. Привет, мир! 東京都に行きます。 x = [i for i in range(10)]  # loop\n" * 3
STRINGS = [
    "",
    "a",
    " ",
    "  ",
    "hello world",
    " leading and trailing ",
    "   three   runs    of     spaces",
    "tabs\tand\r\nline\n\nbreaks\n",
    "1234567890 3.14159 2**60",
    "The policy's responses, token for token.",
    "def f(x):\n    return x + 1\n",
    "naïve café Übergröße",
    "e\u0301 and \u00e9",
    "Привет, мир! Ещё раз.",
    "東京都に行きます。",
    "한국어",
    "\U0001f469\u200d\U0001f4bb and \U0001f1e9\U0001f1ea",
    "שלום עולם",
    "\u2581literal blank\u2581\u2581",
    "<0x0A> <",
    "\x00\x7f\u0085\u00a0\ufeff",
    "aaaaaaaaaaaaaaaaa",
    "rollouts rollout rollou rollo roll rol ro r",
    "history " * 40,
    "ﬁ ½ Ⅷ ①",
    "a\u0300\u0301\u0302b",
]


def main() -> None:
    """Writes the file beside this script."""
    text = (HERE.parents[1] / "README.md").read_text(encoding="utf-8") + EXTRA
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.995,
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    def kind(i: int) -> int:
        flags = ((sp.is_unknown, 2), (sp.is_control, 3), (sp.is_unused, 5), (sp.is_byte, 6))
        return next((number for check, number in flags if check(i)), 1)

    ids = range(sp.get_piece_size())
    golden = {
        "made_by": f"sentencepiece {sentencepiece.__version__}",
        "tokens": [sp.id_to_piece(i) for i in ids],
        "scores": [sp.get_score(i) for i in ids],
        "types": [kind(i) for i in ids],
        "encoded": [[s, sp.encode(s), sp.decode(sp.encode(s))] for s in STRINGS],
    }
    (HERE / "sentencepiece.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
