"""Transport across nodes, through NIXL: one-sided reads by RDMA or TCP, whatever its UCX finds. An optional dependency
(extra `nixl`).

1. The prefill engine registers its cache, its lease words and a nonce with a NIXL agent and puts the agent's metadata
   into its endpoint.
2. The decode engine adds that agent to its own and reads the nonce: proof that bytes come from there.
3. A pull is a list of (address, bytes) pairs, one for each run of neighbouring blocks: descriptors, not bytes, are what
   costs.
4. After its last byte the lease word is read the same way. Nothing is shared: a word that cannot be read is no lease.
"""

import base64
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakSet

import numpy as np

from kv_transfer.block_ids import checked_pairs, merged_runs
from kv_transfer.endpoint import offer_of, single
from kv_transfer.lease import Words
from kv_transfer.segment import NONCE_BYTES
from kv_transfer.transport import Endpoint
from kv_transfer.transports.pull_thread import Pull, PullThread
from protocol.arrays import Int64
from protocol.errors import PullFailed

logger = logging.getLogger(__name__)

KIND = "nixl"
PIECE_BYTES = 64 << 20
"""Of one transfer: between two looks at `cancel`."""
POLL_S = 100e-6
WORD_S = 1.0
"""For reading a lease word or a nonce; longer, and the peer is taken for lost."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A KV cache wherever it lies."""

    address: int
    num_blocks: int
    block_bytes: int
    kind: str = "DRAM"
    """NIXL's name: DRAM or VRAM."""
    ordinal: int = 0
    """The GPU's, for VRAM."""

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class Agent:
    """A NIXL agent of this process. What NIXL reports as an error is PullFailed here."""

    def __init__(self, name: str) -> None:
        """Raises PullFailed where NIXL is not installed or has no way to move bytes."""
        try:
            api, bindings = import_module("nixl._api"), import_module("nixl._bindings")
        except ImportError as error:
            raise PullFailed(f"NIXL is not installed (extra `nixl`): {error}") from error
        # It prints to standard output by a handler of its own; its lines belong where ours go, those of libraries from
        # `warning` on.
        theirs = logging.getLogger("nixl")
        theirs.handlers, theirs.propagate, theirs.level = [], True, logging.WARNING
        self._errors: tuple[type[Exception], ...] = (
            RuntimeError,
            *(getattr(bindings, n) for n in dir(bindings) if n.endswith("Error")),
        )
        with self._reported():
            # Strict: pulls run in threads of their own, words are read in the engine's.
            sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], sync_mode=sync))

    def register(self, address: int, num_bytes: int, kind: str, ordinal: int) -> Any:
        with self._reported():
            return self._agent.register_memory([(address, num_bytes, ordinal, "")], kind)

    def deregister(self, registered: Any) -> None:
        with self._reported():
            self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        """For `add` in another process; after all memory was registered."""
        with self._reported():
            return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        """The remote agent's name."""
        with self._reported():
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        with self._reported():
            self._agent.remove_remote_agent(name)

    def read(
        self, local: Int64, local_kind: str, remote: Int64, remote_kind: str, name: str, given_up: Callable[[], bool]
    ) -> bool:
        """Copies remote to local pieces, int64 [n, 3]: address, bytes, GPU. False: `given_up`, and nothing writes any
        more.
        """
        if given_up():
            return False
        with self._reported():
            agent = self._agent
            there, here = agent.get_xfer_descs(remote, remote_kind), agent.get_xfer_descs(local, local_kind)
            transfer = agent.initialize_xfer("READ", here, there, name)
            state = agent.transfer(transfer)
            while state == "PROC" and not given_up():
                time.sleep(POLL_S)
                state = agent.check_xfer_state(transfer)
            if state != "PROC":
                agent.release_xfer_handle(transfer)
        if state == "PROC":
            self._abort(transfer)
        if state == "ERR":
            raise PullFailed("NIXL: the transfer failed")
        return bool(state == "DONE")

    def _abort(self, transfer: Any) -> None:
        """NIXL refuses to release a transfer until that has really ended."""
        while True:
            try:
                self._agent.release_xfer_handle(transfer)
                return
            except self._errors:
                time.sleep(POLL_S)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise PullFailed(f"NIXL: {type(error).__name__}: {error}") from error


class NixlExport:
    """What the prefill side holds: an agent and what is registered with it."""

    def __init__(self, memory: Memory, words: Words, nonce: bytes, nonce_at: int | None = None) -> None:
        """`nonce_at`: where the nonce lies, of the cache's kind and registered with it; None: it is kept here. Raises
        PullFailed.
        """
        self._agent = Agent(nonce.hex())
        self._nonce = np.frombuffer(nonce, np.uint8).copy()
        num_bytes = memory.num_bytes + (NONCE_BYTES if nonce_at is not None else 0)
        self._registered = [
            self._agent.register(memory.address, num_bytes, memory.kind, memory.ordinal),
            self._agent.register(words.ctypes.data, words.nbytes, "DRAM", 0),
            self._agent.register(self._nonce.ctypes.data, NONCE_BYTES, "DRAM", 0),
        ]
        self.endpoint = single(
            KIND,
            num_blocks=memory.num_blocks,
            block_bytes=memory.block_bytes,
            agent=base64.b64encode(self._agent.metadata()).decode(),
            address=memory.address,
            memory=memory.kind,
            ordinal=memory.ordinal,
            words=words.ctypes.data,
            nonce=nonce.hex(),
            nonce_at=[self._nonce.ctypes.data, "DRAM"] if nonce_at is None else [nonce_at, memory.kind],
        )

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister(registered)


