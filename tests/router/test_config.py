"""Values that the router's configuration refuses."""

from typing import Any

import pytest

from protocol.errors import ConfigError
from router.config import RouterConfig


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("grpc_port", 65536),
        ("grpc_port", -1),
        ("metrics_port", 65536),
        ("max_message_bytes", 0),
        ("max_queue", 0),
        ("max_attempts", 0),
        ("status_interval_s", 0.0),
        ("replica_timeout_s", 1.0),
        ("router_timeout_s", 0.5),
        ("tick_interval_s", float("nan")),
        ("queue_ttl_s", 0.0),
        ("policy", "fastest"),
    ],
)
def test_bad_values_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=knob):
        RouterConfig(**{knob: value})
