"""Runs prefill and decode as two processes on one GPU over each transport, and compares their answers with those of one
engine that does both.
"""

import secrets
from collections.abc import Iterator

import torch

from bench.gpu.answers import Answers, compare
from bench.gpu.deployment import Deployment
from bench.gpu.generation import engine_config, generate, some_requests
from bench.gpu.models import NUM_BLOCKS, cpu_runner, small_config, small_model
from bench.gpu.report import Cell, Column, Item, Note, Problem, Table
from bench.gpu.setting import GPU_TRANSPORTS, SHARED_MEMORY, Setting
from kv_transfer.config import AUTO
from protocol.messages import PoolName, ReplicaStatus
from router.admission import ClientRequest

COLOCATED = "one engine, no transfer"


def run(setting: Setting) -> Iterator[Item]:
    requests = some_requests(setting, small_config(setting).vocab_size)
    answers: dict[str, Answers] = {}
    rows: list[tuple[Cell, ...]] = []
    for what in (COLOCATED, *GPU_TRANSPORTS):
        try:
            answers[what], status = _answer(setting, what, requests)
        except RuntimeError as error:
            yield Problem(f"{what}: {error}")
            continue
        pulled, moved = int(status.counters["transferred_tokens"]), int(status.counters["pulled_bytes"])
        rows.append((what, len(requests), pulled, moved))
        if pulled != (0 if what == COLOCATED else sum(len(asked.prompt_token_ids) for asked in requests)):
            yield Problem(f"{what}: the KV of {pulled} prompt tokens came by transfer")
        if num_compiled := int(status.counters["kernel_compilations"]):
            yield Problem(f"{what}: the decode engine compiled {num_compiled} variants of kernels after its warm-up")
        if what != COLOCATED and status.transport != what:
            yield Problem(f"{what}: the decode engine reports transport {status.transport!r}")
    columns = Column("how"), Column("answers"), Column("prompt tokens transferred"), Column("transferred", "bytes")
    yield Table("a small random model in float32, real services and loops, two processes on one GPU", columns, rows)
    # The CPU's runner comes after the forks, because torch's threads would not survive them.
    cpu = cpu_runner(small_model(setting, torch.device("cpu")), NUM_BLOCKS)
    expected = generate(cpu, engine_config(setting), requests)
    for what, got in answers.items():
        yield from compare(what, requests, expected, got, cpu)
        if what != COLOCATED and COLOCATED in answers:
            equal = sum(got[name] == answers[COLOCATED][name] for name in got)
            yield Note(f"{what}: {equal} of {len(requests)} answers are those of the one engine, token by token")


def _answer(setting: Setting, what: str, requests: list[ClientRequest]) -> tuple[Answers, ReplicaStatus]:
    """The answers, and the decode engine's status once it has counted all of their tokens."""
    roles: list[PoolName] = ["decode"] if what == COLOCATED else ["prefill", "decode"]
    kind = AUTO if what == COLOCATED else what
    with Deployment(setting, kind, roles, f"{SHARED_MEMORY}{secrets.token_hex(4)}") as deployment:
        answers = deployment.answer(requests)
        # With two engines, the prefill engine generates the first token of each answer.
        generated_here = sum(len(answer) - len(roles) + 1 for answer in answers.values())
        return answers, deployment.settled("decode-0", "generated_tokens", generated_here)
