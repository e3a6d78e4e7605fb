"""What administrators ask of the core. No transport is known here.

Orders outlive the router: the supervisor asks for them again and again (`orders`), hands them to the next router
(`restore`), and gives every process its log level.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, get_args

from protocol.clock import Clock
from protocol.errors import InvalidRequest, NotFound
from protocol.log import LogLevel
from protocol.messages import ROUTER_ID, PoolName
from router.policy import ReplicaView

ALL = ""
"""The target of a log level that all processes get."""


class Orders(NamedTuple):
    """What administrators have ordered and not taken back."""

    drained: frozenset[str]
    """Replica ids."""
    log_levels: dict[str, LogLevel]
    """By the name of a process, or `ALL`."""

    def level_of(self, name: str) -> LogLevel | None:
        """The log level of a process; None for the one that it was configured with."""
        return self.log_levels.get(name, self.log_levels.get(ALL))


class Replica(NamedTuple):
    """An engine. `view` is None while it is down, `age_s` the seconds since it was last heard."""

    replica_id: str
    pool: PoolName | None
    drained: bool
    view: ReplicaView | None
    age_s: float


class AdminCore(Protocol):
    """The router's state machine as administrators need it."""

    @property
    def roles(self) -> dict[str, PoolName]: ...
    @property
    def drained_replicas(self) -> frozenset[str]: ...
    def replicas(self) -> Iterator[ReplicaView]: ...
    def set_drained(self, replica_id: str, drained: bool) -> str: ...
    def restore_drained(self, replica_ids: Iterable[str]) -> None: ...


class Admin:
    """Belongs to the core's event loop. `pump` sends what the core has put out; `doors` names the doors in processes of
    their own.
    """

    def __init__(
        self, core: AdminCore, *, pump: Callable[[], None], doors: Callable[[], Iterable[str]], clock: Clock
    ) -> None:
        self._core, self._pump, self._doors, self._clock = core, pump, doors, clock
        self._log_levels: dict[str, LogLevel] = {}

    @property
    def orders(self) -> Orders:
        return Orders(self._core.drained_replicas, dict(self._log_levels))

    def restore(self, orders: Orders) -> None:
        """Takes over what was ordered of a router before this one."""
        self._core.restore_drained(orders.drained)
        self._log_levels.update(orders.log_levels)

    def replicas(self) -> list[Replica]:
        """Every engine that was ever heard of, in the order of their names."""
        core, now = self._core, self._clock()
        roles, drained = core.roles, core.drained_replicas
        present = {view.address.replica_id: view for view in core.replicas()}
        replicas = []
        for name in sorted(roles.keys() | drained):
            view = present.get(name)
            age_s = 0.0 if view is None else now - view.heard_at
            replicas.append(Replica(name, roles.get(name), name in drained, view, age_s))
        return replicas

    def drain(self, replica_id: str) -> tuple[int, str]:
        """Returns how many attempts the engine still has, and what the order means for new ones. Raises NotFound."""
        effect = self._core.set_drained(replica_id, True)
        self._pump()
        left = (view.in_flight for view in self._core.replicas() if view.address.replica_id == replica_id)
        return sum(left), effect

    def undrain(self, replica_id: str) -> None:
        """Raises NotFound."""
        self._core.set_drained(replica_id, False)
        self._pump()

    def set_log_level(self, level: str, target: str) -> None:
        """Raises InvalidRequest and NotFound."""
        known: tuple[LogLevel, ...] = get_args(LogLevel)
        found = next((one for one in known if one == level), None)
        if found is None:
            raise InvalidRequest("level", repr(level[:32]), f"one of {', '.join(known)}")
        if target == ALL:
            self._log_levels.clear()
        names = sorted({ROUTER_ID, *self._doors(), *self._core.roles})
        if target not in (ALL, *names):
            raise NotFound("target", repr(target[:64]), f"the processes are {', '.join(names)}")
        self._log_levels[target] = found
