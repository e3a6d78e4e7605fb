"""A prefill engine's process with a make-believe GPU that can be told to stall and to fail.

`python -m tests.kv_transfer.gpu_exporter cuda_ipc|host_staged NAME NUM_BLOCKS BLOCK_BYTES [BUFFER_BYTES]` prints its
endpoint, then obeys lines of standard input, answering each: `write SLOT ID`, `stall_after N` copies, `stalled`
(answers once work waits for the stalled GPU), `resume`, `fail CALL TEXT`. Ends with its input.
"""

import sys
from contextlib import ExitStack

from kv_transfer.device.device_pool import DevicePool
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.lease import LeaseTable
from kv_transfer.segment import SharedSegment
from kv_transfer.transports import cuda_ipc
from kv_transfer.transports.host_staged import StagedExport
from kv_transfer.transports.staging.channel import channel_bytes
from tests.hang import HANG_S
from tests.kv_transfer.processes import content

NUM_CHANNELS, NUM_BUFFERS = 2, 3


def main(kind: str, name: str, num_blocks: int, block_bytes: int, buffer_bytes: int = 4096) -> None:
    device = FakeDevice(f"{name}-gpu")
    with ExitStack() as resources:
        segment = SharedSegment.create(
            name,
            block_bytes=channel_bytes(buffer_bytes, NUM_BUFFERS),
            num_blocks=NUM_CHANNELS if kind == "host_staged" else 0,
            num_slots=8,
        )
        resources.callback(segment.close)
        leases = LeaseTable(segment.words, epoch=1)
        pool = DevicePool(device, segment.nonce, num_blocks=num_blocks, block_bytes=block_bytes)
        resources.callback(pool.close)
        pool.blocks.tensor[:] = content(num_blocks, block_bytes)
        if kind == "host_staged":
            export = StagedExport(device, pool, segment, buffer_bytes, NUM_BUFFERS)
            resources.callback(export.close)
            print(export.endpoint.decode(), flush=True)
        else:
            print(cuda_ipc.export(device, pool, segment).decode(), flush=True)
        for line in sys.stdin:
            obey(line.split(), device, leases)
            print("done", flush=True)


def obey(words: list[str], device: FakeDevice, leases: LeaseTable) -> None:
    match words:
        case ["write", slot, lease_id]:
            leases.write(int(slot), int(lease_id))
        case ["stall_after", number]:
            device.stall_after(int(number))
        case ["stalled"]:
            assert device.stalled.wait(HANG_S)
        case ["resume"]:
            device.resume()
        case ["fail", call, *text]:
            device.failures[call] = " ".join(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
