"""Offers of several transports in one endpoint."""

import pytest

from kv_transfer.endpoint import offer_of, offers, several, single
from protocol.errors import LayoutMismatch, PullFailed

ONE, TWO = single("one", num_blocks=3, block_bytes=8, path="/a"), single("two", num_blocks=3, block_bytes=8)


def test_each_transport_finds_its_own_offer() -> None:
    both = several([ONE, TWO])
    assert offer_of(both, "one", 8)["path"] == offer_of(ONE, "one", 8)["path"] == "/a"
    assert [offer["kind"] for offer in offers(both)] == ["one", "two"]
    assert several([ONE]) == ONE


def test_what_is_not_offered_is_named_with_what_is() -> None:
    with pytest.raises(PullFailed, match="speaks one, two, not three"):
        offer_of(several([ONE, TWO]), "three", 8)


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="blocks there have 8 bytes, here 16"):
        offer_of(ONE, "one", 16)


@pytest.mark.parametrize("endpoint", [b"", b"nixl://", b"{}", b"[]x", b"[1]", b'[{"kind": "one"}]', b"\xff"])
def test_anything_else_is_no_endpoint(endpoint: bytes) -> None:
    with pytest.raises(PullFailed, match="is no endpoint"):
        offer_of(endpoint, "one", 8)
