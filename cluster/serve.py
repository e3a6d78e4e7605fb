"""One deployment from its first process to its last: placement, epochs, replacement of the dead, drain.

1. The model is checked and Ray opened; nothing else has started if that fails.
2. The router starts first, so that engines have someone to greet, and takes its port.
3. Engines start side by side. A new one is made known to the router, which speaks first; the engine answers with `Hello`.
4. `watch` looks at every process. A dead engine is reported to the router, its memory removed, and it comes back under a higher epoch.
5. `drain` lets open requests end; `stop` ends all processes and leaves no process, shared memory, folder or port behind.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from cluster import build
from cluster.config import ClusterConfig
from cluster.ray_handles import Actor, ActorDied, Mailbox, RayCluster, ready, result
from decode_pool.actor import DecodeActor
from kv_transfer.segment import PREFIX, remove_stale
from prefill_pool.actor import PrefillActor
from protocol.errors import CapacityError, StartupError
from protocol.messages import ROUTER_ID, Address
from router.actor import RouterActor
from router.policy import Replica as ReplicaLoad

START_TIMEOUT_S = 300.0
"""Longest start of an engine: weights from a slow disk."""
GREETING_TIMEOUT_S = 30.0
"""Longest wait until the router has every engine's `Hello`: it takes one message each way."""
STOP_TIMEOUT_S = 5.0
"""Longest wait for a process to give its memory back before it is killed."""
STABLE_S = 60.0
"""An engine that lived this long starts again at once; others wait longer each time, up to `MAX_DELAY_S`."""
MAX_DELAY_S = 30.0

Progress = Callable[[str], None]


