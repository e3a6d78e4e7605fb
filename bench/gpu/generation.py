"""Generates answers with one engine that has no service around it."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from bench.gpu.answers import Answers
from bench.gpu.models import BLOCK_SIZE, NUM_BLOCKS
from bench.gpu.setting import Setting
from engine.config import EngineConfig
from engine.runner import Batch, Launched, LaunchingRunner, Runner, StepOutput
from engine.scheduler.proposer import NGramProposer
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from protocol.messages import RequestKey, SamplingParams
from router.admission import ClientRequest


class Executed:
    """The output of a runner that cannot launch a step without waiting for it."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


def some_requests(setting: Setting, vocab_size: int) -> list[ClientRequest]:
    """Greedy and sampled requests with prompts of all lengths. Every third prompt repeats itself, for drafts."""
    random = np.random.default_rng(setting.seed)
    count, longest, max_tokens = setting.size((24, 200, 40), (2, 12, 3))
    requests = []
    for i in range(count):
        prompt = random.integers(0, vocab_size, int(random.integers(2, longest)), dtype=np.int32)
        if i % 3 == 0:
            prompt = np.tile(prompt[:5], 1 + len(prompt) // 5)
        sampling = SamplingParams(ignore_eos=True)
        if i % 2:
            top_p, penalty = float(random.choice([0.8, 1.0])), float(random.choice([1.0, 1.1]))
            sampling = SamplingParams(
                ignore_eos=True,
                temperature=0.8,
                top_p=top_p,
                repetition_penalty=penalty,
                seed=int(random.integers(2**62)),
            )
        name = f"{'sampled' if i % 2 else 'greedy'}-{i}"
        requests.append(
            ClientRequest(request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, sampling=sampling)
        )
    return requests


def engine_config(
    setting: Setting, *, num_drafts: int = 0, depth: int = 1, graph_sizes: tuple[int, ...] = ()
) -> EngineConfig:
    """The budget is so small that prompts are cut into chunks and share steps with decodes."""
    return EngineConfig(
        max_num_batched_tokens=setting.size(64, 8),
        max_num_seqs=setting.size(16, 4),
        max_model_len=setting.size(512, 64),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_speculative_tokens=num_drafts,
        async_scheduling=depth == 2,
        cuda_graph_sizes=graph_sizes,
    )


def generate(runner: Runner, config: EngineConfig, requests: Sequence[ClientRequest]) -> Answers:
    """Answers all requests at once. With `async_scheduling` a step is launched before the previous one is known."""
    scheduler = Scheduler(config, num_blocks=config.num_blocks, proposer=NGramProposer())
    for request_number, asked in enumerate(requests):
        assert asked.max_tokens is not None
        scheduler.add(
            Request(
                key=RequestKey(1, asked.request_id, 1),
                request_number=request_number,
                prompt_token_ids=asked.prompt_token_ids,
                max_tokens=asked.max_tokens,
                sampling=asked.sampling,
                arrival=request_number,
            )
        )
    answers: Answers = {asked.request_id: [] for asked in requests}
    in_flight: deque[Launched] = deque()
    while True:
        while len(in_flight) < 1 + config.async_scheduling and (batch := scheduler.schedule()) is not None:
            in_flight.append(launch(runner, batch))
        if not in_flight:
            return answers
        committed = scheduler.commit(in_flight.popleft().result())
        tokens = iter(committed.token_ids.tolist())
        for request_number, count in zip(committed.request_numbers.tolist(), committed.counts.tolist(), strict=True):
            answers[requests[request_number].request_id] += [next(tokens) for _ in range(count)]


def launch(runner: Runner, batch: Batch) -> Launched:
    return runner.launch(batch) if isinstance(runner, LaunchingRunner) else Executed(runner.execute(batch))
