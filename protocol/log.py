"""Logs as JSON, one object a line, on standard error: time, level, logger, replica, message, and whatever the line is
about.

    log = logging.getLogger(__name__)
    log.warning("attempt failed", extra=about(key) | {"error": error})
    {"time": "2026-05-04T09:12:31.084Z", "level": "warning", "logger": "router.router", "replica": "router@1",
     "message": "attempt failed", "request_id": "a1", "attempt": 1, "error": "lease_expired"}

Lines about one request are debug: at load there are thousands. Replicas that come and go are info. Failures, and what a
peer did that it may not, are warnings. Until `configure` is called nothing is written: tests and simulators call it
not.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from protocol.messages import Address, RequestKey

LogLevel = Literal["debug", "info", "warning", "error"]

PACKAGES = ("protocol", "engine", "kv_transfer", "prefill_pool", "decode_pool", "router", "cluster")
"""Whose logs these are; those of libraries appear from `warning` on."""

_STANDARD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
"""Every record has these; names with a leading underscore are somebody's own, Ray's for one."""


def configure(level: LogLevel, address: Address, stream: TextIO | None = None) -> None:
    """For a whole process, in place of what was configured before. `stream` None: standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(address))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
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
        """One line, whatever the message holds. Fields are those given as `extra`; what JSON has no word for becomes
        text.
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
    logging.getLogger(_package).addHandler(
        logging.NullHandler()
    )  # else Python prints warnings where nobody configured anything
