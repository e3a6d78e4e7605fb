"""A buffer for the tokens of one answer, whose client may read more slowly than engines write."""

from collections.abc import Iterable

from protocol.errors import RequestCancelled
from protocol.messages import TokenLogprobs
from router.request import Ended


class Buffer:
    """Keeps at most `max_tokens` tokens. An answer with more must be cancelled; it ends with an error that says why."""

    __slots__ = ("_logprobs", "_max_tokens", "_tokens", "overflown")

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.overflown = False

    def __len__(self) -> int:
        """Returns how many tokens wait for the client."""
        return len(self._tokens)

    def push(self, token_ids: list[int], logprobs: Iterable[TokenLogprobs] = ()) -> bool:
        """Adds tokens. Returns True once, when too many wait; all later tokens are dropped."""
        if self.overflown:
            return False
        self._tokens += token_ids
        self._logprobs += logprobs
        self.overflown = len(self._tokens) > self._max_tokens
        return self.overflown

    def take_plain(self, max_tokens: int) -> list[int]:
        """Takes the tokens that wait if they have no logprobs and are at most `max_tokens`; else returns []."""
        tokens = self._tokens
        if len(tokens) > max_tokens:
            return []
        self._tokens = []
        return tokens

    def take(self, max_tokens: int | None = None) -> tuple[list[int], list[TokenLogprobs]]:
        """Takes the tokens that wait, at most `max_tokens`, and their logprobs if the request asked for them."""
        if max_tokens is None or max_tokens >= len(self._tokens):
            tokens, self._tokens = self._tokens, []
            logprobs, self._logprobs = self._logprobs, []
            return tokens, logprobs
        tokens, self._tokens = self._tokens[:max_tokens], self._tokens[max_tokens:]
        logprobs, self._logprobs = self._logprobs[:max_tokens], self._logprobs[max_tokens:]
        return tokens, logprobs

    def end(self, ended: Ended) -> Ended:
        """Returns how the answer ends for its client."""
        if not self.overflown:
            return ended
        error = RequestCancelled(f"the client reads too slowly: {len(self._tokens)} tokens wait for it")
        return ended._replace(finish_reason=None, error=error)
