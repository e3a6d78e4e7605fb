"""The border of an engine's process: whatever its start raises, the supervisor gets one kind of error."""

from contextlib import ExitStack

import pytest

from engine.actor import EngineActor
from engine.loop import EngineLoop
from protocol.errors import CapacityError, StartupError
from protocol.messages import Address


class OutOfMemoryError(RuntimeError):
    """As a library would raise it that the supervisor's process need not have."""


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (
            OutOfMemoryError("tried to allocate 2.00 GiB"),
            StartupError,
            "decode-0: OutOfMemoryError: tried to allocate 2.00 GiB",
        ),
        (
            OSError(28, "No space left on device"),
            StartupError,
            r"OSError: \[Errno 28\] No space left on device",
        ),
        (CapacityError("num_blocks: 1 is too few"), CapacityError, "num_blocks: 1 is too few"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(raised: Exception, kind: type[Exception], text: str) -> None:
    closed: list[str] = []

    def build(resources: ExitStack) -> EngineLoop:
        resources.callback(closed.append, "memory")
        raise raised

    actor = EngineActor(Address("decode-0", 1), "info", build)
    with pytest.raises(kind, match=f"^(decode-0: )?{text}$") as caught:
        actor.start()
    assert type(caught.value) is kind and closed == ["memory"]
    assert caught.value.__cause__ is None, "it travels to a process that may not know the cause's class"
    assert actor.failure() == ""
    actor.stop()
