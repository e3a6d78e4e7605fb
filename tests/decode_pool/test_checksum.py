"""A byte that changes on its way."""

import numpy as np

from engine.runners.arithmetic_model import expected_tokens
from kv_transfer.checksum import checksum_of
from protocol.messages import KVRelease, StepTokens
from tests.pool_world import DecodeWorld

FIRST = expected_tokens(range(1, 11), 1)[0]


def offered(world: DecodeWorld, *, ready: int = 10) -> None:
    """The handoff bears the checksums of the source as it is; a pull of what is ready is under way."""
    world.handoff(ready=ready, first_token_id=FIRST)  # fills the source
    checksums = checksum_of(world.source.view(np.uint8))(range(20, 20 + -(-ready // 4)))
    world.handoff(ready=ready, first_token_id=FIRST, checksums=checksums)
    world.generate()
    world.step()


def test_whole_blocks_are_taken() -> None:
    world = DecodeWorld(checked=True)
    offered(world, ready=8)
    world.finish_pulls()
    offered_rest = checksum_of(world.source.view(np.uint8))(range(20, 23))
    world.handoff(first_token_id=FIRST, checksums=offered_rest)
    world.finish_pulls()
    ((_, release),) = world.sent(KVRelease)
    assert (release.outcome, world.service.counters["checksum_failures"]) == ("consumed", 0)


def test_a_corrupted_byte_fails_the_attempt_and_nothing_is_cached() -> None:
    world = DecodeWorld(checked=True)
    offered(world)
    world.source.view(np.uint8)[21, 5] ^= 1
    world.finish_pulls()
    sent = world.sent()
    assert [m.outcome for _, m in sent if isinstance(m, KVRelease)] == ["refused"]
    (end,) = (end for _, m in sent if isinstance(m, StepTokens) for end in m.ends)
    assert (end.kind, end.error) == ("failed", "1 of 3 blocks of prefill-0 arrived changed")
    assert world.service.counters["checksum_failures"] == 1 and world.service.counters["pull_failures"] == 0
    assert world.service.idle and world.scheduler.blocks.visible() == {}
    world.service.check_idle()


def test_a_handoff_without_checksums_is_not_believed() -> None:
    world = DecodeWorld(checked=True)
    world.generate()
    world.handoff(first_token_id=FIRST)
    world.step()
    world.finish_pulls()
    assert [end.kind for end in world.ends()] == ["failed"]


def test_without_the_option_bytes_are_believed() -> None:
    world = DecodeWorld()
    offered(world)
    world.source.view(np.uint8)[21, 5] ^= 1
    world.finish_pulls()
    ((_, release),) = world.sent(KVRelease)
    assert release.outcome == "consumed"
