"""The chain of block hashes that a sequence carries."""

import numpy as np

from engine.scheduler.loops_hash import Chain
from engine.scheduler.sequence import Request, Sequence
from engine.scheduler.sequence_table import SequenceTable
from protocol.block_hash import chain_hashes, from_rows, root_hash, to_rows
from protocol.messages import RequestKey, SamplingParams


def test_a_chain_grown_in_pieces_is_the_chain_of_the_whole() -> None:
    tokens = np.arange(11, dtype=np.int32)
    request = Request(
        key=RequestKey(1, "a", 1), request_number=0, prompt_token_ids=tokens, max_tokens=1, sampling=SamplingParams()
    )
    root = root_hash(b"model", "salt")
    sequence = Sequence(
        request=request,
        kv="local",
        stage="waiting",
        limit=12,
        chain=Chain(to_rows([root])),
        tokens=tokens,
        num_first=11,
    )
    table = SequenceTable(max_num_seqs=1, max_model_len=12, block_size=3)
    for num_blocks in (1, 1, 3):
        table.extend_chain(sequence, num_blocks)
        assert from_rows(sequence.chain) == (root, *chain_hashes(root, tokens, 3)[:num_blocks])
