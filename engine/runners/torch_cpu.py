"""The real model on CPU: `engine/models/decoder.py` over operations of torch or our own, and a block-major paged cache.

0. Blocks of preempted sequences are copied to the host, and back for those that go on.
1. `plan_step` lays the batch flat: T tokens of B sequences, prompt chunks and decodes alike.
2. Each layer computes all T tokens at once; attention writes K and V into the sequences' blocks, then reads them by
   block table.
3. After the last layer's attention only the tokens that sample go on: of each sequence whose chunk ends it the last
   known one, and its drafts.
4. One token is chosen after each (engine/sampling.py); where drafts were verified, those that were chosen too stand:
   the step's output.
"""

import time

import numpy as np
import torch

from engine.models.decoder import Decoder, forward
from engine.runner import Batch, StepOutput
from engine.runners.cpu_int8_linears import fit_int8_linears
from engine.runners.cpu_linears import fit_linears
from engine.runners.cpu_ops import CPUOps, TorchOps
from engine.runners.drafts import accept
from engine.runners.host_copies import HostCopies, nothing_sampled
from engine.runners.paged_cache import paged_cache
from engine.runners.step_plan import StepPlan, plan_step
from engine.sampling import greedy, sample_tokens
from engine.sampling_metadata import Contexts, Masker


class TorchCPURunner:
    """`cache`: flat uint8, owned by the caller (who may share it with other processes) and used in place.
    `masker`: what serves grammars; without it none may come.

    Sets torch's thread count for the whole process, and fits the model's linears to this machine. Raises CapacityError
    as `paged_cache` does.
    """

    def __init__(
        self,
        model: Decoder,
        cache: torch.Tensor,
        *,
        block_size: int,
        num_threads: int,
        num_host_blocks: int = 0,
        masker: Masker | None = None,
    ) -> None:
        self.cache = paged_cache(cache, model, block_size)
        torch.set_num_threads(num_threads)
        self.model, self.block_size, self._masker = model, block_size, masker
        self._copies = HostCopies(cache.view(len(self.cache), -1).numpy(), num_host_blocks)
        fit_linears(model, num_threads)
        fit_int8_linears(model, num_threads)
        self._ops = _make_ops(model, self.cache, num_threads)
        self._last = np.zeros(0, np.int32)
        """[num_rows] the newest token of every row, for batches in which it is still pending."""

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepOutput:
        started = time.perf_counter()
        swapped_bytes, swap_seconds = self._copies.run(batch)
        if not len(batch.rows):
            return nothing_sampled(swapped_bytes, swap_seconds)
        if len(self._last) < len(batch.token_ids):  # before it is read, too: the step before may have failed
            self._last = np.resize(self._last, len(batch.token_ids))
        plan = plan_step(batch, self.block_size)
        if batch.pending is not None:
            plan.token_ids[plan.starts[:-1][batch.pending]] = self._last[batch.rows[batch.pending]]
        logits = self.forward(plan)
        if logits is None:
            output = accept(plan, np.zeros(0, np.int32), {})
        elif batch.sampling is None:
            output = accept(plan, greedy(logits), {})
        else:
            rows = np.repeat(batch.rows[plan.sampled], 1 + plan.num_drafts)
            num_known = (plan.positions[plan.sampled_tokens] + 1).astype(np.int32)
            last = plan.token_ids[plan.sampled_tokens].astype(np.int32)
            contexts = Contexts(rows, num_known, batch.token_ids, last)
            masks = None if self._masker is None else self._masker.masks(batch.sampling, contexts)
            chosen, reports = sample_tokens(logits, batch.sampling, contexts, masks)
            output = accept(plan, chosen, reports, {} if masks is None else masks.errors)
        self._last[batch.rows[plan.sampled]] = output.token_ids[plan.sampled, output.counts[plan.sampled] - 1]
        output.swapped_bytes, output.swap_seconds = swapped_bytes, swap_seconds
        output.seconds = time.perf_counter() - started
        return output

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits, float32 [L, vocab_size], after the sampled tokens; None if nothing samples. Writes the plan's KV."""
        ops, sampled = self._ops, plan.sampled_tokens
        ops.begin(plan)
        kept = None if len(sampled) == len(plan.token_ids) else torch.from_numpy(sampled)
        x = forward(self.model, ops, torch.from_numpy(plan.token_ids), kept)
        return None if x is None else ops.logits(x)


def _make_ops(model: Decoder, cache: torch.Tensor, num_threads: int) -> CPUOps:
    """Compiled kernels where numba is installed and they know shapes and dtype, else plain torch."""
    try:
        from engine.runners.numba_ops import NumbaOps, supports
    except ImportError:
        return TorchOps(model, cache)
    return (
        NumbaOps(model, cache, num_threads=num_threads) if supports(model, cache.shape[4]) else TorchOps(model, cache)
    )
