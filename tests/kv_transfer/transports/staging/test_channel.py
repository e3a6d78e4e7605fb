"""The ring of buffers, both sides in one process."""

import ctypes

import numpy as np
import pytest

from kv_transfer.transports.staging.channel import MAX_PIECES, Channel, channel_bytes

BUFFER_BYTES, NUM_BUFFERS = 5000, 3


@pytest.fixture
def sides() -> tuple[Channel, Channel]:
    memory = np.zeros(channel_bytes(BUFFER_BYTES, NUM_BUFFERS), np.uint8)
    return Channel(memory, BUFFER_BYTES, NUM_BUFFERS), Channel(memory, BUFFER_BYTES, NUM_BUFFERS)


def test_orders_and_answers_keep_their_order_round_the_ring(sides: tuple[Channel, Channel]) -> None:
    ordering, filling = sides
    for number in range(2 * NUM_BUFFERS + 1):
        ordering.order(np.array([(100 * number, 7), (2**40, number)]))
        assert (filling.num_ordered, filling.num_filled) == (number + 1, number)
        assert filling.pieces(number).tolist() == [[100 * number, 7], [2**40, number]]
        filling.fill("no such bytes" if number == 4 else "")
        assert ordering.num_filled == number + 1
        assert ordering.error(number) == ("no such bytes" if number == 4 else "")


def test_buffers_do_not_touch_each_other_nor_the_orders(sides: tuple[Channel, Channel]) -> None:
    ordering, filling = sides
    ordering.order(np.array([(0, i) for i in range(MAX_PIECES)]))
    for number in range(NUM_BUFFERS):
        ctypes.memset(filling.buffer(number), number + 1, BUFFER_BYTES)
    for number in range(NUM_BUFFERS):
        assert ctypes.string_at(ordering.buffer(number), BUFFER_BYTES) == bytes([number + 1]) * BUFFER_BYTES
    assert ordering.buffer(NUM_BUFFERS) == ordering.buffer(0)
    assert filling.pieces(0).tolist() == [[0, i] for i in range(MAX_PIECES)]


def test_a_long_error_is_cut(sides: tuple[Channel, Channel]) -> None:
    ordering, filling = sides
    ordering.order(np.array([(0, 1)]))
    filling.fill("x" * 10_000)
    assert set(ordering.error(0)) == {"x"} and filling.pieces(0).tolist() == [[0, 1]]


def test_each_side_rings_its_bell(sides: tuple[Channel, Channel]) -> None:
    ordering, filling = sides
    ordering.order(np.array([(0, 1)]))
    assert (filling.orders.value, filling.fills.value) == (1, 0)
    filling.fill()
    assert ordering.fills.value == 1
