"""One service under test. The test itself plays its shell, the router and the peer."""

from typing import Any

import numpy as np

from decode_pool.service import DecodeService
from engine.config import EngineConfig
from engine.grammars import Grammars
from engine.parts import assemble
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler.scheduler import Proposer
from kv_transfer.config import TransferConfig
from kv_transfer.device.device import KVCache
from kv_transfer.lease import LeaseTable
from kv_transfer.transports.local import LocalConnector, LocalNetwork
from prefill_pool.service import PrefillService
from protocol.clock import VirtualClock
from protocol.messages import (
    Address,
    Drain,
    End,
    EngineRequest,
    Envelope,
    KVHandoff,
    PeerUp,
    PoolName,
    RequestKey,
    RouterStatus,
    SamplingParams,
    StepTokens,
)
from protocol.router_link import LinkConfig

ROUTER, P, D = Address("router", 3), Address("prefill-0", 5), Address("decode-0", 6)
LAYOUT = b"layout"
BLOCK_SIZE = 4


def key(name: str = "r", attempt: int = 1, router_epoch: int = 3) -> RequestKey:
    return RequestKey(router_epoch, name, attempt)


class World:
    """A service and its surroundings: `say` delivers a message, `step` runs one step, `sent` empties the outbox."""

    service: PrefillService | DecodeService

    def __init__(
        self, role: PoolName, *, proposer: Proposer | None = None, grammars: Grammars | None = None, **config: Any
    ) -> None:
        self.address = P if role == "prefill" else D
        self.clock = VirtualClock()
        fields: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "max_model_len": 64, "num_blocks": 17}
        fields |= {"block_size": BLOCK_SIZE, "prompt_reservation": "hold" if role == "prefill" else "check"}
        self.config = EngineConfig(**(fields | {"thrash_limit": 0.0} | config))
        self.cache = np.zeros((self.config.num_blocks, BLOCK_SIZE), np.int64)
        self.words = np.zeros(self.config.num_blocks, np.uint64)
        self.parts = assemble(
            self.config,
            role=role,
            address=self.address,
            num_blocks=self.config.num_blocks,
            num_host_blocks=self.config.num_host_blocks,
            fingerprint=LAYOUT,
            link=LinkConfig(),
            clock=self.clock,
            proposer=proposer,
            grammars=grammars,
        )
        self.scheduler = self.parts.scheduler
        self.runner = ArithmeticRunner(self.cache, num_host_blocks=self.config.num_host_blocks)
        self.network = LocalNetwork()

    def say(self, sender: Address, message: Any, receiver: Address | None = None) -> None:
        self.service.handle(Envelope(sender, receiver or self.address, 0, message))

    def hear_router(self, epoch: int = 3) -> None:
        self.say(
            Address("router", epoch),
            RouterStatus(router_epoch=epoch, seq=1, prefill_room_blocks=0, prefill_max_tokens=0),
        )

    def request(
        self, num_prompt: int = 10, *, name: str = "r", role: Any, peer: Address | None, **changes: Any
    ) -> EngineRequest:
        prompt = np.arange(1, num_prompt + 1, dtype=np.int32)
        fields: dict[str, Any] = {
            "key": key(name),
            "request_number": 7,
            "offset": 0,
            "max_tokens": 4,
            "sampling": SamplingParams(),
        }
        return EngineRequest(role=role, peer=peer, prompt_token_ids=prompt, **(fields | changes))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now + seconds)
        self.service.tick()

    def drain(self, deadline_s: float) -> None:
        """Tells the service to drain and lets the deadline pass."""
        self.say(ROUTER, Drain(deadline_s=deadline_s))
        self.pass_time(deadline_s)

    def step(self) -> dict[str, int]:
        """Runs one whole step and returns how many tokens it scheduled of each request."""
        batch = self.service.schedule()
        if batch is None:
            return {}
        self.service.commit(self.runner.execute(batch))
        return batch.num_scheduled_tokens()

    def sent(self, kind: type | None = None) -> list[tuple[Address, Any]]:
        sent = [(to, message) for to, message in self.service.outbox if kind is None or isinstance(message, kind)]
        self.service.outbox.clear()
        return sent

    def ends(self) -> list[End]:
        return [end for _, message in self.sent(StepTokens) for end in message.ends]


class PrefillWorld(World):
    service: PrefillService

    def __init__(self, *, checked: bool = False, **config: Any) -> None:
        super().__init__("prefill", **config)
        self.service = PrefillService(
            self.parts,
            leases=LeaseTable(self.words, P.epoch),
            config=TransferConfig(checksum=checked),
            cache=KVCache.in_host_memory(self.cache.view(np.uint8)),
        )
        self.hear_router()
        self.sent()

    def generate(self, num_prompt: int = 10, **changes: Any) -> None:
        self.say(ROUTER, self.request(num_prompt, role="prefill", peer=D, **changes))

    def num_free(self) -> int:
        return self.scheduler.num_free_blocks


class DecodeWorld(World):
    """A decode service. Its prefill peer is an array that holds a finished prompt."""

    service: DecodeService

    def __init__(
        self, *, max_early_handoffs: int = 1024, checked: bool = False, connected: bool = True, **config: Any
    ) -> None:
        super().__init__("decode", **config)
        self.source = np.zeros((64, BLOCK_SIZE), np.int64)
        self.network.export(b"p", self.source.view(np.uint8), self.words)
        blocks = self.cache.view(np.uint8)
        self.service = DecodeService(
            self.parts,
            transport=LocalConnector(self.network, blocks),
            config=TransferConfig(max_early_handoffs=max_early_handoffs, checksum=checked),
            cache=KVCache.in_host_memory(blocks),
        )
        self.hear_router()
        self.say(ROUTER, PeerUp(peer=P, endpoint=b"p"))
        if connected:
            self.finish_connections()
        self.sent()

    def finish_connections(self) -> None:
        for connection in list(self.network.connections):
            connection.advance()
        self.service.tick()

    def generate(self, num_prompt: int = 10, **changes: Any) -> None:
        self.say(ROUTER, self.request(num_prompt, role="decode", peer=P, **changes))

    def handoff(
        self,
        num_prompt: int = 10,
        *,
        ready: int | None = None,
        name: str = "r",
        first_token_id: int = 77,
        **changes: Any,
    ) -> None:
        """Offers the prompt 1, 2, 3, ... in blocks 20, 21, ... of the source, under lease 9, whose word has index 2."""
        ready = num_prompt if ready is None else ready
        final = ready == num_prompt
        tokens = np.arange(1, num_prompt + 1)
        self.source.reshape(-1)[20 * BLOCK_SIZE : 20 * BLOCK_SIZE + num_prompt] = (tokens + 1) * tokens
        self.words[2] = 9
        fields: dict[str, Any] = {
            "key": key(name),
            "lease_id": 9,
            "lease_index": 2,
            "lease_s": 30.0,
            "layout_fingerprint": LAYOUT,
        }
        fields |= {
            "block_ids": tuple(range(20, 20 + -(-num_prompt // BLOCK_SIZE))),
            "num_ready_tokens": ready,
            "final": final,
        }
        self.say(P, KVHandoff(first_token_id=first_token_id if final else None, **(fields | changes)))

    def finish_pulls(self) -> None:
        for pull in list(self.network.pulls):
            pull.advance()
        self.service.tick()
