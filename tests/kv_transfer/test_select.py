"""Which transport is taken, and what the log says."""

import logging

import numpy as np
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.device.device import KVCache
from kv_transfer.select import AutoTransport, choose
from kv_transfer.transports.local import LocalNetwork, LocalTransport
from protocol.errors import LayoutMismatch, PullFailed

CACHE = np.zeros((2, 8), np.uint8)


def reachable(endpoint: bytes, block_bytes: int = 8) -> LocalTransport:
    network = LocalNetwork()
    network.export(endpoint, np.zeros((2, block_bytes), np.uint8), np.zeros(1, np.uint64))
    return LocalTransport(network, CACHE)


def test_auto_takes_the_first_that_works_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    auto = AutoTransport([reachable(b"else"), reachable(b"here")])
    assert auto.name == "auto"
    with caplog.at_level(logging.INFO):
        auto.connect(b"here").close()
    assert auto.name == "local"
    assert "transport local" in caplog.text
    assert "refused before: local: endpoint b'here' is gone" in caplog.text
    auto.close()


def test_auto_names_every_reason_when_none_works() -> None:
    with pytest.raises(PullFailed, match="no transport reaches the peer: local: endpoint b'here' is gone"):
        AutoTransport([reachable(b"else")]).connect(b"here")


def test_auto_does_not_hide_a_wrong_layout() -> None:
    with pytest.raises(LayoutMismatch):
        AutoTransport([reachable(b"here", block_bytes=9), reachable(b"here")]).connect(b"here")


def test_the_config_chooses() -> None:
    cache = KVCache.in_host_memory(CACHE)
    named = choose(TransferConfig(transport="shared_memory"), cache, lambda: None)
    assert named.name == "shared_memory"
    named.close()
    auto = choose(TransferConfig(), cache, lambda: None)
    assert isinstance(auto, AutoTransport)
    auto.close()
