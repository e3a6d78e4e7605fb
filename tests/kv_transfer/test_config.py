"""Knobs are checked when they are made."""

import pytest

from kv_transfer.config import TransferConfig
from protocol.errors import ConfigError


@pytest.mark.parametrize("name", ["pull_timeout_s", "lease_s", "revoke_s", "max_early_handoffs"])
def test_a_knob_of_zero_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        TransferConfig(**{name: 0})  # type: ignore[arg-type]


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        TransferConfig(lease_s=float("nan"))
