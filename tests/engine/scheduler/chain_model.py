"""A model in which every KV entry depends on all tokens before it: one wrong block, position or reused slot
changes the answer.

kv(p) = f(kv(p - 1), token(p), p) is read and written through the block tables. The next token is kv(p) modulo the size
of the vocabulary.
"""

from dataclasses import dataclass, field

import numpy as np

from engine.runner import Batch, StepOutput
from protocol.messages import RequestKey

VOCAB_SIZE = 13
PRIME = 2**61 - 1


def step_kv(before: int, token_id: int, position: int) -> int:
    return (before * 1_000_003 + token_id * 7_919 + position + 1) % PRIME


def answer_of(prompt: list[int], max_tokens: int, *, max_model_len: int, stops: frozenset[int]) -> list[int]:
    """The answer that must come out, whatever the schedule."""
    kv = 0
    for position, token_id in enumerate(prompt):
        kv = step_kv(kv, token_id, position)
    answer: list[int] = []
    while True:
        answer.append(kv % VOCAB_SIZE)
        if answer[-1] in stops or len(answer) == max_tokens or len(prompt) + len(answer) == max_model_len:
            return answer
        kv = step_kv(kv, answer[-1], len(prompt) + len(answer) - 1)


@dataclass
class ChainModel:
    """The cache and the runner. It executes batches in order, as late as the caller likes."""

    num_blocks: int
    block_size: int
    answers: dict[RequestKey, list[int]] = field(default_factory=dict)
    """The right answers, from which drafts are made."""
    num_prompt: dict[RequestKey, int] = field(default_factory=dict)
    """Lengths of the prompts of these answers."""
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    """The entry at each (block, offset)."""
    host: dict[tuple[int, int], int] = field(default_factory=dict)
    """The entry at each (host block, offset)."""
    copy_block_s: float = 0.0
    """How long a copy of one block is said to take, in seconds. A token takes 1 ms."""
    last_output: dict[int, int] = field(default_factory=dict)
    """The token that the step before sampled for each row."""

    def read(self, table: np.ndarray, position: int) -> int:
        return 0 if position < 0 else self.kv[int(table[position // self.block_size]), position % self.block_size]

    def write(self, table: np.ndarray, position: int, value: int) -> None:
        block = int(table[position // self.block_size])
        assert 0 < block < self.num_blocks
        self.kv[block, position % self.block_size] = value

    def receive(self, block_ids: list[int], tokens: list[int], num_cached_tokens: int) -> None:
        """Writes what a transfer would write: the KV of `tokens`, without those that were cached."""
        table, kv = np.array(block_ids), 0
        for position, token_id in enumerate(tokens):
            kv = step_kv(kv, token_id, position)
            if position >= num_cached_tokens:
                self.write(table, position, kv)

    def scribble(self, block_ids: list[int]) -> None:
        """A transfer has begun to write: the content of these blocks is gone."""
        self.kv.update({(block, offset): -1 for block in block_ids for offset in range(self.block_size)})

    def _swap(self, batch: Batch) -> float:
        """Copies whole blocks, unwritten entries included. Returns the seconds that this took."""
        num_copies = 0
        for pairs, source, destination in ((batch.swap_out, self.kv, self.host), (batch.swap_in, self.host, self.kv)):
            for source_block, block in () if pairs is None else pairs.tolist():
                num_copies += 1
                for offset in range(self.block_size):
                    destination.pop((block, offset), None)
                    if (source_block, offset) in source:
                        destination[block, offset] = source[source_block, offset]
        return num_copies * self.copy_block_s

    def execute(self, batch: Batch) -> StepOutput:
        swap_seconds = self._swap(batch)
        width = 1 + (int(batch.num_drafts.max(initial=0)) if batch.num_drafts is not None else 0)
        token_ids = np.zeros((len(batch.rows), width), np.int32)
        counts = np.zeros(len(batch.rows), np.int32)
        outputs: dict[int, int] = {}
        for index, row in enumerate(batch.rows.tolist()):
            start, num = int(batch.num_computed[index]), int(batch.num_scheduled[index])
            tokens, table = batch.token_ids[row], batch.block_tables[row]
            drafts = int(batch.num_drafts[index]) if batch.num_drafts is not None else 0
            pending = batch.pending is not None and bool(batch.pending[index])
            chain = []
            for position in range(start, start + num):
                token_id = self.last_output[row] if pending else int(tokens[position])
                chain.append(step_kv(self.read(table, position - 1), token_id, position))
                self.write(table, position, chain[-1])
            if not batch.sample[index]:
                continue
            for ahead in range(drafts + 1):
                token_ids[index, ahead] = outputs[row] = chain[num - 1 - drafts + ahead] % VOCAB_SIZE
                counts[index] = ahead + 1
                if ahead < drafts and tokens[start + num - drafts + ahead] != token_ids[index, ahead]:
                    break
        self.last_output = outputs
        seconds = swap_seconds + batch.num_tokens / 1000
        return StepOutput(token_ids=token_ids, counts=counts, seconds=seconds, swap_seconds=swap_seconds)

    def propose(self, key: RequestKey, token_ids: np.ndarray, max_num_drafts: int) -> list[int]:
        """Returns right drafts, except that every fifth position gets a wrong one."""
        answer = self.answers[key]
        done = len(token_ids) - self.num_prompt[key]
        drafts = answer[done : done + max_num_drafts]
        return [(token + ((len(token_ids) + ahead) % 5 == 0)) % VOCAB_SIZE for ahead, token in enumerate(drafts)]
