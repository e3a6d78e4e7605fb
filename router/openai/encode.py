"""Answers in OpenAI's dialect: whole, or as the events of a stream.

What is the same in all events of a request is written once. Texts are the only part of a usual event that JSON has to
escape.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring  # which leaves what is not ASCII as it is
from typing import Any, Protocol

from protocol.messages import TokenLogprobs
from router.call import Piece
from router.openai.decode import Asked
from router.request import Usage
from router.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Dialect(Protocol):
    """How one request's answers are written. `choice` numbers them from 0: prompt by prompt, answer by answer."""

    def opening(self, choice: int) -> bytes:
        """What precedes a choice's first piece."""
        ...

    def event(self, choice: int, piece: Piece) -> bytes:
        """One event, or nothing if the piece has nothing for the client."""
        ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """All pieces of each choice, in their order, as one JSON text."""
        ...


def total(usages: Sequence[Usage]) -> Usage:
    """The usage of a request with several prompts."""
    return Usage(*map(sum, zip(*usages, strict=True)))


def error_event(error: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


class _Writer:
    """What both dialects share. `created`: seconds since 1970."""

    _kind: str
    _event_kind: str
    _prefix: str

    def __init__(self, asked: Asked, model: str, created: int, tokenizer: Tokenizer) -> None:
        self._head = {"id": f"{self._prefix}-{asked.request_id}", "created": created, "model": model}
        self._tokenizer, self._logprobs = tokenizer, asked.logprobs
        head = json.dumps({**self._head, "object": self._event_kind})
        self._event_head = f'data: {head[:-1]}, "choices": [{{"index": '
        self._event_tail = '}], "usage": null}\n\n' if asked.include_usage else "}]}\n\n"
        self._usage_head = f'data: {head[:-1]}, "choices": [], "usage": '

    def usage_event(self, usage: Usage) -> bytes:
        return f"{self._usage_head}{json.dumps(_usage(usage))}}}\n\n".encode()

    def _wholly(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        body = {**self._head, "object": self._kind, "choices": choices, "usage": _usage(usage)}
        return json.dumps(body, ensure_ascii=False).encode()

    def _token(self, token_id: int) -> str:
        table = self._tokenizer.token_bytes
        return table[token_id].decode("utf-8", "replace") if token_id < len(table) else ""


class ChatWriter(_Writer):
    _kind, _event_kind, _prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, choice: int) -> bytes:
        delta = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'
        return f"{self._event_head}{choice}, {delta}{self._event_tail}".encode()

    def event(self, choice: int, piece: Piece) -> bytes:
        if not (piece.text or piece.finish_reason or piece.logprobs):
            return b""
        content = f'"content": {encode_basestring(piece.text)}' if piece.text or piece.logprobs else ""
        logprobs = json.dumps(self._content(piece)) if piece.logprobs else "null"
        return (
            f'{self._event_head}{choice}, "delta": {{{content}}}, "logprobs": {logprobs}, '
            f'"finish_reason": {_quoted(piece.finish_reason)}{self._event_tail}'
        ).encode()

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        answers = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces)},
                "logprobs": {"content": [entry for piece in pieces for entry in self._content(piece)["content"]]}
                if self._logprobs
                else None,
                "finish_reason": pieces[-1].finish_reason,
            }
            for index, pieces in enumerate(choices)
        ]
        return self._wholly(answers, usage)

    def _content(self, piece: Piece) -> dict[str, list[Any]]:
        entries = zip(piece.token_ids, piece.logprobs, strict=True) if piece.logprobs else ()
        return {"content": [self._entry(token_id, values) for token_id, values in entries]}

    def _entry(self, token_id: int, values: TokenLogprobs) -> dict[str, Any]:
        likeliest = zip(values.top_token_ids, values.top, strict=True)
        return {
            **self._scored(token_id, values.chosen),
            "top_logprobs": [self._scored(other, logprob) for other, logprob in likeliest],
        }

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        table = self._tokenizer.token_bytes
        return {
            "token": self._token(token_id),
            "logprob": logprob,
            "bytes": list(table[token_id]) if token_id < len(table) else [],
        }


class CompletionWriter(_Writer):
    _kind, _event_kind, _prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, asked: Asked, model: str, created: int, tokenizer: Tokenizer) -> None:
        super().__init__(asked, model, created, tokenizer)
        self._echoes, self._n = asked.echoes, asked.n
        self._lengths: dict[int, int] = {}
        """By choice: characters of the text so far."""

    def opening(self, choice: int) -> bytes:
        echo = self._echoes[choice // self._n]
        return self._text_event(choice, echo, "null", None) if echo else b""

    def event(self, choice: int, piece: Piece) -> bytes:
        if not (piece.text or piece.finish_reason or piece.logprobs):
            return b""
        logprobs = json.dumps(self._columns(choice, [piece])) if piece.logprobs else "null"
        return self._text_event(choice, piece.text, logprobs, piece.finish_reason)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        answers = [
            {
                "index": index,
                "text": self._echoes[index // self._n] + "".join(piece.text for piece in pieces),
                "logprobs": self._columns(index, pieces) if self._logprobs else None,
                "finish_reason": pieces[-1].finish_reason,
            }
            for index, pieces in enumerate(choices)
        ]
        return self._wholly(answers, usage)

    def _text_event(self, choice: int, text: str, logprobs: str, finish_reason: str | None) -> bytes:
        return (
            f'{self._event_head}{choice}, "text": {encode_basestring(text)}, "logprobs": {logprobs}, '
            f'"finish_reason": {_quoted(finish_reason)}{self._event_tail}'
        ).encode()

    def _columns(self, choice: int, pieces: Sequence[Piece]) -> dict[str, list[Any]]:
        offset, offsets, tokens = self._lengths.get(choice, 0), [], []
        scored = [pair for piece in pieces for pair in zip(piece.token_ids, piece.logprobs, strict=True)]
        for token_id, _ in scored:
            tokens.append(text := self._token(token_id))
            offsets.append(offset)
            offset += len(text)
        self._lengths[choice] = offset
        top = [
            {self._token(other): logprob for other, logprob in zip(values.top_token_ids, values.top, strict=True)}
            for _, values in scored
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [values.chosen for _, values in scored],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _quoted(reason: str | None) -> str:
    """As JSON; most events have none."""
    return "null" if reason is None else json.dumps(reason)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
