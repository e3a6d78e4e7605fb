"""The calls of one GenerateMany stream: which are open, how many tokens each may send, and what the next message says.

Nothing here waits. `router/grpc_many.py` reads, opens calls and writes.

A call begins with a credit of tokens, which its client adds to as its user reads. Without credit its tokens stay in
their buffers, for which the limits of a slow reader hold; the other calls of the stream go on. Ends need no credit. An
error needs none either: tokens that lack credit are dropped then.
"""

import math
from collections.abc import Callable

from protocol.clock import Clock
from protocol.errors import InvalidRequest, RequestCancelled, RequestError
from router.call import Answer, Call, Piece
from router.frontdoor import FrontDoor
from router.grpc_codec import encode_piece
from router.grpc_status import call_error
from twopass.proto import twopass_pb2 as pb

MAX_MESSAGE_TOKENS = 16_384
"""A message with this many tokens takes in no further call."""
MAX_INT32 = 2**31 - 1


class ManyCall:
    """One call of the stream."""

    __slots__ = ("_ready", "_wake", "answer", "call", "credit", "leave", "number", "queued", "since")

    def __init__(self, number: int, credit: int, ready: list["ManyCall"], wake: Callable[[], None]) -> None:
        self.number = number
        self.credit = credit
        """How many tokens may go to the client; the rest waits."""
        self.call: Call | None = None
        """None until it is open."""
        self.answer: Answer | None = None
        """Its only answer, once its pieces are plain: the short way."""
        self.leave: Callable[[], object] = lambda: None
        """Ends the opening."""
        self.queued = False
        """Whether it is in `ready`."""
        self.since = math.inf
        """Since when tokens have been waiting for credit, in seconds of the clock; infinity if none are."""
        self._ready, self._wake = ready, wake

    def news(self) -> None:
        """Takes note that an answer has tokens or has ended."""
        if not self.queued:
            self.queued = True
            self._ready.append(self)
            self._wake()


