"""Our kernels' runner, interpreted, against the torch runner: the same tokens however the work is cut, padded, sampled
or handed over.

The file is longer than 300 lines because every test runs the one interpreted engine that its head sets up.
"""

import itertools
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster import build, served_model
from cluster.config import from_tree
from engine.config import EngineConfig
from engine.kernels import attention_work, launch
from engine.kernels.attention_work import Grid, Work
from engine.kernels.paged_attention import attention_grids
from engine.models import loading
from engine.models.config import Dtype, LongRope, ModelConfig, Rope, SlidingLayers
from engine.models.decoder import Decoder
from engine.models.loading import TORCH_DTYPES, build_model
from engine.runner import Batch, Runner, StepOutput
from engine.runners import cuda, cuda_memory, cuda_sampling, paged_cache, torch_cpu
from engine.runners.cpu_ops import TorchOps
from engine.runners.cuda import CUDARunner, DeviceLost, LaunchedStep
from engine.runners.cuda_copies import DeviceEvent, upload
from engine.runners.cuda_memory import kv_blocks, largest_batch
from engine.runners.step_plan import plan_step
from engine.runners.torch_cpu import TorchCPURunner
from engine.sampling_metadata import Contexts, Masks, SamplingMetadata
from protocol.arrays import Int32
from protocol.errors import CapacityError, ConfigError, TwopassError
from protocol.grammar import Grammar
from protocol.messages import SamplingParams
from tests.engine.runner_driver import generate, make_batch
from tests.engine.test_sampling_flow import Engine
from tests.engine.tiny_llama import TINY, random_tensors, write_model_dir
from tests.local_deployment import LocalDeployment, asked

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 64, 512
PROMPTS = [list(range(1, 18)), list(range(5, 28)), [3]]
SAMPLINGS = {
    "greedy": SamplingParams(seed=1),
    "warm": SamplingParams(temperature=0.9, top_p=0.8, seed=2),
    "cut": SamplingParams(temperature=1.3, top_k=7, min_p=0.05, seed=2**63 + 5, logprobs=0),
    "bent": SamplingParams(
        temperature=0.7,
        seed=4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        min_tokens=3,
        stop_token_ids=(11, 12, 13),
        logit_bias=((11, 9.0), (40, 2.0), (41, -3.0)),
        logprobs=3,
    ),
    "cold and asked": SamplingParams(logprobs=2, frequency_penalty=0.4, seed=5),
    "guided": SamplingParams(grammar=Grammar("regex", "any"), seed=6),
    "guided and warm": SamplingParams(
        grammar=Grammar("regex", "any"), temperature=1.1, seed=7, logprobs=3, logit_bias=((41, 5.0),)
    ),
}
GEMMA3: dict[str, Any] = {
    "architecture": "Gemma3ForCausalLM",
    "qk_norm": True,
    "activation": "gelu_tanh",
    "query_pre_attn_scalar": 40.0,
    "embedding_scale": TINY.hidden_size**0.5,
    "sliding": SlidingLayers(window=9, layers=(0,), rope=Rope(theta=1e3)),
}
LONG_ROPE = LongRope(factors=tuple(1 + i / 36 for i in range(36)), magnitude=1.2)
TURNING = Rope(theta=1e4, partial_rotary_factor=0.75, scaling=LONG_ROPE)
PHI3: dict[str, Any] = {
    "architecture": "Phi3ForCausalLM",
    "head_dim": 96,
    "rope": TURNING,
    "sliding": SlidingLayers(window=9, layers=(0, 1), rope=TURNING),
}


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cpu, "_make_ops", lambda model, cache, num_threads: TorchOps(model, cache))


def model_of(config: ModelConfig = TINY) -> Decoder:
    return build_model(config, "float32", random_tensors(config).__getitem__)


def cache_for(model: Decoder) -> torch.Tensor:
    """A cache full of NaN: reading one slot that was not written shows."""
    elements = NUM_BLOCKS * paged_cache.block_bytes(model, BLOCK_SIZE) // model.dtype.itemsize
    return torch.full((elements,), torch.nan, dtype=model.dtype).view(torch.uint8)


def by_torch(model: Decoder, **options: Any) -> TorchCPURunner:
    return TorchCPURunner(model, cache_for(model), block_size=BLOCK_SIZE, num_threads=1, **options)


def by_kernels(model: Decoder, **options: Any) -> CUDARunner:
    return CUDARunner(model, cache_for(model), block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, **options)


