"""The compiled loops are compiled before the first step and never later, and the scheduler also works without them."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.scheduler import loops_blocks as blocks
from engine.scheduler import loops_sequences as sequences
from engine.scheduler import loops_step as steps
from engine.scheduler.loops_hash import NUM_WORDS, Chain, hash_block
from engine.scheduler.loops_sequences import Positions, RequestNumbers, State
from engine.scheduler.loops_step import Scheduled
from engine.scheduler.sequence_table import SequenceTable
from protocol.arrays import Bool, Int32
from protocol.block_hash import block_hash
from tests.engine.scheduler.chain_model import answer_of
from tests.engine.scheduler.scheduler_driver import Driver, key_of

ROOT = Path(__file__).parents[3]


def test_no_step_waits_for_a_compiler() -> None:
    """An array of another type or layout than at the start would make numba compile a loop again."""
    pytest.importorskip("numba")
    engine = Driver(11, preemption="swap", num_host_blocks=20, eos_token_ids=(10**6,))
    for index in range(4):
        engine.add(f"r{index}", 9, max_tokens=12, first=index // 2, stop_token_ids=(10**6,))
    engine.schedule()
    engine.schedule()
    engine.scheduler.abort(key_of("r1"))
    engine.commit()
    engine.commit()
    engine.add("remote", 9, kv="consumer")
    engine.scheduler.offer(key_of("remote"))
    batches = []
    while engine.schedule()[0]:
        batches.append(engine.batches[0])
        engine.commit()
    assert any(batch.swap_out is not None for batch in batches) and engine.scheduler.num_reserved
    drafts = Driver(20, num_speculative_tokens=2)
    request = drafts.add("a", 9, max_tokens=12)
    drafts.model.answers[request.key] = answer_of(
        request.prompt_token_ids.tolist(), 12, max_model_len=64, stops=frozenset()
    )
    drafts.model.num_prompt[request.key] = 9
    drafts.run()
    loops: list[Any] = [blocks.take, blocks.release, blocks.free_held, blocks.count_free]
    loops += [blocks.find, blocks.name, blocks.forget]
    loops += [sequences.cache_full_blocks, sequences.extend, sequences.enter, sequences.close_gaps, sequences.follow]
    loops += [steps.place, steps.ration, steps.launch, steps.append]
    for loop in loops:
        assert len(loop.signatures) == 1, loop


if TYPE_CHECKING:

    def arrays_that_change_places(
        table: SequenceTable,
        positions: Positions,
        scheduled: Scheduled,
        sample: Bool,
        gone: Int32,
        arrays: blocks.Arrays,
    ) -> None:
        """The type checker finds an error in each line, for it reports an ignore that ignores nothing."""
        steps.launch(scheduled, 0, table.state, sample)  # type: ignore[arg-type]
        sequences.follow(gone, positions)  # type: ignore[arg-type]
        blocks.take(*arrays, table.tokens, 0, 0)  # type: ignore[arg-type]
        steps.place(*arrays, table.block_tables, table.state, 0, 1, 0, 0, 0)  # type: ignore[arg-type]
        steps.ration(table.state)  # type: ignore[call-arg]


def test_a_block_is_hashed_as_by_hashlib() -> None:
    random = np.random.default_rng(3)
    words = np.zeros(NUM_WORDS, np.uint64)
    for num_tokens in (1, 2, 4, 16, 27, 28, 29, 32, 59, 60, 61, 64, 256):
        parent, tokens = (random.integers(-(2**31), 2**31, count, dtype=np.int32) for count in (4, num_tokens))
        chain = Chain(np.stack((parent, np.zeros(4, np.int32))))
        hash_block(chain, 1, tokens, words)
        assert chain[1].tobytes() == block_hash(parent.tobytes(), tokens.tobytes()), num_tokens


def test_positions_close_up_and_flights_follow() -> None:
    sequences.compile_all()
    state = State(np.array([[0, 1, 2, 3, 4, 5, 6, 7]] * sequences.NUM_LINES, np.int32))
    request_numbers = RequestNumbers(np.arange(10, 18))
    gone = np.array([1, 2, 5], np.int32)
    sequences.close_gaps(state, request_numbers, gone, 7)
    moved = sequences.NUM_OWN_LINES
    assert [*state[:moved, :4].tolist(), request_numbers[:4].tolist()] == [*[[0, 3, 4, 6]] * moved, [10, 13, 14, 16]]
    positions = Positions(np.array([-1, 0, 2, -1, 3, 5, 6], np.int32))
    sequences.follow(positions, gone)
    assert positions.tolist() == [-1, 0, -1, -1, 1, -1, 3]


def test_without_numba_they_do_the_same() -> None:
    options = "'-q', '-x', '-p', 'no:cacheprovider'"
    code = f"import sys, pytest; sys.modules['numba'] = None; sys.exit(pytest.main([{options}, *sys.argv[1:]]))"
    tests = [f"tests/engine/scheduler/test_{name}.py" for name in ("block_manager", "conformance", "depth")]
    tests.append("tests/engine/scheduler/test_loops.py::test_a_block_is_hashed_as_by_hashlib")
    result = subprocess.run([sys.executable, "-c", code, *tests], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
