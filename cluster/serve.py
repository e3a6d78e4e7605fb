"""One deployment from its first process to its last: placement, epochs, replacement of the dead, drain.

1. The model is checked and Ray opened; nothing else has started if that fails.
2. The router starts first, so that engines have someone to greet, and takes its port.
3. Engines start side by side. A new one is made known to the router, which speaks first; the engine answers with
   `Hello`.
4. `watch` looks at every process. A dead engine is reported to the router, its memory removed, and it comes back under
   a higher epoch. A dead router comes back on the same port, under a higher epoch too, and is told of every live
   engine; the requests it had are lost.
5. `drain` lets open requests end; `stop` ends all processes and leaves no process, shared memory, folder or port
   behind.
6. When a part of Ray itself dies, nothing can be watched or replaced any more: every step raises ClusterLost.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from cluster import build
from cluster.config import ClusterConfig, PoolConfig
from cluster.ray_cluster import Bundle, RayCluster
from cluster.ray_handles import Actor, ActorDied, Mailbox
from decode_pool.actor import DecodeActor
from kv_transfer.segment import PREFIX, remove_stale
from prefill_pool.actor import PrefillActor
from protocol.errors import CapacityError, ClusterLost, StartupError
from protocol.messages import ROUTER_ID, Address, PoolName
from router.actor import RouterActor
from router.policy import ReplicaView

START_TIMEOUT_S = 300.0
"""Longest start of an engine: weights from a slow disk."""
GREETING_TIMEOUT_S = 30.0
"""Longest wait until the router has every engine's `Hello`: it takes one message each way."""
STOP_TIMEOUT_S = 5.0
"""Longest wait for all processes to give their memory back before they are killed."""
ROUTER_STALL_TIMEOUT_S = 60.0
"""A router that leaves a question unanswered for longer counts as dead; an engine has its own `stall_timeout_s`."""
STABLE_S = 60.0
"""What lived this long starts again at once; others wait longer each time, up to `MAX_DELAY_S`."""
MAX_DELAY_S = 30.0

Progress = Callable[[str], None]
Role = Literal["router", PoolName]


@dataclass(slots=True)
class ReplicaProcess:
    """The router, or one engine of a pool: what is always there again, and the process that fills it now."""

    replica_id: str
    role: Role
    bundle: int | None
    """Index of the engine's part of the machine; None: beside the supervisor."""
    actor: Actor | None = None
    state: Literal["starting", "up", "down"] = "down"
    pending: Any = None
    """Reference of `start` in "starting", of the last `failure` in "up"."""
    asked_at: float = 0.0
    """Of `pending`."""
    since: float = 0.0
    """When the state began; in "down": when to start again."""
    num_deaths: int = 0
    """In a row, without `STABLE_S` in between."""

    @property
    def live(self) -> Actor:
        """The process that fills it. Raises StartupError while there is none."""
        if self.actor is None:
            raise StartupError(f"{self.replica_id} is down")
        return self.actor

    def ask(self, method: str, now: float) -> None:
        self.pending, self.asked_at = self.live.start(method), now


