"""Doors in processes of their own: what happens to them in drawn runs, and what a slow, a dead and an orphaned one mean
for their clients.
"""

from collections import Counter
from dataclasses import replace

import pytest

from protocol.messages import Address
from router.config import RouterConfig
from router.door_link import DoorLink
from router.door_messages import Batch
from router.doors import MAX_BATCHES, Doors, _Door
from simulator.doors import Door, SimulatedDoors
from simulator.scenario import ALL_FAULTS, Client, drawn
from simulator.simulation import Simulation
from tests.simulator.even_scenario import all_right, clients, scenario


def test_the_drawn_faults_reach_what_doors_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    door_up, door_down, hold = Doors.door_up, Doors.door_down, Doors._hold_or_release
    next_batch, down, receive = _Door.next_batch, DoorLink.down, DoorLink.receive

    def up(self: Doors, address: Address) -> None:
        seen["the successor comes before the end of the dead"] += any(
            door.replica_id == address.replica_id for door in self._doors
        )
        door_up(self, address)

    def gone(self: Doors, address: Address) -> None:
        door = self._doors.get(address)
        seen["a dead door has open calls"] += bool(door and door.open)
        seen["a dead door is held"] += bool(door and door.held)
        door_down(self, address)

    def holds(self: Doors, door: _Door) -> None:
        before = door.held
        hold(self, door)
        seen["a full door is held"] += door.held > before
        seen["a held door is released"] += door.held < before

    def batch_of(self: _Door) -> Batch | None:
        seen["steps are joined"] += len(self.on_the_way) == MAX_BATCHES and bool(self.tokens)
        return next_batch(self)

    def orphaned(self: DoorLink) -> None:
        seen["calls end with the core"] += bool(self._receivers)
        seen["a call ends with the core before it is opened"] += bool(self._opening)
        down(self)

    def received(self: DoorLink, batch: Batch) -> None:
        seen["another door's call is aborted"] += any(found for _, found in batch.aborted)
        seen["a call is refused"] += any(refusal for _, refusal in batch.opened)
        receive(self, batch)

    monkeypatch.setattr(Doors, "door_up", up)
    monkeypatch.setattr(Doors, "door_down", gone)
    monkeypatch.setattr(Doors, "_hold_or_release", holds)
    monkeypatch.setattr(_Door, "next_batch", batch_of)
    monkeypatch.setattr(DoorLink, "down", orphaned)
    monkeypatch.setattr(DoorLink, "receive", received)
    faults = replace(ALL_FAULTS, door_kills=4, door_pauses=3, router_kills=2, cancel=0.3)
    for seed in range(1, 41):
        Simulation(drawn(seed, num_decode=2, num_doors=2, num_requests=40, faults=faults)).run()
    print("\n" + "\n".join(f"{count:6} {what}" for what, count in seen.items()))
    assert len(seen) == 10 and min(seen.values()) > 0


def with_doors(load: list[Client], num_doors: int, max_buffered_tokens: int = 16384) -> Simulation:
    planned = scenario(load, prefill_blocks=90, decode_blocks=90)
    router = RouterConfig(max_buffered_tokens=max_buffered_tokens)
    return Simulation(replace(planned, num_doors=num_doors, router=router))


def doors_of(simulation: Simulation) -> SimulatedDoors:
    assert simulation.driver.doors is not None
    return simulation.driver.doors


def play_until(simulation: Simulation, num_tokens: int) -> None:
    """Plays until every client has got so many tokens."""
    while min(len(client.received) for client in simulation.clients.values()) < num_tokens:
        simulation.step()


def test_a_door_that_pauses_gets_few_long_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = with_doors(clients(4, num_prompt=8, num_tokens=60), 1)
    play_until(simulation, 5)
    received: list[Batch] = []
    receive = Door.receive

    def counted(self: Door, connection: object, batch: Batch) -> None:
        if self.resumes_at <= simulation.queue.clock.now:
            received.append(batch)
        receive(self, connection, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Door, "receive", counted)
    (door,) = doors_of(simulation).alive
    door.resumes_at = simulation.queue.clock.now + 5.0
    simulation.run()
    assert all_right(simulation)
    assert len(received) <= MAX_BATCHES + 2
    assert max(len(tokens) for batch in received for tokens in batch.tokens.values()) > 40


def test_only_the_clients_of_a_dead_door_lose_their_calls() -> None:
    simulation = with_doors(clients(8, num_prompt=8, num_tokens=60), 2)
    play_until(simulation, 5)
    dead, other = doors_of(simulation).alive
    doors_of(simulation).kill(dead)
    simulation.run()  # until the core has ended what the dead door left
    assert dead.seats and other.seats and len(dead.seats) + len(other.seats) == 8
    for door in (dead, other):
        for seat in door.seats.values():
            assert seat.client.lost == (door is dead)
            assert (seat.client.received == seat.client.expected) == (door is other)


def test_the_end_of_the_core_is_told_by_every_door_at_once() -> None:
    simulation = with_doors(clients(6, num_prompt=8, num_tokens=60), 2)
    play_until(simulation, 5)
    simulation.driver.kill()
    killed_at = simulation.queue.clock.now
    while not all(client.closed for client in simulation.clients.values()):
        simulation.step()
    assert all(client.lost for client in simulation.clients.values())
    assert simulation.queue.clock.now < killed_at + 0.1