class NixlPeer:
    """A remote agent, with a thread for its pulls: peers do not wait for each other."""

    def __init__(
        self,
        agent: Agent,
        name: str,
        offer: dict[str, Any],
        cache: Memory,
        notify: Callable[[], None],
        release: Callable[[], None],
    ):
        """`release` lets go of the remote agent."""
        self._agent, self._name, self._offer, self._cache, self._release = agent, name, offer, cache, release
        self._word = np.zeros(1, np.uint64)
        self._registered = agent.register(self._word.ctypes.data, self._word.nbytes, "DRAM", 0)
        self._lost = self._closed = False
        self._thread = PullThread(notify)

    def pull(self, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Pull:
        pull = Pull(
            *checked_pairs(src_blocks, self._offer["num_blocks"], dst_blocks, self._cache.num_blocks), self._copy
        )
        self._thread.start(pull)
        return pull

    def read_word(self, slot: int) -> int:
        """0, as where no lease is live, when the word cannot be read; WORD_S at most, and never again from a peer that
        was lost.
        """
        here = np.array([[self._word.ctypes.data, 8, 0]], np.int64)
        there = np.array([[self._offer["words"] + 8 * slot, 8, 0]], np.int64)
        if not self._lost:
            try:
                self._lost = not self._agent.read(here, "DRAM", there, "DRAM", self._name, _after(WORD_S))
            except PullFailed:
                self._lost = True
        return 0 if self._lost else int(self._word[0])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.close()
            self._agent.deregister(self._registered)
            self._release()

    def _copy(self, pull: Pull) -> str:
        cache, offer = self._cache, self._offer
        piece = max(1, PIECE_BYTES // cache.block_bytes)
        for begin in range(0, len(pull.dst_blocks), piece):
            runs = merged_runs(pull.src_blocks[begin : begin + piece], pull.dst_blocks[begin : begin + piece])
            here = _pieces(cache.address, runs[:, 1], runs[:, 2], cache.block_bytes, cache.ordinal)
            there = _pieces(offer["address"], runs[:, 0], runs[:, 2], cache.block_bytes, offer["ordinal"])
            if not self._agent.read(here, cache.kind, there, offer["memory"], self._name, pull.cancelled.is_set):
                return "cancelled"
        return ""


class NixlTransport:
    """Pulls into `cache`. `notify` is called from other threads."""

    name = KIND

    def __init__(self, cache: Memory, notify: Callable[[], None]) -> None:
        """Raises PullFailed where NIXL is not installed or cannot move bytes. Takes seconds: no peer waits for that
        later.
        """
        self._cache, self._notify = cache, notify
        self._agent = Agent(secrets.token_hex(NONCE_BYTES))
        self._registered: Any = self._agent.register(cache.address, cache.num_bytes, cache.kind, cache.ordinal)
        self._peers: WeakSet[NixlPeer] = WeakSet()
        """Those somebody still holds: a closed one must not keep what it had mapped."""
        self._known: Counter[str] = Counter()
        """Peers of each remote agent that are open: one engine may be connected to twice, while the old peer is
        retired.
        """

    def connect(self, endpoint: Endpoint) -> NixlPeer:
        offer = offer_of(endpoint, KIND, self._cache.block_bytes)
        name = self._agent.add(base64.b64decode(offer["agent"]))
        self._known[name] += 1
        try:
            self._prove(name, offer)
        except PullFailed:
            self._release(name)
            raise
        peer = NixlPeer(self._agent, name, offer, self._cache, self._notify, lambda: self._release(name))
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        for peer in list(self._peers):
            peer.close()
        if self._registered is not None:
            self._agent.deregister(self._registered)
            self._registered = None

    def _prove(self, name: str, offer: dict[str, Any]) -> None:
        """Reads the nonce, from where the cache lies. Raises PullFailed."""
        found = np.zeros(NONCE_BYTES, np.uint8)
        registered = self._agent.register(found.ctypes.data, NONCE_BYTES, "DRAM", 0)
        address, kind = offer["nonce_at"]
        here = np.array([[found.ctypes.data, NONCE_BYTES, 0]], np.int64)
        there = np.array([[address, NONCE_BYTES, offer["ordinal"]]], np.int64)
        try:
            if not self._agent.read(here, "DRAM", there, kind, name, _after(WORD_S)):
                raise PullFailed(f"NIXL: the nonce did not come within {WORD_S:g} s")
        finally:
            self._agent.deregister(registered)
        if found.tobytes() != bytes.fromhex(offer["nonce"]):
            raise PullFailed("NIXL: the memory that was read is not the one that was offered")

    def _release(self, name: str) -> None:
        """One peer less of a remote agent; the last one takes it away."""
        self._known[name] -= 1
        if not self._known[name]:
            try:
                self._agent.remove(name)
            except PullFailed as error:
                logger.info("a remote agent could not be removed, its process may be gone: %s", error)


def _pieces(address: int, blocks: Int64, lengths: Int64, block_bytes: int, ordinal: int) -> Int64:
    """int64 [n, 3] for runs of blocks."""
    return np.stack((address + blocks * block_bytes, lengths * block_bytes, np.full(len(blocks), ordinal)), axis=1)


def _after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since this call."""
    ends_at = time.monotonic() + seconds
    return lambda: time.monotonic() > ends_at
