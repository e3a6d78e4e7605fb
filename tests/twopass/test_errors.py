"""Every gRPC status becomes an error of the client library."""

import grpc
import pytest

import twopass
from twopass.errors import from_status

KINDS = {
    "INVALID_ARGUMENT": twopass.InvalidRequest,
    "NOT_FOUND": twopass.NotFound,
    "RESOURCE_EXHAUSTED": twopass.RequestTooLarge,
    "UNAVAILABLE": twopass.Unavailable,
    "DEADLINE_EXCEEDED": twopass.DeadlineExceeded,
    "CANCELLED": twopass.Cancelled,
    "UNAUTHENTICATED": twopass.AccessDenied,
    "PERMISSION_DENIED": twopass.AccessDenied,
    "UNIMPLEMENTED": twopass.NotSupported,
}


@pytest.mark.parametrize("status", [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_is_an_error_of_the_tree(status: str) -> None:
    error = from_status(status, "what happened", {})
    assert type(error) is KINDS.get(status, twopass.ServerError)
    assert (error.status, str(error)) == (status, "what happened")
    assert isinstance(error, twopass.TwopassError)
    assert error.retryable == (status == "UNAVAILABLE")


def test_metadata_says_more() -> None:
    overloaded = from_status("RESOURCE_EXHAUSTED", "full", {"retry-after-s": "1.5"})
    assert isinstance(overloaded, twopass.Overloaded)
    assert overloaded.retry_after_s == 1.5
    assert overloaded.retryable
    invalid = from_status("INVALID_ARGUMENT", "no", {"invalid-field": "top_k"})
    assert isinstance(invalid, twopass.InvalidRequest)
    assert invalid.field == "top_k"


def test_an_error_without_details_still_says_something() -> None:
    assert str(from_status("INTERNAL", "", {})) == "INTERNAL"
