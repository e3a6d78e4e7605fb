"""Grammars on their way to an engine's runner: none is compiled on the loop, and no request waits for another one's.

A service asks for a grammar when a request brings it, and lets the request join the scheduler's queue once the grammar
is ready. Who compiles is the engine's business (engine/guidance.py); it keeps a grammar until it is released.
"""

from typing import Protocol

from protocol.errors import InvalidRequest
from protocol.grammar import Grammar
from protocol.messages import RequestKey


class Guide:
    """What the runner remembers of a sequence under a grammar. The scheduler makes it with the sequence's seat and
    drops it with that; only the runner looks at `matcher`, from one thread.
    """

    __slots__ = ("grammar", "matcher")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.matcher: object | None = None


class Grammars(Protocol):
    """Only one thread calls it. None of its methods blocks."""

    def hold(self, grammar: Grammar) -> bool:
        """Begins to compile it unless that was done. Returns True if its compilation has ended. Until as many calls of
        `release` it is kept.
        """
        ...

    def release(self, grammar: Grammar) -> None: ...

    def fault(self, grammar: Grammar) -> str:
        """Of a held grammar whose compilation has ended: why it failed; "" if it did not."""
        ...

    def compiled(self) -> list[Grammar]:
        """Whose compilation has ended since the last call, well or badly."""
        ...


class GrammarWaits:
    """Attempts under a grammar, from their request to their end. `grammars`: None where none can be served."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._held: dict[RequestKey, Grammar] = {}
        self._waiting: dict[Grammar, list[RequestKey]] = {}

    def begin(self, key: RequestKey, grammar: Grammar | None) -> bool:
        """Returns whether the attempt may join the queue now; else `ended` will name it. Raises InvalidRequest."""
        if grammar is None:
            return True
        if self._grammars is None:
            limit = "none for this model, which has no tokenizer or no token that ends an answer"
            raise InvalidRequest("grammar", grammar.kind, limit)
        self._held[key] = grammar
        if not self._grammars.hold(grammar):
            self._waiting.setdefault(grammar, []).append(key)
            return False
        if fault := self._grammars.fault(grammar):
            raise InvalidRequest("grammar", grammar.kind, fault)
        return True

    def ended(self) -> list[tuple[RequestKey, str]]:
        """Attempts that waited and wait no longer, and why they cannot be served; "" if they can."""
        if self._grammars is None or not self._waiting:
            return []
        return [
            (key, self._grammars.fault(grammar))
            for grammar in self._grammars.compiled()
            for key in self._waiting.pop(grammar, ())
            if key in self._held
        ]

    def forget(self, key: RequestKey) -> None:
        """The attempt has ended. Nothing happens for one without a grammar."""
        grammar = self._held.pop(key, None)
        if grammar is not None and self._grammars is not None:
            self._grammars.release(grammar)
