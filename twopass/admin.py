"""Administrates a running deployment.

    with AdminClient("127.0.0.1:50052", token="...") as admin:
        admin.drain("decode-0")
        print(admin.replicas())

The address is the one of `router.admin_port`. All calls raise the errors of `twopass.errors`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from twopass.connect import Pem, Security, open_channel, places
from twopass.errors import InvalidRequest, NotSupported
from twopass.proto import twopass_pb2 as pb
from twopass.proto.twopass_pb2_grpc import AdminStub
from twopass.wire import call_metadata, to_error

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine. `pool` is empty if only a past router heard of it. Fields from `epoch` on are None while it is down,
    and those from `num_waiting` on are as of its last report, `age_s` seconds ago.
    """

    replica_id: str
    pool: str
    state: str
    """One of "up", "draining", "suspected" (it is silent) and "down"."""
    drained: bool
    """Whether an administrator has drained it."""
    epoch: int | None
    in_flight: int | None
    num_waiting: int | None
    num_running: int | None
    num_leases: int | None
    num_blocks: Mapping[str, int]
    """KV blocks by state: "used", "held", "cached" and "blank"."""
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Drained:
    """`in_flight`: how many attempts the engine still has. `effect`: what the order means for new requests, or ""."""

    in_flight: int
    effect: str


class AdminClient:
    """One connection. `address`, `token`, `ca`, `cert` and `key` are as for `Client`, but of one server alone."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        ca: Pem | None = None,
        cert: Pem | None = None,
        key: Pem | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        found = places(address)
        if len(found) > 1:
            raise InvalidRequest(f"address: {address!r} is several: an order goes to one deployment", field="address")
        (self._place,) = found
        self._channel = open_channel(self._place, Security(token, ca, cert, key), grpc)
        self._stub = AdminStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._metadata, self._timeout_s = call_metadata(token), timeout_s

    def version(self) -> str:
        """Returns the version of the deployment."""
        return str(self._call("ListReplicas", pb.ListReplicasRequest()).version)

    def replicas(self) -> list[Replica]:
        """Returns every engine that was ever heard of."""
        return [_to_replica(message) for message in self._call("ListReplicas", pb.ListReplicasRequest()).replicas]

    def drain(self, replica_id: str) -> Drained:
        """From now on the engine, and whatever takes its place, gets nothing new. What it has ends in its own time."""
        answer = self._call("Drain", pb.DrainRequest(replica_id=replica_id))
        return Drained(answer.in_flight, answer.effect)

    def undrain(self, replica_id: str) -> None:
        """Takes a `drain` back."""
        self._call("Undrain", pb.UndrainRequest(replica_id=replica_id))

    def set_log_level(self, level: str, target: str = "") -> None:
        """Sets the log level of an engine, a door or "router"; without a target of all."""
        self._call("SetLogLevel", pb.SetLogLevelRequest(level=level, target=target))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raised = to_error(error, self._place)
            if isinstance(raised, NotSupported):
                text = f"{raised}: {self._place.target} serves no administrators; their port is router.admin_port"
                raised = NotSupported(text, status=raised.status)
            raise raised from error


def _to_replica(message: pb.Replica) -> Replica:
    def known(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return Replica(
        replica_id=message.replica_id,
        pool=message.pool,
        state=message.state,
        drained=message.drained,
        epoch=known("epoch"),
        in_flight=known("in_flight"),
        num_waiting=known("num_waiting"),
        num_running=known("num_running"),
        num_leases=known("num_leases"),
        num_blocks=dict(message.num_blocks),
        age_s=known("age_s"),
    )
