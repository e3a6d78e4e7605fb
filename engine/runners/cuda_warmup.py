"""Steps that an engine on a GPU computes before it takes requests, so that none waits for a kernel to be compiled.

Triton compiles a kernel for each combination of types and constants that it is launched with. Attention says itself
which there are. All others that the engine's configuration lets a step choose are launched by steps, which are found by
size alone, from one token to the largest step, with no context and with the longest: nothing here knows how a kernel
chooses. Grammars do not come in such a step, so the mask is launched by itself.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from engine.config import EngineConfig
from engine.runner import Batch
from engine.runners.cuda import CUDARunner
from engine.runners.cuda_copies import DeviceEvent
from engine.sampling_metadata import SamplingMetadata
from protocol.messages import SamplingParams

WARM = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=1)
IN_EVERY_WAY = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    seed=1,
    presence_penalty=0.1,
    logit_bias=((0, 1.0),),
    min_tokens=1 << 20,
    stop_token_ids=(1,),
    logprobs=1,
)


def warm_up(runner: CUDARunner, config: EngineConfig) -> None:
    """Computes the steps and waits for them. `runner` has served nothing yet: block 1 of its cache is written, and
    zeroed in the end, before a transfer may write there.
    """
    runner.launch_attention()
    runner.launch_mask()
    for batch in warm_up_batches(config):
        runner.execute(batch)
    runner.cache[1].zero_()
    DeviceEvent(runner.device).wait()


def warm_up_batches(config: EngineConfig) -> Iterator[Batch]:
    """None is larger than the largest step that the configuration allows. All tokens and contexts lie in block 1."""
    longest, budget, num_seqs = config.max_model_len, config.max_num_batched_tokens, config.max_num_seqs
    for chunk in _doubling(2, min(budget, longest)):
        for num_computed in {0, longest - chunk}:
            yield step_in_block_1(config, [chunk], num_computed)
    above = max(config.cuda_graph_sizes, default=0) + 1
    for size in sorted({*_doubling(1, num_seqs), *(min(size, num_seqs) for size in (*config.cuda_graph_sizes, above))}):
        for num_computed in {0, longest - 1}:
            yield step_in_block_1(config, [1] * size, num_computed)
    few = min(2, num_seqs)
    for params in (WARM, IN_EVERY_WAY):
        yield step_in_block_1(config, [1] * few, 0, params=params)
    if config.async_scheduling:
        batch = step_in_block_1(config, [1] * few, 0)
        batch.pending = np.ones(few, np.bool_)
        yield batch
    decodes, chunk = [1] * min(num_seqs - 1, budget // 2), min(budget - budget // 2, longest)
    for num_computed in {0, longest - chunk}:
        batch = step_in_block_1(config, [*decodes, chunk], num_computed, params=WARM)
        batch.sample[-1] = False
        yield batch
    num_drafts = min(config.num_speculative_tokens, budget - 1, longest - 1)
    if num_drafts:
        for num_computed in {0, longest - 1 - num_drafts}:
            sequences = [1 + num_drafts] * min(num_seqs, budget // (1 + num_drafts))
            batch = step_in_block_1(config, sequences, num_computed, params=IN_EVERY_WAY)
            batch.num_drafts = np.full(len(sequences), num_drafts, np.int32)
            yield batch


def step_in_block_1(
    config: EngineConfig,
    scheduled: Sequence[int],
    num_computed: int,
    *,
    params: SamplingParams | None = None,
) -> Batch:
    """A step of `scheduled` tokens of each sequence after `num_computed` others. Each chooses a token by `params`; with
    None, the likeliest.
    """
    num_seqs, longest = len(scheduled), num_computed + max(scheduled)
    sampling = None
    if params is not None:
        sampling = SamplingMetadata(num_seqs)
        for row, num_tokens in enumerate(scheduled):
            sampling.put(row, params, base=-num_computed - num_tokens, eos_token_ids=())
    return Batch(
        step=0,
        rows=np.arange(num_seqs, dtype=np.int32),
        num_scheduled=np.array(scheduled, np.int32),
        num_computed=np.full(num_seqs, num_computed, np.int32),
        sample=np.ones(num_seqs, np.bool_),
        token_ids=np.zeros((num_seqs, longest), np.int32),
        block_tables=np.ones((num_seqs, -(-longest // config.block_size)), np.int32),
        sampling=sampling,
    )


def _doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first and so on below `last`, then `last`; empty where `first` is above it."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last] if first <= last or sizes else []
