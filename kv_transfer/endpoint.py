"""What an endpoint says: one offer for each transport that can read the cache. An offer is a JSON object with its
`kind`.

An endpoint of one offer is that object, an endpoint of several is a list of them. Everything in an offer but its kind
and the shape of the cache belongs to its transport.
"""

import json
from collections.abc import Sequence
from typing import Any

from kv_transfer.transport import Endpoint
from protocol.errors import LayoutMismatch, PullFailed

Offer = dict[str, Any]


def single(kind: str, *, num_blocks: int, block_bytes: int, **fields: Any) -> Endpoint:
    """Makes an endpoint of one offer."""
    return json.dumps({"kind": kind, "num_blocks": num_blocks, "block_bytes": block_bytes, **fields}).encode()


def several(endpoints: Sequence[Endpoint]) -> Endpoint:
    """Makes one endpoint with the offers of all."""
    return (
        endpoints[0] if len(endpoints) == 1 else json.dumps([json.loads(endpoint) for endpoint in endpoints]).encode()
    )


def offers(endpoint: Endpoint) -> list[Offer]:
    """Returns all offers of an endpoint. Raises PullFailed for anything else."""
    try:
        content = json.loads(endpoint)
    except ValueError as error:
        raise PullFailed(f"{endpoint[:80]!r} is no endpoint") from error
    listed = content if isinstance(content, list) else [content]
    for offer in listed:
        if not isinstance(offer, dict) or not {"kind", "num_blocks", "block_bytes"} <= offer.keys():
            raise PullFailed(f"{endpoint[:80]!r} is no endpoint")
    return listed


def offer_of(endpoint: Endpoint, kind: str, block_bytes: int) -> Offer:
    """Returns the offer for one transport. Raises PullFailed when there is none, LayoutMismatch when its blocks are not
    of `block_bytes` bytes.
    """
    listed = offers(endpoint)
    for offer in listed:
        if offer["kind"] == kind:
            if offer["block_bytes"] != block_bytes:
                raise LayoutMismatch(f"blocks there have {offer['block_bytes']} bytes, here {block_bytes}")
            return offer
    raise PullFailed(f"the endpoint speaks {', '.join(offer['kind'] for offer in listed)}, not {kind}")
