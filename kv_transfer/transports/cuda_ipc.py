"""Transport between two GPUs of one node: the decode engine maps the prefill engine's cache and its copy engines fetch
blocks.

 1. The prefill engine keeps its cache in a `DevicePool` and puts the pool's handle into its endpoint. Lease words lie
    in host memory, in a shared segment, as they do for engines on the CPU.
 2. The decode engine opens the handle and copies the nonce behind the cache: proof that bytes really come from there to
    here.
 3. A pull is one copy per run of neighbouring blocks on a stream of its own, so that the SMs stay with decode; where
    runs are small a kernel gathers them instead. Its last event reached, the lease word is read, in host memory.

The exporter may die at any moment. What a driver then does with mapped memory is not relied on: the pull ends with
bytes or with an error, and the lease word decides whether bytes count.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from weakref import WeakSet

from kv_transfer.block_ids import checked_pairs, merged_runs
from kv_transfer.device.device import Device, DeviceBlocks, Gather
from kv_transfer.device.device_pool import DevicePool, DeviceStream
from kv_transfer.endpoint import offer_of, single
from kv_transfer.lease import read_word
from kv_transfer.segment import NONCE_BYTES, SharedSegment
from kv_transfer.transport import Endpoint
from kv_transfer.transports.pull_thread import Pull, PullThread
from protocol.arrays import Int64
from protocol.errors import PullFailed

logger = logging.getLogger(__name__)

KIND = "cuda_ipc"
PIECE_BYTES = 64 << 20
"""Started between two looks at `cancel`. Two pieces are under way at once, so that looking costs no time."""
GATHER_BELOW_BYTES = 64 << 10
"""Mean bytes of a run: below, starting its copy takes longer than the copy, and one kernel moves all runs of a piece.
"""


def export(device: Device, pool: DevicePool, segment: SharedSegment) -> Endpoint:
    """What a decode engine needs to map the pool and the segment's lease words. Raises PullFailed where memory cannot
    be shared.
    """
    return single(
        KIND,
        num_blocks=pool.blocks.num_blocks,
        block_bytes=pool.blocks.block_bytes,
        handle=device.share(pool.pointer).hex(),
        bus_id=device.bus_id,
        path=str(segment.path),
        nonce=segment.nonce.hex(),
    )


class CudaIpcPeer:
    """A mapped pool and its lease words, with a stream and a thread for its pulls: peers do not wait for each other."""

    def __init__(
        self,
        stream: DeviceStream,
        words: SharedSegment,
        source: DeviceBlocks,
        cache: DeviceBlocks,
        gather: Gather | None,
        notify: Callable[[], None],
        resources: ExitStack,
    ) -> None:
        """`stream` has two events. `resources`: what `close` gives back."""
        self._stream, self._segment, self._source, self._cache, self._gather = stream, words, source, cache, gather
        self._resources = resources
        self._thread = PullThread(notify)

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Pull:
        pull = Pull(*checked_pairs(src_blocks, self._source.num_blocks, dst_blocks, self._cache.num_blocks), self._copy)
        self._thread.start(pull)
        return pull

    def read_word(self, slot: int) -> int:
        return read_word(self._segment.words, slot)

    def close(self) -> None:
        self._thread.close()
        self._resources.close()

    def _copy(self, pull: Pull) -> str:
        try:
            return self._issue_pieces(pull)
        finally:
            self._stream.drain()  # terminal only when nothing writes any more, also after an error half way

    def _issue_pieces(self, pull: Pull) -> str:
        piece = max(1, PIECE_BYTES // self._cache.block_bytes)
        for number, begin in enumerate(range(0, len(pull.dst_blocks), piece)):
            if number >= 2:
                self._stream.wait(number % 2)
            if pull.cancelled.is_set():
                return "cancelled"
            self._issue(pull.src_blocks[begin : begin + piece], pull.dst_blocks[begin : begin + piece])
            self._stream.record(number % 2)
        return ""

    def _issue(self, src: Int64, dst: Int64) -> None:
        block_bytes = self._cache.block_bytes
        runs = merged_runs(src, dst)
        if self._gather is not None and len(src) * block_bytes < GATHER_BELOW_BYTES * len(runs):
            self._stream.gather(self._gather, self._source.tensor, src, self._cache.tensor, dst)
            return
        for src_block, dst_block, num_blocks in runs.tolist():
            self._stream.copy(
                self._cache.pointer + dst_block * block_bytes,
                self._source.pointer + src_block * block_bytes,
                num_blocks * block_bytes,
            )


class CudaIpcTransport:
    """Pulls into `cache`. `gather`: the kernel for small runs; without one, every run is a copy. `notify` is called
    from other threads.
    """

    name = KIND

    def __init__(
        self, device: Device, cache: DeviceBlocks, notify: Callable[[], None], gather: Gather | None = None
    ) -> None:
        self._device, self._cache, self._notify, self._gather = device, cache, notify, gather
        self._peers: WeakSet[CudaIpcPeer] = WeakSet()
        """Those somebody still holds: a closed one must not keep what it had mapped."""

    def connect(self, endpoint: Endpoint) -> CudaIpcPeer:
        offer = offer_of(endpoint, KIND, self._cache.block_bytes)
        num_blocks, nonce = offer["num_blocks"], bytes.fromhex(offer["nonce"])
        with ExitStack() as resources:
            words = SharedSegment.open(Path(offer["path"]), nonce)
            resources.callback(words.close)
            pointer = self._device.open(bytes.fromhex(offer["handle"]))
            resources.callback(self._unmap, pointer)
            stream = resources.enter_context(DeviceStream(self._device, num_events=2))
            if stream.read(pointer + num_blocks * self._cache.block_bytes, NONCE_BYTES) != nonce:
                raise PullFailed(f"the memory of GPU {offer['bus_id']} that was mapped is not the one that was offered")
            tensor = self._device.tensor(pointer, num_blocks, self._cache.block_bytes)
            source = DeviceBlocks(pointer, num_blocks, self._cache.block_bytes, tensor)
            peer = CudaIpcPeer(stream, words, source, self._cache, self._gather, self._notify, resources.pop_all())
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        for peer in list(self._peers):
            peer.close()

    def _unmap(self, pointer: int) -> None:
        """Of a peer that may be dead: what cannot be unmapped any more harms nobody."""
        try:
            self._device.close(pointer)
        except PullFailed as error:
            logger.warning("a peer's cache could not be unmapped: %s", error)