def answers(runner: Runner, budget: int) -> list[list[int]]:
    return generate(runner, PROMPTS, 4, budget=budget, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize(
    ("change", "budget", "graph_sizes"),
    [
        ({}, 100, ()),
        ({}, 17, (2, 4)),
        ({"qk_norm": True, "qkv_bias": True, "num_kv_heads": 3, "tie_word_embeddings": False}, 30, (8,)),
        (GEMMA3, 17, (2, 4)),
        (PHI3, 17, (2, 4)),
    ],
    ids=["whole prompts", "chunks among padded decodes", "another architecture", "gemma 3", "phi 3"],
)
def test_the_same_tokens_and_the_same_cache(change: dict[str, Any], budget: int, graph_sizes: tuple[int, ...]) -> None:
    model = model_of(replace(TINY, **change))
    reference, runner = by_torch(model), by_kernels(model, graph_sizes=graph_sizes)
    assert answers(runner, budget) == answers(reference, budget)
    torch.testing.assert_close(
        runner.cache, reference.cache, rtol=1e-3, atol=1e-3, equal_nan=True
    )  # padding has written nothing


@pytest.mark.parametrize("graph_sizes", [(), (4,)], ids=["as it comes", "padded"])
@pytest.mark.parametrize("change", [{}, GEMMA3], ids=["llama", "gemma 3"])
def test_keys_split_between_programs(
    monkeypatch: pytest.MonkeyPatch, graph_sizes: tuple[int, ...], change: dict[str, Any]
) -> None:
    """As on a GPU of many SMs, and as if 4 keys were worth a cut."""
    num_merges = []

    def work(grids: Sequence[Grid], *batch: Any) -> list[Work]:
        works = attention_work.attention_work([grid._replace(block_kv=4) for grid in grids], *batch)
        num_merges.append(sum(work.num_merges for work in works))
        return works

    monkeypatch.setattr(attention_work, "MIN_KEYS", 4)
    monkeypatch.setattr(cuda, "attention_work", work)
    monkeypatch.setattr(
        cuda, "attention_grids", lambda *heads: [each._replace(num_programs=6) for each in attention_grids(*heads)]
    )
    model = model_of(replace(TINY, **change))
    assert answers(by_kernels(model, graph_sizes=graph_sizes), 64) == answers(by_torch(model), 64)
    assert any(num_merges)


@pytest.mark.parametrize("change", [{}, GEMMA3, PHI3], ids=["llama", "gemma 3", "phi 3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.04), ("float16", 0.002)])
def test_16_bits_stay_close(change: dict[str, Any], dtype: Dtype, tolerance: float) -> None:
    config = replace(TINY, **change)
    model = build_model(config, dtype, random_tensors(config, TORCH_DTYPES[dtype]).__getitem__)
    batch = make_batch([list(range(20))], [0], [20], [[4, 9]])
    reference = by_torch(model)
    by_kernels(model).execute(batch)
    runner = by_kernels(model)
    for each in (reference, runner):
        each.execute(batch)
    written = ~reference.cache.isnan()
    error = (runner.cache - reference.cache)[written].abs().max() / reference.cache[written].abs().max()
    assert error < tolerance


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_are_chosen_from_float32_logits_in_16_bits_too(monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    seen: list[torch.Tensor] = []

    def sample_tokens(logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(logits)
        return cuda_sampling.sample_tokens(logits, *rest)

    monkeypatch.setattr(cuda, "sample_tokens", sample_tokens)
    model = build_model(TINY, dtype, random_tensors(TINY, TORCH_DTYPES[dtype]).__getitem__)
    by_kernels(model).execute(make_batch([list(range(20))], [0], [20], [[4, 9]]))
    assert seen[0].dtype is torch.float32 and bool((seen[0].to(model.dtype) != seen[0]).any())


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_products_are_summed_in_float32(kind: str) -> None:
    switches, name = torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"
    before = getattr(switches, name)
    try:
        setattr(switches, name, True)
        by_kernels(model_of())
        assert not getattr(switches, name)
    finally:
        setattr(switches, name, before)


class Echo:
    """Drafts what follows an earlier occurrence of the last token: right now and then."""

    def propose(self, key: Any, token_ids: Any, max_num_drafts: int) -> list[int]:
        known: list[int] = token_ids.tolist()
        earlier = [i for i, token in enumerate(known[:-1]) if token == known[-1]]
        return known[earlier[-1] + 1 :][:max_num_drafts] if earlier else known[:max_num_drafts]


class Residues:
    """A masker of one rule: under a grammar, a token and the one before add up to a multiple of 3. So a token that is
    not known yet would show.
    """

    def masks(self, sampling: SamplingMetadata, contexts: Contexts) -> Masks | None:
        which = [index for index, row in enumerate(contexts.rows.tolist()) if row in sampling.guides]
        before = contexts.token_ids[contexts.rows[which], contexts.num_known[which] - 1]
        bits = (before[:, None] + np.arange(TINY.vocab_size)) % 3 == 0
        padded = np.zeros((len(which), -(-TINY.vocab_size // 32) * 32), np.bool_)
        padded[:, : TINY.vocab_size] = bits
        allowed = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
        return Masks(np.array(which, np.int64), allowed, np.zeros(len(contexts.rows), np.bool_), {})


def sampled(runner: Runner, **how: Any) -> Engine:
    engine = Engine(runner, eos=(12,), block_size=BLOCK_SIZE, **how)
    for i, (name, sampling) in enumerate(SAMPLINGS.items()):
        engine.add(name, sampling, prompt=[5, 6, 5, 7 + i] * (1 + i), max_tokens=5)
    engine.run()
    engine.scheduler.check_idle()
    return engine


@pytest.mark.parametrize(
    ("how", "graph_sizes"),
    [
        ({"max_num_batched_tokens": 40}, ()),
        ({"max_num_batched_tokens": 23, "depth": 2}, (2, 4)),
        ({"max_num_batched_tokens": 40, "proposer": Echo(), "num_speculative_tokens": 2}, (4,)),
    ],
    ids=["plain", "two in flight, padded", "drafts"],
)
def test_sampled_answers_and_their_logprobs(how: dict[str, Any], graph_sizes: tuple[int, ...]) -> None:
    model, masker = model_of(), Residues()
    expected = sampled(by_torch(model, masker=masker), **how)
    engine = sampled(by_kernels(model, graph_sizes=graph_sizes, masker=masker), **how)
    assert engine.answers == expected.answers
    for name in ("guided", "guided and warm"):
        answer = engine.answer(name)
        assert all((token + before) % 3 == 0 for before, token in itertools.pairwise(answer)), answer
    asked = {"cut", "bent", "cold and asked", "guided and warm"}
    assert {name for name, entries in engine.logprobs.items() if entries} == asked
    for name, entries in expected.logprobs.items():
        for ours, theirs in zip(engine.logprobs[name], entries, strict=True):
            assert ours.offset == theirs.offset and ours.values.top_token_ids == theirs.values.top_token_ids
            assert ours.values.chosen == pytest.approx(theirs.values.chosen, abs=1e-3)
            assert ours.values.top == pytest.approx(theirs.values.top, abs=1e-3)


def step(number: int, token_ids: Int32, pending: bool) -> Batch:
    """Row 1 of 2 gets its next token computed; its prompt has 20."""
    return Batch(
        step=number,
        rows=np.array([1], np.int32),
        num_scheduled=np.array([1 if number else 20], np.int32),
        num_computed=np.array([19 + number if number else 0], np.int32),
        sample=np.array([True]),
        token_ids=token_ids,
        block_tables=np.array([[7, 8, 9], [4, 2, 6]], np.int32),
        pending=np.array([True]) if pending else None,
    )


def test_a_launched_step_has_read_its_batch_and_the_next_takes_its_token_on_the_device() -> None:
    model = model_of()
    reference, runner, known = by_torch(model), by_kernels(model, graph_sizes=(2,)), np.zeros((2, 30), np.int32)
    known[1, :20] = range(20)
    first = reference.execute(step(0, known, False)).token_ids[0, 0]
    known[1, 20] = first
    second = reference.execute(step(1, known, False)).token_ids[0, 0]
    known[1, 20] = -1
    launched = []
    for number in range(2):
        batch = step(number, known.copy(), number > 0)
        launched.append(runner.launch(batch))
        for array in (batch.rows, batch.num_scheduled, batch.num_computed, batch.token_ids, batch.block_tables):
            array[:] = 0
    assert [each.result().token_ids.tolist() for each in launched] == [[[first]], [[second]]]


def test_blocks_are_swapped_out_and_in_before_anything_is_computed() -> None:
    model = model_of()
    reference, runner = by_torch(model, num_host_blocks=3), by_kernels(model, num_host_blocks=3)
    outputs: list[list[StepOutput]] = []
    for each in (reference, runner):
        ids, tables = [list(range(33))], [[4, 9, 2]]
        each.execute(make_batch(ids, [0], [32], tables))
        moved = make_batch(ids, [32], [1], [[9, 4, 2]])
        moved.swap_out = np.array([[4, 0], [9, 2]], np.int32)
        moved.swap_in = np.array([[0, 9], [2, 4]], np.int32)
        nothing = make_batch(ids, [0], [0], tables)
        nothing.swap_out = np.array([[9, 1]], np.int32)
        outputs.append([each.execute(moved), each.execute(nothing)])
    for theirs, ours in zip(*outputs, strict=True):
        assert (ours.token_ids.tolist(), ours.counts.tolist()) == (theirs.token_ids.tolist(), theirs.counts.tolist())
        assert ours.swapped_bytes == theirs.swapped_bytes > 0
        assert 0 < ours.swap_seconds <= ours.seconds
    torch.testing.assert_close(runner.cache, reference.cache, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_all_numbers_of_a_step_travel_in_one_piece() -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "a": np.arange(3, dtype=np.int32),
        "none": np.zeros((0, 4), np.int64),
        "b": np.array([[2**40, -1]]),
        "c": np.array([0.5], np.float32),
        "strided": np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2],
    }
    sent = upload(arrays, torch.device("cpu"))
    arrays["a"][0] = 99
    assert sent["a"].tolist() == [0, 1, 2] and sent["none"].shape == (0, 4)
    assert {name: sent[name].tolist() for name in "bc"} == {"b": [[2**40, -1]], "c": [0.5]}
    assert sent["strided"].tolist() == [[0, 1], [4, 5], [8, 9]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent.values() if len(tensor)}) == 1
    assert all(tensor.data_ptr() % 16 == 0 for tensor in sent.values())


def test_the_largest_step_fills_every_budget() -> None:
    config = EngineConfig(
        max_num_batched_tokens=11, max_num_seqs=3, max_model_len=32, block_size=BLOCK_SIZE, num_speculative_tokens=3
    )
    batch = largest_batch(config)
    assert (
        batch.num_scheduled.tolist() == [4, 4, 3]
        and batch.num_drafts is not None
        and batch.num_drafts.tolist() == [3, 3, 2]
    )
    assert len(plan_step(batch, BLOCK_SIZE).sampled_tokens) == 11
    output = by_kernels(model_of()).execute(batch)
    assert (output.counts >= 1).all() and set(output.logprobs) == {0, 1, 2}
    assert largest_batch(replace(config, max_model_len=2, num_speculative_tokens=0)).num_scheduled.tolist() == [2, 2, 2]


def test_blocks_are_what_the_share_leaves() -> None:
    room = {"total_bytes": 80_000, "free_bytes": 50_000, "graph_bytes": 1_000, "block_bytes": 1_024}
    assert kv_blocks(utilization=0.9, **room) == (72_000 - 30_000 - 1_000) // 1_024
    assert kv_blocks(utilization=0.42, **room) == 2
    with pytest.raises(
        CapacityError, match=r"gpu_memory_utilization: 0.4 of 80000 bytes leaves 1000 to KV .* two blocks need 2048"
    ):
        kv_blocks(utilization=0.4, **room)


def test_an_engine_on_a_gpu_gets_the_blocks_that_are_named_or_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The composition root's path to a GPU, with the model left on the CPU and the driver's numbers made up."""
    write_model_dir(tmp_path)
    load = loading.load_model
    monkeypatch.setattr(
        loading, "load_model", lambda path, dtype, device, longest: load(path, dtype, {"cuda": "cpu"}[device], longest)
    )
    numbers = {
        "memory_allocated": 100,
        "max_memory_allocated": 1_100,
        "reset_peak_memory_stats": None,
        "mem_get_info": (600_000, 1_000_000),
    }
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value)
    monkeypatch.setattr(cuda_memory, "MEMORY_WAIT_S", 0.0)
    knobs = {
        "max_num_batched_tokens": 8,
        "max_num_seqs": 2,
        "max_model_len": 64,
        "cuda_graph_sizes": [2],
        "num_gpus": 1,
    }
    tree = {"model": str(tmp_path), "dtype": "float32", "prefill": {**knobs, "num_blocks": 5}, "decode": knobs}
    config = from_tree(tree)
    served = served_model.serve_model(config)
    resources = ExitStack()
    assert build._prepare(config, config.prefill, served, resources)[0] == 5
    blocks, make = build._prepare(config, config.decode, served, resources)
    size = served.layout(config.decode).block_bytes
    assert blocks == (900_000 - 400_000 - 1_000 * 2 // 8) // size
    compiled: list[str] = []  # as in a process of its own
    for module in (launch, cuda):
        monkeypatch.setattr(module, "compiled", compiled)
    runner = make(torch.zeros(blocks, size, dtype=torch.uint8), 3, None)
    assert isinstance(runner, CUDARunner)
    output = runner.execute(make_batch([[1, 2]], [0], [2], [[1]]))
    assert output.counts.tolist() == [1] and output.compiled == ()
    assert len(runner._copies.host) == 3
    resources.close()
    assert len(runner._copies.host) == 0


@pytest.mark.parametrize(
    ("change", "block_size", "message"),
    [
        ({"head_dim": 48}, 16, r"head_dim: 48, GPU kernels take 16, 32, 64, 96, 128, 256"),
        ({}, 24, "block_size: 24, GPU kernels take powers of two"),
    ],
)
def test_shapes_that_no_kernel_takes_are_refused(change: dict[str, Any], block_size: int, message: str) -> None:
    model = model_of(replace(TINY, **change))
    with pytest.raises(ConfigError, match=message):
        CUDARunner(model, torch.zeros(0, dtype=torch.uint8), block_size=block_size, max_model_len=64)


def test_a_cache_of_no_whole_blocks_is_refused() -> None:
    with pytest.raises(CapacityError, match="KV cache: 100 bytes, expected a multiple of"):
        CUDARunner(model_of(), torch.zeros(100, dtype=torch.uint8), block_size=BLOCK_SIZE, max_model_len=64)


def test_float32_is_exact_also_where_an_image_has_turned_tf32_on() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        by_kernels(model_of())
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


class OneAtATime(CUDARunner):
    """Of all engines in this process: the interpreter knows one kernel at a time."""

    lock = threading.Lock()

    def launch(self, batch: Batch) -> LaunchedStep:
        with self.lock:
            return super().launch(batch)


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_an_error_of_the_device_ends_more_than_a_step(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Loops take a RuntimeError for a failed step and go on: with a GPU that computes no more."""

    def fail(*args: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    runner, batch = by_kernels(model_of()), make_batch([[1]], [0], [1], [[4]])
    owner, name = {"launch": (cuda, "upload"), "wait": (DeviceEvent, "wait")}[where]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        runner.execute(batch)
    assert not issubclass(DeviceLost, RuntimeError | TwopassError)


def test_prefill_hands_over_to_decode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two engines with kernels, real services, loops and transfer; decodes padded and two steps in flight. Then the
    same with torch.
    """
    write_model_dir(tmp_path / "model")
    pool = {"max_model_len": 128, "max_num_seqs": 4, "num_blocks": 24, "max_num_batched_tokens": 24}
    decode = {**pool, "async_scheduling": True, "cuda_graph_sizes": [2, 4]}
    config = from_tree({"model": str(tmp_path / "model"), "dtype": "float32", "prefill": pool, "decode": decode})
    requests = [
        asked("greedy", range(1, 30), 6),
        asked("short", [9], 6),
        asked("sampled", range(40, 60), 6, SamplingParams(temperature=0.8, seed=7, top_p=0.9, ignore_eos=True)),
    ]
    runners: list[CUDARunner] = []

    def kernels(config: Any, pool: Any, cache: npt.NDArray[np.uint8], host_blocks: int, guidance: Any) -> Runner:
        runners.append(
            OneAtATime(
                model_of(),
                torch.from_numpy(cache.reshape(-1)),
                block_size=pool.engine.block_size,
                max_model_len=pool.engine.max_model_len,
                graph_sizes=pool.engine.cuda_graph_sizes,
            )
        )
        return runners[-1]

    with LocalDeployment(config) as deployment:
        expected = deployment.answer(requests)
    monkeypatch.setattr(build, "_cpu_runner", kernels)
    with LocalDeployment(config) as deployment:
        assert deployment.answer(requests) == expected
        assert deployment.router.counters["disaggregated"] == len(requests)
    assert len(runners) == 2
