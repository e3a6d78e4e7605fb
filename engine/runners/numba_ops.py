"""`CPUOps` by compiled kernels, in place over the paged cache: no copy of K or V, no allocation per layer."""

import numba
import numpy as np
import torch

from engine.kernel_cache import one_compiles
from engine.models.llama import LlamaModel, float32_logits
from engine.runners import cpu_attention, cpu_head, cpu_kernels
from engine.runners.cpu_attention import Shape, supports
from engine.runners.cpu_elements import Stored
from engine.runners.step_plan import StepPlan
from protocol.arrays import Int64

__all__ = ["NumbaOps", "supports", "work_items"]


class NumbaOps:
    """`cache` as in `TorchOps`. Compiles its kernels when made (seconds the first time, then from disk); `num_threads`
    are torch's own.
    """

    def __init__(self, model: LlamaModel, cache: torch.Tensor, *, num_threads: int) -> None:
        config = model.config
        self.model, self._num_threads = model, min(num_threads, numba.config.NUMBA_NUM_THREADS)
        self._block_size = cache.shape[4]
        self._group = config.num_heads // config.num_kv_heads
        self._tile_tokens = cpu_attention.tile_rows(self._group) // self._group
        self._cache = _array(cache)
        self._cos, self._sin = model.cos.numpy(), model.sin.numpy()
        self._scale = config.head_dim**-0.5
        self._eps = np.float32(config.rms_norm_eps)
        norms = [norm for layer in model.layers for norm in (layer.input_norm, layer.post_norm)]
        self._weights = {id(norm): norm.float().numpy() for norm in (*norms, model.norm)}
        heads = (config.num_heads, config.num_kv_heads)
        self._qk_norms = [
            None
            if layer.qk_norm is None
            else layer.qk_norm.float().repeat_interleave(torch.tensor(heads), dim=0).numpy()
            for layer in model.layers
        ]
        """By layer: [num_heads + num_kv_heads, head_dim]"""
        self._work = np.zeros(
            (self._num_threads, cpu_attention.scratch_elements(config.head_dim, self._group)), dtype=np.float32
        )
        self._attention = cpu_attention.make_attention(
            Shape(
                head_dim=config.head_dim,
                group=self._group,
                block_size=self._block_size,
                bf16=model.dtype is torch.bfloat16,
                rotary_dim=2 * model.cos.shape[1],
            )
        )
        self._head = cpu_head.make_head(config.hidden_size) if _has_head(model) else None
        self._grow(16)
        with one_compiles(cpu_attention.SOURCES):
            self._compile()

    def begin(self, plan: StepPlan) -> None:
        numba.set_num_threads(self._num_threads)
        num_tokens = len(plan.token_ids)
        if num_tokens > len(self._attended):
            self._grow(num_tokens)
        self._plan = plan
        self._items, self._bins = work_items(plan, self.model.config.num_kv_heads, self._tile_tokens, self._num_threads)

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = self._normed[: len(h)]
        cpu_kernels.norm(h.numpy(), self._weights[id(weight)], self._eps, _array(x))
        return x

    def add_norm(self, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = self._normed[: len(h)]
        cpu_kernels.add_norm(h.numpy(), _array(delta), self._weights[id(weight)], self._eps, _array(x))
        return x

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        plan, out = self._plan, self._attended[: len(qkv)]
        qk_norm = self._qk_norms[layer]
        if qk_norm is not None:
            cpu_kernels.norm_heads(_array(qkv), qk_norm, self._eps)
        self._attention(
            qkv=_array(qkv), layer=layer, cache=self._cache, q=self._q, out=_array(out), positions=plan.positions,
            slots=plan.slots, cos=self._cos, sin=self._sin, items=self._items, bins=self._bins,
            tables=plan.block_tables, work=self._work, window=0, scale=self._scale,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = self._gated[: len(gate_up)]
        cpu_kernels.silu_mul(_array(gate_up), _array(out))
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        lm_head = self.model.lm_head
        if self._head is None:
            return float32_logits(x, lm_head)
        out = torch.empty(len(x), len(lm_head))
        self._head(_array(x), _array(lm_head), out.numpy(), self._num_threads)
        return out

    def _grow(self, num_tokens: int) -> None:
        """Buffers for steps of up to `num_tokens`."""
        config, dtype = self.model.config, self.model.dtype
        heads = config.num_heads * config.head_dim
        self._normed = torch.zeros(num_tokens, config.hidden_size, dtype=dtype)
        self._attended = torch.zeros(num_tokens, heads, dtype=dtype)
        self._gated = torch.zeros(num_tokens, config.intermediate_size, dtype=dtype)
        self._q = np.zeros((num_tokens, heads), dtype=np.float32)

    def _compile(self) -> None:
        """Calls every kernel once, with no token for attention so that the cache stays untouched."""
        config, dtype = self.model.config, self.model.dtype
        zero = np.zeros(0, dtype=np.int64)
        self._plan = StepPlan(
            token_ids=zero, positions=zero, slots=zero, starts=np.zeros(1, dtype=np.int64), contexts=zero,
            block_tables=np.zeros((1, 1), dtype=np.int32), sampled=zero, num_drafts=zero, sampled_tokens=zero,
        )  # fmt: skip
        self._items, self._bins = np.zeros((0, 5), dtype=np.int64), np.zeros(2, dtype=np.int64)
        numba.set_num_threads(self._num_threads)
        self.attention(0, torch.zeros(0, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, dtype=dtype))
        h = torch.zeros(1, config.hidden_size)
        self.norm(h, self.model.norm)
        self.add_norm(h, torch.zeros(1, config.hidden_size, dtype=dtype), self.model.norm)
        self.silu_mul(torch.zeros(1, 2 * config.intermediate_size, dtype=dtype))
        self.logits(torch.zeros(1, config.hidden_size, dtype=dtype))


def _has_head(model: LlamaModel) -> bool:
    """Whether the compiled head takes it; torch's own float32 linear is as good."""
    return model.dtype is torch.bfloat16 and model.config.hidden_size % cpu_head.TERMS == 0


def work_items(
    plan: StepPlan, num_kv_heads: int, tile_tokens: int, num_bins: int, window: int = 0
) -> tuple[Int64, Int64]:
    """Attention's work as the kernel reads it: items [N, 5] in bin order, and the bounds of `num_bins` bins of about
    equal cost.

    An item is up to `tile_tokens` tokens of one sequence for one KV head; its cost is taken as tokens * keys, plus a
    little. The keys are those that its last token sees, and in a `window` those that its other tokens see before them.
    """
    scheduled = np.diff(plan.starts)
    tiles = -(-scheduled // tile_tokens)
    sequence = np.repeat(np.arange(len(scheduled)), tiles)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    offset = index * tile_tokens
    num = np.minimum(tile_tokens, scheduled[sequence] - offset)
    position = (plan.contexts - scheduled)[sequence] + offset
    one_head = np.stack([plan.starts[sequence] + offset, num, position, sequence, np.zeros_like(num)], axis=1)
    items = np.repeat(one_head, num_kv_heads, axis=0)
    items[:, 4] = np.tile(np.arange(num_kv_heads), len(one_head))
    keys = items[:, 2] + items[:, 1]
    if window:
        keys = np.minimum(keys, items[:, 1] + window - 1)
    order = np.argsort(-(items[:, 1] + 3) * keys, kind="stable")
    # dealt out in snake order: 0 1 2 2 1 0 0 1 2 ...
    turn = np.arange(len(items)) % (2 * num_bins)
    bin_of = np.minimum(turn, 2 * num_bins - 1 - turn)
    by_bin = np.argsort(bin_of, kind="stable")
    bounds = np.searchsorted(bin_of[by_bin], np.arange(num_bins + 1))
    return np.ascontiguousarray(items[order[by_bin]]), bounds.astype(np.int64)


def _array(tensor: torch.Tensor) -> Stored:
    """The tensor's memory as the kernels take it: bf16 as uint16, float32 as it is."""
    array: Stored = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
