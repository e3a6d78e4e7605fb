"""Every error that a request may end with has a row in the table that all doors read."""

import grpc

from protocol.errors import Draining, InvalidRequest, Overloaded, RequestError
from router.error_table import RETRY_AFTER_S, ROWS, retry_after_s


def leaves(kind: type[RequestError]) -> list[type[RequestError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]


def test_every_error_has_a_row_and_every_row_is_a_grpc_status() -> None:
    assert {kind.code for kind in leaves(RequestError)} == set(ROWS)
    assert set(ROWS) <= {status.name for status in grpc.StatusCode}


def test_only_errors_that_may_be_tried_again_have_a_hint() -> None:
    assert retry_after_s(Overloaded("full", retry_after_s=2.5)) == 2.5
    assert retry_after_s(Draining("the deployment is draining")) == RETRY_AFTER_S
    assert retry_after_s(InvalidRequest("n", 0, "1 to 64")) is None
