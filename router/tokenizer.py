"""Turns text into token ids and back, and chat messages into a prompt.

The tokenizer comes from `tokenizer.json` in a model directory, the chat template from `chat_template.jinja` or, without
that, from `tokenizer_config.json`.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import numpy as np
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.arrays import Int32
from protocol.errors import InvalidRequest, ModelError


def _byte_characters() -> dict[str, int]:
    """Returns the alphabet of byte-level BPE. Printable Latin-1 bytes are themselves; the others are 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()
BLANK = "▁"
"""What SentencePiece writes for a blank."""


class Tokenizer(Protocol):
    """What the front door needs of a tokenizer. Several threads may call its methods at once."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """By token id, its part of a text in UTF-8. It may be a part of a character; special tokens have none."""

    @property
    def has_text(self) -> bool:
        """False where tokens are numbers that stand for no text."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> Int32:
        """Tokenises a prompt as it is, with the tokenizer's own leading tokens. Raises InvalidRequest."""

    def decode(self, token_ids: Int32) -> str:
        """Returns the text of tokens. Special tokens and unknown ids have none; what is not UTF-8 becomes U+FFFD."""

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound of a text's tokens, or 0 if none is known. It costs much less than `encode`."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Writes messages of `role` and `content` as one text, up to the assistant's answer. Raises InvalidRequest."""

    def encode_chat(self, text: str) -> Int32:
        """Tokenises a text that `render` returned."""


def load_tokenizer(model_dir: Path | None, vocab_size: int) -> Tokenizer:
    """Returns a model directory's tokenizer, or a `NumberTokenizer` if it has none. Raises ModelError."""
    if model_dir is None or not (model_dir / "tokenizer.json").exists():
        return NumberTokenizer(vocab_size)
    return TextTokenizer(model_dir)


class TextTokenizer:
    """A tokenizer whose tokens are byte strings, whatever their neighbours are: byte-level BPE as in GPT-2 (Llama 3,
    Qwen, SmolLM2), or SentencePiece's kind with "▁" for a blank (Llama 2, Mistral).
    """

    has_text = True

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        try:
            source = json.loads(text := path.read_text(encoding="utf-8"))
            decoder = source.get("decoder") or {}
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path}: {error}") from error
        parts = decoder.get("decoders", [decoder])
        kinds = [part.get("type", "none") for part in parts]
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if set(kinds) == {"ByteLevel"}:
            self.token_bytes: Sequence[bytes] = _token_bytes(self._tokenizer, _byte_level, str.encode)
            added = [token.content.encode() for token in self._tokenizer.get_added_tokens_decoder().values()]
            lossless, known, spellings = _is_lossless(source), set(self.token_bytes), [*self.token_bytes, *added]
        elif _is_sentence_piece(parts):
            spelt = functools.partial(_sentence_piece, byte_fallback="ByteFallback" in kinds)
            self.token_bytes = _token_bytes(self._tokenizer, spelt, spelt)
            vocabulary = self._tokenizer.get_vocab()
            lossless, known = _is_lossless_sentence_piece(source, vocabulary), {bytes([byte]) for byte in range(256)}
            # A prompt may hold "▁" itself, so the spelling is what bounds the bytes of its text.
            spellings = [token.encode() for token in vocabulary]
        else:
            served = "only ByteLevel and what SentencePiece models have"
            raise ModelError(f"{path}: decoder {kinds} is not served, {served}")
        self._longest = max(map(len, spellings), default=0) if lossless else 0
        """The most bytes of a text that one token can stand for, or 0 if there is no limit."""
        self._unknown = bytes(byte for byte in range(256) if bytes([byte]) not in known)
        """The bytes that no token stands for. They get lost in `encode`."""
        self._template = _load_chat_template(model_dir)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def least_tokens(self, text: str) -> int:
        return -(-len(text.encode().translate(None, self._unknown)) // self._longest) if self._longest else 0

    def encode(self, text: str) -> Int32:
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int32)

    def decode(self, token_ids: Int32) -> str:
        return join_bytes(self.token_bytes, token_ids.tolist()).decode("utf-8", "replace")

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._template is None:
            raise InvalidRequest("chat", f"{len(messages)} messages", "this model has no chat template")
        return self._template.render(messages)

    def encode_chat(self, text: str) -> Int32:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


