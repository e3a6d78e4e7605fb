"""The gRPC door.

1. A call arrives as bytes. gRPC itself refuses messages far over `max_message_bytes`, so that nobody fills the memory.
2. `grpc_codec.py` decodes the message. The front door validates, tokenises and submits the request, and yields the
   answer in pieces.
3. Each piece is encoded and written as soon as the client takes it. A client that takes nothing for `write_timeout_s`
   loses its stream.
4. A RequestError ends the call with its status. A closed call or a passed deadline cancels the handler and the request.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protocol.errors import RequestCancelled, RequestError
from router.accounts import Accounts
from router.admission import Account
from router.config import RouterConfig
from router.frontdoor import FrontDoor
from router.grpc_calls import Guard, bind, unary
from router.grpc_codec import decode_bytes, decode_generate, decode_prompt, encode_load, encode_piece
from router.grpc_many import GrpcMany
from router.grpc_status import Context, abort, header
from router.parse import check_id
from router.tls import Certificates
from router.version import version
from twopass.proto import twopass_pb2 as pb

M = TypeVar("M", bound=Message)

SERVICE = "twopass.v1.Twopass"
GENERATE = f"/{SERVICE}/Generate"
HARD_LIMIT_FACTOR = 4
"""Messages up to this many times `max_message_bytes` are read, so that the status can say what is wrong with them."""


class GrpcDoor:
    """Listens from `start` to `stop`, on the event loop on which it was made. `run` serves in between."""

    def __init__(
        self,
        door: FrontDoor,
        config: RouterConfig,
        *,
        certificates: Certificates | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self._door, self._config, self._certificates, self._accounts = door, config, certificates, accounts
        self._server = grpc.aio.server(
            interceptors=[Guard(accounts, but=(GENERATE,))] if accounts is not None else [],
            options=[
                ("grpc.max_receive_message_length", HARD_LIMIT_FACTOR * config.max_message_bytes),
                ("grpc.so_reuseport", int(config.doors > 0)),  # any other server would silently share the port
                ("grpc.server_handshake_timeout_ms", math.ceil(1000 * config.read_timeout_s)),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ],
        )
        self._health = health.aio.HealthServicer()
        self._serving: bool | None = None
        self._writers: set[_Writer] = set()
        self._streams: set[GrpcMany] = set()
        # Requests come as bytes: if gRPC parsed them, a damaged message would end as INTERNAL.
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate, response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "GenerateMany": grpc.stream_stream_rpc_method_handler(
                self._generate_many, response_serializer=pb.ManyResponse.SerializeToString
            ),
            "Tokenize": self._unary(pb.TokenizeRequest, self._tokenize),
            "GetModelInfo": self._unary(pb.GetModelInfoRequest, self._get_model_info),
            "Abort": self._unary(pb.AbortRequest, self._abort_request),
            "GetServerInfo": self._unary(pb.GetServerInfoRequest, self._get_server_info),
            "GetLoads": self._unary(pb.GetLoadsRequest, self._get_loads),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Returns the port. Raises CapacityError if it is taken."""
        port = bind(self._server, "grpc_port", self._config.grpc_host, self._config.grpc_port, self._certificates)
        await self._report_health()
        await self._server.start()
        return port

    async def run(self) -> None:
        """Reports health and ends streams whose clients take nothing, once per tick, until it is cancelled."""
        while True:
            await self._report_health()
            oldest = asyncio.get_running_loop().time() - self._config.write_timeout_s
            for writer in self._writers:
                if writer.since < oldest:
                    writer.give_up()
            for stream in self._streams:
                stream.end_stalled(oldest)
            await asyncio.sleep(self._config.tick_interval_s)

    async def stop(self, grace_s: float) -> None:
        """Accepts nothing new. What is open in `grace_s` seconds is cut off."""
        await self._health.enter_graceful_shutdown()
        for stream in self._streams:
            stream.drain()
        await self._server.stop(grace_s)

    async def _report_health(self) -> None:
        serving = self._door.facts.ready
        if serving != self._serving:
            self._serving = serving
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", SERVICE):
                await self._health.set(name, status)

    async def _generate(self, data: bytes, context: Context) -> None:
        async def stream(writer: _Writer) -> None:
            answers = self._door.generate(
                lambda: decode_generate(decode_bytes(pb.GenerateRequest, data, self._config.max_message_bytes)),
                deadline_s=context.time_remaining(),
                traceparent=header(context.invocation_metadata(), "traceparent") or "",
                account=self._account(context),
            )
            began = False
            async with aclosing(answers) as pieces:
                async for piece in pieces:
                    writer.writing(True)
                    # The headers go alone: if the first write carried them and was cancelled, no status could follow.
                    if not began:
                        await context.send_initial_metadata(())
                        began = True
                    await context.write(encode_piece(piece))
                    writer.writing(False)

        await self._stream(context, stream)

    async def _generate_many(self, requests: object, context: Context) -> None:
        async def stream(writer: _Writer) -> None:
            many = GrpcMany(self._door, self._config, context, partial(self._account, context))
            self._streams.add(many)
            try:
                await many.run(writer.writing)
            finally:
                self._streams.discard(many)

        await self._stream(context, stream)

    async def _stream(self, context: Context, stream: Callable[["_Writer"], Awaitable[None]]) -> None:
        """Runs the handler of a stream. It ends if its client takes nothing, or with its error's status."""
        writer = _Writer()
        self._writers.add(writer)
        try:
            await stream(writer)
        except asyncio.CancelledError:
            if not writer.gave_up:
                raise
            writer.task.uncancel()
            await abort(context, RequestCancelled(f"the client took nothing for {self._config.write_timeout_s:g} s"))
        except RequestError as error:
            await abort(context, error)
        finally:
            self._writers.discard(writer)

    def _account(self, context: Context) -> Account | None:
        if self._accounts is None:
            return None
        return self._accounts.authenticate(header(context.invocation_metadata(), "authorization"))

    def _unary(self, kind: type[M], answer: Callable[[Callable[[], M]], Awaitable[Message]]) -> grpc.RpcMethodHandler:
        return unary(kind, answer, self._config.max_message_bytes)

    async def _tokenize(self, read: Callable[[], pb.TokenizeRequest]) -> pb.TokenizeResponse:
        token_ids = await self._door.tokenize(lambda: decode_prompt(read()))
        return pb.TokenizeResponse(token_ids=token_ids.tolist(), max_model_len=self._door.facts.max_model_len)

    async def _abort_request(self, read: Callable[[], pb.AbortRequest]) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=await self._door.abort(check_id(read().request_id)))

    async def _get_server_info(self, read: Callable[[], pb.GetServerInfoRequest]) -> pb.GetServerInfoResponse:
        read()
        door = self._door
        return pb.GetServerInfoResponse(
            version=version(),
            model=door.model.name,
            max_model_len=door.facts.max_model_len,
            ready=door.facts.ready,
            uptime_s=door.uptime_s,
            max_message_bytes=self._config.max_message_bytes,
            max_queue=self._config.max_queue,
        )

    async def _get_loads(self, read: Callable[[], pb.GetLoadsRequest]) -> pb.GetLoadsResponse:
        read()
        loads = await self._door.loads()
        replicas = [encode_load(replica, age_s) for replica, age_s in loads.replicas]
        return pb.GetLoadsResponse(num_open=loads.num_open, num_queued=loads.num_queued, replicas=replicas)

    async def _get_model_info(self, read: Callable[[], pb.GetModelInfoRequest]) -> pb.GetModelInfoResponse:
        read()
        door = self._door
        return pb.GetModelInfoResponse(
            model=door.model.name,
            max_model_len=door.facts.max_model_len,
            vocab_size=door.model.vocab_size,
            has_chat_template=door.tokenizer.has_chat_template,
        )


class _Writer:
    """A call's handler, which may wait for a client that takes nothing. `GrpcDoor.run` looks at all of them on its own
    timer: one per token would cost a sixth of what a token costs here.
    """

    __slots__ = ("gave_up", "since", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.since = math.inf
        """When the present write began, in seconds of the event loop's clock; infinity if none is under way."""
        self.gave_up = False

    def writing(self, begins: bool) -> None:
        self.since = self.task.get_loop().time() if begins else math.inf

    def give_up(self) -> None:
        self.since, self.gave_up = math.inf, True
        self.task.cancel()
