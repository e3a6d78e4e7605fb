"""One deployment from its first process to its last: placement, epochs, replacement of dead processes, drain.

1. The model is checked and Ray is opened. If that fails, nothing else has started.
2. Engines, router and doors start side by side. Engines take longest, so they get the processes that Ray has ready.
3. Once the router is up, it is told of each engine that has started and speaks first; the engine answers with `Hello`.
4. `watch` looks at every process. A dead engine is reported to the router, its shared memory is removed, and a new one
   starts under a higher epoch. A dead router is replaced on the same port, also under a higher epoch, and the new one
   is told of every live engine, and of what administrators have ordered. The requests of the dead router are lost.
   Doors have its ports, and find the new one. A dead door is replaced too; it loses its own calls.
5. `drain` lets open requests end. `stop` ends all processes and leaves no process, shared memory, folder or port.
6. When a part of Ray itself dies, nothing can be watched or replaced any more: every step raises ClusterLost.

These steps are in one file, because each of them reads or changes the same few processes.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from cluster import preflight, served_model
from cluster.config import ClusterConfig, PoolConfig
from cluster.cores import Core, own_cores, usable_cores, with_threads
from cluster.ray_address import is_given
from cluster.ray_cluster import Bundle, RayCluster
from cluster.ray_handles import Actor, ActorDied, Mailbox
from cluster.replica_process import ReplicaProcess
from cluster.reserved_port import ReservedPort
from cluster.timings import COMMAND
from kv_transfer.segment import PREFIX, remove_stale
from protocol.errors import CapacityError, ClusterLost, StartupError
from protocol.log import LogLevel
from protocol.messages import ROUTER_ID, Address
from protocol.start_times import Phase, phase, phases
from router.admin import Orders
from router.config import Ports

if TYPE_CHECKING:
    from router.policy import ReplicaView

START_TIMEOUT_S = 300.0
"""Longest start of an engine, which may read its weights from a slow disk."""
GREETING_TIMEOUT_S = 30.0
"""Longest wait until the router has every engine's `Hello`. It takes one message in each direction."""
STOP_TIMEOUT_S = 5.0
"""Longest wait for all processes to give their memory back before they are killed."""
ROUTER_STALL_TIMEOUT_S = 60.0
"""A router that leaves a question unanswered for longer counts as dead; an engine has its own `stall_timeout_s`."""
STABLE_S = 60.0
"""A process that lived this long is replaced at once. Others wait longer each time, up to `MAX_DELAY_S`."""
MAX_DELAY_S = 30.0

Progress = Callable[[str], None]


