"""The door's end of its way to the core: numbers what it asks for, and hands every reply, token and end to whom it
concerns. It knows no event loop; `router/doors.py` is the other end.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from protocol.errors import RequestError
from protocol.messages import TokenLogprobs
from router.admission import ClientRequest
from router.door_messages import (
    Abort,
    Aborted,
    AskLoads,
    Batch,
    Cancel,
    DoorMessage,
    Facts,
    Loads,
    Opened,
    Stop,
    Submit,
    Taken,
)
from router.request import Ended


class Receiver(Protocol):
    """Who waits for one answer."""

    def push(self, token_ids: list[int], logprobs: Iterable[TokenLogprobs]) -> bool:
        """Adds tokens. Returns True if too many wait now: then the answer is cancelled."""
        ...

    def end(self, ended: Ended) -> None:
        """Takes the end, after the last tokens and exactly once."""
        ...


class DoorLink:
    """`send` takes messages to the core. Their order must be kept."""

    def __init__(self, send: Callable[[DoorMessage], None]) -> None:
        self.facts = Facts(ready=False, max_model_len=0)
        self._send = send
        self._num_numbered, self._num_asked = 0, 0
        self._opening: dict[int, tuple[int, Callable[[RequestError | None], None]]] = {}
        """By the number of a call's first answer: how many answers it has, and who waits for its `Opened`."""
        self._receivers: dict[int, Receiver] = {}
        """By number, who waits for an answer that is open, or may be."""
        self._asking: dict[int, Callable[[Aborted | Loads], None]] = {}

    def submit(
        self,
        name: str,
        requests: Sequence[ClientRequest],
        receivers: Sequence[Receiver],
        opened: Callable[[RequestError | None], None],
    ) -> int:
        """Asks for one call. `opened` gets the refusal, or None; only then do the receivers get anything, and each
        exactly one end. Returns the number of the first answer; the others follow.
        """
        first = self._num_numbered
        self._num_numbered += len(requests)
        self._opening[first] = len(requests), opened
        self._receivers.update(enumerate(receivers, first))
        self._send(Submit(first, name, tuple(requests)))
        return first

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ends answers that nobody waits for. Their receivers still get their ends."""
        if numbers:
            self._send(Cancel(tuple(numbers)))

    def stop(self, number: int) -> None:
        """Ends an answer at its stop string. Its receiver still gets its end."""
        self._send(Stop(number))

    def abort(self, name: str, told: Callable[[bool], None]) -> None:
        """Ends a call of any door. `told` gets whether it was open."""

        def found(reply: Aborted | Loads) -> None:
            assert isinstance(reply, Aborted)
            told(reply.found)

        self._send(Abort(self._ask(found), name))

    def loads(self, told: Callable[[Loads], None]) -> None:
        def got(reply: Aborted | Loads) -> None:
            assert isinstance(reply, Loads)
            told(reply)

        self._send(AskLoads(self._ask(got)))

    def receive(self, batch: Batch) -> None:
        """Handles a batch. Batches come in the order of their numbers."""
        if batch.facts is not None:
            self.facts = batch.facts
        for reply in batch.replies:
            if isinstance(reply, Opened):
                self._opened(*reply)
            else:
                self._asking.pop(reply.ask)(reply)
        overflown = []
        for number, token_ids in batch.tokens.items():
            if self._receivers[number].push(token_ids, batch.logprobs.get(number, ())):
                overflown.append(number)
        for number, ended in batch.ended:
            self._receivers.pop(number).end(ended)
        self._send(Taken(batch.seq))
        self.cancel([number for number in overflown if number in self._receivers])

    def _opened(self, first: int, refusal: RequestError | None) -> None:
        num_answers, opened = self._opening.pop(first)
        if refusal is not None:
            for number in range(first, first + num_answers):
                del self._receivers[number]
        opened(refusal)

    def _ask(self, told: Callable[[Aborted | Loads], None]) -> int:
        ask = self._num_asked
        self._num_asked += 1
        self._asking[ask] = told
        return ask
