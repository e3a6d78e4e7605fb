"""A router whose engines exist only as addresses: tests say what they send and read what they are sent."""

from typing import Any

import numpy as np

from protocol.clock import VirtualClock
from protocol.messages import (
    Address,
    End,
    Envelope,
    Hello,
    ReplicaStatus,
    SamplingParams,
    StepTokens,
)
from router.admission import ClientRequest
from router.config import RouterConfig
from router.request import Delivered, Ended
from router.router import Router

P, D = Address("prefill-0", 5), Address("decode-0", 6)


def status(num_free_blocks: int) -> ReplicaStatus:
    counts = ("num_waiting", "num_running", "num_leases", "num_pulls", "num_early_handoffs")
    idle: dict[str, Any] = dict.fromkeys(counts, 0)
    return ReplicaStatus(state="up", seq=1, num_free_blocks=num_free_blocks, **idle)


class World:
    """A router with one prefill engine, P, unless told otherwise, and one decode engine, D."""

    def __init__(self, *, prefill: bool = True, **config: Any) -> None:
        self.clock = VirtualClock()
        self.router = Router(RouterConfig(**config), address=Address("router", 3), clock=self.clock, seed=1)
        if prefill:
            self.hello(P, "prefill")
        self.hello(D, "decode")
        self.sent()

    def hello(self, address: Address, role: Any, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "block_size": 4,
            "num_blocks": 100,
            "max_num_seqs": 2,
            "max_model_len": 64,
            "max_prompt_tokens": 63,
        }
        self.router.replica_started(address)
        endpoint = b"at " + address.replica_id.encode()
        self.say(address, Hello(role=role, layout_fingerprint=b"l", endpoint=endpoint, **(fields | changes)))

    def say(self, sender: Address, message: Any) -> None:
        self.router.handle(Envelope(sender, self.router.address, 0, message))

    def submit(self, name: str = "r", **changes: Any) -> None:
        fields: dict[str, Any] = {
            "max_tokens": 5,
            "sampling": SamplingParams(),
            "prompt_token_ids": np.array([7, 8, 9], np.int32),
        }
        self.router.submit(ClientRequest(request_id=name, **(fields | changes)))

    def tokens(
        self,
        sender: Address,
        offset: int,
        token_ids: list[int],
        end: Any = None,
        *,
        attempt: int = 1,
        request_number: int = 0,
        **more: Any,
    ) -> None:
        ends = (End(request_number, attempt, *end),) if end else ()
        one = [request_number] if token_ids else []
        self.say(
            sender,
            StepTokens(
                router_epoch=3,
                request_numbers=np.array(one, np.int64),
                attempts=np.array([attempt] * len(one), np.int32),
                offsets=np.array([offset] * len(one), np.int32),
                counts=np.array([len(token_ids)] * len(one), np.int32),
                token_ids=np.array(token_ids, np.int32),
                ends=ends,
                **more,
            ),
        )

    def sent(self, kind: type | None = None) -> list[tuple[Address, Any]]:
        sent = [(to, message) for to, message in self.router.outbox if kind is None or isinstance(message, kind)]
        self.router.outbox.clear()
        return sent

    def received(self) -> list[int]:
        return [token for event in self.router.events if isinstance(event, Delivered) for token in event.token_ids]

    def ended(self) -> Ended:
        (ended,) = [event for event in self.router.events if isinstance(event, Ended)]
        return ended

    def in_flight(self) -> dict[str, int]:
        return {replica.address.replica_id: replica.in_flight for replica in self.router.replicas()}
