"""A byte-level BPE tokenizer of 400 tokens, trained on the spot, and a model directory around it."""

import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from router.tokenizer import ByteLevelTokenizer

SAMPLES = [
    "Once upon a time there was a prompt, and it was swallowed in chunks.",
    "Die Straße führt über die Brücke; größere Blöcke überall.",
    "日本語のテキストも分割されます。日本語の文字。",
    "👩🏽‍🚀 🎉🎉 ﷽ 🇩🇪🇯🇵 e\u0301",
    "def f(x):\n\treturn x  # 1234567890\n\n",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def write_model_dir(path: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Returns the library's own tokenizer, to compare with."""
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
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False), AddedToken("größer", special=False)])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": None}
    if chat_template is not None:
        config["chat_template"] = chat_template  # type: ignore[assignment]
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer


def make_tokenizer() -> ByteLevelTokenizer:
    with tempfile.TemporaryDirectory() as path:
        write_model_dir(Path(path))
        return ByteLevelTokenizer(Path(path))
