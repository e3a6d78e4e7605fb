"""Answers under a grammar, as an engine's runner serves them: compiled grammars, and a mask for each row before a token
is chosen.

A row's mask follows from its grammar and the tokens of its answer, which are in the batch. So the place in the grammar
(`Guide.matcher`) is only remembered, and made again from the tokens wherever it is missing: after a handoff, a
preemption, a retry. Drafts are followed too, and those that were rejected taken back.

Every attempt has a grammar of its own, compiled for it alone: copies would share the states of one lexer, so that an
answer which exceeds the limit of these would end all others too. The loop's thread begins and forgets grammars. A
thread of their own compiles them, in turns where several attempts want the same; it also reads the model's tokenizer
when the first one comes. The step thread computes masks.
"""

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.grammars import Guide
from engine.sampling_metadata import Contexts, Masks, SamplingMetadata
from protocol.arrays import Int32
from protocol.errors import TwopassError
from protocol.grammar import Grammar
from protocol.messages import RequestKey

if TYPE_CHECKING:
    import llguidance

    from protocol.llguidance_grammars import Matcher


class Guidance:
    """Of one engine. `wake` is called from another thread whenever a compilation has ended. Close it at the end.

    `vocab_size`: logits of a token. `eos_token_ids`: the tokens that may end an answer.
    """

    def __init__(
        self, model_dir: Path, vocab_size: int, eos_token_ids: tuple[int, ...], wake: Callable[[], None]
    ) -> None:
        self._model_dir, self._vocab_size, self._eos_token_ids = model_dir, vocab_size, eos_token_ids
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._asked: dict[Grammar, deque[RequestKey]] = {}
        """Attempts that wait for the grammar. One compilation at a time is under way for each of these grammars."""
        self._live: set[RequestKey] = set()
        self._compiled: dict[RequestKey, llguidance.LLMatcher] = {}
        """Only the loop's thread changes it."""
        self._ended: queue.SimpleQueue[tuple[Grammar, llguidance.LLMatcher | TwopassError]] = queue.SimpleQueue()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # ---- the loop's side: see engine/grammars.py

    def begin(self, key: RequestKey, grammar: Grammar) -> None:
        self._live.add(key)
        if grammar not in self._asked:
            self._asked[grammar] = deque()
            self._thread.submit(self._compile, grammar)
        self._asked[grammar].append(key)

    def ended(self) -> list[tuple[RequestKey, str]]:
        told: list[tuple[RequestKey, str]] = []
        while not self._ended.empty():
            grammar, result = self._ended.get()
            waiting = deque(key for key in self._asked.pop(grammar) if key in self._live)
            if isinstance(result, TwopassError):
                told += [(key, str(result)) for key in waiting]
            elif waiting:
                key = waiting.popleft()
                self._compiled[key] = result
                told.append((key, ""))
                if waiting:
                    self._asked[grammar] = waiting
                    self._thread.submit(self._compile, grammar)
        return told

    def forget(self, key: RequestKey) -> None:
        self._live.discard(key)
        self._compiled.pop(key, None)

    # ---- the thread that compiles

    def _compile(self, grammar: Grammar) -> None:
        from protocol.llguidance_grammars import compile_grammar

        result: llguidance.LLMatcher | TwopassError
        try:
            result = compile_grammar(grammar, self._tokenizer)
        except TwopassError as error:
            result = error
        self._ended.put((grammar, result))
        self._wake()

    @cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        from protocol.llguidance_grammars import load_tokenizer

        return load_tokenizer(self._model_dir, self._vocab_size, self._eos_token_ids)

    # ---- the step's side

    def masks(self, sampling: SamplingMetadata, contexts: Contexts) -> Masks | None:
        """What the grammars of these sequences allow; None where none of them has one. Contexts of one row, which
        differ by drafts, stand together, the one without drafts first.
        """
        guides = {row: guide for row in set(contexts.rows.tolist()) if (guide := sampling.guides.get(row))}
        if not guides:
            return None
        which: list[int] = []
        allowed: list[Int32] = []
        final = np.zeros(len(contexts.rows), np.bool_)
        errors: dict[int, str] = {}
        before = -1
        for index, (row, known) in enumerate(zip(contexts.rows.tolist(), contexts.num_known.tolist(), strict=True)):
            if (guide := guides.get(row)) is None:
                continue
            drafted, before = row == before, row
            try:
                bits = self._allowed(guide, contexts.token_ids[row, -int(sampling.answer_bases[row]) : known])
            except TwopassError as error:
                if not drafted:
                    errors[index] = str(error)
                continue
            if bits is None:
                if not drafted:  # only a token that was chosen under another grammar or tokenizer
                    errors[index] = "the grammar does not allow the answer so far"
                continue
            which.append(index)
            allowed.append(bits)
            final[index] = _only(bits, sampling.ending[row])
        bits_of = np.array(allowed, np.int32).reshape(len(allowed), -(-self._vocab_size // 32))
        return Masks(np.array(which, np.int64), bits_of, final, errors)

    def _allowed(self, guide: Guide, answer: Int32) -> Int32 | None:
        """The mask behind these tokens of the answer; None if the grammar does not allow one of them. Raises
        GrammarError.
        """
        from protocol.llguidance_grammars import GrammarError, Matcher

        if guide.matcher is None:
            compiled = self._compiled.get(guide.key)
            if compiled is None:  # the attempt has ended meanwhile
                raise GrammarError("not compiled")
            guide.matcher = Matcher(compiled)
        matcher = cast("Matcher", guide.matcher)
        return matcher.allowed()[: -(-self._vocab_size // 32)] if matcher.follow(answer) else None


def _only(bits: Int32, token_ids: Int32) -> bool:
    """Whether a mask allows none but these tokens."""
    others = bits.copy().view(np.uint32)
    np.bitwise_and.at(others, token_ids >> 5, ~(np.uint32(1) << (token_ids & 31).astype(np.uint32)))
    return not others.any()
