"""The buffer of a client that reads slowly, and how the answer ends if it reads too slowly."""

from protocol.messages import TokenLogprobs
from router.buffer import Buffer
from router.request import Ended, Usage

ENDED = Ended("r", "length", None, Usage(3, 0, 4), {}, 1, "colocated")


def test_all_that_waits_is_taken_at_once() -> None:
    buffer = Buffer(3)
    assert not buffer.push([5], [TokenLogprobs(-1.0)])
    assert not buffer.push([6, 7], [TokenLogprobs(-2.0), TokenLogprobs(-3.0)])
    assert len(buffer) == 3
    tokens, logprobs = buffer.take()
    assert (tokens, [values.chosen for values in logprobs]) == ([5, 6, 7], [-1.0, -2.0, -3.0])
    assert (len(buffer), buffer.take()) == (0, ([], []))
    assert buffer.end(ENDED) == ENDED


def test_one_token_too_many_is_said_once_and_the_end_is_an_error() -> None:
    buffer = Buffer(3)
    assert not buffer.push([5, 6, 7])
    assert buffer.push([8])
    assert not buffer.push([9])
    assert buffer.take()[0] == [5, 6, 7, 8]
    ended = buffer.end(ENDED)
    assert (ended.finish_reason, ended.usage) == (None, ENDED.usage)
    assert "the client reads too slowly" in str(ended.error)


def test_a_part_of_what_waits_is_taken_in_order() -> None:
    buffer = Buffer(9)
    buffer.push([5, 6, 7], [TokenLogprobs(-1.0), TokenLogprobs(-2.0), TokenLogprobs(-3.0)])
    for token_id, chosen in ((5, -1.0), (6, -2.0)):
        tokens, logprobs = buffer.take(1)
        assert (tokens, [values.chosen for values in logprobs]) == ([token_id], [chosen])
    assert buffer.take(0) == ([], [])
    buffer.push([8], [TokenLogprobs(-4.0)])
    tokens, logprobs = buffer.take(2)
    assert (tokens, [values.chosen for values in logprobs]) == ([7, 8], [-3.0, -4.0])


def test_the_short_way_takes_all_or_nothing() -> None:
    buffer = Buffer(9)
    buffer.push([5, 6])
    assert buffer.take_plain(1) == []
    assert buffer.take_plain(2) == [5, 6]
    assert buffer.take_plain(2) == []
    buffer.push([7])
    assert buffer.take_plain(9) == [7]
