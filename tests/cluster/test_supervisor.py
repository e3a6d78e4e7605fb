"""How the supervisor treats a start that fails: a failed first start ends the deployment with its cause, and a failed
restart counts as a death.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import serve
from cluster.config import load
from cluster.ray_handles import Actor
from cluster.replica_process import ReplicaProcess
from cluster.serve import Deployment
from protocol.errors import StartupError
from protocol.messages import Address
from router.admin import Orders
from tests.engine.tiny_llama import write_model_dir

NO_MEMORY = "decode-0: OutOfMemoryError: tried to allocate 2.00 GiB"


class FailingStart:
    """Stands in for Ray. Every call to an actor has already ended with an error."""

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def check(self) -> None:
        pass

    def ready(self, reference: Any, timeout_s: float) -> bool:
        return True

    def result(self, reference: Any, timeout_s: float = 60.0) -> Any:
        raise StartupError(NO_MEMORY)

    def do(self, function: Callable[..., Any], *args: Any) -> None:
        self.killed.append(args[0])


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def starting(told: list[str]) -> tuple[Deployment, ReplicaProcess]:
    """An engine whose `start` has been called."""
    deployment = Deployment(load(None, ["runner=arithmetic"]), told.append)
    ray: Any = FailingStart()
    deployment._ray = ray
    engine = ReplicaProcess("decode-0", "decode", 0, Actor(Address("decode-0", 2), "its handle", ray), "starting")
    deployment._engines.append(engine)
    return deployment, engine


def test_the_first_start_fails_with_its_cause(starting: tuple[Deployment, ReplicaProcess]) -> None:
    deployment, engine = starting
    with pytest.raises(StartupError, match=f"^{NO_MEMORY}$"):
        deployment._await_first_start(engine)


def test_a_restart_that_fails_is_a_death(starting: tuple[Deployment, ReplicaProcess], told: list[str]) -> None:
    deployment, engine = starting
    deployment._watch(engine, now=100.0)
    assert (engine.state, engine.actor, engine.num_deaths, engine.since) == ("down", None, 1, 100.0)
    assert told == [f"decode-0 is down: {NO_MEMORY}; a new one starts in 0 s"]


def test_the_start_times_of_a_process_that_does_not_answer_are_left_out(
    starting: tuple[Deployment, ReplicaProcess],
) -> None:
    deployment, engine = starting
    handle: Any = SimpleNamespace(start_times=SimpleNamespace(remote=lambda: None))
    engine.actor = Actor(Address("decode-0", 2), handle, deployment._ray)
    assert [*deployment.start_times()] == ["command"]


@pytest.mark.parametrize(("address", "threads", "cpus"), [("", 32, 32), ("10.0.0.1:6379", 1, None)])
def test_a_given_ray_is_asked_for_no_share_of_this_machines_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, threads: int, cpus: int | None
) -> None:
    """It may place engines elsewhere, and may have been given fewer CPUs than this machine has."""
    write_model_dir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(serve, "usable_cores", lambda: [frozenset((cpu,)) for cpu in range(64)])
    knobs = [f"{pool}.{knob}" for pool in ("prefill", "decode") for knob in ("max_model_len=256", "num_blocks=8")]
    deployment = Deployment(load(None, [f"model={tmp_path}", *knobs]), lambda text: None)
    assert [bundle.num_cpus for bundle in deployment._check()] == [threads] * 2
    assert [own and len(own) for own in deployment._cpus] == [cpus] * 2


def test_orders_are_kept_for_the_next_router_and_every_process_gets_its_log_level(
    starting: tuple[Deployment, ReplicaProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, engine = starting
    orders = Orders(frozenset({"decode-0"}), {"": "debug"})
    asked: list[Any] = []
    levels: list[str] = []
    answers: dict[str, Any] = {"orders": orders}

    def ask_router(self: Deployment, method: str, *args: object) -> Any:
        asked.append((method, *args))
        return answers.get(method)

    monkeypatch.setattr(Deployment, "_ask_router", ask_router)
    handle: Any = SimpleNamespace(set_log_level=SimpleNamespace(remote=levels.append))
    engine.actor = Actor(Address("decode-0", 2), handle, deployment._ray)
    deployment._follow_orders()
    assert levels == []  # it has not started
    engine.state = "up"
    for _ in range(2):
        deployment._follow_orders()
    assert levels == ["debug"]
    answers.clear()  # the router is dead
    engine.actor = Actor(Address("decode-0", 3), handle, deployment._ray)  # and the engine has a successor
    deployment._follow_orders()
    assert levels == ["debug", "debug"]
    asked.clear()
    monkeypatch.setattr(ReplicaProcess, "ask", lambda self, method, now: None)
    deployment._came_up(deployment._router, deployment.config.router.ports, 1.0)
    assert asked == [("restore", orders), ("replica_started", Address("decode-0", 3))]
