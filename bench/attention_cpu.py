"""Attention on this CPU beside its floors: prompt chunks against sgemm's speed, decodes against the read bandwidth.

Both floors are measured in the same run and in turns with attention, so that a neighbour's load slows all of them. On
one thread the thread's own CPU time counts, on more the clock's.

A prompt's floating-point operations are those of scores and values which a causal query needs, 4 head_dim for each key
that a query sees. The halves of tiles beyond the diagonal, the softmax, widening K and V, rotating q and k, and writing
k and v into the cache take time but count nothing. A decode's bytes are its sequences' K and V, as stored.
"""

import bench.engine_threads  # noqa: F401  before torch

# isort: split
import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, repeat
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import prange

from engine.runners.cpu_attention import Shape, make_attention, scratch_elements, tile_rows
from engine.runners.cpu_elements import Stored
from engine.runners.numba_ops import work_items
from engine.runners.step_plan import StepPlan
from jit.kernel_cache import compiled
from protocol.arrays import Float32, Int64

BLOCK_SIZE, CHUNK = 16, 512
BEHIND = (0, 512, 2048, 8192)
"""Tokens in the cache before a prompt's chunk."""
CONTEXTS, SEQUENCES = (512, 2048, 8192), (1, 8, 32)
CACHE_BYTES = 384 << 20
"""Larger than the CPU's caches: the calls go round all of it, so that K and V come from memory as in a whole step."""
MAX_LAYERS = 30
SGEMM_SIZE = 256
"""Three matrices of this size stay in the L2 cache."""
ROUNDS = 9


HEAD = "attention                threads     ours    floor  share (prompts: GFLOP/s, sgemm; decodes: GB/s, reads)"


class Row(NamedTuple):
    """`ours` and `floor` in GFLOP/s (prompts) or GB/s (decodes), medians over the rounds; `share` is that of the ratio
    within each.
    """

    what: str
    threads: int
    ours: float
    floor: float
    share: float


class Work(NamedTuple):
    """Calls without end, each on memory that the last ones did not read, and what one of them counts: operations or
    bytes.
    """

    calls: Iterator[Callable[[], object]]
    counts: float


def rows(
    *, num_kv_heads: int = 3, group: int = 3, head_dim: int = 64, bf16: bool = True, threads: tuple[int, ...] = (1, 2)
) -> Iterator[Row]:
    """Measures one row after the other; the shape is SmolLM2-135M's unless told otherwise."""
    shape = Shape(head_dim, group, BLOCK_SIZE, "bf16" if bf16 else "f32", head_dim)
    size = CACHE_BYTES // shape.element_bytes
    memory: Stored = np.zeros(size, np.uint16) if bf16 else np.zeros(size, np.float32)
    _fill(memory)
    for num_threads in (n for n in threads if n <= numba.config.NUMBA_NUM_THREADS):
        torch.set_num_threads(num_threads)
        numba.set_num_threads(num_threads)
        peak, bandwidth = _sgemm(num_threads), _reads(memory)
        for behind in BEHIND:
            work = work_of(shape, num_kv_heads, memory, num_threads, [CHUNK], [behind + CHUNK])
            yield _row(f"prompt of {CHUNK} behind {behind}", num_threads, work, peak)
        for context in CONTEXTS:
            for num in SEQUENCES:
                work = work_of(shape, num_kv_heads, memory, num_threads, [1] * num, [context] * num)
                yield _row(f"decode of {num} at {context}", num_threads, work, bandwidth)


def line(row: Row) -> str:
    return f"{row.what:24} {row.threads:7} {row.ours:8.1f} {row.floor:8.1f} {row.share:6.0%}"


def _row(what: str, num_threads: int, work: Work, floor: Work) -> Row:
    """Ours and the floor in turns."""
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    speeds = np.array([[_speed(one, clock) for one in (work, floor)] for _ in range(ROUNDS)])
    ours, beside = np.median(speeds, axis=0)
    return Row(what, num_threads, ours / 1e9, beside / 1e9, float(np.median(speeds[:, 0] / speeds[:, 1])))


def _speed(work: Work, clock: Callable[[], float]) -> float:
    """Counts per second, over calls of at least 20 ms."""
    num, begin = 0, clock()
    while (passed := clock() - begin) < 0.02:
        next(work.calls)()
        num += 1
    return num * work.counts / passed


