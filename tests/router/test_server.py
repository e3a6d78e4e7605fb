"""The gRPC server as a whole, from its port to its stop, in front of a scripted core."""

import asyncio
import socket
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import twopass
from protocol.errors import (
    CapacityError,
    Draining,
    ProtocolError,
)
from protocol.messages import ROUTER_ID, Address, Envelope, Hello, PeerGap, ReplicaStatus, RouterStatus
from router.config import RouterConfig
from router.grpc_door import SERVICE
from router.policy import ReplicaView
from router.router import Router
from tests.router.scripted_core import ScriptedCore, Serving, scenario, serving
from twopass import AsyncClient


def test_server_info() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            info = await client.server_info()
        assert (info.model, info.max_model_len, info.ready) == ("arithmetic", 10_000, True)
        config = RouterConfig()
        assert (info.max_message_bytes, info.max_queue) == (config.max_message_bytes, config.max_queue)
        assert info.uptime_s > 0

    scenario(test)


def engines() -> list[ReplicaView]:
    """One engine whose status is two seconds old, and one that has sent none yet."""
    hello = Hello(
        role="decode",
        layout_fingerprint=b"l",
        block_size=16,
        num_blocks=100,
        max_num_seqs=8,
        max_model_len=10_000,
        max_prompt_tokens=9999,
        endpoint=b"",
    )
    status = ReplicaStatus(
        state="up",
        seq=3,
        num_waiting=1,
        num_running=2,
        num_leases=0,
        num_pulls=4,
        num_early_handoffs=0,
        num_free_blocks=60,
        transport="shared_memory",
        counters={"steps": 9.0},
        num_scheduled_tokens=({"a": 5, "b": 1},),
    )
    return [
        ReplicaView(Address("decode-0", 7), hello, time.monotonic() - 2.0, "up", 3, status=status),
        ReplicaView(Address("decode-1", 8), hello, time.monotonic(), "suspected"),
    ]


def test_loads() -> None:
    core = ScriptedCore()
    core.engines = engines()
    core.num_queued = 5

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            loads = await client.loads()
        assert (loads.num_open, loads.num_queued) == (0, 5)
        first, second = loads.replicas
        assert (first.replica_id, first.epoch, first.role, first.state) == ("decode-0", 7, "decode", "up")
        assert (first.in_flight, first.num_blocks, first.block_size, first.max_num_seqs) == (3, 100, 16, 8)
        assert (first.num_waiting, first.num_running, first.num_free_blocks) == (1, 2, 60)
        assert (first.num_leases, first.num_pulls) == (0, 4)
        assert (first.transport, first.counters) == ("shared_memory", {"steps": 9.0})
        assert first.num_scheduled_tokens == [{"a": 5, "b": 1}]
        assert first.age_s >= 2.0
        assert (second.state, second.num_waiting, second.num_scheduled_tokens) == ("suspected", None, [])

    scenario(test, core)


def test_a_taken_port_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def main() -> None:
            async with serving(ScriptedCore(), grpc_port=port):
                pass

        with pytest.raises(CapacityError, match=str(port)):
            asyncio.run(main())


def test_two_servers_never_share_a_port() -> None:
    async def test(s: Serving) -> None:
        with pytest.raises(CapacityError):
            async with serving(ScriptedCore(), grpc_port=int(s.address.rsplit(":", 1)[1])):
                pass

    scenario(test)


def test_health_follows_the_core_and_reflection_names_the_service() -> None:
    core = ScriptedCore()
    core.ready = False

    async def test(s: Serving) -> None:
        async with grpc.aio.insecure_channel(s.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            core.ready = True
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            core.ready = False
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = reflect.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = [service.name for service in (await call.read()).list_services_response.service]
            assert SERVICE in names
            assert "grpc.health.v1.Health" in names

    scenario(test, core, tick_interval_s=0.001)


def test_stop_lets_open_answers_end_and_takes_nothing_new() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client, AsyncClient(s.address, max_tries=1) as late:
            stream = client.generate(prompt_token_ids=[1])
            request = await s.next_submit()
            stopping = asyncio.create_task(s.server.stop(20.0))
            assert await s.core.calls.get() == ("drain", 20.0)
            s.core.tokens(request.request_id, 3)
            s.core.end(request.request_id, "stop")
            s.pump()
            assert (await stream.read()).token_ids == [3]
            await stopping
            await s.server.wait()
            with pytest.raises(twopass.Unavailable):
                await late.generate_text(prompt_token_ids=[1])

    scenario(test)


def test_what_is_open_at_the_end_of_the_grace_gets_the_error_of_the_core() -> None:
    class Core(ScriptedCore):
        def drain(self, deadline_s: float) -> None:
            self.end("mine", None, Draining("the deployment was shut down"))

    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            stream = client.generate(prompt_token_ids=[1], request_id="mine")
            await s.next_submit()
            await s.server.stop(0.0)
            with pytest.raises(twopass.Unavailable, match="shut down"):
                await stream.read()

    scenario(test, Core())


def test_the_real_core_fits_behind_the_door() -> None:
    async def test(s: Serving) -> None:
        async with AsyncClient(s.address, max_tries=1) as client:
            with pytest.raises(twopass.Unavailable):
                await client.generate_text(prompt_token_ids=[1] * 100)

    scenario(test, Router(RouterConfig(), address=Address(ROUTER_ID, 1), clock=time.monotonic, seed=0))


def test_wait_raises_what_broke_the_core() -> None:
    core = ScriptedCore()

    async def test(s: Serving) -> None:
        core.tick_error = ProtocolError("row 9 of table 2")
        with pytest.raises(ProtocolError, match="row 9"):
            await s.server.wait()

    scenario(test, core, tick_interval_s=0.001)


def test_messages_go_in_and_out() -> None:
    async def test(s: Serving) -> None:
        engine, router = Address("decode-0", 1), Address(ROUTER_ID, 1)
        envelope = Envelope(engine, router, 0, PeerGap(peer=engine))
        status = RouterStatus(router_epoch=1, seq=0, prefill_room_blocks=0, prefill_max_tokens=0)
        s.core.outbox.append((engine, status))
        s.loop.deliver(envelope)
        assert s.core.calls.get_nowait() == ("handle", envelope)
        assert s.sent == [(engine, status)]
        assert s.core.outbox == []

    scenario(test)
