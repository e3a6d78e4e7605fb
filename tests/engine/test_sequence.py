"""The chain of block hashes that a sequence carries."""

import numpy as np

from engine.sequence import Request, Sequence
from protocol.block_hash import chain_hashes, extend_chains, root_hash
from protocol.messages import RequestKey, SamplingParams


def test_a_chain_grown_in_pieces_is_the_chain_of_the_whole() -> None:
    tokens = np.arange(11, dtype=np.int32)
    request = Request(key=RequestKey(1, "a", 1), slot=0, prompt_token_ids=tokens, max_tokens=1, sampling=SamplingParams())
    root = root_hash(b"model", "salt")
    sequence = Sequence(request=request, kv="local", stage="waiting", limit=12, chain=[root], tokens=tokens, num_first=11)
    sequence.extend_chain(tokens, 1, 3)
    sequence.extend_chain(tokens, 1, 3)
    extend_chains([sequence.chain], tokens[3:6].tobytes(), 3)
    sequence.extend_chain(tokens, 3, 3)
    assert sequence.chain == [root, *chain_hashes(root, tokens, 3)]
    assert len(sequence.chain) == 4


def test_chains_of_several_sequences_grow_by_their_own_block() -> None:
    roots = [root_hash(b"model", salt) for salt in ("a", "b")]
    blocks = np.arange(8, dtype=np.int32).reshape(2, 4)
    chains = [[root] for root in roots]
    extend_chains(chains, blocks.tobytes(), 4)
    assert chains == [[root, *chain_hashes(root, block, 4)] for root, block in zip(roots, blocks, strict=True)]
