"""The event-heap driver: the real router, services, schedulers and block managers under a virtual clock, with faults from a seed.

    python -m bench.simulator --first-seed 1 --seeds 500

Only three things are models here: the wire (delays, so that messages overtake each other, and duplicates), the transfer (blocks
move one by one, may fail, may end after their lease died) and the runner (the arithmetic one, whose step takes a drawn time).
Same seed, same run. bench/invariants.py is asked after every event.
"""

import argparse
import heapq
import itertools
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import numpy as np

from bench.invariants import Invariants, Violation
from bench.scenario import ALL_FAULTS, NO_FAULTS, Client, HalfRight, Scenario, drawn
from decode_pool.service import DecodeService
from engine.runner import Batch
from engine.runners.arithmetic import ArithmeticRunner
from engine.scheduler import Scheduler
from kv_transfer.config import TransferConfig
from kv_transfer.lease import LeaseTable
from kv_transfer.local import LocalNetwork, LocalPull, LocalTransport
from prefill_pool.service import PrefillService
from protocol.clock import VirtualClock
from protocol.delivery import Incoming, Outgoing
from protocol.errors import ProtocolError, RequestError, RequestFailed
from protocol.messages import ROUTER_ID, Address, Envelope, Hello, Message
from protocol.router_link import LinkConfig
from router.request import Tokens
from router.router import Router

TICK_S = 0.1
LAYOUT = b"simulated-layout"
TRANSFER = TransferConfig(lease_s=1.0, revoke_s=1.0, pull_timeout_s=2.0)
"""A lease outlives a renewal that is as late as the wire can make it (a third of it, a tick, 0.3 s), and little more."""
LINK = LinkConfig(status_interval_s=1.0, router_timeout_s=10.0)


@dataclass(slots=True)
class Replica:
    """One engine in one epoch, with the shell's job done by the event heap."""

    address: Address
    service: PrefillService | DecodeService
    scheduler: Scheduler
    runner: ArithmeticRunner
    incoming: Incoming
    outgoing: Outgoing
    cache: np.ndarray
    words: np.ndarray | None
    executing: deque[tuple[Batch, float]] = field(default_factory=deque)
    """(batch, seconds it takes) scheduled and not committed, the one that runs first."""
    alive: bool = True
    draining: bool = False