@dataclass(slots=True)
class Replica:
    """A place in a pool and the process that fills it now."""

    replica_id: str
    role: Literal["prefill", "decode"]
    bundle: int
    actor: Actor | None = None
    state: Literal["starting", "up", "down"] = "down"
    pending: Any = None
    """Reference of `start` in "starting", of the last `failure` in "up"."""
    since: float = 0.0
    """When the state began; in "down": when to start again."""
    num_deaths: int = 0
    """In a row, without `STABLE_S` in between."""


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
    _ray: RayCluster | None = None
    _router: Actor | None = None
    _replicas: list[Replica] = field(default_factory=list)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def router(self) -> Actor:
        assert self._router is not None, "the deployment has not started"
        return self._router

    def actor(self, replica_id: str) -> Actor:
        """The process that fills a place now. Raises KeyError for an unknown place."""
        actor = {replica.replica_id: replica.actor for replica in self._replicas}[replica_id]
        if actor is None:
            raise StartupError(f"{replica_id} is down")
        return actor

    def loads(self) -> list[ReplicaLoad]:
        """What the router knows of every engine that has greeted it."""
        loads: list[ReplicaLoad] = self.router.call("loads")
        return loads

    def watch(self, timeout_s: float = 0.25) -> None:
        """One look at every process, then waits `timeout_s`. Raises StartupError when the router is gone: nothing works without it."""
        now = time.monotonic()
        try:
            failure = self.router.call("failure")
            lost: list[Address] = self.router.call("take_lost")
            for replica in self._replicas:
                if replica.actor is not None and replica.actor.address in lost:
                    self._bury(replica, "its messages do not arrive", now)
                else:
                    self._watch(replica, now)
        except ActorDied:
            failure = "its process died"
        if failure:
            raise StartupError(f"the router is down, all requests are lost: {failure}")
        time.sleep(timeout_s)

    def drain(self, deadline_s: float) -> int:
        """Takes nothing new and waits for open requests; returns how many were still open at the deadline."""
        self.router.call("drain", deadline_s)
        drained_at = time.monotonic() + deadline_s
        while (num_open := int(self.router.call("num_open"))) and time.monotonic() < drained_at:
            self.watch()
        return num_open

    def stop(self) -> None:
        """Ends every process and removes what they leave. Open requests are lost."""
        if self._ray is None:
            return
        actors = [replica.actor for replica in self._replicas if replica.actor and replica.state == "up"]
        if self._router is not None:
            actors.insert(0, self._router)
        try:
            stopping = [actor.start("stop") for actor in actors]
            for reference in stopping:
                ready(reference, STOP_TIMEOUT_S)
        finally:
            for actor in [*actors, *(replica.actor for replica in self._replicas if replica.actor and replica.state == "starting")]:
                actor.kill()
            self._ray.close()
            self._ray = None
            remove_stale(self.prefix)

    def _start(self) -> None:
        config = self.config
        served = build.serve_model(config)
        model_dir = Path(config.model) if config.model is not None else None
        remove_stale()
        pools = (("prefill", config.prefill), ("decode", config.decode))
        self._replicas = [Replica(f"{role}-{i}", role, 0) for role, pool in pools for i in range(pool.replicas)]  # type: ignore[arg-type]
        threads = [self._threads(replica) for replica in self._replicas]
        self.progress("starting Ray")
        self._ray = RayCluster.open(self._namespace, num_cpus=sum(threads))
        self._ray.place(threads)
        self.progress(f"starting the router, {', '.join(replica.replica_id for replica in self._replicas)}")
        address = Address(ROUTER_ID, self._next_epoch())
        self._router = self._ray.spawn(RouterActor, address, address, config.router, model_dir, served.vocab_size, Mailbox(self._namespace))
        port = self._router.start("start")
        for bundle, replica in enumerate(self._replicas):
            replica.bundle = bundle
            self._launch(replica)
        self.port = result(port)
        self.metrics_port = self._router.call("metrics_port")
        for replica in self._replicas:
            self._await_first_start(replica)
        self._await_greetings()

    def _await_first_start(self, replica: Replica) -> None:
        if not ready(replica.pending, START_TIMEOUT_S):
            raise CapacityError(f"{replica.replica_id} has not started within {START_TIMEOUT_S:g} s")
        try:
            result(replica.pending)
        except ActorDied as error:
            raise StartupError(f"{replica.replica_id} died while starting: {error}") from None
        self._came_up(replica, time.monotonic())

    def _await_greetings(self) -> None:
        """Until the router can use every engine."""
        until = time.monotonic() + GREETING_TIMEOUT_S
        expected = {replica.actor.address for replica in self._replicas if replica.actor is not None}
        while missing := expected - {load.address for load in self.loads()}:
            if time.monotonic() > until:
                raise StartupError(f"the router has heard nothing from {', '.join(address.replica_id for address in sorted(missing))}")
            self.watch(0.02)

    def _launch(self, replica: Replica) -> None:
        assert self._ray is not None
        address = Address(replica.replica_id, self._next_epoch())
        kind, make = (PrefillActor, build.build_prefill) if replica.role == "prefill" else (DecodeActor, build.build_decode)
        builder = partial(make, self.config, address, Mailbox(self._namespace), self.prefix)
        replica.actor = self._ray.spawn(kind, address, builder, bundle=replica.bundle, num_cpus=self._threads(replica))
        replica.state, replica.since = "starting", time.monotonic()
        replica.pending = replica.actor.start("start")

    def _came_up(self, replica: Replica, now: float) -> None:
        assert replica.actor is not None
        replica.state, replica.since = "up", now
        replica.pending = replica.actor.start("failure")
        self.router.call("replica_started", replica.actor.address)

    def _watch(self, replica: Replica, now: float) -> None:
        if replica.state == "down":
            if now >= replica.since:
                self._launch(replica)
            return
        if not ready(replica.pending, 0):
            return
        try:
            failure = result(replica.pending)
        except ActorDied:
            failure = "its process died"
        except StartupError as error:
            failure = str(error)
        assert replica.actor is not None
        if failure:
            self._bury(replica, failure, now)
        elif replica.state == "starting":
            self._came_up(replica, now)
            self.progress(f"{replica.replica_id} is back")
        else:
            replica.pending = replica.actor.start("failure")

    def _bury(self, replica: Replica, failure: str, now: float) -> None:
        assert replica.actor is not None
        if replica.state == "up":
            self.router.call("replica_down", replica.actor.address)
            if now - replica.since > STABLE_S:
                replica.num_deaths = 0
        replica.actor.kill()
        remove_stale(self.prefix)
        delay_s = min(MAX_DELAY_S, 2.0**replica.num_deaths - 1)
        self.progress(f"{replica.replica_id} is down: {failure}; a new one starts in {delay_s:g} s")
        replica.num_deaths += 1
        replica.state, replica.since, replica.actor = "down", now + delay_s, None

    def _threads(self, replica: Replica) -> int:
        return (self.config.prefill if replica.role == "prefill" else self.config.decode).num_threads

    @property
    def _namespace(self) -> str:
        return self.prefix.rstrip("-")

    def _next_epoch(self) -> int:
        """Strictly increasing through the life of the deployment, over all its processes."""
        self._epoch += 1
        return self._epoch
