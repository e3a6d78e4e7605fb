"""The arithmetic runner: worked example, chunking, batching, and that it notices wrong KV."""

import numpy as np
import pytest

from engine.runner import Batch
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import cache_view, expected_tokens, kv_layout_fields
from kv_transfer.layout import KVLayout

BLOCK_SIZE = 4
NUM_BLOCKS = 64


class Table:
    """Sequences of a hand-driven engine: shared arrays and who has how many tokens."""

    def __init__(self, prompts: list[list[int]], num_answer: int) -> None:
        length = max(map(len, prompts)) + num_answer
        width = -(-length // BLOCK_SIZE)
        self.token_ids = np.zeros((len(prompts), length), np.int32)
        blocks = np.random.default_rng(7).permutation(np.arange(1, NUM_BLOCKS))[: len(prompts) * width]
        self.block_tables = blocks.astype(np.int32).reshape(len(prompts), width)
        self.known = np.array([len(prompt) for prompt in prompts])
        self.computed = np.zeros(len(prompts), np.int64)
        for row, prompt in enumerate(prompts):
            self.token_ids[row, : len(prompt)] = prompt

    def step(self, runner: ArithmeticRunner, rows: list[int], chunk: int) -> list[int]:
        """One batch of at most `chunk` tokens per row; returns what was sampled, in row order."""
        scheduled = np.minimum(self.known[rows] - self.computed[rows], chunk)
        sample = self.computed[rows] + scheduled == self.known[rows]
        output = runner.execute(
            Batch(
                step=0,
                rows=np.array(rows, np.int32),
                num_scheduled=scheduled.astype(np.int32),
                num_computed=self.computed[rows].astype(np.int32),
                sample=sample,
                token_ids=self.token_ids,
                block_tables=self.block_tables,
            )
        )
        assert output.counts.tolist() == sample.astype(int).tolist()
        self.computed[rows] += scheduled
        sampled = []
        for i, row in enumerate(rows):
            if sample[i]:
                token = int(output.token_ids[i, 0])
                sampled.append(token)
                if self.known[row] < self.token_ids.shape[1]:
                    self.token_ids[row, self.known[row]] = token
                    self.known[row] += 1
        return sampled


def new_cache() -> np.ndarray:
    """A cache full of garbage: what is not written must not be read."""
    return np.random.default_rng(3).integers(-(2**62), 2**62, (NUM_BLOCKS, BLOCK_SIZE))


def test_worked_example() -> None:
    assert expected_tokens([4, 2, 9], 2) == [18627, 26181]
    table = Table([[4, 2, 9]], 2)
    cache = new_cache()
    runner = ArithmeticRunner(cache)
    assert table.step(runner, [0], 8) == [18627]
    assert cache[table.block_tables[0, 0], :3].tolist() == [5, 6, 30]
    assert table.step(runner, [0], 8) == [26181]


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_chunks_and_batches_do_not_matter(chunk: int) -> None:
    prompts = [[1], list(range(13)), [5] * 8, [31999] * 7]
    table = Table(prompts, 9)
    runner = ArithmeticRunner(new_cache())
    answers: dict[int, list[int]] = {row: [] for row in range(len(prompts))}
    while rows := [row for row, answer in answers.items() if len(answer) < 9]:
        before = table.known.copy()
        sampled = table.step(runner, rows[::-1], chunk)
        grown = [row for row in rows[::-1] if table.computed[row] == before[row]]
        for row, token in zip(grown, sampled, strict=True):
            answers[row].append(token)
    assert answers == {row: expected_tokens(prompt, 9) for row, prompt in enumerate(prompts)}


def test_no_sampling_in_the_middle_of_a_prompt() -> None:
    table = Table([[1, 2, 3, 4, 5, 6]], 1)
    assert table.step(ArithmeticRunner(new_cache()), [0], 5) == []


@pytest.mark.parametrize("position", range(11))
def test_any_single_wrong_entry_changes_the_token(position: int) -> None:
    prompt = list(range(100, 111))
    right = expected_tokens(prompt, 2)
    for wrong in (0, (prompt[position] + 2) * (position + 1), (prompt[position] + 126) * (position + 1)):
        table, cache = Table([prompt], 2), new_cache()
        runner = ArithmeticRunner(cache)
        assert table.step(runner, [0], 100) == right[:1]
        cache[table.block_tables[0, position // BLOCK_SIZE], position % BLOCK_SIZE] = wrong
        assert table.step(runner, [0], 100) != right[1:]


def drafted(table: Table, rows: list[int], drafts: list[list[int]]) -> Batch:
    """A batch that computes the newest token of each row and its drafts."""
    for row, guessed in zip(rows, drafts, strict=True):
        table.token_ids[row, table.known[row] : table.known[row] + len(guessed)] = guessed
    num_drafts = np.array([len(guessed) for guessed in drafts], np.int32)
    return Batch(
        step=0,
        rows=np.array(rows, np.int32),
        num_scheduled=1 + num_drafts,
        num_computed=(table.known[rows] - 1).astype(np.int32),
        sample=np.ones(len(rows), np.bool_),
        token_ids=table.token_ids,
        block_tables=table.block_tables,
        num_drafts=num_drafts,
    )


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]]
    table, runner = Table(prompts, 6), ArithmeticRunner(new_cache())
    table.step(runner, [0, 1, 2, 3], 100)
    right = [expected_tokens(prompt, 6) for prompt in prompts]
    drafts = [right[0][1:4], [right[1][1], 0, right[1][3]], [], [0]]
    output = runner.execute(drafted(table, [0, 1, 2, 3], drafts))
    assert output.counts.tolist() == [4, 2, 1, 1]
    answers = [output.token_ids[i, :count].tolist() for i, count in enumerate(output.counts)]
    assert answers == [right[0][1:5], right[1][1:3], right[2][1:2], right[3][1:2]]


def test_what_rejected_drafts_left_behind_does_no_harm() -> None:
    prompt = [3, 1, 4]
    table, runner = Table([prompt], 5), ArithmeticRunner(new_cache())
    table.step(runner, [0], 100)
    runner.execute(drafted(table, [0], [[0, 0, 0]]))
    answer = expected_tokens(prompt, 5)
    table.token_ids[0, 4] = answer[1]
    table.known[0], table.computed[0] = 5, 4
    assert [table.step(runner, [0], 100) for _ in range(2)] == [[answer[2]], [answer[3]]]


def test_a_pending_token_comes_from_the_step_before() -> None:
    prompts = [[5, 6], [7, 8, 9], [1]]
    table, runner = Table(prompts, 4), ArithmeticRunner(new_cache())
    table.step(runner, [0, 1], 100)
    right = [expected_tokens(prompt, 4) for prompt in prompts]
    table.token_ids[0, 2] = 12345
    batch = drafted(table, [1, 0, 2], [[], [], []])
    batch.num_drafts, batch.pending = None, np.array([False, True, False])
    output = runner.execute(batch)
    assert output.token_ids[:, 0].tolist() == [right[1][1], right[0][1], right[2][0]]


def test_step_seconds_are_reported() -> None:
    table = Table([[1, 2, 3]], 1)
    runner = ArithmeticRunner(new_cache(), step_seconds=lambda batch: 0.5 * batch.num_tokens)
    batch = Batch(
        step=0,
        rows=np.array([0], np.int32),
        num_scheduled=np.array([3], np.int32),
        num_computed=np.array([0], np.int32),
        sample=np.array([True]),
        token_ids=table.token_ids,
        block_tables=table.block_tables,
    )
    assert runner.execute(batch).seconds == 1.5


def test_cache_lies_in_raw_blocks_of_its_layout() -> None:
    layout = KVLayout(**kv_layout_fields(BLOCK_SIZE))
    raw = np.zeros((NUM_BLOCKS, layout.block_bytes), np.uint8)
    view = cache_view(raw)
    assert view.shape == (NUM_BLOCKS, BLOCK_SIZE)
    table = Table([[4, 2, 9]], 2)
    assert table.step(ArithmeticRunner(view), [0], 8) == [18627]
    block = table.block_tables[0, 0]
    assert raw[block].view(np.int64).tolist() == [5, 6, 30, 0, 0, 0, 0, 0]
