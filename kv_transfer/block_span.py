"""Which part of each block a pull moves."""

from dataclasses import dataclass

import numpy as np

from protocol.arrays import Int64
from protocol.block_runs import merged_runs
from protocol.errors import LayoutMismatch, PullFailed


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A contiguous part of a block, in bytes: where it begins in the peer's block and in ours, and how long it is."""

    src_offset: int
    dst_offset: int
    length: int


def checked_span(span: BlockSpan | None, src_block_bytes: int, dst_block_bytes: int) -> BlockSpan:
    """Returns the span, and the whole block for None. Raises LayoutMismatch for None where blocks there have another
    size than here, PullFailed for a span that is empty or does not lie within both blocks.
    """
    if span is None:
        if src_block_bytes != dst_block_bytes:
            raise LayoutMismatch(f"blocks there have {src_block_bytes} bytes, here {dst_block_bytes}")
        return BlockSpan(0, 0, dst_block_bytes)
    for offset, block_bytes in ((span.src_offset, src_block_bytes), (span.dst_offset, dst_block_bytes)):
        if not 0 <= offset < offset + span.length <= block_bytes:
            raise PullFailed(f"bytes {offset} .. {offset + span.length} do not lie within a block of {block_bytes}")
    return span


def copies_of(src: Int64, dst: Int64, span: BlockSpan, src_block_bytes: int, dst_block_bytes: int) -> Int64:
    """Returns int64 [n, 3]: byte offset there, byte offset here, number of bytes. Neighbours are one copy where whole
    blocks are moved; a part of a block has no neighbours.
    """
    if span.length == src_block_bytes == dst_block_bytes:
        return merged_runs(src, dst) * span.length
    there, here = src * src_block_bytes + span.src_offset, dst * dst_block_bytes + span.dst_offset
    return np.stack((there, here, np.full(len(src), span.length)), axis=1)
