"""The invariants of the design, asked of a running simulation after every event."""

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from engine.runners.arithmetic import expected_logprobs, expected_tokens
from prefill_pool.service import PrefillService
from protocol.block_hash import chain_hashes, root_hash

if TYPE_CHECKING:
    from bench.simulator import Replica, Simulation


MAX_LATENESS_S = 0.25
"""Two ticks and a half."""


class Violation(Exception):
    """An invariant does not hold. Carries the seed, so that the run can be had again."""

    def __init__(self, simulation: "Simulation", text: str) -> None:
        super().__init__(f"seed {simulation.seed}, {simulation.clock.now:.4f} s: {text}")
        self.seed = simulation.seed


class Invariants:
    """I1, I2, I3, I4, I5, I7, I8, I13 over one simulation; I11 is checked where messages arrive."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._contents = self._expected_contents()

    def check(self) -> None:
        """After one event."""
        self._check_leases()
        self._check_pulls()
        self._check_swaps()
        self._check_in_flight()
        for replica in self._simulation.replicas.values():
            self._check_timers(replica)
            if not replica.executing:
                self._check_visible(replica)
        self._check_answers()

    def check_end(self) -> None:
        """Everything is quiet: back to the baseline (I2), one terminal event each (I13), the right tokens (I7)."""
        simulation = self._simulation
        for replica in simulation.replicas.values():
            replica.service.check_idle()
        if simulation.router_alive and (any(r.in_flight for r in simulation.router.replicas()) or simulation.router.num_open):
            self._fail("I5: in-flight counters or open requests are left")
        for client in simulation.clients.values():
            name = client.request.request_id
            if not client.closed:
                self._fail(f"I13: {name} has no terminal event")
            if client.ended is not None and client.ended.error is None and client.received != client.expected:
                self._fail(f"I7: {name} finished with {client.received}, expected {client.expected}")
        if simulation.num_faults == 0:
            self._check_no_timer_fired()

    def _fail(self, text: str) -> None:
        raise Violation(self._simulation, text)

    def _check_timers(self, replica: "Replica") -> None:
        """I4: nothing that is due waits for longer than it takes an idle engine to look."""
        due_at = replica.service.timers.next_at()
        if due_at is not None and due_at < self._simulation.clock.now - MAX_LATENESS_S:
            self._fail(f"I4: a timer of {replica.address.replica_id} is {self._simulation.clock.now - due_at:.2f} s overdue")

    def _check_leases(self) -> None:
        """I1, source: while a lease's word is set, none of its blocks can be allocated."""
        for replica in self._simulation.replicas.values():
            service = replica.service
            if not isinstance(service, PrefillService):
                continue
            assert replica.words is not None
            for lease in service.leases():
                if replica.words[lease.slot] != lease.lease_id:
                    self._fail(f"I1: the word of live lease {lease.lease_id:#x} is {int(replica.words[lease.slot]):#x}")
                if not replica.scheduler.blocks.all_owned(lease.block_ids):
                    self._fail(f"I1: a block of live lease {lease.lease_id:#x} is allocatable")

    def _check_pulls(self) -> None:
        """I1, destination: what a transfer writes into is owned. Source: free under a read only after the word was cleared."""
        by_cache = {id(r.cache): r for r in self._simulation.replicas.values()}
        for pull in self._simulation.network.pulls:
            replica = by_cache.get(id(pull.destination.base))
            if replica is not None and not replica.scheduler.blocks.all_owned(pull.destination_blocks):
                self._fail(f"I1: a pull writes into free blocks of {replica.address.replica_id}")

    def _check_swaps(self) -> None:
        """Host blocks: each free or of one sequence, holding its KV once that is copied. I1: what a copy is to read or write is safe."""
        for replica in self._simulation.replicas.values():
            scheduler, name, host = replica.scheduler, replica.address.replica_id, replica.runner.copies.host
            swapped = scheduler.swapped
            owned = [block for _, blocks in swapped for block in blocks]
            if len(set(owned)) != len(owned) or len(owned) + scheduler.num_free_host_blocks != len(host):
                self._fail(f"I2: {name}: {len(owned)} host blocks owned, {scheduler.num_free_host_blocks} free of {len(host)}")
            batches = [batch for batch, _ in replica.executing]
            coming = {block for batch in batches if batch.swap_out is not None for block in batch.swap_out[:, 1].tolist()}
            for tokens, blocks in swapped:
                kv = (tokens.astype(np.int64) + 1) * np.arange(1, len(tokens) + 1)
                if coming.isdisjoint(blocks) and (host[blocks].reshape(-1)[: len(kv)] != kv).any():
                    self._fail(f"I7: {name}: host blocks {blocks} hold other KV than their sequence's")
            for batch in batches:
                if batch.swap_out is not None:
                    pulls = [pull for pull in self._simulation.network.pulls if pull.destination.base is replica.cache]
                    if {block for pull in pulls for block in pull.destination_blocks} & set(batch.swap_out[:, 0].tolist()):
                        self._fail(f"I1: a pull of {name} writes into blocks that are still to be copied to the host")
                if batch.swap_in is not None and scheduler.blocks.num_free_among(batch.swap_in[:, 1].tolist()):
                    self._fail(f"I1: {name} copies from the host into free blocks")

    def _check_in_flight(self) -> None:
        """I5: the router's counters are what its open requests say."""
        router = self._simulation.router
        if not self._simulation.router_alive:
            return
        counted: Counter[object] = Counter()
        for entry in router.active():
            counted[entry.decode] += 1
            if entry.prefill is not None and not entry.decode_seen:
                counted[entry.prefill] += 1
        for replica in router.replicas():
            if replica.in_flight != counted[replica.address]:
                self._fail(f"I5: {replica.address.replica_id} counts {replica.in_flight} in flight, {counted[replica.address]} are")

    def _check_visible(self, replica: "Replica") -> None:
        """I8: what a prefix cache shows holds exactly the KV of the tokens its hash stands for."""
        visible = replica.scheduler.blocks.visible()
        if not visible:
            return
        blocks = np.fromiter(visible.values(), np.int64, len(visible))
        try:
            expected = np.stack([self._contents[name] for name in visible])
        except KeyError:
            self._fail(f"I8: {replica.address.replica_id} shows a hash of tokens nobody could have computed")
        wrong = (replica.cache[blocks] != expected).any(axis=1)
        if wrong.any():
            self._fail(f"I8: {replica.address.replica_id} shows blocks {blocks[wrong].tolist()} with other KV than their hash says")

    def _check_answers(self) -> None:
        """I3, I7, I13: what was delivered is the beginning of the right answer, no token repeated, skipped or invented."""
        for name in self._simulation.heard:
            client = self._simulation.clients[name]
            if client.received != client.expected[: len(client.received)]:
                self._fail(f"I3/I7/I13: {name} received {client.received}, expected {client.expected}")
            asked = client.request.sampling.logprobs is not None
            if client.logprobs != [expected_logprobs(token, 1) for token in client.received if asked]:
                self._fail(f"I13: {name} received {client.received} with the logprobs {client.logprobs}")
        self._simulation.heard.clear()

    def _check_no_timer_fired(self) -> None:
        for replica in self._simulation.replicas.values():
            fired = replica.service.counters["timers_fired"]
            if fired:
                self._fail(f"{fired:g} timers fired at {replica.address.replica_id} in a run without faults")

    def _expected_contents(self) -> dict[bytes, np.ndarray]:
        """KV of every full block that any request's tokens can fill, by hash: int64 [block_size]."""
        size = self._simulation.scenario.decode.block_size
        contents: dict[bytes, np.ndarray] = {}
        for client in self._simulation.clients.values():
            prompt = client.request.prompt_token_ids
            answer = expected_tokens(prompt.tolist(), client.request.max_tokens or 0, seed=client.request.sampling.seed or 0)
            tokens = np.concatenate([prompt, np.array(answer, np.int32)])
            kv = (tokens.astype(np.int64) + 1) * np.arange(1, len(tokens) + 1)
            from bench.simulator import LAYOUT

            for index, name in enumerate(chain_hashes(root_hash(LAYOUT, client.request.cache_salt), tokens, size)):
                contents[name] = kv[index * size : (index + 1) * size]
        return contents
