"""What a decode engine does while the cache of a prefill engine is being opened: everything else."""

import queue
import threading

import numpy as np
import pytest

from decode_pool.service import DecodeService
from engine.runners.arithmetic_model import expected_tokens
from kv_transfer.config import TransferConfig
from kv_transfer.connecting import ThreadConnector
from kv_transfer.device.device import KVCache
from kv_transfer.transport import Endpoint, Peer
from protocol.delivery import Outgoing
from protocol.errors import PullFailed
from protocol.messages import Envelope, KVRelease, PeerDown, PeerUp, ReplicaStatus, RouterStatus, StepTokens
from tests.decode_pool.test_service import ANSWER, CAUSES, end_it, releases
from tests.hang import HANG_S
from tests.pool_world import ROUTER, D, DecodeWorld, P

PULL_TIMEOUT_S = TransferConfig().pull_timeout_s


def waiting(*, deadline_s: float | None = None) -> DecodeWorld:
    """A request owns its destination, its prompt is ready at a peer that is still being opened."""
    world = DecodeWorld(connected=False)
    world.generate(deadline_s=deadline_s)
    world.handoff(first_token_id=ANSWER[0])
    assert world.step() == {} and world.scheduler.num_free_blocks == 13
    assert world.network.pulls == [] and len(world.network.connections) == 1
    return world


def wait_in_vain(world: DecodeWorld) -> None:
    """Lets the longest time pass that a pull may take."""
    for _ in range(4):
        world.pass_time(PULL_TIMEOUT_S / 4)
        world.hear_router()


def test_a_pull_waits_for_its_peer_and_nothing_else_does() -> None:
    world = waiting()
    world.say(ROUTER, world.request(role="colocated", peer=None, name="other", request_number=8))
    assert [world.step() for _ in range(2)] == [{"other": 8}, {"other": 2}]
    world.finish_connections()
    world.finish_pulls()
    assert releases(world) == ["consumed"]
    assert world.step() == {"r": 1, "other": 1}
    assert world.service.counters["timers_fired"] == 0


def test_a_peer_that_cannot_be_opened_fails_what_waits_for_it() -> None:
    world = waiting()
    world.network.connections[0].fail("cut")
    world.service.tick()
    assert [(end.kind, end.error) for end in world.ends()] == [("failed", "the cache of prefill-0 epoch 5 is not open")]
    assert world.service.idle and world.scheduler.num_free_blocks == 16
    world.service.check_idle()


def test_a_peer_that_dies_while_it_is_opened_is_given_up() -> None:
    world = waiting()
    world.say(ROUTER, PeerDown(peer=P))
    assert [end.kind for end in world.ends()] == ["failed"] and world.service.idle
    assert world.network.is_mapped(b"p"), "it may be mapped already"
    world.finish_connections()
    assert not world.network.is_mapped(b"p")
    world.generate(name="late", request_number=8)
    world.handoff(name="late")
    world.step()
    assert [end.kind for end in world.ends()] == ["failed"] and world.network.pulls == []


def test_a_successor_takes_the_place_of_a_peer_that_is_still_opened() -> None:
    world = waiting()
    world.network.export(b"q", world.source.view(np.uint8), world.words)
    world.say(ROUTER, PeerUp(peer=P._replace(epoch=P.epoch + 1), endpoint=b"q"))
    assert [end.kind for end in world.ends()] == ["failed"] and world.service.idle
    world.finish_connections()
    assert [world.network.is_mapped(endpoint) for endpoint in (b"p", b"q")] == [False, True]


def test_told_again_of_a_peer_what_waits_goes_on_waiting() -> None:
    world = waiting()
    world.say(ROUTER, PeerUp(peer=P, endpoint=b"p"))
    first, second = world.network.connections
    first.advance()
    world.service.tick()
    assert first.let_go and len(world.network.peers) == 1 and world.network.pulls == [] and world.ends() == []
    second.advance()
    world.service.tick()
    world.finish_pulls()
    assert releases(world) == ["consumed"]


