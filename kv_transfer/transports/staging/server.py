"""The exporting side of `host_staged`: a thread for each channel copies what a peer ordered from the GPU into the
channel's buffers.
"""

import logging
import threading
from collections import deque

import numpy as np

from kv_transfer.device.device import KVCache
from kv_transfer.device.device_pool import POLL_S, DeviceStream
from kv_transfer.segment import NONCE_BYTES
from kv_transfer.transports.staging.channel import Channel
from protocol.errors import PullFailed

log = logging.getLogger(__name__)

IDLE_S = 0.25
"""Seconds between two looks whether the server was closed. Orders ring a doorbell and do not wait for this."""


class StagingServer:
    """Serves all channels until it is closed. A peer that claimed a channel may die: nothing here waits for it."""

    def __init__(self, cache: KVCache, channels: list[Channel]) -> None:
        """A nonce follows `cache`. Raises PullFailed where the GPU grants no stream."""
        self._closed = threading.Event()
        self._servers = [_ChannelServer(cache, channel) for channel in channels]
        self._threads = [
            threading.Thread(target=self._serve, args=(server,), name="staging", daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads. An order that was not filled never will be."""
        self._closed.set()
        for thread, server in zip(self._threads, self._servers, strict=True):
            thread.join()
            server.close()

    def _serve(self, server: "_ChannelServer") -> None:
        while not self._closed.is_set():
            seen = server.channel.orders.value
            if not server.advance():
                server.channel.orders.wait(seen, POLL_S if server.busy else IDLE_S)


class _ChannelServer:
    """Orders of one channel, in their order: they are started as they come and answered as their copies end."""

    def __init__(self, cache: KVCache, channel: Channel) -> None:
        self.channel = channel
        self._cache = cache
        self._stream = DeviceStream(cache.require_device(), num_events=channel.num_buffers)
        self._started: deque[str] = deque()
        """Orders that were started and not answered, oldest first. Each says why it could not be started, or nothing.
        """

    @property
    def busy(self) -> bool:
        return bool(self._started)

    def advance(self) -> bool:
        """Starts and answers what it can. Returns False if there was nothing."""
        number = self.channel.num_filled + len(self._started)
        new = range(number, min(self.channel.num_ordered, number + self.channel.num_buffers - len(self._started)))
        self._started.extend(self._start(number) for number in new)
        answered = False
        while self._started and (error := self._outcome()) is not None:
            self.channel.fill(error)
            self._started.popleft()
            answered = True
        return answered or len(new) > 0

    def close(self) -> None:
        self._stream.close()

    def _start(self, number: int) -> str:
        """Starts the copies of an order. Returns why it could not, or nothing."""
        try:
            self._issue(number)
        except PullFailed as error:
            return str(error)
        except Exception as error:  # without an answer the peer would wait until it takes this engine for stalled
            log.exception("an order could not be started")
            return f"{type(error).__name__}: {error}"
        return ""

    def _issue(self, number: int) -> None:
        pieces = self.channel.pieces(number)
        readable = self._cache.num_bytes + NONCE_BYTES
        offsets, sizes = pieces.T
        # No sum of numbers that were not checked yet: it might overflow.
        if np.any((offsets < 0) | (sizes < 0) | (sizes > readable) | (offsets > readable - sizes)):
            raise PullFailed("bytes were ordered that do not lie in the cache")
        ends = np.cumsum(sizes)
        if len(ends) and ends[-1] > self.channel.buffer_bytes:
            raise PullFailed(f"more was ordered than the {self.channel.buffer_bytes} bytes of a buffer")
        self._stream.copy_many(self.channel.buffer(number) + ends - sizes, self._cache.pointer + offsets, sizes)
        self._stream.record(number % self.channel.num_buffers)

    def _outcome(self) -> str | None:
        """Returns the oldest started order's error, which is empty if its bytes are in its buffer; None while they are
        on their way.
        """
        if self._started[0]:
            return self._started[0]
        try:
            return "" if self._stream.reached(self.channel.num_filled % self.channel.num_buffers) else None
        except PullFailed as error:
            return str(error)
        except Exception as error:  # as in `_start`
            log.exception("an order failed")
            return f"{type(error).__name__}: {error}"