@dataclass(slots=True)
class Deployment:
    """A running system. A context manager: whatever happens inside, all is stopped at the end."""

    config: ClusterConfig
    progress: Progress
    prefix: str = field(default_factory=lambda: f"{PREFIX}{secrets.token_hex(4)}-")
    """Of every shared-memory file of this deployment; without its last dash also the Ray namespace."""
    port: int = 0
    """Where gRPC is served."""
    metrics_port: int = 0
    """Where Prometheus scrapes."""
    _epoch: int = 0
    _ray: RayCluster = field(init=False)
    _router: ReplicaProcess = field(default_factory=lambda: ReplicaProcess(ROUTER_ID, "router", None))
    _engines: list[ReplicaProcess] = field(default_factory=list)
    _vocab_size: int = 0
    _drained_at: float | None = None
    """When the drain is over; None before it begins."""

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
        """The process that fills a place now, `ROUTER_ID` included. Raises KeyError for an unknown place, StartupError
        for an empty one.
        """
        return {place.replica_id: place for place in (self._router, *self._engines)}[replica_id].live

    def loads(self) -> list[ReplicaView]:
        """What the router knows of every engine that has greeted it; a dead one knows of none."""
        loads: list[ReplicaView] | None = self._ask_router("loads")
        return loads or []

    def watch(self, timeout_s: float = 0.25) -> None:
        """One look at every process, then waits `timeout_s`. Raises ClusterLost."""
        self._ray.check()
        now = time.monotonic()
        if not (self._drained_at is not None and self._router.state == "down"):
            self._watch(self._router, now)
        lost: list[Address] = self._ask_router("take_lost") or []
        for engine in self._engines:
            if engine.actor is not None and engine.actor.address in lost:
                self._replace_dead(engine, "its messages do not arrive", now)
            else:
                self._watch(engine, now)
        time.sleep(timeout_s)

    def drain(self, deadline_s: float) -> int | None:
        """Takes nothing new and waits for open requests; returns how many did not end in time. None: the router died,
        all are lost.
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
        """Ends every process and removes what they leave. Open requests are lost."""
        places = [place for place in (self._router, *self._engines) if place.actor is not None]
        try:
            self._ray.check()
            stopping = [place.live.start("stop") for place in places if place.state == "up"]
            until = time.monotonic() + STOP_TIMEOUT_S
            for reference in stopping:
                self._ray.ready(reference, max(0.0, until - time.monotonic()))
            if self._ray.folder is None:  # what a private Ray carries ends with it
                for place in places:
                    place.live.kill()
        except ClusterLost:
            pass
        finally:
            for place in places:
                place.actor = None
            self._ray.close()

    def _start(self) -> None:
        config = self.config
        served = build.serve_model(config)
        self._vocab_size = served.vocab_size
        for warning in build.limit_warnings(config, served):
            self.progress(f"warning: {warning}")
        remove_stale()
        self.port, self.metrics_port = config.router.grpc_port, config.router.metrics_port
        names = [(f"{name}-{i}", name) for name, pool in config.pools.items() for i in range(pool.replicas)]
        self._engines = [ReplicaProcess(name, role, bundle) for bundle, (name, role) in enumerate(names)]
        bundles = [Bundle(pool.num_threads, pool.num_gpus) for pool in map(self._pool, self._engines)]
        self.progress("starting Ray")
        self._ray.open(
            num_cpus=sum(bundle.num_cpus for bundle in bundles), num_gpus=sum(bundle.num_gpus for bundle in bundles)
        )
        self._ray.place(bundles)
        self.progress(f"starting the router, {', '.join(engine.replica_id for engine in self._engines)}")
        for place in (self._router, *self._engines):
            self._launch(place)
        for place in (self._router, *self._engines):
            self._await_first_start(place)
        self._await_greetings()

    def _await_first_start(self, place: ReplicaProcess) -> None:
        if not self._ray.ready(place.pending, START_TIMEOUT_S):
            raise CapacityError(f"{place.replica_id} has not started within {START_TIMEOUT_S:g} s")
        try:
            answer = self._ray.result(place.pending)
        except ActorDied as error:
            raise StartupError(f"{place.replica_id} died while starting: {error}") from None
        self._came_up(place, answer, time.monotonic())

    def _await_greetings(self) -> None:
        """Until the router can use every engine."""
        until = time.monotonic() + GREETING_TIMEOUT_S
        while missing := self._unheard():
            if time.monotonic() > until:
                raise StartupError(f"the router has heard nothing from {', '.join(missing)}")
            self.watch(0.02)

    def _unheard(self) -> list[str]:
        heard = {load.address for load in self.loads()}
        return [
            engine.replica_id for engine in self._engines if engine.actor is None or engine.actor.address not in heard
        ]

    def _launch(self, place: ReplicaProcess) -> None:
        config, now = self.config, time.monotonic()
        address, mailbox = Address(place.replica_id, self._next_epoch()), Mailbox(self._namespace)
        if place.role == "router":
            router = replace(config.router, grpc_port=self.port, metrics_port=self.metrics_port)
            model_dir = Path(config.model) if config.model is not None else None
            place.actor = self._ray.spawn(
                RouterActor, address, address, config.log_level, router, model_dir, self._vocab_size, mailbox
            )
        else:
            kind, make = (
                (PrefillActor, build.build_prefill) if place.role == "prefill" else (DecodeActor, build.build_decode)
            )
            place.actor = self._ray.spawn(
                kind,
                address,
                address,
                config.log_level,
                partial(make, config, address, mailbox, self.prefix),
                bundle=place.bundle,
            )
        place.state, place.since = "starting", now
        place.ask("start", now)

    def _came_up(self, place: ReplicaProcess, answer: Any, now: float) -> None:
        """`answer`: of its `start`; a router's is the port."""
        place.state, place.since = "up", now
        place.ask("failure", now)
        if place.role != "router":
            self._ask_router("replica_started", place.live.address)
            return
        self.port = answer
        self.metrics_port = self._ask_router("metrics_port") or self.metrics_port
        for engine in self._engines:
            if engine.state == "up":
                self._ask_router("replica_started", engine.live.address)

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
        if place.state == "up" and place.role != "router":
            self._ask_router("replica_down", place.live.address)
        elif place.state == "starting" and place.role == "router":
            # A port that the system chose may have gone to someone else: it may choose again.
            self.port, self.metrics_port = self.config.router.grpc_port, self.config.router.metrics_port
        if place.state == "up" and now - place.since > STABLE_S:
            place.num_deaths = 0
        place.live.kill()
        remove_stale(self.prefix)
        delay_s = min(MAX_DELAY_S, 2.0**place.num_deaths - 1)
        self.progress(f"{place.replica_id} is down: {failure}; a new one starts in {delay_s:g} s")
        place.num_deaths += 1
        place.state, place.since, place.actor = "down", now + delay_s, None

    def _ask_router(self, method: str, *args: object) -> Any:
        """Calls the router. None while it is dead: whatever it was to learn, its successor learns from `_came_up`."""
        router = self._router.actor
        if router is None or self._router.state != "up":
            return None
        try:
            return router.call(method, *args, timeout_s=self._patience_s())
        except ActorDied:
            return None

    def _pool(self, engine: ReplicaProcess) -> PoolConfig:
        return self.config.prefill if engine.role == "prefill" else self.config.decode

    def _stall_timeout_s(self, place: ReplicaProcess) -> float:
        return ROUTER_STALL_TIMEOUT_S if place.role == "router" else self._pool(place).engine.stall_timeout_s

    def _patience_s(self) -> float:
        """Longest wait for an answer of the router: the drain bounds it."""
        if self._drained_at is None:
            return ROUTER_STALL_TIMEOUT_S
        return min(ROUTER_STALL_TIMEOUT_S, max(1.0, self._drained_at - time.monotonic()))

    @property
    def _namespace(self) -> str:
        return self.prefix.rstrip("-")

    def _next_epoch(self) -> int:
        """Strictly increasing through the life of the deployment, over all its processes."""
        self._epoch += 1
        return self._epoch
