"""Tests that a pull can be held in its midst for as long as one likes, with any transport."""

import threading

import pytest

from bench.gpu.held_device import HeldDevice
from kv_transfer.device.device_pool import DeviceStream
from kv_transfer.device.fake_device import FakeDevice
from tests.hang import HANG_S


def test_a_thread_that_records_an_event_is_held_until_it_is_let_go() -> None:
    device = HeldDevice(FakeDevice("unused"))
    with DeviceStream(device.as_device()) as stream:
        stream.drain()  # nothing is held before `hold`
        device.hold()
        thread = threading.Thread(target=stream.drain, daemon=True)
        thread.start()
        assert device.held.wait(HANG_S)
        assert thread.is_alive(), "nothing but `resume` ends it"
        device.resume()
        thread.join(HANG_S)
        assert not thread.is_alive()


def test_everything_else_is_the_device_s_own() -> None:
    fake = FakeDevice("unused", "fake:7")
    device = HeldDevice(fake)
    assert device.as_device().bus_id == "fake:7"
    with pytest.raises(AttributeError):
        _ = device.no_such_call
