"""The invariants that hold at every moment. They are checked for what the last event touched; audit.py has the
invariants with a history.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from engine.runners.arithmetic_model import expected_logprobs, expected_tokens
from kv_transfer.transports.local import LocalPull
from prefill_pool.service import PrefillService
from protocol.block_hash import chain_hashes, root_hash
from protocol.clock import VirtualClock
from simulator.engines import Engines
from simulator.replica import LAYOUT, Replica
from simulator.router_driver import RouterDriver
from simulator.scenario import Scenario
from simulator.violation import Violation

__all__ = ["Invariants", "Violation"]

MAX_LATENESS_S = 0.25
"""How late a timer may be looked at: two ticks and a half."""


class Invariants:
    """Checks I1, I2, I3, I4, I5, I7, I8 and I13 over one simulation. I11 is checked where messages arrive.

    An engine's state changes only where the engine is touched. Every engine, and so every timer, is touched ten
    times a second.
    """

    def __init__(self, scenario: Scenario, clock: VirtualClock, driver: RouterDriver, engines: Engines) -> None:
        self._scenario, self._clock, self._driver, self._engines = scenario, clock, driver, engines
        self._index: dict[bytes, int] = {}
        """Row in `_contents` by hash."""
        self._contents = self._expected_contents()

    def check(self) -> None:
        """Checks what one event has touched."""
        touched = self._engines.touched
        if touched:
            for replica in touched.values():
                self._check_engine(replica)
            touched.clear()
        if self._driver.touched:
            self._driver.touched = False
            self._check_in_flight()
            self._check_answers()

    def check_end(self) -> None:
        """When everything is quiet, engines must be empty (I2), every request must have had one terminal event (I13),
        and answers must be right (I7).
        """
        driver = self._driver
        for replica in self._engines.replicas.values():
            replica.service.check_idle()
        if driver.alive and (any(r.in_flight for r in driver.router.replicas()) or driver.router.num_open):
            self._fail("I5: in-flight counters or open requests are left")
        for name, client in driver.clients.items():
            if not client.closed:
                self._fail(f"I13: {name} has no terminal event")
            if client.ended is not None and client.ended.error is None and client.received != client.expected:
                self._fail(f"I7: {name} finished with {client.received}, expected {client.expected}")

    def check_no_timer_fired(self) -> None:
        """For runs without faults: timers are for what goes wrong."""
        for replica in self._engines.replicas.values():
            fired = replica.service.counters["timers_fired"]
            if fired:
                self._fail(f"{fired:g} timers fired at {replica.name} in a run without faults")

    def _fail(self, text: str) -> None:
        raise Violation(self._scenario.seed, self._clock.now, text)

    def _check_engine(self, replica: Replica) -> None:
        self._check_timers(replica)
        if isinstance(replica.service, PrefillService):
            self._check_leases(replica, replica.service)
        else:
            pulls = [pull for pull in self._engines.network.pulls if pull.destination.base is replica.cache]
            self._check_pulls(replica, pulls)
            self._check_swaps(replica, pulls)
        if not replica.executing:
            self._check_visible(replica)

    def _check_timers(self, replica: Replica) -> None:
        """I4: no timer is overdue for longer than it takes an idle engine to look."""
        due_at = replica.service.timers.next_at()
        if due_at is not None and due_at < self._clock.now - MAX_LATENESS_S:
            self._fail(f"I4: a timer of {replica.name} is {self._clock.now - due_at:.2f} s overdue")

    def _check_leases(self, replica: Replica, service: PrefillService) -> None:
        """I1 at the source: while a lease's word is set, none of its blocks can be allocated."""
        assert replica.words is not None
        for lease in service.leases():
            if replica.words[lease.word_index] != lease.lease_id:
                self._fail(
                    f"I1: the word of live lease {lease.lease_id:#x} is {int(replica.words[lease.word_index]):#x}"
                )
            if not replica.scheduler.blocks.all_owned(lease.block_ids):
                self._fail(f"I1: a block of live lease {lease.lease_id:#x} is allocatable")

    def _check_pulls(self, replica: Replica, pulls: Iterable[LocalPull]) -> None:
        """I1 at the destination: a transfer writes only into owned blocks. At the source, a block under a read is free
        only after the word was cleared.
        """
        for pull in pulls:
            if not replica.scheduler.blocks.all_owned(pull.destination_blocks):
                self._fail(f"I1: a pull writes into free blocks of {replica.name}")

    def _check_swaps(self, replica: Replica, pulls: Iterable[LocalPull]) -> None:
        """I2 and I7 for host blocks: each is free or belongs to one sequence, and holds its KV once that is copied. I1:
        no transfer writes into a block that is still to be copied out, and no block that is copied into is free.
        """
        scheduler, host = replica.scheduler, replica.runner.copies.host
        swapped = scheduler.swapped
        owned = [block for _, blocks in swapped for block in blocks]
        if len(set(owned)) != len(owned) or len(owned) + scheduler.num_free_host_blocks != len(host):
            self._fail(
                f"I2: {replica.name}: {len(owned)} host blocks owned, {scheduler.num_free_host_blocks} free of "
                f"{len(host)}"
            )
        batches = [batch for batch, _ in replica.executing]
        coming = {block for batch in batches if batch.swap_out is not None for block in batch.swap_out[:, 1].tolist()}
        for tokens, blocks in swapped:
            kv = (tokens.astype(np.int64) + 1) * np.arange(1, len(tokens) + 1)
            if coming.isdisjoint(blocks) and (host[blocks].reshape(-1)[: len(kv)] != kv).any():
                self._fail(f"I7: {replica.name}: host blocks {blocks} hold other KV than their sequence's")
        for batch in batches:
            if batch.swap_out is not None and not {
                block for pull in pulls for block in pull.destination_blocks
            }.isdisjoint(batch.swap_out[:, 0].tolist()):
                self._fail(f"I1: a pull of {replica.name} writes into blocks that are still to be copied to the host")
            if batch.swap_in is not None and not set(scheduler.blocks.free_in_order()).isdisjoint(
                batch.swap_in[:, 1].tolist()
            ):
                self._fail(f"I1: {replica.name} copies from the host into free blocks")

    def _check_in_flight(self) -> None:
        """I5: the router's counters agree with its open requests."""
        if not self._driver.alive:
            return
        router = self._driver.router
        counted: Counter[object] = Counter()
        for entry in router.active():
            counted[entry.decode] += 1
            if entry.prefill is not None and not entry.decode_seen:
                counted[entry.prefill] += 1
        for replica in router.replicas():
            if replica.in_flight != counted[replica.address]:
                self._fail(
                    f"I5: {replica.address.replica_id} counts {replica.in_flight} in flight, "
                    f"{counted[replica.address]} are"
                )

    def _check_visible(self, replica: Replica) -> None:
        """I8: a block that the prefix cache shows holds exactly the KV of the tokens that its hash stands for."""
        visible = replica.scheduler.blocks.visible()
        if not visible:
            return
        blocks = np.fromiter(visible.values(), np.int64, len(visible))
        try:
            rows = list(map(self._index.__getitem__, visible))
        except KeyError:
            self._fail(f"I8: {replica.name} shows a hash of tokens nobody could have computed")
        if not np.array_equal(replica.cache[blocks], self._contents[rows]):
            wrong = (replica.cache[blocks] != self._contents[rows]).any(axis=1)
            self._fail(f"I8: {replica.name} shows blocks {blocks[wrong].tolist()} with other KV than their hash says")

    def _check_answers(self) -> None:
        """I3, I7 and I13: the delivered tokens are the beginning of the right answer; none is repeated,
        skipped or invented.
        """
        for name in self._driver.heard:
            client = self._driver.clients[name]
            start, new = client.num_checked, client.received[client.num_checked :]
            client.num_checked += len(new)
            if new != client.expected[start : client.num_checked]:
                self._fail(f"I3/I7/I13: {name} received {client.received}, expected {client.expected}")
            asked = client.request.sampling.logprobs is not None
            if client.logprobs[start:] != ([expected_logprobs(token, 1) for token in new] if asked else []):
                self._fail(f"I13: {name} received {client.received} with the logprobs {client.logprobs}")
        self._driver.heard.clear()

    def _expected_contents(self) -> np.ndarray:
        """The KV of every full block that the tokens of any request can fill: int64 [num_hashes, block_size].
        Fills `_index`.
        """
        size = self._scenario.decode.block_size
        contents: list[np.ndarray] = []
        for client in self._scenario.clients:
            prompt = client.request.prompt_token_ids
            answer = expected_tokens(
                prompt.tolist(), client.request.max_tokens or 0, seed=client.request.sampling.seed or 0
            )
            tokens = np.concatenate([prompt, np.array(answer, np.int32)])
            kv = (tokens.astype(np.int64) + 1) * np.arange(1, len(tokens) + 1)
            hashes = chain_hashes(root_hash(LAYOUT, client.request.cache_salt), tokens, size)
            for index, name in enumerate(hashes):
                if name not in self._index:
                    self._index[name] = len(contents)
                    contents.append(kv[index * size : (index + 1) * size])
        return np.stack(contents) if contents else np.zeros((0, size), np.int64)