def _sgemm(num_threads: int) -> Work:
    """One product of each thread's own."""
    a, b = torch.randn(num_threads * SGEMM_SIZE, SGEMM_SIZE), torch.randn(SGEMM_SIZE, SGEMM_SIZE)
    out = torch.empty(num_threads * SGEMM_SIZE, SGEMM_SIZE)
    return Work(repeat(lambda: torch.mm(a, b, out=out)), 2.0 * num_threads * SGEMM_SIZE**3)


def _reads(memory: Stored) -> Work:
    words = memory.view(np.float32)
    parts = np.split(words, 8)
    return Work(cycle(partial(_sum, part) for part in parts), float(parts[0].nbytes))


@compiled((__file__,))
def _sum(words: Float32) -> Any:
    total = np.float32(0.0)
    for i in prange(len(words)):
        total += words[i]
    return total


def _fill(memory: Stored) -> None:
    """Values near 1, everywhere the same few."""
    some = torch.randn(1 << 16)
    pattern = some.bfloat16().view(torch.uint16).numpy() if memory.dtype == np.uint16 else some.numpy()
    memory.reshape(-1, len(pattern))[:] = pattern


def work_of(
    shape: Shape, num_kv_heads: int, memory: Stored, num_threads: int, queries: list[int], contexts: list[int]
) -> Work:
    """Sequence b brings queries[b] tokens and has contexts[b] in the cache; all are decodes, or prompts' chunks."""
    D, BS = shape.head_dim, shape.block_size
    per_sequence = [-(-context // BS) for context in contexts]
    block_elements = num_kv_heads * 2 * BS * D
    needed = sum(per_sequence)
    layers = max(1, min(MAX_LAYERS, len(memory) // (needed * block_elements)))
    num_blocks = len(memory) // (layers * block_elements)
    cache = memory[: num_blocks * layers * block_elements].reshape(num_blocks, num_kv_heads, layers, 2, BS, D)
    ids = np.random.default_rng(0).permutation(num_blocks)
    plans = [
        _plan(ids[first : first + needed], per_sequence, queries, contexts)
        for first in range(0, num_blocks - needed + 1, needed)
    ]
    num_tokens, num_heads = sum(queries), shape.group * num_kv_heads
    kind = memory.dtype
    width = (num_heads + 2 * num_kv_heads) * D
    qkv = memory[: num_tokens * width].reshape(num_tokens, width).copy()
    q, out = np.zeros((num_tokens, num_heads * D), np.float32), np.zeros((num_tokens, num_heads * D), kind)
    cos, sin = np.ones((max(contexts), D // 2), np.float32), np.zeros((max(contexts), D // 2), np.float32)
    scratch = np.zeros((num_threads, scratch_elements(D, shape.group)), np.float32)
    attention = make_attention(shape)

    def call(plan: StepPlan, layer: int, items: Int64, bins: Int64) -> None:
        attention(
            qkv=qkv, layer=layer, cache=cache, q=q, out=out, positions=plan.positions, slots=plan.slots, cos=cos,
            sin=sin, items=items, bins=bins, tables=plan.block_tables, work=scratch, window=0, scale=D**-0.5,
        )  # fmt: skip

    calls = []
    for plan in plans:
        items, bins = work_items(plan, num_kv_heads, tile_rows(shape.group) // shape.group, num_threads)
        for layer in range(layers):
            calls.append(partial(call, plan, layer, items, bins))
    calls[0]()
    if queries[0] == 1:
        return Work(cycle(calls), float(sum(contexts) * num_kv_heads * 2 * D * shape.element_bytes))
    seen = sum(sum(range(context - num + 1, context + 1)) for num, context in zip(queries, contexts, strict=True))
    return Work(cycle(calls), 4.0 * D * num_heads * seen)


def _plan(ids: Int64, per_sequence: list[int], queries: list[int], contexts: list[int]) -> StepPlan:
    tables = ids.reshape(len(per_sequence), -1).astype(np.int32)
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(queries, contexts, strict=True)])
    sequence = np.repeat(np.arange(len(queries)), queries)
    slots = tables[sequence, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    none = np.zeros(0, np.int64)
    return StepPlan(
        token_ids=none, positions=positions, slots=slots, starts=np.cumsum([0, *queries]),
        contexts=np.array(contexts), block_tables=tables, sampled=none, num_drafts=none, sampled_tokens=none,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--group", type=int, default=3, help="query heads per KV head")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    print(HEAD)
    for row in rows(
        num_kv_heads=arguments.kv_heads, group=arguments.group, head_dim=arguments.head_dim,
        bf16=not arguments.float32, threads=tuple(arguments.threads),
    ):  # fmt: skip
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
