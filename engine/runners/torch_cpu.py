"""The real model on CPU: torch linears, attention over a block-major paged cache.

1. `plan_step` lays the batch flat: T tokens of B sequences, prompt chunks and decodes alike.
2. Each layer computes all T tokens at once; attention writes K and V into the sequences' blocks, then reads them by block table.
3. After the last layer's attention only the tokens that sample go on: the last of each sequence whose chunk ends it.
4. One token is chosen for each (engine/sampling.py): the step's output.
"""

import time

import numpy as np
import torch

from engine.models.llama import LlamaModel
from engine.runner import Batch, StepOutput
from engine.runners.cpu_ops import CPUOps, TorchOps
from engine.runners.step_plan import StepPlan, plan_step
from engine.sampling import Contexts, choose, greedy
from protocol.errors import CapacityError
from protocol.messages import TokenLogprobs


class TorchCPURunner:
    """`cache`: flat uint8, owned by the caller (who may share it with other processes) and used in place; block-major.

    Sets torch's thread count for the whole process. Raises CapacityError if `cache` is no whole number of blocks, or of fewer than 2.
    """

    def __init__(self, model: LlamaModel, cache: torch.Tensor, *, block_size: int, num_threads: int) -> None:
        config = model.config
        block_shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        block_bytes = int(np.prod(block_shape)) * model.dtype.itemsize
        if cache.numel() % block_bytes or cache.numel() < 2 * block_bytes:
            raise CapacityError(f"KV cache: {cache.numel()} bytes, expected a multiple of {block_bytes} and at least two blocks")
        torch.set_num_threads(num_threads)
        self.model, self.block_size = model, block_size
        self.cache = cache.view(model.dtype).view(-1, *block_shape)
        self._ops = _make_ops(model, self.cache, num_threads)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepOutput:
        started = time.perf_counter()
        plan = plan_step(batch, self.block_size)
        counts = batch.sample.astype(np.int32)
        token_ids = np.zeros((len(counts), 1), dtype=np.int32)
        logits = self.forward(plan)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if logits is not None and batch.sampling is None:
            token_ids[plan.sampled, 0] = greedy(logits)
        elif logits is not None and batch.sampling is not None:
            last = plan.token_ids[plan.sampled_tokens].astype(np.int32)
            num_known = plan.contexts[plan.sampled].astype(np.int32)
            chosen, reports = choose(logits, batch.sampling, Contexts(batch.rows[plan.sampled], num_known, batch.token_ids, last))
            token_ids[plan.sampled, 0] = chosen
            logprobs = {int(plan.sampled[index]): [report] for index, report in reports.items()}
        return StepOutput(token_ids=token_ids, counts=counts, seconds=time.perf_counter() - started, logprobs=logprobs)

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits [S, vocab_size] of the sampled tokens in the model's dtype; None if nothing samples. Writes the plan's KV."""
        model, ops = self.model, self._ops
        ops.begin(plan)
        h = model.embed[torch.from_numpy(plan.token_ids)].float()
        x = ops.norm(h, model.layers[0].input_norm)
        for i, layer in enumerate(model.layers):
            attended = ops.attention(i, layer.qkv(x))
            if i == len(model.layers) - 1:
                if not len(plan.sampled_tokens):
                    return None
                kept = torch.from_numpy(plan.sampled_tokens)
                attended, h = attended[kept], h[kept]
            x = ops.add_norm(h, layer.o(attended), layer.post_norm)
            down = layer.down(ops.silu_mul(layer.gate_up(x)))
            x = ops.add_norm(h, down, model.layers[i + 1].input_norm if i + 1 < len(model.layers) else model.norm)
        return model.lm_head(x)


def _make_ops(model: LlamaModel, cache: torch.Tensor, num_threads: int) -> CPUOps:
    """Compiled kernels where numba is installed and the shapes fill whole vectors, else plain torch."""
    try:
        from engine.runners.numba_ops import NumbaOps, supports
    except ImportError:
        return TorchOps(model, cache)
    return NumbaOps(model, cache, num_threads=num_threads) if supports(model.config.head_dim, cache.shape[4]) else TorchOps(model, cache)