def test_a_new_router_ends_what_is_still_opened() -> None:
    world = waiting()
    world.hear_router(ROUTER.epoch + 1)
    assert world.network.connections[0].let_go and world.service.idle
    world.finish_connections()
    assert not world.network.is_mapped(b"p")


@pytest.mark.parametrize("cause", CAUSES)
def test_what_waits_for_a_peer_ends_at_once(cause: str) -> None:
    """Nothing writes into its destination yet."""
    world = waiting(deadline_s=3.0 if cause == "deadline" else None)
    end_it(world, cause)
    sent = world.sent()
    assert [end.kind for _, m in sent if isinstance(m, StepTokens) for end in m.ends] == CAUSES[cause]
    assert [m.outcome for _, m in sent if isinstance(m, KVRelease)] == ["refused"]
    assert world.service.idle and world.scheduler.num_free_blocks == 16
    world.service.check_idle()
    world.finish_connections()
    assert world.network.pulls == []


def test_a_peer_that_never_opens_costs_no_more_than_a_pull_that_never_ends() -> None:
    world = waiting()
    wait_in_vain(world)
    assert [end.kind for end in world.ends()] == ["failed"] and world.service.idle
    world.generate(name="next", request_number=8)
    world.handoff(name="next")
    world.step()
    assert [end.kind for end in world.ends()] == ["failed"], "nobody waits for it a second time"
    world.drain(1.0)
    assert world.service.drained
    world.service.check_idle()
    world.finish_connections()
    assert not world.network.is_mapped(b"p")


def test_the_time_to_open_a_peer_is_not_the_pull_s() -> None:
    world = waiting()
    for _ in range(3):
        world.pass_time(PULL_TIMEOUT_S / 4)
        world.hear_router()
    world.finish_connections()
    for _ in range(3):
        world.pass_time(PULL_TIMEOUT_S / 4)
        world.hear_router()
    world.finish_pulls()
    assert releases(world) == ["consumed"]


class Hanging:
    """A transport whose driver does not answer before `go_on`."""

    name = "hanging"

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def connect(self, endpoint: Endpoint, src_block_bytes: int | None = None) -> Peer:
        self.asked.set()
        assert self.go_on.wait(HANG_S)
        raise PullFailed("too late")

    def close(self) -> None:
        pass


def test_a_loop_whose_driver_hangs_serves_others_and_tells_its_status() -> None:
    world, transport = DecodeWorld(), Hanging()
    connector = ThreadConnector(transport, lambda: loop.wake())
    service = DecodeService(
        world.parts,
        transport=connector,
        config=TransferConfig(),
        cache=KVCache.in_host_memory(world.cache.view(np.uint8)),
    )
    sent: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
    loop = world.parts.loop(service, world.runner, sent.put)
    loop.start()
    router = Outgoing(ROUTER)
    status = RouterStatus(router_epoch=3, seq=1, prefill_room_blocks=0, prefill_max_tokens=0)
    other = world.request(role="colocated", peer=None, name="other")
    loop.deliver(router.envelope(D, status))
    loop.deliver(router.envelope(D, PeerUp(peer=P, endpoint=b"p")))
    assert transport.asked.wait(HANG_S)
    loop.deliver(router.envelope(D, other))
    tokens: list[int] = []
    while len(tokens) < 4:
        message = sent.get(timeout=HANG_S).message
        tokens += message.token_ids.tolist() if isinstance(message, StepTokens) else []
    assert tokens == expected_tokens(range(1, 11), 4)
    world.clock.advance_to(world.clock.now + 1.0)
    while not isinstance(sent.get(timeout=HANG_S).message, ReplicaStatus):
        pass
    assert not transport.go_on.is_set()
    transport.go_on.set()
    loop.stop()
    connector.close()
