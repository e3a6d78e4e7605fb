"""The gRPC service of administrators, `Admin` of twopass/proto/twopass.proto. It has a port of its own in the core's
process, so it works however busy or dead the doors are, and nothing of it goes through them.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection

from router.accounts import Accounts
from router.admin import Admin, Replica
from router.config import RouterConfig
from router.grpc_calls import Guard, bind, unary
from router.tls import Certificates
from router.version import version
from twopass.proto import twopass_pb2 as pb

M = TypeVar("M", bound=Message)

SERVICE = "twopass.v1.Admin"
MAX_MESSAGE_BYTES = 64 * 1024

log = logging.getLogger(__name__)


class GrpcAdmin:
    """A `Listener`. `admins`: whose tokens are asked for; None asks nobody."""

    def __init__(
        self, admin: Admin, config: RouterConfig, *, certificates: Certificates | None, admins: Accounts | None
    ) -> None:
        assert config.admin_port is not None, "without a port there is no service"
        self._admin, self._certificates = admin, certificates
        self._host, self._port = config.admin_host, config.admin_port
        self._server = grpc.aio.server(
            interceptors=[Guard(admins)] if admins is not None else [],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", math.ceil(1000 * config.read_timeout_s)),
            ],
        )
        handlers = {
            "ListReplicas": _handler(pb.ListReplicasRequest, self._list),
            "Drain": _handler(pb.DrainRequest, self._drain),
            "Undrain": _handler(pb.UndrainRequest, self._undrain),
            "SetLogLevel": _handler(pb.SetLogLevelRequest, self._set_log_level),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        port = bind(self._server, "admin_port", self._host, self._port, self._certificates)
        await self._server.start()
        return port

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(0.0)  # no call of it takes any time

    def _list(self, request: pb.ListReplicasRequest) -> pb.ListReplicasResponse:
        return pb.ListReplicasResponse(version=version(), replicas=map(_encode, self._admin.replicas()))

    def _drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        in_flight, effect = self._admin.drain(request.replica_id)
        return pb.DrainResponse(in_flight=in_flight, effect=effect)

    def _undrain(self, request: pb.UndrainRequest) -> pb.UndrainResponse:
        self._admin.undrain(request.replica_id)
        return pb.UndrainResponse()

    def _set_log_level(self, request: pb.SetLogLevelRequest) -> pb.SetLogLevelResponse:
        self._admin.set_log_level(request.level, request.target)
        log.info("log level ordered", extra={"level_ordered": request.level, "target": request.target or "all"})
        return pb.SetLogLevelResponse()


def _handler(kind: type[M], answer: Callable[[M], Message]) -> grpc.RpcMethodHandler:
    async def answered(read: Callable[[], M]) -> Message:
        return answer(read())

    return unary(kind, answered, MAX_MESSAGE_BYTES)


def _encode(replica: Replica) -> pb.Replica:
    view = replica.view
    message = pb.Replica(
        replica_id=replica.replica_id,
        pool=replica.pool or "",
        state="down" if view is None else view.state,
        drained=replica.drained,
    )
    if view is not None:
        message.epoch, message.in_flight, message.age_s = view.address.epoch, view.in_flight, replica.age_s
        message.num_blocks.update(view.blocks_by_state)
        if (status := view.status) is not None:
            message.num_waiting, message.num_running = status.num_waiting, status.num_running
            message.num_leases = status.num_leases
    return message
