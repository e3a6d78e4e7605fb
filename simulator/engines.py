"""The engines of a simulated run, and what `engine/loop.py` does for real ones: messages, ticks, steps, pulls."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from decode_pool.service import DecodeService
from engine.runner import Batch
from kv_transfer.lease import LeaseTable, Words
from kv_transfer.transports.local import LocalNetwork, LocalPull
from protocol.messages import ROUTER_ID, Address, Envelope
from protocol.timers import Timers
from simulator.audit import Audit
from simulator.connections import Connections
from simulator.drafts import HalfRight
from simulator.event_queue import EventQueue
from simulator.replica import Replica, build
from simulator.router_driver import TICK_S, RouterDriver
from simulator.scenario import Scenario
from simulator.violation import Violation
from simulator.wire import Wire, text


class Engines:
    """`replicas` are the engines that live, by replica id. `touched` are those to which something has happened since
    the invariants looked last.
    """

    def __init__(
        self,
        queue: EventQueue,
        scenario: Scenario,
        wire: Wire,
        driver: RouterDriver,
        epochs: Iterator[int],
        audit: Audit | None,
    ) -> None:
        self._queue, self._scenario, self._wire, self._driver = queue, scenario, wire, driver
        self._epochs, self._audit = epochs, audit
        self.network = LocalNetwork()
        self.replicas: dict[str, Replica] = {}
        self.touched: dict[str, Replica] = {}
        self.awaited: set[str] = set()
        """Names of dead engines whose successors have not started yet."""
        self._moving: set[LocalPull] = set()
        """Pulls that hold a channel."""
        self._stalled: set[LocalPull] = set()
        """Moving pulls that have stalled and wait to be asked to end."""
        self._seen: set[LocalPull] = set()
        """Pulls that the audit has counted."""
        self._connections = Connections(queue, scenario, self.network, self.turn)

    def start(self, name: str) -> Replica:
        address = Address(name, next(self._epochs))
        is_decode = name.startswith("decode")
        replica = build(
            self._scenario,
            address,
            network=self.network,
            clock=self._queue.clock,
            proposer=HalfRight(self._scenario.seed, self._driver.clients) if is_decode else None,
            leases_of=self._lease_table,
        )
        self.replicas[name] = replica
        self._wire.inlets[name] = partial(self._arrived, replica)
        self._queue.note(f"start {name} epoch {address.epoch}")
        if self._driver.alive:
            self._driver.router.replica_started(address)
            self._driver.flush()
        self._tick(replica)
        return replica

    def _lease_table(self, replica: Replica, words: Words) -> LeaseTable:
        if self._audit is not None:
            return self._audit.engine(replica).lease_table(words)
        return LeaseTable(words, replica.address.epoch)

    def end(self, replica: Replica) -> None:
        """The process is gone at once. Peers that read from its memory go on reading."""
        replica.alive = False
        self._queue.note(f"end {replica.name} epoch {replica.address.epoch}")
        self._wire.cut_off(replica.outgoing)
        del self.replicas[replica.name], self._wire.inlets[replica.name]
        self.touched.pop(replica.name, None)
        if replica.is_prefill:
            self.network.remove(replica.endpoint)
        for pull in list(self.network.pulls):
            if pull.destination.base is replica.cache:
                pull.fail("the puller is dead")
                self._moving.discard(pull)
                self._stalled.discard(pull)
        self._connections.end(replica)
        self.network.peers = [peer for peer in self.network.peers if peer.cache.base is not replica.cache]
        if self._audit is not None:
            self._audit.engine(replica).check()

    @property
    def quiet(self) -> bool:
        return (
            not self.awaited
            and not self.network.pulls
            and all(r.service.idle and not r.executing for r in self.replicas.values())
        )

    # ---- messages and ticks

    def _arrived(self, replica: Replica, envelope: Envelope) -> None:
        for ready in replica.incoming.accept(envelope):
            if self._queue.logged:
                self._queue.note(text(ready))
            if self._audit is not None:
                self._audit.engine(replica).hears(ready)
            replica.doing = ready
            if ready.receiver == replica.address:
                replica.service.handle(ready)
            else:
                self._handle_stale(replica, ready)
            replica.doing = None
        self.turn(replica)

    def _handle_stale(self, replica: Replica, envelope: Envelope) -> None:
        """I11: a message for another life of an engine leaves nothing behind."""
        known = replica.service.keys()
        replica.service.handle(envelope)
        if not replica.service.keys() <= known:
            epoch = envelope.receiver.epoch
            raise self._violation(
                f"I11: {text(envelope)} was meant for epoch {epoch} and left a trace in {replica.address}"
            )

    def _tick(self, replica: Replica) -> None:
        if not replica.alive:
            return
        for lost in replica.incoming.lost():
            if lost.replica_id == ROUTER_ID:
                replica.service.router_gone()
        self.turn(replica)
        self._queue.at(TICK_S, partial(self._tick, replica))

    def turn(self, replica: Replica) -> None:
        """Does what a loop does when it wakes: tick, schedule, send."""
        if not replica.alive:
            return
        queue, service = self._queue, replica.service
        if len(service.timers) and queue.chance(self._scenario.faults.early_timer):
            timers: Timers[Any] = service.timers
            name = queue.random.choice(timers.names())
            queue.note(f"{replica.name}: timer {name[0]} of {name[1].request_id} fires early")
            timers.set(name, queue.clock.now)
        service.tick()
        self._schedule(replica)
        self._flush(replica)
        if isinstance(service, DecodeService):
            self._connections.plan(replica)
            self._move_new_pulls(replica)
        self.touched[replica.name] = replica

    def _flush(self, replica: Replica) -> None:
        outbox = replica.service.outbox
        for receiver, message in outbox:
            envelope = replica.outgoing.envelope(receiver, message)
            if self._audit is not None:
                self._audit.engine(replica).says(envelope)
            self._wire.send(envelope)
        outbox.clear()
        if self._audit is not None:
            self._audit.refusals.check()

    # ---- steps

    def _schedule(self, replica: Replica) -> None:
        depth = 2 if replica.config.async_scheduling else 1
        executing, audit = replica.executing, self._audit.engine(replica) if self._audit is not None else None
        while len(executing) < depth:
            standing = audit.standing() if audit is not None else []
            batch = replica.service.schedule()
            if audit is not None:
                audit.check_step(standing, batch)
            if batch is None:
                return
            if self._queue.logged:
                self._queue.note(f"{replica.name}: step {batch.num_scheduled_tokens()}")
            seconds = self._scenario.step_seconds(batch) + self._scenario.copy_block_s * _num_copies(batch)
            if self._queue.chance(self._scenario.faults.stall):
                seconds += self._queue.random.uniform(1.0, 15.0)
                self._queue.note(f"{replica.name}: the step takes {seconds:.1f} s")
            executing.append((batch, seconds))
            if len(executing) == 1:
                self._queue.at(seconds, partial(self._step_end, replica))

    def _step_end(self, replica: Replica) -> None:
        """Executes the oldest step. The writes land at the end of its time, as late as the scheduler must allow."""
        if not replica.alive:
            return
        batch, seconds = replica.executing.popleft()
        if replica.executing:
            self._queue.at(replica.executing[0][1], partial(self._step_end, replica))
        if self._queue.chance(self._scenario.faults.step_failure):
            self._queue.note(f"{replica.name}: step fails")
            replica.service.step_failed("simulated")
        else:
            output = replica.runner.execute(batch)
            output.seconds, output.swap_seconds = seconds, self._scenario.copy_block_s * _num_copies(batch)
            if self._audit is not None:
                self._audit.engine(replica).commits(batch)
            replica.service.commit(output)
        self.turn(replica)

    # ---- pulls

    def _move_new_pulls(self, replica: Replica) -> None:
        """Starts to move pulls in their order, as many at once as there are channels. A stalled pull holds its channel
        until it is asked to end.
        """
        pulls = [pull for pull in self.network.pulls if pull.destination.base is replica.cache]
        if self._audit is not None:
            self._audit.engine(replica).pulls(len(set(pulls) - self._seen))
            self._seen.update(pulls)
        for pull in pulls[: self._scenario.num_channels]:
            if pull in self._stalled and pull.cancelled:
                self._stalled.discard(pull)
                self._queue.at(self._scenario.block_seconds(), partial(self._move, pull))
            if pull in self._moving:
                continue
            self._moving.add(pull)
            if self._queue.chance(self._scenario.faults.dead_lease):
                self._queue.at(self._queue.random.uniform(0.0005, 0.01), self._expire_leases)
                self._queue.at(self._queue.random.uniform(0.02, 0.3), partial(self._move, pull))
            else:
                self._queue.at(self._scenario.block_seconds(), partial(self._move, pull))

    def _expire_leases(self) -> None:
        """Every lease timer and revoke timer fires now, whatever is being read under the lease."""
        self._queue.note("all leases expire")
        for replica in list(self.replicas.values()):
            timers: Timers[Any] = replica.service.timers
            for name in [name for name in timers.names() if name[0] in ("lease", "revoke")]:
                timers.set(name, self._queue.clock.now)
            self.turn(replica)

    def _move(self, pull: LocalPull) -> None:
        """Moves one block, or lets a fault happen to the pull."""
        faults = self._scenario.faults
        if not pull.done and not pull.cancelled and self._queue.chance(faults.pull_stall / max(1, pull.num_blocks)):
            self._queue.note("a pull stalls")
            self._stalled.add(pull)
            return
        if self._queue.chance(faults.pull_failure / max(1, pull.num_blocks)):
            self._queue.note("a pull is cut")
            pull.fail("cut")
        else:
            pull.advance(1)
            checked = self._scenario.transfer.checksum and pull.num_moved
            if checked and self._queue.chance(faults.corruption / pull.num_blocks):
                self._corrupt(pull.destination[pull.destination_blocks[pull.num_moved - 1]])
        if not pull.done:
            self._queue.at(self._scenario.block_seconds(), partial(self._move, pull))
            return
        self._moving.discard(pull)
        for replica in list(self.replicas.values()):
            if pull.destination.base is replica.cache:
                self.turn(replica)

    def _corrupt(self, block: np.ndarray) -> None:
        """Flips one bit of a block, uint8 [block_bytes], that has just arrived."""
        index, bit = self._queue.random.randrange(len(block)), self._queue.random.randrange(8)
        block[index] ^= 1 << bit
        self._queue.note(f"bit {bit} of byte {index} of a pulled block is flipped")

    def _violation(self, what: str) -> Violation:
        return Violation(self._scenario.seed, self._queue.clock.now, what)


def _num_copies(batch: Batch) -> int:
    if batch.swap_out is None and batch.swap_in is None:
        return 0
    return sum(len(pairs) for pairs in (batch.swap_out, batch.swap_in) if pairs is not None)
