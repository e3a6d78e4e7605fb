"""The drain bounds how long the supervisor waits, even for a router that does not answer."""

from typing import Any

from cluster.config import from_tree
from cluster.ray_handles import Actor
from cluster.serve import Deployment
from protocol.errors import StartupError
from protocol.messages import ROUTER_ID, Address


class FrozenRouter(Actor):
    """A router that answers nothing. It notes the timeout of every call."""

    def call(self, method: str, *args: object, timeout_s: float = 60.0) -> Any:
        self.handle.append(timeout_s)
        raise StartupError("no answer")


class RouterAtItsDeadline(Actor):
    """A router that has just cut short three open requests at its deadline."""

    def call(self, method: str, *args: object, timeout_s: float = 60.0) -> Any:
        return {"drain": None, "num_open": 0, "num_cut_short": 3}[method]


def test_what_the_deadline_has_cut_short_is_not_called_drained() -> None:
    deployment = Deployment(from_tree({"runner": "arithmetic"}), print)
    deployment._router.actor, deployment._router.state = (
        RouterAtItsDeadline(Address(ROUTER_ID, 1), [], deployment._ray),
        "up",
    )
    assert deployment.drain(5.0) == 3


def test_a_router_that_does_not_answer_holds_up_no_drain() -> None:
    deployment = Deployment(from_tree({"runner": "arithmetic"}), print)
    asked: list[float] = []
    deployment._router.actor, deployment._router.state = (
        FrozenRouter(Address(ROUTER_ID, 1), asked, deployment._ray),
        "up",
    )
    assert deployment.drain(5.0) is None
    assert deployment.drain(0.0) is None
    assert all(timeout_s <= max(1.0, limit_s) for timeout_s, limit_s in zip(asked, (5.0, 0.0), strict=True))
