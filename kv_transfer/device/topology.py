"""What lies between two GPUs, in words for one log line. Facts only explain a choice of transport; none is made by
them.
"""

from importlib import import_module

from kv_transfer.device.device import Device
from protocol.errors import PullFailed


def between(device: Device, peer_bus_id: str) -> str:
    """Returns "peer access yes, NVLink no", "same GPU", or what is not known and why."""
    if peer_bus_id == device.bus_id:
        return "same GPU"
    return f"peer access {_peer_access(device, peer_bus_id)}, NVLink {_nvlink(device.bus_id, peer_bus_id)}"


def _peer_access(device: Device, peer_bus_id: str) -> str:
    try:
        reaches = device.reaches(peer_bus_id)
    except PullFailed as error:
        return f"unknown, {error}"
    return "unknown, that GPU is not visible here" if reaches is None else "yes" if reaches else "no"


def _nvlink(bus_id: str, peer_bus_id: str) -> str:
    """Asks the management library, which sees all GPUs of the machine, whatever devices a process is shown."""
    try:
        nvml = import_module("pynvml")
    except ModuleNotFoundError:
        return "unknown, nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        ours, theirs = (nvml.nvmlDeviceGetHandleByPciBusId(name.encode()) for name in (bus_id, peer_bus_id))
        status = nvml.nvmlDeviceGetP2PStatus(ours, theirs, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return "yes" if status == nvml.NVML_P2P_STATUS_OK else "no"
    except nvml.NVMLError as error:
        return f"unknown, {error}"
