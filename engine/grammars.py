"""Grammars on their way to an engine's runner: none is compiled on the loop, and no request waits for another one's.

A service asks for an attempt's grammar when it gets the attempt, and lets it join the scheduler's queue once the
grammar is compiled. Who compiles is the engine's business (engine/guidance.py).
"""

from typing import Protocol

from protocol.errors import InvalidRequest
from protocol.grammar import Grammar
from protocol.messages import RequestKey


class Guide:
    """What the runner remembers of a sequence under a grammar. The scheduler makes it with the sequence's seat and
    drops it with that; only the runner looks at `matcher`, from one thread.
    """

    __slots__ = ("key", "matcher")

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self.matcher: object | None = None


class Grammars(Protocol):
    """Only one thread calls it. None of its methods blocks."""

    def begin(self, key: RequestKey, grammar: Grammar) -> None:
        """Begins to compile the grammar of an attempt, for this attempt alone. `ended` will name it, unless `forget`
        comes before. Raises InvalidRequest where there can be no grammar.
        """
        ...

    def ended(self) -> list[tuple[RequestKey, str]]:
        """Attempts whose grammar was compiled since the last call, and why it could not be; "" if it could."""
        ...

    def forget(self, key: RequestKey) -> None:
        """The attempt has ended. Nothing happens for one without a grammar."""
        ...


class NoGrammars:
    """Of an engine whose model has no tokenizer, or no token that ends an answer."""

    def begin(self, key: RequestKey, grammar: Grammar) -> None:
        limit = "none for this model, which has no tokenizer or no token that ends an answer"
        raise InvalidRequest("grammar", grammar.kind, limit)

    def ended(self) -> list[tuple[RequestKey, str]]:
        return []

    def forget(self, key: RequestKey) -> None:
        pass
