"""What a prefill engine says of leases that nobody answers."""

import pytest

from protocol.messages import AbortRequest
from tests.pool_world import ROUTER, PrefillWorld, key


@pytest.mark.parametrize(("aborted", "message"), [(False, "lease expired"), (True, "revoke expired")])
def test_an_unanswered_lease_is_a_warning_about_its_attempt(
    caplog: pytest.LogCaptureFixture, aborted: bool, message: str
) -> None:
    world = PrefillWorld()
    world.generate()
    world.step()
    world.step()
    if aborted:
        world.say(ROUTER, AbortRequest(key=key(), reason="client"))
    assert caplog.records == []
    world.pass_time(31)
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("WARNING", message)
    fields = vars(record)
    assert (fields["request_id"], fields["attempt"], fields["peer"]) == ("r", 1, "decode-0@6")
