"""A scenario is what one simulated run consists of: engines, clients, speeds and faults. simulation.py plays it.
`drawn` makes a small and nasty one from a seed; cluster/simulate.py makes one from a configuration and a workload.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

import numpy as np

from engine.config import EngineConfig, Knob
from engine.runner import Batch
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import expected_tokens
from kv_transfer.config import TransferConfig
from protocol.errors import RequestError
from protocol.messages import SamplingParams, TokenLogprobs
from router.admission import ClientRequest
from router.config import RouterConfig
from router.policy import POLICIES, Disaggregation
from router.request import Ended

HORIZON_S = 400.0
"""Virtual seconds after which a run that is not quiet counts as stuck."""
MAX_MODEL_LEN = 96
PREEMPTION_WEIGHTS = {"swap": 2, "auto": 2}
"""How often a way of preemption is drawn where it is not once."""
MODES: tuple[Disaggregation, ...] = ("strict", "auto", "auto", "auto", "colocated")
TRANSFER = TransferConfig(lease_s=1.0, revoke_s=1.0, pull_timeout_s=2.0)
"""A lease is barely long enough for a renewal that comes as late as possible: a third of the lease, a tick, 0.3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities (float) per request, message, pull or engine turn, and largest numbers (int) per run."""

    cancel: float = 0.0
    deadline: float = 0.0
    stop_reading: float = 0.0
    """A client stops taking tokens."""
    duplicate: float = 0.0
    pull_failure: float = 0.0
    pull_stall: float = 0.0
    """A pull stops until it is asked to end."""
    connect_failure: float = 0.0
    """A peer cannot be opened."""
    connect_stall: float = 0.0
    """Opening a peer takes many seconds, whether somebody still wants it or not."""
    corruption: float = 0.0
    """A bit of a pulled block is flipped; only in runs with checksums."""
    early_timer: float = 0.0
    """A timer of an engine fires now, whatever its time."""
    dead_lease: float = 0.0
    """A pull is slow, and meanwhile every lease timer of the prefill engines fires."""
    step_failure: float = 0.0
    kills: int = 0
    """Engines are killed and restarted. The messages of a dead sender arrive up to a drawn one."""
    router_kills: int = 0
    router_pauses: int = 0
    """The router does nothing for longer than engines wait for it, and then goes on."""
    door_kills: int = 0
    door_pauses: int = 0
    """A door does nothing for a while, and takes no batch."""
    drains: int = 0
    """Engines are drained, ended and replaced."""
    orders: int = 0
    """An administrator drains an engine, and takes that back later."""
    scale_ups: int = 0
    scale_downs: int = 0
    """Engines are drained and ended for good."""
    stall: float = 0.0
    """A step takes seconds."""


NO_FAULTS = Faults()
ALL_FAULTS = Faults(
    cancel=0.15,
    deadline=0.1,
    stop_reading=0.05,
    duplicate=0.05,
    pull_failure=0.05,
    pull_stall=0.02,
    connect_failure=0.01,
    connect_stall=0.08,
    corruption=0.05,
    early_timer=0.02,
    dead_lease=0.04,
    step_failure=0.005,
    kills=2,
    router_kills=1,
    router_pauses=1,
    door_kills=2,
    door_pauses=2,
    drains=1,
    orders=2,
    scale_ups=1,
    scale_downs=1,
    stall=0.002,
)


@dataclass(slots=True)
class Client:
    """One request of the workload, and what its client has seen of it."""

    request: ClientRequest
    expected: list[int]
    submit_at: float
    cancel_after_s: float | None = None
    stops_after: int | None = None
    """How many tokens it takes; None if it takes all of them at once."""
    delivered: list[int] = field(default_factory=list)
    """What the core has put out for it; only kept where doors have processes of their own."""
    received: list[int] = field(default_factory=list)
    received_at: list[float] = field(default_factory=list)
    """The virtual time of each received token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_checked: int = 0
    """How many tokens of `received` the invariants have looked at."""
    ended: Ended | None = None
    refused: RequestError | None = None
    lost: bool = False
    """True if its router or its door died, so that nobody owes it an answer."""

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def closed(self) -> bool:
        return self.lost or self.ended is not None or self.refused is not None


