"""A prefill engine's process as far as transfers see it: `python -m tests.kv_transfer.exporter NAME NUM_BLOCKS
BLOCK_BYTES`.

Prints its endpoint, then obeys lines of standard input (`write SLOT ID`, `clear SLOT`), answering each with a line;
ends with the input.
"""

import sys

from kv_transfer.lease import LeaseTable
from kv_transfer.segment import SharedSegment
from kv_transfer.transports.shared_memory import export
from tests.kv_transfer.processes import content


def main(name: str, num_blocks: int, block_bytes: int) -> None:
    segment = SharedSegment.create(name, block_bytes=block_bytes, num_blocks=num_blocks, num_slots=8)
    leases = LeaseTable(segment.words, epoch=1)
    segment.cache[:] = content(num_blocks, block_bytes)
    print(export(segment).decode(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["write", slot, lease_id]:
                leases.write(int(slot), int(lease_id))
            case ["clear", slot]:
                leases.clear(int(slot))
        print("done", flush=True)
    segment.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
