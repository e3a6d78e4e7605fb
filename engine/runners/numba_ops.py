"""`Ops` on a CPU by compiled kernels, in place over the paged cache: no copy of K or V, no allocation per layer."""

import numba
import numpy as np
import torch

from engine.models.config import Activation
from engine.models.decoder import Decoder, float32_logits
from engine.models.ops import Attention
from engine.runners import cpu_attention, cpu_elements, cpu_head, cpu_kernels
from engine.runners.cpu_attention import Shape
from engine.runners.cpu_elements import Stored
from engine.runners.cpu_matmul import KINDS
from engine.runners.paged_cache import LAYOUT
from engine.runners.step_plan import StepPlan
from jit.kernel_cache import one_compiles
from protocol.arrays import Int64

_STORED = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_NO_WORK = np.zeros((0, 5), dtype=np.int64), np.zeros(2, dtype=np.int64)
"""Attention's items and bins where keys and values are only to be cached."""


def supports(model: Decoder, block_size: int) -> bool:
    """Whether the kernels know the model's dtype on this CPU, and its shapes fill whole vectors."""
    known = cpu_elements.HAS_HALF or model.dtype is not torch.float16
    return known and cpu_attention.supports(model.config.head_dim, block_size)


class NumbaOps:
    """`cache` as in `TorchOps`. Compiles its kernels when made (seconds the first time, then from disk); `num_threads`
    are torch's own.
    """

    def __init__(self, model: Decoder, cache: torch.Tensor, *, num_threads: int) -> None:
        config = model.config
        self.model, self._num_threads = model, min(num_threads, numba.config.NUMBA_NUM_THREADS)
        self._block_size = cache.shape[4]
        self._group = config.num_heads // config.num_kv_heads
        self._tile_tokens = cpu_attention.tile_rows(self._group) // self._group
        self._cache = _array(cache.permute(LAYOUT))
        self._eps = np.float32(config.rms_norm_eps)
        heads = torch.tensor((config.num_heads, config.num_kv_heads))
        self._qk_norms = [
            None if norm is None else norm.repeat_interleave(heads, dim=0).numpy()
            for norm in (layer.attention.qk_norm for layer in model.layers)
        ]
        """By layer: [num_heads + num_kv_heads, head_dim]"""
        self._work = np.zeros(
            (self._num_threads, cpu_attention.scratch_elements(config.head_dim, self._group)), dtype=np.float32
        )
        self._attentions = [cpu_attention.make_attention(self._shape(layer.attention)) for layer in model.layers]
        self._head = cpu_head.make_head(config.hidden_size, KINDS[model.dtype]) if _has_head(model) else None
        self._work_items: dict[int, tuple[Int64, Int64]] = {}
        """By window, of the step: attention's items and bins."""
        self._grow(16)
        with one_compiles(cpu_attention.SOURCES):
            self._compile()

    def begin(self, plan: StepPlan) -> None:
        numba.set_num_threads(self._num_threads)
        num_tokens = len(plan.token_ids)
        if num_tokens > len(self._attended):
            self._grow(num_tokens)
        self._plan = plan
        self._work_items = {}

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = self._normed[: len(h)]
        cpu_kernels.norm(h.numpy(), weight.numpy(), self._eps, _array(x))
        return x

    def add_norm(
        self, h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, delta_norm: torch.Tensor | None
    ) -> torch.Tensor:
        x = self._normed[: len(h)]
        if delta_norm is not None:
            cpu_kernels.norm_heads(_array(delta), delta_norm[None].numpy(), self._eps)  # each row is one head
        cpu_kernels.add_norm(h.numpy(), _array(delta), weight.numpy(), self._eps, _array(x))
        return x

    def attention(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        window = attention.window
        if window not in self._work_items:
            num_kv_heads = self.model.config.num_kv_heads
            self._work_items[window] = work_items(
                self._plan, num_kv_heads, self._tile_tokens, self._num_threads, window
            )
        return self._attend(attention, qkv, *self._work_items[window])

    def write_kv(self, attention: Attention, qkv: torch.Tensor) -> None:
        self._attend(attention, qkv, *_NO_WORK)

    def _attend(self, attention: Attention, qkv: torch.Tensor, items: Int64, bins: Int64) -> torch.Tensor:
        plan, out = self._plan, self._attended[: len(qkv)]
        qk_norm = self._qk_norms[attention.layer]
        if qk_norm is not None:
            cpu_kernels.norm_heads(_array(qkv), qk_norm, self._eps)
        self._attentions[attention.layer](
            qkv=_array(qkv), layer=attention.layer, cache=self._cache, q=self._q, out=_array(out),
            positions=plan.positions, slots=plan.slots, cos=attention.cos.numpy(), sin=attention.sin.numpy(),
            items=items, bins=bins, tables=plan.block_tables, work=self._work, window=attention.window,
            scale=attention.scale,
        )  # fmt: skip
        return out

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        out = self._gated[: len(gate_up)]
        gated = cpu_kernels.gelu_tanh_mul if activation == "gelu_tanh" else cpu_kernels.silu_mul
        gated(_array(gate_up), _array(out))
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        lm_head = self.model.lm_head
        if self._head is None:
            return float32_logits(x, lm_head)
        out = torch.empty(len(x), len(lm_head))
        self._head(_array(x), _array(lm_head), np.empty(x.shape, np.float32), out.numpy(), self._num_threads)
        return out

    def _shape(self, attention: Attention) -> Shape:
        return Shape(
            head_dim=self.model.config.head_dim,
            group=self._group,
            block_size=self._block_size,
            kind=KINDS[self.model.dtype],
            rotary_dim=2 * attention.cos.shape[1],
        )

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
        numba.set_num_threads(self._num_threads)
        qkv = torch.zeros(0, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, dtype=dtype)
        for layer in self.model.layers:
            self.write_kv(layer.attention, qkv)
        h = torch.zeros(1, config.hidden_size)
        self.norm(h, self.model.norm)
        delta, delta_norm = torch.zeros(1, config.hidden_size, dtype=dtype), self.model.layers[0].down_norm
        self.add_norm(h, delta, self.model.norm, delta_norm)
        self.gate(torch.zeros(1, 2 * config.intermediate_size, dtype=dtype), config.activation)
        self.logits(torch.zeros(1, config.hidden_size, dtype=dtype))


def _has_head(model: Decoder) -> bool:
    """Whether the compiled head takes it; torch's own float32 linear is as good."""
    return model.dtype is not torch.float32 and model.config.hidden_size % cpu_head.TERMS == 0


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
    """The tensor's memory as the kernels take it."""
    array: Stored = (tensor if tensor.dtype is torch.float32 else tensor.view(_STORED[tensor.dtype])).numpy()
    return array