class NumberTokenizer:
    """Stands in for the tokenizer of a model without text. Token 17 reads `<17> `."""

    has_text = False
    has_chat_template = True

    def __init__(self, vocab_size: int) -> None:
        self.token_bytes: Sequence[bytes] = [b"<%d> " % token_id for token_id in range(vocab_size)]

    def encode(self, text: str) -> Int32:
        if re.fullmatch(r"\s*(<\d{1,9}>\s*)*", text) is None:
            raise InvalidRequest(
                "text", repr(text[:32]), "without a tokenizer a prompt is token ids, written like <17> <18>"
            )
        return np.array(re.findall(r"<(\d+)>", text), dtype=np.int32)

    def least_tokens(self, text: str) -> int:
        return text.count("<")

    def decode(self, token_ids: Int32) -> str:
        return join_bytes(self.token_bytes, token_ids.tolist()).decode()

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return " ".join(message["content"] for message in messages)

    def encode_chat(self, text: str) -> Int32:
        return self.encode(text)


def join_bytes(token_bytes: Sequence[bytes], token_ids: list[int]) -> bytes:
    """Joins the bytes of tokens. Ids outside the vocabulary (padding rows of an embedding) have none."""
    size = len(token_bytes)
    if len(token_ids) == 1:  # the usual case
        return token_bytes[token_ids[0]] if 0 <= token_ids[0] < size else b""
    return b"".join([token_bytes[token_id] for token_id in token_ids if 0 <= token_id < size])


def _token_bytes(
    tokenizer: tokenizers.Tokenizer, spelt: Callable[[str], bytes], spelt_added: Callable[[str], bytes]
) -> list[bytes]:
    """Returns the bytes of every token by its id. `spelt` gives those of a token of the vocabulary, `spelt_added` those
    of a token that was added to it.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max([*vocabulary.values(), *added], default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = spelt(token)
    for token_id, added_token in added.items():
        table[token_id] = b"" if added_token.special else spelt_added(added_token.content)
    return table


def _byte_level(token: str) -> bytes:
    """Returns the bytes of a token. A token outside the alphabet stands for its own text."""
    try:
        return bytes(map(BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _sentence_piece(token: str, byte_fallback: bool) -> bytes:
    if byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(BLANK, " ").encode()


def _is_sentence_piece(decoders: Sequence[Mapping[str, Any]]) -> bool:
    """Whether decoding puts blanks for "▁", maybe bytes for "<0x..>", joins all, and maybe strips a leading blank."""
    metaspace = [part for part in decoders if part.get("type") != "ByteFallback"]
    if len(metaspace) == 1 and metaspace[0].get("type") == "Metaspace":
        return bool(metaspace[0].get("replacement") == BLANK)
    replace = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    known = [
        [replace, *fallback, {"type": "Fuse"}, *end]
        for fallback in ([], [{"type": "ByteFallback"}])
        for end in ([], [strip])
    ]
    return list(decoders) in known


def _is_lossless(source: dict[str, Any]) -> bool:
    """Whether tokens keep all known bytes of a text, because nothing is normalised, stripped or removed."""
    pre = source.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    kept = all(
        part.get("type") in ("ByteLevel", "Digits", "Split") and part.get("behavior") != "Removed" for part in parts
    )
    stripped = any(added.get("lstrip") or added.get("rstrip") for added in source.get("added_tokens", []))
    return source.get("normalizer") is None and kept and not stripped


def _is_lossless_sentence_piece(source: dict[str, Any], vocabulary: Mapping[str, int]) -> bool:
    """Like `_is_lossless`: blanks may be replaced or put in front, and characters without a token spelt in bytes."""
    normalizer, pre, model = (source.get(name) or {} for name in ("normalizer", "pre_tokenizer", "model"))
    parts = [part for part in normalizer.get("normalizers", [normalizer]) if part and part.get("type") != "Prepend"]
    replaced = all(part == {"type": "Replace", "pattern": {"String": " "}, "content": BLANK} for part in parts)
    stripped = any(added.get("lstrip") or added.get("rstrip") for added in source.get("added_tokens", []))
    in_bytes = model.get("byte_fallback") and {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary.keys()
    return bool(replaced and pre.get("type") in (None, "Metaspace") and not stripped and in_bytes)


class _ChatTemplate:
    """A model's Jinja template. It runs in a sandbox, because model files are data from strangers."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError) as error:
            reason = f"refused by the chat template: {error}"
            raise InvalidRequest("chat", f"{len(messages)} messages", reason) from error


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _load_chat_template(model_dir: Path) -> _ChatTemplate | None:
    config_path, template_path = model_dir / "tokenizer_config.json", model_dir / "chat_template.jinja"
    try:
        config: dict[str, Any] = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
        source = template_path.read_text(encoding="utf-8") if template_path.exists() else config.get("chat_template")
        if isinstance(source, list):  # there are several named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        named = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        texts = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in named.items()
            if token is not None
        }
        return _ChatTemplate(source, texts)
    except (OSError, ValueError, KeyError, TypeError, jinja2.TemplateSyntaxError) as error:
        raise ModelError(f"{model_dir}: chat template: {error}") from error