class Simulation:
    """One run of a scenario. `num_events`: actions executed; `log`: readable lines, kept if `logged`."""

    def __init__(self, scenario: Scenario, *, checked: bool = True, logged: bool = False) -> None:
        self.scenario, self.faults, self.seed = scenario, scenario.faults, scenario.seed
        self.random = random.Random(f"run {scenario.seed}")
        """Draws faults and their times; the scenario has its own streams."""
        self.clock = VirtualClock()
        self.network = LocalNetwork()
        self.num_events = self.num_faults = 0
        self.log: list[str] = []
        self._logged = logged
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._epochs = itertools.count(1)
        self._started_pulls: set[int] = set()
        self._submitted: set[str] = set()
        faults = scenario.faults
        self._kills_left, self._router_kills_left, self._drains_left = faults.kills, faults.router_kills, faults.drains
        self._cut: dict[tuple[Address, Address], int] = {}
        """By (dead sender, receiver): the first of its messages that does not arrive."""
        self.replicas: dict[str, Replica] = {}
        self.clients = {client.request.request_id: client for client in scenario.clients}
        self.heard: set[str] = set()
        """Clients that got something since the invariants looked last."""
        self._start_router()
        self.invariants = Invariants(self) if checked else None
        for name, count in (("prefill", scenario.num_prefill), ("decode", scenario.num_decode)):
            for index in range(count):
                self._start_replica(f"{name}-{index}")
        for client in scenario.clients:
            self._at(client.submit_at, partial(self._submit, client))

    # ---- the heap

    def run(self) -> None:
        """Until everything is quiet. Raises Violation."""
        while self._heap and not (self._all_ended() and self._quiet()):
            at, _, action = heapq.heappop(self._heap)
            if at > self.scenario.horizon_s:
                raise Violation(self, f"not quiet after {self.scenario.horizon_s} virtual seconds: {self._what_is_left()}")
            self.clock.advance_to(at)
            self.num_events += 1
            try:
                action()
            except ProtocolError as error:
                raise Violation(self, str(error)) from error
            if self.invariants is not None:
                self.invariants.check()
        if self.invariants is not None:
            self.invariants.check_end()

    def note(self, text: str) -> None:
        if self._logged:
            self.log.append(f"{self.clock.now:9.4f}  {text}")

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.clock.now + delay, next(self._order), action))

    def _chance(self, probability: float) -> bool:
        if probability and self.random.random() < probability:
            self.num_faults += 1
            return True
        return False

    def _all_ended(self) -> bool:
        return all(client.closed for client in self.clients.values())

    def _quiet(self) -> bool:
        return all(r.service.idle and not r.executing for r in self.replicas.values()) and not self.network.pulls

    def _what_is_left(self) -> str:
        left = [c.request.request_id for c in self.clients.values() if not c.closed]
        busy = [r.address.replica_id for r in self.replicas.values() if not r.service.idle]
        return f"requests {left}, engines {busy}, {len(self.network.pulls)} pulls"

    # ---- clients and router

    def _start_router(self) -> None:
        """A router with an empty table and a new epoch; the supervisor tells it which engines live."""
        address = Address(ROUTER_ID, next(self._epochs))
        self.router = Router(self.scenario.router, address=address, clock=self.clock, seed=self.seed)
        self._router_in, self._router_out = Incoming(address, self.clock), Outgoing(address)
        self.router_alive = True
        self.note(f"start router epoch {address.epoch}")
        for replica in self.replicas.values():
            self.router.replica_started(replica.address)
        self._flush_router()
        self._router_tick(self.router)

    def _kill_router(self) -> None:
        self.note("kill router")
        self.router_alive = False
        self._cut_off(self._router_out)
        for client in self.clients.values():
            client.lost = client.lost or (not client.closed and client.request.request_id in self._submitted)
        self._at(self.random.uniform(0.01, 12.0), self._start_router)

    def _submit(self, client: Client) -> None:
        if not self.router_alive:
            client.refused = RequestFailed("the router is down")
            return
        self._submitted.add(client.request.request_id)
        try:
            self.router.submit(client.request)
        except RequestError as error:
            client.refused = error
        else:
            if client.cancel_after_s is not None:
                self._at(client.cancel_after_s, partial(self._cancel, client))
        self._flush_router()

    def _cancel(self, client: Client) -> None:
        if client.closed:
            return
        self.num_faults += 1
        self.note(f"cancel {client.request.request_id}")
        self.router.cancel(client.request.request_id)
        self._flush_router()

    def _router_tick(self, router: Router) -> None:
        if router is not self.router or not self.router_alive:
            return
        if self._router_kills_left and self.clock.now > 0.5 and self._chance(0.008):
            self._router_kills_left -= 1
            self._kill_router()
            return
        self.router.tick()
        for lost in self._router_in.lost():
            self.router.replica_lost(lost)
        for lost in self.router.lost:
            replica = self.replicas.get(lost.replica_id)
            if replica is not None and replica.address == lost:
                self._kill(replica)
        self.router.lost.clear()
        self._flush_router()
        self._at(TICK_S, partial(self._router_tick, router))

    def _flush_router(self) -> None:
        self._send_all(self._router_out, self.router.outbox)
        for event in self.router.events:
            client = self.clients[event.request_id]
            if client.closed:
                raise Violation(self, f"I13: {event} after the terminal event of {event.request_id}")
            if isinstance(event, Tokens):
                client.received.extend(event.token_ids.tolist())
                client.received_at.extend([self.clock.now] * len(event.token_ids))
                self.heard.add(event.request_id)
                client.logprobs.extend(event.logprobs)
            else:
                client.ended = event
                self.note(f"ended {event.request_id}: {event.finish_reason or event.error}")
        self.router.events.clear()

    # ---- the wire

    def _send_all(self, outgoing: Outgoing, outbox: list[tuple[Address, Message]]) -> None:
        for receiver, message in outbox:
            envelope = outgoing.envelope(receiver, message)
            for _ in range(2 if self._chance(self.faults.duplicate) else 1):
                self._at(self.scenario.wire_seconds(), partial(self._arrive, envelope))
        outbox.clear()

    def _cut_off(self, outgoing: Outgoing) -> None:
        """The sender is dead: of what is still under way to each receiver a drawn beginning arrives."""
        for receiver, num_sent in outgoing.sent().items():
            self._cut[outgoing.address, receiver] = max(0, num_sent - self.random.choice([0, 0, 1, 2, 5]))

    def _arrive(self, envelope: Envelope) -> None:
        name = envelope.receiver.replica_id
        if envelope.seq >= self._cut.get((envelope.sender, envelope.receiver), envelope.seq + 1):
            return
        if name == ROUTER_ID:
            if not self.router_alive:
                return
            for ready in self._router_in.accept(envelope):
                self.note(f"{_text(ready)}")
                self.router.handle(ready)
            self._flush_router()
            return
        replica = self.replicas.get(name)
        if replica is None:
            return
        for ready in replica.incoming.accept(envelope):
            self.note(f"{_text(ready)}")
            known = replica.service.keys()
            replica.service.handle(ready)
            if ready.receiver != replica.address and not replica.service.keys() <= known:
                raise Violation(
                    self, f"I11: {_text(ready)} was meant for epoch {ready.receiver.epoch} and left a trace in {replica.address}"
                )
        self._turn(replica)

    # ---- engines

    def _start_replica(self, name: str) -> None:
        address = Address(name, next(self._epochs))
        is_prefill = name.startswith("prefill")
        config = self.scenario.prefill if is_prefill else self.scenario.decode
        cache = np.zeros((config.num_blocks, config.block_size), np.int64)
        blocks = cache.view(np.uint8)
        words = np.zeros(config.num_blocks, np.uint64) if is_prefill else None
        endpoint = f"{name}@{address.epoch}".encode()
        hello = Hello(
            role="prefill" if is_prefill else "decode",
            layout_fingerprint=LAYOUT,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            endpoint=endpoint,
        )
        scheduler = Scheduler(
            config,
            num_blocks=config.num_blocks,
            num_host_blocks=config.num_host_blocks,
            fingerprint=LAYOUT,
            eos_token_ids=(),
            proposer=None if is_prefill else HalfRight(self.seed, self.clients),
            clock=self.clock,
        )
        service: PrefillService | DecodeService
        if words is not None:
            self.network.export(endpoint, blocks, words)
            service = PrefillService(
                address=address,
                scheduler=scheduler,
                leases=LeaseTable(words, address.epoch),
                config=TRANSFER,
                link=LINK,
                hello=hello,
                clock=self.clock,
            )
        else:
            transport = LocalTransport(self.network, blocks)
            service = DecodeService(
                address=address,
                scheduler=scheduler,
                transport=transport,
                config=TRANSFER,
                link=LINK,
                hello=hello,
                block_bytes=32,
                clock=self.clock,
            )
        runner = ArithmeticRunner(cache, num_host_blocks=config.num_host_blocks)
        replica = Replica(address, service, scheduler, runner, Incoming(address, self.clock), Outgoing(address), cache, words)
        self.replicas[name] = replica
        self.note(f"start {name} epoch {address.epoch}")
        if self.router_alive:
            self.router.replica_started(address)
            self._flush_router()
        self._engine_tick(replica)

    def _engine_tick(self, replica: Replica) -> None:
        if not replica.alive:
            return
        if self._kills_left and self.clock.now > 0.5 and self._chance(0.04):
            self._kills_left -= 1
            self._kill(replica)
            return
        if self._drains_left and self.router_alive and self.clock.now > 0.5 and self._chance(0.04):
            self._drains_left -= 1
            replica.draining = True
            self.note(f"drain {replica.address.replica_id}")
            self.router.drain_replica(replica.address, self.random.uniform(0.0, 2.0))
            self._flush_router()
        if replica.draining and replica.service.drained:
            self._kill(replica)
            return
        for lost in replica.incoming.lost():
            if lost.replica_id == ROUTER_ID:
                replica.service.router_gone()
        self._turn(replica)
        self._at(TICK_S, lambda: self._engine_tick(replica))

    def _turn(self, replica: Replica) -> None:
        """What a loop does when it wakes: tick, schedule, send."""
        if not replica.alive:
            return
        service = replica.service
        if len(service.timers) and self._chance(self.faults.early_timer):
            name = self.random.choice(service.timers.names())
            self.note(f"{replica.address.replica_id}: timer {name[0]} of {name[1].request_id} fires early")
            service.timers.set(name, self.clock.now)
        service.tick()
        depth = 2 if replica.scheduler.config.async_scheduling else 1
        while len(replica.executing) < depth and (batch := service.schedule()) is not None:
            self.note(f"{replica.address.replica_id}: step {batch.tray()}")
            seconds = self.scenario.step_seconds(batch) + self.scenario.copy_block_s * _num_copies(batch)
            if self._chance(self.faults.stall):
                seconds += self.random.uniform(1.0, 15.0)
            replica.executing.append((batch, seconds))
            if len(replica.executing) == 1:
                self._at(seconds, partial(self._step_end, replica))
        self._send_all(replica.outgoing, service.outbox)
        self._move_new_pulls()

    def _step_end(self, replica: Replica) -> None:
        """Executed as late as the scheduler must bear: the writes land at the end of the step."""
        if not replica.alive:
            return
        batch, seconds = replica.executing.popleft()
        if replica.executing:
            self._at(replica.executing[0][1], partial(self._step_end, replica))
        if self._chance(self.faults.step_failure):
            self.note(f"{replica.address.replica_id}: step fails")
            replica.service.step_failed("simulated")
        else:
            output = replica.runner.execute(batch)
            output.seconds, output.swap_seconds = seconds, self.scenario.copy_block_s * _num_copies(batch)
            replica.service.commit(output)
        self._turn(replica)

    def _kill(self, replica: Replica) -> None:
        """The process is gone at once; the router hears of it, a successor starts, and reuses the memory, words cleared first."""
        replica.alive = False
        name = replica.address.replica_id
        self.note(f"kill {name} epoch {replica.address.epoch}")
        self._cut_off(replica.outgoing)
        del self.replicas[name]
        if replica.words is not None:
            self.network.remove(f"{name}@{replica.address.epoch}".encode())
        for pull in list(self.network.pulls):
            if pull.destination.base is replica.cache:
                pull.fail("the puller is dead")

        def restart() -> None:
            if replica.words is not None:
                replica.words[:] = 0
            replica.cache[:] = -1
            self._start_replica(name)

        def noticed() -> None:
            if self.router_alive:
                self.router.replica_down(replica.address)
                self._flush_router()

        self._at(self.random.uniform(0.01, 1.0), noticed)
        self._at(self.random.uniform(0.05, 3.0), restart)

    # ---- transfers

    def _move_new_pulls(self) -> None:
        for pull in self.network.pulls:
            if id(pull) not in self._started_pulls:
                self._started_pulls.add(id(pull))
                if self._chance(self.faults.dead_lease):
                    self._at(self.random.uniform(0.0005, 0.01), self._expire_leases)
                    self._at(self.random.uniform(0.02, 0.3), partial(self._move, pull))
                else:
                    self._at(self.scenario.block_seconds(), partial(self._move, pull))

    def _expire_leases(self) -> None:
        """Every lease and revoke timer fires now, whatever is being read under it."""
        for replica in list(self.replicas.values()):
            timers = replica.service.timers
            for name in [name for name in timers.names() if name[0] in ("lease", "revoke")]:
                timers.set(name, self.clock.now)
            self._turn(replica)

    def _move(self, pull: LocalPull) -> None:
        """One block."""
        if self._chance(self.faults.pull_failure / max(1, pull.num_blocks)):
            pull.fail("cut")
        else:
            pull.advance(1)
        if not pull.done:
            self._at(self.scenario.block_seconds(), partial(self._move, pull))
            return
        self._started_pulls.discard(id(pull))
        for replica in list(self.replicas.values()):
            if isinstance(replica.service, DecodeService):
                self._turn(replica)


