"""Transport across nodes, through NIXL: one-sided reads by RDMA or TCP, whatever its UCX finds. An optional dependency
(extra `nixl`).

1. The prefill engine registers its cache, its lease words and a nonce with a NIXL agent and puts the agent's metadata
   into its endpoint.
2. The decode engine adds that agent to its own and reads the nonce: proof that bytes come from there.
3. A pull is a list of (address, bytes) pairs, one for each run of neighbouring blocks (or for each block, of which only
   a span is moved): descriptors, not bytes, are what costs.
4. After its last byte the lease word is read the same way. Nothing is shared: a word that cannot be read is no lease.
"""

import base64
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from kv_transfer.block_span import copies_of
from kv_transfer.device.device import KVCache, MemoryKind
from kv_transfer.endpoint import Offer, single
from kv_transfer.segment import NONCE_BYTES
from kv_transfer.transport import Endpoint, ExportedCache, Notify
from kv_transfer.transports.peers import PullTransport
from kv_transfer.transports.pull_thread import Pull
from protocol.arrays import Int64
from protocol.errors import PullFailed

logger = logging.getLogger(__name__)

KIND = "nixl"
MEMORY: tuple[MemoryKind, ...] = ("host", "GPU")
PIECE_BYTES = 64 << 20
"""Bytes of one transfer, which move between two looks at `cancel`."""
POLL_S = 100e-6
WORD_S = 1.0
"""A peer whose lease word or nonce takes longer to read is taken for lost."""

_NAMES: dict[MemoryKind, str] = {"host": "DRAM", "GPU": "VRAM"}
"""What NIXL calls the kinds of memory."""
HOST = _NAMES["host"]


def export(exported: ExportedCache, resources: ExitStack) -> Endpoint:
    """Raises PullFailed where NIXL is not installed or cannot move bytes."""
    exporter = Exporter(exported)
    resources.callback(exporter.close)
    return exporter.endpoint


def import_into(cache: KVCache, notify: Notify) -> PullTransport:
    """Takes seconds, so no peer waits later. Raises PullFailed where NIXL is not installed or cannot move bytes."""
    importer = Importer(cache)
    transport = PullTransport(KIND, cache, notify, importer.open)
    transport.resources.callback(importer.close)
    return transport