@dataclass(slots=True, kw_only=True)
class Scenario:
    """All that the event queue does not decide. Durations are virtual seconds; callables may draw from
    their own streams.
    """

    seed: int
    num_prefill: int
    num_decode: int
    num_doors: int = 0
    """Doors in processes of their own. Without any, the router's process is the only door."""
    prefill: EngineConfig
    decode: EngineConfig
    router: RouterConfig
    clients: list[Client]
    faults: Faults
    step_seconds: Callable[[Batch], float]
    """How long a step takes, without its copies."""
    wire_seconds: Callable[[], float]
    """How long a message takes."""
    block_seconds: Callable[[], float]
    """How long a pull takes for one block."""
    copy_block_s: float
    """How long a copy of one block takes between cache and host memory, one way."""
    connect_seconds: Callable[[], float] = lambda: 0.001
    """How long it takes to open a peer."""
    horizon_s: float = HORIZON_S
    transfer: TransferConfig = TRANSFER
    num_channels: int = 1 << 20
    """How many pulls of one engine move at once; the others wait behind them."""
    runner: Callable[..., ArithmeticRunner] = ArithmeticRunner
    """Makes a runner from (cache, num_host_blocks=)."""

    @property
    def needs_prefill(self) -> bool:
        """True if some prompts are too long for a decode engine alone."""
        prefill, decode = self.prefill, self.decode
        return prefill.max_prompt_tokens(prefill.num_blocks) > decode.max_prompt_tokens(decode.num_blocks)


def drawn(
    seed: int,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_doors: int = 0,
    num_requests: int = 20,
    faults: Faults = ALL_FAULTS,
    tight: bool | None = None,
) -> Scenario:
    """Draws a small run from a seed: few blocks, prompts that share prefixes, every preemption mode, drafts, two steps
    in flight. Every limit is small now and then, in each pool on its own.

    If `tight`, answers are long and a decode engine holds little more than the longest one, so that preemption is the
    rule. With None that is drawn too.
    """
    draw = random.Random(f"scenario {seed}")
    tight = draw.random() < 0.4 if tight is None else tight
    config = _draw_engine(draw)
    token_s = draw.choice([0.0005, 0.0005, 0.04])  # slow engines make leases wait
    return Scenario(
        seed=seed,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_doors=num_doors,
        prefill=_draw_prefill(draw, config),
        decode=_draw_decode(draw, config, tight),
        router=RouterConfig(
            max_attempts=10,
            policy=draw.choice(list(POLICIES)),
            disaggregation=draw.choice(MODES if num_prefill else MODES[1:]),
            max_queue=draw.choice([1, 8, 1024, 1024]),
            queue_ttl_s=draw.choice([None, None, 2.0]) if faults.deadline else None,
            max_buffered_tokens=draw.choice([1, 3, 6]),
            write_timeout_s=draw.choice([0.3, 30.0]),
            min_disaggregated_tokens=draw.choice([0, 0, 0, 6]) if faults is not NO_FAULTS else 0,
        ),
        clients=_draw_clients(draw, num_requests, faults, tight),
        faults=faults,
        step_seconds=lambda batch: 0.002 + token_s * batch.num_tokens * draw.random(),
        wire_seconds=partial(_draw_wire, draw),
        block_seconds=partial(_draw_block, draw, faults),
        connect_seconds=lambda: draw.choice([0.001, 0.001, 0.02, 1.0]) * draw.random(),
        copy_block_s=draw.choice([0.0001, 0.01]),
        transfer=replace(TRANSFER, checksum=draw.random() < 0.4, max_early_handoffs=draw.choice([1, 2, 1024])),
        num_channels=draw.choice([1, 2, 1024]),
    )


def _draw_engine(draw: random.Random) -> EngineConfig:
    budget = draw.choice([3, 6, 6, 16, 16, 40, 40, 256])
    return EngineConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, draw.choice([1, 2, 2, 4, 4, 16])),
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_blocks=draw.choice([26, 32, 60]),
        enable_prefix_caching=draw.choice([True, True, False]),
        long_prefill_token_threshold=draw.choice([0, 0, 5]),
        async_scheduling=draw.random() < 0.4,
        scheduling_policy=draw.choice(["fcfs", "fcfs", "priority"]),
        watermark=draw.choice([0.0, 0.0, 0.1]),
    )


