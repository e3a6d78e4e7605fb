"""A device on which a pull can be held in its midst, whatever the speed of the machine."""

import threading
from typing import Any, cast

from kv_transfer.device.device import Device


class HeldDevice:
    """Is `device` in all but `record`. Every transport records an event behind each piece of a pull, in the thread that
    starts its copies.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._go = threading.Event()
        self._go.set()
        self.held = threading.Event()
        """It is set once a thread is held."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def hold(self) -> None:
        """Whoever records an event from now on is held there, with its copies started, until `resume`."""
        self.held.clear()
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def record(self, event: int, stream: int) -> None:
        if not self._go.is_set():
            self.held.set()
            self._go.wait()
        self._device.record(event, stream)

    def as_device(self) -> Device:
        return cast(Device, self)  # a type checker does not see what `__getattr__` passes on
