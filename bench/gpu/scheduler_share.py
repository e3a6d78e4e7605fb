"""Measures the scheduler's share of a step, with an 8B-shaped model of random weights and decodes only."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from bench.gpu.generation import launch
from bench.gpu.models import BLOCK_SIZE, gpu_runner, large_model, make_cache
from bench.gpu.report import Cell, Column, Item, Note, Table
from bench.gpu.setting import Setting
from engine.config import EngineConfig
from engine.runner import Launched
from engine.runners.cuda import CUDARunner
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from protocol.messages import RequestKey, SamplingParams


@dataclass(slots=True)
class Seconds:
    """Seconds of the parts of each step."""

    schedule: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    """Preparing the flat batch and launching its work on the device."""
    wait: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def run(setting: Setting) -> Iterator[Item]:
    torch.manual_seed(setting.seed)
    sizes, prompt, num_steps = setting.size(((8, 64, 128), 500, 60), ((2,), 6, 3))
    model = large_model(setting)
    num_blocks = 1 + sizes[-1] * (-(-(prompt + 2 * num_steps) // BLOCK_SIZE) + 1)
    runner = gpu_runner(model, make_cache(model, num_blocks), sizes)
    rows: list[tuple[Cell, ...]] = []
    for size in sizes:
        for depth in (1, 2):
            config = EngineConfig(
                max_num_batched_tokens=setting.size(8192, 64),
                max_num_seqs=size,
                max_model_len=setting.size(2048, 128),
                num_blocks=num_blocks,
                enable_prefix_caching=False,
                async_scheduling=depth == 2,
                cuda_graph_sizes=sizes,
            )
            seconds = drive(runner, config, prompt, num_steps, setting.seed)
            parts = [
                median(part) * 1e6
                for part in (seconds.schedule, seconds.commit, seconds.launch, seconds.wait, seconds.whole)
            ]
            rows.append((size, depth, *parts, 100 * (parts[0] + parts[1]) / parts[-1], size / median(seconds.whole)))
    names = ("schedule", "commit", "launch", "wait", "whole step")
    columns = (
        Column("decodes"),
        Column("steps in flight"),
        *(Column(name, "us", measured=True) for name in names),
        Column("scheduler's share", "%", measured=True),
        Column("speed", "tokens/s", measured=True),
    )
    yield Table("medians of steps, each with one token for every sequence, graphs", columns, rows)
    yield Note(
        "with two steps in flight the scheduler works while the device does: its share of the step is then no loss"
    )


def drive(runner: CUDARunner, config: EngineConfig, prompt: int, num_steps: int, seed: int) -> Seconds:
    """Computes all prompts, then measures `num_steps` steps of decodes."""
    random = np.random.default_rng(seed)
    scheduler = Scheduler(config, num_blocks=config.num_blocks)
    for request_number in range(config.max_num_seqs):
        token_ids = random.integers(0, 90, prompt, dtype=np.int32)
        sampling = SamplingParams(ignore_eos=True)
        key = RequestKey(1, f"request-{request_number}", 1)
        scheduler.add(
            Request(
                key=key,
                request_number=request_number,
                prompt_token_ids=token_ids,
                max_tokens=2 * num_steps,
                sampling=sampling,
                arrival=request_number,
            )
        )
    seconds, in_flight = Seconds(), deque[Launched]()
    while len(seconds.whole) < num_steps:
        started = time.perf_counter()
        step = Seconds()
        decodes = True
        while len(in_flight) < 1 + config.async_scheduling:
            begun = time.perf_counter()
            batch = scheduler.schedule()
            scheduled = time.perf_counter()
            if batch is None:
                break
            decodes = decodes and len(batch.rows) == config.max_num_seqs and batch.num_tokens == len(batch.rows)
            in_flight.append(launch(runner, batch))
            step.schedule.append(scheduled - begun)
            step.launch.append(time.perf_counter() - scheduled)
        begun = time.perf_counter()
        output = in_flight.popleft().result()
        waited = time.perf_counter()
        scheduler.commit(output)
        ended = time.perf_counter()
        if decodes and len(step.schedule) == 1:
            seconds.schedule += step.schedule
            seconds.launch += step.launch
            seconds.wait.append(waited - begun)
            seconds.commit.append(ended - waited)
            seconds.whole.append(ended - started)
    for launched in in_flight:
        launched.result()
    return seconds
