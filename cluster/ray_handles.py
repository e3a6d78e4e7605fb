"""Ray, typed: a private or a given cluster, actors by address, and the mailbox through which they reach each other."""

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Before Ray is imported: it reads these once. A given cluster says itself whether it wants a token and how urgent its workers are; for a
# private one Ray would write a token file that makes later job submissions fail, and step aside (nice 15) for whatever else runs here.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.update(RAY_grpc_enable_http_proxy="0")  # all of it is on loopback
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from protocol.errors import CapacityError, StartupError
from protocol.messages import Address, Envelope

ActorDied = ray.exceptions.RayActorError
"""The process behind a handle is gone. With no restarts allowed it never comes back."""

_LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by an outward address; any other one of the loopback net stays."""
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's own store is close to its minimum: messages are small and KV travels elsewhere."""
_SHARED_MEMORY = Path("/dev/shm")
_PRIVATE_TIMEOUT_S = 15.0
"""Longest wait for a place in a private Ray, which does not grow."""


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
        # Ray's record of every call would cost the sender some 200 bytes a message, and is never given back.
        send: Callable[[Envelope], None] = handle.deliver.options(num_returns=0, enable_task_events=False).remote
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


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """Where a private Ray keeps its sockets and logs. It is locked as long as its process lives; a later one removes it if that died."""

    path: Path
    lock_fd: int

    @classmethod
    def create(cls, parent: Path) -> "PrivateFolder":
        """`parent`/twopass-<pid>-<random>. Unix sockets lie below it, so the path must stay short.

        Raises StartupError where that or shared memory cannot be written: Ray would only fail to come up, half a minute later.
        """
        if not os.access(_SHARED_MEMORY, os.W_OK):
            raise StartupError(f"{_SHARED_MEMORY}: cannot be written; Ray's object store and the KV caches lie there")
        for path in sorted(parent.glob("twopass-*-*")):
            _remove_if_stale(path)
        try:
            path = Path(tempfile.mkdtemp(prefix=f"twopass-{os.getpid()}-", dir=parent))
            lock_fd = os.open(path, os.O_RDONLY)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        except OSError as error:
            raise StartupError(f"{parent}: {error.strerror}; a private Ray keeps its sockets and logs there") from None
        return cls(path, lock_fd)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock_fd)


def _remove_if_stale(path: Path) -> None:
    """A dead owner is known by two signs: no process bears the pid in the name, and nobody holds the lock."""
    pid = path.name.split("-")[1]
    if not path.is_dir() or not pid.isdigit() or Path("/proc", pid).exists():
        return
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


class Bundle(NamedTuple):
    """What one engine takes of a machine."""

    num_cpus: int
    num_gpus: int


@dataclass(slots=True)
class RayCluster:
    """The Ray a deployment runs in: its own, in a private folder, or the one that `RAY_ADDRESS` names."""

    folder: PrivateFolder | None
    """The private one's; None: the cluster is not ours to end."""
    _group: PlacementGroup | None = field(default=None, init=False)
    _bundles: Sequence[Bundle] = field(default=(), init=False)

    @classmethod
    def open(cls, namespace: str, *, num_cpus: int, num_gpus: int) -> "RayCluster":
        """Joins the Ray of this job, or starts a private one with `num_cpus` (declared, not a limit) and, if any, this machine's GPUs."""
        on_sigterm = signal.getsignal(signal.SIGTERM)
        folder = None
        try:
            if os.environ.get("RAY_ADDRESS"):
                ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level="error")
            else:
                folder = PrivateFolder.create(Path("/tmp"))
                ray.init(
                    address="local",
                    namespace=namespace,
                    num_cpus=num_cpus,
                    num_gpus=None if num_gpus else 0,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                    _node_ip_address=_LOOPBACK,
                    _temp_dir=str(folder.path),
                )
        except BaseException as error:
            cls(folder).close()
            if type(error) is Exception:  # what Ray raises when its own processes are not up within 30 s
                raise CapacityError(f"Ray did not start: {error}") from error
            raise
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray sets its own, which exits without a drain
        return cls(folder)

    def place(self, bundles: Sequence[Bundle], timeout_s: float = 60.0) -> None:
        """Takes one bundle per engine, all on one machine: KV travels through its memory. Raises CapacityError if none has them in time.

        A private Ray does not grow: there the wait is shorter.
        """
        resources = [{"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {})} for num_cpus, num_gpus in bundles]
        self._group, self._bundles = placement_group(resources, strategy="STRICT_PACK"), bundles
        if not self._group.wait(min(timeout_s, _PRIVATE_TIMEOUT_S) if self.folder else timeout_s):
            free = ray.available_resources()
            num_cpus, num_gpus = (sum(column) for column in zip(*bundles, strict=True))
            raise CapacityError(
                f"no machine has {num_cpus} CPUs and {num_gpus} GPUs free for {len(bundles)} engines; "
                f"Ray has {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free in all"
            )

    def spawn(self, kind: type, address: Address, *args: object, bundle: int | None = None) -> Actor:
        """Starts an actor, at once; errors of its constructor come with its first call. `bundle`: its place; None: on this machine."""
        options: dict[str, Any] = {"name": actor_name(address), "num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        if bundle is None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        else:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            options["num_cpus"], options["num_gpus"] = self._bundles[bundle]
        return Actor(address, ray.remote(kind).options(**options).remote(*args))

    def close(self) -> None:
        """Ends a private Ray and removes its folder; leaves a given one."""
        ray.shutdown()
        if self.folder is not None:
            self.folder.remove()
