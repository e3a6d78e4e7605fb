"""What the figures of attention count: a prompt's operations that a causal query needs, a decode's bytes of K and V."""

import numpy as np
import pytest

pytest.importorskip("numba")

from bench.attention_cpu import work_of
from engine.runners.cpu_attention import Shape

SHAPE = Shape(head_dim=64, group=3, block_size=16, kind="bf16", rotary_dim=64)
MEMORY = np.zeros(1 << 20, np.uint16)


def test_a_prompt_counts_what_its_queries_see() -> None:
    """Two products of 2 operations by 64 elements, for 3 heads of each of 2 KV heads."""
    work = work_of(SHAPE, 2, MEMORY, 1, queries=[4], contexts=[10])
    assert work.counts == (7 + 8 + 9 + 10) * 4 * 64 * 6
    next(work.calls)()


def test_decodes_count_their_keys_and_values() -> None:
    work = work_of(SHAPE, 2, MEMORY, 1, queries=[1, 1], contexts=[100, 100])
    assert work.counts == 200 * 2 * 2 * 64 * 2
    next(work.calls)()
