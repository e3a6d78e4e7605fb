"""Admission: checks of requests against what the engines can ever hold, and the one bounded queue."""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from protocol.arrays import Int32
from protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded
from protocol.messages import Hello, SamplingParams


class Account(NamedTuple):
    """Whose request it is, and what that one may use. None: no limit."""

    name: str
    max_in_flight: int | None = None
    """Answers at once."""
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """What a front door submits. `prompt_token_ids`: int32 [num_tokens]. If `max_tokens` is None, the answer may be as
    long as fits. `deadline_s`: seconds left.
    """

    request_id: str
    prompt_token_ids: Int32
    max_tokens: int | None
    sampling: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    traceparent: str = ""
    account: Account | None = None
    """None where nobody asks who calls."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one decode engine can ever hold, and the longest prompt that it computes by itself. All are in tokens."""

    max_model_len: int
    num_pool_tokens: int
    max_prompt_tokens: int

    @classmethod
    def of(cls, hello: Hello) -> "Limits":
        return cls(hello.max_model_len, (hello.num_blocks - 1) * hello.block_size, hello.max_prompt_tokens)

    def smaller(self, other: "Limits") -> "Limits":
        return Limits(
            min(self.max_model_len, other.max_model_len),
            min(self.num_pool_tokens, other.num_pool_tokens),
            min(self.max_prompt_tokens, other.max_prompt_tokens),
        )

    def check(self, request: ClientRequest) -> int:
        """Returns the answer's length limit in tokens, clipped to the model's. Raises InvalidRequest if the request can
        never fit, and DeadlineExceeded if its deadline has passed.
        """
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("prompt", "empty", "at least 1 token")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise InvalidRequest("max_tokens", request.max_tokens, "at least 1")
        if num_prompt > self.max_model_len - 1:
            raise InvalidRequest(
                "prompt", f"{num_prompt} tokens", f"at most max_model_len - 1 = {self.max_model_len - 1} tokens"
            )
        if num_prompt > self.num_pool_tokens:
            raise InvalidRequest("prompt", f"{num_prompt} tokens", f"the KV pool holds {self.num_pool_tokens} tokens")
        num_left = self.max_model_len - num_prompt
        if request.max_tokens is None:
            return min(num_left, self.num_pool_tokens - num_prompt + 1)
        max_tokens = min(request.max_tokens, num_left)
        if num_prompt + max_tokens - 1 > self.num_pool_tokens:
            raise InvalidRequest(
                "max_tokens",
                request.max_tokens,
                f"prompt of {num_prompt} + max_tokens - 1 over the KV pool of {self.num_pool_tokens} tokens",
            )
        if request.deadline_s is not None and request.deadline_s <= 0:
            raise DeadlineExceeded(f"deadline: {request.deadline_s:g} s left on arrival")
        return max_tokens


class AdmissionQueue:
    """The numbers of accepted requests that have no engine. The lowest (priority, order) is first; requests that an
    engine returned go before all others of their priority.
    """

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._heap: list[tuple[int, int, int]] = []
        self._waiting: dict[int, tuple[int, int]] = {}
        self._parked: dict[int, tuple[int, int]] = {}
        """Those that keep their place, but whose turn does not come."""
        self._next, self._front = 0, 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._parked)

    def __contains__(self, request_number: int) -> bool:
        return request_number in self._waiting or request_number in self._parked

    def check_room(self, num_more: int, num_places: int) -> None:
        """Raises Overloaded unless all of `num_more` requests find room, in the queue or in the engines. The engines'
        `num_places` only count if no request waits for one.

        Requests that come back from an engine were accepted before and always find room.
        """
        num_waiting = len(self)
        if num_waiting + num_more > self._max_queue + (0 if self._waiting else num_places):
            wish = f"{num_more} answers are asked for, {num_places} find a place at once, " if num_more > 1 else ""
            raise Overloaded(
                f"{wish}{num_waiting} requests are waiting, max_queue is {self._max_queue}", retry_after_s=1.0
            )

    def push(self, request_number: int, priority: int, *, front: bool = False) -> None:
        if front:
            self._front -= 1
            order = self._front
        else:
            self._next += 1
            order = self._next
        self._waiting[request_number] = (priority, order)
        heapq.heappush(self._heap, (priority, order, request_number))

    def head(self) -> int | None:
        """Returns the number of the request whose turn it is, or None."""
        while self._heap and self._waiting.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request_number: int) -> None:
        self._waiting.pop(request_number, None)
        self._parked.pop(request_number, None)

    def park(self, request_number: int) -> None:
        """Lets all others pass a request that waits. It keeps its place."""
        self._parked[request_number] = self._waiting.pop(request_number)

    def unpark(self, request_number: int) -> None:
        priority, order = self._waiting[request_number] = self._parked.pop(request_number)
        heapq.heappush(self._heap, (priority, order, request_number))
