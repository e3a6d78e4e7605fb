"""After an engine has warmed up, no step compiles a kernel: whatever mixture of prompts, decodes, drafts and sampling
comes, each launch is of a variant that was launched before. Variants are told apart by Triton's own code.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.interpreter import GridExecutor

from engine.actor import EngineActor
from engine.config import EngineConfig
from engine.kernels import block_copy, launch
from engine.kernels.attention_work import Grid
from engine.kernels.paged_attention import attention_grids
from engine.kernels.rms_norm import rms_norm
from engine.loop import EngineLoop
from engine.runners import cuda
from engine.runners.cuda import CUDARunner
from engine.runners.cuda_memory import largest_batch
from engine.runners.cuda_warmup import warm_up, warm_up_batches
from engine.scheduler.proposer import NGramProposer
from protocol.errors import StartupError
from protocol.messages import Address, SamplingParams
from tests.engine.kernels.test_kernel_runner import BLOCK_SIZE, GEMMA3, NUM_BLOCKS, cache_for, model_of
from tests.engine.runner_driver import generate, make_batch
from tests.engine.test_sampling_flow import Engine
from tests.engine.tiny_llama import TINY

MAX_MODEL_LEN = 600


@pytest.fixture
def nothing_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched and do nothing, which takes a hundredth of the time. Every token is 0."""
    monkeypatch.setattr(GridExecutor, "__call__", lambda *arguments, **options: None)
    monkeypatch.setattr(torch, "empty", torch.zeros)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled from here on, as if nothing had been."""
    compiled: list[str] = []
    for module in (launch, cuda):
        monkeypatch.setattr(module, "compiled", compiled)
    return compiled


def config_of(**knobs: Any) -> EngineConfig:
    few: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 5, "max_model_len": MAX_MODEL_LEN}
    return EngineConfig(**(few | {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS} | knobs))


def runner_for(config: EngineConfig, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> CUDARunner:
    model = model_of(replace(TINY, **({"num_layers": 1} | change)))

    def on_8_sms(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, _: int) -> tuple[Grid, ...]:
        return attention_grids(num_heads, num_kv_heads, head_dim, dtype, 8)

    monkeypatch.setattr(cuda, "attention_grids", on_8_sms)  # so many programs cut keys between them
    return CUDARunner(
        model,
        cache_for(model),
        block_size=BLOCK_SIZE,
        max_model_len=config.max_model_len,
        graph_sizes=config.cuda_graph_sizes,
    )


def some_sampling(random: np.random.Generator) -> SamplingParams:
    """Any subset of what may be asked for."""
    asked: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": ((3, 1.0), (7, -1.0)),
        "min_tokens": 3,
        "logprobs": 2,
        "stop_token_ids": (11,),
    }
    chosen = {name: value for name, value in asked.items() if random.random() < 0.3}
    return SamplingParams(seed=int(random.integers(1 << 62)), ignore_eos=True, **chosen)


def answered(runner: CUDARunner, config: EngineConfig, seed: int) -> None:
    """Prompts from one token to as long as they may be, in three waves; their answers are short."""
    random = np.random.default_rng(seed)
    engine = Engine(
        runner,
        depth=1 + config.async_scheduling,
        proposer=NGramProposer() if config.num_speculative_tokens else None,
        **{name: getattr(config, name) for name in config.__dataclass_fields__},
    )
    for wave in range(3):
        for i in range(int(random.integers(1, 6))):
            length = int(random.choice([1, 2, 5, 17, int(random.integers(1, MAX_MODEL_LEN - 8))]))
            prompt = random.integers(0, TINY.vocab_size, length).tolist()
            if random.random() < 0.4:
                prompt = (prompt[:3] * length)[:length]
            engine.add(f"{wave}-{i}", some_sampling(random), prompt=prompt, max_tokens=int(random.integers(1, 8)))
        engine.run()
    engine.scheduler.check_idle()


@pytest.mark.usefixtures("nothing_computes")
@pytest.mark.parametrize(
    ("knobs", "change"),
    [
        ({}, {}),
        ({"cuda_graph_sizes": (2,), "async_scheduling": True}, {}),
        ({"num_speculative_tokens": 3, "cuda_graph_sizes": (4,)}, {}),
        ({}, {"num_layers": 2, **GEMMA3}),
        ({"max_num_batched_tokens": 7, "max_num_seqs": 1}, {}),
    ],
    ids=["plain", "padded, two in flight", "drafts", "gemma 3", "one sequence at a time"],
)
def test_no_step_compiles_a_kernel_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], knobs: dict[str, Any], change: dict[str, Any]
) -> None:
    config = config_of(**knobs)
    runner = runner_for(config, change, monkeypatch)
    warm_up(runner, config)
    warmed = list(compiled)
    assert warmed
    for seed in range(3):
        answered(runner, config, seed)
    assert compiled == warmed


def test_the_warm_up_leaves_the_cache_as_new_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(max_num_batched_tokens=3, max_num_seqs=2, max_model_len=20)
    runner, fresh = (runner_for(config, {}, monkeypatch) for _ in range(2))
    untouched = runner.cache[2:].clone()
    warm_up(runner, config)
    assert not runner.cache[1].any()
    torch.testing.assert_close(runner.cache[2:], untouched, equal_nan=True)
    answers = [
        generate(each, [[5, 6, 7], list(range(9))], 3, budget=3, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        for each in (runner, fresh)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("knobs", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 1}, {"num_speculative_tokens": 5}])
def test_no_step_of_the_warm_up_is_larger_than_the_largest(knobs: dict[str, Any]) -> None:
    config = config_of(max_model_len=30, **knobs)
    largest = largest_batch(config)
    for batch in warm_up_batches(config):
        assert batch.num_tokens <= largest.num_tokens and len(batch.rows) <= len(largest.rows)
        assert (batch.num_computed + batch.num_scheduled).max() <= config.max_model_len
        assert batch.block_tables.shape[1] * BLOCK_SIZE >= (batch.num_computed + batch.num_scheduled).max()


def test_a_kernel_that_is_compiled_after_the_warm_up_is_told_once(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    runner = runner_for(config_of(), {}, monkeypatch)
    first, second = (runner.execute(make_batch([[1, 2]], [0], [2], [[1]])) for _ in range(2))
    assert len(first.compiled) == len(compiled) > 3 and second.compiled == ()
    assert any(variant.startswith("attention_kernel ") for variant in first.compiled)
    compiled.append("gather, in a thread that pulls")
    third = runner.execute(make_batch([[1, 2]], [0], [2], [[1]]))
    assert third.compiled == ("gather, in a thread that pulls",)


def test_a_kernel_that_does_not_compile_ends_the_start_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    runner = runner_for(config, {}, monkeypatch)

    def fails(*arguments: object, **options: object) -> None:
        raise CompilationError("x = tl.dot(a, b)", None, "shared memory: 300000 bytes, the card has 232448")

    monkeypatch.setattr(GridExecutor, "__call__", fails)

    def build(resources: ExitStack) -> EngineLoop:
        warm_up(runner, config)
        raise AssertionError("unreachable")

    with pytest.raises(StartupError, match=r"(?s)^decode-0: CompilationError: .*300000 bytes, the card has"):
        EngineActor(Address("decode-0", 1), "error", build).start()


def test_any_pull_launches_the_same_gather(compiled: list[str]) -> None:
    """Ids travel as the two rows of one array, so the second row may begin anywhere."""
    cache = torch.arange(8 * 64).to(torch.uint8).view(8, 64)
    before = cache.clone()
    block_copy.warm_up_pulls(cache)
    assert torch.equal(cache, before)
    for num_blocks in range(1, 5):
        ids = torch.arange(2 * num_blocks).view(2, num_blocks)
        block_copy.pull_blocks(torch.zeros_like(cache), ids[0], cache, ids[1])
    assert len(compiled) == 1


def test_variants_differ_where_triton_would_compile_again(compiled: list[str]) -> None:
    def launched(rows: torch.Tensor, weight: torch.Tensor) -> int:
        rms_norm(rows, weight, 1e-5, torch.zeros(len(rows), rows.shape[1]))
        return len(compiled)

    rows, weight = torch.ones(4, 32), torch.ones(33)
    assert launched(rows, weight[:32]) == launched(rows[:1], weight[:32]) == 1
    assert launched(rows, weight[1:]) == 2  # an address that 16 does not divide
    assert launched(torch.ones(4, 36)[:, :32], weight[:32]) == 3  # a stride that 16 does not divide
    assert launched(rows.bfloat16(), weight[:32]) == 4  # another type
    assert launched(torch.ones(4, 16), weight[:16]) == 5  # other constants
    assert launched(rows, weight[:32]) == 5
