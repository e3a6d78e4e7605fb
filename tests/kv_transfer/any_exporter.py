"""A prefill engine's process as the configuration makes it; the GPU is a make-believe one.

`python -m tests.kv_transfer.any_exporter cpu|gpu TRANSPORT NAME NUM_BLOCKS BLOCK_BYTES` prints its endpoint, then obeys
`write SLOT ID`, answering each line; ends with its input.
"""

import sys

from kv_transfer.config import TransferConfig
from kv_transfer.device.fake_device import FakeDevice
from kv_transfer.exports import DeviceExport, HostExport
from kv_transfer.lease import LeaseTable
from tests.kv_transfer.processes import content


def main(memory: str, transport: str, name: str, num_blocks: int, block_bytes: int) -> None:
    config = TransferConfig(transport=transport)  # type: ignore[arg-type]
    export: HostExport | DeviceExport
    if memory == "cpu":
        export = HostExport(config, name, num_blocks=num_blocks, block_bytes=block_bytes, num_slots=8)
    else:
        device = FakeDevice(f"{name}-gpu")
        export = DeviceExport(
            config, name, device, num_blocks=num_blocks, block_bytes=block_bytes, num_slots=8, num_peers=1
        )
    leases = LeaseTable(export.words, epoch=1)
    export.cache[:] = content(num_blocks, block_bytes)
    print(export.endpoint.decode(), flush=True)
    for line in sys.stdin:
        _, slot, lease_id = line.split()
        leases.write(int(slot), int(lease_id))
        print("done", flush=True)
    export.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
