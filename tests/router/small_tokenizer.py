"""Model directories with small tokenizers of a few hundred tokens: byte-level BPE, and SentencePiece's kind."""

import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from router.tokenizer import TextTokenizer

SAMPLES = [
    "Once upon a time there was a prompt, and it was swallowed in chunks.",
    "Die Straße führt über die Brücke; größere Blöcke überall.",
    "日本語のテキストも分割されます。日本語の文字。",
    "👩🏽‍🚀 🎉🎉 ﷽ 🇩🇪🇯🇵 e\u0301",
    "def f(x):\n\treturn x  # 1234567890\n\n",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + message.role) "
    "}}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def write_model_dir(path: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Writes a byte-level BPE tokenizer. Returns the library's own, to compare with."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 5, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool call>", special=False, normalized=False), AddedToken("größer", special=False)]
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": None}
    if chat_template is not None:
        config["chat_template"] = chat_template  # type: ignore[assignment]
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer


def write_sentence_piece_dir(path: Path, *, legacy: bool = False) -> Tokenizer:
    """Writes a tokenizer like those of Llama 2 and Mistral: "▁" stands for a blank and is put in front, and characters
    that were not learnt (all but Latin ones) are spelt in bytes. Returns the library's own, to compare with.

    With `legacy`, normalizers replace blanks, as in older directories; otherwise Metaspace does.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(SAMPLES[:2] * 5, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    learnt = json.loads(learner.to_str())["model"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(learnt["vocab"], key=learnt["vocab"].get),
    ]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(pair) for pair in learnt["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ends = [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *ends])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


def make_tokenizer() -> TextTokenizer:
    with tempfile.TemporaryDirectory() as path:
        write_model_dir(Path(path))
        return TextTokenizer(Path(path))
