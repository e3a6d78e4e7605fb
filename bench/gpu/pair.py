"""Runs prefill and decode as two processes over each transport, on one GPU or on one each, and compares their answers
with those of the CPU's runner and of one engine that does both.
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


def run(setting: Setting, gpu: int) -> Iterator[Item]:
    """Decode sees GPU 0, prefill GPU number `gpu`. One engine that does both is run only where both see the same."""
    requests = some_requests(setting, small_config(setting).vocab_size)
    answers: dict[str, Answers] = {}
    rows: list[tuple[Cell, ...]] = []
    for what in GPU_TRANSPORTS if gpu else (COLOCATED, *GPU_TRANSPORTS):
        try:
            answers[what], status = _answer(setting, what, requests, gpu)
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
    where = f"prefill on GPU {gpu}, decode on GPU 0" if gpu else "two processes on one GPU"
    yield Table(f"a small random model in float32, real services and loops, {where}", columns, rows)
    # The CPU's runner comes after the forks, because torch's threads would not survive them.
    cpu = cpu_runner(small_model(setting, torch.device("cpu")), NUM_BLOCKS)
    expected = generate(cpu, engine_config(setting), requests)
    for what, got in answers.items():
        yield from compare(what, requests, expected, got, cpu)
        if what != COLOCATED and COLOCATED in answers:
            equal = sum(got[name] == answers[COLOCATED][name] for name in got)
            yield Note(f"{what}: {equal} of {len(requests)} answers are those of the one engine, token by token")


def _answer(setting: Setting, what: str, requests: list[ClientRequest], gpu: int) -> tuple[Answers, ReplicaStatus]:
    """The answers, and the decode engine's status once it has counted all of their tokens."""
    gpus: dict[PoolName, int] = {"decode": 0} if what == COLOCATED else {"prefill": gpu, "decode": 0}
    kind = AUTO if what == COLOCATED else what
    with Deployment(setting, kind, gpus, f"{SHARED_MEMORY}{secrets.token_hex(4)}") as deployment:
        answers = deployment.answer(requests)
        # With two engines, the prefill engine generates the first token of each answer.
        generated_here = sum(len(answer) - len(gpus) + 1 for answer in answers.values())
        return answers, deployment.settled("decode-0", "generated_tokens", generated_here)