def _draw_prefill(draw: random.Random, config: EngineConfig) -> EngineConfig:
    """With more room than decode has, leases pile up in front of a full decode engine. With less room or a shorter
    limit, some prompts bypass the prefill engine.
    """
    return replace(
        config,
        prompt_reservation="hold",
        num_blocks=draw.choice([12, config.num_blocks, config.num_blocks, 2 * config.num_blocks]),
        max_model_len=draw.choice([20, 40, MAX_MODEL_LEN, MAX_MODEL_LEN, MAX_MODEL_LEN]),
        enable_chunked_prefill=draw.random() < 0.85,
    )


def _draw_decode(draw: random.Random, config: EngineConfig, tight: bool) -> EngineConfig:
    config = replace(
        config,
        preemption=draw.choice([knob for knob in get_args(Knob) for _ in range(PREEMPTION_WEIGHTS.get(knob, 1))]),
        prompt_reservation=draw.choice(["check", "check", "none", "hold"]),
        num_host_blocks=draw.choice([8, 30, 60]),
        num_speculative_tokens=0 if config.async_scheduling else draw.choice([0, 2, 5]),
        enable_chunked_prefill=draw.random() < 0.85,
    )
    if not tight:
        return config
    return replace(
        config,
        num_blocks=draw.choice([16, 18, 22]),
        max_num_seqs=min(config.max_num_batched_tokens, draw.choice([4, 16])),
    )


def _draw_clients(draw: random.Random, count: int, faults: Faults, tight: bool) -> list[Client]:
    """Prompts share prefixes of a few families, so that caches hit in both pools."""
    families = [[draw.randrange(32000) for _ in range(48)] for _ in range(3)]
    window_s = draw.choice([0.5, 1.0, 5.0])
    clients = []
    for index in range(count):
        shared = draw.choice(families)[: draw.choice([0, 4, 8] if tight else [0, 4, 8, 16, 30])]
        num_own = draw.choice([1, 3, 4, 9] if tight else [1, 3, 4, 9, 20])
        prompt = shared + [draw.randrange(32000) for _ in range(num_own)]
        num_tokens = draw.choice([12, 24, 36] if tight else [1, 2, 5, 12, 24])
        if draw.random() < 0.03:  # can never fit: longer than the model, or with its answer longer than any pool
            prompt, num_tokens = draw.choice([(prompt * 96, 1), (prompt[:1] * 60, 400)])
        sampling = SamplingParams(temperature=1.0, seed=index, logprobs=1) if index % 2 else SamplingParams()
        answer = expected_tokens(prompt, max(1, min(num_tokens, MAX_MODEL_LEN - len(prompt))), seed=sampling.seed or 0)
        stop: tuple[int, ...] = (draw.choice(answer),) if draw.random() < 0.2 else ()
        request = ClientRequest(
            request_id=f"r{index}",
            prompt_token_ids=np.array(prompt, np.int32),
            max_tokens=num_tokens,
            sampling=replace(sampling, stop_token_ids=stop),
            priority=draw.choice([0, 0, 1, 50]),
            deadline_s=draw.uniform(0.02, 1.0) if draw.random() < faults.deadline else None,
            cache_salt=draw.choice(["", "", "tenant"]),
        )
        if stop:
            answer = answer[: answer.index(stop[0]) + 1]
        cancel_after_s = draw.uniform(0.0, 0.5) if draw.random() < faults.cancel else None
        stops_after = draw.choice([0, 1, 4]) if draw.random() < faults.stop_reading else None
        clients.append(Client(request, answer, 0.5 + draw.uniform(0.0, window_s), cancel_after_s, stops_after))
    return clients


def _draw_wire(draw: random.Random) -> float:
    return draw.uniform(0.0005, 0.002) if draw.random() < 0.9 else draw.uniform(0.002, 0.3)


def _draw_block(draw: random.Random, faults: Faults) -> float:
    """Now and then the link is so slow that leases and deadlines pass."""
    slow = faults.pull_failure and draw.random() < 0.08
    return draw.uniform(0.1, 3.0) if slow else draw.uniform(0.0002, 0.004)
