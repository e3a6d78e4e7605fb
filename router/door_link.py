"""The door's end of its way to the core: numbers what it asks for, and hands every reply, token and end to whom it
concerns. It knows no event loop; `router/doors.py` is the other end.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from protocol.errors import RequestError, RequestFailed
from protocol.messages import TokenLogprobs
from router.admission import ClientRequest
from router.door_messages import (
    Abort,
    AskLoads,
    Batch,
    Cancel,
    Counted,
    DoorMessage,
    Facts,
    Loads,
    Stop,
    Submit,
    Taken,
)
from router.metrics_totals import DoorCounts
from router.request import Ended, Usage


class Receiver(Protocol):
    """Who waits for one answer."""

    def push(self, token_ids: list[int], logprobs: Iterable[TokenLogprobs]) -> bool:
        """Adds tokens. Returns True if too many wait now: then the answer is cancelled."""
        ...

    def end(self, ended: Ended) -> None:
        """Takes the end, after the last tokens and exactly once."""
        ...


class DoorEnd(Protocol):
    """The door's end of the way to the core."""

    def up(self) -> None:
        """The core is there. What the door sends from now on reaches it."""
        ...

    def receive(self, batch: Batch) -> None:
        """Handles a batch. Batches come in the order of their numbers."""
        ...

    def down(self) -> None:
        """The core is gone, with all that was open or asked."""
        ...


class CoreLink(Protocol):
    """A door's way to the core."""

    def connect(self, door: DoorEnd) -> None:
        """From now on `door` hears what happens."""
        ...

    def send(self, message: DoorMessage) -> None:
        """Takes a message to the core that is up. The order is kept."""
        ...


class DoorLink:
    """A `DoorEnd`. Whatever is asked while no core is up is refused at once."""

    def __init__(self, link: CoreLink) -> None:
        self.facts = Facts(ready=False, max_model_len=0)
        self._link = link
        self._up = False
        self._num_numbered, self._num_asked = 0, 0
        self._opening: dict[int, tuple[int, Callable[[RequestError | None], None]]] = {}
        """By the number of a call's first answer: how many answers it has, and who waits for its `Opened`."""
        self._receivers: dict[int, Receiver] = {}
        """By number, who waits for an answer that is open, or may be."""
        self._aborting: dict[int, Callable[[bool | RequestError], None]] = {}
        self._asking: dict[int, Callable[[Loads | RequestError], None]] = {}
        link.connect(self)

    # ---- what the door asks

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
        if not self._up:
            opened(_gone())
            return first
        self._opening[first] = len(requests), opened
        self._receivers.update(enumerate(receivers, first))
        self._link.send(Submit(first, name, tuple(requests)))
        return first

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ends answers that nobody waits for. Their receivers still get their ends."""
        if numbers and self._up:
            self._link.send(Cancel(tuple(numbers)))

    def stop(self, number: int) -> None:
        """Ends an answer at its stop string. Its receiver still gets its end."""
        if self._up:
            self._link.send(Stop(number))

    def abort(self, name: str, told: Callable[[bool | RequestError], None]) -> None:
        """Ends a call of any door. `told` gets whether it was open."""
        if not self._up:
            told(_gone())
            return
        ask = self._next_ask()
        self._aborting[ask] = told
        self._link.send(Abort(ask, name))

    def loads(self, told: Callable[[Loads | RequestError], None]) -> None:
        if not self._up:
            told(_gone())
            return
        ask = self._next_ask()
        self._asking[ask] = told
        self._link.send(AskLoads(ask))

    def counted(self, counts: DoorCounts) -> bool:
        """Tells what the door has counted. Returns False if nobody is there to hear it."""
        if self._up:
            self._link.send(Counted(counts))
        return self._up

    # ---- what the core says

    def up(self) -> None:
        self._up = True

    def receive(self, batch: Batch) -> None:
        if batch.facts is not None:
            self.facts = batch.facts
        for first, refusal in batch.opened:
            self._opened(first, refusal)
        for ask, found in batch.aborted:
            self._aborting.pop(ask)(found)
        for loads in batch.loads:
            self._asking.pop(loads.ask)(loads)
        overflown = []
        for number, token_ids in batch.tokens.items():
            if self._receivers[number].push(token_ids, batch.logprobs.get(number, ())):
                overflown.append(number)
        for number, ended in batch.ended:
            self._receivers.pop(number).end(ended)
        self._link.send(Taken(batch.seq))
        self.cancel([number for number in overflown if number in self._receivers])

    def down(self) -> None:
        self._up = False
        self.facts = self.facts._replace(ready=False)
        for first in list(self._opening):
            self._opened(first, _gone())
        receivers, aborting, asking = self._receivers, self._aborting, self._asking
        self._receivers, self._aborting, self._asking = {}, {}, {}
        for receiver in receivers.values():
            receiver.end(Ended("", None, _gone(), Usage(0, 0, 0), {}, 0, "colocated"))
        for told in aborting.values():
            told(_gone())
        for told_loads in asking.values():
            told_loads(_gone())

    def _opened(self, first: int, refusal: RequestError | None) -> None:
        num_answers, opened = self._opening.pop(first)
        if refusal is not None:
            for number in range(first, first + num_answers):
                del self._receivers[number]
        opened(refusal)

    def _next_ask(self) -> int:
        self._num_asked += 1
        return self._num_asked


def _gone() -> RequestFailed:
    return RequestFailed("the router is down")
