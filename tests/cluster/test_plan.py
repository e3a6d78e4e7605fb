"""Compares plans with figures that were worked out by hand."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cluster.config import ClusterConfig, load
from cluster.plan import GIB, Plan, Rates, plan
from cluster.plan_table import table
from cluster.pool_plan import PoolPlan, Workload
from engine.models.quantized import quantize
from protocol.errors import ConfigError
from tests.cluster.test_cli import run
from tests.engine.tiny_llama import TINY, random_tensors, write_model_dir

ROOT = Path(__file__).parents[2]
SHAPE_8B = f"model={ROOT / 'deploy' / 'models' / 'llama-3.1-8b'}"
ROOMY = "decode.num_blocks=1000001"
"""Gives more KV blocks than any load in this file needs."""


def planned(config: ClusterConfig, prompt: int, output: int, running: int, **given: Any) -> Plan:
    return plan(config, Workload(prompt_tokens=prompt, output_tokens=output, num_running=running), **given)


def colocated(prompt: int, output: int, running: int, *overrides: str) -> PoolPlan:
    """Plans an arithmetic engine, which has 16 bytes of KV per token and 256 per block."""
    (pool,) = planned(small(*overrides), prompt, output, running).pools
    return pool


def small(*overrides: str) -> ClusterConfig:
    knobs = ("max_num_batched_tokens=8192", "max_num_seqs=256", "max_model_len=65536", "num_blocks=65537")
    return load(None, ["runner=arithmetic", "prefill.replicas=0", *(f"decode.{knob}" for knob in knobs), *overrides])


def test_a_long_prompt_takes_as_many_steps_as_the_budget_says() -> None:
    """30,000 = 3 x 8,192 + 5,424 = 14 x 2,048 + 1,328."""
    large, little = (
        colocated(30_000, 100, 200, ROOMY, f"decode.max_num_batched_tokens={budget}") for budget in (8192, 2048)
    )
    assert (large.steps_per_lone_prompt, little.steps_per_lone_prompt) == (4, 15)
    # Beside 200 decodes: 8,192 - 200 = 7,992 and 4 x 7,992 = 31,968; 2,048 - 200 = 1,848 and 17 x 1,848 = 31,416
    assert (large.num_running, large.first_chunk_tokens, large.steps_per_prompt) == (200, 7_992, 4)
    assert (little.num_running, little.first_chunk_tokens, little.steps_per_prompt) == (200, 1_848, 17)


def test_a_threshold_and_drafts_take_their_share() -> None:
    pool = colocated(
        30_000, 100, 200, ROOMY, "decode.long_prefill_token_threshold=1000", "decode.num_speculative_tokens=3"
    )
    assert (pool.steps_per_lone_prompt, pool.steps_per_prompt) == (4, 30)
    pool = colocated(30_000, 100, 200, ROOMY, "decode.num_speculative_tokens=3")
    assert pool.first_chunk_tokens == 8_192 - 200 * 4
    # 240 decodes with 40 drafts each want 9,840 tokens. The remaining 8,192 - 240 = 7,952, shared by 241, are 32 each.
    assert colocated(30_000, 100, 240, ROOMY, "decode.num_speculative_tokens=40").first_chunk_tokens == 32


def test_without_chunks_a_prompt_is_one_step_or_none() -> None:
    off = "decode.enable_chunked_prefill=false"
    assert colocated(7_992, 100, 200, ROOMY, off).steps_per_prompt == 1
    assert colocated(7_993, 100, 200, ROOMY, off).steps_per_prompt is None
    assert colocated(7_993, 100, 200, ROOMY, off).steps_per_lone_prompt == 1


def test_what_the_blocks_hold() -> None:
    """1,000 + 25 - 1 = 1,024 tokens are 64 blocks. Block 0 is never used: 640 blocks hold 9 sequences, 641 hold 10."""
    assert [colocated(1_000, 25, 1, f"decode.num_blocks={num}").num_contexts for num in (640, 641)] == [9, 10]
    pool = colocated(1_000, 25, 1, "decode.num_blocks=0", f"decode.kv_cache_bytes={641 * 256 + 255}")
    assert (pool.num_usable_blocks, pool.num_contexts, pool.blocks_from) == (640, 10, "kv_cache_bytes")
    assert (pool.kv_token_bytes, pool.block_bytes) == (16, 256)


@pytest.mark.parametrize(
    ("running", "overrides", "binds", "step_tokens"),
    [
        # P / O = 10 prompt tokens come with each decode: 8,192 / 11 = 744 sequences; 65,536 blocks / 69 = 949 sequences
        (100, (), None, 1_100),
        (257, (), "max_num_seqs", 256 * 11),
        (800, ("decode.max_num_seqs=1000",), "max_num_batched_tokens", 8_192),
        (800, ("decode.max_num_seqs=1000", "decode.num_blocks=691"), "KV blocks", 10 * 11),
    ],
)
def test_the_lowest_ceiling_below_the_load_binds(
    running: int, overrides: tuple[str, ...], binds: str | None, step_tokens: int
) -> None:
    pool = colocated(1_000, 100, running, *overrides)
    assert (pool.binds, pool.step_tokens) == (binds, step_tokens)


def test_llama_8b_on_four_gpus() -> None:
    """8,030,261,248 weights of 2 bytes; 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072 bytes of KV per token."""
    config = load(ROOT / "deploy" / "4xh100.yaml", [SHAPE_8B])
    result = planned(config, 30_000, 100, 400, device_memory_bytes=80 * GIB, rates=Rates(transfer_bytes_per_s=50e9))
    prefill, decode = result.pools
    assert (prefill.role, prefill.replicas, decode.role, decode.replicas) == ("prefill", 2, "decode", 2)
    assert prefill.weight_bytes == decode.weight_bytes == 16_060_522_496
    assert (prefill.kv_token_bytes, prefill.block_bytes) == (131_072, 2_097_152)
    assert prefill.activation_bytes == 8_192 * (2 * 4_096 + 3 * 14_336) * 2 + 64 * 128_256 * 4
    free = int(0.9 * 80 * GIB) - 16_060_522_496 - prefill.activation_bytes
    assert (prefill.num_usable_blocks, prefill.blocks_from) == (free // 2_097_152 - 1, "gpu_memory_utilization")
    assert (prefill.steps_per_lone_prompt, prefill.steps_per_prompt) == (4, 8)
    assert decode.num_contexts == decode.num_usable_blocks // 1_882  # 30,099 tokens
    assert decode.binds == "KV blocks"
    assert result.prompt_kv_bytes == 30_000 * 131_072
    assert result.transfer_s == pytest.approx(0.07864, rel=1e-3)
    assert len(result.warnings) == 1 and "expect preemptions" in result.warnings[0]


@pytest.mark.parametrize(("named", "num_bytes"), [("auto", 2), ("float16", 2), ("float32", 4)])
def test_a_plan_counts_in_the_checkpoints_dtype_or_the_named_one(tmp_path: Path, named: str, num_bytes: int) -> None:
    write_model_dir(tmp_path, tensors=random_tensors(TINY, torch.float16), torch_dtype="float32")
    knobs = ("prefill.replicas=0", "decode.max_model_len=512", f"dtype={named}")
    result = planned(load(None, [f"model={tmp_path}", *knobs]), 100, 100, 1)
    (pool,) = result.pools
    assert result.dtype == ("float16" if named == "auto" else named)
    assert table(result).caption == f"computes in {result.dtype}"
    assert pool.kv_token_bytes == 2 * 2 * 2 * 64 * num_bytes
    assert pool.weight_bytes == num_bytes * sum(tensor.numel() for tensor in random_tensors(TINY).values())


def test_int8_weights_are_counted_with_their_scales(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    knobs = [f"{pool}.max_model_len=512" for pool in ("prefill", "decode")]
    config = load(None, [f"model={tmp_path}", "dtype=bfloat16", "quantization=int8", *knobs])
    num_bytes = 0
    for name, tensor in random_tensors(TINY).items():
        if name.startswith("model.layers.") and tensor.ndim == 2:
            num_bytes += sum(part.nbytes for part in quantize(tensor))
        else:
            num_bytes += 2 * tensor.numel()
    assert planned(config, 100, 100, 1).pools[0].weight_bytes == num_bytes


def test_a_gpu_must_be_known_and_large_enough() -> None:
    config = load(ROOT / "deploy" / "4xh100.yaml", [SHAPE_8B])
    with pytest.raises(ConfigError, match=r"prefill\.num_blocks: unknown: .*--device-memory-gib"):
        planned(config, 100, 100, 1)
    with pytest.raises(ConfigError, match=r"prefill\.gpu_memory_utilization: leaves 0 bytes to KV"):
        planned(config, 100, 100, 1, device_memory_bytes=16 * GIB)
    named = load(ROOT / "deploy" / "4xh100.yaml", [SHAPE_8B, "prefill.num_blocks=100", "decode.num_blocks=200"])
    assert [pool.num_usable_blocks for pool in planned(named, 100, 100, 1).pools] == [99, 199]


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (("decode.num_speculative_tokens=32",), "decode.max_num_seqs: 256 sequences with 32 drafts each do not fit"),
        (("decode.num_blocks=4481",), "decode.max_num_seqs: 256 seats, but the blocks hold 64 sequences"),
        (
            ("decode.long_prefill_token_threshold=250",),
            "decode.long_prefill_token_threshold: 250 makes 4 steps of a prompt that takes 1",
        ),
        (
            ("decode.enable_chunked_prefill=false",),
            "decode.max_num_batched_tokens: 8192 is the longest prompt without chunking",
        ),
        (("decode.watermark=0.9991",), "decode.watermark: 0.9991 leaves too little for one prompt"),
        (("decode.num_blocks=2000",), "decode.max_model_len: 65536, but all blocks together hold 31984 tokens"),
        (
            ("decode.cuda_graph_sizes=[1, 128]",),
            "decode.cuda_graph_sizes: 128 is the largest; steps of up to 256 decodes",
        ),
        (("decode.max_model_len=1099",), "decode.max_model_len: 1099 is too short for the load"),
        (("decode.num_blocks=60",), "decode: 59 blocks hold not one sequence of this load"),
        (
            ("prefill.replicas=1", "prefill.max_model_len=2000"),
            "prompts of more than 1999 tokens are computed by decode engines themselves",
        ),
        (
            ("prefill.replicas=1", "prefill.max_model_len=2000", "router.disaggregation=strict"),
            "prompts of more than 1999 tokens are refused: no engine computes them",
        ),
        (
            ("prefill.replicas=1", "prefill.max_model_len=2000", "router.disaggregation=strict"),
            "requests of more than 1999 tokens, answer included, are refused: strict",
        ),
        (
            ("decode.enable_chunked_prefill=false",),
            "prompts of more than 8192 tokens are refused: no engine computes them",
        ),
        (
            ("prefill.replicas=1", "prefill.max_model_len=65536", "decode.enable_chunked_prefill=false"),
            "prompts of more than 8192 tokens are refused while no prefill engine is up",
        ),
    ],
)
def test_knobs_that_contradict_each_other_are_named(overrides: tuple[str, ...], warning: str) -> None:
    warnings = planned(small(*overrides), 1_000, 100, 100).warnings
    assert any(text.startswith(warning) for text in warnings), warnings


def test_a_sound_configuration_has_no_warning() -> None:
    assert planned(small(), 1_000, 100, 100).warnings == []


def test_a_transfer_longer_than_its_prefill_is_said() -> None:
    rates = Rates(transfer_bytes_per_s=8_000.0, prefill_tokens_per_s=1_000.0)
    result = planned(small("prefill.replicas=1", "prefill.max_model_len=65536"), 1_024, 100, 100, rates=rates)
    assert (result.transfer_s, result.prefill_s) == (2.048, 1.024)
    assert result.warnings == [
        "transfer: 2.05 s for one prompt is longer than its prefill, 1.02 s: it cannot hide behind it"
    ]


def test_the_table_names_every_pool() -> None:
    out = StringIO()
    Console(width=120, file=out).print(table(planned(small("prefill.replicas=2"), 1_000, 100, 100)))
    text = out.getvalue()
    for word in ("prefill x2", "decode x1", "N_max", "what binds", "a handoff moves 15.75 KiB"):
        assert word in text


def test_the_command_prints_json() -> None:
    config = ROOT / "deploy" / "4xh100.yaml"
    result = run("plan", "--config", str(config), "--device-memory-gib", "80", "--prompt-tokens", "30000", "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert [pool["steps_per_lone_prompt"] for pool in facts["pools"]] == [4, 15]
    assert facts["load"]["num_running"] == 512
