"""Ray's actors under their addresses, the mailbox through which they reach each other, and a private Ray's folder."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# This module must be imported before Ray: it sets variables that Ray reads when it is imported.
import cluster.ray_address  # noqa: F401

# isort: split
import ray

from protocol.errors import StartupError
from protocol.messages import Address, Envelope

if TYPE_CHECKING:
    from cluster.ray_cluster import RayCluster

ActorDied = ray.exceptions.RayActorError
"""Ray's error for a call to an actor whose process is gone. No restarts are allowed, so it never comes back."""

_SHARED_MEMORY = Path("/dev/shm")


def actor_name(address: Address) -> str:
    return f"{address.replica_id}@{address.epoch}"


class Mailbox:
    """Sends envelopes to actors of one deployment. A message for a dead or unknown receiver is dropped, which the
    protocol allows.
    """

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
        # With task events Ray would keep a record of some 200 bytes per message in the sender and never free it.
        send: Callable[[Envelope], None] = handle.deliver.options(num_returns=0, enable_task_events=False).remote
        return send


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor's Ray handle under the actor's address."""

    address: Address
    handle: Any
    cluster: "RayCluster"

    def start(self, method: str, *args: object) -> Any:
        """Calls a method and returns a reference for `RayCluster.ready`."""
        return getattr(self.handle, method).remote(*args)

    def call(self, method: str, *args: object, timeout_s: float = 60.0) -> Any:
        """Calls a method and waits for its result. Raises what it raised, ActorDied, ClusterLost or StartupError."""
        return self.cluster.result(self.start(method, *args), timeout_s)

    def kill(self) -> None:
        self.cluster.do(ray.kill, self.handle)


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """The folder where a private Ray keeps its sockets and logs. The supervisor holds a lock on it as long as it lives.
    If it has died, a later supervisor removes the folder.
    """

    path: Path
    lock_fd: int

    @classmethod
    def create(cls, parent: Path) -> "PrivateFolder":
        """Makes `parent`/twopass-<pid>-<random>. Unix sockets lie below it, so the path must stay short.

        Raises StartupError where the folder or shared memory cannot be written. Ray would fail too, but only after half
        a minute.
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
    """Removes a folder whose owner is dead: no process has the pid in the folder's name, and nobody holds the lock."""
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
