"""Sampling parameters on their way through scheduler and runner: same tokens however the work is cut, logprobs beside
every token.
"""

from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.models.loading import build_model
from engine.runner import Runner
from engine.runners import torch_cpu
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.arithmetic_model import expected_logprobs, expected_tokens
from engine.runners.cpu_ops import TorchOps
from engine.runners.torch_cpu import TorchCPURunner
from engine.scheduler.outcome import Committed, PromptDone
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from protocol.messages import Logprobs, RequestKey, SamplingParams
from tests.engine.tiny_llama import TINY, random_tensors

BLOCK_SIZE, NUM_BLOCKS, SEED = 4, 64, 12345
PROMPT = list(range(1, 11))
SAMPLED = SamplingParams(temperature=0.8, seed=SEED, logprobs=2)
ANSWER = expected_tokens(PROMPT, 9, seed=SEED)


class HalfRight:
    """Proposes the right token and then a wrong one."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def propose(self, key: RequestKey, token_ids: Any, max_num_drafts: int) -> list[int]:
        done = len(token_ids) - len(PROMPT)
        return [*self.answer[done : done + 1], 0][:max_num_drafts]


class Engine:
    """Answers and logprobs by request name; a step at a time, two in flight where asked."""

    def __init__(
        self,
        runner: Runner | None = None,
        *,
        depth: int = 1,
        eos: tuple[int, ...] = (),
        proposer: Any = None,
        **knobs: Any,
    ) -> None:
        fields: dict[str, Any] = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "max_model_len": 128,
            "block_size": BLOCK_SIZE,
        }
        self.scheduler = Scheduler(
            EngineConfig(**(fields | knobs)), num_blocks=NUM_BLOCKS, eos_token_ids=eos, proposer=proposer
        )
        self.runner = runner or ArithmeticRunner(np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.int64))
        self.depth = depth
        self.answers: dict[str, dict[int, int]] = {}
        self.logprobs: dict[str, list[Logprobs]] = {}
        self.reasons: dict[str, str] = {}
        self.prompts: list[PromptDone] = []
        self._names: list[str] = []

    def add(self, name: str, sampling: SamplingParams, *, prompt: list[int] = PROMPT, **fields: Any) -> RequestKey:
        key = RequestKey(1, name, 1)
        fields = {"max_tokens": 9, "request_number": len(self._names), **fields}
        self._names.append(name)
        self.answers[name], self.logprobs[name] = {}, []
        self.scheduler.add(Request(key=key, prompt_token_ids=np.array(prompt, np.int32), sampling=sampling, **fields))
        return key

    def run(self) -> None:
        outputs: list[Any] = []
        while True:
            while len(outputs) < self.depth and (batch := self.scheduler.schedule()) is not None:
                outputs.append(self.runner.execute(batch))
            if not outputs:
                return
            self.take(self.scheduler.commit(outputs.pop(0)))

    def take(self, committed: Committed) -> None:
        start = 0
        for request_number, offset, count in zip(
            committed.request_numbers.tolist(), committed.offsets.tolist(), committed.counts.tolist(), strict=True
        ):
            tokens = committed.token_ids[start : start + count].tolist()
            self.answers[self._names[request_number]].update(
                {offset + ahead: token for ahead, token in enumerate(tokens)}
            )
            start += count
        for entry in committed.logprobs:
            self.logprobs[self._names[entry.request_number]].append(entry)
        self.prompts += committed.prompts
        self.reasons |= {ended.key.request_id: ended.finish_reason for ended in committed.finished}

    def answer(self, name: str) -> list[int]:
        tokens = self.answers[name]
        assert sorted(tokens) == list(range(min(tokens), max(tokens) + 1))
        return [tokens[index] for index in sorted(tokens)]


def check_logprobs(engine: Engine, name: str) -> None:
    """One entry per token, at its index, of that token."""
    entries = sorted(engine.logprobs[name], key=lambda entry: entry.offset)
    assert [(entry.offset, entry.values) for entry in entries] == [
        (index, expected_logprobs(token, 2)) for index, token in sorted(engine.answers[name].items())
    ]


@pytest.mark.parametrize(
    "how",
    [{}, {"max_num_batched_tokens": 4}, {"depth": 2}, {"proposer": HalfRight(ANSWER), "num_speculative_tokens": 2}],
    ids=["plain", "chunks", "two in flight", "drafts"],
)
def test_a_sampled_answer_does_not_depend_on_how_it_is_computed(how: dict[str, Any]) -> None:
    engine = Engine(**how)
    engine.add("greedy", SamplingParams(seed=SEED))
    engine.add("sampled", SAMPLED)
    engine.add("other", SamplingParams(temperature=0.8, seed=SEED + 1))
    engine.run()
    assert engine.answer("sampled") == ANSWER
    assert engine.answer("greedy") == expected_tokens(PROMPT, 9)
    assert engine.answer("other") == expected_tokens(PROMPT, 9, seed=SEED + 1)
    check_logprobs(engine, "sampled")
    assert engine.logprobs["greedy"] == engine.logprobs["other"] == []
    engine.scheduler.check_idle()


def test_a_later_attempt_and_a_preempted_sequence_go_on_where_they_were() -> None:
    engine = Engine()
    engine.add("again", SAMPLED, prompt=PROMPT + ANSWER[:4], offset=4, max_tokens=5)
    engine.run()
    assert engine.answer("again") == ANSWER[4:]
    check_logprobs(engine, "again")
    scarce = Engine(enable_prefix_caching=False)
    for i in range(4):
        scarce.add(f"r{i}", SAMPLED, prompt=[i + 1] * 50, max_tokens=20)
    scarce.run()
    for i in range(4):
        assert scarce.answer(f"r{i}") == expected_tokens([i + 1] * 50, 20, seed=SEED)
        check_logprobs(scarce, f"r{i}")
    assert scarce.scheduler.num_recomputed_tokens > 0


def test_the_first_token_and_its_logprobs_cross_the_handoff() -> None:
    prefill, decode = Engine(), Engine()
    prefill.add("r", SAMPLED, kv="producer")
    prefill.run()
    (done,) = prefill.prompts
    assert (done.first_token_id, done.first_logprobs) == (ANSWER[0], expected_logprobs(ANSWER[0], 2))
    check_logprobs(prefill, "r")
    key = decode.add("r", SAMPLED, kv="consumer")
    decode.scheduler.offer(key)
    decode.scheduler.schedule()
    (reserved,) = decode.scheduler.take_events().reserved
    assert isinstance(prefill.runner, ArithmeticRunner) and isinstance(decode.runner, ArithmeticRunner)
    decode.runner._cache[reserved.block_ids[:3]] = prefill.runner._cache[done.block_ids]
    decode.scheduler.arrive(key, done.first_token_id, done.first_logprobs)
    decode.run()
    assert decode.answer("r") == ANSWER
    check_logprobs(decode, "r")


def test_a_stop_token_among_drafts_cuts_the_logprobs_too() -> None:
    engine = Engine(proposer=HalfRight(ANSWER), num_speculative_tokens=2)
    engine.add("r", SamplingParams(temperature=0.8, seed=SEED, logprobs=2, stop_token_ids=(ANSWER[3],)))
    engine.run()
    assert engine.answer("r") == ANSWER[:4]
    check_logprobs(engine, "r")


def test_a_batch_without_wishes_carries_no_sampling() -> None:
    engine = Engine()
    engine.add("greedy", SamplingParams())
    batch = engine.scheduler.schedule()
    assert batch is not None and batch.sampling is None
    engine.scheduler.commit(engine.runner.execute(batch))
    key = engine.add("sampled", SAMPLED)
    batch = engine.scheduler.schedule()
    assert batch is not None and batch.sampling is not None
    engine.scheduler.commit(engine.runner.execute(batch))
    engine.scheduler.abort(key)
    batch = engine.scheduler.schedule()
    assert batch is not None and batch.sampling is None


def torch_engine(monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> Engine:
    monkeypatch.setattr(torch_cpu, "_make_ops", lambda model, cache, num_threads: TorchOps(model, cache))
    model = build_model(TINY, "float32", random_tensors(TINY).__getitem__)
    elements = NUM_BLOCKS * TINY.num_layers * 2 * TINY.num_kv_heads * BLOCK_SIZE * TINY.head_dim
    runner = TorchCPURunner(model, torch.zeros(elements).view(torch.uint8), block_size=BLOCK_SIZE, num_threads=1)
    return Engine(runner, **knobs)


def test_a_real_model_samples_the_same_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        temperature=1.5, top_p=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=3
    )
    alone, crowded = torch_engine(monkeypatch), torch_engine(monkeypatch, max_num_batched_tokens=7)
    alone.add("r", params)
    alone.run()
    for i in range(3):
        crowded.add(f"other {i}", SamplingParams(temperature=0.7 * i, seed=i), prompt=[i + 20] * (i + 5))
    crowded.add("r", params)
    crowded.run()
    assert alone.answer("r") == crowded.answer("r")
    assert len(set(alone.answer("r"))) > 2
    for one, other in zip(alone.logprobs["r"], crowded.logprobs["r"], strict=True):
        assert one.values.top_token_ids == other.values.top_token_ids
        assert one.values.top == pytest.approx(other.values.top, abs=1e-4)
        assert one.values.chosen <= one.values.top[0]


def test_min_tokens_holds_back_what_would_end_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy runs of this model repeat a token; where it is the end, the answer must go on without it for a while."""
    free = torch_engine(monkeypatch)
    free.add("r", SamplingParams())
    free.run()
    end = free.answer("r")[0]
    for params, eos in (
        (SamplingParams(min_tokens=3, stop_token_ids=(end,)), ()),
        (SamplingParams(min_tokens=3), (end,)),
    ):
        held = torch_engine(monkeypatch, eos=eos)
        held.add("r", params)
        held.add("at once", SamplingParams(stop_token_ids=(end,)))
        held.run()
        assert held.answer("at once") == [end]
        assert end not in held.answer("r")[:3]
        assert len(held.answer("r")) > 3 or held.reasons["r"] == "length"


def test_a_bias_forces_and_bans_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = torch_engine(monkeypatch)
    engine.add("forced", SamplingParams(logit_bias=((42, 100.0),)))
    engine.add(
        "banned", SamplingParams(temperature=1.0, seed=1, logit_bias=tuple((token, -100.0) for token in range(90)))
    )
    engine.run()
    assert engine.answer("forced") == [42] * 9
    assert min(engine.answer("banned")) >= 90
