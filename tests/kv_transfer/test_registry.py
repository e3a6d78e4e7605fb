"""The one list of transports, and who goes by it."""

from pathlib import Path
from typing import get_args

import pytest

from bench.gpu.setting import GPU_TRANSPORTS
from kv_transfer import transports
from kv_transfer.config import AUTO, TransferConfig
from kv_transfer.device.device import MemoryKind
from kv_transfer.transports.registry import TRANSPORTS, names
from protocol.errors import ConfigError

LOCAL = "local"
"""Reaches nobody outside its process."""


def test_every_file_that_declares_a_kind_is_listed_under_its_own_name() -> None:
    files = [file for file in Path(transports.__path__[0]).glob("*.py") if "\nKIND = " in file.read_text()]
    assert {file.stem for file in files} == {*names(), LOCAL}
    assert len(set(names())) == len(TRANSPORTS)


def test_each_kind_of_memory_has_its_transports_best_first() -> None:
    assert all(transport.MEMORY and set(transport.MEMORY) <= set(get_args(MemoryKind)) for transport in TRANSPORTS)
    assert names("host")[0] == "shared_memory"
    assert names("GPU")[:2] == GPU_TRANSPORTS[:2] == ("cuda_ipc", "host_staged")
    assert "nixl" in names("host") and "nixl" in names("GPU") and "nixl" not in GPU_TRANSPORTS


@pytest.mark.parametrize("name", [AUTO, *names()])
def test_a_configuration_takes_every_listed_transport(name: str) -> None:
    assert TransferConfig(transport=name).transport == name


def test_a_configuration_takes_no_other() -> None:
    with pytest.raises(ConfigError, match=f"transport: 'local' is not one of auto, {', '.join(names())}"):
        TransferConfig(transport=LOCAL)
