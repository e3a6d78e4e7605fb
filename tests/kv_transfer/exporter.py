"""A prefill engine's process as far as transfers see it: `python -m tests.kv_transfer.exporter host|GPU TRANSPORT NAME
NUM_BLOCKS BLOCK_BYTES`. The GPU is a make-believe one that can be told to stall and to fail.

Prints its endpoint, then obeys lines of standard input, answering each with a line: `write SLOT ID`, `clear SLOT`,
`stall_after N` copies, `stalled` (answers once work waits for the stalled GPU), `resume`, `fail CALL TEXT`,
`num_copy_calls` (answers with that number). Ends with its input. `host_staged` has three buffers of BUFFER_BYTES in
each channel.
"""

import sys

from kv_transfer.config import TransferConfig
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.exports import Export
from kv_transfer.lease import LeaseTable
from kv_transfer.transports import host_staged
from tests.hang import HANG_S
from tests.kv_transfer.processes import content

NUM_PEERS = 1
BUFFER_BYTES = 4096


def main(memory: str, transport: str, name: str, num_blocks: int, block_bytes: int) -> None:
    host_staged.BUFFER_BYTES, host_staged.NUM_BUFFERS = BUFFER_BYTES, 3
    device = FakeDevice(f"{name}-gpu") if memory == "GPU" else None
    export = Export(
        TransferConfig(transport=transport),
        name,
        device,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        num_words=8,
        num_peers=NUM_PEERS,
    )
    leases = LeaseTable(export.words, epoch=1)
    export.cache.tensor[:] = content(num_blocks, block_bytes)
    print(export.endpoint.decode(), flush=True)
    for line in sys.stdin:
        if line == "num_copy_calls\n":
            assert device is not None
            print(device.num_copy_calls, flush=True)
            continue
        obey(line.split(), leases, device)
        print("done", flush=True)
    export.close()


def obey(words: list[str], leases: LeaseTable, device: FakeDevice | None) -> None:
    match words:
        case ["write", index, lease_id]:
            leases.write(int(index), int(lease_id))
        case ["clear", index]:
            leases.clear(int(index))
        case _:
            assert device is not None
            obey_on_gpu(words, device)


def obey_on_gpu(words: list[str], device: FakeDevice) -> None:
    match words:
        case ["stall_after", number]:
            device.stall_after(int(number))
        case ["stalled"]:
            assert device.stalled.wait(HANG_S)
        case ["resume"]:
            device.resume()
        case ["heal", call]:
            del device.failures[call]
        case ["raise", call, *text]:
            device.failures[call] = RuntimeError(" ".join(text))
        case ["fail", call, *text]:
            device.failures[call] = " ".join(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