class Agent:
    """A NIXL agent of this process. What NIXL reports as an error is PullFailed here."""

    def __init__(self, name: str, bind: Callable[[], None]) -> None:
        """`bind` makes the GPU current in the calling thread: memory on a GPU needs that in every thread that calls
        NIXL. Raises PullFailed where NIXL is not installed or has no way to move bytes.
        """
        self._bind = bind
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
            # Strict: peers open and pull in threads of their own, words are read in the engine's.
            sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], sync_mode=sync))

    def register(self, address: int, num_bytes: int, kind: str, ordinal: int) -> Any:
        with self._reported():
            return self._agent.register_memory([(address, num_bytes, ordinal, "")], kind)

    def deregister(self, registered: Any) -> None:
        with self._reported():
            self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        """Returns what `add` in another process takes. All memory must have been registered before."""
        with self._reported():
            return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        """Returns the remote agent's name."""
        with self._reported():
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        with self._reported():
            self._agent.remove_remote_agent(name)

    def read(
        self, local: Int64, local_kind: str, remote: Int64, remote_kind: str, name: str, given_up: Callable[[], bool]
    ) -> bool:
        """Copies remote to local pieces, int64 [n, 3]: address, bytes, GPU. Returns False after `given_up` said so;
        then nothing writes any more.
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
        """Every call to NIXL is made in here."""
        self._bind()
        try:
            yield
        except self._errors as error:
            raise PullFailed(f"NIXL: {type(error).__name__}: {error}") from error


class Exporter:
    """The agent of a prefill engine and what is registered with it."""

    def __init__(self, exported: ExportedCache) -> None:
        cache, words, nonce = exported.cache, exported.segment.words, exported.segment.nonce
        kind, ordinal = _place(cache)
        self._agent = Agent(nonce.hex(), cache.bind)
        self._nonce = np.frombuffer(nonce, np.uint8).copy()
        on_gpu = cache.memory == "GPU"
        num_bytes = cache.num_bytes + (NONCE_BYTES if on_gpu else 0)
        self._registered = [
            self._agent.register(cache.pointer, num_bytes, kind, ordinal),
            self._agent.register(words.ctypes.data, words.nbytes, HOST, 0),
            self._agent.register(self._nonce.ctypes.data, NONCE_BYTES, HOST, 0),
        ]
        self.endpoint = single(
            KIND,
            num_blocks=cache.num_blocks,
            block_bytes=cache.block_bytes,
            agent=base64.b64encode(self._agent.metadata()).decode(),
            address=cache.pointer,
            memory=kind,
            ordinal=ordinal,
            words=words.ctypes.data,
            nonce=nonce.hex(),
            nonce_at=[cache.pointer + cache.num_bytes if on_gpu else self._nonce.ctypes.data, kind],
        )

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister(registered)


class RemoteAgent:
    """A remote agent and the cache that it offers."""

    def __init__(self, agent: Agent, name: str, offer: Offer, cache: KVCache, resources: ExitStack) -> None:
        self.num_blocks: int = offer["num_blocks"]
        self.agent = agent
        self._name, self._offer, self._cache = name, offer, cache
        self._word = np.zeros(1, np.uint64)
        registered = agent.register(self._word.ctypes.data, self._word.nbytes, HOST, 0)
        resources.callback(agent.deregister, registered)
        self._lost = False

    def copy(self, pull: Pull) -> str:
        cache, offer = self._cache, self._offer
        kind, ordinal = _place(cache)
        piece = max(1, PIECE_BYTES // pull.span.length)
        for begin in range(0, len(pull.dst_blocks), piece):
            src, dst = pull.src_blocks[begin : begin + piece], pull.dst_blocks[begin : begin + piece]
            copies = copies_of(src, dst, pull.span, offer["block_bytes"], cache.block_bytes)
            here = _pieces(cache.pointer + copies[:, 1], copies[:, 2], ordinal)
            there = _pieces(offer["address"] + copies[:, 0], copies[:, 2], offer["ordinal"])
            if not self.agent.read(here, kind, there, offer["memory"], self._name, pull.cancelled.is_set):
                return "cancelled"
        return ""

    def read_word(self, index: int) -> int:
        """Returns 0, as where no lease is live, when the word cannot be read. Waits for WORD_S at most, and never again
        for a peer that was lost.
        """
        here = np.array([[self._word.ctypes.data, 8, 0]], np.int64)
        there = np.array([[self._offer["words"] + 8 * index, 8, 0]], np.int64)
        if not self._lost:
            try:
                self._lost = not self.agent.read(here, HOST, there, HOST, self._name, _after(WORD_S))
            except PullFailed:
                self._lost = True
        return 0 if self._lost else int(self._word[0])


class Importer:
    """The agent of a decode engine and the cache that is registered with it."""

    def __init__(self, cache: KVCache) -> None:
        self.agent = Agent(secrets.token_hex(NONCE_BYTES), cache.bind)
        self._cache = cache
        kind, ordinal = _place(cache)
        self._registered = self.agent.register(cache.pointer, cache.num_bytes, kind, ordinal)
        self._known: Counter[str] = Counter()
        """Peers of each remote agent that are open: one engine may be connected to twice, while the old peer is
        retired.
        """
        self._lock = threading.Lock()
        """Held while a remote agent is added or removed: peers open and close in threads of their own."""

    def open(self, offer: Offer, resources: ExitStack) -> RemoteAgent:
        with self._lock:
            name = self.agent.add(base64.b64decode(offer["agent"]))
            self._known[name] += 1
        resources.callback(self._release, name)
        self._prove(name, offer)
        return RemoteAgent(self.agent, name, offer, self._cache, resources)

    def close(self) -> None:
        self.agent.deregister(self._registered)

    def _prove(self, name: str, offer: Offer) -> None:
        """Reads the nonce, from where the cache lies. Raises PullFailed."""
        found = np.zeros(NONCE_BYTES, np.uint8)
        registered = self.agent.register(found.ctypes.data, NONCE_BYTES, HOST, 0)
        address, kind = offer["nonce_at"]
        here = np.array([[found.ctypes.data, NONCE_BYTES, 0]], np.int64)
        there = np.array([[address, NONCE_BYTES, offer["ordinal"]]], np.int64)
        try:
            if not self.agent.read(here, HOST, there, kind, name, _after(WORD_S)):
                raise PullFailed(f"NIXL: the nonce did not come within {WORD_S:g} s")
        finally:
            self.agent.deregister(registered)
        if found.tobytes() != bytes.fromhex(offer["nonce"]):
            raise PullFailed("NIXL: the memory that was read is not the one that was offered")

    def _release(self, name: str) -> None:
        """A remote agent has one peer less; the last one takes it away."""
        with self._lock:
            self._known[name] -= 1
            if not self._known[name]:
                try:
                    self.agent.remove(name)
                except PullFailed as error:
                    logger.info("a remote agent could not be removed, its process may be gone: %s", error)


def _place(cache: KVCache) -> tuple[str, int]:
    """Returns NIXL's name of the kind of memory, and the number of the GPU."""
    return _NAMES[cache.memory], cache.device.ordinal if cache.device else 0


def _pieces(addresses: Int64, sizes: Int64, ordinal: int) -> Int64:
    """Returns int64 [n, 3]: address, bytes, GPU."""
    return np.stack((addresses, sizes, np.full(len(sizes), ordinal)), axis=1)


def _after(seconds: float) -> Callable[[], bool]:
    """Returns a function that says whether so much time has passed since this call."""
    ends_at = time.monotonic() + seconds
    return lambda: time.monotonic() > ends_at
