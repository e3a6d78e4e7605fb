"""Log lines that machines can read."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.log import PACKAGES, about, configure, set_level
from protocol.messages import Address, RequestKey
from tests.hang import HANG_S

log = logging.getLogger("router.somewhere")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The stream that the lines go to. Afterwards the earlier configuration is restored."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)  # otherwise `configure` closes it
    yield io.StringIO()
    root.handlers[:], root.level = handlers, level
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.NOTSET)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_the_level_can_change_while_the_process_runs(stream: io.StringIO) -> None:
    configure("warning", Address("router", 7), stream)
    log.debug("before")
    set_level("debug")
    log.debug("after")
    set_level("error")
    log.warning("too late")
    assert [line["message"] for line in lines(stream)] == ["after"]


def test_a_line_says_who_when_and_what_it_is_about(stream: io.StringIO) -> None:
    configure("info", Address("router", 7), stream)
    log.warning("attempt %s", "failed", extra=about(RequestKey(7, "a\n1", 2)) | {"error": "lease_expired"})
    (line,) = lines(stream)
    assert line.pop("time")[10] == "T"
    fields = {"request_id": "a\n1", "attempt": 2, "error": "lease_expired"}
    expected = {"level": "warning", "logger": "router.somewhere", "replica": "router@7", "message": "attempt failed"}
    assert line == expected | fields


def test_the_level_is_for_our_packages_and_libraries_only_warn(stream: io.StringIO) -> None:
    configure("debug", Address("router", 7), stream)
    log.debug("shown")
    logging.getLogger("numba").info("hidden")
    logging.getLogger("numba").warning("shown too")
    configure("warning", Address("router", 7), stream)
    log.info("hidden")
    assert [line["message"] for line in lines(stream)] == ["shown", "shown too"]


def test_exceptions_stay_on_their_line_and_anything_can_be_a_field(stream: io.StringIO) -> None:
    configure("info", Address("router", 7), stream)
    log.error(
        "died", exc_info=ValueError("why"), extra={"peer": Address("decode-0", 3), "path": object, "name_of": "\udc80"}
    )
    (line,) = lines(stream)
    assert "ValueError: why" in line["exception"] and line["peer"] == ["decode-0", 3] and line["name_of"] == "\udc80"


def test_nothing_is_written_where_nobody_configured_it() -> None:
    code = "import logging, protocol.log; logging.getLogger('router.router').warning('attempt failed')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=HANG_S)
    assert done.stdout + done.stderr == b""
