"""Two doors in front of one core, under a real Ray: each dies alone, and both outlive the core."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.runners.arithmetic_model import expected_tokens
from tests.e2e.streams import assert_clean, await_back, deployed
from tests.e2e.watched import Running
from tests.hang import HANG_S
from twopass import Client, Stream, Unavailable
from twopass.admin import AdminClient, Replica

DOORS = ("door-0", "door-1")
NUM_CLIENTS = 24
LONG = 800


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with deployed(
        {"runner": "arithmetic", "router": {"doors": len(DOORS), "admin_port": 0}}, num_blocks=4096
    ) as running:
        yield running


def pids(running: Running, *names: str) -> list[int]:
    return [int(running.deployment.actor(name).call("pid")) for name in names]


def counted(running: Running, name: str, **labels: str) -> float:
    """The sum over all samples of a metric that have the labels."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(f"http://127.0.0.1:{running.deployment.ports.metrics_port}/metrics").read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"twopass_{name}" and labels.items() <= sample.labels.items()
    )


class Reader:
    """One client with a connection of its own, and the answer that it reads."""

    def __init__(self, port: int, index: int) -> None:
        self.prompt = [index + 1, 7, 9]
        self.client = Client(f"127.0.0.1:{port}", timeout_s=HANG_S)
        self.stream: Stream = self.client.generate(prompt_token_ids=self.prompt, max_tokens=LONG, ignore_eos=True)
        self.token_ids = list(next(self.stream).token_ids)

    def read(self) -> str:
        """Reads the rest. Returns how the answer ended."""
        with self.client:
            try:
                for chunk in self.stream:
                    self.token_ids += chunk.token_ids
            except Unavailable:
                return "unavailable"
        assert self.token_ids == expected_tokens(self.prompt, LONG)
        return "complete"


@contextmanager
def reading(running: Running) -> Iterator["list[Future[str]]"]:
    """Every client has its first token when this yields."""
    port = running.deployment.ports.grpc_port
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        readers = list(threads.map(lambda index: Reader(port, index), range(NUM_CLIENTS)))
        yield [threads.submit(reader.read) for reader in readers]


def test_doors_share_the_port_and_their_counts_meet_at_the_cores(running: Running) -> None:
    before = counted(running, "requests_ended_total", reason="length")
    with reading(running) as answers:
        assert {answer.result() for answer in answers} == {"complete"}
    while counted(running, "requests_ended_total", reason="length") < before + NUM_CLIENTS:
        continue
    assert counted(running, "requests_ended_total", reason="length") == before + NUM_CLIENTS
    assert counted(running, "time_to_first_token_seconds_count") == counted(running, "requests_accepted_total")


def test_a_call_of_one_door_can_be_aborted_at_another(running: Running) -> None:
    port = running.deployment.ports.grpc_port
    with ExitStack() as clients:
        many = [clients.enter_context(Client(f"127.0.0.1:{port}", timeout_s=HANG_S)) for _ in range(12)]
        stream = many[0].generate(prompt_token_ids=[3], max_tokens=LONG, ignore_eos=True, request_id="mine")
        next(stream)
        assert sum(client.abort("mine") for client in many[1:]) >= 1
        assert {client.server_info().ready for client in many} == {True}
        assert {len(client.loads().replicas) for client in many} == {4}


def test_a_killed_door_ends_its_own_calls_alone_and_comes_back(running: Running) -> None:
    (pid,) = pids(running, "door-0")
    router = running.deployment.actor("router").address
    failed = counted(running, "requests_ended_total", reason="failed")
    with reading(running) as answers:
        os.kill(pid, signal.SIGKILL)
        ends = [answer.result() for answer in answers]
    assert set(ends) == {"complete", "unavailable"}
    await_back(running, "door-0")
    assert running.deployment.actor("router").address == router
    assert counted(running, "requests_ended_total", reason="failed") == failed + ends.count("unavailable")
    assert_clean(running)
    with reading(running) as answers:
        assert {answer.result() for answer in answers} == {"complete"}


def test_a_killed_router_ends_all_calls_and_the_same_doors_serve_the_next(running: Running) -> None:
    (router,), doors = pids(running, "router"), pids(running, *DOORS)
    with reading(running) as answers:
        os.kill(router, signal.SIGKILL)
        assert {answer.result() for answer in answers} == {"unavailable"}
    await_back(running, "router")
    with Client(f"127.0.0.1:{running.deployment.ports.grpc_port}", timeout_s=HANG_S) as client:
        while not client.server_info().ready:
            continue
    assert_clean(running)
    with reading(running) as answers:
        assert {answer.result() for answer in answers} == {"complete"}
    assert pids(running, *DOORS) == doors


def test_an_administrators_orders_outlive_the_router_and_the_engine(running: Running) -> None:
    """The decode engines are drained while they write answers. Those end, and nothing new is taken."""
    decodes = ("decode-0", "decode-1")

    def drained(admin: AdminClient) -> dict[str, str]:
        return {replica.replica_id: replica.state for replica in admin.replicas() if replica.drained}

    def refused() -> str:
        with Client(f"127.0.0.1:{running.deployment.ports.grpc_port}", timeout_s=HANG_S, max_tries=1) as client:
            with pytest.raises(Unavailable) as raised:
                client.generate_text(prompt_token_ids=[3], max_tokens=2)
            return str(raised.value)

    with AdminClient(f"127.0.0.1:{running.deployment.ports.admin_port}") as admin:
        with reading(running) as answers:
            in_flight, effects = zip(
                *((order.in_flight, order.effect) for order in map(admin.drain, decodes)), strict=True
            )
            assert 0 < sum(in_flight) <= NUM_CLIENTS and effects[0] == ""
            assert effects[1] == "new requests are refused: no decode engine is up, those that are there drain"
            assert "those that are there drain" in refused()
            assert {answer.result() for answer in answers} == {"complete"}
        while any(_busy(replica) for replica in admin.replicas()):
            continue
        admin.set_log_level("debug", "decode-0")
        while running.deployment._orders.drained != {*decodes}:  # the supervisor looks every 0.05 s here
            continue
        os.kill(pids(running, "router")[0], signal.SIGKILL)
        os.kill(pids(running, "decode-0")[0], signal.SIGKILL)
        await_back(running, "router")
        while drained(admin) != dict.fromkeys(decodes, "draining"):
            continue
        assert "those that are there drain" in refused()
        for name in decodes:
            admin.undrain(name)
        assert drained(admin) == {}
    with Client(f"127.0.0.1:{running.deployment.ports.grpc_port}", timeout_s=HANG_S) as client:
        while not client.server_info().ready:
            continue
    assert_clean(running)
    with reading(running) as answers:
        assert {answer.result() for answer in answers} == {"complete"}


def _busy(replica: Replica) -> bool:
    return bool(replica.in_flight or replica.num_leases or replica.num_running or replica.num_waiting)
