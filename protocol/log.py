"""Logs as JSON on standard error, one object per line: time, level, logger, replica, message, and fields that say what
the line is about.

    log = logging.getLogger(__name__)
    log.warning("attempt failed", extra=about(key) | {"error": error})
    {"time": "2026-05-04T09:12:31.084Z", "level": "warning", "logger": "router.router", "replica": "router@1",
     "message": "attempt failed", "request_id": "a1", "attempt": 1, "error": "lease_expired"}

Lines about one request are debug, since there are thousands under load. Replicas that come and go are info.
Failures, and forbidden acts of a peer, are warnings. Nothing is written until `configure` is called: tests and
simulators do not call it.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from protocol.messages import Address, RequestKey

LogLevel = Literal["debug", "info", "warning", "error"]

PACKAGES = ("protocol", "jit", "engine", "kv_transfer", "prefill_pool", "decode_pool", "router", "cluster")
"""The packages whose level is set. Logs of libraries appear from `warning` on."""

_STANDARD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
"""Fields that every record has. Libraries such as Ray add fields with a leading underscore."""


def configure(level: LogLevel, address: Address, stream: TextIO | None = None) -> None:
    """Sets up the logs of a whole process, in place of an earlier setup. They go to `stream`, or else to
    standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(address))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    set_level(level)


def set_level(level: LogLevel) -> None:
    """From now on this process writes lines of that level and above."""
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


def about(key: RequestKey) -> dict[str, Any]:
    """The fields of a line about one attempt."""
    return {"request_id": key.request_id, "attempt": key.attempt}


def label(address: Address) -> str:
    return f"{address.replica_id}@{address.epoch}"


class JsonFormatter(logging.Formatter):
    def __init__(self, address: Address) -> None:
        super().__init__()
        self._replica = label(address)

    def format(self, record: logging.LogRecord) -> str:
        """Makes one line, whatever the message contains. Its fields are those given as `extra`; values that JSON cannot
        express become text.
        """
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "replica": self._replica,
            "message": record.getMessage(),
        }
        fields |= {
            name: value for name, value in vars(record).items() if name not in _STANDARD and not name.startswith("_")
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


for _package in PACKAGES:
    # Without a handler Python prints warnings where nobody has called `configure`.
    logging.getLogger(_package).addHandler(logging.NullHandler())
