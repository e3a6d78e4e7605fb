"""Free bytes of the GPU that this process sees, all processes of the machine counted."""

import os
from pathlib import Path

import torch

from bench.gpu.setting import SHARED_MEMORY, Setting
from kv_transfer.device.device import Device
from kv_transfer.segment import DIRECTORY, PREFIX

FAKE_CAPACITY = 1 << 30


def free_bytes(setting: Setting, device: Device) -> int:
    """Of a fake GPU, what the processes of this process group map counts as taken, whoever made it: so the memory of
    one that has died stays taken as long as another one maps it.
    """
    if setting.rehearsal:
        return FAKE_CAPACITY - _mapped_bytes(device.bus_id)
    return torch.cuda.mem_get_info()[0]


def _mapped_bytes(bus_id: str) -> int:
    """Bytes of all files of that fake GPU which a process of this group maps now. Other groups are other sections, or
    other runs on this machine.
    """
    sizes: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != os.getpgrp():
                continue
            lines = (process / "maps").read_text().splitlines()
        except (ProcessLookupError, FileNotFoundError):
            continue  # it has just ended
        for line in lines:
            # proc_pid_maps(5): interval of addresses, permissions, offset, device, inode, path
            interval, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(f"{DIRECTORY}/{PREFIX}{SHARED_MEMORY}") and f"-{bus_id}-" in path[0]:
                begin, end = (int(address, 16) for address in interval.split("-"))
                sizes[inode] = end - begin
    return sum(sizes.values())
