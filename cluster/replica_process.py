"""One place of a deployment: the router, a door or an engine, and the process that fills it now."""

from dataclasses import dataclass
from typing import Any, Literal

from cluster.ray_handles import Actor
from protocol.errors import StartupError
from protocol.messages import PoolName

Role = Literal["router", "door", PoolName]


@dataclass(slots=True)
class ReplicaProcess:
    """A place lasts as long as the deployment; a process that dies is replaced by another one under a higher epoch."""

    replica_id: str
    role: Role
    bundle: int | None
    """Index of the engine's bundle (see `RayCluster.place`); None for router and doors, which run beside
    the supervisor.
    """
    actor: Actor | None = None
    state: Literal["starting", "up", "down"] = "down"
    pending: Any = None
    """Ray's reference of the call whose answer is awaited: `start` in state "starting", `failure` in state "up"."""
    asked_at: float = 0.0
    """Time at which `pending` was called."""
    since: float = 0.0
    """Time at which the state began; in state "down", time at which a new process is to start."""
    num_deaths: int = 0
    """Deaths in a row, none of them after a life of `STABLE_S`."""

    @property
    def live(self) -> Actor:
        """The process that fills the place. Raises StartupError while there is none."""
        if self.actor is None:
            raise StartupError(f"{self.replica_id} is down")
        return self.actor

    def ask(self, method: str, now: float) -> None:
        """Calls a method of the process without waiting; `pending` is its reference."""
        self.pending, self.asked_at = self.live.start(method), now
