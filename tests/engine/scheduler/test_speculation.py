"""Drafts change the number of steps and nothing else, on the arithmetic model, on a small Llama, and through a
decode engine.
"""

from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.models.loading import build_model
from engine.runner import Batch, Runner
from engine.runners import torch_cpu
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import expected_tokens
from engine.runners.cpu_ops import TorchOps
from engine.runners.torch_cpu import TorchCPURunner
from engine.scheduler.proposer import NGramProposer
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from engine.scheduler.step_counts import StepCounts
from protocol.arrays import Int32
from protocol.block_hash import chain_hashes, root_hash
from protocol.errors import ConfigError
from protocol.messages import RequestKey, SamplingParams, StepTokens
from tests.engine.tiny_llama import TINY, random_tensors
from tests.pool_world import DecodeWorld

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 4, 64, 24
PROMPTS = [[5, 9, 2, 7], [3] * 9, [1, 2, 3, 4, 5] * 3]
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, seed=11, top_k=20, repetition_penalty=1.1)


class KnownAnswers:
    """A proposer of right drafts, except where the index in the answer is a multiple of `wrong_every`."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], wrong_every: int = 5) -> None:
        self._prompts, self._answers, self._wrong_every = prompts, answers, wrong_every
        self.asked: list[tuple[int, int]] = []
        """(tokens of the answer so far, room for drafts) of each call."""

    def propose(self, key: RequestKey, token_ids: Int32, max_num_drafts: int) -> list[int]:
        which = int(key.request_id)
        done = len(token_ids) - len(self._prompts[which])
        self.asked.append((done, max_num_drafts))
        drafts = enumerate(self._answers[which][done : done + max_num_drafts], done)
        return [token if index % self._wrong_every else (token + 1) % 97 for index, token in drafts]


class Run:
    """Runs all prompts at once to their end."""

    def __init__(
        self,
        runner: Runner,
        sampling: SamplingParams,
        *,
        proposer: Any = None,
        eos: tuple[int, ...] = (),
        max_tokens: int = NUM_TOKENS,
    ) -> None:
        config = EngineConfig(
            max_num_batched_tokens=40,
            max_num_seqs=4,
            max_model_len=128,
            block_size=BLOCK_SIZE,
            num_speculative_tokens=3 * bool(proposer),
        )
        self.scheduler = Scheduler(config, num_blocks=NUM_BLOCKS, eos_token_ids=eos, proposer=proposer)
        self.counters: dict[str, float] = dict.fromkeys(StepCounts.KEYS, 0)
        self.answers: list[list[int]] = [[] for _ in PROMPTS]
        self.reasons: dict[str, str] = {}
        self.batches: list[Batch] = []
        counts = StepCounts(self.counters, config)
        for request_number, prompt in enumerate(PROMPTS):
            prompt_ids = np.array(prompt, np.int32)
            key = RequestKey(1, str(request_number), 1)
            self.scheduler.add(
                Request(
                    key=key,
                    request_number=request_number,
                    prompt_token_ids=prompt_ids,
                    max_tokens=max_tokens,
                    sampling=sampling,
                )
            )
        while (batch := self.scheduler.schedule()) is not None:
            self.batches.append(batch)
            output = runner.execute(batch)
            committed = self.scheduler.commit(output)
            counts.committed(batch, output)
            start = 0
            for request_number, count in zip(
                committed.request_numbers.tolist(), committed.counts.tolist(), strict=True
            ):
                self.answers[request_number] += committed.token_ids[start : start + count].tolist()
                start += count
            self.reasons |= {ended.key.request_id: ended.finish_reason for ended in committed.finished}
        self.scheduler.check_idle()


def arithmetic() -> ArithmeticRunner:
    return ArithmeticRunner(np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.int64))


@pytest.fixture(params=["torch", "compiled"])
def llama(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TorchCPURunner:
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(torch_cpu, "_make_ops", lambda model, cache, num_threads: TorchOps(model, cache))
    size = 16 if request.param == "compiled" else BLOCK_SIZE
    model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    elements = NUM_BLOCKS * TINY.num_layers * 2 * TINY.num_kv_heads * size * TINY.head_dim
    monkeypatch.setattr(f"{__name__}.BLOCK_SIZE", size)
    return TorchCPURunner(model, torch.zeros(elements).view(torch.uint8), block_size=size, num_threads=1)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_llama_says_the_same_with_and_without_drafts(llama: TorchCPURunner, sampling: SamplingParams) -> None:
    plain = Run(llama, sampling)
    drafted = Run(llama, sampling, proposer=KnownAnswers(PROMPTS, plain.answers))
    looked_up = Run(llama, sampling, proposer=NGramProposer())
    assert plain.answers == drafted.answers == looked_up.answers
    assert len(plain.batches) == NUM_TOKENS
    assert len(drafted.batches) <= NUM_TOKENS // 2
    assert drafted.counters["accepted_drafts"] > 2 * NUM_TOKENS / 4 * len(PROMPTS)
    assert drafted.counters["accepted_drafts"] < drafted.counters["drafts"]


def test_every_accepted_draft_saves_a_step_and_every_rejected_one_costs_budget() -> None:
    answers = [expected_tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]
    right = Run(arithmetic(), GREEDY, proposer=KnownAnswers(PROMPTS, answers, wrong_every=1000))
    wrong = Run(arithmetic(), GREEDY, proposer=KnownAnswers(PROMPTS, answers, wrong_every=1))
    assert right.answers == wrong.answers == answers
    assert len(right.batches) == 1 + (NUM_TOKENS - 1 + 3) // 4
    assert len(wrong.batches) == NUM_TOKENS
    assert right.counters["accepted_drafts"] == right.counters["drafts"]
    assert wrong.counters["accepted_drafts"] == 0
    num_needed = sum(map(len, PROMPTS)) + (NUM_TOKENS - 1) * len(PROMPTS)
    assert wrong.counters["scheduled_tokens"] - wrong.counters["drafts"] == num_needed


def test_drafts_are_never_more_than_are_still_to_come_less_one() -> None:
    answers = [expected_tokens(prompt, 9) for prompt in PROMPTS]
    proposer = KnownAnswers(PROMPTS, answers, wrong_every=1000)
    assert Run(arithmetic(), GREEDY, proposer=proposer, max_tokens=6).answers == [answer[:6] for answer in answers]
    assert {room for done, room in proposer.asked if done == 5} == {0}
    assert all(room == min(6 - done - 1, 3) for done, room in proposer.asked)


def test_a_stop_token_among_accepted_drafts_ends_the_answer_there() -> None:
    answers = [expected_tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]
    proposer = KnownAnswers(PROMPTS, answers, wrong_every=1000)
    stop = answers[1][7]
    run = Run(arithmetic(), GREEDY, proposer=proposer, eos=(stop,))
    assert run.answers == [answers[0], answers[1][:8], answers[2]]
    assert run.reasons == {"0": "length", "1": "stop", "2": "length"}


def test_hashes_stand_for_known_tokens_only() -> None:
    answers = [expected_tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]
    known = set()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        known.update(chain_hashes(root_hash(b""), np.array(prompt + answer, np.int32), 4))
    run = Run(arithmetic(), GREEDY, proposer=KnownAnswers(PROMPTS, answers, wrong_every=2))
    visible = set(run.scheduler.blocks.visible())
    assert visible <= known
    assert len(visible) >= sum((len(prompt) + NUM_TOKENS - 1) // 4 for prompt in PROMPTS) - 1


def test_a_decode_engine_drafts_after_a_handoff_and_counts_it() -> None:
    prompt, num_tokens = list(range(1, 11)), 12
    answer = expected_tokens(prompt, num_tokens)
    proposer = KnownAnswers([prompt], [answer])
    world = DecodeWorld(num_speculative_tokens=3, proposer=proposer)
    world.generate(10, name="0", max_tokens=num_tokens)
    world.handoff(10, name="0", first_token_id=answer[0])
    world.step()
    world.finish_pulls()
    received: dict[int, int] = {}
    num_steps = 0
    while world.step():
        num_steps += 1
    for _, message in world.sent(StepTokens):
        start = 0
        for offset, count in zip(message.offsets.tolist(), message.counts.tolist(), strict=True):
            tokens = message.token_ids[start : start + count].tolist()
            received |= {offset + ahead: token for ahead, token in enumerate(tokens)}
            start += count
    assert [received[index] for index in range(num_tokens)] == answer
    assert num_steps < num_tokens - 3
    assert 0 < world.service.counters["accepted_drafts"] < world.service.counters["drafts"]
    assert world.service.counters["generated_tokens"] == num_tokens - 1
    world.service.check_idle()


def test_drafts_and_asynchronous_scheduling_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        EngineConfig(num_speculative_tokens=2, async_scheduling=True)
