"""Ray, typed: a private or a given cluster, actors by address, and the mailbox through which they reach each other."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before Ray is imported: it reads both once. With token auth on, `init` writes a token file that makes later job submissions fail.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from protocol.errors import CapacityError, StartupError
from protocol.messages import Address, Envelope

ActorDied = ray.exceptions.RayActorError
"""The process behind a handle is gone. With no restarts allowed it never comes back."""

_LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by an outward address; any other one of the loopback net stays."""
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's own store is close to its minimum: messages are small and KV travels elsewhere."""


def actor_name(address: Address) -> str:
    return f"{address.replica_id}@{address.epoch}"


class Mailbox:
    """Sends envelopes to actors of one deployment. A receiver that is dead or unknown drops the message, as the protocol allows."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._deliver: dict[Address, Callable[[Envelope], None] | None] = {}

    def __call__(self, envelope: Envelope) -> None:
        receiver = envelope.receiver
        if receiver not in self._deliver:
            self._deliver[receiver] = self._find(receiver)
        deliver = self._deliver[receiver]
        if deliver is not None:
            deliver(envelope)

    def _find(self, receiver: Address) -> Callable[[Envelope], None] | None:
        try:
            handle = ray.get_actor(actor_name(receiver), namespace=self._namespace)
        except ValueError:
            return None
        send: Callable[[Envelope], None] = handle.deliver.options(num_returns=0).remote
        return send


@dataclass(frozen=True, slots=True)
class Actor:
    """A handle under its address."""

    address: Address
    handle: Any

    def start(self, method: str, *args: object) -> Any:
        """Calls a method; returns a reference for `wait`."""
        return getattr(self.handle, method).remote(*args)

    def call(self, method: str, *args: object, timeout_s: float = 60.0) -> Any:
        """Calls a method and waits for its result. Raises ActorDied, and whatever the method raised, as itself."""
        return result(self.start(method, *args), timeout_s)

    def kill(self) -> None:
        ray.kill(self.handle)


def ready(reference: Any, timeout_s: float) -> bool:
    """True once the call behind it has ended, one way or the other, within `timeout_s`."""
    done, _ = ray.wait([reference], timeout=timeout_s)
    return bool(done)


def result(reference: Any, timeout_s: float = 60.0) -> Any:
    """What a call returned. An exception from the actor is raised as the actor raised it."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.GetTimeoutError:
        raise StartupError(f"an actor has not answered within {timeout_s:g} s") from None


@dataclass(slots=True)
class RayCluster:
    """The Ray a deployment runs in: its own, in a private folder, or the one that `RAY_ADDRESS` names."""

    directory: Path | None
    """The private one's; None: the cluster is not ours to end."""
    _group: PlacementGroup | None = field(default=None, init=False)

    @classmethod
    def open(cls, namespace: str, *, num_cpus: int) -> "RayCluster":
        """Starts a private Ray with `num_cpus` (a declaration, not a limit), or joins the one of this job."""
        on_sigterm = signal.getsignal(signal.SIGTERM)
        directory = None
        try:
            if os.environ.get("RAY_ADDRESS"):
                ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level="error")
            else:
                # Unix sockets lie below it, so the path must stay short; the pid says whose it is.
                directory = Path(tempfile.mkdtemp(prefix=f"twopass-{os.getpid()}-", dir="/tmp"))
                ray.init(
                    address="local",
                    namespace=namespace,
                    num_cpus=num_cpus,
                    num_gpus=0,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                    _node_ip_address=_LOOPBACK,
                    _temp_dir=str(directory),
                )
        except BaseException:
            cls(directory).close()
            raise
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray sets its own, which exits without a drain
        return cls(directory)

    def place(self, num_cpus: Sequence[int], timeout_s: float = 60.0) -> None:
        """Takes one bundle per engine, close together. Raises CapacityError when the cluster cannot give them in time."""
        self._group = placement_group([{"CPU": count} for count in num_cpus], strategy="PACK")
        if not self._group.wait(timeout_s):
            free = ray.available_resources().get("CPU", 0)
            raise CapacityError(f"Ray has {free:g} CPUs free, {sum(num_cpus)} are needed (in pieces of {', '.join(map(str, num_cpus))})")

    def spawn(self, kind: type, address: Address, *args: object, bundle: int | None = None, num_cpus: int = 0) -> Actor:
        """Starts an actor, at once; errors of its constructor come with its first call. `bundle`: its place from `place`."""
        options: dict[str, Any] = {"name": actor_name(address), "num_cpus": num_cpus, "max_restarts": 0, "max_task_retries": 0}
        if bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return Actor(address, ray.remote(kind).options(**options).remote(*args))

    def close(self) -> None:
        """Ends a private Ray and removes its folder; leaves a given one."""
        ray.shutdown()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
