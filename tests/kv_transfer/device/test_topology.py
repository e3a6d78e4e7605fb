"""What the log says about the way between two GPUs."""

import sys
from types import SimpleNamespace

import pytest

from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.device.topology import between
from protocol.errors import PullFailed


class NVMLError(Exception):
    pass


def nvml(status: int = 0, error: str = "") -> SimpleNamespace:
    def init() -> None:
        if error:
            raise NVMLError(error)

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        nvmlInit=init,
        nvmlDeviceGetHandleByPciBusId=lambda name: name,
        nvmlDeviceGetP2PStatus=lambda ours, theirs, what: {(b"fake:0", b"fake:1", 2): status}[ours, theirs, what],
    )


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nvml(0), "peer access yes, NVLink yes"),
        (nvml(1), "peer access yes, NVLink no"),
        (nvml(error="Driver Not Loaded"), "peer access yes, NVLink unknown, Driver Not Loaded"),
        (None, "peer access yes, NVLink unknown, nvidia-ml-py is not installed"),
    ],
)
def test_facts_in_words(module: SimpleNamespace | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert between(FakeDevice("x", peers=frozenset({"fake:1"})), "fake:1") == text


def test_one_gpu_needs_no_way() -> None:
    assert between(FakeDevice("x"), "fake:0") == "same GPU"


def test_a_gpu_that_is_not_visible_is_not_called_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(0))
    device = FakeDevice("x")
    monkeypatch.setattr(device, "reaches", lambda bus_id: None)
    assert between(device, "fake:1") == "peer access unknown, that GPU is not visible here, NVLink yes"


def test_a_driver_that_fails_spoils_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bus_id: str) -> bool:
        raise PullFailed("cuDeviceCanAccessPeer: unknown error (999)")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(0))
    device = FakeDevice("x")
    monkeypatch.setattr(device, "reaches", fail)
    assert between(device, "fake:1") == "peer access unknown, cuDeviceCanAccessPeer: unknown error (999), NVLink yes"