def _num_copies(batch: Batch) -> int:
    return sum(len(pairs) for pairs in (batch.swap_out, batch.swap_in) if pairs is not None)


def _text(envelope: Envelope) -> str:
    message = envelope.message
    key = getattr(message, "key", None)
    what = f"{key.request_id}#{key.attempt}" if key is not None else ""
    return f"{envelope.sender.replica_id} -> {envelope.receiver.replica_id}: {type(message).__name__} {what}"


POOLS = ((1, 1), (2, 2), (1, 3), (0, 2), (2, 1), (2, 3))
"""(prefill, decode) engines of a drawn run."""


def of_seed(seed: int, *, logged: bool = False) -> Simulation:
    """The run that a seed stands for, sizes included: 2 to 5 engines, 40 to 50 requests, one in five without faults."""
    draw = random.Random(f"sizes {seed}")
    num_prefill, num_decode = draw.choice(POOLS)
    faults = NO_FAULTS if draw.random() < 0.2 else ALL_FAULTS
    scenario = drawn(seed, num_prefill=num_prefill, num_decode=num_decode, num_requests=draw.randint(40, 50), faults=faults)
    return Simulation(scenario, logged=logged)


def show_seed(seed: int, show: Callable[[str], None]) -> bool:
    """Runs one seed and shows its log, then its verdict. False: it broke an invariant."""
    simulation = of_seed(seed, logged=True)
    verdict = "no violation"
    try:
        simulation.run()
    except Violation as violation:
        verdict = str(violation)
    for line in simulation.log:
        show(line)
    print(f"seed {seed}: {len(simulation.clients)} requests, {simulation.num_faults} faults, {simulation.num_events} events: {verdict}")
    return verdict == "no violation"


def run_seed(seed: int) -> Counter[str]:
    """Raises Violation if the run breaks an invariant."""
    simulation = of_seed(seed)
    simulation.run()
    return Counter(seeds=1, requests=len(simulation.clients), faults=simulation.num_faults, events=simulation.num_events)


def run_seeds(first_seed: int, num_seeds: int, *, processes: int = 1) -> Counter[str]:
    """Sums over all seeds. Raises Violation at the first that breaks an invariant."""
    seeds = range(first_seed, first_seed + num_seeds)
    if processes == 1:
        return sum(map(run_seed, seeds), Counter())
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(run_seed, seeds, chunksize=20), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description="Run seeded fault schedules; exit 1 at the first violation.")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    started = time.perf_counter()
    try:
        totals = run_seeds(arguments.first_seed, arguments.seeds, processes=arguments.processes)
    except Violation as violation:
        print(violation)
        print(f"twopass simulate --seed {violation.seed} --replay shows it")
        sys.exit(1)
    seconds = time.perf_counter() - started
    print(", ".join(f"{totals[name]} {name}" for name in ("seeds", "requests", "faults", "events")) + f", no violation, {seconds:.1f} s")


if __name__ == "__main__":
    main()
