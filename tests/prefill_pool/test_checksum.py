"""What a prefill engine says of the bytes it offers."""

import numpy as np

from kv_transfer.checksum import checksum_of
from protocol.messages import KVHandoff
from tests.pool_world import PrefillWorld


def test_every_ready_block_has_its_checksum() -> None:
    world = PrefillWorld(checked=True)
    world.generate(num_prompt=10)  # budget 8: two whole blocks, then the rest
    world.step()
    world.step()
    (_, first), (_, last) = world.sent(KVHandoff)
    checksum = checksum_of(world.cache.view(np.uint8))
    assert (first.num_ready_tokens, first.checksums) == (8, checksum(first.block_ids[:2]))
    assert (last.final, last.checksums) == (True, checksum(last.block_ids))


def test_without_the_option_there_is_none() -> None:
    world = PrefillWorld()
    world.generate()
    world.step()
    world.step()
    assert [handoff.checksums for _, handoff in world.sent(KVHandoff)] == [(), ()]
