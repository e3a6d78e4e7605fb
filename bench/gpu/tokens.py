"""Compares whole answers of the runner with our kernels with those of torch on the CPU, for every way to run steps, and
a real model's answers with its golden ones.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench.gpu.answers import Answers, compare
from bench.gpu.generation import engine_config, generate, some_requests
from bench.gpu.models import NUM_BLOCKS, cpu_runner, gpu_runner, make_cache, small_model
from bench.gpu.report import Cell, Column, Item, Note, Problem, Table
from bench.gpu.setting import ROOT, Setting
from bench.rounding import expected_errors
from engine.kernels.launch import compiled
from engine.models.config import Dtype
from engine.models.loading import load_model
from engine.runners.cuda_warmup import warm_up
from protocol.messages import SamplingParams
from router.admission import ClientRequest

GOLDEN = ROOT / "tests" / "data" / "golden_smollm2.json"
"""Greedy answers of an independent float32 forward pass. The gap between its two likeliest tokens is 0.005 at least."""


def run(setting: Setting) -> Iterator[Item]:
    cpu_model = small_model(setting, torch.device("cpu"))
    cpu = cpu_runner(cpu_model, NUM_BLOCKS)
    requests = some_requests(setting, cpu_model.config.vocab_size)
    expected = generate(cpu, engine_config(setting), requests)
    model = small_model(setting, setting.device)
    cache = make_cache(model, NUM_BLOCKS)
    sizes = setting.size((1, 2, 4, 8, 16), (4,))
    plain, graphs = gpu_runner(model, cache), gpu_runner(model, cache, sizes)
    ways = {
        "plain": (plain, engine_config(setting)),
        "decodes padded to graphs": (graphs, engine_config(setting, graph_sizes=sizes)),
        "graphs, next step launched meanwhile": (graphs, engine_config(setting, depth=2, graph_sizes=sizes)),
        "drafts": (plain, engine_config(setting, num_drafts=3)),
    }
    for name in ("graphs, next step launched meanwhile", "drafts"):  # what they warm up serves the others too
        warm_up(*ways[name])
    rows: list[tuple[Cell, ...]] = []
    for name, (runner, config) in ways.items():
        num_compiled = len(compiled)
        answers = generate(runner, config, requests)
        for variant in compiled[num_compiled:]:
            yield Problem(f"{name}: compiled after the warm-up: {variant}")
        rows.append(
            (
                name,
                len(requests),
                sum(answers[one] == expected[one] for one in answers),
                sum(map(len, answers.values())),
            )
        )
        yield from compare(name, requests, expected, answers, cpu)
    columns = Column("steps"), Column("answers"), Column("same as the CPU's"), Column("tokens")
    yield Table("a small random model in float32, half of the answers sampled", columns, rows)
    yield from _golden(setting)


def _golden(setting: Setting) -> Iterator[Item]:
    if setting.model_dir is None:
        yield Note("SmolLM2's golden tokens: not run: no --model")
        return
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
    cases = setting.size(cases, sorted(cases, key=lambda case: len(case["prompt_ids"]))[:1])
    num_tokens = setting.size(len(cases[0]["greedy_ids"]), 2)
    answers = _answers(setting, "float32", [_asked(case["name"], case["prompt_ids"], num_tokens) for case in cases])
    forced = [
        _asked(f"{case['name']}-{i}", case["prompt_ids"] + case["greedy_ids"][:i], 1)
        for case in cases
        for i in range(num_tokens)
    ]
    chosen = _answers(setting, setting.size("bfloat16", "float32"), forced)
    prompts, golden = [case["prompt_ids"] for case in cases], [case["greedy_ids"][:num_tokens] for case in cases]
    rounding = expected_errors(load_model(setting.model_dir, "float32"), prompts, golden)
    excused = rounding.excused_margins().view(len(cases), num_tokens).tolist()
    logits = rounding.logits.view(len(cases), num_tokens, -1)
    rows: list[tuple[Cell, ...]] = []
    for index, case in enumerate(cases):
        name, expected = case["name"], case["greedy_ids"][:num_tokens]
        unlike = [i for i in range(num_tokens) if chosen[f"{name}-{i}"] != [expected[i]]]
        rows.append((name, num_tokens, str(answers[name] == expected), len(unlike)))
        if answers[name] != expected:
            yield Problem(f"{name}: not the golden tokens")
        for i in unlike:
            (other,) = chosen[f"{name}-{i}"]
            lead = (logits[index, i, expected[i]] - logits[index, i, other]).item()
            if lead >= excused[index][i]:
                text = f"{name}: token {i} is another in bfloat16, where the golden one leads by {lead:.2g}"
                yield Problem(f"{text}; rounding explains up to {excused[index][i]:.2g}")
    columns = (
        Column("prompt"),
        Column("tokens"),
        Column("golden in float32"),
        Column("others in bfloat16, teacher-forced"),
    )
    yield Table("SmolLM2-135M-Instruct", columns, rows)


def _answers(setting: Setting, dtype: Dtype, requests: list[ClientRequest]) -> Answers:
    assert setting.model_dir is not None
    model = load_model(setting.model_dir, dtype, str(setting.device))
    return generate(gpu_runner(model, make_cache(model, NUM_BLOCKS)), engine_config(setting), requests)


def _asked(name: str, prompt: list[int], num_tokens: int) -> ClientRequest:
    token_ids = np.array(prompt, np.int32)
    return ClientRequest(
        request_id=name, prompt_token_ids=token_ids, max_tokens=num_tokens, sampling=SamplingParams(ignore_eos=True)
    )