class ManyCalls:
    """`wake` is called whenever there may be a next message. A RequestError that a method raises ends the stream."""

    def __init__(self, door: FrontDoor, clock: Clock, wake: Callable[[], None]) -> None:
        self._door, self._clock, self._wake = door, clock, wake
        self._open: dict[int, ManyCall] = {}
        self._last = -1
        """The number of the newest call."""
        self._ready: list[ManyCall] = []
        """Calls with news, and among them some that have ended since."""
        self._errors: list[pb.CallError] = []
        self._finished: list[tuple[ManyCall, Answer]] = []
        """Answers whose last pieces are in the message that is being written."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_errors(self) -> int:
        """How many calls have ended with errors that no message has told."""
        return len(self._errors)

    def start(self, number: int, credit: int) -> ManyCall | None:
        """Adds a call, to be opened with its `news`. Returns None if it is refused at once."""
        if number <= self._last:
            raise InvalidRequest("call", number, f"above {self._last}, the number of the call before")
        self._last = number
        if credit < 1:
            self._tell(number, InvalidRequest("credit", credit, "at least 1"))
            return None
        one = self._open[number] = ManyCall(number, credit, self._ready, self._wake)
        return one

    def opened(self, one: ManyCall, call: Call) -> None:
        """A call that has ended while it was opened is closed at once."""
        if one.number in self._open:
            one.call = call
            one.news()
        else:
            self._door.close_call(call, None)

    def refused(self, one: ManyCall, error: RequestError) -> None:
        if self._open.pop(one.number, None) is not None:
            self._tell(one.number, error)

    def cancel(self, number: int) -> None:
        if (one := self._find(number)) is not None:
            self._end(one, None)

    def add_credit(self, number: int, num_tokens: int) -> None:
        one = self._find(number)
        if one is None:
            return
        if num_tokens < 1:
            self._fail(one, InvalidRequest("num_tokens", num_tokens, "at least 1"))
            return
        one.credit += num_tokens
        if one.since != math.inf:
            one.since = math.inf
            one.news()

    def end_stalled(self, oldest: float, error: RequestCancelled) -> None:
        """Ends the calls whose tokens have been waiting for credit since before `oldest`."""
        for one in [one for one in self._open.values() if one.since < oldest]:
            self._fail(one, error)

    def close(self) -> None:
        """Ends all calls, as if their client had cancelled them."""
        for one in list(self._open.values()):
            self._end(one, None)

    def next_message(self) -> pb.ManyResponse | None:
        """Returns what all calls have for the client, or None. `written` must follow before the next one."""
        if not self._ready and not self._errors:
            return None
        message, columns = pb.ManyResponse(), _Columns()
        calls, counts, token_ids, texts = columns.calls, columns.counts, columns.token_ids, columns.texts
        ready = self._ready[:]
        self._ready.clear()
        for one in ready:
            if len(token_ids) >= MAX_MESSAGE_TOKENS:
                self._ready.append(one)
                continue
            one.queued = False
            answer = one.answer
            if answer is not None and answer.ended is None and (plain := answer.take_plain(one.credit)) is not None:
                text, new_ids = plain
                num_tokens = len(new_ids)
                one.credit -= num_tokens
                calls.append(one.number)
                counts.append(num_tokens)
                token_ids += new_ids
                texts.append(text)
            elif one.call is not None:
                self._add(one, one.call, message, columns)
        columns.write(message)
        message.errors.extend(self._errors)
        self._errors.clear()
        return message if calls or message.responses or message.errors else None

    def written(self) -> None:
        """The connection has taken the message."""
        finished, self._finished = self._finished, []
        for one, answer in finished:
            if one.call is None:
                continue  # cancelled meanwhile
            self._door.told(answer)
            if all(other.told for other in one.call.answers):
                self._end(one, None)

    def _add(self, one: ManyCall, call: Call, message: pb.ManyResponse, columns: "_Columns") -> None:
        """Adds the pieces of a call's answers."""
        pieces: list[Piece] = []
        failure: RequestError | None = None
        plain = call.begun and all(answer.plain for answer in call.answers)
        for answer in call.waiting():
            if not one.credit and answer.must_wait:
                one.since = min(one.since, self._clock())
                continue
            num_tokens = None if answer.detokenizer.stopped else one.credit
            piece, failure = self._door.next_piece(call, answer, num_tokens)
            if answer.must_wait:
                one.since = self._clock()
            if piece.token_ids or piece.finish_reason is not None:
                one.credit -= len(piece.token_ids)
                pieces.append(piece)
            if failure is not None:
                break
            if answer.finish is not None:
                self._finished.append((one, answer))
                plain = False
        for piece in pieces:
            if plain:
                columns.add(one.number, piece)
            else:
                message.responses.append(pb.CallResponse(call=one.number, response=encode_piece(piece)))
        if failure is not None:
            if any(answer.finish is not None and not answer.told for answer in call.answers):
                one.news()  # first the connection takes what has ended well
            else:
                self._fail(one, failure)
        elif call.begun and len(call.answers) == 1 and call.answers[0].plain:
            one.answer = call.answers[0]

    def _find(self, number: int) -> ManyCall | None:
        """Returns an open call, or None if it has ended. Raises InvalidRequest for one that never began."""
        if not 0 <= number <= self._last:
            raise InvalidRequest("call", number, f"0 to {self._last}, the number of the newest call")
        return self._open.get(number)

    def _fail(self, one: ManyCall, error: RequestError) -> None:
        self._tell(one.number, error)
        self._end(one, error)

    def _tell(self, number: int, error: RequestError) -> None:
        self._errors.append(call_error(number, error))
        self._wake()

    def _end(self, one: ManyCall, error: RequestError | None) -> None:
        """`error`: as for `FrontDoor.close_call`."""
        del self._open[one.number]
        call, one.call, one.answer = one.call, None, None
        if call is None:
            one.leave()
        else:
            self._door.close_call(call, error)


class _Columns:
    """Rows of a message: pieces that have text and tokens alone."""

    __slots__ = ("calls", "counts", "indexes", "texts", "token_ids")

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.indexes: dict[int, int] = {}
        """By row, those that are not 0."""

    def add(self, number: int, piece: Piece) -> None:
        if piece.index:
            self.indexes[len(self.calls)] = piece.index
        self.calls.append(number)
        self.counts.append(len(piece.token_ids))
        self.token_ids += piece.token_ids
        self.texts.append(piece.text)

    def write(self, message: pb.ManyResponse) -> None:
        message.calls.extend(self.calls)
        message.token_ids.extend(self.token_ids)
        message.texts.extend(self.texts)
        if self.indexes:
            message.indexes.extend([self.indexes.get(row, 0) for row in range(len(self.calls))])
        if len(self.token_ids) != len(self.calls):  # a row has at least one token
            message.counts.extend(self.counts)