@dataclass(slots=True)
class Deployment:
    """A running system. As a context manager it stops everything at the end, whatever happens inside."""

    config: ClusterConfig
    progress: Progress
    prefix: str = field(default_factory=lambda: f"{PREFIX}{secrets.token_hex(4)}-")
    """Begins the name of every shared-memory file of this deployment. Without its last dash it is the Ray namespace."""
    ports: Ports = field(init=False)
    """Where the deployment listens, once it has started."""
    _asked: Ports = field(init=False)
    """The ports that a router is asked to listen on."""
    _epoch: int = 0
    _ray: RayCluster = field(init=False)
    _router: ReplicaProcess = field(default_factory=lambda: ReplicaProcess(ROUTER_ID, "router", None))
    _doors: list[ReplicaProcess] = field(default_factory=list)
    _engines: list[ReplicaProcess] = field(default_factory=list)
    _reserved: ExitStack = field(default_factory=ExitStack)
    """The ports that doors share."""
    _cpus: list[Core | None] = field(default_factory=list)
    """By bundle: the engine's own CPUs; None where engines share cores, or Ray may place them elsewhere."""
    _vocab_size: int = 0
    _orders: Orders = field(default_factory=lambda: Orders(frozenset(), {}))
    """What administrators have ordered of the router, as it said last."""
    _levels: dict[str, tuple[Address, LogLevel]] = field(default_factory=dict)
    """By replica id: which process was told which log level last."""
    _drained_at: float | None = None
    """Time at which the drain must be over; None before it begins."""

    def __post_init__(self) -> None:
        self._ray = RayCluster(self._namespace, self.prefix)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def actor(self, replica_id: str) -> Actor:
        """The process that now fills the place of an engine or a door, or of the router if `replica_id` is `ROUTER_ID`.

        Raises KeyError for an unknown place, and StartupError for an empty one.
        """
        return {place.replica_id: place for place in self._places}[replica_id].live

    def loads(self) -> "list[ReplicaView]":
        """What the router knows of every engine that has sent it a `Hello`; empty while the router is dead."""
        loads: list[ReplicaView] | None = self._ask_router("loads")
        return loads or []

    def start_times(self) -> dict[str, list[Phase]]:
        """What this process and those that answer did when while they started, by their names."""
        times = {COMMAND: phases()}
        for place in self._places:
            with suppress(ActorDied, StartupError):
                times[place.replica_id] = place.live.call("start_times", timeout_s=self._patience_s())
        return times

    def watch(self, timeout_s: float = 0.25) -> None:
        """Looks at every process once, then waits `timeout_s`. Raises ClusterLost."""
        self._ray.check()
        now = time.monotonic()
        if not (self._drained_at is not None and self._router.state == "down"):
            self._watch(self._router, now)
        for door in self._doors:
            self._watch(door, now)
        lost: list[Address] = self._ask_router("take_lost") or []
        for engine in self._engines:
            if engine.actor is not None and engine.actor.address in lost:
                self._replace_dead(engine, "its messages do not arrive", now)
            else:
                self._watch(engine, now)
        self._follow_orders()
        time.sleep(timeout_s)

    def drain(self, deadline_s: float) -> int | None:
        """Refuses new requests and waits up to `deadline_s` for open ones. Returns how many did not end in time, or
        None if the router died and all of them are lost.
        """
        self._drained_at = time.monotonic() + deadline_s
        try:
            router = self._router.live
            router.call("drain", deadline_s, timeout_s=self._patience_s())
            while num_open := int(router.call("num_open", timeout_s=self._patience_s())):
                if time.monotonic() >= self._drained_at:
                    break
                self.watch()
            return num_open + int(router.call("num_cut_short", timeout_s=self._patience_s()))
        except (ActorDied, StartupError):
            return None

    def stop(self) -> None:
        """Ends all processes and removes what they leave behind. Open requests are lost."""
        places = [place for place in self._places if place.actor is not None]
        try:
            self._ray.check()
            stopping = [place.live.start("stop") for place in places if place.state == "up"]
            until = time.monotonic() + STOP_TIMEOUT_S
            for reference in stopping:
                self._ray.ready(reference, max(0.0, until - time.monotonic()))
            if self._ray.folder is None:  # a private Ray takes its actors with it
                for place in places:
                    place.live.kill()
        except ClusterLost:
            pass
        finally:
            for place in places:
                place.actor = None
            self._ray.close()
            self._reserved.close()

    def _start(self) -> None:
        with phase("checks"):
            bundles = self._check()
        self.progress("starting Ray")
        with phase("Ray"):
            self._ray.open(
                num_cpus=sum(bundle.num_cpus for bundle in bundles),
                num_gpus=sum(bundle.num_gpus for bundle in bundles),
                meanwhile=lambda: import_module("cluster.launch"),
            )
            self._ray.place(bundles)
        others = [place.replica_id for place in (*self._doors, *self._engines)]
        self.progress(f"starting the router, {', '.join(others)}")
        with phase("router and engines"):
            for place in (*self._engines, *self._doors, self._router):
                self._launch(place)
            for place in self._places:
                self._await_first_start(place)
        with phase("greetings"):
            self._await_greetings()

    def _check(self) -> list[Bundle]:
        """Checks the model and the machine, and returns what the engines take of it."""
        cores = [] if is_given() else usable_cores()  # a given Ray may place the engines on another machine
        self.config = config = served_model.with_dtype(with_threads(self.config, len(cores)))
        served = served_model.serve_model(config)
        self._vocab_size = served.vocab_size
        for warning in served_model.limit_warnings(config, served):
            self.progress(f"warning: {warning}")
        remove_stale()
        if not is_given():
            needs = preflight.needs_of(config)
            preflight.check(needs, preflight.this_machine(with_gpus=needs.num_gpus > 0))
        self._reserve_ports()
        names = [(f"{name}-{i}", name) for name, pool in config.pools.items() for i in range(pool.replicas)]
        self._doors = [ReplicaProcess(f"door-{i}", "door", None) for i in range(config.router.doors)]
        self._engines = [ReplicaProcess(name, role, bundle) for bundle, (name, role) in enumerate(names)]
        bundles = [Bundle(pool.threads, pool.num_gpus) for pool in map(self._pool, self._engines)]
        self._cpus = own_cores([bundle.num_cpus for bundle in bundles], cores)
        return bundles

    def _reserve_ports(self) -> None:
        """Decides which ports are asked for. Those of doors are reserved, so that all doors get the same."""
        asked = self.config.router
        ports = asked.ports
        if asked.doors:
            grpc = self._reserved.enter_context(ReservedPort("grpc_port", asked.grpc_host, asked.grpc_port))
            ports = ports._replace(grpc_port=grpc.port)
            if asked.http_port is not None:
                http = self._reserved.enter_context(ReservedPort("http_port", asked.http_host, asked.http_port))
                ports = ports._replace(http_port=http.port)
        self.ports = self._asked = ports

    def _await_first_start(self, place: ReplicaProcess) -> None:
        if not self._ray.ready(place.pending, START_TIMEOUT_S):
            raise CapacityError(f"{place.replica_id} has not started within {START_TIMEOUT_S:g} s")
        try:
            answer = self._ray.result(place.pending)
        except ActorDied as error:
            raise StartupError(f"{place.replica_id} died while starting: {error}") from None
        self._came_up(place, answer, time.monotonic())

    def _await_greetings(self) -> None:
        """Waits until the router hears every engine and every door. Raises StartupError if that takes too long."""
        until = time.monotonic() + GREETING_TIMEOUT_S
        while missing := self._unheard():
            if time.monotonic() > until:
                raise StartupError(f"the router has heard nothing from {', '.join(missing)}")
            self.watch(0.02)

    def _unheard(self) -> list[str]:
        heard = {load.address for load in self.loads()}
        connected = self._ask_router("doors") or []
        return [
            *(door.replica_id for door in self._doors if door.replica_id not in connected),
            *(e.replica_id for e in self._engines if e.actor is None or e.actor.address not in heard),
        ]

    def _launch(self, place: ReplicaProcess) -> None:
        config, now = self.config, time.monotonic()
        address, mailbox = Address(place.replica_id, self._next_epoch()), Mailbox(self._namespace)
        from cluster import launch  # has been imported while Ray started

        ports, vocab_size = self.ports, self._vocab_size
        if place.role == "router":
            kind, arguments = launch.router(config, address, mailbox, self.prefix, ports=ports, vocab_size=vocab_size)
        elif place.role == "door":
            kind, arguments = launch.door(config, address, self.prefix, ports=ports, vocab_size=vocab_size)
        else:
            assert place.bundle is not None, "every engine has one"
            cpus = self._cpus[place.bundle]
            kind, arguments = launch.engine(place.role, config, address, mailbox, self.prefix, cpus)
        place.actor = self._ray.spawn(kind, address, *arguments, bundle=place.bundle)
        place.state, place.since = "starting", now
        place.ask("start", now)

    def _came_up(self, place: ReplicaProcess, answer: Any, now: float) -> None:
        """Notes that a process has started. `answer` is what its `start` returned: the ports if it is a router."""
        place.state, place.since = "up", now
        place.ask("failure", now)
        if place.role == "router":
            self.ports = answer
            self._ask_router("restore", self._orders)
            for engine in self._engines:
                if engine.state == "up":
                    self._ask_router("replica_started", engine.live.address)
        elif place.role != "door":
            self._ask_router("replica_started", place.live.address)
        if self._router.state == "up":
            for door in self._doors:
                if door.state == "up" and place in (door, self._router):
                    door.live.start("core_up", self._router.live.address)

    def _follow_orders(self) -> None:
        """Keeps what administrators have ordered for the next router, and tells every process its log level."""
        self._orders = self._ask_router("orders") or self._orders
        for place in self._places:
            level = self._orders.level_of(place.replica_id)
            if place.state != "up" or level is None:
                continue
            told = place.live.address, level
            if self._levels.get(place.replica_id) != told:
                place.live.start("set_log_level", level)
                self._levels[place.replica_id] = told

    def _watch(self, place: ReplicaProcess, now: float) -> None:
        if place.state == "down":
            if now >= place.since:
                self._launch(place)
            return
        if not self._ray.ready(place.pending, 0):
            limit_s = START_TIMEOUT_S if place.state == "starting" else self._stall_timeout_s(place)
            if now - place.asked_at > limit_s:
                self._replace_dead(place, f"it has not answered for {limit_s:g} s", now)
            return
        try:
            answer = self._ray.result(place.pending)
        except ActorDied:
            self._replace_dead(place, "its process died", now)
        except StartupError as error:
            self._replace_dead(place, str(error), now)
        else:
            if place.state == "starting":
                self._came_up(place, answer, now)
                self.progress(f"{place.replica_id} is back")
            elif answer:
                self._replace_dead(place, answer, now)
            else:
                place.ask("failure", now)

    def _replace_dead(self, place: ReplicaProcess, failure: str, now: float) -> None:
        if place.state == "up" and place.role in self.config.pools:
            self._ask_router("replica_down", place.live.address)
        elif place.state == "starting" and place.role == "router":
            # Another process may have taken a port that the system had chosen, so the system may choose again.
            self.ports = self._asked
        if place.state == "up" and now - place.since > STABLE_S:
            place.num_deaths = 0
        place.live.kill()
        remove_stale(self.prefix)
        delay_s = min(MAX_DELAY_S, 2.0**place.num_deaths - 1)
        self.progress(f"{place.replica_id} is down: {failure}; a new one starts in {delay_s:g} s")
        place.num_deaths += 1
        place.state, place.since, place.actor = "down", now + delay_s, None

    def _ask_router(self, method: str, *args: object) -> Any:
        """Calls the router. Returns None while it is dead: `_came_up` tells its successor all that it needs to know."""
        router = self._router.actor
        if router is None or self._router.state != "up":
            return None
        try:
            return router.call(method, *args, timeout_s=self._patience_s())
        except ActorDied:
            return None

    @property
    def _places(self) -> list[ReplicaProcess]:
        return [self._router, *self._doors, *self._engines]

    def _pool(self, engine: ReplicaProcess) -> PoolConfig:
        return self.config.prefill if engine.role == "prefill" else self.config.decode

    def _stall_timeout_s(self, place: ReplicaProcess) -> float:
        if place.role in ("router", "door"):
            return ROUTER_STALL_TIMEOUT_S
        return self._pool(place).engine.stall_timeout_s

    def _patience_s(self) -> float:
        """Longest wait for an answer of the router. A drain shortens it to the time that is left, but not below 1 s."""
        if self._drained_at is None:
            return ROUTER_STALL_TIMEOUT_S
        return min(ROUTER_STALL_TIMEOUT_S, max(1.0, self._drained_at - time.monotonic()))

    @property
    def _namespace(self) -> str:
        return self.prefix.rstrip("-")

    def _next_epoch(self) -> int:
        """The next epoch. Epochs strictly increase over all processes through the life of the deployment."""
        self._epoch += 1
        return self._epoch
