"""What a door and the core say to each other. A door tokenises, detokenises and streams; the core owns every request.

A door numbers its answers from 0 and never uses a number again in its life. So nothing that is late can be taken for
something of a later answer, although clients may choose the same request id again.
"""

from dataclasses import dataclass
from typing import NamedTuple

from protocol.errors import RequestError
from protocol.messages import TokenLogprobs
from router.admission import ClientRequest
from router.metrics_totals import DoorCounts
from router.policy import ReplicaView
from router.request import Ended

# ---- door -> core


@dataclass(frozen=True, slots=True)
class Submit:
    """One call. `requests`, of which there is at least one, are its answers: they get the numbers from `first` on. The
    core accepts all or none, and says so in an `Opened`.
    """

    first: int
    name: str
    """The call's request id. No two open calls have the same, whatever door they came through."""
    requests: tuple[ClientRequest, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for these answers any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """The text of an answer has completed a stop string."""

    number: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a call of any door by its request id. `Aborted` is the reply."""

    ask: int
    name: str


@dataclass(frozen=True, slots=True)
class AskLoads:
    """How busy is the deployment? `Loads` is the reply."""

    ask: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The door has handled every batch up to number `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class Counted:
    """What the door has counted since it last said so."""

    counts: DoorCounts


DoorMessage = Submit | Cancel | Stop | Abort | AskLoads | Taken | Counted

# ---- core -> door


class Opened(NamedTuple):
    """The reply to the `Submit` of number `first`. The call is open if `refusal` is None."""

    first: int
    refusal: RequestError | None


class Aborted(NamedTuple):
    """`found`: whether a call of that name was open."""

    ask: int
    found: bool


class Loads(NamedTuple):
    """Each engine as of its last status, with the seconds since then. `num_open` and `num_queued` count answers."""

    ask: int
    num_open: int
    num_queued: int
    replicas: tuple[tuple[ReplicaView, float], ...]


class Facts(NamedTuple):
    """What a door must know of the core before it asks."""

    ready: bool
    """Whether new requests are taken."""
    max_model_len: int
    """0 while no engine has said it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All that the core has for one door since the batch before. Its parts are to be handled in the order of the
    fields. Batches are numbered from 0, for each life of the door and of the core.
    """

    seq: int
    opened: tuple[Opened, ...]
    aborted: tuple[Aborted, ...]
    loads: tuple[Loads, ...]
    tokens: dict[int, list[int]]
    """New token ids by answer number, without gap or repeat. Nobody changes the lists."""
    logprobs: dict[int, list[TokenLogprobs]]
    """One for each of an answer's new tokens; only of requests that asked for logprobs."""
    ended: tuple[tuple[int, Ended], ...]
    """Exactly one for each accepted answer, after its last tokens."""
    facts: Facts | None
    """None if nothing has changed."""
