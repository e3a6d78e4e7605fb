"""`RAY_ADDRESS` names the Ray that a deployment is given. That Ray is asked for a sign of life before Ray's client
joins it, because the client would wait for a dead one for minutes.
"""

import math
import os
import socket
from typing import NamedTuple

# These are set before Ray is imported, because Ray reads them once. A given cluster decides itself whether it wants a
# token and at which priority its workers run. For a private one Ray would write a token file that makes later job
# submissions fail, would run the workers at nice 15, and under `uv run` would want them to run under it too.
if os.environ.get("RAY_ADDRESS", "") in ("", "local"):
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.update(RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    os.environ.update(RAY_grpc_enable_http_proxy="0")  # all traffic is on the loopback interface
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import grpc
import ray
from ray._private.gcs_utils import create_gcs_channel
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc

from protocol.errors import ConfigError, StartupError

TIMEOUT_S = 5.0
"""Longest wait for a connection, and then for an answer on it."""
PRIVATE_FOLDERS = "/tmp/twopass-"
"""A Ray whose sockets lie in such a folder is the private Ray of a deployment."""

JOB_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""How long `ray job stop` leaves a job between SIGTERM and SIGKILL; Ray reads it in the job's runtime environment."""
JOB_STOP_DEFAULT_S = 3
STOP_S = 15
"""Longest time that a deployment takes to end after its drain."""


class GcsAddress(NamedTuple):
    """Address of the GCS, through which one joins a Ray."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_given() -> bool:
    """Whether `RAY_ADDRESS` names a Ray. The word "local" asks for a private one, as it does in Ray."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def given_address() -> GcsAddress:
    """The Ray that `RAY_ADDRESS` names. It answers, and it is no deployment's private one. Raises ConfigError and
    StartupError otherwise.
    """
    text = os.environ["RAY_ADDRESS"]
    address = _noted(text) if text == "auto" else parse(text)
    _require_answer(text, address)
    return address


def parse(text: str) -> GcsAddress:
    """Reads HOST:PORT. Raises ConfigError."""
    scheme, separator, _ = text.partition("://")
    remedy = "give HOST:PORT of its GCS, usually port 6379, or unset RAY_ADDRESS for a private Ray"
    if separator:
        names = {"http": "a dashboard", "https": "a dashboard", "ray": "a Ray client's server"}
        raise ConfigError(
            f"RAY_ADDRESS: {text} names {names.get(scheme, 'no GCS')}, "
            f"through which no deployment joins a Ray; {remedy}"
        )
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"RAY_ADDRESS: {text} is not HOST:PORT; {remedy}")
    return GcsAddress(host.removeprefix("[").removesuffix("]"), int(port))


def _noted(text: str) -> GcsAddress:
    """The address that `ray start` has noted on this machine. Raises StartupError if it has noted none: Ray itself
    would then join any GCS that it finds in the process table.
    """
    noted = ray._private.utils.read_ray_address()
    if noted is None:
        raise StartupError(
            f"RAY_ADDRESS: {text} means the Ray that `ray start` started on this machine, and it has started none"
        )
    return parse(noted)


def _require_answer(text: str, address: GcsAddress) -> None:
    """Raises StartupError unless a GCS answers at `address` and is not that of a private Ray."""
    name = text if text == str(address) else f"{text} ({address})"
    try:
        socket.create_connection(address, TIMEOUT_S).close()
    except OSError as error:
        raise StartupError(f"RAY_ADDRESS: no Ray answers at {name}: {error}") from None
    with create_gcs_channel(str(address)) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            nodes = stub.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=TIMEOUT_S).node_info_list
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:  # it is a GCS; Ray's client has the token
                return
            raise StartupError(f"RAY_ADDRESS: what listens at {name} is no Ray's GCS: {error.code().name}") from None
    if any(node.object_store_socket_name.startswith(PRIVATE_FOLDERS) for node in nodes):
        raise StartupError(
            f"RAY_ADDRESS: {name} is the private Ray of another deployment, and ends with it; unset RAY_ADDRESS"
        )
    if not any(node.state == gcs_pb2.GcsNodeInfo.ALIVE for node in nodes):
        raise StartupError(f"RAY_ADDRESS: the Ray at {name} has no machine that is alive")


def job_warning(drain_s: float) -> str:
    """The warning for a Ray job that `ray job stop` would kill in the middle of its drain; else an empty text."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return ""
    wait = os.environ.get(JOB_STOP_WAIT, "")
    wait_s = int(wait) if wait.isdecimal() else JOB_STOP_DEFAULT_S
    if wait_s >= drain_s + STOP_S:
        return ""
    needed = f"""--runtime-env-json '{{"env_vars": {{"{JOB_STOP_WAIT}": "{math.ceil(drain_s + STOP_S)}"}}}}'"""
    return (
        f"`ray job stop` kills this job {wait_s} s after it asked for a drain of up to {drain_s:g} s: "
        f"submit it with {needed}"
    )
