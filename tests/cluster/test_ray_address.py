"""An error about `RAY_ADDRESS` is one line and comes in bounded time, and a private Ray is never joined."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc

from cluster import ray_address
from cluster.ray_address import STOP_S, GcsAddress, given_address, is_given, job_warning, parse
from protocol.errors import ConfigError, StartupError

ALIVE, DEAD = gcs_pb2.GcsNodeInfo.ALIVE, gcs_pb2.GcsNodeInfo.DEAD


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://127.0.0.1:8265", "http://127.0.0.1:8265 names a dashboard"),
        ("https://ray.example/", "https://ray.example/ names a dashboard"),
        ("ray://head:10001", "ray://head:10001 names a Ray client's server"),
        ("anyscale://x", "anyscale://x names no GCS"),
        ("garbage", "garbage is not HOST:PORT"),
        ("head:", "head: is not HOST:PORT"),
        (":6379", ":6379 is not HOST:PORT"),
        ("head:port", "head:port is not HOST:PORT"),
        ("head:65536", "head:65536 is not HOST:PORT"),
        ("head:0", "head:0 is not HOST:PORT"),
    ],
)
def test_what_is_no_address_is_named_with_the_remedy(text: str, problem: str) -> None:
    with pytest.raises(
        ConfigError, match="give HOST:PORT of its GCS, usually port 6379, or unset RAY_ADDRESS"
    ) as raised:
        parse(text)
    assert str(raised.value).startswith(f"RAY_ADDRESS: {problem}")


def test_addresses() -> None:
    assert parse("head.example:6379") == GcsAddress("head.example", 6379)
    assert parse("[::1]:6379") == GcsAddress("::1", 6379)
    assert str(parse("[::1]:6379")) == "[::1]:6379"


def test_none_and_local_ask_for_a_private_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_given()
    for text, given in (("", False), ("local", False), ("auto", True), ("head:6379", True)):
        monkeypatch.setenv("RAY_ADDRESS", text)
        assert is_given() is given


@contextmanager
def gcs(*nodes: gcs_pb2.GcsNodeInfo) -> Iterator[str]:
    """Address of a server that answers as the GCS of a Ray with these nodes."""

    class Servicer(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):  # type: ignore[misc]
        def GetAllNodeInfo(self, request: object, context: object) -> gcs_service_pb2.GetAllNodeInfoReply:
            return gcs_service_pb2.GetAllNodeInfoReply(node_info_list=nodes)

    server = grpc.server(ThreadPoolExecutor(1))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def node(state: "gcs_pb2.GcsNodeInfo.GcsNodeState.ValueType", folder: str = "/tmp/ray") -> gcs_pb2.GcsNodeInfo:
    return gcs_pb2.GcsNodeInfo(state=state, object_store_socket_name=f"{folder}/session/sockets/plasma_store")


def problem(monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    monkeypatch.setenv("RAY_ADDRESS", text)
    with pytest.raises(StartupError) as raised:
        given_address()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_ray_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with gcs(node(DEAD), node(ALIVE)) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert str(given_address()) == address
        monkeypatch.setenv("RAY_ADDRESS", "auto")  # `ray start` has noted the address
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")
        assert str(given_address()) == address


def test_a_private_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs(node(ALIVE, "/tmp/twopass-123-abc")) as address:
        assert problem(monkeypatch, address).startswith(
            f"RAY_ADDRESS: {address} is the private Ray of another deployment"
        )


def test_auto_looks_for_no_ray_that_it_was_not_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert problem(monkeypatch, "auto").startswith(
        "RAY_ADDRESS: auto means the Ray that `ray start` started on this machine"
    )
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    assert problem(monkeypatch, "auto").startswith("RAY_ADDRESS: no Ray answers at auto (127.0.0.1:1): ")


def test_a_dead_ray_and_what_is_none_are_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(monkeypatch, "127.0.0.1:1").startswith("RAY_ADDRESS: no Ray answers at 127.0.0.1:1: ")
    with gcs(node(DEAD)) as address:
        assert problem(monkeypatch, address) == f"RAY_ADDRESS: the Ray at {address} has no machine that is alive"
    monkeypatch.setattr(ray_address, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert problem(monkeypatch, address).startswith(f"RAY_ADDRESS: what listens at {address} is no Ray's GCS: ")


def test_a_job_that_would_be_killed_in_its_drain_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_warning(30.0) == ""  # no job
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    warning = job_warning(30.0)
    assert "kills this job 3 s after" in warning
    assert """--runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "45"}}'""" in warning
    assert "\n" not in warning
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "30")
    assert "kills this job 30 s after" in job_warning(30.0)
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", str(30 + STOP_S))
    assert job_warning(30.0) == ""
